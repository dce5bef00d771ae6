"""The cores near a GPU, as the system lists them."""

from __future__ import annotations

import pytest

from offload.device.cuda import cores_in


@pytest.mark.parametrize(
    ("text", "cores"),
    [("", set()), ("\n", set()), ("3", {3}), ("0-3,8\n", {0, 1, 2, 3, 8}), ("0-1,96-97", {0, 1, 96, 97})],
)
def test_linuxs_list_of_cores_is_read(text: str, cores: set[int]) -> None:
    assert cores_in(text) == cores

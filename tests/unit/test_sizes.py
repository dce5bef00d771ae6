"""Sizes as people write them, read exactly."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from offload.config import OffloadConfig
from offload.sizes import enough_text, optional_bytes, parse_bytes

GIB = 1024**3


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GB", 8 * 10**9),
        ("8GiB", 8 * GIB),
        ("500 MB", 500 * 10**6),
        ("1.5 GiB", GIB + GIB // 2),
        ("0.1 GB", 10**8),  # exact, which 0.1 * 1e9 is by luck only
        ("4.35 kB", 4350),  # 4.35 * 1000 is 4349.999... as a float
        (" 2 tib ", 2 * 1024**4),
        ("3TB", 3 * 10**12),
        ("7 KiB", 7 * 1024),
        ("12 b", 12),
        ("0.3 KiB", 307),  # 307.2, rounded down
        (4096, 4096),
        (0, 0),
        (22e9, 22 * 10**9),
        (0.9 * 80e9 + 0.5, 72 * 10**9),
        (np.int64(10**9), 10**9),
        ("1e9", 10**9),
        ("2.2E+10", 22 * 10**9),
        ("22e9 B", 22 * 10**9),
        ("22G", 22 * 10**9),
        ("1.5m", 1_500_000),
        ("8Gi", 8 * GIB),
        ("8000000000", 8 * 10**9),
    ],
)
def test_a_size_is_a_number_of_bytes_or_a_number_with_a_unit(text: str | float, nbytes: int) -> None:
    assert parse_bytes(text, name="device_limit") == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1_152_000, "1.16 MB"), (1_234_567_890_123, "1234.57 GB")],
)
def test_what_a_message_says_to_give_is_enough_and_is_taken(nbytes: int, text: str) -> None:
    """'1.15 MB' for 1,152,000 bytes was given, and the message came again with the same number."""
    assert enough_text(nbytes) == text
    assert parse_bytes(text, name="host_limit") >= nbytes


@pytest.mark.parametrize(("text", "nbytes"), [("60%", 84), ("12.5 %", 17), ("0%", 0), ("100%", 141)])
def test_a_share_is_of_what_is_known_and_rounded_down(text: str, nbytes: int) -> None:
    assert parse_bytes(text, name="device_limit", of_bytes=141) == nbytes


@pytest.mark.parametrize(
    "value",
    [
        *(
            "8",
            "999999",
            "GB",
            "",
            "-8GB",
            "1e999GB",
            "1e-9",
            "8 bytes",
            "1,000 B",
            "٨GB",
            "inf",
            "1_000_000",
        ),
        *(8.0, 0.5, math.inf, math.nan, -1e9, True, -1, b"8GB", [8], 1j),
    ],
)
def test_what_is_no_size_is_refused_with_the_field_the_value_and_examples(value: object) -> None:
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"device_limit is {value!r}, must be a whole number of bytes, 0 or more, or a number with a "
            "unit, as in '8GB' (8e9 bytes), '8GiB' (8 * 1024**3) or '500 MB'"
        )
        + "$",
    ):
        parse_bytes(value, name="device_limit")


def test_the_message_offers_a_share_and_none_where_they_are_allowed() -> None:
    with pytest.raises(ValueError, match=r"or '500 MB', or a share, as in '60%', or None$"):
        optional_bytes("much", name="device_limit", of_bytes=100)
    assert optional_bytes(None, name="device_limit") is None


def test_less_than_the_least_is_refused_also_as_text() -> None:
    with pytest.raises(ValueError, match=r"piece_bytes is '0\.4 B', must be a whole number of bytes, 1 or"):
        parse_bytes("0.4 B", name="piece_bytes", least=1)


def test_a_share_of_more_than_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device_limit is '101%', must be a share between '0%' and '100%'"):
        parse_bytes("101%", name="device_limit", of_bytes=100)


def test_a_config_holds_whole_numbers_for_the_text_that_it_was_given() -> None:
    config = OffloadConfig(device_limit_bytes="8GB", host_reserve_bytes="1 GiB", piece_bytes="16MiB")
    assert config.device_limit_bytes == 8 * 10**9
    assert config.host_reserve_bytes == GIB
    assert config.piece_bytes == 16 * 1024**2
    assert config == OffloadConfig(
        device_limit_bytes=8 * 10**9, host_reserve_bytes=GIB, piece_bytes=16 * 1024**2
    )


@pytest.mark.parametrize("field", ["device_limit_bytes", "host_limit_bytes", "host_reserve_bytes"])
def test_a_config_knows_no_device_and_says_where_a_share_can_be_given(field: str) -> None:
    given: dict[str, Any] = {field: "60%"}
    with pytest.raises(
        ValueError, match=rf"{field} is '60%', but the size that it is a share of is not known here; .*apply"
    ):
        OffloadConfig(**given)

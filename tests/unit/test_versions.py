"""A torch that the tests do not run with is said when the package is imported, and refused by nothing."""

from __future__ import annotations

import runpy

import pytest
import torch

import offload


@pytest.mark.parametrize(
    ("version", "is_said"),
    [("2.10.2", True), ("2.11.0+cu130", False), ("2.15.3", False), ("2.16.0a0+g1", True)],
)
def test_a_torch_outside_of_the_tested_ones_is_said_at_import(
    version: str, is_said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """setup.py had an upper bound instead, which two releases of torch had outrun."""
    monkeypatch.setattr(torch, "__version__", version)
    runpy.run_path(str(offload.__file__))  # as the import does
    said = (
        f"torch 2.11 to 2.15 are tested, and this is {version}: take a newer offload if there is one, "
        "or pip install 'torch>=2.11,<2.16'"
    )
    assert caplog.messages == [said] * is_said

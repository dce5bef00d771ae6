"""What a user may set: every field is checked before anything is built, and the message says what was found
and what is allowed."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest

from offload.config import OffloadConfig

BYTES = (
    "delta_offload_bytes_across_pp_ranks",
    "device_limit_bytes",
    "max_spilling_bytes",
    "max_restoring_bytes",
    "host_limit_bytes",
)
OPTIONAL = (
    "device_limit_bytes",
    "max_spilling_bytes",
    "max_restoring_bytes",
    "host_limit_bytes",
    "max_inflight_offloads",
)
COUNTS = ("min_offloaded_tensor_size", "pp_rank", "max_inflight_offloads", "host_reserve_bytes", *BYTES)


def test_a_tensor_below_a_mebi_of_elements_stays_unless_asked_otherwise() -> None:
    assert OffloadConfig().min_offloaded_tensor_size == 1024 * 1024


REFUSED: list[tuple[str, object, str]] = [
    *((field, value, "must be") for field in COUNTS for value in (-1, 1.0, "1", True, math.inf)),
    *(("piece_bytes", value, "must be a whole number of bytes, 1 or more") for value in (0, -1, 0.5, None)),
    *((field, None, "must be") for field in sorted({*COUNTS} - {*OPTIONAL})),
    *(
        ("activation_offload_fraction", value, "must be a number between 0 and 1")
        for value in (-0.01, 1.01, math.nan, math.inf, "half", True, 2, None)
    ),
]


@pytest.mark.req("S2-104")
@pytest.mark.parametrize(("field", "value", "said"), REFUSED)
def test_what_a_field_cannot_be_is_refused_by_name(field: str, value: object, said: str) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=f"{field} is {re.escape(repr(value))}, {said}"):
        OffloadConfig(**fields)


@pytest.mark.parametrize("field", COUNTS)
def test_zero_is_allowed_for_every_count(field: str) -> None:
    fields: dict[str, Any] = {field: 0}
    assert getattr(OffloadConfig(**fields), field) == 0


@pytest.mark.parametrize("field", OPTIONAL)
def test_none_means_derived_where_a_value_can_be_derived(field: str) -> None:
    fields: dict[str, Any] = {field: None}
    assert getattr(OffloadConfig(**fields), field) is None


@pytest.mark.req("S2-104")
@pytest.mark.parametrize("value", [0, 0.0, 0.5, 1, 1.0])
def test_a_fraction_may_be_any_number_from_zero_to_one(value: float) -> None:
    assert OffloadConfig(activation_offload_fraction=value).activation_offload_fraction == value


def test_reserving_more_than_the_limit_names_both_numbers() -> None:
    with pytest.raises(
        ValueError,
        match=r"host_reserve_bytes is 4,097 but host_limit_bytes only 4,096; raise the limit or reserve less",
    ):
        OffloadConfig(host_reserve_bytes=4097, host_limit_bytes=4096)
    assert OffloadConfig(host_reserve_bytes=4096, host_limit_bytes=4096).host_reserve_bytes == 4096


def test_a_config_cannot_change_after_it_was_checked() -> None:
    config = OffloadConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.piece_bytes = 0  # type: ignore[misc]


def test_fields_are_given_by_name_only() -> None:
    with pytest.raises(TypeError):
        OffloadConfig(1024)  # type: ignore[misc]


def test_the_types_of_the_constructor_name_each_field_once() -> None:
    tree = ast.parse(Path(inspect.getfile(OffloadConfig)).read_text())
    (constructor,) = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    named = [argument.arg for argument in constructor.args.kwonlyargs]
    assert named == [field.name for field in dataclasses.fields(OffloadConfig)]

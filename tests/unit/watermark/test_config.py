"""What the watermark runtime can be told: the source system's names and defaults, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload import ActivationConfig


@pytest.mark.req("S0-54", "S0-55", "S0-56", "S0-57", "S0-58", "S0-59", "S0-60", "S0-61", "S0-62", "S0-63")
def test_the_defaults_are_the_sources() -> None:
    config = ActivationConfig()
    assert config.enabled
    assert (config.vram_high_watermark_mb, config.vram_low_watermark_mb) == (20000, 16000)
    assert config.pinned_pool_classes_mb == (1, 4, 16, 64, 256)
    assert config.slabs_per_class == (512, 2, 2, 2, 2)
    assert (config.max_inflight_d2h, config.max_inflight_h2d) == (1, 1)
    assert not config.debug_checksums
    assert (config.telemetry_enabled, config.telemetry_file) == (True, "activation_telemetry.jsonl")
    assert config.recompute_threshold_bytes == 0


def test_a_mark_in_mb_counts_mib() -> None:
    config = ActivationConfig(vram_high_watermark_mb=3, vram_low_watermark_mb=1.5)
    assert (config.high_bytes, config.low_bytes) == (3 << 20, 3 << 19)


@pytest.mark.req("S0-55")
def test_a_low_mark_above_the_high_one_is_refused_and_equal_marks_are_not() -> None:
    with pytest.raises(ValueError, match=r"vram_high_watermark_mb is 5 and vram_low_watermark_mb 6: .*lower"):
        ActivationConfig(vram_high_watermark_mb=5, vram_low_watermark_mb=6)
    assert ActivationConfig(vram_high_watermark_mb=5, vram_low_watermark_mb=5).low_bytes == 5 << 20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"order": "oldest"}, "order is 'oldest', must be one of 'forecast', 'reactive'"),
        ({"vram_high_watermark_mb": 0}, "vram_high_watermark_mb is 0, must be a number of MiB above 0"),
        ({"vram_low_watermark_mb": "8GB"}, "vram_low_watermark_mb is '8GB', must be a number of MiB"),
        ({"max_inflight_d2h": -1}, "max_inflight_d2h is -1, must be a whole number, 0 or more"),
        ({"max_inflight_h2d": 0}, "max_inflight_h2d is 0, must be a whole number, 1 or more"),
        ({"recompute_threshold_bytes": 1.5}, "recompute_threshold_bytes is 1.5, must be a whole number"),
        ({"min_numel": -1}, "min_numel is -1, must be a whole number, 0 or more"),
        ({"vram_high_watermark_mb": float("inf")}, "vram_high_watermark_mb is inf, must be a number of MiB"),
        ({"restore_ahead": "off"}, "restore_ahead is 'off', must be True or False"),
        ({"telemetry_file": ""}, "telemetry_file is '', must be the path of a file, as text"),
        ({"pinned_pool_classes_mb": 5}, "pinned_pool_classes_mb=5 must be whole numbers"),
        (
            {"pinned_pool_classes_mb": (4, 1), "slabs_per_class": 1},
            r"pinned_pool_classes_mb=\(4, 1\) must be",
        ),
        ({"slabs_per_class": (1, 2)}, "slabs_per_class has 2 counts for 5 class sizes"),
        ({"slabs_per_class": True}, "slabs_per_class=True must be whole numbers"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActivationConfig(**fields)


def file_of(**fields: Any) -> dict[str, Any]:
    return {"memory": {"strategy": "stagehand", "stagehand": {"activation_stagehand": fields}}}


@pytest.mark.req("S0-64")
def test_the_sources_json_file_loads_and_lists_count_as_tuples(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    found = file_of(enabled=False, vram_high_watermark_mb=30000, slabs_per_class=[8, 1])
    found["memory"]["stagehand"]["activation_stagehand"]["pinned_pool_classes_mb"] = [1, 4]
    path.write_text(json.dumps(found))
    config = ActivationConfig.load(path)
    assert config == ActivationConfig.load(found)
    assert config == ActivationConfig(
        enabled=False, vram_high_watermark_mb=30000, slabs_per_class=(8, 1), pinned_pool_classes_mb=(1, 4)
    )
    assert ActivationConfig.load(file_of(slabs_per_class=3)).slabs_per_class == 3


PRINTED = {
    "enabled": True,
    "vram_high_watermark_mb": 16000,
    "vram_low_watermark_mb": 12000,
    "pinned_pool_classes_mb": [1, 4, 16, 64, 256],
    "slabs_per_class": [512, 2, 2, 2, 2],
    "max_inflight_d2h": 1,
    "max_inflight_h2d": 1,
    "debug_checksums": False,
    "telemetry_enabled": True,
    "telemetry_file": "activation_telemetry.jsonl",
    "recompute_threshold_bytes": 0,
}
"""The values are the defaults, so only that they are given tells that a fixed pool is asked for."""


@pytest.mark.req("S0-56", "S0-57", "S0-58", "S0-59", "S0-64")
@pytest.mark.parametrize(
    "name", ["pinned_pool_classes_mb", "slabs_per_class", "max_inflight_d2h", "max_inflight_h2d"]
)
def test_a_key_of_the_fixed_pool_chooses_the_order_that_reads_it_or_is_an_error(name: str) -> None:
    """The source's own file loaded with order="forecast", which has no pool and no cap: four keys were
    accepted, and nothing read them."""
    value = PRINTED[name]
    assert ActivationConfig().order == "forecast"
    assert ActivationConfig.load(file_of(**PRINTED)).order == "reactive"
    assert ActivationConfig.load(file_of(**{name: value})).order == "reactive"
    config = ActivationConfig(**{name: value})
    assert config.order == "reactive"
    assert replace(config, min_numel=5).order == "reactive"
    assert replace(ActivationConfig(), min_numel=5).order == "forecast"
    with pytest.raises(ValueError, match=rf"{name} beside order='forecast', .* give order=\"reactive\""):
        ActivationConfig.load(file_of(**{name: value, "order": "forecast"}))
    with pytest.raises(ValueError, match="order is 'oldest', must be one of"):
        ActivationConfig.load(file_of(**{name: value, "order": "oldest"}))
    other = 7 if isinstance(value, int) else (2, 4, 8, 16, 32)
    with pytest.raises(ValueError, match=f"{name} beside order='forecast'"):
        replace(ActivationConfig(), **{name: other})


@pytest.mark.req("S0-64")
@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "the config has no memory; the fields .* in memory.stagehand.activation_stagehand"),
        ({"memory": {"stagehand": {}}}, "has no memory.stagehand.activation_stagehand"),
        ({"memory": {"strategy": "none"}}, "memory.strategy 'none', must be 'stagehand'"),
        ({"memory": []}, r"has memory \[\], must be an object of named fields"),
        (
            {"memory": {"stagehand": {"activation_stagehand": 5}}},
            "has memory.stagehand.activation_stagehand 5, must be an object",
        ),
        (file_of(vram_high_mb=1), "fields that are not known: vram_high_mb; known are .*vram_high_waterm"),
    ],
)
def test_a_file_of_another_shape_is_refused(found: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActivationConfig.load(found)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config.json is no JSON: Expecting property name"):
        ActivationConfig.load(path)

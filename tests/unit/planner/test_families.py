"""Blocks of many families at every level of the menu that their own profile makes."""

from __future__ import annotations

import copy

import pytest

from offload import PipelineOffloadManager
from tests.unit.checkpoint.regions import assert_bits
from tests.unit.planner.families import FAMILIES, build, profiled, run, run_plain

Manager = PipelineOffloadManager


@pytest.mark.parametrize("family", FAMILIES)
def test_every_level_has_the_bits_the_bytes_and_the_calls_that_the_profile_says(
    family: str, manager: Manager
) -> None:
    module, args, kwargs = build(family)
    start = copy.deepcopy(module.state_dict())
    expected = run_plain(module, args, kwargs)

    module.load_state_dict(start)
    profile, observed = profiled(manager, module, args, kwargs)
    assert_bits(expected, observed.values)
    assert observed.again == sum(call.again for call in profile.calls)
    for level, keep in zip(profile.menu, profile.keeps, strict=True):
        module.load_state_dict(start)
        found = run(manager, module, args, kwargs, keep)
        assert_bits(expected, found.values)
        assert found.saved_bytes == level.saved_bytes, level
        kept = keep if keep is not None else ()
        again = [call for call in profile.calls if call.again and (call.operator, call.number) not in kept]
        assert found.again == (0 if keep is None else len(again)), level

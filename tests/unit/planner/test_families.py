"""Blocks of many families at every level of the menu that their own profile makes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import PipelineOffloadManager, init_chunk_handler, step_end
from offload.checkpoint.selective import contexts_for
from offload.planner.profiler import BlockProfiler
from tests.unit.checkpoint.recomputed import recomputed
from tests.unit.checkpoint.regions import assert_bits
from tests.unit.groups.stack import build_manager, installed
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
    assert observed.saved_bytes == profile.plain_bytes
    for level, keep in zip(profile.menu, profile.keeps, strict=True):
        module.load_state_dict(start)
        found = run(manager, module, args, kwargs, keep)
        assert_bits(expected, found.values)
        assert found.saved_bytes == level.saved_bytes, level
        kept = keep if keep is not None else ()
        again = [call for call in profile.calls if call.again and (call.operator, call.number) not in kept]
        assert found.again == (0 if keep is None else len(again)), level


@pytest.mark.parametrize("family", ["conv", "dropout", "writes", "custom function", "vit"])
def test_every_call_that_may_be_kept_may_be_kept_alone_and_with_all_others(family: str) -> None:
    with installed(build_manager("random", max_spilling_bytes=1)) as manager:
        module, args, kwargs = build(family)
        start = copy.deepcopy(module.state_dict())
        expected = run_plain(module, args, kwargs)
        module.load_state_dict(start)
        profile, _ = profiled(manager, module, args, kwargs)
        nbytes = {
            (call.operator, call.number): call.nbytes
            for call in profile.calls
            if call.again and not call.why_not
        }
        assert nbytes
        for keep in (*({call} for call in nbytes), set(nbytes)):
            module.load_state_dict(start)
            found = run(manager, module, args, kwargs, keep)
            assert_bits(expected, found.values)
            assert found.saved_bytes == profile.input_bytes + sum(nbytes[call] for call in keep)


def twice(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Two forwards under one autocast, the second of which finds the casts of all weights; two backwards."""
    torch.manual_seed(7)
    x = args[0].clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [module(x * factor, *args[1:], **kwargs) for factor in (1.0, 2.0)]
    loss = sum(output.float().square().mean() for output in outputs)
    assert isinstance(loss, Tensor)
    values = [output.detach() for output in outputs]
    for _ in range(2):
        loss.backward(retain_graph=True)
        found = (x.grad, *(parameter.grad for parameter in module.parameters()))
        values += [grad for grad in found if grad is not None]
        x.grad = None
        module.zero_grad(set_to_none=True)
    return [*values, *(buffer.clone() for buffer in module.buffers())]


@pytest.mark.parametrize("family", ["gpt", "conv", "writes", "vit"])
def test_under_autocast_every_level_has_the_bits_in_the_second_forward_and_the_second_backward(
    family: str, manager: Manager
) -> None:
    module, args, kwargs = build(family)
    start = copy.deepcopy(module.state_dict())
    expected = twice(module, args, kwargs)

    profilers = [BlockProfiler(module, manager.engine, args, kwargs, min_elements=1) for _ in range(2)]
    begin, end = iter(profilers), iter(profilers)
    hooks = [
        module.register_forward_pre_hook(lambda *_: next(begin).begin()),
        module.register_forward_hook(lambda *_: next(end).end(failed=False)),
    ]
    module.load_state_dict(start)
    assert_bits(expected, twice(module, args, kwargs))
    for hook in hooks:
        hook.remove()
    for profiler in profilers:
        for keep in profiler.profile().keeps[1:]:
            module.load_state_dict(start)
            init_chunk_handler(None, None, 1)
            with recomputed([module], manager, contexts_for(keep, "kept", lambda: manager) if keep else None):
                found = twice(module, args, kwargs)
            step_end()
            assert_bits(expected, found)

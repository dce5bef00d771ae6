"""Forwards that raise, models that are copied or dropped, `remove`, and what `offload.apply` refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import PipelineOffloadManager
from tests.unit.modules.training import ROWS, WIDTH, Model, build, equal, seeded, train

MODES: tuple[Any, ...] = ("groups", True, "legacy", "disk", "hidden_states", "selective")


class BrokenError(RuntimeError):
    pass


@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt])
@pytest.mark.parametrize("mode", MODES)
def test_a_forward_that_raises_leaves_nothing_open(
    mode: Any, error: type[BaseException], manager: PipelineOffloadManager
) -> None:
    def interrupted(model: Model) -> list[Tensor]:
        hook = model.layers[1].fc2.register_forward_hook(_raise)
        with pytest.raises(error):
            model(torch.ones(ROWS, WIDTH))
        hook.remove()
        return train(model)

    def _raise(*_: object) -> None:
        raise error

    plain = interrupted(build())
    model = build()
    offload.apply(model, mode, min_numel=1)
    assert equal(interrupted(model), plain)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert manager.stats.spill_bytes > 0


def test_remove_puts_the_model_back_and_leaves_a_pending_backward_right() -> None:
    plain, model = build(), build()
    handle = offload.apply(model, min_numel=1)
    results = []
    for each in (plain, model):
        with seeded(1):
            loss = each(torch.ones(ROWS, WIDTH)).sum()
        if each is model:
            handle.remove()
            handle.remove()
        loss.backward()
        results.append([parameter.grad for parameter in each.parameters()])
    assert equal(results[1], results[0])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert "removed" in repr(handle)
    with pytest.raises(TypeError, match="cannot be pickled or copied: it holds the hooks of a model of this"):
        copy.copy(handle)
    again = offload.apply(model, min_numel=1)
    assert len(again.blocks) == 3


def test_a_model_is_scripted_once_its_hooks_are_gone() -> None:
    """torch's error was that a `_Hook` has no `__name__`."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    handle = offload.apply(model, min_numel=1)
    with pytest.raises(AttributeError, match=r"call remove\(\) on the handle"):
        torch.jit.script(model)
    handle.remove()
    optimizer = offload.HybridDeviceOptimizer(model.parameters(), 1.0, overlap="forward", model=model)
    with pytest.raises(AttributeError, match=r"or close\(\) on the optimizer"):
        torch.jit.script(model)
    optimizer.close()
    x = torch.ones(ROWS, WIDTH)
    assert torch.equal(torch.jit.script(model)(x), model(x))


@pytest.mark.parametrize("mode", ["groups", "hidden_states", "selective"])
def test_after_remove_no_host_memory_is_lent_though_no_step_has_ended(
    mode: Any, manager: PipelineOffloadManager
) -> None:
    handle = offload.apply(model := build(), mode, min_numel=1)
    model(torch.ones(ROWS, WIDTH, requires_grad=True)).sum().backward()
    assert manager.engine.arena.stats().lent_bytes > 0
    handle.remove()
    assert manager.engine.arena.stats().lent_bytes == 0


def test_a_copy_of_the_model_is_as_it_was_before(manager: PipelineOffloadManager) -> None:
    model = build()
    keys = list(model.state_dict())
    model.call = torch.nn.Module.__call__  # a function that pickle finds
    offload.apply(model, min_numel=1)
    assert list(model.state_dict()) == keys
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        train(copied)
        assert manager.stats.saved == 0
        assert not offload.apply(copied, min_numel=1).groups.keys() ^ {"layers"}


def test_a_model_that_is_dropped_is_freed_with_its_hooks() -> None:
    gc.disable()
    try:
        model = build()
        handle = offload.apply(model, min_numel=1)
        train(model)
        alive = weakref.ref(model)
        del model
        assert alive() is None
    finally:
        gc.enable()
    handle.remove()


@pytest.mark.parametrize(("mode", "options"), [("groups", {"min_numel": 1}), ("watermark", {"high": "8GB"})])
def test_what_is_applied_already_is_refused(mode: Any, options: dict[str, Any]) -> None:
    model = build()
    handle = offload.apply(model, mode, **options)
    with pytest.raises(ValueError, match=rf"is offloaded already, by <offload.apply\(Model, mode='{mode}'\)"):
        offload.apply(model, mode, **options)
    with pytest.raises(ValueError, match=r"a mode that takes every saved tensor goes with no other one"):
        offload.apply(nn.Sequential(model), True)
    handle.remove()
    assert offload.apply(model, True).blocks == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "disc"}, r"mode is 'disc', must be one of 'off', False, True, 'groups'"),
        ({"mode": True, "blocks": "layers.*"}, r"blocks='layers.\*' with mode=True, which takes every saved"),
        ({"blocks": 3}, "blocks is 3, must be a pattern such as"),
        ({"blocks": "zzz.*"}, r"'zzz.\*' matches no module of Model; no name is like it\. Its children are "),
        ({"blocks": "layer.*"}, r"'layer.\*' matches no module of Model; the nearest names are layers"),
        ({"min_numel": -1}, r"min_numel is -1, must be a whole number of elements"),
        ({"device_limit": 8}, r"device_limit is 8, which is 8 bytes; write '8GB', or '8B' if so few are mea"),
        ({"host_limit": 4096}, r"host_limit is 4096, which is 4,096 bytes; write '4096GB', or '4096B' if so"),
        ({"device_limit": "much"}, r"device_limit is 'much'"),
        ({"host_limit": 1.5}, r"host_limit is 1.5"),
        ({"host_limit": "50%"}, "host_limit is '50%', but the size that it is a share of is not known here"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_has_changed(
    arguments: dict[str, Any], message: str, manager: PipelineOffloadManager
) -> None:
    model = build()
    with pytest.raises(ValueError, match=message):
        offload.apply(model, **arguments)
    assert not any(module._forward_hooks for module in model.modules())
    assert offload.marks.existing_manager() is manager

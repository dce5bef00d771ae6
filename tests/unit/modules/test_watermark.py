"""mode="watermark" of `offload.apply`: any model in any loop, alone and around other modes."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import offload
from offload import HybridDeviceOptimizer, PipelineOffloadManager
from offload.modules.shared import WatermarkRoot
from offload.watermark.runtime import WatermarkRuntime
from tests.unit.modules.training import CALLS, ROWS, WIDTH, build, equal, plain_of, train

TENSOR = 4 * ROWS * WIDTH
MARKS: dict[str, Any] = {"high": f"{3 * TENSOR}B", "low": f"{2 * TENSOR}B", "min_numel": 1}


@pytest.fixture(autouse=True)
def _no_runtime_left_behind() -> Iterator[None]:
    yield
    gc.collect()


def runtime_of(handle: offload.Applied) -> WatermarkRuntime:
    assert isinstance(handle._root, WatermarkRoot)
    return handle._root.runtime


@pytest.mark.parametrize("call", CALLS)
def test_gradients_and_weights_have_the_bits_of_a_run_without(
    call: str, manager: PipelineOffloadManager
) -> None:
    plain = plain_of(call)
    model = build(call)
    handle = offload.apply(model, mode="watermark", **MARKS)
    assert equal(train(model), plain)
    assert manager.stats.clients["watermark"].out_bytes > 0
    assert not runtime_of(handle).holds
    handle.remove()


def test_a_step_ends_with_the_optimizer_and_the_next_one_is_foreseen() -> None:
    model = build(blocks=6)
    handle = offload.apply(model, mode="watermark", **MARKS)
    train(model, steps=4, microbatches=2)
    runtime = runtime_of(handle)
    details, metrics = runtime.last_details, runtime.last_metrics
    assert metrics is not None
    assert metrics.activations_spilled == metrics.activations_restored > 0
    assert details.forecast_bytes > details.latched_bytes
    assert details.forwards_lost == 0
    figures = handle.report().as_dict()["last_step"]
    assert figures["moved_bytes"] == metrics.spill_bytes
    assert figures["came_back_bytes"] + figures["read_here_bytes"] == metrics.restore_bytes
    assert figures["by_plan_bytes"] == figures["kept_bytes"] > 0
    assert figures["unread_bytes"] == figures["freed_first_bytes"] == figures["again_bytes"] == 0
    handle.remove()


def test_with_room_enough_nothing_moves(manager: PipelineOffloadManager) -> None:
    model = build()
    with offload.activations(model, "watermark", high="1GB"):
        train(model)
    assert manager.stats.spill_bytes == 0


def test_removed_the_model_is_as_it_was_and_a_backward_to_come_finds_its_tensors(
    manager: PipelineOffloadManager,
) -> None:
    plain = build()
    wanted = torch.autograd.grad(plain(torch.ones(ROWS, WIDTH)).sum(), list(plain.parameters()))
    model = build()
    handle = offload.apply(model, mode="watermark", **MARKS)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        loss = model(torch.ones(ROWS, WIDTH)).sum()
    runtime = weakref.ref(runtime_of(handle))
    handle.remove()
    gc.collect()
    assert runtime() is None
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert [one.shape for one in found] == [one.shape for one in wanted]
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert manager.engine.limits.max_spilling_bytes is not None


@pytest.mark.parametrize("inner", ["groups", "hidden_states", "selective"])
def test_around_another_mode_it_takes_what_that_one_leaves(
    inner: str, manager: PipelineOffloadManager
) -> None:
    plain = train(build())
    model = build()
    # each first once: the order of the two calls does not matter
    for first, second in ((inner, "watermark"), ("watermark", inner)):
        model = build()
        handles = []
        for mode in (first, second):
            marks = dict.fromkeys(("high", "low"), f"{TENSOR // 4}B") if mode == "watermark" else {}
            handles.append(offload.apply(model, mode=mode, min_numel=1, **marks))
        assert equal(train(model), plain)
        figures = manager.stats.clients
        assert figures["groups"].out_bytes > 0
        assert figures["watermark"].out_bytes > 0, "of the embedding and the head"
        for handle in handles:
            handle.remove()


def test_beside_an_optimizer_whose_state_lies_on_the_host(manager: PipelineOffloadManager) -> None:
    def weights(mode: str | None) -> list[torch.Tensor]:
        model = build()
        handle = None if mode is None else offload.apply(model, mode=mode, **MARKS)
        optimizer = HybridDeviceOptimizer(
            model.parameters(), offload_fraction=1.0, lr=0.1, engine=manager.engine
        )
        with closing(optimizer):
            for step in range(3):
                with torch.random.fork_rng():
                    torch.manual_seed(step)
                    model(torch.randn(ROWS, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        if handle is not None:
            handle.remove()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert equal(weights("watermark"), weights(None))
    assert manager.stats.clients["watermark"].out_bytes > 0


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_has_the_bits_of_a_compiled_run_without(
    whole: bool, manager: PipelineOffloadManager
) -> None:
    def compiled() -> nn.Module:
        model = build()
        if whole:
            return torch.compile(model, backend="aot_eager")
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        return model

    plain = train(compiled(), steps=2)
    model = compiled()
    handle = offload.apply(model, mode="watermark", **MARKS)
    assert equal(train(model, steps=2), plain)
    assert manager.stats.clients["watermark"].out_bytes > 0
    handle.remove()


def test_of_a_sharded_model_gathered_parameters_stay_and_the_bits_are_those_without(
    mesh: DeviceMesh, manager: PipelineOffloadManager
) -> None:
    def gradients(mode: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)])
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        handle = None if mode is None else offload.apply(model, mode=mode, **MARKS)
        found = []
        for seed in range(2):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
            model(x).square().mean().backward()
            found += [one.grad.full_tensor().clone() for one in model.parameters()]  # type: ignore[union-attr]
            model.zero_grad()
        if handle is not None:
            manager.engine.end_step()
            metrics = runtime_of(handle).last_metrics
            assert metrics is not None
            assert metrics.activations_saved == 2 * 4, "a block's input and its activation's; no parameter"
            assert metrics.activations_spilled > 0
            handle.remove()
        return found

    assert equal(gradients("watermark"), gradients(None))


def test_two_models_share_the_marks_and_other_ones_are_refused() -> None:
    models = [build(), build()]
    first = offload.apply(models[0], mode="watermark", **MARKS)
    with pytest.raises(ValueError, match=r"high is 9 bytes and low 8, and another model has 2,304 and 1,536"):
        offload.apply(models[1], mode="watermark", high="9B", low="8B")
    second = offload.apply(models[1], mode="watermark", **MARKS)
    assert runtime_of(first) is runtime_of(second)
    for model in models:
        assert equal(train(model, steps=1), train(build(), steps=1))
    first.remove()
    second.remove()


def test_each_model_has_its_own_least_size_under_the_shared_marks() -> None:
    models = [build(), build()]
    handles = [
        offload.apply(model, mode="watermark", **{**MARKS, "min_numel": least})
        for model, least in zip(models, (1, 1 << 20), strict=True)
    ]
    seen = []
    for model in models:
        model(torch.ones(ROWS, WIDTH)).sum().backward()
        offload.step_end()
        metrics = runtime_of(handles[0]).last_metrics
        assert metrics is not None
        seen.append(metrics.activations_saved)
    assert seen[0] > 0 == seen[1]
    for handle in handles:
        handle.remove()


def test_around_groups_that_take_everything_the_mark_holds_as_well(manager: PipelineOffloadManager) -> None:
    """What groups send is settled, and what they fetch ahead waits, by the marks of the device."""
    engine = manager.engine
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(12)])
    handles = [
        offload.apply(model, min_numel=1),
        offload.apply(model, mode="watermark", high=f"{6 * TENSOR}B", low=f"{5 * TENSOR}B", min_numel=1),
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        assert engine.last_stats.spilled >= 20, "two a block, but for what the plan keeps"
        # and what an operator saves at once, before anybody is asked
        assert engine.last_stats.device_bytes_peak <= 8 * TENSOR
    for handle in handles:
        handle.remove()
    assert not engine.limits.watchers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"mode": "watermark", "high": "9B", "device_limit": "1GB"},
            "device_limit='1GB' with mode='watermark'",
        ),
        ({"mode": "groups", "high": 9}, "high=9 with mode='groups': marks go with mode='watermark'"),
        ({"mode": True, "low": "1GB"}, "low='1GB' with mode=True: marks go with mode='watermark'"),
        (
            {"mode": "watermark", "high": "9B", "low": "10B"},
            "high is 9 bytes and low 10: spilling would stop above",
        ),
        (
            {"mode": "watermark", "high": "9B", "blocks": "layers.*"},
            "blocks='layers.*' with mode='watermark'",
        ),
        ({"mode": "watermark", "high": "80%"}, "high is '80%'"),
    ],
)
def test_marks_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        offload.apply(build(), **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has a size to take a share of")
def test_without_a_gpu_the_mark_has_to_be_given() -> None:
    with pytest.raises(ValueError, match="mode='watermark' without high=: there is no GPU here"):
        offload.apply(build(), mode="watermark")

"""park and wake in the hands of whoever is paid for each wrong bit."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import offload
from offload.errors import CaptureError, OffloadError
from offload.optim import FSDPGPUOptimizerWrapper
from offload.park.parked import Parked
from tests.threads import run_all
from tests.unit.park.states import WIDTH, Net, engine_of, in_training, same, state_of, train

X = torch.ones(2, WIDTH)


def test_compiled_modules_and_models_go_on_as_they_were() -> None:
    models = [Net(), Net()]
    compiled = [torch.compile(models[0], backend="eager"), models[1]]
    models[1].norm.compile(backend="eager")
    engine = engine_of()
    for _ in range(2):
        out = [each(X) for each in compiled]
        assert torch.equal(*out)
        sum(each.sum() for each in out).backward()  # type: ignore[union-attr]
        del out
        handles = [offload.park(each, engine=engine) for each in models]
        for each in (*compiled, models[1].norm):
            with pytest.raises(RuntimeError, match="wake"):  # the compiler's, around ours
                each(X)
        for handle in handles:
            handle.wake()
    assert same(state_of(models[0]), state_of(models[1]))


def test_casts_of_autocast_are_those_of_the_weights_that_come_back() -> None:
    model, engine = Net(), engine_of()
    with torch.autocast("cpu", torch.bfloat16):
        first = model(X)
        del first
        parked = offload.park(model, engine=engine)
        model.load_state_dict({name: value + 1 for name, value in Net().state_dict().items()})
        parked.wake()
        found = model(X)
    plain = Net()
    plain.load_state_dict({name: value + 1 for name, value in Net().state_dict().items()})
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found, plain(X))


def test_an_optimizer_whose_model_is_gone_while_parked_gets_an_error() -> None:
    model, optimizer = in_training()
    offload.park(model, optimizer, engine=engine_of())
    del model
    gc.collect()
    with pytest.raises(OffloadError, match="or the model is gone"):
        optimizer.step()
    optimizer.zero_grad()


def test_threads_that_park_and_wake_at_once_leave_one_state() -> None:
    (model, optimizer), (plain, other) = in_training(), in_training()
    engine, handles = engine_of(), list[Parked]()

    def turn() -> None:
        for _ in range(2):
            handles.append(offload.park(model, optimizer, engine=engine))
            handles[-1].wake()

    threads = [threading.Thread(target=turn) for _ in range(4)]
    run_all(threads)
    assert len({*map(id, handles)}) == 1
    handles[0].wake()
    assert same(state_of(model, optimizer), state_of(plain, other))


def test_one_storage_under_many_parameters_moves_once() -> None:
    """As cuDNN's flattened weights of an RNN."""
    models = [nn.LSTM(4, 4, num_layers=2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        flat = torch.cat([each.detach().flatten() for each in model.parameters()])
        for each, part in zip(
            model.parameters(), flat.split([each.numel() for each in model.parameters()]), strict=True
        ):
            each.data = part.view(each.shape)
        del flat, part
    parked = offload.park(models[0], engine=engine_of())
    assert parked.report.staying == []
    with pytest.raises(OffloadError, match="wake"):
        models[0](torch.ones(3, 1, 4))
    parked.wake()
    assert torch.equal(models[0](torch.ones(3, 1, 4))[0], models[1](torch.ones(3, 1, 4))[0])


def test_the_wrapper_of_shards_on_the_host_gives_up_its_ring() -> None:
    model = Net()
    optimizer = FSDPGPUOptimizerWrapper(AdamW(model.parameters(), lr=1e-2), "cpu", engine=engine_of())
    train(model, optimizer)
    parked = offload.park(model, optimizer, kinds=["optimizer"], engine=optimizer.engine)
    assert optimizer.ring_bytes == 0
    with pytest.raises(OffloadError, match="wake"):
        optimizer.step()
    parked.wake()
    train(model, optimizer)
    optimizer.close()


@pytest.mark.parametrize("kind", ["weights", "gradients", "optimizer"])
def test_hooks_are_gone_after_wake(kind: Any) -> None:
    model, optimizer = in_training()
    before = _hooks(model, optimizer)
    parked = offload.park(model, optimizer, kinds=[kind], engine=engine_of())
    assert _hooks(model, optimizer) > before
    parked.wake()
    assert _hooks(model, optimizer) == before


def _hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    owners = [*model.modules(), *model.parameters(), optimizer]
    found = [value for each in owners for name, value in vars(each).items() if "_hooks" in name]
    return sum(map(len, filter(None, found))) + sum(len(p._backward_hooks or ()) for p in model.parameters())


def test_a_cycle_inside_a_capture_is_refused() -> None:
    model, optimizer = in_training()
    engine = engine_of()
    with engine.device.capture(), pytest.raises(offload.CaptureError, match=r"park\(\) inside a graph"):
        offload.park(model, optimizer, engine=engine)


def test_a_park_that_a_graph_refuses_leaves_no_host_memory_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, optimizer), (plain, other) = in_training(), in_training()
    engine = engine_of()
    monkeypatch.setattr(engine.device, "has_live_graphs", lambda: True)
    with pytest.raises(CaptureError, match="can be replayed"):
        offload.park(model, optimizer, engine=engine)
    assert engine.arena.lent_bytes == 0
    parked = offload.park(model, optimizer, engine=engine, ignore_graphs=True)
    parked.wake()
    held = engine.arena.lent_bytes
    with pytest.raises(CaptureError, match="can be replayed"):
        offload.park(model, optimizer, engine=engine)
    assert engine.arena.lent_bytes == held  # pinned once
    assert same(state_of(model, optimizer), state_of(plain, other))

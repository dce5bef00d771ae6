"""park and wake: the objects and the bits of a run that never parked, and what is pinned, kept and named."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from torch import nn

import offload
from offload.device.sim import ExecutorName
from offload.errors import CaptureError, HostBudgetError, OffloadError
from offload.memory.budget import LocalHostBudget
from offload.park.report import Kind
from tests.unit.park.states import WIDTH, Net, engine_of, in_training, same, state_of, train

KINDS: tuple[Kind, ...] = get_args(Kind)


@pytest.mark.parametrize("executor", get_args(ExecutorName))
@pytest.mark.parametrize("order", [(), ("optimizer", "weights", "gradients"), ("gradients",)])
def test_a_run_that_parks_has_the_bits_and_objects_of_one_that_does_not(
    executor: ExecutorName, order: tuple[Kind, ...]
) -> None:
    (model, optimizer), (plain, other) = in_training(), in_training()
    objects = [*map(id, state_of(model, optimizer))]
    engine = engine_of(executor)
    for cycle in range(3):
        parked = offload.park(model, optimizer, engine=engine)
        assert parked.parked == KINDS
        assert all(each.untyped_storage().nbytes() == 0 for each in _plainly(state_of(model, optimizer)))
        for kind in order:
            parked.wake(kind)
            assert kind not in parked.parked
        parked.wake()
        assert [*map(id, state_of(model, optimizer))] == objects
        assert {type(each) for each in model.parameters()} == {nn.Parameter}
        assert same(state_of(model, optimizer), state_of(plain, other))
        train(model, optimizer, 1, 2 + cycle)
        train(plain, other, 1, 2 + cycle)
        objects = [*map(id, state_of(model, optimizer))]
    assert same(state_of(model, optimizer), state_of(plain, other))
    assert torch.equal(model.row, plain.norm.weight[:4])


def _plainly(tensors: Any) -> list[torch.Tensor]:
    with torch._C.DisableTorchFunctionSubclass():
        return [each.detach() for each in tensors if each.numel()]


def test_storages_that_are_shared_move_once() -> None:
    model, optimizer = in_training()
    parked = offload.park(model, optimizer, engine=engine_of())
    weights = 2 * WIDTH * WIDTH - WIDTH * WIDTH + 2 * WIDTH + 2 * WIDTH + WIDTH  # tied, biases, norm, scale
    report = parked.report.kinds
    assert report["weights"].moved_bytes == 4 * weights
    assert report["gradients"].moved_bytes == 4 * (weights - WIDTH)
    assert report["optimizer"].moved_bytes == 8 * (weights - WIDTH) + 5 * 4
    assert parked.report.staying == []
    parked.wake()


def test_the_second_cycle_pins_and_allocates_nothing() -> None:
    model, optimizer = in_training()
    engine = engine_of()
    held = []
    for cycle in range(3):
        parked = offload.park(model, optimizer, engine=engine)
        held.append((engine.arena.held_bytes, engine.arena.lent_bytes, parked.report.pinned_bytes > 0))
        parked.wake()
        train(model, optimizer, 1, cycle)
    assert held[1] == held[2] == (*held[0][:2], False)
    assert held[0][2]
    parked.close()
    assert engine.arena.stats().lent_bytes == 0


def test_kinds_that_are_not_named_stay_and_a_second_park_is_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = in_training()
    with offload.parked(model, optimizer, kinds=("gradients", "optimizer"), engine=engine_of()) as parked:
        assert parked.parked == ("gradients", "optimizer")
        model(torch.ones(2, WIDTH))
        with caplog.at_level(logging.INFO):
            again = offload.park(model, optimizer, kinds=("gradients",))
        assert again is parked
        assert "gradients are parked already" in caplog.text
        with offload.parked(model, optimizer, kinds=("weights", "optimizer")):
            assert parked.parked == ("weights", "gradients", "optimizer")
        assert parked.parked == ("gradients", "optimizer")
        with caplog.at_level(logging.INFO):
            parked.wake("weights")
        assert "weights are awake already" in caplog.text
    assert parked.parked == ()
    assert repr(parked) == "Parked(Net: parked nothing; awake weights, gradients, optimizer, extra)"


def test_a_storage_with_an_alias_stays_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = in_training()
    alias, moment = model.first.weight.data, optimizer.state[model.norm.bias]["exp_avg"].view(-1)[1:]
    before = moment.clone()
    parked = offload.park(model, optimizer, engine=engine_of())
    names = {name: nbytes for name, nbytes, _ in parked.report.staying}
    assert names == {"first.weight": 4 * WIDTH * WIDTH, "state of norm.bias.exp_avg": 4 * WIDTH}
    assert (
        "leaves 2 tensors, 1.09 kB, on the device (the largest: first.weight: something else" in caplog.text
    )
    assert torch.equal(alias, model.first.weight)
    assert torch.equal(moment, before)
    with pytest.raises(OffloadError, match="wake"):
        model.norm.weight.sum()
    parked.wake()
    del alias, moment
    assert offload.park(model, optimizer).report.staying == []
    offload.park(model).wake()


def test_a_storage_of_two_kinds_stays_while_one_is_awake() -> None:
    model = Net()
    average = {"first": model.first.weight, "own": torch.ones(WIDTH)}
    parked = offload.park(model, extra=[average], kinds=["extra"], engine=engine_of())
    ((name, nbytes, why),) = parked.report.staying
    assert (name, nbytes) == ("first.weight", 4 * WIDTH * WIDTH)
    assert why == "weights have it too, and stay awake"
    assert parked.report.kinds["extra"].moved_bytes == 4 * WIDTH
    offload.park(model, kinds=["weights"], extra=[average])
    with pytest.raises(OffloadError, match=r'wake\("weights", "extra"\)'):
        model.first.weight.sum()
    parked.wake("extra")
    model.first.weight.sum()
    with pytest.raises(OffloadError, match=r'wake\("weights"\)'):
        model.norm.weight.sum()
    parked.wake()


def test_a_dry_run_moves_nothing_and_says_what_would() -> None:
    model, optimizer = in_training()
    engine = engine_of()
    plan = offload.park(model, optimizer, dry_run=True, engine=engine)
    assert plan.parked == ()
    assert engine.arena.held_bytes == 0
    text = str(plan)
    assert "would park:\n  weights       1.34 kB" in text
    assert "host memory: 5.20 kB" in text
    assert "the link was not measured" in text
    model(torch.ones(1, WIDTH))


def test_host_memory_that_is_short_is_refused_before_anything_moves(caplog: pytest.LogCaptureFixture) -> None:
    (model, optimizer), (plain, other) = in_training(), in_training()
    budget = LocalHostBudget(4096)
    engine = offload.OffloadEngine(device=engine_of().device, budget=budget)
    with pytest.raises(HostBudgetError, match=r"need 5,\d\d\d bytes of host memory, and 4,096 of the host's"):
        offload.park(model, optimizer, engine=engine)
    assert same(state_of(model, optimizer), state_of(plain, other))
    parked = offload.park(model, optimizer, pageable=True, engine=engine)
    assert parked.parked == KINDS
    assert 0 < parked.report.pageable_bytes < parked.report.host_bytes
    assert "go to ordinary memory" in caplog.text
    parked.wake()
    assert same(state_of(model, optimizer), state_of(plain, other))
    assert budget.used_bytes <= 4096


def test_models_share_one_budget_and_each_says_what_is_awake() -> None:
    engine = engine_of()
    models = [in_training() for _ in range(3)]
    handles = [offload.park(*each, engine=engine) for each in models]
    handles[1].wake()
    models[1][0](torch.ones(1, WIDTH))
    with pytest.raises(OffloadError, match="a forward of Net while weights of Net are parked"):
        models[0][0](torch.ones(1, WIDTH))
    assert engine.arena.lent_bytes == sum(each.report.host_bytes for each in handles)
    for each in handles:
        each.close()


@pytest.mark.parametrize("where", ["copies", "graphs", "watch", "fetch", "hand over"])
def test_an_interrupt_leaves_each_kind_parked_or_awake_and_says_which(where: str) -> None:
    (model, optimizer), (plain, other) = in_training(), in_training()
    engine = engine_of()
    parked = offload.park(model, optimizer, engine=engine)
    moves, module = "offload.park.moves.", "offload.park.parked."
    if where in ("fetch", "hand over"):
        target = moves + "bytes_of" if where == "fetch" else module + "make_plain"
        call: Callable[[], Any] = parked.wake
    else:
        parked.wake()
        target = moves + ("bytes_of" if where == "copies" else "watch")
        call = lambda: offload.park(model, optimizer)  # noqa: E731
    if where == "graphs":
        with engine.device.capture() as graph:
            pass
        with pytest.raises(CaptureError, match="a CUDA graph can be replayed"):
            call()
        assert parked.parked == ()
        offload.park(model, optimizer, ignore_graphs=True)
        del graph
    else:
        with _interrupted(target, 5), pytest.raises(KeyboardInterrupt) as caught:
            call()
        done = {"copies": (), "watch": KINDS, "fetch": KINDS[0:], "hand over": KINDS[1:]}[where]
        assert parked.parked == done
        if where != "copies":
            assert caught.value.__notes__ == [f"offload: {parked!r}"]
    parked.wake()
    assert same(state_of(model, optimizer), state_of(plain, other))
    train(model, optimizer, 1, 5)
    train(plain, other, 1, 5)
    assert same(state_of(model, optimizer), state_of(plain, other))


def _interrupted(target: str, number: int) -> Any:
    """The call of that number raises KeyboardInterrupt."""
    module, name = target.rsplit(".", 1)
    whole = getattr(__import__(module, fromlist=[name]), name)
    calls = iter(range(number))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) == number - 1:
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    return patch(target, call)


def test_memory_that_is_short_on_the_device_leaves_the_kind_parked() -> None:
    (model, optimizer), (plain, other) = in_training(), in_training()
    engine = engine_of()
    parked = offload.park(model, optimizer, engine=engine)
    refill, left = engine.device.refill, iter(range(3))

    def refuses(storage: torch.UntypedStorage, nbytes: int) -> None:
        if next(left, None) is None:
            raise torch.OutOfMemoryError("full")
        refill(storage, nbytes)

    with patch.object(engine.device, "refill", refuses), pytest.raises(torch.OutOfMemoryError):
        parked.wake("weights")
    assert parked.parked == KINDS
    assert all(each.untyped_storage().nbytes() == 0 for each in _plainly(model.parameters()))
    parked.wake()
    assert same(state_of(model, optimizer), state_of(plain, other))


def test_what_is_gone_is_not_brought_back_and_a_dropped_model_frees_its_memory() -> None:
    model, optimizer = in_training()
    engine = engine_of()
    parked = offload.park(model, optimizer, engine=engine)
    optimizer.zero_grad()
    model.norm.bias = nn.Parameter(torch.full((WIDTH,), 7.0))  # replaced while parked
    parked.wake()
    assert all(each.grad is None for each in model.parameters())
    assert model.norm.bias.eq(7).all()
    offload.park(model, optimizer)
    gone = weakref.ref(model)
    del model, optimizer, parked
    gc.collect()
    assert gone() is None
    assert engine.arena.stats().lent_bytes == 0


def test_what_cannot_be_parked_is_refused() -> None:
    model, optimizer = in_training()
    with pytest.raises(ValueError, match="'moments' is no kind of what is parked: 'weights'"):
        offload.park(model, kinds=("moments",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model is a list, must be a module"):
        offload.park([model])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer is int, of which one has no state"):
        offload.park(model, 3)
    with pytest.raises(ValueError, match=r"extra\[0\] is a str, without tensors"):
        offload.park(model, extra=["ema"])
    refused: list[str] = []

    def hook(gradient: torch.Tensor) -> None:
        with pytest.raises(OffloadError, match="inside a backward") as caught:
            offload.park(model, optimizer)
        refused.append(str(caught.value))

    model.norm.weight.register_hook(hook)
    train(model, optimizer, 1)
    assert len(refused) == 1

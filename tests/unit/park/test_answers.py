"""What is asked of a parked tensor: an answer of the host's bytes, or an error that names what to wake; never
stale bytes."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import AdamW

import offload
from offload.errors import OffloadError
from offload.park.parked import Parked
from tests.unit.park.states import WIDTH, Net, engine_of, in_training, same, state_of, train

Pair = tuple[Net, AdamW]


@pytest.fixture
def pair() -> Iterator[tuple[Net, AdamW, Parked]]:
    model, optimizer = in_training()
    parked = offload.park(model, optimizer, engine=engine_of())
    yield model, optimizer, parked
    parked.wake()
    plain, other = in_training()
    assert same(state_of(model, optimizer), state_of(plain, other))
    train(model, optimizer, 1, 2)
    train(plain, other, 1, 2)
    assert same(state_of(model, optimizer), state_of(plain, other))


REFUSED: dict[str, tuple[str, Callable[[Net, AdamW], object]]] = {
    "a forward": ("weights", lambda model, _: model(torch.ones(1, WIDTH))),
    "a submodule's": ("weights", lambda model, _: model.norm(torch.ones(1, WIDTH))),
    "a functional one": (
        "weights",
        lambda model, _: torch.nn.functional.linear(torch.ones(1, WIDTH), model.row),
    ),
    "a compiled one": (
        "weights",
        lambda model, _: torch.compile(model, backend="eager")(torch.ones(1, WIDTH)),
    ),
    "a step": ("optimizer", lambda _, optimizer: optimizer.step()),
    "a step with a closure": ("optimizer", lambda model, optimizer: optimizer.step(lambda: model(0))),
    "clipping": ("gradients", lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
    "clipping by value": ("gradients", lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1.0)),
    "zeroing": ("gradients", lambda _, optimizer: optimizer.zero_grad(set_to_none=False)),
    "a value": ("weights", lambda model, _: model.first.weight[0, 0].item()),
    "a buffer": ("weights", lambda model, _: model.scale + 1),
    "an address": ("weights", lambda model, _: model.first.weight.data_ptr()),
    "a storage": ("weights", lambda model, _: model.first.weight.untyped_storage()),
    "an array": ("weights", lambda model, _: model.first.weight.detach().numpy()),
    "a view of an alias": ("weights", lambda model, _: model.first.weight.data.view(-1)[0].item()),
    "a write": ("weights", lambda model, _: nn.init.zeros_(model.norm.bias)),
    "copy_": ("weights", lambda model, _: model.norm.bias.data.copy_(torch.ones(WIDTH))),
    "a move": ("weights", lambda model, _: model.to(torch.float64)),
    "half": ("weights", lambda model, _: model.half()),
    "a gradient": ("gradients", lambda model, _: model.norm.bias.grad.norm()),  # type: ignore[union-attr]
    "a moment": ("optimizer", lambda model, optimizer: optimizer.state[model.norm.bias]["exp_avg"] + 1),
    "repr": ("weights", lambda model, _: repr(model.norm.bias)),
    "a list": ("weights", lambda model, _: torch._foreach_norm([model.norm.bias, model.norm.weight])),
    "a vector": ("weights", lambda model, _: nn.utils.parameters_to_vector(model.parameters())),
    "functional_call": ("weights", lambda model, _: torch.func.functional_call(model, {}, model.row)),
    "unscaling": (
        "gradients",
        lambda model, _: torch._amp_foreach_non_finite_check_and_unscale_(
            [each.grad for each in model.parameters()], torch.zeros(1), torch.ones(1)
        ),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_reads_or_writes_values_names_what_to_wake(pair: tuple[Net, AdamW, Parked], what: str) -> None:
    kind, call = REFUSED[what]
    with pytest.raises(OffloadError, match=rf"(?s)parked.*wake\(.*{kind}"):
        call(*pair[:2])


def test_a_backward_into_parked_gradients_is_refused_and_one_of_before_is_torchs_error() -> None:
    model, optimizer = in_training()
    loss = model(torch.ones(2, WIDTH)).sum()
    parked = offload.park(model, optimizer, kinds=("gradients", "optimizer"), engine=engine_of())
    with pytest.raises(OffloadError, match=r"a backward while gradients of Net are parked"):
        loss.backward()
    optimizer.zero_grad()
    model(torch.ones(2, WIDTH)).sum().backward()  # they are new
    parked.wake()
    loss = model.norm(torch.ones(2, WIDTH, requires_grad=True)).sum()
    offload.park(model, optimizer).wake()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_park_between_forward_and_backward_is_refused_and_a_graph_that_is_spent_is_none() -> None:
    (model, optimizer), (plain, other) = in_training(), in_training()
    engine, alias = engine_of(), model.norm.weight.data
    loss = model(torch.ones(2, WIDTH)).sum()
    with pytest.raises(
        OffloadError, match=r"between a forward and its backward: a graph has saved first\.weight"
    ):
        offload.park(model, optimizer, engine=engine)
    loss.backward()
    parked = offload.park(model, optimizer, engine=engine)  # loss lives, and so does its graph
    assert [name for name, *_ in parked.report.staying] == ["norm.weight"]
    assert torch.equal(alias, plain.norm.weight)
    parked.wake()
    plain(torch.ones(2, WIDTH)).sum().backward()
    assert same(state_of(model, optimizer), state_of(plain, other))


def test_state_dicts_have_the_bytes_and_can_be_saved(pair: tuple[Net, AdamW, Parked]) -> None:
    model, optimizer, _ = pair
    plain, other = in_training()
    expected, found = plain.state_dict(), model.state_dict()
    assert [*found] == [*expected]
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert found["first.weight"].data_ptr() == found["last.weight"].data_ptr()
    assert torch.equal(model.norm.state_dict()["bias"], plain.norm.bias)
    assert model.state_dict(keep_vars=True)["norm.bias"] is model.norm.bias
    for name, value in other.state_dict()["state"][0].items():
        assert torch.equal(optimizer.state_dict()["state"][0][name], value)
    for saved in (found, {"model": model, "p": model.norm.bias}, optimizer.state_dict()):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded["state"][1]["exp_avg"], other.state[plain.first.bias]["exp_avg"])
    unpickled = pickle.loads(pickle.dumps(model))
    assert same(iter(unpickled.parameters()), iter(plain.parameters()))
    unpickled(torch.ones(1, WIDTH))
    for cpu in (model.norm.bias.cpu(), model.norm.bias.detach().to("cpu"), model.norm.bias.data.cpu()):
        assert type(cpu) is torch.Tensor
        assert torch.equal(cpu, plain.norm.bias)


def test_copies_have_the_bytes_and_no_hooks(pair: tuple[Net, AdamW, Parked]) -> None:
    plain, _ = in_training()
    copied = copy.deepcopy(pair[0])
    assert same(iter(copied.parameters()), iter(plain.parameters()))
    assert copied.last.weight is copied.first.weight
    copied(torch.ones(1, WIDTH)).sum().backward()
    assert {type(each) for each in copied.parameters()} == {nn.Parameter}


def test_distributed_checkpoints_are_written_and_loaded_while_parked(tmp_path: Path) -> None:
    (model, optimizer), (plain, other) = in_training(), in_training()
    train(plain, other, 1, 7)
    train(model, optimizer, 1, 7)
    parked = offload.park(model, optimizer, engine=engine_of())
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    parked.wake()
    train(model, optimizer, 1, 8)
    offload.park(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    model.load_state_dict(weights)
    parked.wake()
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    for each in ((model, optimizer), (plain, other)):
        train(*each, 1, 9, clear=True)
    assert same(state_of(model, optimizer), state_of(plain, other))


def test_load_state_dict_fills_the_host_and_the_same_objects() -> None:
    (model, optimizer), (plain, other) = in_training(), in_training()
    train(plain, other, 3, 5)
    parked = offload.park(model, optimizer, engine=engine_of())
    objects = [*map(id, state_of(model, optimizer))]
    assert model.load_state_dict(plain.state_dict()).missing_keys == []
    optimizer.load_state_dict(other.state_dict())
    assert torch.equal(model.state_dict()["norm.bias"], plain.norm.bias)
    parked.wake()
    assert [*map(id, state_of(model, optimizer))] == objects
    for each in ((model, optimizer), (plain, other)):
        train(*each, 1, 9)
    assert same(state_of(model, optimizer), state_of(plain, other))


def test_a_parked_models_own_state_dict_can_be_written_and_loaded(pair: tuple[Net, AdamW, Parked]) -> None:
    model, optimizer, _ = pair
    state = model.state_dict()
    with torch.no_grad():
        state["norm.bias"].mul_(2).div_(2)
    model.load_state_dict(state)
    model.load_state_dict({name: each for name, each in model.named_parameters()}, strict=False)
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("slip", ["shape", "names", "dtype", "groups"])
def test_a_state_dict_that_does_not_fit_loads_nothing(pair: tuple[Net, AdamW, Parked], slip: str) -> None:
    model, optimizer, _ = pair
    with pytest.raises(RuntimeError, match=r"size mismatch for norm\.bias"):
        model.load_state_dict({"norm.bias": torch.ones(3)}, strict=False)
    state = optimizer.state_dict()
    state["state"] = {at: {**entry} for at, entry in state["state"].items()}
    first, last = state["state"][0], state["state"][4]
    first["exp_avg"] = first["exp_avg"] + 1
    if slip == "names":
        last["max_exp_avg_sq"] = last["exp_avg"]
    elif slip == "groups":
        state["param_groups"] = []
    else:
        last["exp_avg"] = torch.ones(3) if slip == "shape" else None
    error = ValueError if slip == "groups" else OffloadError
    with pytest.raises(error, match="param groups" if slip == "groups" else r"wake\('optimizer'\)"):
        optimizer.load_state_dict(state)


def test_a_state_dict_that_is_kept_over_a_wake_keeps_its_bytes_and_their_memory() -> None:
    (model, optimizer), (plain, _) = in_training(), in_training()
    engine = engine_of()
    parked = offload.park(model, optimizer, engine=engine)
    kept, lent = model.state_dict(), engine.arena.lent_bytes
    parked.wake()
    train(model, optimizer, 1)
    offload.park(model, optimizer)
    assert all(torch.equal(kept[name], value) for name, value in plain.state_dict().items())
    assert engine.arena.lent_bytes > lent
    del kept
    gc.collect()
    assert engine.arena.stats().lent_bytes == lent
    parked.wake()


def test_data_that_is_set_while_parked_is_the_tensors_own() -> None:
    model, optimizer = in_training()
    parked = offload.park(model, optimizer, engine=engine_of())
    model.norm.bias.data = torch.full((WIDTH,), 3.0)
    assert model.norm.bias.eq(3).all()
    nn.utils.vector_to_parameters(torch.full((WIDTH * WIDTH + WIDTH,), 2.0), model.first.parameters())
    parked.wake()
    assert model.norm.bias.eq(3).all()
    assert model.last.weight.eq(2).all()
    assert type(model.norm.bias) is nn.Parameter


def test_aliases_that_are_made_while_parked_follow_the_storage() -> None:
    (model, optimizer), (plain, _) = in_training(), in_training()
    parked = offload.park(model, optimizer, engine=engine_of())
    alias, detached = model.first.weight.data, model.norm.bias.detach()
    with pytest.raises(OffloadError, match="wake"):
        alias.sum()
    parked.wake()
    assert torch.equal(alias, plain.first.weight)
    assert torch.equal(detached, plain.norm.bias)
    names = {name for name, *_ in offload.park(model, optimizer).report.staying}
    assert names == {"first.weight", "norm.bias"}
    parked.wake()

"""State dicts: torch's form, every way in and out, and nothing changed by what does not fit."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from offload.optim.parts import _View
from tests.unit.optim.rig import FUSED, assert_same_bits, backward, hybrid, net, train

SPLITS: list[dict[str, Any]] = [
    {"offload_fraction": 1.0, "cpu_share": 1.0},
    {"offload_fraction": 1.0, "cpu_share": 0.0},
    {"offload_fraction": 0.5, "cpu_share": 0.5, "fused": True},
    {"offload_fraction": 0.0, "fused": True},
]


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def classes_in(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [found for part in (*value.keys(), *value.values()) for found in classes_in(part)]
    if isinstance(value, (list, tuple)):
        return [found for part in value for found in classes_in(part)]
    return [] if isinstance(value, (int, float, str, bool, type(None), Tensor)) else [value]


@pytest.mark.req("S3-45")
@pytest.mark.parametrize("options", SPLITS)
def test_a_state_dict_holds_no_classes_and_loads_with_weights_only(options: dict[str, Any]) -> None:
    model = net()
    optimizer = hybrid(model, cpu_optimizer_cls=AdamW, gpu_optimizer_cls=AdamW, **options)
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    assert classes_in(state) == []
    assert through_a_file(state).keys() - {"hybrid"} == {"state", "param_groups"}


@pytest.mark.req("S3-40")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", SPLITS)
@pytest.mark.parametrize("source", SPLITS)
def test_a_run_goes_on_with_the_same_bits_in_any_split_and_any_fraction(
    source: dict[str, Any], target: dict[str, Any], dtype: torch.dtype
) -> None:
    """One kernel on the simulated device: on a GPU this holds for one layout."""
    common = {"param_update_in_fp32": True, "lr": 1e-3, "fused": True}
    whole = net(dtype)
    expected = train(whole, hybrid(whole, **{**source, **common}), 5)

    first = net(dtype)
    before = hybrid(first, **{**source, **common}, model=first)
    train(first, before, 3)
    saved = through_a_file({"model": first.state_dict(), "optimizer": before.state_dict()})
    second = net(dtype)
    after = hybrid(second, **{**target, **common}, model=second)
    train(second, after, 1)  # state of its own, to be replaced
    second.load_state_dict(saved["model"])
    after.load_state_dict(saved["optimizer"])
    assert_same_bits(train(second, after, 2, first=3), expected)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_masters_keep_their_precision_in_either_order_of_loading(order: str) -> None:
    model = net(torch.bfloat16)
    optimizer = hybrid(model, param_update_in_fp32=True, lr=1e-4)
    train(model, optimizer, 3)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = train(model, optimizer, 2, first=3)

    other = net(torch.bfloat16)
    with torch.no_grad():
        next(other.parameters()).zero_()
    loader = hybrid(other, param_update_in_fp32=True, lr=1e-4)
    steps = [
        lambda: other.load_state_dict(saved["model"]),
        lambda: loader.load_state_dict(saved["optimizer"]),
    ]
    for load in steps if order == "model first" else reversed(steps):
        load()
    assert_same_bits(train(other, loader, 2, first=3), expected)


@pytest.mark.parametrize("options", SPLITS)
def test_state_of_a_plain_torch_optimizer_goes_in_and_ours_goes_out_to_one(options: dict[str, Any]) -> None:
    reference = net()
    plain = AdamW(reference.parameters(), **FUSED)
    train(reference, plain, 3)
    model = net()
    model.load_state_dict(reference.state_dict())
    optimizer = hybrid(model, **options)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))  # torch's own keeps what it is given
    assert_same_bits(train(model, optimizer, 2, first=3), train(reference, plain, 2, first=3))

    back = net()
    back.load_state_dict(model.state_dict())
    torchs = AdamW(back.parameters(), **FUSED)
    torchs.load_state_dict(optimizer.state_dict())
    assert_same_bits(train(back, torchs, 2, first=5), train(reference, plain, 2, first=5))


@pytest.mark.parametrize(
    "cls", [torch.optim.RMSprop, torch.optim.Adafactor, torch.optim.SGD], ids=lambda cls: cls.__name__
)
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_state_of_any_class_round_trips(cls: type[Optimizer], fraction: float, model: nn.Module) -> None:
    options: dict[str, Any] = {"offload_fraction": fraction, "cpu_optimizer_cls": cls}
    options |= {"momentum": 0.9} if cls is torch.optim.SGD else {}
    optimizer = hybrid(model, **options)
    train(model, optimizer, 3)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = net()
    other.load_state_dict(saved["model"])
    loader = hybrid(other, **options)
    loader.load_state_dict(saved["optimizer"])
    assert_same_bits(train(other, loader, 2, first=3), train(model, optimizer, 2, first=3))


@pytest.mark.req("S3-32", "S3-40")
@pytest.mark.parametrize("options", SPLITS)
def test_state_has_the_shapes_of_its_parameters_and_the_values_of_torchs(options: dict[str, Any]) -> None:
    reference, model = net(), net()
    plain, optimizer = AdamW(reference.parameters(), **FUSED), hybrid(model, model=model, **options)
    train(reference, plain, 3)
    train(model, optimizer, 3)
    for theirs, mine in zip(reference.parameters(), model.parameters(), strict=True):
        state = optimizer.state[mine]
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert float(state["step"]) == 3
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].shape == mine.shape
            assert state[name].device == mine.device
            assert torch.equal(state[name], plain.state[theirs][name])


def test_a_state_dict_is_a_copy_that_later_steps_leave_alone(model: nn.Module) -> None:
    """And each tensor in it has the memory of its own elements: copies by deepcopy() had all of the flat
    memory of a section, up to 1 GiB, in memory and in a file."""
    optimizer = hybrid(model, model=model)
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    copies = [value for of in state["state"].values() for value in of.values()]
    assert all(each.untyped_storage().nbytes() == each.numel() * each.element_size() for each in copies)
    before = {
        index: {key: value.clone() for key, value in of.items()} for index, of in state["state"].items()
    }
    train(model, optimizer, 2, first=2)
    optimizer.synchronize_parameters()
    assert all(
        torch.equal(value, before[index][key])
        for index, of in state["state"].items()
        for key, value in of.items()
    )


def test_groups_are_loaded_and_reach_the_sub_optimizers(model: nn.Module) -> None:
    optimizer = hybrid(model, offload_fraction=0.5, lr=0.5, betas=(0.5, 0.6))
    state = optimizer.state_dict()
    other = hybrid(net(), offload_fraction=0.5)
    other.load_state_dict(state)
    for group in (
        other.param_groups[0],
        *(group for sub in other.sub_optimizers for group in sub.param_groups),
    ):
        assert (group["lr"], group["betas"]) == (0.5, (0.5, 0.6))


# -- what does not fit ---------------------------------------------------------------------------------------
def another(what: str, state: dict[str, Any]) -> dict[str, Any]:
    if what == "groups":
        state["param_groups"].append({"params": [6]})
    elif what == "parameters":
        state["param_groups"][0]["params"].append(6)
    elif what == "shape":
        state["state"][2]["exp_avg"] = torch.zeros(3, 3)
    elif what == "class":
        for of in state["state"].values():
            of["momentum_buffer"] = of.pop("exp_avg_sq")
    elif what == "key":
        state.pop("state")
    return state


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("groups", "the state dict has 2 param groups and the optimizer 1; it is of another model"),
        ("parameters", "param group 0 has 7 parameters in the state dict and 6 in the optimizer"),
        (
            "shape",
            r"parameter 2 \(2.weight, 3,360 elements .*\) has shape \(48, 70\), and its exp_avg in the state "
            r"dict \(3, 3\)",
        ),
        ("class", "parameter 0 .* has no exp_avg_sq in the state dict; it is of another optimizer class"),
        ("key", "the state dict has no 'state', only 'param_groups', 'hybrid'"),
    ],
)
def test_the_state_dict_of_another_model_is_refused_before_anything_changes(what: str, message: str) -> None:
    model, reference = net(), net()
    optimizer = hybrid(model, model=model)
    train(model, optimizer, 2)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 77.0
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(another(what, saved))
    expected = train(reference, AdamW(reference.parameters(), **FUSED), 4)
    assert_same_bits(train(model, optimizer, 2, first=2), expected)


def test_torchs_hooks_around_state_dicts_are_called(model: nn.Module) -> None:
    optimizer = hybrid(model)
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before saving"))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before saving", "before loading", "after loading"]


def test_a_model_saved_while_the_step_is_under_way_has_the_new_weights() -> None:
    reference, model = net(), net()
    expected = train(reference, AdamW(reference.parameters(), **FUSED), 1)
    optimizer = hybrid(model, model=model)
    backward(model, 0)
    optimizer.step()
    assert_same_bits([value.clone() for value in model.state_dict().values()], expected)


def test_what_is_no_tensor_in_a_state_is_copied_too(model: nn.Module) -> None:
    optimizer = hybrid(model, offload_fraction=0.5)
    backward(model, 0)
    optimizer.step()
    note = [1, 2]
    optimizer.state[next(model.parameters())]["note"] = note
    found = optimizer.state_dict()["state"][0]["note"]
    assert found == note
    assert found is not note


def test_a_param_group_of_an_optimizer_inside_is_copied_pickled_and_shown_as_a_dictionary() -> None:
    view = _View({"lr": 0.1, "params": ["the user's"]})
    view["params"] = ["a piece"]
    plain = {"params": ["a piece"], "lr": 0.1}
    for found in (view.copy(), copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
        assert type(found) is dict
        assert found == plain
    assert repr(view) == repr(plain)

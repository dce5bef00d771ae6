"""The hybrid optimizer under Megatron's name, driven as Megatron drives it, without Megatron.

pytest tests/unit/parallel/test_megatron_optimizer.py
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import offload
import offload.fine_grained_activation_offload as engine_page
from offload import OffloadError
from parallel import megatron
from parallel.megatron_optimizer import MAPS_OF_MEGATRON, HybridDeviceOptimizer

STEP = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
MEGATRON = {**STEP, "bias_correction": True, "fused": True}


class CountingAdamW(torch.optim.Optimizer):
    """Counts in its groups, as Transformer Engine's; the same steps as torch's."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: Any,
        eps: float,
        weight_decay: float,
        bias_correction: bool = True,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "bias_correction": bias_correction,
            },
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in [parameter for parameter in group["params"] if parameter.grad is not None]:
                state = self.state[parameter]
                if not state:
                    state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
                torch._fused_adamw_(
                    [parameter],
                    [parameter.grad],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [torch.tensor(float(group["step"]))],
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=False,
                    maximize=False,
                )


made: list[HybridDeviceOptimizer] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while made:
        made.pop().close()


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(size, generator=source).to(dtype))
        for size in ((8, 16), (16,), (24, 8), (8,))
    ]


@pytest.fixture
def given() -> list[nn.Parameter]:
    return parameters()


def hybrid(
    given: list[Any], *, fraction: float = 0.5, gpu: type = AdamW, **more: Any
) -> HybridDeviceOptimizer:
    """As Megatron's get_megatron_optimizer makes it."""
    arguments: dict[str, Any] = {
        "cpu_optimizer_cls": AdamW,
        "gpu_optimizer_cls": gpu,
        "param_update_in_fp32": True,
        **MEGATRON,
        **more,
    }
    made.append(HybridDeviceOptimizer(given, offload_fraction=fraction, **arguments))
    return made[-1]


def groups(given: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": given[::2], "wd_mult": 1.0},
        {"params": given[1::2], "wd_mult": 0.0, "weight_decay": 0.0},
    ]


def give_gradients(
    given: list[Any], number: int, name: str = "grad", dtype: torch.dtype | None = None
) -> None:
    source = torch.Generator().manual_seed(1 + number)
    for parameter in given:
        setattr(parameter, name, torch.randn(parameter.shape, generator=source).to(dtype or parameter.dtype))


def steps(optimizer: Any, given: list[Any], numbers: range) -> None:
    for number in numbers:
        give_gradients(given, number)
        optimizer.step()


def reference(numbers: range) -> list[nn.Parameter]:
    given = parameters()
    steps(AdamW(groups(given), fused=True, **STEP), given, numbers)
    return given


def assert_same(one: list[Any], other: list[Any]) -> None:
    assert all(map(torch.equal, one, other))


# ---- what is built, and when ----


def test_nothing_is_built_before_the_first_call_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("built")

    given = parameters()
    optimizer = hybrid(groups(given))
    monkeypatch.setattr(offload.HybridDeviceOptimizer, "__init__", refuse)
    assert len(optimizer.state) == 0
    assert optimizer.state_dict()["state"] == {}
    give_gradients(given, 0, "decoupled_grad")
    optimizer.zero_grad(set_to_none=False)
    assert not any(parameter.decoupled_grad.any() for parameter in given)  # type: ignore[attr-defined]
    optimizer.zero_grad()
    assert [parameter.decoupled_grad for parameter in given] == [None] * 4  # type: ignore[attr-defined]
    optimizer.close()
    with pytest.raises(AssertionError, match="built"):
        optimizer.step()


def test_another_is_made_of_the_defaults_with_the_same_arguments(given: list[nn.Parameter]) -> None:
    first = hybrid(groups(given), fraction=0.75, pin_cpu_grads=False, overlap_cpu_optimizer_d2h_h2d=False)
    second = HybridDeviceOptimizer(params=[{**group} for group in first.param_groups], **first.defaults)
    made.append(second)
    assert second.defaults == first.defaults
    assert (second.offload_fraction, second.pin_cpu_grads, second.cpu_optimizer_cls) == (0.75, False, AdamW)
    assert not second.hybrid.pin_cpu_grads
    for group in second.param_groups:
        assert not any(isinstance(value, type) for value in group.values())
        assert "offload_fraction" not in group
        assert group["lr"] == 1e-2
    assert [group["weight_decay"] for group in second.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_steps_have_the_bits_of_torchs_fused_adamw_and_follow_the_groups(
    fraction: float, overlap: bool
) -> None:
    given, other = parameters(), parameters()
    optimizer = hybrid(groups(given), fraction=fraction, overlap_cpu_optimizer_d2h_h2d=overlap)
    own = AdamW(groups(other), fused=True, **STEP)
    for number in range(3):
        for one in (optimizer, own):
            for group in one.param_groups:
                group["lr"] = 0.01 / (1 + number)
        steps(optimizer, given, range(number, number + 1))
        steps(own, other, range(number, number + 1))
    assert_same(given, other)


def test_copies_put_in_the_place_of_parameters_before_the_first_step_are_stepped_and_read_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As Megatron's Float16OptimizerWithFloat16Params does, which also writes through .data, where no version
    moves."""
    halves = parameters(torch.bfloat16)
    optimizer = hybrid(groups(halves), fraction=1.0)
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            group["params"][place] = parameter.detach().clone().float()
    mains = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = [main.clone() for main in mains]
    own = AdamW(others, fused=True, **STEP)
    optimizer.param_groups[1]["weight_decay"] = 0.1
    steps(optimizer, mains, range(2))
    steps(own, others, range(2))
    assert_same(mains, others)
    for main, other in zip(mains, others, strict=True):
        main.data.fill_(0.5)
        other.data.fill_(0.5)
    steps(optimizer, mains, range(2, 3))
    steps(own, others, range(2, 3))
    assert_same(mains, others)


def test_other_parameters_after_the_first_step_are_refused(given: list[nn.Parameter]) -> None:
    optimizer = hybrid(groups(given))
    steps(optimizer, given, range(1))
    kept = optimizer.param_groups[0]["params"][0]
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(8, 16))
    with pytest.raises(
        OffloadError,
        match="which are not the very 4 in 2 that their state was made for; make a new optimizer",
    ):
        optimizer.step()
    optimizer.param_groups[0]["params"][0] = kept
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(OffloadError, match="make a new optimizer"):
        optimizer.step()


def test_shards_that_are_views_of_parameters_are_stepped() -> None:
    whole = nn.Parameter(torch.randn(32))
    other = nn.Parameter(whole.detach().clone())
    shard = whole.view(-1)[8:24]
    optimizer = hybrid([{"params": [shard]}], fraction=1.0)
    give_gradients([shard], 0)
    optimizer.step()
    own = AdamW([other], fused=True, **STEP)
    other.grad = torch.zeros(32)
    assert shard.grad is not None
    other.grad[8:24] = shard.grad
    own.step()
    assert torch.equal(whole[8:24], other[8:24])
    optimizer.update_fp32_param_by_new_param()  # there are no other weights to take over


def test_decoupled_gradients_are_stepped_where_nothing_is_offloaded() -> None:
    given, others = parameters(), parameters()
    optimizer = hybrid([{"params": given}], fraction=0.0)
    own = AdamW(others, fused=True, **STEP)
    for number in range(2):
        give_gradients(given, number, "decoupled_grad", torch.float32)
        give_gradients(others, number)
        optimizer.step()
        own.step()
    assert_same(given, others)


def test_decoupled_gradients_of_half_precision_shards_step_float32_masters() -> None:
    given = parameters(torch.bfloat16)
    mains = [parameter.detach().float() for parameter in given]
    optimizer = hybrid([{"params": given}])
    own = AdamW(mains, fused=True, **STEP)
    for number in range(3):
        give_gradients(given, number, "decoupled_grad", torch.float32)
        give_gradients(mains, number)
        optimizer.step()
        own.step()
    assert_same(given, [main.to(torch.bfloat16) for main in mains])
    assert_same([optimizer.state[parameter]["master_param"] for parameter in given], mains)
    optimizer.zero_grad()
    assert [parameter.decoupled_grad for parameter in given] == [None] * 4  # type: ignore[attr-defined]


def test_a_param_group_that_comes_later_joins_with_the_step_values_only(given: list[nn.Parameter]) -> None:
    optimizer = hybrid([{"params": given[:2]}])
    steps(optimizer, given[:2], range(1))
    optimizer.state[given[0]]["step"] = torch.tensor(5.0)
    optimizer.add_param_group({"params": given[2:]})
    assert [float(optimizer.state[parameter]["step"]) for parameter in given[:2]] == [5, 1]
    assert "offload_fraction" not in optimizer.param_groups[1]
    assert optimizer.param_groups[1]["lr"] == 1e-2
    steps(optimizer, given, range(1, 2))
    with pytest.raises(ValueError, match="is on meta"):
        optimizer.add_param_group({"params": [torch.zeros(3, device="meta", requires_grad=True)]})
    assert len(optimizer.param_groups) == 2
    steps(optimizer, given, range(2, 3))


# ---- refusals ----


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"bias_correction": False}, "bias_correction=False is given, and AdamW takes no bias_correction"),
        ({"unheard": 1}, "unheard=1 is given, and AdamW takes no unheard"),
        ({"gpu_optimizer_cls": SGD, "momentum": 0.9}, "momentum=0.9 is given, and AdamW takes no momentum"),
    ],
)
def test_an_argument_that_one_class_does_not_take_is_named(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HybridDeviceOptimizer(
            parameters(), **{"cpu_optimizer_cls": AdamW, "gpu_optimizer_cls": AdamW, **MEGATRON, **more}
        )


@pytest.mark.parametrize("name", sorted(MAPS_OF_MEGATRON))
def test_a_map_that_only_megatrons_own_has_is_refused_by_name(name: str) -> None:
    optimizer = hybrid(parameters())
    with pytest.raises(
        AttributeError, match=f"has no {name}: masters and moments are ranges of pinned buckets"
    ):
        getattr(optimizer, name)
    with pytest.raises(AttributeError, match="'HybridDeviceOptimizer' object has no attribute 'unheard'"):
        _ = optimizer.unheard


def test_a_step_inside_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_page, "is_graph_capturing", lambda: True)
    with pytest.raises(OffloadError, match="set optimizer_cuda_graph=False"):
        hybrid(parameters()).step()


def test_new_weights_of_a_model_that_is_not_there_are_refused() -> None:
    with pytest.raises(
        OffloadError,
        match=r"the 4 parameters are float32 masters of Megatron's.*set use_precision_aware_optimizer=True",
    ):
        hybrid([parameter.detach().clone() for parameter in parameters()]).update_fp32_param_by_new_param()


def test_new_weights_of_the_model_itself_are_taken_over_even_if_torch_cannot_see_them() -> None:
    given, other = parameters(), parameters()
    optimizer, own = hybrid(groups(given), fraction=1.0), AdamW(groups(other), fused=True, **STEP)
    for one, of in ((optimizer, given), (own, other)):
        steps(one, of, range(2))
        for parameter in of:
            parameter.data.fill_(0.25)
        if one is optimizer:
            optimizer.update_fp32_param_by_new_param()
        steps(one, of, range(2, 3))
    assert_same(given, other)


# ---- state ----


def test_state_is_empty_until_somebody_fills_it(given: list[nn.Parameter]) -> None:
    optimizer = hybrid(groups(given))
    assert optimizer.sub_optimizers  # built, and the host's part has zeros from the start
    assert len(optimizer.state) == 0
    before = [parameter.detach().clone() for parameter in given]
    optimizer.dummy_step()
    assert_same(given, before)
    assert {id(parameter) for parameter in optimizer.state} == {id(parameter) for parameter in given}
    for entry in optimizer.state.values():
        assert not entry["exp_avg"].any()
        assert float(entry["step"]) == 0


def filled(
    optimizer: HybridDeviceOptimizer, other: HybridDeviceOptimizer, fill: Callable[[Any, Any, Any], None]
) -> None:
    for parameter, source in zip(
        [p for group in optimizer.param_groups for p in group["params"]],
        [p for group in other.param_groups for p in group["params"]],
        strict=True,
    ):
        for key, value in other.state[source].items():
            fill(optimizer.state[parameter], key, value)


def by_value(entry: dict[str, Any], key: str, value: Tensor) -> None:
    entry[key] = value.detach().clone()


def in_place(entry: dict[str, Any], key: str, value: Tensor) -> None:
    with torch.no_grad():
        entry[key].copy_(value)


@pytest.mark.parametrize("say", [True, False])
@pytest.mark.parametrize("fill", [by_value, in_place])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_into_state_counts_in_the_next_step(dtype: torch.dtype, fill: Any, say: bool) -> None:
    given, other = parameters(dtype), parameters(dtype)
    first, second = hybrid(groups(given)), hybrid(groups(other))
    steps(first, given, range(3))
    second.dummy_step()
    with torch.no_grad():
        for one, two in zip(other, given, strict=True):
            one.copy_(two)
    filled(second, first, fill)
    if say:
        second._sync_hdo_state_to_sub_optimizers()
    for one, two in zip(given, other, strict=True):
        for key, value in first.state[one].items():
            if key != "master_param" or dtype != torch.float32:  # where the weights are the masters
                assert torch.equal(second.state[two][key], value), key
    steps(first, given, range(3, 5))
    steps(second, other, range(3, 5))
    assert_same(given, other)


def test_a_count_written_into_state_is_in_the_state_dict_that_was_read_before() -> None:
    """Megatron reads the state dict, writes the counts into `state`, and loads what it read."""
    given = parameters()
    optimizer = hybrid(groups(given))
    optimizer.dummy_step()
    read = optimizer.state_dict()
    for entry in optimizer.state.values():
        entry["step"] = torch.tensor(7.0)
    optimizer.load_state_dict({"state": read["state"], "param_groups": read["param_groups"]})
    assert {float(entry["step"]) for entry in optimizer.state.values()} == {7.0}


def test_a_whole_state_can_be_set() -> None:
    given, other = parameters(), parameters()
    first, second = hybrid(groups(given)), hybrid(groups(other))
    steps(first, given, range(2))
    second.state = {  # type: ignore[assignment]
        two: {key: value.clone() for key, value in first.state[one].items()}
        for one, two in zip(given, other, strict=True)
    }
    with torch.no_grad():
        for one, two in zip(given, other, strict=True):
            two.copy_(one)
    steps(first, given, range(2, 4))
    steps(second, other, range(2, 4))
    assert_same(given, other)


# ---- state dicts ----


@pytest.mark.parametrize("gpu", [AdamW, CountingAdamW])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_a_state_dict_goes_on_with_the_same_bits(fraction: float, gpu: type, tmp_path: Path) -> None:
    given, other = parameters(), parameters()
    first = hybrid(groups(given), fraction=fraction, gpu=gpu)
    steps(first, given, range(3))
    torch.save(first.state_dict(), tmp_path / "state")  # copies: the dict refers to the state
    with torch.no_grad():
        for one, two in zip(given, other, strict=True):
            two.copy_(one)
    second = hybrid(groups(other), fraction=fraction, gpu=gpu)
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    steps(first, given, range(3, 5))
    steps(second, other, range(3, 5))
    assert_same(given, other)
    assert_same(given, reference(range(5)))


@pytest.mark.parametrize("synced", [False, True])
def test_counts_put_back_after_a_load_do_not_count_unless_megatron_says_so(synced: bool) -> None:
    """Core 0.16 puts the count that `state` had before a load back into it, for checkpoints that are
    dp_reshardable, and its own class does not look: the next step was a first one, silently."""
    given, other = parameters(), parameters()
    first, second = hybrid(given), hybrid(other)
    steps(first, given, range(2))
    second.dummy_step()
    before = {parameter: entry["step"] for parameter, entry in second.state.items()}
    with torch.no_grad():
        for mine, its in zip(other, given, strict=True):
            mine.copy_(its)
    second.load_state_dict(first.state_dict())
    for parameter, count in before.items():
        second.state[parameter]["step"] = torch.tensor(7.0) if synced else torch.zeros_like(count)
    if synced:
        second._sync_hdo_state_to_sub_optimizers()
    steps(second, other, range(2, 3))
    assert {float(entry["step"]) for entry in second.state.values()} == {8.0 if synced else 3.0}
    steps(first, given, range(2, 3))
    assert synced or all(map(torch.equal, other, given))


def test_the_count_of_a_loaded_group_goes_on(given: list[nn.Parameter]) -> None:
    """The count that the device's optimizer keeps in its group is the user's group's, and goes on there."""
    optimizer = hybrid(groups(given), fraction=0.5, gpu=CountingAdamW)
    steps(optimizer, given, range(2))
    loaded = optimizer.state_dict()
    # all of the first group is on the host
    assert [group.get("step") for group in loaded["param_groups"]] == [None, 2]
    optimizer.load_state_dict(loaded)
    steps(optimizer, given, range(2, 4))
    assert [group.get("step") for group in optimizer.state_dict()["param_groups"]] == [None, 4]
    assert [group.get("step") for group in optimizer.param_groups] == [None, 4]


def test_state_of_a_counting_optimizer_may_be_written() -> None:
    given, other = parameters(), parameters()
    first, second = (hybrid(groups(of), gpu=CountingAdamW) for of in (given, other))
    for optimizer, of in ((first, given), (second, other)):
        steps(optimizer, of, range(2))
    filled(second, first, by_value)
    steps(first, given, range(2, 4))
    steps(second, other, range(2, 4))
    assert_same(given, other)


def test_a_state_dict_with_the_arguments_in_its_groups_is_read_as_megatrons_own_writes_it() -> None:
    given, other = parameters(), parameters()
    own = AdamW(groups(given), fused=True, **STEP)
    steps(own, given, range(2))
    saved = own.state_dict()
    for group in saved["param_groups"]:
        group.update(
            cpu_optimizer_cls=AdamW, gpu_optimizer_cls=AdamW, offload_fraction=1.0, pin_cpu_grads=True
        )
    with torch.no_grad():
        for one, two in zip(given, other, strict=True):
            two.copy_(one)
    optimizer = hybrid(groups(other), fraction=1.0)
    optimizer.load_state_dict(saved)
    assert not any("cpu_optimizer_cls" in group for group in optimizer.param_groups)
    steps(own, given, range(2, 4))
    steps(optimizer, other, range(2, 4))
    assert_same(given, other)


def test_hooks_around_a_load_are_called(given: list[nn.Parameter]) -> None:
    optimizer = hybrid(groups(given))
    steps(optimizer, given, range(1))
    heard: list[str] = []
    optimizer.register_load_state_dict_pre_hook(lambda _, loaded: heard.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda _: heard.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert heard == ["before", "after"]


def test_a_state_dict_of_another_model_changes_nothing(given: list[nn.Parameter]) -> None:
    optimizer = hybrid(groups(given))
    steps(optimizer, given, range(1))
    saved = optimizer.state_dict()
    for wrong, message in (
        ({"state": {}}, "no 'param_groups'"),
        ({"param_groups": saved["param_groups"]}, "no 'state'"),
        ({**saved, "param_groups": saved["param_groups"][:1]}, "has 1 param groups and the optimizer 2"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(wrong)
    steps(optimizer, given, range(1, 3))
    assert_same(given, reference(range(3)))


# ---- install ----


def test_megatrons_modules_get_this_class_however_they_import_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "megatron" / "core" / "optimizer" / "cpu_offloading"
    folder.mkdir(parents=True)
    (folder.parents[1] / "__init__.py").write_text("")
    (folder.parent / "__init__.py").write_text(
        f"from {megatron.OPTIMIZER_PAGE} import HybridDeviceOptimizer\n"
    )
    (folder / "__init__.py").write_text("from .hybrid_optimizer import HybridDeviceOptimizer\n")
    (folder / "hybrid_optimizer.py").write_text("class HybridDeviceOptimizer: own = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"}
    for name in before:
        del sys.modules[name]
    try:
        megatron.install()
        for module in (
            "megatron.core.optimizer",
            "megatron.core.optimizer.cpu_offloading",
            megatron.OPTIMIZER_PAGE,
        ):
            assert importlib.import_module(module).HybridDeviceOptimizer is HybridDeviceOptimizer
        megatron.uninstall()
        assert importlib.import_module(megatron.OPTIMIZER_PAGE).HybridDeviceOptimizer.own
        with pytest.raises(
            OffloadError, match=rf"{megatron.OPTIMIZER_PAGE} is already loaded from .*hybrid_optimizer.py"
        ):
            megatron.install()
    finally:
        megatron.uninstall()
        for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
            del sys.modules[name]
        sys.modules.update(before)

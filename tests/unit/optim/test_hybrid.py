"""The hybrid optimizer is the optimizer it is made of: same weights, same state, same manners."""

from __future__ import annotations

import gc
import inspect
import logging
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from offload.client import Phase
from offload.optim import HybridDeviceOptimizer
from offload.optim.placing import Place
from tests.unit.optim.rig import (
    FUSED,
    assert_same_bits,
    assert_torchs_bits,
    backward,
    hybrid,
    net,
    run,
    train,
    weights,
)

PLACES = [
    pytest.param({"offload_fraction": 1.0, "cpu_share": 1.0}, id="cpu"),
    pytest.param({"offload_fraction": 1.0, "cpu_share": 0.0}, id="streamed"),
    pytest.param({"offload_fraction": 1.0, "cpu_share": 0.5}, id="both"),
    pytest.param({"offload_fraction": 0.5, "cpu_share": 0.5, "fused": True}, id="all three"),
    pytest.param({"offload_fraction": 0.0, "fused": True}, id="gpu"),
]


# -- the same result -----------------------------------------------------------------------------------------
@pytest.mark.req("S3-30", "S3-31", "S3-32")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("options", PLACES)
def test_every_place_gives_the_bits_of_torchs_fused_adamw(
    options: dict[str, Any], attached: bool, overlap: bool
) -> None:
    """The simulated device's tensors are the CPU's, so all places run one kernel, and a cut parameter has the
    bits of a whole one."""
    expected = run(lambda model: AdamW(model.parameters(), **FUSED))
    found = run(
        lambda model: hybrid(
            model, model=model if attached else None, overlap_cpu_optimizer_d2h_h2d=overlap, **options
        )
    )
    assert_same_bits(found, expected)


@pytest.mark.req("S3-42")
@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [
        (Adam, {"lr": 1e-2}),
        (Adam, {"lr": 1e-2, "amsgrad": True}),
        (SGD, {"lr": 0.1}),
        (SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_adam_and_sgd_match_the_reference(
    cls: type[Optimizer], kwargs: dict[str, Any], fraction: float, grouped: bool, steps: int
) -> None:
    def groups(model: nn.Module) -> Any:
        parameters = list(model.parameters())
        return (
            [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 3e-3, "weight_decay": 0.1}]
            if grouped
            else parameters
        )

    expected = run(lambda model: cls(groups(model), **kwargs), steps)
    found = run(
        lambda model: hybrid(
            model,
            params=groups(model),
            offload_fraction=fraction,
            cpu_optimizer_cls=cls,
            gpu_optimizer_cls=cls,
            **kwargs,
        ),
        steps,
    )
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "cls",
    [
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adafactor,
        torch.optim.Rprop,
    ],
    ids=lambda cls: cls.__name__,
)
@pytest.mark.parametrize("atomic", [None, False])
def test_any_torch_optimizer_may_step_the_hosts_part(cls: type[Optimizer], atomic: bool | None) -> None:
    """Adafactor looks at rows and columns: a parameter must be whole and in its shape."""
    expected = run(lambda model: cls(model.parameters(), lr=1e-2))  # type: ignore[call-arg]
    found = run(
        lambda model: hybrid(
            model,
            cpu_optimizer_cls=cls,
            atomic_step=atomic,
            model=model,
            overlap="step" if atomic is None else "forward",
        )
    )
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sgd_of_half_precision_is_not_stepped_by_torchs_kernel_that_changes_nothing(
    dtype: torch.dtype, atomic: bool
) -> None:
    """pytorch#191763."""
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    models = [net(dtype) for _ in range(2)]
    ours = hybrid(models[0], cpu_optimizer_cls=SGD, atomic_step=atomic, **options)
    plain = SGD(models[1].parameters(), **options, foreach=False)
    assert_same_bits(train(models[0], ours, 3), train(models[1], plain, 3))
    for mine, its in zip(ours.state_dict()["state"].values(), plain.state.values(), strict=True):
        assert torch.equal(mine["momentum_buffer"], its["momentum_buffer"])


@pytest.mark.req("S3-34")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_overlap_on_and_off_are_equal_bit_for_bit_over_ten_steps(
    dtype: torch.dtype, masters: bool, clip: float | None
) -> None:
    def make(model: nn.Module, *, overlap: bool) -> HybridDeviceOptimizer:
        return hybrid(
            model,
            offload_fraction=0.8,
            param_update_in_fp32=masters,
            overlap_cpu_optimizer_d2h_h2d=overlap,
            model=model if overlap else None,
            max_grad_norm=clip,
        )

    on = run(lambda model: make(model, overlap=True), 10, dtype=dtype, microbatches=2)
    off = run(lambda model: make(model, overlap=False), 10, dtype=dtype, microbatches=2)
    assert_same_bits(on, off)


@pytest.mark.req("S3-35")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_masters_in_fp32_are_stepped_and_the_weights_are_their_rounding(
    dtype: torch.dtype, share: float, fraction: float
) -> None:
    model = net(dtype)
    optimizer = hybrid(model, offload_fraction=fraction, cpu_share=share, param_update_in_fp32=True, lr=1e-4)
    reference = [parameter.detach().float().clone() for parameter in model.parameters()]
    expected = AdamW(reference, lr=1e-4, fused=fraction > 0)
    for step in range(5):
        backward(model, step)
        for master, parameter in zip(reference, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        expected.step()
        optimizer.step()
        optimizer.zero_grad()
    for master, parameter in zip(reference, model.parameters(), strict=True):
        assert parameter.dtype is dtype
        kept = optimizer.state[parameter]["master_param"]
        assert kept.dtype is torch.float32
        assert kept.shape == parameter.shape
        if fraction in (0.0, 1.0):
            assert torch.equal(kept, master)
        assert torch.equal(kept.to(dtype), parameter)


@pytest.mark.parametrize("options", PLACES[:3])
def test_parameters_whose_memory_is_not_in_order_of_their_dimensions_are_right(
    options: dict[str, Any],
) -> None:
    """A convolution in channels_last, and a transposed matrix, with gradients in the other order. Not
    compared with torch's fused kernel, which pairs elements by their place in memory and is wrong here."""

    def parameters() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(3)
        conv = torch.randn(6, 5, 3, 3, generator=generator).contiguous(memory_format=torch.channels_last)
        return [nn.Parameter(conv), nn.Parameter(torch.randn(40, 30, generator=generator).t())]

    def trained(mine: list[nn.Parameter], optimizer: Optimizer) -> list[Tensor]:
        for step in range(3):
            for parameter in mine:
                gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
                parameter.grad = gradient.contiguous()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().contiguous() for parameter in mine]

    reference, mine = parameters(), parameters()
    expected = trained(reference, AdamW(reference, lr=1e-2))
    for one, other in zip(
        trained(mine, HybridDeviceOptimizer(mine, lr=1e-2, **options)), expected, strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


# -- places and sub-optimizers -------------------------------------------------------------------------------
@pytest.mark.req("S3-28", "S3-39")
def test_the_first_parameters_leave_and_sub_optimizers_are_the_cpus_then_the_gpus(model: nn.Module) -> None:
    optimizer = hybrid(model, offload_fraction=0.6, cpu_share=1.0, bucket_bytes=1 << 20)
    places = [optimizer.place_of(parameter) for parameter in model.parameters()]
    # 2310 + 70 + 3360 of 6131
    assert places == [Place.CPU, Place.CPU, Place.CPU, Place.GPU, Place.GPU, Place.GPU]
    assert optimizer.gpu_optimizer is not None
    assert optimizer.sub_optimizers == [*optimizer.cpu_optimizers, optimizer.gpu_optimizer]
    assert sum(len(group["params"]) for group in optimizer.gpu_optimizer.param_groups) == 3


@pytest.mark.req("S3-30", "S3-31")
def test_fraction_0_has_no_cpu_optimizer_and_fraction_1_no_gpu_optimizer() -> None:
    none, every = (hybrid(net(), offload_fraction=fraction, cpu_share=0.5) for fraction in (0.0, 1.0))
    assert none.cpu_optimizers == []
    assert none.gpu_optimizer is not None
    assert every.gpu_optimizer is None
    assert every.cpu_optimizers


@pytest.mark.req("S3-33")
def test_there_is_an_optimizer_a_bucket_and_one_in_all_where_a_step_is_atomic() -> None:
    options = {"offload_fraction": 1.0, "cpu_share": 1.0, "bucket_bytes": 4096}
    in_buckets, atomic = hybrid(net(), **options), hybrid(net(), atomic_step=True, **options)
    padded = sum(-(-parameter.numel() // 16) * 16 for parameter in net().parameters())
    assert len(in_buckets.cpu_optimizers) == -(-4 * padded // 4096)
    assert len(atomic.cpu_optimizers) == 1
    waits = hybrid(net(), overlap_cpu_optimizer_d2h_h2d=False, **options)
    assert len(waits.cpu_optimizers) == len(in_buckets.cpu_optimizers)


@pytest.mark.req("S3-29")
def test_the_arguments_and_their_defaults_are_megatrons(model: nn.Module) -> None:
    parameters = inspect.signature(HybridDeviceOptimizer).parameters.values()
    positional = [
        (one.name, one.default) for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert positional == [
        ("params", inspect.Parameter.empty),
        ("offload_fraction", 0.5),
        ("cpu_optimizer_cls", None),
        ("gpu_optimizer_cls", None),
        ("param_update_in_fp32", False),
        ("pin_cpu_grads", True),
        ("pin_cpu_params", True),
        ("overlap_cpu_optimizer_d2h_h2d", True),
    ]
    optimizer = HybridDeviceOptimizer(
        model.parameters(), 0.5, Adam, Adam, False, True, True, True, lr=1e-3, betas=(0.8, 0.9)
    )
    assert (optimizer.offload_fraction, optimizer.param_update_in_fp32) == (0.5, False)
    assert (optimizer.pin_cpu_grads, optimizer.pin_cpu_params, optimizer.overlap_cpu_optimizer_d2h_h2d) == (
        True,
        True,
        True,
    )
    for sub in optimizer.sub_optimizers:
        assert type(sub) is Adam
        assert [(group["lr"], group["betas"]) for group in sub.param_groups] == [(1e-3, (0.8, 0.9))] * len(
            sub.param_groups
        )
    assert isinstance(optimizer, Optimizer)


@pytest.mark.req("S3-41")
@pytest.mark.parametrize(("params", "grads"), [(True, True), (True, False), (False, True), (False, False)])
def test_only_what_is_asked_for_is_pinned(model: nn.Module, params: bool, grads: bool) -> None:
    """float32 AdamW: 12 bytes an element of weights and moments, 4 of gradients. Lent by the arena is what
    would be pinned."""
    optimizer = hybrid(model, cpu_share=1.0, pin_cpu_params=params, pin_cpu_grads=grads)
    padded = sum(-(-parameter.numel() // 16) * 16 for parameter in model.parameters())
    assert optimizer.engine.arena.stats().lent_bytes == padded * (12 * params + 4 * grads)
    assert optimizer.host_bytes == 16 * padded
    train(model, optimizer, 2)
    optimizer.close()


@pytest.mark.parametrize("masters", [True, False])
def test_closing_gives_every_byte_back_and_leaves_no_thread(masters: bool) -> None:
    gc.collect()
    before = threading.active_count()
    model = net(torch.bfloat16)
    optimizer = hybrid(model, cpu_share=0.5, param_update_in_fp32=masters, model=model, max_grad_norm=1.0)
    train(model, optimizer, 3)
    assert threading.active_count() == before + 2
    optimizer.close()
    assert threading.active_count() == before
    assert optimizer.engine.arena.stats().lent_bytes == 0


# -- manners of a torch optimizer ----------------------------------------------------------------------------
@pytest.mark.req("S3-32")
@pytest.mark.parametrize("options", PLACES)
def test_a_scheduler_moves_every_place(options: dict[str, Any]) -> None:
    def trained(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6)
        for step in range(6):
            backward(model, step)
            optimizer.step()
            scheduler.step()  # while the step may still be under way
            optimizer.zero_grad()
        return weights(model, optimizer)

    assert_torchs_bits(trained, **options)


@pytest.mark.parametrize("options", PLACES)
def test_groups_keep_their_own_keys_and_values(options: dict[str, Any], model: nn.Module) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first, *rest = model.parameters()
        return [
            {"params": [first], "lr": 0.03, "name": "input"},
            {"params": rest, "weight_decay": 0.3, "is_expert": True},
        ]

    expected = run(lambda model: AdamW(groups(model), **FUSED))
    optimizer = hybrid(model, params=groups(model), **options)
    assert_same_bits(train(model, optimizer, 4), expected)
    assert optimizer.param_groups[0]["name"] == "input"
    assert optimizer.param_groups[1]["is_expert"] is True


@pytest.mark.parametrize("options", PLACES)
def test_a_group_added_between_steps_is_trained(options: dict[str, Any]) -> None:
    def trained(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        train(model, optimizer, 2)
        optimizer.add_param_group({"params": list(model.parameters())[2:], "lr": 0.02})
        return train(model, optimizer, 3, first=2)

    reference, model = net(), net()
    expected = trained(reference, AdamW(list(reference.parameters())[:2], **FUSED))
    assert_same_bits(
        trained(model, hybrid(model, params=list(model.parameters())[:2], model=model, **options)), expected
    )


def test_a_group_that_cannot_be_added_leaves_the_optimizer_as_it_was(model: nn.Module) -> None:
    optimizer = hybrid(model, params=list(model.parameters())[:2])
    wrong = nn.Parameter(torch.zeros(4, 4).expand(4, 4).as_strided((4, 4), (0, 1)))
    with pytest.raises(ValueError, match=r"parameter 2 .* leave gaps or overlap"):
        optimizer.add_param_group({"params": [wrong]})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, 2)


class Quantized(Tensor):
    """An int8 weight that says float32 and has no such bytes; as a float8 parameter."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor) -> Quantized:
        made: Quantized = Tensor._make_wrapper_subclass(cls, codes.size(), dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes = codes
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        codes = args[0].codes
        return (
            cls(codes)
            if function is torch.ops.aten.detach.default
            else function(codes.float(), *args[1:], **(kwargs or {}))
        )


def test_a_parameter_whose_elements_are_not_its_memory_is_refused() -> None:
    weight = Quantized(torch.ones(4, 4, dtype=torch.int8)).requires_grad_()
    with pytest.raises(
        ValueError,
        match=r"parameter 0 \(16 elements of torch.float32\) is a Quantized, which keeps something else",
    ):
        HybridDeviceOptimizer([weight], lr=1e-2)


class Own(AdamW):
    """Another class, which is stepped whole: its closure, with a backward, is in its step."""


@pytest.mark.req("S3-44")
@pytest.mark.parametrize("options", [*PLACES, {"offload_fraction": 1.0, "cpu_optimizer_cls": Own}])
def test_a_closure_is_evaluated_once_a_step(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = hybrid(model, **options)
    calls: list[int] = []
    phases: list[Phase] = []
    monkeypatch.setattr(optimizer.engine, "on_phase", phases.append)

    def closure() -> Tensor:
        calls.append(len(calls))
        optimizer.zero_grad()
        return backward(model, len(calls))

    losses = [optimizer.step(closure) for _ in range(3)]
    assert calls == [0, 1, 2]
    placed = options["offload_fraction"] > 0 and "cpu_optimizer_cls" not in options
    assert phases == (3 * [Phase.OPTIMIZER, Phase.STEP_END] if placed else [])
    assert all(isinstance(loss, Tensor) for loss in losses)


@pytest.mark.req("S3-36")
@pytest.mark.parametrize("options", PLACES[:-1])
@pytest.mark.parametrize("attached", [True, False])
def test_zero_grad_works_both_ways_and_clears_decoupled_gradients(
    options: dict[str, Any], attached: bool, model: nn.Module
) -> None:
    optimizer = hybrid(model, model=model if attached else None, **options)
    backward(model, 0)
    for parameter in model.parameters():
        parameter.decoupled_grad = torch.ones_like(parameter)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() and not p.decoupled_grad.any() for p in model.parameters())  # type: ignore[union-attr, attr-defined]
    optimizer.zero_grad()
    assert all(p.grad is None and p.decoupled_grad is None for p in model.parameters())  # type: ignore[attr-defined]


@pytest.mark.req("S3-37")
@pytest.mark.parametrize("options", PLACES[:-1])
def test_a_decoupled_gradient_is_used_in_place_of_grad(options: dict[str, Any]) -> None:
    reference, model = net(), net()
    expected, optimizer = AdamW(reference.parameters(), **FUSED), hybrid(model, **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for theirs, mine in zip(reference.parameters(), model.parameters(), strict=True):
            theirs.grad = torch.randn(theirs.shape, generator=generator)
            mine.grad = torch.full_like(mine, 1e6)
            mine.decoupled_grad = theirs.grad.clone()  # type: ignore[attr-defined]
        expected.step()
        optimizer.step()
        assert all(torch.equal(mine.grad, torch.full_like(mine, 1e6)) for mine in model.parameters())  # type: ignore[arg-type]
        optimizer.zero_grad()
    assert_same_bits(weights(model, optimizer), weights(reference, expected))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_decoupled_gradient_in_fp32_of_a_bf16_parameter_keeps_its_precision(share: float) -> None:
    parameter = nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(0)).bfloat16())
    master = parameter.detach().float().clone()
    optimizer = HybridDeviceOptimizer([parameter], 1.0, param_update_in_fp32=True, lr=1e-2, cpu_share=share)
    expected = AdamW([master], **FUSED)
    master.grad = torch.randn(50, generator=torch.Generator().manual_seed(1))
    parameter.decoupled_grad = master.grad.clone()  # type: ignore[attr-defined]
    expected.step()
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["master_param"], master)


@pytest.mark.req("S3-43")
@pytest.mark.parametrize("options", PLACES)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_parameter_without_a_gradient_is_left_alone_and_keeps_its_own_count(
    options: dict[str, Any], overlap: bool
) -> None:
    def trained(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        parameters = list(model.parameters())
        for step in range(6):
            backward(model, step)
            for parameter in (parameters[step % 6], parameters[(2 * step + 1) % 6]):
                parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()
        return weights(model, optimizer)

    assert_torchs_bits(trained, attached=False, overlap_cpu_optimizer_d2h_h2d=overlap, **options)


def test_a_step_without_any_gradient_changes_nothing(model: nn.Module) -> None:
    optimizer = hybrid(model)
    before = weights(model, optimizer)
    optimizer.step()
    assert_same_bits(weights(model, optimizer), before)


def test_a_dummy_step_knows_a_parameter_that_was_put_into_a_group_since(model: nn.Module) -> None:
    *others, last = model.parameters()
    optimizer = hybrid(model, params=others)
    optimizer.param_groups[0]["params"].append(last)
    optimizer.dummy_step()
    assert set(optimizer.state) == {*others, last}
    optimizer.close()


class Tagged(SGD):
    """Knows a parameter by what was set on it, as optimizers do that treat matrices in another way."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter][parameter.kind] = torch.zeros_like(parameter)
        return super().step(closure)


def test_a_dummy_step_shows_a_class_the_parameters_that_it_was_given(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.kind = "seen"  # type: ignore[attr-defined]
    optimizer = HybridDeviceOptimizer(model.parameters(), 0.0, gpu_optimizer_cls=Tagged, lr=0.1)
    optimizer.dummy_step()
    assert all("seen" in optimizer.state[parameter] for parameter in model.parameters())


@pytest.mark.req("S3-38")
@pytest.mark.parametrize("cls", [AdamW, torch.optim.RMSprop, SGD])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_a_dummy_step_fills_the_state_and_changes_no_weight(cls: type[Optimizer], fraction: float) -> None:
    model = net()
    kwargs = {"momentum": 0.9} if cls is SGD else {}
    optimizer = hybrid(
        model,
        offload_fraction=fraction,
        cpu_optimizer_cls=cls,
        weight_decay=0.1,
        param_update_in_fp32=True,
        **kwargs,
    )
    before = weights(model, optimizer)
    optimizer.dummy_step()
    assert_same_bits(weights(model, optimizer), before)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        moments = [value for key, value in state.items() if key not in ("step", "master_param")]
        assert moments
        assert all(not value.any() for value in moments)
        assert "step" not in state or float(state["step"]) == 0
        assert torch.equal(state["master_param"], parameter)


def test_parameters_without_elements_are_no_trouble() -> None:
    for fraction in (0.0, 0.5, 1.0):
        for share in (0.0, 0.5, 1.0):
            empty, full = nn.Parameter(torch.zeros(0, 5)), nn.Parameter(torch.ones(20))
            optimizer = HybridDeviceOptimizer([empty, full], fraction, lr=0.1, cpu_share=share)
            empty.grad, full.grad = torch.zeros(0, 5), torch.ones(20)
            optimizer.step()
            assert full.detach().max() < 1


# -- weights changed by others -------------------------------------------------------------------------------
@pytest.mark.parametrize("options", PLACES)
@pytest.mark.parametrize("masters", [True, False])
def test_masters_follow_weights_that_are_loaded_without_state(options: dict[str, Any], masters: bool) -> None:
    model, other = net(torch.bfloat16), net(torch.bfloat16)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-0.5)
    optimizer = hybrid(model, model=model, param_update_in_fp32=masters, lr=1e-4, **options)
    train(model, optimizer, 2)
    model.load_state_dict(other.state_dict())
    backward(model, 5)
    optimizer.step()
    for mine, theirs in zip(weights(model, optimizer), other.parameters(), strict=True):
        assert (mine.float() - theirs.float()).abs().max() <= 4e-4 + 0.01 * theirs.float().abs().max()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_update_fp32_param_by_new_param_sees_what_torch_cannot(share: float) -> None:
    model = net(torch.bfloat16)
    optimizer = hybrid(model, param_update_in_fp32=True, cpu_share=share)
    train(model, optimizer, 1)
    for parameter in model.parameters():
        parameter.data.fill_(2.0)
    optimizer.update_fp32_param_by_new_param()
    for parameter in model.parameters():
        assert torch.equal(optimizer.state[parameter]["master_param"], torch.full(parameter.shape, 2.0))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_weight_written_with_the_rounding_of_its_master_does_not_cost_the_master_its_precision(
    share: float,
) -> None:
    """A checkpoint's weights and its optimizer state may be loaded in either order."""
    model = net(torch.bfloat16)
    optimizer = hybrid(model, param_update_in_fp32=True, cpu_share=share, lr=1e-4)
    train(model, optimizer, 3)
    first = next(model.parameters())
    before = optimizer.state[first]["master_param"].clone()
    assert not torch.equal(before, before.bfloat16().float())
    with torch.no_grad():
        first.copy_(first.clone())
    optimizer.step()
    assert torch.equal(optimizer.state[first]["master_param"], before)


def test_a_parameter_that_was_given_new_memory_is_found_again() -> None:
    reference, model = net(), net()
    expected = AdamW(reference.parameters(), **FUSED)
    optimizer = hybrid(model)
    for step in range(4):
        if step == 2:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        train(reference, expected, 1, first=step)
        train(model, optimizer, 1, first=step)
    assert_same_bits(weights(model, optimizer), weights(reference, expected))


# -- warnings ------------------------------------------------------------------------------------------------
def test_overlap_that_was_asked_for_and_is_not_done_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        hybrid(net(), cpu_optimizer_cls=torch.optim.RMSprop)
    assert "RMSprop is stepped whole before any weight returns, not overlapped" in caplog.text
    assert "atomic_step=False overlaps it" in caplog.text


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_groups_with_and_without_amsgrad_share_a_bucket(share: float) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first, *rest = model.parameters()
        return [{"params": [first]}, {"params": rest, "amsgrad": True}]

    expected = run(lambda model: AdamW(groups(model), **FUSED))
    found = run(lambda model: hybrid(model, params=groups(model), cpu_share=share, bucket_bytes=1 << 20))
    assert_same_bits(found, expected)


def test_without_a_gradient_the_norm_is_a_zero_as_torchs(model: nn.Module) -> None:
    optimizer = hybrid(model)
    norm, torchs = optimizer.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert (norm.shape, norm.dtype, float(norm)) == (torchs.shape, torchs.dtype, float(torchs))
    optimizer.close()

"""Gradients and their steps: which microbatch is the last, what counts at the step, and promises that are
broken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from offload import OffloadEngine
from offload.device.sim import ExecutorName, SimDevice
from offload.errors import OffloadError
from offload.optim import HybridDeviceOptimizer
from tests.unit.optim.rig import (
    FUSED,
    assert_same_bits,
    assert_torchs_bits,
    backward,
    batch,
    engine,
    hybrid,
    net,
    train,
    weights,
)


def made(model: nn.Module, **options: Any) -> tuple[HybridDeviceOptimizer, SimDevice]:
    device = SimDevice()
    return hybrid(model, engine=OffloadEngine(device=device), model=model, **options), device


def landed(device: SimDevice) -> int:
    return device.copied_bytes(device.d2h)


GRADIENT_BYTES = 4 * sum(parameter.numel() for parameter in net().parameters())


LEAVES = 2 * GRADIENT_BYTES
"""The weights that the CPU steps go with their gradients."""


def settled(optimizer: HybridDeviceOptimizer, device: SimDevice) -> int:
    """What has left, once the workers have issued what they were given."""
    optimizer._steps._stepper.synchronize()
    return landed(device)


def test_in_the_backward_that_is_the_last_every_gradient_leaves_before_step_is_called() -> None:
    model = net()
    optimizer, device = made(model, cpu_share=1.0, overlap="backward")
    with optimizer.no_sync():
        backward(model, 0)
    assert settled(optimizer, device) == 0
    backward(model, 1)
    assert settled(optimizer, device) == LEAVES
    optimizer.step()
    optimizer.synchronize_parameters()
    assert landed(device) == LEAVES, "and none leaves again"


@pytest.mark.parametrize("overlap", ["step", "forward"])
def test_without_the_promise_no_gradient_leaves_before_step(model: nn.Module, overlap: str) -> None:
    optimizer, device = made(model, cpu_share=1.0, overlap=overlap)
    optimizer.last_microbatch = True
    backward(model, 0)
    assert landed(device) == 0
    optimizer.step()
    optimizer.synchronize_parameters()
    assert landed(device) == LEAVES


def test_a_schedule_can_say_which_microbatch_is_the_last(model: nn.Module) -> None:
    optimizer, device = made(model, cpu_share=1.0, overlap="backward")
    for microbatch in range(3):
        optimizer.last_microbatch = microbatch == 2
        assert optimizer.last_microbatch is (microbatch == 2)
        backward(model, microbatch)
        assert settled(optimizer, device) == (LEAVES if microbatch == 2 else 0)


def test_unless_it_is_said_as_many_backwards_are_expected_as_in_the_step_before(model: nn.Module) -> None:
    optimizer, device = made(model, cpu_share=1.0, overlap="backward")
    train(model, optimizer, 1, microbatches=3)
    optimizer.synchronize_parameters()
    before = settled(optimizer, device)
    for microbatch in range(3):
        backward(model, microbatch)
        assert settled(optimizer, device) == before + (LEAVES if microbatch == 2 else 0)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("announced", [True, False])
def test_accumulated_gradients_give_the_bits_of_torch_however_many_there_are(
    announced: bool, share: float
) -> None:
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        number = 0
        for microbatches in (2, 2, 5, 1, 3, 3):
            for microbatch in range(microbatches):
                if announced and isinstance(optimizer, HybridDeviceOptimizer):
                    optimizer.last_microbatch = microbatch == microbatches - 1
                backward(model, number)
                number += 1
            optimizer.step()
            optimizer.zero_grad()
        return weights(model, optimizer)

    assert_torchs_bits(trained, cpu_share=share, engine=engine())


@pytest.mark.parametrize("change", ["scaled", "replaced", "clipped", "removed", "decoupled"])
def test_a_gradient_that_was_changed_after_it_left_leaves_again(change: str) -> None:
    def disturb(model: nn.Module) -> None:
        for place, parameter in enumerate(model.parameters()):
            assert parameter.grad is not None
            if change == "scaled":
                parameter.grad.mul_(0.5)
            elif change == "replaced":
                parameter.grad = parameter.grad.clone().neg_()
            elif change == "removed" and place % 2:
                parameter.grad = None
        if change == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    reference, model = net(), net()
    expected, (optimizer, _) = AdamW(reference.parameters(), **FUSED), made(model)
    optimizer.last_microbatch = True
    for step in range(4):
        for each in (reference, model):
            backward(each, step)
            disturb(each)
        if change == "decoupled":
            for theirs, mine in zip(reference.parameters(), model.parameters(), strict=True):
                theirs.grad = torch.ones_like(theirs)
                mine.decoupled_grad = torch.ones_like(mine)  # type: ignore[attr-defined]
        for either in (expected, optimizer):
            either.step()
            either.zero_grad()
    assert_same_bits(weights(model, optimizer), weights(reference, expected))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_backward_whose_step_is_left_out_is_forgotten(in_place: bool) -> None:
    """As a GradScaler does after an overflow: zero_grad without step."""
    reference, model = net(), net()
    expected, (optimizer, _) = AdamW(reference.parameters(), **FUSED), made(model)
    optimizer.last_microbatch = True
    for step in range(6):
        backward(reference, step)
        backward(model, step)
        if step % 3 != 1:
            expected.step()
            optimizer.step()
        expected.zero_grad()
        optimizer.zero_grad(set_to_none=not in_place)
    assert_same_bits(weights(model, optimizer), weights(reference, expected))


@pytest.mark.parametrize("executor", ["late", "early"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_grad_scaler_skips_and_scales_as_with_torchs_own(share: float, executor: ExecutorName) -> None:
    """It unscales gradients, which may have landed, with a kernel that moves no version counter. A copy that
    runs at once has the scaled ones; one that runs late has the others by chance."""

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(6):
            loss = model(torch.randn(8, 33, generator=torch.Generator().manual_seed(step))).square().mean()
            scaler.scale(loss * (float("inf") if step == 3 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return weights(model, optimizer), scaler.get_scale()

    reference, model = net(), net()
    plain = AdamW(reference.parameters(), **FUSED)
    # the way that every optimizer goes
    plain._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    optimizer = hybrid(model, engine=engine(executor), model=model, cpu_share=share)
    (theirs, scale), (mine, my_scale) = trained(reference, plain), trained(model, optimizer)
    assert scale == my_scale
    assert_same_bits(mine, theirs)


def test_a_grad_scaler_breaks_the_promise_of_steps_in_the_backward(model: nn.Module) -> None:
    optimizer, _ = made(model, overlap="backward")
    optimizer.last_microbatch = True
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(model(torch.randn(8, 33)).square().mean()).backward()
    with pytest.raises(
        OffloadError,
        match=r"a GradScaler changed the gradients after \d+ buckets had been stepped in the backward",
    ):
        scaler.step(optimizer)


@pytest.mark.parametrize("how", ["argument", "call", "known"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_clipping_by_the_global_norm_is_torchs_bit_for_bit(fraction: float, share: float, how: str) -> None:
    reference, model = net(), net()
    expected = AdamW(reference.parameters(), **FUSED)
    options: dict[str, Any] = {"max_grad_norm": 0.05} if how == "argument" else {}
    optimizer = hybrid(model, offload_fraction=fraction, cpu_share=share, model=model, fused=True, **options)
    for step in range(4):
        backward(reference, step)
        backward(model, step)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        if how == "call":
            assert torch.equal(optimizer.clip_grad_norm_(0.05), norm)
        elif how == "known":
            optimizer.clip_grad_norm_(0.05, total=norm)
        expected.step()
        optimizer.step()
        assert torch.equal(optimizer.last_grad_norm, norm)
        expected.zero_grad()
        optimizer.zero_grad()
    assert_same_bits(weights(model, optimizer), weights(reference, expected))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_clipping_scales_the_gradients_as_torchs_does(share: float) -> None:
    """So a factor cannot outlive its gradients, and a second clip comes after the first."""
    reference, model = net(torch.bfloat16), net(torch.bfloat16)
    optimizer = hybrid(model, cpu_share=share, model=model)
    for each in (reference, model):
        backward(each, 0)
    for max_norm in (1e-1, float("inf"), 1e-3):
        norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        assert optimizer.clip_grad_norm_(max_norm).isfinite() == norm.isfinite()
    expected, found = (
        [p.grad for p in each.parameters() if p.grad is not None] for each in (reference, model)
    )
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=2**-7)
    optimizer.close()


# -- stepping in the backward --------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stepping_in_the_backward_gives_the_same_bits(share: float, dtype: torch.dtype) -> None:
    def trained(**options: Any) -> list[torch.Tensor]:
        model = net(dtype)
        optimizer, _ = made(model, cpu_share=share, param_update_in_fp32=True, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(5):
            with optimizer.no_sync():
                backward(model, 2 * step)
            backward(model, 2 * step + 1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return weights(model, optimizer)

    assert_same_bits(trained(overlap="backward"), trained(overlap_cpu_optimizer_d2h_h2d=False))


def test_the_weights_are_already_on_their_way_when_step_is_called(model: nn.Module) -> None:
    optimizer, device = made(model, cpu_share=1.0, overlap="backward")
    optimizer.last_microbatch = True
    backward(model, 0)
    optimizer._steps._stepper.synchronize()
    assert device.copied_bytes(device.h2d) == GRADIENT_BYTES


WRITTEN = r"the weights of parameter 0 were .*, or its gradient was written \(use no_sync.* after"


def broken(what: str, optimizer: HybridDeviceOptimizer, model: nn.Module) -> None:
    first = next(model.parameters())
    assert first.grad is not None
    if what == "lr":
        optimizer.param_groups[0]["lr"] = 1.0
    elif what == "gradient":
        first.grad.mul_(2)
    elif what == "data":
        first.grad.data[:3].clamp_(-1e-4, 1e-4)
    elif what == "other data":
        first.grad.data = first.grad * 2
    elif what == "unscaled":
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
    elif what == "reduced":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            dist.all_reduce(first.grad)
        finally:
            dist.destroy_process_group()
    elif what == "read":
        assert nn.utils.get_total_norm([first.grad]) == first.grad.data.norm() == first.grad.clone().norm()
    elif what == "weights":
        with torch.no_grad():
            first.mul_(2)
    elif what == "clip":
        optimizer.clip_grad_norm_(1.0)
    elif what == "zero":
        optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("lr", r"the param groups changed after \d+ buckets had been stepped in the backward"),
        (
            "gradient",
            r"the gradient of parameter 0 \(0.weight, 2,310 elements of torch.float32\) changed after",
        ),
        ("data", r"the gradient of parameter 0 \(0.weight, 2,310 elements of torch.float32\) changed after"),
        *((what, WRITTEN) for what in ("other data", "unscaled", "reduced")),
        ("weights", r"the weights of parameter 0 were read or written before step\(\), or .* after"),
        ("clip", "clip_grad_norm_ was called after"),
        ("zero", r"zero_grad was called without step\(\) after"),
    ],
)
def test_a_broken_promise_is_an_error_until_state_is_loaded(what: str, message: str) -> None:
    model = net()
    optimizer, _ = made(model, overlap="backward")
    optimizer.last_microbatch = True
    train(model, optimizer, 2)
    optimizer.synchronize_parameters()
    weights_before, state = (
        {key: value.clone() for key, value in model.state_dict().items()},
        optimizer.state_dict(),
    )
    backward(model, 2)
    with pytest.raises(OffloadError, match=message):
        broken(what, optimizer, model)
    with pytest.raises(OffloadError, match=message):
        optimizer.step()
    optimizer.load_state_dict(state)
    model.load_state_dict(weights_before)
    model.zero_grad()
    after = train(model, optimizer, 2, first=2)
    reference = net()
    assert_same_bits(after, train(reference, AdamW(reference.parameters(), **FUSED), 4))


def test_a_gradient_may_be_read_before_step(model: nn.Module) -> None:
    """Until step() its class is another: who reads it gets torch's own tensors, and after it all is plain."""
    optimizer, _ = made(model, overlap="backward")
    optimizer.last_microbatch = True
    backward(model, 0)
    broken("read", optimizer, model)
    model(batch(1))
    assert all(type(parameter.grad) is torch.Tensor for parameter in model.parameters())


def test_a_second_backward_after_a_bucket_was_stepped_is_an_error_that_says_no_sync(model: nn.Module) -> None:
    optimizer, _ = made(model, overlap="backward")
    optimizer.last_microbatch = True
    backward(model, 0)
    with pytest.raises(
        OffloadError,
        match=r"parameter 0 were read or written before step\(\), or .* \(use no_sync\(\) in all back",
    ):
        backward(model, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"overlap": "backward", "max_grad_norm": 1.0},
            'overlap="backward" and max_grad_norm: the norm is known',
        ),
        ({"overlap": "backward", "overlap_cpu_optimizer_d2h_h2d": False}, "overlap='backward' needs workers"),
        ({"overlap": "forward"}, 'overlap="forward" needs model='),
        ({"overlap": "always"}, "overlap is 'always', must be"),
    ],
)
def test_an_overlap_is_refused_where_it_cannot_be_exact(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hybrid(net(), offload_fraction=0.5, **options)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("executor", ["late", "early", "random"])
def test_a_gradient_written_between_the_step_and_the_next_forward_was_read_before(
    share: float, executor: ExecutorName
) -> None:
    """It was an error, as the step might still read it; whoever touches it waits now."""
    reference, model = net(), net()
    expected = AdamW(reference.parameters(), **FUSED)
    optimizer = hybrid(model, engine=engine(executor), model=model, cpu_share=share, fused=True)
    for step in range(3):
        for each, of in ((expected, reference), (optimizer, model)):
            backward(of, step)
            each.step()
            of.zero_grad(set_to_none=False)
    assert_same_bits(weights(model, optimizer), weights(reference, expected))


def test_clipping_asked_for_before_a_backward_that_steps_is_an_error_too(model: nn.Module) -> None:
    optimizer, _ = made(model, overlap="backward")
    optimizer.last_microbatch = True
    optimizer.max_grad_norm = 1.0
    backward(model, 0)
    with pytest.raises(OffloadError, match=r"clipping was asked for after \d+ buckets had been stepped"):
        optimizer.step()

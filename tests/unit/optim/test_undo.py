"""Steps that start in the backward and are undone where they do not count: what undoes them, what stays, and
what it all takes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from offload import HostBudgetError, OffloadConfig, OffloadEngine
from offload.device.sim import SimDevice
from offload.errors import OffloadError
from offload.optim import HybridDeviceOptimizer, streamed_step
from offload.optim.arrival import _Outermost
from offload.optim.streamed_step import StreamedBucket
from offload.optim.undo import QUIET_STEPS, EarlyCounts
from tests.unit.optim.rig import assert_same_bits, backward, batch, hybrid, net, room_for_all, train, weights

FUSED = {"lr": 1e-2, "fused": True}
PADDED = sum(-(-parameter.numel() // 16) * 16 for parameter in net().parameters())
NEVER, ALWAYS = 1e9, 1e-3
"""Norms to clip to."""


def made(of: nn.Module, /, *, room: bool = True, **options: Any) -> HybridDeviceOptimizer:
    """Everything streamed, seven buckets, every backward its step's last. room: for all old weights, and no
    rest after an undone step."""
    common = {
        "offload_fraction": 1.0,
        "cpu_share": 0.0,
        "fused": True,
        "model": of,
        "step_in_backward": "undoable",
    }
    optimizer = hybrid(of, **{**common, **options})
    if room and optimizer.early_counts is not None:
        room_for_all(optimizer)
    optimizer.last_microbatch = True
    return optimizer


def counts(optimizer: HybridDeviceOptimizer) -> EarlyCounts:
    assert optimizer.early_counts is not None
    return optimizer.early_counts


def clip(model: nn.Module, optimizer: Optimizer, max_norm: float) -> Tensor:
    if isinstance(optimizer, HybridDeviceOptimizer):
        return optimizer.clip_grad_norm_(max_norm)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def assert_same_state(
    model: nn.Module, optimizer: Optimizer, reference: nn.Module, expected: Optimizer
) -> None:
    assert_same_bits(weights(model, optimizer), weights(reference, expected))
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        state = optimizer.state[mine]
        for key, value in expected.state[theirs].items():
            assert_same_bits([state[key].reshape(-1)], [value.reshape(-1)])


# -- what is in the way --------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["call", "argument"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steps_that_clip_are_undone_and_others_kept_with_the_bits_of_no_early_start(
    dtype: torch.dtype, how: str
) -> None:
    """Half-precision weights have float32 masters here, which are on two sides like the moments."""

    def trained(mode: Any) -> tuple[HybridDeviceOptimizer, list[Tensor], dict[str, Any]]:
        model = net(dtype)
        optimizer = made(model, step_in_backward=mode, param_update_in_fp32=True)
        for step in range(6):
            norm = (NEVER, ALWAYS)[step % 3 == 1]
            optimizer.max_grad_norm = norm if how == "argument" else None
            backward(model, step)
            if how == "call":
                clip(model, optimizer, norm)
            optimizer.step()
            optimizer.zero_grad()
        found = weights(model, optimizer)
        return optimizer, found, optimizer.state_dict()

    optimizer, found, state = trained("undoable")
    _, expected, other = trained(False)
    assert_same_bits(found, expected)
    buckets = len(optimizer.placed.streamed.buckets)
    assert counts(optimizer) == EarlyCounts(started=6 * buckets, no_room=0, undone=2 * buckets)
    assert state["hybrid"] == other["hybrid"], "nothing in a state dict says which way it was made"
    for index, of in state["state"].items():
        for key, value in of.items():
            assert_same_bits([value.reshape(-1)], [other["state"][index][key].reshape(-1)])


def scaled(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def lost(model: nn.Module, optimizer: Optimizer) -> None:
    next(model.parameters()).grad = None


def another_lr(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.9


def again(model: nn.Module, optimizer: Optimizer) -> None:
    """A further microbatch that nobody announced: its forward reads weights."""
    backward(model, 77)


def evaluated(model: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        model(batch(5))


def written(model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer.synchronize_parameters()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def written_and_again(model: nn.Module, optimizer: Optimizer) -> None:
    """What was written before the last backward is no second writer, and no bucket of it starts."""
    written(model, optimizer)
    backward(model, 77)


def looked_at(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state_dict()


def left_out(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "what",
    [scaled, lost, another_lr, again, evaluated, written, written_and_again, looked_at, left_out],
    ids=lambda what: what.__name__,
)
def test_whatever_comes_between_a_backward_and_its_step_undoes_it_exactly(
    what: Callable[[nn.Module, Optimizer], None],
) -> None:
    reference, model = net(), net()
    expected, optimizer = AdamW(reference.parameters(), **FUSED), made(model)
    for step in range(5):
        for each, steps in ((reference, expected), (model, optimizer)):
            backward(each, step)
            if step % 2:
                what(each, steps)
            if step % 2 == 0 or what is not left_out:
                steps.step()
            steps.zero_grad()
    assert_same_state(model, optimizer, reference, expected)
    assert counts(optimizer).undone >= 2 * len(optimizer.placed.streamed.buckets)
    assert counts(optimizer).started > counts(optimizer).undone


def test_between_a_backward_and_its_step_weights_and_state_are_those_of_the_last_whole_step() -> None:
    model = net()
    optimizer = made(model)
    train(model, optimizer, 3)
    before, state = weights(model, optimizer), optimizer.state_dict()["state"]
    for look in (lambda: optimizer.state_dict()["state"], lambda: model.state_dict() and state):
        backward(model, 3)
        assert optimizer._early is not None
        assert optimizer._early.started
        found = look()
        assert_same_bits([parameter.detach() for parameter in model.parameters()], before)
        assert all(
            torch.equal(value, state[index][key]) for index, of in found.items() for key, value in of.items()
        )
        optimizer.zero_grad()


def test_a_scheduler_that_steps_after_the_optimizer_undoes_nothing() -> None:
    reference, model = net(), net()
    expected, optimizer = AdamW(reference.parameters(), **FUSED), made(model)
    for each, steps in ((reference, expected), (model, optimizer)):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(steps, 0.9)
        for step in range(4):
            backward(each, step)
            steps.step()
            scheduler.step()
            steps.zero_grad()
    assert_same_state(model, optimizer, reference, expected)
    assert counts(optimizer) == EarlyCounts(started=4 * len(optimizer.placed.streamed.buckets))


def test_with_a_grad_scaler_nothing_stays_started_it_is_said_once_and_the_bits_are_torchs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def trained(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(6):
            loss = model(batch(step)).square().mean()
            scaler.scale(loss * (float("inf") if step == 3 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return weights(model, optimizer)

    reference, model = net(), net()
    plain, optimizer = AdamW(reference.parameters(), **FUSED), made(model)
    assert optimizer._early is not None
    optimizer._early.quiet_steps = QUIET_STEPS
    # the way that every optimizer goes
    plain._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "offload.optim.undo"):
        assert_same_bits(trained(model, optimizer), trained(reference, plain))
    buckets = len(optimizer.placed.streamed.buckets)
    assert counts(optimizer) == EarlyCounts(started=buckets, undone=buckets)
    (said,) = [record.getMessage() for record in caplog.records]
    assert (
        f"{buckets} buckets that had started early are undone; a GradScaler and torch's clip_grad_norm_ do "
        "that in every step" in said
    )


def test_a_norm_that_is_nan_clips() -> None:
    reference, model = net(), net()
    expected, optimizer = AdamW(reference.parameters(), **FUSED), made(model)
    for each, steps in ((reference, expected), (model, optimizer)):
        backward(each, 0)
        next(each.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
        clip(each, steps, NEVER)
        steps.step()
    assert_same_state(model, optimizer, reference, expected)
    assert counts(optimizer).undone == len(optimizer.placed.streamed.buckets)


def test_a_layer_that_is_run_again_in_the_backward_undoes_nothing() -> None:
    def forward(model: nn.Module, step: int) -> None:
        layers = list(model.children())
        x = checkpoint(nn.Sequential(*layers[:2]), batch(step), use_reentrant=False)
        checkpoint(nn.Sequential(*layers[2:]), x, use_reentrant=False).float().square().mean().backward()

    reference, model = net(), net()
    expected, optimizer = AdamW(reference.parameters(), **FUSED), made(model)
    for step in range(3):
        for each, steps in ((reference, expected), (model, optimizer)):
            forward(each, step)
            steps.step()
            steps.zero_grad()
    assert_same_state(model, optimizer, reference, expected)
    assert counts(optimizer) == EarlyCounts(started=3 * len(optimizer.placed.streamed.buckets))


def test_a_gathering_module_that_is_run_again_in_a_backward_waits_for_no_more_than_is_below_it() -> None:
    waited: list[str] = []
    module, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    outermost = _Outermost(lambda: waited.append("all"), {id(module): lambda: waited.append("below")})

    def run(*_: object) -> None:
        outermost.begin(module)
        outermost.end()

    run()
    y = module(x)
    y.register_hook(run)
    y.sum().backward()
    assert waited == ["all", "below"]


# -- errors --------------------------------------------------------------------------------------------------
def test_weights_that_were_written_without_a_word_are_an_error_until_state_is_loaded() -> None:
    model = net()
    optimizer = made(model)
    train(model, optimizer, 2)
    optimizer.synchronize_parameters()
    before, state = {key: value.clone() for key, value in model.state_dict().items()}, optimizer.state_dict()
    backward(model, 2)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    message = (
        r"the weights of parameter 0 \(0.weight, .*\) were written after 7 buckets had "
        r"been stepped in the backward; two writers"
    )
    for _ in range(2):
        with pytest.raises(OffloadError, match=message):
            optimizer.step()
    optimizer.load_state_dict(state)
    model.load_state_dict(before)
    optimizer.zero_grad()
    reference = net()
    assert_same_bits(
        train(model, optimizer, 2, first=2), train(reference, AdamW(reference.parameters(), **FUSED), 4)
    )


def test_a_second_backward_without_a_forward_is_refused_and_what_had_started_is_undone() -> None:
    """It read the new weights where it came through them, so its gradients are of no use."""
    reference, model = net(), net()
    expected, optimizer = AdamW(reference.parameters(), **FUSED), made(model)
    loss = model(batch(0)).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(
        OffloadError, match=r"got a gradient after its bucket .* the step is undone: call zero_grad\(\) and"
    ):
        loss.backward()
    optimizer.zero_grad()
    assert_same_bits(weights(model, optimizer), weights(reference, expected))
    assert_same_bits(train(model, optimizer, 3), train(reference, expected, 3))


@pytest.mark.parametrize("where", ["before anything is issued", "in the kernel", "after the kernel"])
def test_a_worker_that_fails_in_the_backward_leaves_weights_and_state_of_the_last_whole_step(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    reference, model = net(), net()
    expected, optimizer = AdamW(reference.parameters(), **FUSED), made(model)
    train(model, optimizer, 2)
    train(reference, expected, 2)
    third = sorted(optimizer.placed.streamed.buckets, key=lambda bucket: bucket.layout.start)[2]
    step, adam, send = StreamedBucket.step, streamed_step.adam, type(third.mover).send

    def failing_step(self: StreamedBucket, *arguments: Any) -> None:
        failing.append(self is third)
        if self is third and where == "before anything is issued":
            raise MemoryError("no more")
        step(self, *arguments)

    def failing_adam(*arguments: Any, **options: Any) -> None:
        if failing[-1] and where == "in the kernel":
            raise MemoryError("no more")
        adam(*arguments, **options)

    def failing_send(self: Any, pairs: Any) -> None:
        if failing[-1] and where == "after the kernel":
            raise MemoryError("no more")
        send(self, pairs)

    failing = [False]
    monkeypatch.setattr(StreamedBucket, "step", failing_step)
    monkeypatch.setattr(streamed_step, "adam", failing_adam)
    monkeypatch.setattr(type(third.mover), "send", failing_send)
    backward(model, 2)
    backward(reference, 2)
    optimizer._steps._streamer.synchronize()
    message = (
        r"a step that had started in the backward failed on a worker \(MemoryError: no "
        r"more\); its 7 buckets are undone: weights"
    )
    with pytest.raises(OffloadError, match=message):
        optimizer.step()
    monkeypatch.undo()
    assert_same_state(model, optimizer, reference, expected)
    optimizer.step()
    expected.step()
    optimizer.zero_grad()
    expected.zero_grad()
    train(model, optimizer, 2, first=3)
    train(reference, expected, 2, first=3)
    assert_same_state(model, optimizer, reference, expected)


def test_closed_between_a_backward_and_its_step_it_leaves_the_last_whole_steps_weights() -> None:
    model = net()
    engine = OffloadEngine(device=SimDevice())
    optimizer = made(model, engine=engine)
    train(model, optimizer, 2)
    before = weights(model, optimizer)
    backward(model, 2)
    optimizer.close()
    assert_same_bits([parameter.detach() for parameter in model.parameters()], before)
    assert engine.arena.stats().lent_bytes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"step_in_backward": "perhaps"},
            "step_in_backward is 'perhaps', must be False, True .* or 'undoable'",
        ),
        ({"step_in_backward": 1}, "step_in_backward is 1, must be False"),
        ({"model": None}, "step_in_backward='undoable' needs overlap, and model="),
        ({"overlap_cpu_optimizer_d2h_h2d": False}, "step_in_backward='undoable' needs overlap, and model="),
        (
            {"step_in_backward": True, "max_grad_norm": 1.0},
            "leave one out, or give step_in_backward='undoable'",
        ),
    ],
)
def test_a_mode_that_cannot_be_exact_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(net(), room=False, **options)


def test_where_nothing_is_streamed_it_is_said_that_nothing_will_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "offload.optim.hybrid"):
        made(net(), cpu_share=1.0)
    assert "step_in_backward='undoable' starts what is streamed, and nothing is" in caplog.text


# -- rest ----------------------------------------------------------------------------------------------------
def test_after_a_step_that_clipped_nothing_starts_until_eight_in_a_row_would_not_have() -> None:
    """The bits are torch's whichever starts. A step that clips within the eight begins them anew; nobody
    waits for its norm."""
    reference, model = net(), net()
    expected, optimizer = AdamW(reference.parameters(), **FUSED), made(model)
    assert optimizer._early is not None
    optimizer._early.quiet_steps = QUIET_STEPS
    clipping = {1, 5}
    started = []
    for step in range(5 + QUIET_STEPS + 3):
        before = counts(optimizer).started
        for each, steps in ((reference, expected), (model, optimizer)):
            backward(each, step)
            clip(each, steps, ALWAYS if step in clipping else NEVER)
            steps.step()
            steps.zero_grad()
        started.append(counts(optimizer).started > before)
    assert [step for step, any_started in enumerate(started) if any_started] == [
        0,
        1,
        5 + QUIET_STEPS + 1,
        5 + QUIET_STEPS + 2,
    ]
    assert_same_state(model, optimizer, reference, expected)


# -- memory --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "each"), [(torch.float32, 16), (torch.bfloat16, 24)])
def test_the_second_side_doubles_the_states_host_memory_to_the_byte(dtype: torch.dtype, each: int) -> None:
    """Two moments of 4 bytes, and for bfloat16 weights a master, twice."""
    engine = OffloadEngine(device=SimDevice())
    optimizer = made(net(dtype), engine=engine, param_update_in_fp32=True)
    assert optimizer.host_bytes == engine.arena.stats().lent_bytes == each * PADDED


def test_a_budget_that_holds_one_side_only_is_refused_before_anything_is_pinned() -> None:
    engine = OffloadEngine(OffloadConfig(host_limit_bytes=12 * PADDED), device=SimDevice())
    needed, free = f"{16 * PADDED:,}", f"{12 * PADDED:,}"
    with pytest.raises(
        HostBudgetError, match=rf"the streamed parameters need {needed} bytes of host memory, and {free} of"
    ):
        made(net(), engine=engine)
    assert engine.arena.held_bytes == 0


class _Held(torch.autograd.Function):
    """The identity, with device memory that is held from its forward to its backward, as an activation is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: SimDevice, nbytes: int) -> Tensor:
        ctx.held = [device.empty(nbytes)]
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.held.clear()
        return gradient, None, None


class _Layers(nn.Module):
    """Two layers of two buckets each, 1,024 float32 weights a bucket, and memory that their boundary
    holds."""

    def __init__(self, device: SimDevice, held_bytes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)
        self.device, self.held_bytes = device, held_bytes

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(_Held.apply(torch.tanh(self.first(x)), self.device, self.held_bytes))
        return y


@pytest.mark.parametrize(
    ("held_bytes", "fitting"),
    [(0, 0), (12287, 0), (12288, 1), (4096 + 8192 + 12287, 1), (4096 + 8192 + 12288, 2)],
)
def test_a_bucket_starts_if_its_old_weights_take_no_more_than_was_active_before(
    held_bytes: int, fitting: int
) -> None:
    """The last layer's two buckets are offered first, and set the mark. Then the boundary's bytes are freed;
    a bucket's old weights take 4,096 and are asked for thrice, and with the first bucket that starts the
    device learns of the layer's gradient, 8,192."""
    device = SimDevice()
    model = _Layers(device, held_bytes)
    optimizer = made(model, room=False, engine=OffloadEngine(device=device))
    # else the device would learn of their bytes from the worker, whenever that comes to them
    for weight in model.parameters():
        device.note_write(device.compute, weight.detach().view(-1).view(torch.uint8))
    for step in range(3):
        model(torch.ones(1, 32)).square().mean().backward()
        assert len(optimizer._early.started) == fitting  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        assert counts(optimizer) == EarlyCounts(
            started=(step + 1) * fitting, no_room=(step + 1) * (4 - fitting)
        )
    optimizer.synchronize_parameters()
    assert all(bucket.old is None for bucket in optimizer.placed.streamed.buckets), (
        "the new weights are there: the old ones are gone"
    )


def test_old_weights_for_which_the_device_has_no_room_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, model = net(), net()
    expected, optimizer = AdamW(reference.parameters(), **FUSED), made(model)

    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(optimizer.engine.device, "empty", full)
    assert_same_bits(train(model, optimizer, 2), train(reference, expected, 2))
    assert counts(optimizer) == EarlyCounts(no_room=2 * len(optimizer.placed.streamed.buckets))


def test_what_no_module_owns_never_starts() -> None:
    """Whoever reads it does not say so."""
    model, outside = net(), nn.Parameter(torch.ones(40))
    optimizer = made(model, params=[*model.parameters(), outside], bucket_bytes=1024)
    (model(batch(0)).square().mean() + outside.square().sum()).backward()
    indices = {member.index for bucket in optimizer._early.started.values() for member in bucket.members}  # type: ignore[union-attr]
    assert indices
    assert len(optimizer.members) - 1 not in indices
    optimizer.zero_grad()

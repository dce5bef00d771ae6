"""Recomputes compared with their forwards: which bits, in which calls, and when the verdict is read."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import PipelineOffloadManager, RecomputeDiffersError
from offload.checkpoint import net
from offload.checkpoint.checksum import checksum
from offload.checkpoint.net import Watch

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.int8,
    torch.uint64,
    torch.float8_e4m3fn,
]
SHAPES = [(), (3, 5), (4, 8), (70_001, 3), (300_000,)]


def of_bytes(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Any bits, NaN included."""
    count = torch.Size(shape).numel() * dtype.itemsize
    top = 2 if dtype is torch.bool else 256
    made = torch.randint(top, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return made.view(dtype).reshape(shape)


def same(one: Tensor, other: Tensor) -> bool:
    sums = checksum(one), checksum(other)
    assert sums[0] is not None
    assert sums[1] is not None
    return bool(sums[0] == sums[1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_bit_of_each_type_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = of_bytes(dtype, shape)
    assert same(values, values.clone())
    raw = values.reshape(-1).view(torch.uint8)
    for at in {0, raw.numel() // 2, raw.numel() - 1}:
        for bit in (1,) if dtype is torch.bool else (1, 128):
            changed = raw.clone()
            changed[at] ^= bit
            assert not same(values, changed.view(dtype).reshape(shape))


@pytest.mark.parametrize("count", [64, 1 << 20])
def test_bits_that_change_places_or_signs_are_another_sum(count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    for change in (
        values.flip(0),
        -values,
        values.roll(1),
        values.roll(7),
        values.view(2, -1).t().reshape(-1),
    ):
        assert not same(values, change.contiguous())
    swapped = values.clone()
    swapped[[3, count - 1]] = swapped[[count - 1, 3]]
    assert not same(values, swapped)
    mask = values > 0
    assert not same(mask, ~mask)


@pytest.mark.parametrize("lead", [1, 2, 3, 4, 7, 8])
def test_where_a_tensor_lies_in_its_storage_is_no_difference(lead: int) -> None:
    values = torch.arange(24, dtype=torch.int16)
    moved = torch.cat([torch.zeros(lead, dtype=torch.int16), values])[lead:]
    assert same(values, moved)


def test_views_count_the_elements_that_they_show() -> None:
    base = torch.randn(8, 6)
    assert same(base[:, 1:3], base.clone()[:, 1:3])
    assert not same(base[:, 1:3], base[:, 2:4])
    assert same(base.t(), base.t().clone())
    assert checksum(base[:1].expand(1 << 30, 6)) is not None  # expanded: no bytes of its own
    assert same(base[0, 0].expand(8, 6), base[:1, :1].clone())


def test_what_has_no_bits_has_no_sum() -> None:
    assert checksum(torch.empty(0, 3)) is None
    assert checksum(torch.empty(3, device="meta")) is None
    assert checksum(torch.eye(3).to_sparse()) is None


def test_a_sum_is_seen_by_no_mode() -> None:
    class Refusing(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    values = torch.randn(3, requires_grad=True)
    with Refusing(), torch.device("meta"), torch.autocast("cpu"):
        assert checksum(values) is not None


# -- which calls, and when -----------------------------------------------------------------------------------
def test_three_calls_of_each_block_are_compared_then_one_in_61_of_its_class(
    manager: PipelineOffloadManager,
) -> None:
    watch = Watch()
    taken = [
        (number, name)
        for number in range(200)
        for name in ("a", "b")
        if watch.sample(manager.engine, name, "kind") is not None
    ]
    first = [(number, name) for number in range(3) for name in ("a", "b")]
    later = [(3 + (61 * n - 1) // 2, "ab"[(61 * n - 1) % 2]) for n in range(1, 7)]
    assert taken == [*first, *later]


class Scaled(nn.Module):
    """settings: holds the `scale` of its forward: what is written in an object is not put back."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.settings = SimpleNamespace(scale=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(x) * self.settings.scale)


def train(model: nn.Sequential, count: int, *, differing: int = -1) -> list[str]:
    """The errors of some steps; in step `differing` the first block has another scale in its recompute."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    raised: list[str] = []
    for number in range(count):
        loss = model(torch.randn(4, 8)).square().mean()
        model[0].settings.scale = 2.0 if number == differing else 1.0  # type: ignore[union-attr]
        loss.backward()
        model[0].settings.scale = 1.0  # type: ignore[union-attr]
        try:
            optimizer.step()
            raised.append("")
        except RecomputeDiffersError as error:
            raised.append(str(error))
        optimizer.zero_grad()
    return raised


def test_a_difference_names_the_block_the_step_and_the_way_out() -> None:
    model = nn.Sequential(Scaled(), Scaled())
    offload.apply(model, "hidden_states", min_numel=1)
    raised = train(model, 3, differing=1)
    assert [bool(text) for text in raised] == [False, True, False]
    for part in ("the recompute of 0", "in step 2", "float32[4, 8]", "no_recompute=['0']", "'warn'"):
        assert part in raised[1]


def test_a_difference_may_be_a_warning_once_a_block(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Scaled(), Scaled())
    offload.apply(model, "hidden_states", min_numel=1, recompute_differs="warn")
    caplog.set_level(logging.WARNING)
    for differing in (0, 1):
        assert train(model, 2, differing=differing) == ["", ""]
    assert caplog.text.count("the recompute of 0 gave other bits than its forward") == 1


def test_a_late_verdict_is_not_waited_for_before_the_next_steps_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two blocks with three first calls each, call 61 after these is the first one's in step 34."""
    model = nn.Sequential(Scaled(), Scaled())
    offload.apply(model, "hidden_states", min_numel=1)
    late = SimpleNamespace(query=lambda: False, synchronize=lambda: None)
    made = net._Verdict
    monkeypatch.setattr(net, "_Verdict", lambda *parts: made(*parts[:-1], late))
    raised = train(model, 36, differing=33)
    assert [number for number, text in enumerate(raised) if text] == [34]
    assert "in step 34" in raised[34]


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_difference_in_a_closure_is_raised_before_weights_are_stepped(kind: Any, by_name: bool) -> None:
    """The closure's backward runs inside of step(), so the verdict that was there before it said nothing;
    also where its forward is the first that the process compares."""
    while net._hooks:
        net._hooks.pop().remove()
    model = nn.Sequential(Scaled(), Scaled())
    offload.apply(model, "hidden_states", min_numel=1)
    optimizer = kind(model.parameters(), lr=0.1)

    def closure(scale: float = 2.0) -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        model[0].settings.scale = scale  # type: ignore[union-attr]
        loss.backward()
        model[0].settings.scale = 1.0  # type: ignore[union-attr]
        return loss

    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RecomputeDiffersError, match="the recompute of 0"):
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert all(map(torch.equal, before, model.parameters()))
    assert isinstance(optimizer.step(partial(closure, 1.0)), Tensor)


def test_under_torchs_own_checkpoints_with_our_contexts_saves_are_compared() -> None:
    model = nn.Sequential(Scaled(), Scaled())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    contexts = offload.selective_contexts({torch.ops.aten.addmm.default})
    for differing in (False, True):
        offload.init_chunk_handler(None, None, 1)
        x = torch.randn(4, 8, requires_grad=True)
        for block in model:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        model[1].settings.scale = 2.0 if differing else 1.0  # type: ignore[union-attr]
        x.square().mean().backward()
        with (
            pytest.raises(RecomputeDiffersError, match="Run what differs outside")
            if differing
            else nullcontext()
        ):
            optimizer.step()
        offload.step_end()
        optimizer.zero_grad()


class Noisy(nn.Module):
    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.fc, self.act, self.is_last = nn.Linear(8, 8), nn.RReLU(), is_last

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.fc(x))
        return y if self.is_last else torch.tanh(y)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("is_last", [True, False])
def test_noise_that_is_drawn_after_it_was_saved_is_the_same_and_no_difference(
    is_last: bool, is_training: bool
) -> None:
    """rrelu hands its noise to autograd before it draws it: what stands there is whatever was in memory.
    Where it is the last operator that saves anything, a recompute that stopped there had that for noise."""
    gradients: list[list[Tensor]] = []
    for applied in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[Noisy(is_last) for _ in range(4)]).train(is_training)
        if applied:
            offload.apply(model, "hidden_states", min_numel=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: list[Tensor] = []
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(64, 8)).square().mean().backward()
            found += [
                parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
            ]
            optimizer.step()
        gradients.append(found)
    assert all(map(torch.equal, *gradients))


def test_what_a_library_reserves_is_no_difference() -> None:
    """A cell of an LSTM saves a buffer of bytes of which the library writes a part."""

    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.cells(x)[0]
            return x + y

    model = nn.Sequential(*[Cells() for _ in range(3)])
    offload.apply(model, "hidden_states", min_numel=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(2, 12, 8)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mode": "groups", "no_recompute": ["0"]}, "which recomputes nothing"),
        ({"mode": "selective", "no_recompute": ["x.*"]}, "'x.*' matches no block; they are 0, 1"),
        ({"mode": "selective", "recompute_differs": "ignore"}, "must be 'raise' or 'warn'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("*", r"\*")):
        offload.apply(nn.Sequential(Scaled(), Scaled()), **arguments)

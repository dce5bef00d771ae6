"""offload.compare: a row a mode, the fastest that fits, and everything as it was."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import offload
from offload.apply import is_applied
from offload.compare import Compared, Comparison, _modes, _one_optimizer

WIDTH = 64
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "hybrid": lambda parameters: offload.HybridDeviceOptimizer(parameters, lr=0.1),
}


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    offload.PipelineOffloadManager.close_instance()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.GELU())
            for _ in range(4)
        )
        self.register_buffer("seen", torch.zeros(1))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1  # bound anew
        for layer in self.layers:
            x = layer(x)
        return x


def bits(*values: Any) -> list[Any]:
    """Copies of all that is below, to compare."""
    return copy.deepcopy(
        [
            [value.detach().clone() if isinstance(value, Tensor) else value for value in each]
            for each in values
        ]
    )


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: StepLR) -> list[Any]:
    state = [
        value for _, found in sorted(optimizer.state_dict()["state"].items()) for value in found.values()
    ]
    return bits(
        model.parameters(),
        model.buffers(),
        (parameter.grad for parameter in model.parameters()),
        state,
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        [scheduler.state_dict(), torch.get_rng_state(), random.getstate(), model.training],
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Loop:
    """A training loop, some steps in."""

    def __init__(self, optimizer: str, steps: int) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = StepLR(self.optimizer, 1, 0.5)
        self.fails: Callable[[], None] = lambda: None
        for _ in range(steps):
            self.step()
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)

    def step(self) -> None:
        self.model.train()
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, WIDTH) * (1 + random.random())).square().mean()
        self.fails()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()

    def state(self) -> list[Any]:
        return state_of(self.model, self.optimizer, self.scheduler)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_names_the_fastest_and_leaves_every_bit_as_it_was(optimizer: str, steps: int) -> None:
    loop = Loop(optimizer, steps)
    loop.model.eval()
    before = loop.state()
    table = offload.compare(
        loop.model,
        loop.step,
        modes=[False, "checkpoint", "hidden_states"],
        stateful=[loop.scheduler],
        budget_s=0.1,
    )
    assert same(loop.state(), before)
    assert not is_applied(loop.model)
    assert [row.arguments for row in table.rows] == [
        {"mode": False},
        {"mode": "checkpoint"},
        {"mode": "hidden_states"},
    ]
    assert all(row.steps >= 2 and row.step_ms > 0 and not row.why_not for row in table.rows)
    assert [row.recomputes for row in table.rows] == [0, 4, 4]
    assert table.best == dict(min(table.rows, key=lambda row: row.step_ms).arguments)
    assert "mode='hidden_states'" in str(table)
    assert "4 blocks" in str(table)
    assert "on the simulated device" in str(table)
    assert table.as_dict()["rows"][0]["arguments"] == {"mode": False}
    loop.step()  # and it trains on


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("of the loop"), ValueError("of the loop")])
def test_what_a_step_raises_is_raised_and_every_bit_is_as_it_was(error: Any) -> None:
    loop = Loop("AdamW", 1)
    before = loop.state()
    calls = iter(range(100))

    def fails() -> None:
        if next(calls) == 3:
            raise error

    loop.fails = fails
    with pytest.raises(error if isinstance(error, type) else type(error)):
        offload.compare(
            loop.model,
            loop.step,
            modes=["hidden_states", "checkpoint"],
            stateful=[loop.scheduler],
            budget_s=0.1,
        )
    assert same(loop.state(), before)
    assert not is_applied(loop.model)


def test_a_mode_without_room_and_one_that_is_refused_are_rows() -> None:
    loop = Loop("AdamW", 1)
    before = loop.state()
    calls = iter(range(100))

    def fails() -> None:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("the device is full")

    loop.fails = fails
    table = offload.compare(
        loop.model,
        loop.step,
        modes=["checkpoint", {"mode": "groups", "no_recompute": "*"}, False],
        stateful=[loop.scheduler],
        budget_s=0.1,
    )
    full, refused, nothing = table.rows
    assert full.why_not == "the device ran out of memory"
    assert refused.why_not.startswith("refused: ")
    assert not nothing.why_not
    assert table.best == {"mode": False}
    assert same(loop.state(), before)


def test_what_is_above_the_limit_is_no_best() -> None:
    rows = (
        Compared(
            arguments={"mode": False}, steps=2, step_ms=1.0, peak_bytes=3, why_not="its peak is above 2 B"
        ),
        Compared(arguments={"mode": "checkpoint"}, steps=2, step_ms=3.0, peak_bytes=1),
        Compared(arguments={"mode": "auto", "device_total": 2}, steps=2, step_ms=2.0, peak_bytes=2),
    )
    table = Comparison(rows, 2)
    assert table.best == {"mode": "auto", "device_total": 2}
    assert "3.00" in str(table)  # of nothing
    with pytest.raises(ValueError, match="no mode can be taken"):
        _ = Comparison(rows[:1], 2).best


def test_limits_of_the_process_are_as_they_were(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop("SGD", 0)
    offload.configure(offload.OffloadConfig(host_limit_bytes=1 << 30), device="sim")
    offload.compare(loop.model, loop.step, modes=[{"mode": "groups", "device_limit": "1MB"}], budget_s=0.1)
    engine = offload.PipelineOffloadManager.get_instance().engine
    assert engine.config.host_limit_bytes == 1 << 30
    assert engine.limits.device_limit_bytes is None
    assert engine.arena.stats().lent_bytes == 0


def test_a_step_that_trains_nothing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop("SGD", 0)
    offload.compare(loop.model, lambda: None, modes=[False], budget_s=0.01)
    (said,) = caplog.messages
    assert "steps no optimizer stepped, and no weight of Model was written" in said

    def by_hand() -> None:
        with torch.no_grad():
            next(loop.model.parameters()).mul_(0.5)

    for trains in (loop.step, by_hand):
        offload.compare(loop.model, trains, modes=["checkpoint", False], budget_s=0.01)
    assert caplog.messages == [said]


def test_what_cannot_be_compared_is_refused() -> None:
    loop = Loop("SGD", 0)
    for given in ((loop.model, None), (loop.step, loop.model)):
        with pytest.raises(ValueError, match="a callable that does one training step"):
            offload.compare(*given)  # type: ignore[arg-type]
    handle = offload.apply(loop.model, mode="checkpoint")
    with pytest.raises(ValueError, match="call remove"):
        offload.compare(loop.model, loop.step)
    handle.remove()
    with pytest.raises(ValueError, match="budget_s"):
        offload.compare(loop.model, loop.step, budget_s=0)
    with pytest.raises(ValueError, match="'grops', must be one of"):
        offload.compare(loop.model, loop.step, modes=[False, "grops"])
    with pytest.raises(ValueError, match=r"must be a list of modes, as in modes=\['auto'\]"):
        offload.compare(loop.model, loop.step, modes="auto")
    with pytest.raises(ValueError, match="modes= has mod, which are no arguments of apply"):
        offload.compare(loop.model, loop.step, modes=[False, {"mod": "auto"}])


class Habits:
    """Loops that change more than a plain one does."""

    def hybrid_with_masters(self, model: nn.Module) -> torch.optim.Optimizer:
        model.bfloat16()
        return offload.HybridDeviceOptimizer(model.parameters(), 1.0, param_update_in_fp32=True, lr=1e-3)

    def hybrid_in_the_backward(self, model: nn.Module) -> torch.optim.Optimizer:
        return offload.HybridDeviceOptimizer(model.parameters(), lr=1e-3, overlap="backward", model=model)

    def hybrid_of_torchs_own(self, model: nn.Module) -> torch.optim.Optimizer:
        return offload.HybridDeviceOptimizer(model.parameters(), 0, lr=0.1)

    def rate_is_a_tensor(self, model: nn.Module) -> torch.optim.Optimizer:
        self.rate = torch.tensor(0.1)
        return torch.optim.AdamW(model.parameters(), lr=self.rate, foreach=False)

    def groups_are_added(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def rate_falls_before_a_step(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def steps_another_parameter(self, model: nn.Module) -> torch.optim.Optimizer:
        self.besides = nn.Parameter(torch.ones(3))
        return torch.optim.SGD([*model.parameters(), self.besides], lr=0.1)

    def freezes(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def replaces_a_weight(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def odd_buffers(self, model: nn.Module) -> torch.optim.Optimizer:
        model.register_buffer("rows", torch.ones(1, 2).expand(4, 2))
        with torch.inference_mode():
            model.register_buffer("made", torch.ones(4))
        return torch.optim.SGD(model.parameters(), lr=0.1)


HABITS = [name for name in vars(Habits) if not name.startswith("_")]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", HABITS)
def test_it_goes_on_as_a_loop_that_was_never_compared(name: str, steps: int) -> None:
    def trained(compared: bool) -> list[Any]:
        torch.manual_seed(0)
        habits = Habits()
        half_built = offload.HybridDeviceOptimizer.__new__(offload.HybridDeviceOptimizer)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)) for _ in range(2)))
        optimizer: Any = getattr(habits, name)(model)
        x = torch.randn(8, 32, dtype=next(model.parameters()).dtype)

        def step() -> None:
            if name == "rate_falls_before_a_step":
                optimizer.param_groups[0]["lr"] *= 0.5
            model(x).float().square().mean().backward()
            if name == "steps_another_parameter":
                habits.besides.grad = torch.ones(3)
            optimizer.step()
            optimizer.zero_grad()
            if name == "groups_are_added" and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
            if name == "freezes":
                next(model.parameters()).requires_grad_(False)
            if name == "replaces_a_weight":  # as pruning does
                old, new = model[0][0].weight, nn.Parameter(model[0][0].weight.detach().clone())
                model[0][0].weight = new
                (group,) = optimizer.param_groups
                group["params"] = [new if each is old else each for each in group["params"]]
                optimizer.state[new] = optimizer.state.pop(old)

        for _ in range(steps):
            step()
        if compared:
            offload.compare(model, step, modes=[False, "checkpoint"], budget_s=0.01)
        if name == "rate_is_a_tensor":
            habits.rate.mul_(0.5)  # the user's own hand on it
        for _ in range(2):
            step()
        found = optimizer.state_dict()
        values = [value for entry in found["state"].values() for value in entry.values()]
        groups = [len(found["param_groups"]), found["param_groups"][0]["lr"]]
        parameters = [*model.parameters(), *getattr(habits, "besides", torch.ones(0))]
        result = bits(parameters, model.buffers(), values, groups)
        result.append([each.requires_grad for each in model.parameters()])
        if hasattr(optimizer, "close"):
            optimizer.close()
        del half_built
        return result

    assert same(trained(compared=False), trained(compared=True))


def test_a_step_that_a_mode_cannot_take_is_a_row() -> None:
    torch.manual_seed(0)
    model: Any = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), backend="eager")

    def step() -> None:
        model(torch.randn(4, 8)).sum().backward()
        model.zero_grad()

    nothing, recomputed, moved = offload.compare(
        model, step, modes=[False, "checkpoint", "groups"], budget_s=0.01
    ).rows
    assert recomputed.why_not.startswith("fails: block")
    assert [nothing.why_not, moved.why_not] == ["", ""]


def test_a_peak_is_not_that_of_the_mode_before() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def step() -> None:  # without an optimizer, which would end steps
        model(torch.randn(64, WIDTH)).sum().backward()
        model.zero_grad()

    moves = {"mode": "groups", "min_numel": 1, "blocks": ["0", "1", "2"]}
    moved, nothing = offload.compare(model, step, modes=[moves, False], budget_s=0.01).rows
    assert moved.peak_bytes > 0 == nothing.peak_bytes


def test_the_optimizer_that_steps_the_model_has_a_row_of_all_kinds() -> None:
    """Found, named as it is written in a call, and no tensor of it is copied into the table. A second one
    that steps the model leaves the row out."""
    loop = Loop("AdamW", 1)
    table = offload.compare(loop.model, loop.step, budget_s=0.01)
    (row,) = [row for row in table.rows if "optimizer" in row.arguments]
    assert row.arguments["optimizer"] is loop.optimizer
    assert row.text.startswith("mode='auto', optimizer=optimizer")
    assert row.named["optimizer"] == "AdamW"
    json.dumps(table.as_dict())
    other = torch.optim.SGD(loop.model.parameters())
    assert not any("optimizer" in row for row in _modes(None, _one_optimizer(loop.model)))
    del other


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has a peak of its own")
def test_without_a_gpu_off_counts_its_saved_bytes() -> None:
    loop = Loop("SGD", 0)
    (row,) = offload.compare(loop.model, loop.step, modes=[False], budget_s=0.01).rows
    assert row.peak_bytes > 0
    assert row.moved_bytes == row.pinned_bytes == 0
    table = offload.compare(loop.model, loop.step, f"{row.peak_bytes - 1}B", [False], budget_s=0.01)
    assert "its peak is above" in table.rows[0].why_not
    table = offload.compare(loop.model, loop.step, f"{row.peak_bytes}B", [False], budget_s=0.01)
    assert not table.rows[0].why_not

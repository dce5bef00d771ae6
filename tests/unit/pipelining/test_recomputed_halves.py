"""Blocks that are recomputed under torch's zero-bubble schedules, on one rank: how often, what stays between
the halves, and bitwise gradients."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import offload
from offload.auto import plan as auto_plan
from offload.groups.seen import StepClock
from offload.ids import ChunkId
from offload.pipelining import OffloadPipelineStage
from offload.planner import profile, work
from offload.policy.actions import Action, Rates
from offload.policy.menu import Menu
from parallel.schedules import SCHEDULES, build_schedule
from tests.inside import impose
from tests.parsed import parse_action
from tests.ticks import counted_time
from tests.unit.groups.stack import build_manager, installed

pytestmark = pytest.mark.usefixtures("one_rank")

ROWS, WIDTH, MICROBATCHES, LAYERS = 8, 16, 4, 2
SAVE = ROWS * WIDTH * 4


class Block(nn.Module):
    """Four groups of parameters: a norm and three linears."""

    forwards = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        Block.forwards += 1
        y = self.norm(x)
        return x + self.down(functional.dropout(torch.tanh(self.gate(y)) * self.up(y), 0.1))


class Pipeline:
    """All stages of a schedule on this rank. mode: of `apply`; None for none. frozen: the first blocks of
    each."""

    def __init__(self, name: str, mode: Any, frozen: int = 0, **options: Any) -> None:
        torch.manual_seed(0)
        count = SCHEDULES[name].default_virtual_stages
        example = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
        modules = [nn.Sequential(*(Block() for _ in range(LAYERS))) for _ in range(count)]
        for module in modules:
            module[:frozen].requires_grad_(False)
        self.handles = [offload.apply(module, mode=mode, **options) for module in modules if mode]
        self.stages = [
            OffloadPipelineStage(
                module,
                index,
                count,
                torch.device("cpu"),
                input_args=example.detach() if index == 0 else example,
                output_args=example,
            )
            for index, module in enumerate(modules)
        ]
        self.schedule = build_schedule(
            SCHEDULES[name],
            self.stages,
            microbatches=MICROBATCHES,
            loss_fn=lambda output, target: (output - target).square().sum(),
        )
        self.stages[0].follow(self.schedule)

    def step(self) -> list[Tensor]:
        """The gradients."""
        torch.manual_seed(1)
        rows = MICROBATCHES * ROWS
        x = torch.randn(rows, WIDTH)
        self.schedule.step(x, target=torch.zeros(rows, WIDTH), return_outputs=False)
        found = [parameter.grad for stage in self.stages for parameter in stage.submod.parameters()]
        for stage in self.stages:
            stage.submod.zero_grad(set_to_none=True)
        return [gradient for gradient in found if gradient is not None]


def expected(name: str, frozen: int = 0) -> list[Tensor]:
    with installed(None):
        return Pipeline(name, None, frozen).step()


def same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return len(found) == len(wanted) > 0 and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("mode", ["hidden_states", "selective"])
@pytest.mark.parametrize("name", ["zbv", "interleavedzerobubble"])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_half_computes_a_block_again_once_and_a_w_not_at_all_where_its_i_leaves_what_it_reads(
    name: str, mode: str, leaves: bool
) -> None:
    """torch's own W computes a block again for each of its four groups of parameters. Stage 0 has no I, and
    its W is a whole backward."""
    wanted = expected(name)
    with installed(build_manager()) as manager:
        impose(manager.engine, again_room_bytes=100 * SAVE if leaves else 0)
        pipeline = Pipeline(name, mode)
        for step in range(2):
            Block.forwards = 0
            assert same(pipeline.step(), wanted)
            # what a W reads has to be seen once
            weight_halves = MICROBATCHES if not leaves else 1 - step
            assert Block.forwards == LAYERS * (4 * MICROBATCHES + weight_halves)
            assert manager.step_end().device_bytes_peak > 0
            assert manager.engine.transfers.device_bytes == 0


class Stage:
    """The halves of one split stage by hand, each block recomputed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.graphs: dict[int, Any] = {}
        self.reads: Sequence[tuple[int, int, bool]] = ()  # of the last chunk

    def run(self, manager: Any, text: str) -> list[tuple[str, int, int]]:
        """Each action with the forwards that it ran and the bytes that wait on the device after it."""
        seen = []
        manager.set_order([parse_action(word) for word in text.split()])
        for word in text.split():
            kind, stage, microbatch = action = parse_action(word)
            Block.forwards = 0
            if kind == "F":
                manager.begin_chunk(stage, microbatch)
                x = torch.randn(ROWS, WIDTH).requires_grad_()
                self.graphs[microbatch] = x, self.module(x * 1)
                manager.end_forward(stage, microbatch)
            else:
                manager.begin_backward(stage, microbatch, kind)
                parameters = list(self.module.parameters())
                if kind == "I":
                    x, y = self.graphs.pop(microbatch)
                    self.graphs[microbatch] = stage_backward_input([y], [y], [x], iter(parameters))[1]
                    del x, y
                else:
                    stage_backward_weight(iter(parameters), self.graphs.pop(microbatch))
                manager.end_backward(*action.chunk, kind)
            seen.append((word, Block.forwards, manager.engine.transfers.resident_bytes))
        self.reads = manager.tracker.again.seen()[action.chunk]
        manager.step_end()
        return seen


LEFT = 3 * SAVE + 2 * 4 * ROWS
"""Of a block: the norm's input and output, what the last product reads, and the norm's two numbers a row."""


@pytest.mark.parametrize(
    ("room", "frozen", "blocks"),
    [
        (0, (), 0),
        (LEFT - 1, (), 0),
        (LEFT, (), 1),
        (9 * LEFT, (), 2),
        (LEFT - 1, (0,), 0),
        (LEFT, (0,), 1),
        (LEFT - 1, (1,), 0),
    ],
)
def test_the_first_blocks_leave_what_the_room_holds_and_it_is_counted_until_the_weight_half(
    room: int, frozen: tuple[int, ...], blocks: int
) -> None:
    """A block that is frozen leaves nothing, and does not end what those after it leave."""
    with installed(build_manager(max_restoring_bytes=0)) as manager:
        impose(manager.engine, again_room_bytes=room)
        stage = Stage()
        for at in frozen:
            stage.module[at].requires_grad_(False)
        handle = offload.apply(stage.module, mode="hidden_states")
        stage.run(manager, "1F0 1I0 1W0")
        seen = stage.run(manager, "1F0 1F1 1I0 1I1 1W0 1W1")
        handle.remove()
        again = {word: forwards for word, forwards, _ in seen if "F" not in word}
        weight_half = LAYERS - len(frozen) - blocks
        assert again == {"1I0": 2, "1I1": 2, "1W0": weight_half, "1W1": weight_half}
        assert [left for *_, left in stage.reads].count(False) == weight_half
        after = {word: nbytes for word, _, nbytes in seen}
        assert (after["1I1"], after["1W0"], after["1W1"]) == (2 * blocks * LEFT, blocks * LEFT, 0)


def test_what_a_weight_half_does_not_read_is_gone_when_it_comes_to_the_next_block() -> None:
    """torch's own keeps it until the whole W has ended, once for each group of parameters."""
    with installed(build_manager()) as manager:
        impose(manager.engine, again_room_bytes=0)
        stage = Stage()
        offload.apply(stage.module, mode="hidden_states")
        made: list[StorageWeakRef] = []
        alive: list[int] = []

        def note(module: nn.Module, args: object, output: Tensor) -> None:
            alive.append(sum(not reference.expired() for reference in made))
            made.append(StorageWeakRef(output.untyped_storage()))

        for block in stage.module:
            block.gate.register_forward_hook(note)  # no W reads what it makes
        stage.run(manager, "1F0 1I0 1W0")
    assert len(made) == 3 * LAYERS
    assert alive[-LAYERS:] == [0] * LAYERS


def test_a_block_that_is_computed_by_a_whole_backward_of_a_split_schedule_gives_up_what_it_has_read() -> None:
    """Stage 0's W is one backward, which reads all that a recompute made, each once."""
    with installed(build_manager()) as manager:
        pipeline = Pipeline("zbv", "hidden_states")
        pipeline.step()
        assert manager.tracker._halves[0].input_reads is False
        manager.begin_chunk(0, 0)
        assert manager.tracker.call_reads(manager.tracker.handlers[ChunkId(0, 0)], 0) is None
        manager.begin_chunk(1, 0)
        assert manager.tracker.call_reads(manager.tracker.handlers[ChunkId(1, 0)], 0) is not None
        manager.step_end()


@pytest.mark.req("S2-98", "S2-102")
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_plan_of_mode_auto_says_how_much_an_input_half_leaves_and_gradients_are_bitwise(
    frozen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = expected("zbv", frozen)
    seconds = {"F": 1e-4, "B": 2e-4, "I": 2e-4, "W": 1e-4}
    times = {
        Action(kind, s, m): seconds[kind] for kind in "FBIW" for s in range(2) for m in range(MICROBATCHES)
    }
    monkeypatch.setattr(StepClock, "end_step", lambda self: times)
    with installed(build_manager()) as manager:
        manager.engine.rates = Rates(d2h_bytes_per_s=2e7, h2d_bytes_per_s=2e7)
        pipeline = Pipeline("zbv", "auto", frozen, device_total=f"{14 * SAVE}B")
        rooms = []
        for step in range(6):
            assert same(pipeline.step(), wanted)
            peak_bytes = manager.step_end().device_bytes_peak
            assert step == 0 or peak_bytes <= 14 * SAVE
            rooms.append(manager.engine.limits.again_room_bytes)
        plan = pipeline.handles[0].explain().plan
        assert rooms[0] == 0, "the total holds before there is a plan"
        assert rooms[-1] == plan.again_room_bytes > 0
        reads = {(block.w_bytes, block.passed_bytes) for block in plan.problem.blocks[1, 0]}
        # the norm's output and what the last product reads are for their weights alone
        assert reads == {(LEFT, 2 * SAVE)} | ({(0, 0)} if frozen else set()), "as it was seen"


ORDER = "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3"
"""Of the second of two ranks under ZBV: three chunks are between their halves at the end."""


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(torch.tanh(self.gate(y)) * self.up(y))


@pytest.mark.parametrize(
    ("blocks", "total", "rate", "dear"), [(3, 25_528, 1e7, 1.0), (5, 33_776, 2e7, 2.0), (5, 46_792, 2e7, 1.0)]
)
def test_what_input_halves_leave_has_its_room_in_each_step_of_every_plan(
    blocks: int, total: int, rate: float, dear: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stays was planned without it until a step was timed: the steps in between took up to 1.7 of the
    limit, which then fell. dear: seconds of a recompute."""
    seconds = {"F": 1e-4 * blocks, "I": 1.3e-4 * blocks, "W": 0.8e-4 * blocks}
    monkeypatch.setattr(StepClock, "end_step", lambda self: {of: seconds[of.kind] for of in order()})
    price_recomputes(monkeypatch, dear * 1e-4)
    search_briefly(monkeypatch)
    stages = wide_stages(blocks)
    with counted_time(), installed(build_manager()) as manager:
        manager.engine.rates = Rates(d2h_bytes_per_s=rate, h2d_bytes_per_s=rate)
        handles = [offload.apply(stage, mode="auto", device_total=f"{total}B") for stage in stages.values()]
        for step in range(8):
            run_order(manager, stages)
            limit = manager.engine.limits.device_limit_bytes
            peak = manager.step_end().device_bytes_peak
            assert step < 2 or (limit is not None and peak <= limit), step
        assert limit == round(0.985 * total), "nothing was over, so nothing is held back"
        plan = handles[0].explain().plan
        assert plan.left_peak_bytes > 0


def test_what_input_halves_leave_may_be_more_than_the_limit_where_lengths_vary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a step as long as the typical one, no plan fits then, and the search for what stays said so by an
    AttributeError."""
    rows = deque([ROWS, ROWS], maxlen=2)  # of this step, and of the one before, whose times come with its end
    seconds = {"F": 5e-4, "I": 6.5e-4, "W": 4e-4}
    monkeypatch.setattr(
        StepClock, "end_step", lambda self: {of: seconds[of.kind] * rows[0] / ROWS for of in order()}
    )
    price_recomputes(monkeypatch, 2e-4)
    search_briefly(monkeypatch, 400)  # 100 find none that fails
    stages = wide_stages(5)
    drawn = random.Random(3)
    with counted_time(), installed(build_manager()) as manager:
        manager.engine.rates = Rates(d2h_bytes_per_s=2e8, h2d_bytes_per_s=2e8)
        for stage in stages.values():
            offload.apply(stage, mode="auto", device_total="43776B")
        for step in range(12):
            rows.append(drawn.choice((4, 8, 12)))
            run_order(manager, stages, rows[1])
            assert manager.step_end().device_bytes_peak <= 43_776, step


def price_recomputes(monkeypatch: pytest.MonkeyPatch, again_s: float) -> None:
    """again_s: of a block's whole recompute."""

    def timed(menu: Menu, scale: float) -> Menu:
        plain = menu[0].saved_bytes
        given = [(plain - level.saved_bytes) / plain for level in menu]
        return tuple(
            level._replace(recompute_s=again_s * part**1.5) for level, part in zip(menu, given, strict=True)
        )

    monkeypatch.setattr(work, "_timed", timed)
    monkeypatch.setattr(profile, "_KEEPING_S", 0.0)  # by a clock that counts, a call takes hardly anything


def search_briefly(monkeypatch: pytest.MonkeyPatch, trials: int = 100) -> None:
    """Plans that have room need not be the best; those take seconds each."""
    monkeypatch.setattr(auto_plan, "choose_mixture", partial(auto_plan.choose_mixture, max_trials=trials))


def order() -> list[Action]:
    return [parse_action(word) for word in ORDER.split()]


def wide_stages(blocks: int) -> dict[int, nn.Module]:
    torch.manual_seed(0)
    return {stage: nn.Sequential(*(Wide() for _ in range(blocks))) for stage in (1, 2)}


def run_order(manager: Any, stages: Mapping[int, nn.Module], rows: int = ROWS) -> None:
    graphs: dict[tuple[int, int], Any] = {}
    manager.set_order(order())
    for action in order():
        kind, stage, microbatch = action
        parameters = list(stages[stage].parameters())
        if kind == "F":
            manager.begin_chunk(stage, microbatch)
            x = torch.randn(rows, WIDTH).requires_grad_()
            graphs[action.chunk] = x, stages[stage](x * 1)
            manager.end_forward(stage, microbatch)
            continue
        manager.begin_backward(stage, microbatch, kind)
        if kind == "I":
            x, y = graphs.pop(action.chunk)
            graphs[action.chunk] = stage_backward_input([y], [y], [x], iter(parameters))[1]
            del x, y
        else:
            stage_backward_weight(iter(parameters), graphs.pop(action.chunk))
        manager.end_backward(stage, microbatch, kind)

"""What the halves of a split backward read: what comes back for the weight half, what the input half leaves
for it, and what the plan knows of both. The halves are torch's own, as its zero-bubble schedules run them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from offload import PipelineOffloadManager, group_commit, group_start, offload_hooks
from offload.groups.seen import SeenStep, sizes_of
from offload.groups.timed import cut_into_units
from offload.policy.actions import Action, GroupSize
from offload.saved.handles import Handle
from tests.inside import impose
from tests.parsed import parse_action
from tests.unit.groups.stack import ROWS, WIDTH, build_manager, installed

LAYERS = 6
SAVE = ROWS * WIDTH * 4
"""Bytes of one save. A layer has two: what its linear reads, in the W, and what its sine reads, in the I.
With `shares` it has three, and the I reads all of them."""


class Sines(nn.Module):
    """A linear and a sine a layer, each a group, or both in one."""

    def __init__(self, layers: int = LAYERS, *, shares: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.shares = shares  # what the linear reads is saved by a product as well, for the I alone
        self.ends = False  # with its linears

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = group_start(x, "layer")
            with offload_hooks():
                y = layer(x) if self.ends else layer(x).sin()
                x = x * y if self.shares else y
                del y
            x = group_commit(x, "layer")
        return x


class HalfDriver:
    """Runs the actions of one virtual stage."""

    def __init__(
        self,
        module: Sines,
        manager: PipelineOffloadManager | None,
        look: Callable[[HalfDriver], None] = lambda driver: None,
    ) -> None:
        self.module, self.manager, self._look = module, manager, look
        self.restored = 0  # saves, in the last step
        self.settles = True  # what a forward has sent, before it ends
        self._graphs: dict[int, Any] = {}

    def step(self, text: str, whole: Sequence[int] = ()) -> list[Tensor]:
        """The gradients. text: actions of stage 1. whole: microbatches whose W is a whole backward, which
        reads everything again."""
        actions = [parse_action(word) for word in text.split()]
        if self.manager is not None:
            self.manager.set_order(actions)
        for action in actions:
            self._run(action, action.microbatch in whole)
        gradients = [parameter.grad for parameter in self.module.parameters()]
        self.module.zero_grad(set_to_none=True)
        self._graphs.clear()
        if self.manager is not None:
            self._look(self)
            self.restored = self.manager.step_end().restored
        return [gradient for gradient in gradients if gradient is not None]

    def _run(self, action: Action, whole: bool) -> None:
        manager, chunk = self.manager, action.chunk
        if action.kind == "F":
            if manager is not None:
                manager.begin_chunk(*chunk)
            source = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(chunk[1]))
            x = source.requires_grad_()
            self._graphs[chunk[1]] = (x, self.module(x.roll(1)))
            del x, source
            if manager is not None:
                transfers = manager.engine.transfers
                for transfer in [*transfers._spilling] if self.settles else ():
                    transfers.settle_spill(transfer)  # nothing is found on its way out
                manager.end_forward(*chunk)
            return
        if manager is not None:
            manager.begin_backward(*chunk, action.kind)
        self._read(action, whole)
        if manager is not None:
            manager.end_backward(*chunk, action.kind)

    def _read(self, action: Action, whole: bool) -> None:
        graph = self._graphs[action.microbatch]
        parameters = list(self.module.parameters())
        if action.kind == "I" and whole:
            x, y = graph
            (x.grad,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        elif action.kind == "I":
            x, y = graph
            _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(parameters))
            self._graphs[action.microbatch] = groups
        elif whole:
            _, y = graph
            for parameter, part in zip(
                parameters, torch.autograd.grad(y, parameters, torch.ones_like(y)), strict=True
            ):
                parameter.grad = part if parameter.grad is None else parameter.grad + part
        else:
            stage_backward_weight(iter(parameters), graph)


def driven(
    text: str,
    *,
    steps: int = 1,
    whole: Sequence[int] = (),
    half_room: int | None = None,
    shares: bool = False,
    look: Callable[[HalfDriver], None] = lambda driver: None,
    **config: Any,
) -> HalfDriver:
    """Steps of these actions whose gradients are bitwise those without offload. half_room: saves that a plan
    leaves between the halves. look: called before each step ends."""
    torch.manual_seed(0)
    module = Sines(shares=shares)
    with installed(None):
        expected = HalfDriver(module, None).step(text, whole)
    with installed(build_manager(piece_bytes=1, **config)) as manager:
        driver = HalfDriver(module, manager, look)
        if half_room is not None:
            impose(manager.engine, half_room_bytes=half_room * SAVE)
        for _ in range(steps):
            found = driver.step(text, whole)
            assert all(map(torch.equal, expected, found))
            assert len(found) == LAYERS
    return driver


W_NEXT = "1F0 1F1 1I0 1W0 1I1 1W1"
W_LATER = "1F0 1F1 1I0 1I1 1W0 1W1"


@pytest.mark.parametrize(("room", "left"), [(0, 0), (1, 1), (4, 4), (100, LAYERS)])
def test_the_input_half_leaves_what_the_weight_half_reads_first_as_far_as_there_is_room(
    room: int, left: int
) -> None:
    # all three saves come back for the I, and the linear's for the W; the first W was not foreseen
    driver = driven(W_NEXT, shares=True, max_restoring_bytes=room * SAVE)
    assert driver.restored == 4 * LAYERS + 4 * LAYERS - left
    # then it was, and by plan the last layer of chunk 0 stays
    driver = driven(W_NEXT, shares=True, steps=2, max_restoring_bytes=room * SAVE)
    assert driver.restored == 4 * (LAYERS - 1) - min(left, LAYERS - 1) + 4 * LAYERS - left


@pytest.mark.parametrize(("shares", "reads"), [(True, 4), (False, 2)])
@pytest.mark.parametrize("room", [0, 2, 100])
def test_for_a_weight_half_that_comes_later_what_it_reads_is_fetched_and_nothing_else(
    room: int, shares: bool, reads: int
) -> None:
    driver = driven(W_LATER, shares=shares, steps=2, max_restoring_bytes=room * SAVE)
    assert driver.restored == reads * (LAYERS - 1) + reads * LAYERS


def test_a_plan_may_leave_something_for_a_weight_half_that_comes_later() -> None:
    driver = driven(W_LATER, shares=True, steps=2, half_room=2, max_restoring_bytes=0)
    assert driver.restored == 4 * (LAYERS - 1) - 2 + 4 * LAYERS - 2


@pytest.mark.parametrize(
    ("text", "room", "by_kind"),
    [
        (W_NEXT, 0, {"I": 2 * LAYERS - 1, "W": 2 * LAYERS - 1}),
        (W_LATER, 0, {"I": 2 * LAYERS - 1, "W": 2 * LAYERS - 1}),
        (W_NEXT, 100, {"F": 2 * LAYERS - 1, "I": 2 * LAYERS - 1}),  # ahead, the W's behind the I's own
    ],
)
def test_an_input_half_brings_back_nothing_that_only_the_weight_half_reads(
    text: str, room: int, by_kind: dict[str, int]
) -> None:
    """What each linear reads came back for the I, which unpacks it and computes nothing from it, and again
    for the W."""
    came: Counter[str] = Counter()

    class Counting(HalfDriver):
        def _run(self, action: Action, whole: bool) -> None:
            counts = self.manager.engine.transfers.counts
            before = counts.restored
            super()._run(action, whole)
            came[action.kind] += counts.restored - before

    torch.manual_seed(0)
    with installed(build_manager(piece_bytes=1, max_restoring_bytes=room * SAVE)) as manager:
        driver = Counting(Sines(), manager)
        driver.step(text)
        came.clear()
        driver.step(text)
    assert +came == by_kind


def test_a_weight_half_that_reads_more_than_was_seen_gets_it() -> None:
    """The linears' inputs stay for chunk 2's W, which then is a whole backward."""
    text = "1F0 1F1 1F2 1I0 1W0 1I1 1W1 1I2 1W2"
    driver = driven(text, whole=[2], max_restoring_bytes=100 * SAVE)
    # of chunk 2 the W brings the sines' again; of chunk 0 the W was not foreseen
    assert driver.restored == 3 * LAYERS + 2 * LAYERS + 3 * LAYERS


def test_the_weight_half_gives_the_device_back_what_it_has_read() -> None:
    """A tensor of two readers, of which the W runs one: the other's node lives until the W has ended, and so
    does its handle. A W that waited for both readers piled up all that it read."""
    torch.manual_seed(0)
    module = Sines(shares=True)
    most = [0, 0]
    with installed(build_manager(piece_bytes=1, max_restoring_bytes=0)) as manager:
        transfers = manager.engine.transfers

        def after_read(handle: Handle) -> None:
            if manager.tracker._kind == "W":
                microbatch = handle.record.block.group.chunk.microbatch
                most[microbatch] = max(most[microbatch], transfers.restoring_bytes)

        manager.engine.on_read(after_read)
        HalfDriver(module, manager).step(W_NEXT)
    # the first W was not foreseen; then each read drops what it has brought back, at once
    assert most[0] >= (LAYERS - 1) * SAVE
    assert most[1] == 0


def test_what_was_kept_on_its_way_out_goes_after_the_input_half_but_for_what_the_weight_half_reads() -> None:
    stayed: list[tuple[str, int, int]] = []

    class Looking(HalfDriver):
        def _run(self, action: Action, whole: bool) -> None:
            super()._run(action, whole)
            transfers = self.manager.engine.transfers
            transfers.reclaim_freed()
            saves = transfers.resident_bytes // SAVE, transfers.spilling_bytes // SAVE
            stayed.append((str(action), *saves))

    torch.manual_seed(0)
    config: dict[str, int] = {"max_restoring_bytes": 100 * SAVE, "max_spilling_bytes": 100 * SAVE}
    with installed(build_manager(piece_bytes=1, **config)) as manager:
        driver = Looking(Sines(), manager)
        driver.settles = False
        driver.step("1F0 1I0 1W0 1F1 1I1 1W1")
    both = 2 * LAYERS
    # no W was seen; the last sine's node is dead, and its copy is still on its way
    assert stayed[:2] == [("1F0", both, 0), ("1I0", both - 1, 1)]
    # of what is on its way out the I keeps the sines', and the W the linears'
    assert [entry[1:] for entry in stayed[3:5]] == [(LAYERS, both + LAYERS)] * 2


def test_torch_holds_what_the_input_half_read_until_the_weight_half_has_read_a_part_of_it() -> None:
    """What the engine relies on, of torch: a saved tensor is read by its own node in both halves, the weight
    half runs some of the nodes, and all before the last of these live until it has. So a tensor that was
    taken off the device after the I can still be asked for, whatever was seen before."""
    read: dict[str, list[tuple[int, str]]] = {"I": [], "W": []}
    dead: list[int] = []
    half = "I"

    class Held:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor, self.number = tensor.detach(), len(held)
            held.append(self.number)

        def __del__(self) -> None:
            dead.append(self.number)

    def unpack(kept: Held) -> Tensor:
        node = torch._C._current_autograd_node()
        read[half].append((kept.number, node.name()))
        return kept.tensor

    held: list[int] = []
    module = Sines()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with installed(None), torch.autograd.graph.saved_tensors_hooks(Held, unpack):
        y = module(x.roll(1))
    parameters = list(module.parameters())
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(parameters))
    assert len(read["I"]) == len(held) == 3 * LAYERS  # with the weights
    # of the last sine, behind the last weight, which went with the stage's output
    assert dead == held[-1:]
    half = "W"
    stage_backward_weight(iter(parameters), groups)
    assert set(read["W"]) < set(read["I"])
    assert {name for _, name in read["W"]} == {"MmBackward0"}
    del groups
    assert sorted(dead) == held


def test_the_plan_counts_for_a_weight_half_what_it_was_seen_to_read() -> None:
    seen: list[SeenStep] = []

    def look(driver: HalfDriver) -> None:
        seen.append(driver.manager.tracker.seen(None))

    driven(W_NEXT, look=look)
    known, sizes = seen[0].schedule()
    assert " ".join(map(str, known)) == W_NEXT
    assert {size.passed_bytes for own in sizes.values() for size in own} == {SAVE}
    assert all(own == [("layer", 2 * SAVE, SAVE)] * LAYERS for own in map(numbers, sizes.values()))
    groups = seen[0].chunks[0].groups
    cut = [unit.size for unit in cut_into_units(groups, SAVE)]
    assert numbers(cut) == [("layer", SAVE, SAVE), ("layer", SAVE, 0)] * LAYERS
    assert sum(size.w_bytes for size in sizes_of(seen[0].chunks[1])) == LAYERS * SAVE


def numbers(sizes: Sequence[GroupSize]) -> list[tuple[str, int, int]]:
    return [(size.name, size.nbytes, size.w_bytes) for size in sizes]


def test_an_input_half_that_reads_nothing_is_no_action_of_the_plan() -> None:
    """Stage 0's: its W is the whole backward, and reads in reverse."""
    module = Sines(2)
    with installed(build_manager(piece_bytes=1)) as manager:
        for _ in range(2):
            manager.begin_chunk(0, 0)
            y = module(torch.randn(ROWS, WIDTH))
            manager.end_forward(0, 0)
            for kind in "IW":
                manager.begin_backward(0, 0, kind)
                if kind == "W":
                    y.sum().backward()
                manager.end_backward(0, 0, kind)
            known, sizes = manager.tracker.seen(None).schedule()
            assert " ".join(map(str, known)) == "0F0 0W0"
            assert [size.half_bytes for size in sizes[0, 0]] == [None, None]
            manager.step_end()


def test_an_input_half_of_products_alone_is_one() -> None:
    """A head's, say: its W alone reads what it saved."""
    module = Sines(1)
    module.ends = True
    seen: list[SeenStep] = []
    with installed(build_manager(piece_bytes=1)) as manager:
        driver = HalfDriver(module, manager, lambda driver: seen.append(manager.tracker.seen(None)))
        for _ in range(2):
            driver.step(W_NEXT)
    assert driver.restored <= 2
    known, sizes = seen[0].schedule()
    assert " ".join(map(str, known)) == W_NEXT
    assert [(size.nbytes, size.w_bytes, size.passed_bytes) for size in sizes[1, 0]] == [(SAVE, SAVE, SAVE)]

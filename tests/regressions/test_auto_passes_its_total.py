"""A total that mode "auto" passed was passed without a word, and a report said the old bytes.

Once a plan was settled, a block that saved more than in the step before (a part unfrozen, exchanged or
switched on) was counted as it was then: a total of 9,000 bytes held 16,276, the report said 3,072, to the end
of the run.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import PipelineOffloadManager
from tests.ticks import counted_time

WIDTH, ROWS, BLOCKS = 16, 12, 4
ONE = ROWS * WIDTH * 4
"""Bytes of what a linear layer is given."""
SETTLED, STEPS = 14, 22
TOTAL = 9000


class Block(nn.Module):
    """A frozen base, which saves nothing, and what is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.more: nn.Module = nn.Identity()
        self.drop = nn.Dropout(0.0)
        self.lora = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.lora(self.more(self.base(x))))


def unfreeze(block: Block) -> None:
    block.base.requires_grad_(True)


def exchange(block: Block) -> None:
    block.more = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def drop_out(block: Block) -> None:
    block.drop.p = 0.1


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    PipelineOffloadManager.close_instance()
    with counted_time():
        offload.configure(offload.OffloadConfig(min_offloaded_tensor_size=1))
        yield
    PipelineOffloadManager.close_instance()


def train(
    model: nn.Module, rows: Callable[[int], int], change: Callable[[int], None]
) -> list[tuple[int, int]]:
    """Saved bytes and peaks of the steps, by the report."""
    seen = []
    with offload.activations(model, "auto", min_numel=1, device_total=f"{TOTAL}B") as handle:
        for step in range(STEPS):
            change(step)
            model(torch.randn(rows(step), WIDTH)).square().mean().backward()
            torch.optim.SGD(model.parameters(), 0.01).step()
            model.zero_grad()
            last = handle.report().last
            seen.append((last.saved_bytes, last.peak_bytes))
    return seen


@pytest.mark.parametrize(
    ("change", "more_bytes"),
    [(unfreeze, 4 * ONE), (exchange, 2 * ONE), (drop_out, ONE)],
    ids=["unfrozen", "exchanged", "switched on"],
)
def test_a_block_that_saves_more_is_counted_so_and_the_total_holds(
    change: Callable[[Block], None], more_bytes: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(BLOCKS)])

    def changed(step: int) -> None:
        if step == SETTLED:
            for block in model:
                change(block)  # type: ignore[arg-type]

    seen = train(model, lambda step: ROWS, changed)
    assert seen[SETTLED - 1][0] == BLOCKS * ONE
    # the first step is run as one that is new: one block plain, the others recomputed from their inputs
    assert seen[SETTLED][0] > BLOCKS * ONE
    assert {saved for saved, _ in seen[SETTLED + 3 :]} == {BLOCKS * (ONE + more_bytes)}
    assert max(peak for _, peak in seen[-3:]) <= TOTAL


def test_what_a_block_does_not_show_is_counted_in_that_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
    squared: list[bool] = []  # which no attribute of a block shows
    for block in model:
        assert isinstance(block, Block)
        block.lora.register_forward_pre_hook(lambda module, args: (args[0] * args[0],) if squared else args)
        block.more = nn.Linear(WIDTH, WIDTH)

    seen = train(model, lambda step: ROWS, lambda step: squared.append(True) if step == SETTLED else None)
    assert seen[SETTLED][0] == seen[SETTLED - 1][0] + BLOCKS * ONE


def test_a_total_that_is_passed_is_one_warning_with_both_numbers(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    wide = [nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)]
    model = nn.Sequential(*[nn.Sequential(*map(copy.deepcopy, wide)) for _ in range(BLOCKS)])
    with caplog.at_level(logging.WARNING):
        seen = train(model, lambda step: 6 if step < SETTLED else 24, lambda step: None)
    assert max(peak for _, peak in seen) > TOTAL
    said = [text for text in caplog.messages if "and device_total is 9.00 kB" in text]
    assert len(said) == 1
    assert said[0].startswith("a step had ")

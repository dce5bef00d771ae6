"""What a block decides is the forward's in its recompute, whatever its scores are by then; blocks that decide
nothing run without a dispatch mode from their second call on.

A block here computes other scores in a backward than in its forward, as a kernel that adds in another order
does. Only a recompute runs in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import offload
from offload import PipelineOffloadManager, RecomputeDiffersError
from offload.checkpoint import decisions
from offload.checkpoint.selective import CallMode

pytestmark = pytest.mark.usefixtures("manager")

WIDTH, ROWS, EXPERTS = 8, 12, 5


def is_recompute() -> bool:
    return torch._C._current_graph_task_id() != -1


class Block(nn.Module):
    """x + choose(x, scores), whose scores are others in a recompute, by far more than a last bit."""

    def __init__(self, choose: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.choose = choose
        self.differs = True

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        scores = scores * (-1.7 if self.differs and is_recompute() else 1.0)
        return x + self.choose(self, x, scores)


def rows_of(block: nn.Module, x: Tensor, rows: Tensor, expert: int) -> Tensor:
    experts: Any = block.experts
    return torch.zeros_like(x).index_add(0, rows, x[rows] @ experts[expert])


def by_topk(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    """Every expert has its rows, and weights that are normalised in place."""
    weights, index = functional.softmax(scores, -1).topk(2)
    weights /= weights.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for expert in range(EXPERTS):
        rows, place = torch.where(index == expert)
        y = y + rows_of(block, x, rows, expert) * weights[rows, place].sum()
    return y


def by_argmax(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    experts: Any = block.experts
    return torch.bmm(x[:, None], experts[scores.argmax(-1)])[:, 0]


def by_sorted_layout(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    """Counts and offsets are whole numbers of whole numbers."""
    order = scores.argmax(-1).sort()
    ends = torch.bincount(order.values, minlength=EXPERTS).cumsum(0).tolist()
    experts: Any = block.experts
    parts = [
        x[order.indices[start:end]] @ experts[expert]
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    return torch.cat(parts)[order.indices.argsort()]


def by_mask(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    """Rows are taken by a mask."""
    mask = scores[:, 0] > 0
    y = torch.zeros_like(x)
    y[mask] = x[mask] @ block.experts[0]  # type: ignore[index]
    return y


def by_cast(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    """The whole numbers are a cast, which is never kept: its input is."""
    return rows_of(block, x, scores.detach()[:, 1].mul(9).abs().clamp(max=ROWS - 1).long(), 1)


def by_python(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    experts: Any = block.experts
    return x @ experts[1 if scores[0, 0] > scores[0, 1] else 2]


def by_gathered_scores(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    """Chosen with a bias, weighed without it, as a router that balances itself does."""
    scores = scores.sigmoid()
    index = (scores + torch.linspace(0, 1, EXPERTS)).topk(2).indices
    experts: Any = block.experts
    picked = torch.einsum("tw,tkwv->tkv", x, experts[index])
    return (picked * scores.gather(1, index)[..., None]).sum(1)


def by_sampling(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    experts: Any = block.experts
    rows = torch.multinomial(functional.softmax(scores, -1), 1)[:, 0]
    return functional.dropout(torch.bmm(x[:, None], experts[rows])[:, 0], 0.5)


def by_cast_of_a_mask(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    experts: Any = block.experts
    return torch.bmm(x[:, None], experts[(scores[:, 0] > 0).long()])[:, 0]


def by_mask_in_place(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    """Rows of a mask that another one is written into, and their weights."""
    mask = scores[:, 0].relu().bool()
    mask.logical_and_(scores[:, 1] > -1)
    y = torch.zeros_like(x)
    y[mask] = x[mask] @ block.experts[0] * scores[mask, :1]  # type: ignore[index]
    return y


def by_writing(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    """Whole numbers that were there, written by a mask."""
    experts: Any = block.experts
    chosen = torch.zeros(ROWS, dtype=torch.long)
    chosen[scores[:, 0] > 0] = 1
    chosen.masked_fill_(scores[:, 1] > 0, 2)
    return torch.bmm(x[:, None], experts[chosen])[:, 0]


def by_out(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    experts: Any = block.experts
    values, index = torch.empty(ROWS, 1), torch.empty(ROWS, 1, dtype=torch.long)
    torch.topk(scores.detach(), 1, out=(values, index))
    return torch.bmm(x[:, None], experts[index[:, 0]])[:, 0]


def by_bits(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    """Bits of a float are sorted as whole numbers, and scores are gathered by whole numbers of those."""
    experts: Any = block.experts
    scores = scores.sigmoid()
    index = (scores.detach() + 0.5).view(torch.int32).long().topk(2).indices
    picked = torch.einsum("tw,tkwv->tkv", x, experts[index])
    return (picked * scores.gather(1, index)[..., None]).sum(1)


def by_number(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    """Python compares, and not torch."""
    experts: Any = block.experts
    return x @ experts[1 if scores[0, 0].item() > 0 else 2]


CHOICES = [
    by_topk,
    by_argmax,
    by_sorted_layout,
    by_mask,
    by_cast,
    by_python,
    by_gathered_scores,
    by_sampling,
    by_cast_of_a_mask,
    by_mask_in_place,
    by_writing,
    by_out,
    by_bits,
    by_number,
]


def model_of(choose: Callable[..., Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(choose) for _ in range(3)))


def gradients(
    model: nn.Module, manager: PipelineOffloadManager | None = None, steps: int = 3
) -> list[Tensor]:
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        model.zero_grad()
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        model(x).square().sum().backward()
        found += [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        if manager is not None:
            manager.step_end()
    return found


@pytest.mark.parametrize("mode", ["checkpoint", "hidden_states", "selective", "auto"])
@pytest.mark.parametrize("choose", CHOICES)
def test_a_recompute_has_the_rows_and_the_bits_of_its_forward(
    choose: Callable[..., Tensor], mode: Any, manager: PipelineOffloadManager
) -> None:
    expected = gradients(model_of(choose))
    model = model_of(choose)
    offload.apply(model, mode=mode, min_numel=1)
    found = gradients(model, manager)
    assert len(found) == len(expected)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("choose", CHOICES)
def test_without_what_is_kept_each_of_them_is_refused_or_fails(
    choose: Callable[..., Tensor], manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "is_decision", lambda part, reader: False)
    monkeypatch.setattr(decisions, "makes_number", lambda operator, given: False)
    model = model_of(choose)
    offload.apply(model, mode="hidden_states", min_numel=1)
    with pytest.raises((RecomputeDiffersError, torch.utils.checkpoint.CheckpointError)):
        gradients(model, manager)


@pytest.mark.parametrize("mode", ["hidden_states", "selective"])
def test_two_backwards_of_one_graph_have_the_rows_of_its_forward(mode: Any) -> None:
    """What was kept is copied: the block normalises its weights in place in each recompute."""
    expected: list[Tensor] = []
    for apply in (False, True):
        model = model_of(by_topk)
        if apply:
            offload.apply(model, mode=mode, min_numel=1)
        torch.manual_seed(1)
        for _ in range(2):
            loss = model(torch.randn(ROWS, WIDTH)).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert not apply or all(map(torch.equal, expected, found))
        expected = found


def biased(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    """Scores that are changed in place before the choice: given to a recompute as they are at the choice,
    they would have the bias twice."""
    experts: Any = block.experts
    scores = block.gate(x) * 1.5  # type: ignore[operator]
    scores += torch.linspace(0, 1, EXPERTS)
    index = scores.topk(2).indices
    picked = torch.einsum("tw,tkwv->tkv", x, experts[index])
    return (picked * scores.gather(1, index).softmax(-1)[..., None]).sum(1)


def through_a_view(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    """A linear layer in three dimensions returns a view with a version counter of its own."""
    experts: Any = block.experts
    scores = functional.linear(x[None], block.gate.weight)  # type: ignore[union-attr, arg-type]
    scores.view(ROWS, EXPERTS)[:, :3] += 1.0
    index = scores.topk(2).indices
    picked = torch.einsum("tw,tkwv->tkv", x, experts[index[0]])
    return (picked * scores.gather(2, index)[0].softmax(-1)[..., None]).sum(1)


def afterwards(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    """Scores are changed once the choice is made."""
    experts: Any = block.experts
    scores = block.gate(x) * 1.0  # type: ignore[operator]
    chosen = torch.bmm(x[:, None], experts[scores.argmax(-1)])[:, 0]
    return chosen * scores.mul_(3.0).sum(-1, keepdim=True)


def sorted_values(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    """Values with gradients, changed in place; the order is whole numbers that a later call reads."""
    values, order = block.gate(x).sort(-1)  # type: ignore[operator]
    return x * values.mul_(2.0).gather(1, order.argsort()).sum(-1, keepdim=True)


def changed_indices(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    with torch.no_grad():
        index = block.gate(x).topk(2).indices  # type: ignore[operator]
        index.add_(1).remainder_(ROWS)
    return x[index.view(-1)[:ROWS]] @ block.experts[0]  # type: ignore[index]


def quantized(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
    """Whole numbers that are no decision; and bits that are written in place."""
    y = x @ block.experts[0]  # type: ignore[index]
    whole = torch.empty(ROWS, WIDTH, dtype=torch.int8).copy_((y.detach() * 20).round().clamp_(-127, 127))
    cut = y.detach().clone()
    cut.view(torch.int32).bitwise_and_(-65536)
    return y + (cut - y.detach()) + whole * 0.05


@pytest.mark.parametrize("mode", ["checkpoint", "hidden_states", "selective", "auto"])
@pytest.mark.parametrize(
    "use",
    [biased, through_a_view, afterwards, sorted_values, changed_indices, quantized],
    ids=lambda use: use.__name__,
)
def test_choices_that_are_used_otherwise_have_the_bits_that_they_have_without(
    use: Callable[..., Tensor], mode: Any, manager: PipelineOffloadManager
) -> None:
    expected = gradients(model_of(use))
    offload.apply(model := model_of(use), mode=mode, min_numel=1)
    found = gradients(model, manager)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_of_an_operator_that_decides_the_calls_that_decide_nothing_are_recomputed(
    manager: PipelineOffloadManager,
) -> None:
    """Products of whole numbers and a mask are kept, and products of hidden states are not."""

    def by_product(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
        experts: Any = block.experts
        y = torch.bmm(x[:, None], experts[scores.argmax(-1) * (scores[:, 0] > 0)])[:, 0]
        for _ in range(20):
            y = y * 1.01
        return y

    expected = gradients(model_of(by_product))
    handle = offload.apply(model := model_of(by_product), mode="hidden_states", min_numel=1)
    assert all(map(torch.equal, gradients(model, manager), expected))
    kept = handle.report().total.groups["routing"].saved_bytes
    assert kept == 3 * 3 * ROWS * (EXPERTS * 4 + 2 * 8)  # steps, blocks; scores, argmax and product


@pytest.mark.parametrize("mode", ["checkpoint", "hidden_states", "selective", "auto"])
def test_numbers_that_only_a_forward_logs_are_not_taken_for_those_that_decide(
    mode: Any, manager: PipelineOffloadManager
) -> None:
    log: list[float] = []

    def logged(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
        if not is_recompute():
            log.append(x.detach().norm().item() + 100)
        return by_number(block, x, scores) + by_python(block, x, scores)

    expected = gradients(model_of(logged))
    offload.apply(model := model_of(logged), mode=mode, min_numel=1)
    assert all(map(torch.equal, gradients(model, manager), expected))
    assert len(log) == 2 * 3 * 3


class Pool(nn.Module):
    """Its pooling makes places of maxima, which nothing but the backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.max_pool1d(self.inner(x)[None], 3, 1, 1)[0]
        return functional.relu(y) + x * (y > 0)


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Classes of the dispatch modes that are entered."""
    entered: list[str] = []
    enter = CallMode.__enter__

    def noted(self: CallMode) -> Any:
        entered.append(type(self).__name__)
        return enter(self)

    monkeypatch.setattr(CallMode, "__enter__", noted)
    return entered


def test_a_block_that_decides_nothing_runs_under_a_mode_in_its_first_call_only(
    manager: PipelineOffloadManager, modes: list[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Pool(), Pool(), Pool())
    offload.apply(model, mode="hidden_states", min_numel=1)
    gradients(model, manager, steps=1)
    assert modes.count("_FirstMode") == 3
    del modes[:]
    gradients(model, manager, steps=4)
    assert modes == []
    offload.apply(routed := model_of(by_topk), mode="hidden_states", min_numel=1)
    gradients(routed, manager, steps=2)
    assert (modes.count("_FirstMode"), modes.count("_ForwardMode")) == (3, 3)


def test_mode_checkpoint_recomputes_blocks_and_moves_nothing_of_a_block_that_decides_nothing(
    manager: PipelineOffloadManager, tmp_path: Path
) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Pool(), Pool(), Pool())

    expected = gradients(model())
    applied = model()
    calls: list[str] = []
    for name, block in applied.named_children():
        block.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    handle = offload.apply(applied, mode="checkpoint", min_numel=1, no_recompute=["1"])
    assert all(map(torch.equal, gradients(applied, manager), expected))
    assert calls == ["0", "1", "2", "2", "0"] * 3
    assert (manager.stats.spill_bytes, handle.report().total.moved_bytes) == (0, 0)
    report = handle.report()
    assert report.as_dict()["recomputes"] == 6
    assert str(report).startswith(
        "offload: 6 forwards of blocks recomputed in 3 steps, no saved tensor moved; "
    )
    assert "mode='checkpoint', as it was asked: no saved tensor of Sequential leaves" in str(report)
    report.save(tmp_path / "report.html")
    assert "Blocks were recomputed, and nothing left the device." in (tmp_path / "report.html").read_text()


def test_scores_larger_than_the_blocks_input_are_recomputed(manager: PipelineOffloadManager) -> None:
    """A codebook's distances would take more memory than what the block is recomputed for: the decision
    alone is kept, and the net says that the rest differs."""
    model = model_of(lambda block, x, scores: by_argmax(block, x, scores.sigmoid()))
    for block in model:
        block.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)  # type: ignore[union-attr]
        block.experts = nn.Parameter(torch.randn(2 * WIDTH, WIDTH, WIDTH) / 4)  # type: ignore[union-attr]
    offload.apply(model, mode="hidden_states", min_numel=1)
    with pytest.raises(RecomputeDiffersError, match=rf"the first is float32\[{ROWS}, {2 * WIDTH}\]"):
        gradients(model, manager)


@pytest.mark.usefixtures("one_rank")
def test_what_ranks_exchange_is_in_the_recompute_of_all_whatever_sizes_they_have() -> None:
    """A rank whose rows had as many elements as its scores took them for scores, kept them, and left the
    exchange out of its recompute, in which the others waited for it."""

    def by_exchange(block: nn.Module, x: Tensor, scores: Tensor) -> Tensor:
        chosen, sizes = scores.argmax(-1), [len(x)]
        sent = x[:, : block.width].contiguous()
        rows = collectives.all_to_all_single_autograd(sent, sizes, sizes, dist.group.WORLD)
        return x * rows[chosen].sum(-1, keepdim=True)

    model = model_of(by_exchange)
    for block, width in zip(model, (EXPERTS, EXPERTS - 1, EXPERTS - 2), strict=True):
        block.width, block.differs = width, False  # type: ignore[union-attr]
    offload.apply(model, mode="hidden_states", min_numel=1)
    sent: list[Any] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            sent.extend([func] * ("all_to_all" in str(func)))
            return func(*args, **(kwargs or {}))

    with Counting():
        model(torch.randn(ROWS, WIDTH, requires_grad=True)).square().sum().backward()
    assert len(sent) == 3 * len(model), "there, there again, and back"

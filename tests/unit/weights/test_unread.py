"""Saves of weights that autograd unpacks and that no gradient of that backward reads: nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional

from offload.device.sim import ExecutorName
from offload.weights.order import Pass
from offload.weights.weight import BlockWeights, Weight
from tests.unit.weights.streamed import ROWS, WIDTH, Pair, streamed

ENDS = torch.tensor([2, ROWS], dtype=torch.int32)
"""Of the rows of a grouped product's two groups."""


def _seen_by_a_hook(x: Tensor, weight: Tensor) -> Tensor:
    def hook(gradient: Tensor) -> Tensor:
        node = torch._C._current_autograd_node()
        return gradient + node._saved_self.mean() + node._saved_mat2.mean()  # type: ignore[union-attr]

    y = x @ weight
    y.register_hook(hook)
    return y


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": functional.linear,
    "with a bias": lambda x, w: functional.linear(x, w, x.new_ones(WIDTH)),
    "untransposed": lambda x, w: torch.addmm(x.new_ones(WIDTH), x, w),
    "on the left": lambda x, w: (w @ x.t()).t(),
    "batched": lambda x, w: torch.bmm(x[None], w[None])[0],
    "batched with a bias": lambda x, w: torch.baddbmm(x.new_ones(WIDTH), x[None], w[None])[0],
    "grouped": lambda x, w: torch._grouped_mm(x, w.expand(2, WIDTH, WIDTH), offs=ENDS),
    "of two": lambda x, w: (lambda t: (x @ t) * ((x * 2) @ t))(w.t()),
    "beside its sum": lambda x, w: (x @ w) * w.sum(),
    "scaled": lambda x, w: x * w[0],
    "scaled in place": lambda x, w: (x * 1).mul_(w[:ROWS]),
    "scaled by one": lambda x, w: w[0, 0] * x,
    "squared": lambda x, w: x @ (w * w),
    "of itself": lambda x, w: x @ (w @ w),
    "detached": lambda x, w: x @ (w.detach() @ w.t()),
    "twice": lambda x, w: functional.linear(functional.linear(x, w).relu(), w),
    "back": lambda x, w: x @ w @ w.t(),
    "seen by a hook": _seen_by_a_hook,
    "convolution": lambda x, w: functional.conv1d(x[..., None], w[..., None])[..., 0],
}
"""Of the weight of a block."""

READ = {"squared", "of itself", "detached", "twice", "back", "seen by a hook", "convolution"}
"""By the weight's own gradient, or the user's hook; or torch's node hands it to a kernel."""


class Block(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.use, self.weight = use, nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x + USES[self.use](x, self.weight), (WIDTH,))


def stage() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*map(Block, USES)).bfloat16()


def run_halves(model: nn.Module, between: Callable[[], object] = int) -> Tensor:
    """The gradient of the stage's input. between: called between the halves of its backward."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    y, parameters = model(x * 1), [*model.parameters()]
    found, groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(parameters))
    between()
    stage_backward_weight(iter(parameters), groups)
    assert found[0] is not None
    return found[0]


def bits_are_the_same(pair: Pair, between: Callable[[], object] = int) -> None:
    ours, its = run_halves(pair.model, between), run_halves(pair.plain)
    assert torch.equal(ours, its)
    pair.check_gradients()


@pytest.mark.parametrize("executor", ["late", "early", "random"])
def test_a_weight_half_loads_no_weight_that_it_does_not_read(executor: ExecutorName) -> None:
    """A place in the graph is found by `view_as`, which loaded each block once a half, and torch's node of a
    product unpacks both operands, which loaded it once more: 4.3 times a microbatch in all."""
    with streamed(stage(), executor=executor) as pair:
        used, use = set[str](), pair.stream._used

        def noted(block: BlockWeights, during: Pass, weights: Sequence[Weight]) -> None:
            used.add(pair.model.get_submodule(block.name).use)
            use(block, during, weights)

        pair.stream._used = noted  # type: ignore[method-assign]
        for _ in range(3):
            bits_are_the_same(pair, used.clear)
            assert used == READ


@contextmanager
def looked_at() -> Iterator[None]:
    """Hooks of the user's own, which look at what is unpacked."""

    def look(tensor: Tensor) -> Tensor:
        assert tensor.float().sum().item() is not None
        return tensor

    with saved_tensors_hooks(lambda tensor: tensor, look):
        yield


def test_hooks_around_a_forward_unpack_a_weight_as_it_is() -> None:
    with streamed(stage()) as pair, looked_at():
        bits_are_the_same(pair)

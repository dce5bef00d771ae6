"""Saves that an input half unpacks and only its weight half reads: they stay on the host, and no bit
differs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from offload import PipelineOffloadManager, group_commit, group_start, offload_hooks
from offload.device.sim import ExecutorName
from offload.saved.handles import ModifiedError
from tests.unit.groups.stack import build_manager, installed
from tests.unit.weights.streamed import ROWS, WIDTH
from tests.unit.weights.test_unread import USES, Block, looked_at

Around = Callable[[], AbstractContextManager[Any]]


class Marked(nn.Module):
    """A group for each use of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, USES))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = group_start(x, "block")
            with offload_hooks():
                x = block(x)
            x = group_commit(x, "block")
        return x


def gradients(module: nn.Module, manager: PipelineOffloadManager | None, around: Around) -> list[Tensor]:
    """Of the inputs of three microbatches, and of the parameters, which sum them up."""
    found: list[Tensor] = []
    parameters = list(module.parameters())
    for microbatch in range(3):
        source = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(microbatch))
        x = source.bfloat16().requires_grad_()
        if manager is not None:
            manager.begin_chunk(1, microbatch)
        with around():
            y = module(x * 1)
        if manager is not None:
            manager.end_forward(1, microbatch)
            manager.begin_backward(1, microbatch, "I")
        given, groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(parameters))
        assert given[0] is not None
        found.append(given[0])
        del y
        if manager is not None:
            manager.end_backward(1, microbatch, "I")
            manager.begin_backward(1, microbatch, "W")
        stage_backward_weight(iter(parameters), groups)
        if manager is not None:
            manager.end_backward(1, microbatch, "W")
    found += [parameter.grad for parameter in parameters if parameter.grad is not None]
    module.zero_grad()
    return found


@pytest.mark.parametrize(
    ("executor", "around"),
    [
        ("late", nullcontext),
        ("early", nullcontext),
        ("random", nullcontext),
        ("clock", nullcontext),
        ("late", torch.autograd.detect_anomaly),
        ("late", looked_at),
    ],
)
def test_gradients_are_bitwise_those_without_offload(executor: ExecutorName, around: Around) -> None:
    torch.manual_seed(0)
    module = Marked().bfloat16()
    expected = gradients(module, None, nullcontext)
    passed = 0

    def counted(handle: Any, **how: bool) -> Tensor:
        nonlocal passed
        passed += bool(how)
        return read(handle, **how)

    with installed(build_manager(executor, piece_bytes=1)) as manager:
        store = manager.engine.store
        read, store.read = store.read, counted  # type: ignore[method-assign]
        for _ in range(3):
            found = gradients(module, manager, around)
            assert manager.step_end().spilled > 0
            assert len(found) == len(expected)
            assert all(map(torch.equal, expected, found))
    # hooks of the user's own look at what is unpacked
    assert bool(passed) == (around is not looked_at)


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int, int]] = {
    "rows": (lambda x, w: x * w[0], 1, 1),
    "columns": (lambda x, w: w[:, :1] * x, 1, 1),
    "one": (lambda x, w: x * w.sum(), 1, 1),
    "expanded": (lambda x, w: x[:1].expand(WIDTH, WIDTH) * w, 1, 1),
    "number": (lambda x, w: x * 3 * w, 1, 1),
    "in place": (lambda x, w: (x * 1).mul_(w), 1, 1),
    "twice": (lambda x, w: x * w * w, 2, 1),
    "itself": (lambda x, w: x * x + w, 0, 0),
    "itself in place": (lambda x, w: (x * 1).mul_(x) + w, 0, 0),
    "itself detached": (lambda x, w: x * x.detach() + w, 0, 0),
    "no gradient": (lambda x, w: x.detach() * x * w.detach() + w, 0, 0),
    "real": (lambda x, w: x.real * w, 1, 1),
    "conjugate": (lambda x, w: x.conj() * w.conj().resolve_conj(), 1, 1),
    "batched": (lambda x, w: torch.baddbmm(x[None], x[None], w[None]), 1, 1),
}
"""And how many saves each reads not for the gradient of its first and of its second operand."""


def derivatives(
    product: str, dtype: torch.dtype, manager: PipelineOffloadManager | None
) -> list[Tensor | None]:
    """Of both operands, each and both together; and theirs, of a backward that is differentiated."""
    function, *passed = PRODUCTS[product]
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(WIDTH, WIDTH, dtype=dtype, generator=random).requires_grad_() for _ in range(2))
    if manager is not None:
        manager.begin_chunk(1, 0)
    source = group_start(x * 1, "product")
    with offload_hooks():
        y = function(source, w)
    y = group_commit(y, "product")
    if manager is not None:
        manager.end_forward(1, 0)
        manager.begin_backward(1, 0, "I")
    found: list[Tensor | None] = []
    for asked, unread in (([x], passed[0]), ([w], passed[1]), ([x, w], 0)):
        for again in (False, True):
            before = 0 if manager is None else manager.engine.hooks.passed
            how = {"create_graph": again, "retain_graph": True, "allow_unused": True}
            given = torch.autograd.grad(y, asked, y.detach() + 1, **how)
            # what has the conjugate bit stays
            if manager is not None and not (dtype.is_complex and product == "conjugate"):
                assert manager.engine.hooks.passed - before == unread
            norms = [each.abs().square().sum() for each in given if each is not None and each.requires_grad]
            found += given
            if norms:
                found += torch.autograd.grad(norms, [x, w], retain_graph=True, allow_unused=True)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("product", PRODUCTS)
def test_parts_of_the_gradients_of_a_product(product: str, dtype: torch.dtype) -> None:
    expected = derivatives(product, dtype, None)
    with installed(build_manager(piece_bytes=1)) as manager:
        found = derivatives(product, dtype, manager)
        assert manager.step_end().spilled > 0
    for ours, its in zip(found, expected, strict=True):
        assert ours is its or (ours is not None and its is not None and torch.equal(ours, its))


def test_a_save_that_was_changed_is_found_out_by_the_half_that_does_not_read_it() -> None:
    """As in torch."""
    linear = nn.Linear(WIDTH, WIDTH, bias=False)
    with installed(build_manager(piece_bytes=1)) as manager:
        manager.begin_chunk(1, 0)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        source = group_start(x * 1, "linear")
        with offload_hooks():
            y = linear(source)
        y = group_commit(y, "linear")
        manager.end_forward(1, 0)
        with torch.no_grad():
            source.zero_()
        manager.begin_backward(1, 0, "I")
        with pytest.raises(ModifiedError):
            torch.autograd.grad(y, x, torch.ones_like(y))

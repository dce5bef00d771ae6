"""Selective checkpoints on a GPU: the bits of no checkpoint and of torch's own selective one, and less memory
by what left.

The chain of the memory test is of L regions tanh(sin(x @ w)) in which the product is kept: with its input 2 N
bytes a region. All tensors but w are of N bytes, a multiple of 2 MiB, so the allocator cuts every block to
size; memory is `active_bytes`, as in test_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from offload import PipelineOffloadManager, group_commit, group_start, offload_hooks, selective_contexts
from parallel.transformer import TransformerStage
from tests.gpu.workbench import DEVICE, Program, assert_same_bits, build_manager, installed

pytestmark = pytest.mark.gpu

aten = torch.ops.aten
PRODUCTS = frozenset({aten.mm.default, aten.bmm.default, aten.baddbmm.default})
MIB = 1 << 20
Context = Callable[[], Any]


def torchs_own(operators: Any) -> Context:
    return partial(create_selective_checkpoint_contexts, list(operators))


# -- bits ----------------------------------------------------------------------------------------------------
def layers_checkpointed(model: TransformerStage, x: Tensor, context: Context | None = None) -> Tensor:
    """The middle stage with every layer a checkpoint; its marks are inside the regions."""
    keywords: dict[str, Any] = {} if context is None else {"context_fn": context}
    rotation = (model.rotary_cos[: x.shape[1]].to(x.dtype), model.rotary_sin[: x.shape[1]].to(x.dtype))
    for block in model.blocks.values():
        x = checkpoint(block, x, rotation, use_reentrant=False, **keywords)
    return x


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("announced", [True, False], ids=["announced", "init_chunk_handler"])
@pytest.mark.parametrize(
    ("caps", "how"),
    [
        ({}, {}),
        ({"max_spilling_bytes": 1, "max_restoring_bytes": 0}, {}),
        ({"max_spilling_bytes": 256 << 10, "max_restoring_bytes": 256 << 10, "piece_bytes": 64 << 10}, {}),
        ({"device_limit_bytes": 3 * MIB}, {}),
        ({"max_spilling_bytes": 1}, {"streams": 2}),
        ({"max_spilling_bytes": 1}, {"autocast": True}),
    ],
    ids=["defaults", "one at a time", "tiny", "device limit", "two streams", "autocast"],
)
def test_the_bits_are_those_of_no_checkpoint_and_of_torchs_own(
    caps: dict[str, Any], how: dict[str, Any], announced: bool
) -> None:
    fields: dict[str, Any] = {
        "dtype": torch.float32 if how.get("autocast") else torch.bfloat16,
        "steps": 4,
        **how,
    }
    program = Program(**fields, forward=partial(layers_checkpointed, context=selective_contexts(PRODUCTS)))
    found = program.run(build_manager(**caps), announced=announced)
    assert_same_bits(Program(**fields).run().gradients, found.gradients)
    theirs = Program(**fields, forward=partial(layers_checkpointed, context=torchs_own(PRODUCTS))).run()
    assert_same_bits(theirs.gradients, found.gradients)
    assert found.stats[0].spilled > 0
    assert found.refused == 0
    if caps:
        assert found.restored > 0
    if "device_limit_bytes" in caps:
        assert max(stats.device_bytes_peak for stats in found.stats) <= caps["device_limit_bytes"]


class Dropping(nn.Module):
    """Attention that drops, kept, between dropouts that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(128, 3 * 128, bias=False, device=DEVICE, dtype=torch.bfloat16)
        self.out = nn.Linear(128, 128, bias=False, device=DEVICE, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (
            part.view(batch, sequence, 2, 64).transpose(1, 2)
            for part in self.qkv(F.dropout(x, 0.1)).split(128, dim=-1)
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        return x + F.dropout(torch.tanh(self.out(y.transpose(1, 2).reshape(batch, sequence, 128))), 0.3)


@pytest.mark.usefixtures("deterministic")
def test_a_kept_attention_with_dropout_shifts_no_random_number_of_others() -> None:
    torch.manual_seed(0)
    layers = [Dropping() for _ in range(3)]

    def run(call: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
        x = (
            torch.randn(2, 256, 128, generator=torch.Generator().manual_seed(1))
            .to(DEVICE, torch.bfloat16)
            .requires_grad_()
        )
        torch.manual_seed(7)
        h = x * 1.0
        for layer in layers:
            h = call(layer, h)
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        gradients = list(torch.autograd.grad(h.float().square().sum(), [x, *parameters]))
        return [*gradients, torch.rand(8, device=DEVICE)]  # and what is drawn next is the same

    expected = run(lambda layer, h: layer(h))
    assert_same_bits(expected, run(lambda layer, h: checkpoint(layer, h, use_reentrant=False)))
    context = selective_contexts({aten.mm.default, aten._scaled_dot_product_flash_attention.default})
    manager = build_manager(max_spilling_bytes=1)
    with installed(manager):
        for _ in range(2):
            manager.begin_chunk(0, 0)
            assert_same_bits(
                expected, run(lambda layer, h: checkpoint(layer, h, use_reentrant=False, context_fn=context))
            )
            stats = manager.step_end()
            assert stats.spilled > len(layers)  # the products and the attention; the last ones read may stay
            assert stats.restored > 0


# -- memory --------------------------------------------------------------------------------------------------
ROWS, WIDTH, L = 4096, 1024, 10
N = 4 * ROWS * WIDTH
WEIGHT_BYTES = 4 * WIDTH * WIDTH
ROUNDING = 512


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2)).div(32).to(DEVICE)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.sin(x @ self.weight))


def active_peak(step: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["active_bytes.all.peak"])


@pytest.mark.usefixtures("clean_allocator", "deterministic")
@pytest.mark.parametrize(("spilling", "restoring"), [(1, 1), (2, 2), (3, 1)])
def test_the_peak_is_that_of_torchs_own_less_what_left_and_the_bits_are_the_same(
    spilling: int, restoring: int
) -> None:
    """Beside the two windows, which are in flight: a region's two tensors while it is read, which no window
    counts any more, and the weights' gradients, which are made on the way: torch's own has its peak before
    the first of them, ours has it in every region alike."""
    regions = [Region() for _ in range(L)]
    source = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)).to(DEVICE).requires_grad_()
    gradient = torch.ones_like(source)
    gradients: list[Tensor] = []

    def step(context: Context, manager: PipelineOffloadManager | None) -> None:
        if manager is not None:
            manager.begin_chunk(0, 0)
        h = source * 1.0  # the graph alone holds what the first region takes
        for region in regions:
            h = group_start(h, "region")
            with offload_hooks():
                h = checkpoint(region, h, use_reentrant=False, context_fn=context)
            h = group_commit(h, "region")
        # so that a gradient of the graph's own flows into the last region too: there torch's own has its
        # peak, ours has not
        h = h * 1.0
        if manager is not None:
            manager.end_forward(0, 0)
            manager.begin_backward(0, 0, "B")
        h.backward(gradient)
        if manager is not None:
            manager.end_backward(0, 0, "B")
            manager.step_end()

    def take_gradients() -> list[Tensor]:
        tensors = [source, *(region.weight for region in regions)]
        found = [tensor.grad.cpu() for tensor in tensors if tensor.grad is not None]
        for tensor in tensors:
            tensor.grad = None
        return found

    theirs = torchs_own([aten.mm.default])
    for _ in range(2):  # the first one also makes what lives on: workspaces of the products
        without = active_peak(lambda: step(theirs, None))
        gradients = take_gradients()
    manager = build_manager(
        piece_bytes=1,
        max_spilling_bytes=spilling * N,
        max_restoring_bytes=restoring * N,
        reserve_bytes=(2 * L + 2) * N,
    )
    with installed(manager):
        ours = selective_contexts({aten.mm.default})
        for number in range(3):  # the first step without a plan, then with
            peak = active_peak(partial(step, ours, manager))
            assert_same_bits(gradients, take_gradients())
            stats = manager.stats
            assert stats.refused == 0
            assert stats.spill_bytes == (2 * L if number == 0 else 2 * L - 2) * N
            assert (
                peak
                <= without
                - stats.spill_bytes
                + (spilling + restoring) * N
                + 2 * N
                + L * WEIGHT_BYTES
                + ROUNDING * 4 * L
            )

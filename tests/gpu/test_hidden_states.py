"""Recomputed blocks whose input waits on the host, on a GPU: the bits of training without, and less memory by
what left.

The chain of the memory test is of L blocks tanh(x @ w), each of whose inputs is of N bytes, a multiple of
2 MiB, so the allocator cuts every block to size; memory is `active_bytes`, as in test_memory.py.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import offload
from offload.compat.hidden_states import hidden_states_offload
from tests.gpu.workbench import DEVICE, assert_same_bits, build_manager, installed

pytestmark = pytest.mark.gpu

MIB = 1 << 20
L, ROWS, WIDTH = 10, 8192, 1024
N = ROWS * WIDTH * 2


class Dropping(nn.Module):
    """A batch norm, whose statistics a forward writes, and a dropout from the device's random state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(256)
        self.fc = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.fc(self.norm(x))), 0.3)


class Checkpointed(nn.Module):
    def __init__(self, blocks: nn.Sequential, reentrant: bool) -> None:
        super().__init__()
        self.blocks = blocks
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def trained(model: nn.Module, *, autocast: bool, buffers: bool = True) -> list[Tensor]:
    """Gradients of three steps, and the buffers and the next random numbers at their end."""
    torch.manual_seed(3)
    found: list[Tensor] = []
    for _ in range(3):
        x = torch.randn(512, 256, device=DEVICE).requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = model(x * 1.0).float().square().mean()
        loss.backward()
        assert x.grad is not None
        found += [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad(set_to_none=True)
    kept = [buffer.clone() for buffer in model.buffers()] if buffers else []
    return [*found, *kept, torch.rand(8, device=DEVICE), torch.rand(8)]


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Dropping() for _ in range(4))).to(DEVICE)


@pytest.mark.req("S4-9", "S4-42")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", ["hidden_states", "selective"])
def test_gradients_buffers_and_random_numbers_are_those_of_the_model_alone(mode: str, autocast: bool) -> None:
    model = blocks()
    expected = trained(copy.deepcopy(model), autocast=autocast)
    manager = build_manager()
    with installed(manager):
        handle = offload.apply(model, mode=mode)
        assert_same_bits(expected, trained(model, autocast=autocast))
        stats = offload.step_end()
        assert stats is not None
        assert stats.saved >= 4
        handle.remove()


@pytest.mark.req("S4-42")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_own_checkpoints_have_their_bits_while_their_input_leaves(reentrant: bool) -> None:
    model = Checkpointed(blocks(), reentrant)
    expected = trained(copy.deepcopy(model), autocast=False)
    with installed(build_manager()), hidden_states_offload():
        assert_same_bits(expected, trained(model, autocast=False))
        stats = offload.step_end()
        assert stats is not None
        assert stats.saved == 4


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, device=DEVICE, dtype=torch.bfloat16) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w)


class Chain:
    """One forward and one backward of L blocks, each of which has an input of N bytes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Product() for _ in range(L)))
        self.source = torch.randn(ROWS, WIDTH, device=DEVICE, dtype=torch.bfloat16).requires_grad_()

    def checkpointed(self, h: Tensor) -> Tensor:
        for block in self.model:
            h = checkpoint(block, h, use_reentrant=False)
        return h

    def figures(self, forward: Callable[[Tensor], Tensor]) -> tuple[int, int]:
        """Active bytes after the forward, and at most, of the second of two steps."""
        for _ in range(2):
            self.model.zero_grad(set_to_none=True)
            self.source.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            y = forward(self.source * 1.0)
            torch.cuda.synchronize()
            held = int(torch.cuda.memory_stats()["active_bytes.all.current"])
            y.backward(torch.ones_like(y))
            del y
            torch.cuda.synchronize()
        return held, int(torch.cuda.memory_stats()["active_bytes.all.peak"])

    def is_out_of_memory(self, forward: Callable[[Tensor], Tensor], room: int) -> bool:
        """Whether the same needs more than `room` bytes of the device."""
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
        try:
            self.figures(forward)
        except torch.OutOfMemoryError:
            return True
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return False


@pytest.mark.req("S4-3", "S4-17")
@pytest.mark.usefixtures("clean_allocator")
def test_after_the_forward_all_inputs_but_two_are_gone_and_it_runs_where_checkpointing_has_no_memory() -> (
    None
):
    chain = Chain()
    held_by_torch, peak_of_torch = chain.figures(chain.checkpointed)
    with installed(build_manager(reserve_bytes=2 * L * N)):
        handle = offload.apply(chain.model, mode="hidden_states")
        held, peak = chain.figures(chain.model)
        # of the two that may still be on their way out, one has been waited for by the last save
        assert (L - 2) * N <= held_by_torch - held <= (L - 1) * N
        assert peak < peak_of_torch - (L - 4) * N  # two leave, one is fetched ahead, one is read
        room = (peak + peak_of_torch) // 2
        assert not chain.is_out_of_memory(chain.model, room)
        handle.remove()
        offload.step_end()
    assert chain.is_out_of_memory(chain.checkpointed, room)


FIRST_ATTENTION = """
import offload, torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(512, 1536, bias=False)

    def forward(self, x):
        parts = self.qkv(x).view(1, -1, 12, 128).transpose(1, 2).chunk(3, dim=1)
        return x + scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)

model = nn.Sequential(Block(), Block()).to("cuda", torch.bfloat16)
offload.apply(model, mode="hidden_states", min_numel=1)
model(torch.randn(1, 4096, 512, device="cuda", dtype=torch.bfloat16)).square().sum().backward()
offload.step_end()
print("same")
"""


def test_the_first_attention_of_a_process_may_be_a_recomputed_blocks() -> None:
    """torch sets its order of attention kernels with the first one: it was put back for the recompute, which
    then took another kernel than its forward, and saved other tensors."""
    done = subprocess.run([sys.executable, "-c", FIRST_ATTENTION], capture_output=True, text=True)
    assert done.stdout.endswith("same\n"), done.stderr

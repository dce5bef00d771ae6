"""torch.compile and the marks: a compiled block inside a group, and a whole compiled layer with the marks inside."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import offload
from offload import OffloadConfig, PipelineOffloadManager, configure

_WIDTH = 32
_DEPTH = 3
_STEPS = 3
_BACKENDS = [
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")),
]


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(_WIDTH)
        self.up = torch.nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = torch.nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class _MarkedBlock(_Block):
    """The marks inside, and no `with`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = offload.group_start(x, "block", hooks=True)
        return offload.group_commit(super().forward(x), "block")


def _call_in_group(block: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = offload.group_start(x, "block")
    with offload.offload_hooks():
        y = block(x)
    return offload.group_commit(y, "block")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    PipelineOffloadManager.reset_instance()


def _configure() -> PipelineOffloadManager:
    """Every saved tensor may leave, and no more than one block's fit on the device."""
    config = OffloadConfig(min_offloaded_tensor_size=16, device_limit_bytes=20_000, host_reserve_bytes=1 << 22)
    return configure(config, device="sim", print_summary=False)


def _weights() -> _Block:
    torch.manual_seed(0)
    return _Block()


def _train(layers: list[Callable[[torch.Tensor], torch.Tensor]], owners: list[torch.nn.Module], step: int) -> list[torch.Tensor]:
    """The gradients of one step; with a manager, the step is one chunk."""
    manager = PipelineOffloadManager.OFFLOAD_MGR
    x = torch.randn(8, _WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
    if manager is not None:
        manager.set_order([("F", 0, 0), ("B", 0, 0)])
        manager.begin_chunk(0, 0)
    y = x
    for layer in layers:
        y = layer(y)
    if manager is not None:
        manager.end_forward(0, 0)
        manager.begin_backward(0, 0, "B")
    y.square().sum().backward()
    if manager is not None:
        manager.end_backward(0, 0, "B")
    assert x.grad is not None
    gradients = [x.grad]
    for owner in owners:
        gradients += [parameter.grad for parameter in owner.parameters() if parameter.grad is not None]
        owner.zero_grad()
    return gradients


def _reference(backend: str) -> list[list[torch.Tensor]]:
    """The gradients of compiled blocks without a manager."""
    PipelineOffloadManager.OFFLOAD_MGR = None
    blocks: list[torch.nn.Module] = [copy.deepcopy(_weights()) for _ in range(_DEPTH)]
    compiled = [torch.compile(block, backend=backend) for block in blocks]
    return [_train(list(compiled), blocks, step) for step in range(_STEPS)]


def _assert_equal_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", _BACKENDS)
def test_compiled_block_inside_a_group_has_the_same_gradients_and_its_saves_leave(backend: str) -> None:
    reference = _reference(backend)
    manager = _configure()
    blocks: list[torch.nn.Module] = [copy.deepcopy(_weights()) for _ in range(_DEPTH)]
    compiled = [torch.compile(block, backend=backend) for block in blocks]
    layers = [lambda x, block=block: _call_in_group(block, x) for block in compiled]
    for step in range(_STEPS):
        _assert_equal_bits(_train(list(layers), blocks, step), reference[step])
        stats = manager.step_end()
        assert stats.spilled > 0
        assert stats.restored > 0
    assert not counters["graph_break"]


@pytest.mark.parametrize("backend", _BACKENDS)
def test_layer_compiled_whole_breaks_at_its_two_marks_and_is_compiled_once(backend: str) -> None:
    reference = _reference(backend)
    manager = _configure()
    torch._dynamo.reset()
    counters.clear()
    blocks: list[torch.nn.Module] = []
    for _ in range(_DEPTH):
        marked = _MarkedBlock()
        marked.load_state_dict(_weights().state_dict())
        blocks.append(marked)
    layers = [torch.compile(block, backend=backend) for block in blocks]
    after_first: dict[str, int] = {}
    for step in range(_STEPS):
        _assert_equal_bits(_train(list(layers), blocks, step), reference[step])
        assert manager.step_end().spilled > 0
        after_first = after_first or dict(counters["stats"])
    assert sum(counters["graph_break"].values()) == 2, list(counters["graph_break"])
    assert counters["stats"]["unique_graphs"] == 1
    assert dict(counters["stats"]) == after_first, "a later step was compiled anew"


def test_with_block_inside_a_compiled_layer_makes_it_eager_and_stays_exact() -> None:
    reference = _reference("aot_eager")
    manager = _configure()

    class Layer(_Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _call_in_group(super().forward, x)

    blocks: list[torch.nn.Module] = []
    for _ in range(_DEPTH):
        block = Layer()
        block.load_state_dict(_weights().state_dict())
        blocks.append(block)
    layers = [torch.compile(block, backend="aot_eager") for block in blocks]
    for step in range(_STEPS):
        _assert_equal_bits(_train(list(layers), blocks, step), reference[step])
        assert manager.step_end().spilled > 0


def test_hooks_of_a_mark_end_with_its_commit_or_after_an_exception_with_the_step() -> None:
    manager = _configure()
    manager.begin_chunk(0, 0)
    x = torch.randn(8, _WIDTH, requires_grad=True)
    y = offload.group_start(x, "outer", hooks=True)
    y = offload.group_start(y, "inner", hooks=True)
    y = offload.group_commit(torch.sin(y), "inner")
    assert manager.engine.hooks.innermost() is not None
    y = offload.group_commit(torch.sin(y), "outer")
    assert manager.engine.hooks.innermost() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    offload.group_start(y, "outer", hooks=True)  # its commit is never reached
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    manager.step_end()
    assert manager.engine.hooks.innermost() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize(
    ("code", "imported"), [("import offload", False), ("import offload; offload.configure(device='sim', print_summary=False)", True)]
)
def test_compiler_is_imported_by_set_up_neither_by_the_package_nor_in_the_first_step(code: str, imported: bool) -> None:
    code += f"; import sys; sys.exit(('torch._dynamo' in sys.modules) != {imported})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])

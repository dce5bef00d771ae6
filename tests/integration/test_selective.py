"""Selective checkpoints in company: real schedules over gloo, functional collectives, torch.compile inside
and around.

This file run as a script is one rank of two.
"""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import offload
from offload import OffloadConfig, PipelineOffloadManager, configure
from tests.integration.test_schedules import NAMES, Pipeline, build, host_bytes_lent, same
from tests.ranks import run_ranks

aten = torch.ops.aten
KEEP_OPS = frozenset({aten.mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default})
BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
    ),
]


# -- schedules -----------------------------------------------------------------------------------------------
def checkpoint_layers(pipeline: Pipeline) -> None:
    """Every layer of every stage a selective checkpoint of its own; its marks are inside."""
    for stage in pipeline.stages:
        for layer in stage.submod.blocks.values():
            layer.forward = partial(
                checkpoint,
                layer.forward,
                use_reentrant=False,
                context_fn=offload.selective_contexts(KEEP_OPS),
            )


def compared(name: str, rank: int, ranks: int, microbatches: int) -> dict[str, Any]:
    """A schedule's step without checkpoints and offload, and its steps with both."""
    pipeline = build(name, rank, ranks, microbatches)
    manager = pipeline.manager
    manager.disable_offload()
    losses = pipeline.step(1)
    expected = pipeline.grads()
    manager.enable_offload()
    checkpoint_layers(pipeline)
    found: dict[str, Any] = {"bitwise": [], "losses": [], "spilled": [], "restored": [], "lent": []}
    for _ in range(3):
        found["losses"].append(pipeline.step(1) == losses)
        found["bitwise"].append(same(expected, pipeline.grads()))
        found["spilled"].append(manager.stats.spill_bytes)
        found["restored"].append(manager.stats.restore_bytes)
        found["lent"].append(host_bytes_lent(manager))
    found["table"] = manager.offload_summary_bytes
    return found


def check(found: dict[str, Any]) -> None:
    assert all(found["bitwise"])
    assert all(found["losses"])
    assert all(restored > 0 for restored in found["restored"])
    assert all(spilled > 0 for spilled in found["spilled"])
    assert found["lent"] == [0, 0, 0]
    # the products and the attention; not the last product of a layer, nor what the norms and the activation
    # save
    assert {"qkv_linear", "core_attn", "attn_proj", "mlp_fc1"} <= {
        name for name, nbytes in found["table"].items() if nbytes
    }
    assert not any(found["table"].get(name) for name in ("attn_norm", "mlp_norm", "mlp_act", "mlp_fc2"))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    PipelineOffloadManager.reset_instance()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_gets_the_gradients_of_no_checkpoint_and_no_offload(name: str) -> None:
    check(compared(name, 0, 1, microbatches=4))


def rank_main(rank: int, world: int) -> dict[str, dict[str, Any]]:
    return {name: compared(name, rank, world, 4) for name in ("1f1b", "zbv")}


def test_two_ranks_get_them_under_1f1b_and_zbv(tmp_path: Path) -> None:
    for rank in run_ranks(rank_main, 2, tmp_path):
        for found in rank.values():
            check(found)


# -- collectives ---------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("one_rank")
def test_a_kept_collective_is_waited_for_before_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operator returns before its output is written; what leaves must be what it wrote."""
    from torch.distributed._functional_collectives import all_reduce

    manager = configure(
        OffloadConfig(min_offloaded_tensor_size=1, piece_bytes=1, max_spilling_bytes=1),
        device="sim",
        print_summary=False,
    )
    weight = torch.randn(16, 16, requires_grad=True)
    happened: list[tuple[str, int]] = []

    def body(x: Tensor) -> Tensor:
        y = torch.sin(x @ weight)
        return torch.tanh(all_reduce(y.detach(), "sum", dist.group.WORLD) * y)

    def run(**context: Any) -> list[Tensor]:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = checkpoint(body, x, use_reentrant=False, **context)
        return list(torch.autograd.grad(y.sum(), [x, weight]))

    expected = run()
    store_save, wait_tensor = manager.engine.store.save, torch.ops._c10d_functional.wait_tensor

    def save(tensor: Tensor, *arguments: Any) -> Any:
        happened.append(("saved", tensor.data_ptr()))
        return store_save(tensor, *arguments)

    def wait(tensor: Tensor) -> Tensor:
        happened.append(("waited", tensor.data_ptr()))
        return wait_tensor(tensor)

    wait.default = wait_tensor.default  # type: ignore[attr-defined]  # what torch itself calls
    monkeypatch.setattr(manager.engine.store, "save", save)
    monkeypatch.setattr(torch.ops._c10d_functional, "wait_tensor", wait)
    manager.begin_chunk(0, 0)
    found = run(context_fn=offload.selective_contexts({torch.ops._c10d_functional.all_reduce.default}))
    stats = manager.step_end()
    assert stats.saved == 1
    (waited, at), (saved, also_at) = happened[:2]  # the model's own wait comes when it uses the output
    assert (waited, saved) == ("waited", "saved")
    assert at == also_at
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


# -- torch.compile -------------------------------------------------------------------------------------------
class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 32, bias=False)
        self.down = torch.nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(torch.nn.functional.gelu(self.up(x))))


@pytest.fixture
def manager() -> Iterator[PipelineOffloadManager]:
    torch._dynamo.reset()
    counters.clear()
    yield configure(
        OffloadConfig(min_offloaded_tensor_size=1, piece_bytes=1, max_spilling_bytes=1),
        device="sim",
        print_summary=False,
    )
    torch._dynamo.reset()
    PipelineOffloadManager.reset_instance()


def train(block: Callable[[Tensor], Tensor], owner: torch.nn.Module) -> list[Tensor]:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    block(x).square().sum().backward()
    assert x.grad is not None
    gradients = [x.grad, *(parameter.grad for parameter in owner.parameters() if parameter.grad is not None)]
    owner.zero_grad()
    return gradients


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_block_inside_is_still_compiled_once_and_its_gradients_are_its_own(
    backend: str, manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    plain = Block()
    owner = copy.deepcopy(plain)
    expected = train(torch.compile(plain, backend=backend), plain)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(owner, backend=backend)
    for _ in range(3):
        manager.begin_chunk(0, 0)
        found = train(
            lambda x: checkpoint(
                compiled, x, use_reentrant=False, context_fn=offload.selective_contexts({aten.mm.default})
            ),
            owner,
        )
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        stats = manager.step_end()
        assert counters["stats"]["unique_graphs"] == 1
    said = [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("offload")
    ]
    if backend == "aot_eager":  # its graph calls the operators one by one
        assert stats.saved == 2
        assert said == []
    else:
        assert stats.saved == 0
        (message,) = said
        assert "what torch.compile has fused calls none" in message


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_checkpoint_that_is_compiled_whole_is_refused(
    fullgraph: bool, manager: PipelineOffloadManager
) -> None:
    block = Block()
    context_fn = offload.selective_contexts({aten.mm.default})
    whole = torch.compile(
        lambda x: checkpoint(block, x, use_reentrant=False, context_fn=context_fn),
        backend="aot_eager",
        fullgraph=fullgraph,
    )
    manager.begin_chunk(0, 0)
    with pytest.raises(
        Exception, match=r"traces a checkpoint with selective_contexts\(\) whole.*Compile the function inside"
    ):
        whole(torch.randn(8, 16, requires_grad=True))

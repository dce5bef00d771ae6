"""On a GPU the gradients are the same bits with offload and without, whatever the dtype, the caps, the order
of chunks and the streams.

Attention is torch's plain matrix products and every kernel a deterministic one, so that a bit that differs is
the engine's.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from offload import group_commit, group_start, offload_hooks
from parallel.transformer import TransformerStage
from tests.gpu.workbench import NAMES, Program, Result, assert_same_bits, build_manager, one_f_one_b

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# the four microbatches together save 18 MiB in half precision and 24 MiB in float32
CAPS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one at a time": {"max_spilling_bytes": 1, "max_restoring_bytes": 0},
    "tiny": {"max_spilling_bytes": 256 << 10, "max_restoring_bytes": 256 << 10, "piece_bytes": 64 << 10},
    "device limit": {"device_limit_bytes": 3 << 20},
    "wait at each commit": {"max_inflight_offloads": 0},
}
ORDERS = {
    "1F1B": one_f_one_b(4, 2),
    "all forwards first": one_f_one_b(3, 3),
    "one at a time": one_f_one_b(3, 0),
}


@functools.cache
def without_offload(program: Program) -> Result:
    return program.run()


@pytest.fixture(params=DTYPES, ids=["f32", "bf16", "f16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def test_without_offload_two_runs_have_the_same_bits(dtype: torch.dtype) -> None:
    """Or nothing else in this file says anything."""
    program = Program(dtype=dtype)
    assert_same_bits(program.run().gradients, program.run().gradients)


@pytest.mark.req("S2-98", "S3-76")
@pytest.mark.parametrize("announced", [True, False], ids=["announced", "init_chunk_handler"])
@pytest.mark.parametrize("caps", CAPS)
def test_gradients_with_offload_have_the_bits_of_those_without(
    dtype: torch.dtype, caps: str, announced: bool
) -> None:
    """Four steps: one to warm up, two with the plan from it, and one with the plan from measured times, where
    there is a device limit."""
    program = Program(dtype=dtype, steps=4)
    with_offload = program.run(build_manager(**CAPS[caps]), announced=announced)
    assert_same_bits(without_offload(program).gradients, with_offload.gradients)
    assert with_offload.stats[0].spilled > 2 * len(NAMES), (
        "nearly nothing left the device: the test proves nothing"
    )
    assert with_offload.refused == 0
    # their windows are larger than all that is saved: what has left is still on the device when it is read
    if caps != "defaults":
        assert with_offload.restored > len(NAMES)
    if caps == "device limit":
        assert max(stats.device_bytes_peak for stats in with_offload.stats) <= 3 << 20


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "init_chunk_handler"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_microbatches_does_not_change_the_bits(order: str, announced: bool) -> None:
    program = Program(dtype=torch.bfloat16, order=tuple(ORDERS[order]))
    with_offload = program.run(build_manager(), announced=announced)
    assert_same_bits(without_offload(program).gradients, with_offload.gradients)
    assert with_offload.spilled > 0


@pytest.mark.parametrize("name", NAMES)
def test_each_group_alone_has_the_bits_of_no_offload(name: str) -> None:
    names = (name,) if name != "attn_proj" else ("core_attn", "attn_proj")
    program = Program(dtype=torch.bfloat16, names=names)
    with_offload = program.run(build_manager())
    assert_same_bits(without_offload(program).gradients, with_offload.gradients)
    assert with_offload.spilled > 0


def test_steps_in_which_host_memory_is_still_missing_have_the_same_bits() -> None:
    """Nothing is pinned before step 1: tensors stay until the growth in the background has caught up."""
    program = Program(steps=6)
    with_offload = program.run(build_manager(reserve_bytes=0, **CAPS["tiny"]))
    assert_same_bits(without_offload(program).gradients, with_offload.gradients)
    assert with_offload.stats[0].refused > 0


@pytest.mark.parametrize("caps", ["defaults", "one at a time"])
def test_under_autocast_gradients_have_the_same_bits(caps: str) -> None:
    program = Program(autocast=True)
    with_offload = program.run(build_manager(**CAPS[caps]))
    assert_same_bits(without_offload(program).gradients, with_offload.gradients)
    assert with_offload.spilled > 0


# -- checkpoints ---------------------------------------------------------------------------------------------


def _blocks(model: TransformerStage, x: Tensor) -> Any:
    rotation = (model.rotary_cos[: x.shape[1]].to(x.dtype), model.rotary_sin[: x.shape[1]].to(x.dtype))
    return [functools.partial(block, rotation=rotation) for block in model.blocks.values()]


def group_around_checkpoint(model: TransformerStage, x: Tensor, *, use_reentrant: bool) -> Tensor:
    """Each layer is recomputed; its input is all that it saves, and leaves."""
    for block in _blocks(model, x):
        x = group_start(x, "attn_norm")
        with offload_hooks():
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        x = group_commit(x, "attn_norm")
    return x


def checkpoint_around_groups(model: TransformerStage, x: Tensor, *, use_reentrant: bool) -> Tensor:
    """The marks are run twice, in the forward and in the recomputation, and nothing may leave in either."""
    for block in _blocks(model, x):
        x = checkpoint(block, x, use_reentrant=use_reentrant)
    return x


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_the_input_of_a_checkpoint_leaves_and_comes_back(use_reentrant: bool) -> None:
    around = functools.partial(group_around_checkpoint, use_reentrant=use_reentrant)
    program = Program(names=(), forward=around, steps=3)
    with_offload = program.run(build_manager())
    assert_same_bits(without_offload(program).gradients, with_offload.gradients)
    layers, microbatches = 2, 4
    assert with_offload.stats[0].spilled == layers * microbatches


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_checkpoint_around_groups_recomputes_and_nothing_leaves(use_reentrant: bool) -> None:
    around = functools.partial(checkpoint_around_groups, use_reentrant=use_reentrant)
    program = Program(forward=around)
    with_offload = program.run(build_manager())
    assert_same_bits(without_offload(program).gradients, with_offload.gradients)
    assert with_offload.spilled == 0


# -- streams and threads -------------------------------------------------------------------------------------


@pytest.mark.req("S4-34")
@pytest.mark.parametrize("announced", [True, False], ids=["announced", "init_chunk_handler"])
@pytest.mark.parametrize("caps", ["defaults", "tiny", "device limit"])
@pytest.mark.parametrize("streams", [1, 2])
def test_forwards_on_side_streams_have_the_same_bits(streams: int, caps: str, announced: bool) -> None:
    """With two, a chunk is saved on one stream while the other reads the chunk before it, side by side."""
    program = Program(streams=streams, steps=3)
    with_offload = program.run(build_manager(**CAPS[caps]), announced=announced)
    assert_same_bits(without_offload(Program(steps=3)).gradients, with_offload.gradients)
    assert with_offload.spilled > 0


def test_saved_tensors_are_read_on_autograds_own_thread() -> None:
    manager = build_manager()
    readers: set[int] = set()
    manager.engine.on_read(lambda handle: readers.add(threading.get_ident()))
    program = Program()
    assert_same_bits(without_offload(program).gradients, program.run(manager).gradients)
    assert readers
    assert threading.get_ident() not in readers

"""One model under FSDP2 or tensor parallel, with checkpoints, autocast and microbatches, run on each rank
with offload and without.

One invariant: both runs of a case do the same operations on the same values; only where saved bytes live
differs. `compared` is one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from offload import OffloadConfig, PipelineOffloadManager, configure, group_commit, group_start, offload_hooks
from parallel.transformer import Block, TransformerConfig, TransformerStage, build_stage_module
from tests.loops import local

TOKENS, SEQUENCES, MICROBATCHES, STEPS = 32, 2, 2, 2
MARKS = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2")
MODEL = TransformerConfig(
    dim=64,
    layers=9,
    heads=4,
    kv_heads=2,
    ffn=96,
    sequence=TOKENS,
    offload_modules=frozenset(MARKS),
    math_attention=True,
)
SMALL = {
    "min_offloaded_tensor_size": 64,
    "piece_bytes": 4096,
    "max_spilling_bytes": 4096,
    "max_restoring_bytes": 8192,
}
"""One piece on its way out at most: what has left is gone from the device when it is read."""


@dataclass(frozen=True)
class Case:
    """How the model is spread and run.

    checkpoint: "in groups" recomputes each layer, whose input is a group; "around groups" recomputes the
    marks too. sequence: of tensor parallel, whether norms and residual are split along the sequence. reshard:
    of FSDP2, whether weights are freed after the forward.
    """

    over: Literal["nothing", "fsdp", "tensor"]
    checkpoint: Literal["", "in groups", "around groups"] = ""
    reentrant: bool = False
    autocast: bool = False
    reshard: bool = True
    mixed: bool = False
    sequence: bool = False


CASES: dict[str, Case] = {
    "fsdp": Case("fsdp"),
    "fsdp, weights stay gathered": Case("fsdp", reshard=False),
    "fsdp in bfloat16": Case("fsdp", mixed=True),
    "fsdp under autocast": Case("fsdp", autocast=True),
    "fsdp, checkpoints in groups": Case("fsdp", "in groups"),
    "fsdp, reentrant checkpoints in groups": Case("fsdp", "in groups", reentrant=True),
    "fsdp, checkpoints around groups": Case("fsdp", "around groups"),
    "tensor parallel": Case("tensor"),
    "tensor parallel under autocast": Case("tensor", autocast=True),
    "tensor parallel, checkpoints in groups": Case("tensor", "in groups"),
    "tensor and sequence parallel": Case("tensor", sequence=True),
    "tensor and sequence parallel, checkpoints in groups": Case("tensor", "in groups", sequence=True),
}
ALONE: dict[str, Case] = {
    f"{'autocast, ' if autocast else ''}{'reentrant ' if reentrant else ''}checkpoints {where}": Case(
        "nothing", where, reentrant=reentrant, autocast=autocast
    )
    for where in ("in groups", "around groups")
    for reentrant in (False, True)
    for autocast in (False, True)
}
"""On one device, microbatches accumulated."""


@dataclass
class Compared:
    """What one rank saw of a case. table: bytes by group of the steady state. parameter_saves: saved tensors
    over a parameter's bytes."""

    differing: list[str] = field(default_factory=list)
    gradients: int = 0
    table: dict[str, int] = field(default_factory=dict)
    spilled: int = 0
    restored: int = 0
    refused: int = 0
    saves: int = 0
    parameter_saves: int = 0
    parameter_storages: int = 0
    wrapped: int = 0


def compared(rank: int, world: int, cases: dict[str, Case], device_type: str) -> dict[str, Compared]:
    """Every case with offload and without, on this rank; a main of `run_ranks`."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    torch.use_deterministic_algorithms(True)
    mesh = init_device_mesh(device_type, (world,))
    return {name: _compare(case, mesh, device) for name, case in cases.items()}


def run_alone(case: Case, device: torch.device) -> Compared:
    """The same model in one piece on one device, without a process group."""
    return _compare(case, None, device)


def _compare(case: Case, mesh: DeviceMesh | None, device: torch.device) -> Compared:
    expected = _train(case, mesh, device, None)
    seen = Compared()
    manager = configure(
        OffloadConfig(**SMALL, host_reserve_bytes=64 << 20),
        device=str(device) if device.type == "cuda" else "sim",
        print_summary=False,
    )
    try:
        found = _train(case, mesh, device, manager, seen)
    finally:
        PipelineOffloadManager.OFFLOAD_MGR = None
        manager.close()
    assert expected.keys() == found.keys()
    seen.gradients = len(expected)
    seen.differing = [name for name, gradient in expected.items() if not _same_bits(gradient, found[name])]
    return seen


def _same_bits(one: Tensor, other: Tensor) -> bool:
    assert bool(one.isfinite().all())
    assert bool(one.any())
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def _train(
    case: Case,
    mesh: DeviceMesh | None,
    device: torch.device,
    manager: PipelineOffloadManager | None,
    seen: Compared | None = None,
) -> dict[str, Tensor]:
    """A few steps of accumulated microbatches; every step's gradients by name, this rank's shards of them."""
    model = _build(case, mesh, device)
    if manager is not None:
        manager.register_parameters(model)
    gradients: dict[str, Tensor] = {}
    watching = nullcontext() if manager is None or seen is None else _watched(manager, model, seen)
    with watching:
        for step in range(STEPS):
            for microbatch in range(MICROBATCHES):
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(microbatch == MICROBATCHES - 1)
                _microbatch(case, model, _input(case, mesh, step, microbatch, device), manager, microbatch)
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, name
                gradients[f"{step}.{name}"] = local(parameter.grad).clone()
                with torch.no_grad():
                    parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None
            if manager is not None and seen is not None:
                stats = manager.step_end()
                seen.spilled += stats.spilled
                seen.restored += stats.restored
                seen.refused += stats.refused
    if manager is not None and seen is not None:
        seen.table = manager.offload_summary_bytes
    return gradients


def _microbatch(
    case: Case, model: TransformerStage, x: Tensor, manager: PipelineOffloadManager | None, microbatch: int
) -> None:
    if manager is not None:
        manager.begin_chunk(0, microbatch)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=case.autocast):
        y = _along_sequence(model, x) if case.sequence else model(x)
    if manager is not None:
        manager.end_forward(0, microbatch)
        manager.begin_backward(0, microbatch, "B")
    y.float().square().sum().backward()
    if manager is not None:
        manager.end_backward(0, microbatch, "B")


def _along_sequence(model: TransformerStage, x: Tensor) -> Tensor:
    """The model's forward on this rank's part of the sequence: positions are those of all of it."""
    for block in model.blocks.values():
        x = block(x, (model.rotary_cos, model.rotary_sin))
    return x


def _input(case: Case, mesh: DeviceMesh | None, step: int, microbatch: int, device: torch.device) -> Tensor:
    """Under FSDP2 each rank has a batch of its own; under tensor parallel all have the same, or each its part
    of the sequence."""
    rank = 0 if mesh is None else mesh.get_rank()
    seed = 100 * step + 10 * microbatch + (rank if case.over == "fsdp" else 0)
    x = torch.randn(SEQUENCES, TOKENS, MODEL.dim, generator=torch.Generator().manual_seed(seed))
    if case.sequence:
        x = x.chunk(2, dim=1)[rank].contiguous()
    return x.to(device).requires_grad_()


def check(name: str, case: Case, seen: Compared) -> None:
    """What must hold of every case: the same bits, nothing of a parameter taken, and something really left,
    or nothing where all is recomputed."""
    assert seen.differing == [], name
    assert seen.gradients > 0
    assert seen.parameter_saves == 0, name
    assert seen.refused == 0
    if case.checkpoint == "around groups":
        assert (seen.saves, seen.spilled, sum(seen.table.values())) == (0, 0, 0), name
        return
    assert seen.parameter_storages > 0, "no parameter was looked for"
    assert seen.restored > 0, name
    assert sum(seen.table.values()) > 0


def check_tables(seen: dict[str, Compared], alone: Compared) -> None:
    """The table under FSDP2 is that of the model in one piece: not a byte of a gathered weight. Tensor
    parallel halves what is split by heads or by the MLP's width, and, along the sequence, what the norms save
    of the residual."""
    assert seen["fsdp"].table == seen["fsdp, weights stay gathered"].table == alone.table
    halved = ("core_attn", "attn_proj", "mlp_act", "mlp_fc2")
    table = seen["tensor parallel"].table
    assert table == {name: nbytes // 2 if name in halved else nbytes for name, nbytes in alone.table.items()}
    assert seen["tensor parallel"].wrapped > 0, "no DTensor was saved"
    residual = SEQUENCES * TOKENS * MODEL.dim * 4
    inputs = seen["tensor parallel, checkpoints in groups"].table["attn_norm"]
    assert inputs == seen["fsdp, checkpoints in groups"].table["attn_norm"] > 0
    assert inputs % residual == 0
    assert 2 * seen["tensor and sequence parallel, checkpoints in groups"].table["attn_norm"] == inputs


# -- the model -----------------------------------------------------------------------------------------------


class _Checkpointed(nn.Module):
    """A layer that is recomputed in its backward. grouped: its input is a group of its own."""

    def __init__(self, layer: nn.Module, *, grouped: bool, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.grouped, self.reentrant = layer, grouped, reentrant

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        if not self.grouped:
            y: Tensor = checkpoint(self.layer, x, rotation, use_reentrant=self.reentrant)
            return y
        x = group_start(x, "attn_norm")
        with offload_hooks():
            y = checkpoint(self.layer, x, rotation, use_reentrant=self.reentrant)
        return group_commit(y, "attn_norm")


def _build(case: Case, mesh: DeviceMesh | None, device: torch.device) -> TransformerStage:
    """The middle stage of three: three layers, hidden states in and out."""
    marks = frozenset() if case.checkpoint == "in groups" else MODEL.offload_modules
    model = build_stage_module(MODEL.with_(offload_modules=marks), 1, 3, device=device)
    for name, block in list(model.blocks.items()):
        assert isinstance(block, Block)
        if case.over == "tensor":
            assert mesh is not None
            _split(block, mesh, along_sequence=case.sequence)
        layer: nn.Module = block
        if case.checkpoint:
            layer = _Checkpointed(block, grouped=case.checkpoint == "in groups", reentrant=case.reentrant)
        model.blocks[name] = layer
        if case.over == "fsdp":
            fully_shard(layer, mesh=mesh, reshard_after_forward=case.reshard, mp_policy=_precision(case))
    if case.over == "fsdp":
        fully_shard(model, mesh=mesh, reshard_after_forward=case.reshard, mp_policy=_precision(case))
    return model


def _precision(case: Case) -> MixedPrecisionPolicy:
    return (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if case.mixed
        else MixedPrecisionPolicy()
    )


def _split(block: Block, mesh: DeviceMesh, *, along_sequence: bool) -> None:
    """Heads and the MLP's width over the ranks; norms and residual too, along the sequence, where asked
    for."""
    ranks = mesh.size()
    config = block.attn.config
    block.attn.config = config.with_(
        dim=config.dim // ranks, heads=config.heads // ranks, kv_heads=config.kv_heads // ranks
    )
    columns = {name: ColwiseParallel() for name in ("attn.wq", "attn.wk", "attn.wv", "mlp.gate", "mlp.up")}
    plan: dict[str, Any] = {**columns, "attn.wo": RowwiseParallel(), "mlp.down": RowwiseParallel()}
    if along_sequence:
        plan |= {
            "attn_norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            "attn": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "attn.wo": RowwiseParallel(output_layouts=Shard(1)),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    parallelize_module(block, mesh, plan)


# -- what leaves ---------------------------------------------------------------------------------------------


@contextmanager
def _watched(manager: PipelineOffloadManager, model: nn.Module, seen: Compared) -> Iterator[None]:
    """Count the saved tensors that the engine takes, and those among them over bytes of a parameter, sharded,
    gathered or cast by FSDP2."""
    store, hooks = manager.engine.store, manager.engine.hooks
    save, pack = store.save, hooks.pack
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
    shards = [parameter for group in groups for parameter in group.fsdp_params]

    def storages() -> set[int]:
        gathered = [
            tensor
            for shard in shards
            for tensor in [*shard.all_gather_outputs, getattr(shard, "_unsharded_param", None)]
        ]
        tensors = [*model.parameters(), *(tensor for tensor in gathered if tensor is not None)]
        return {local(tensor).untyped_storage()._cdata for tensor in tensors}

    def watched_save(tensor: Tensor, *rest: Any) -> Any:
        known = storages()
        seen.saves += 1
        seen.parameter_storages = max(seen.parameter_storages, len(known))
        seen.parameter_saves += tensor.untyped_storage()._cdata in known
        return save(tensor, *rest)

    def watched_pack(tensor: Tensor) -> Any:
        seen.wrapped += isinstance(tensor, DTensor)
        return pack(tensor)

    store.save = watched_save  # type: ignore[method-assign]
    hooks.pack = watched_pack  # type: ignore[method-assign]
    try:
        yield
    finally:
        store.save, hooks.pack = save, pack  # type: ignore[method-assign]

"""What each rank runs for test_apply_ranks.py: models that are spread over ranks, trained with
`offload.apply` and without, and their gradients, losses and weights compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import offload
from offload import OffloadConfig, PipelineOffloadManager, configure
from offload.pipelining import OffloadPipelineStage
from parallel.schedules import build_schedule, schedule_named, stages_of
from tests.loops import trained
from tests.nets import Block, Stack

WIDTH, ROWS, BLOCKS = 16, 12, 3
INNER = 2 * WIDTH
STEPS, MICROBATCHES = 2, 2
STAGE_BLOCKS, PIPELINE_MICROBATCHES, PIPELINE_STEPS = 2, 4, 3
MODES: tuple[Any, ...] = ("groups", True, "hidden_states")
TENSOR_PARALLEL = "tensor parallel"
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "zbv")
if torch.__version__ < "2.13":  # whose own stage sends itself a message where a rank has two neighbours
    SCHEDULES = SCHEDULES[:-1]


def block() -> Block:
    return Block(WIDTH, activation=torch.tanh)


@contextmanager
def new_manager(device: str = "cpu") -> Iterator[PipelineOffloadManager]:
    """With the rank table on, as it is by default. device: "cpu" takes the simulated one."""
    simulated = device == "cpu"
    limits = OffloadConfig(min_offloaded_tensor_size=1, host_reserve_bytes=0 if simulated else 64 << 20)
    manager = configure(limits, device="sim" if simulated else device)
    try:
        yield manager
    finally:
        PipelineOffloadManager.close_instance()


def same(ours: Sequence[Tensor], plain: Sequence[Tensor]) -> bool:
    return len(ours) == len(plain) and all(map(torch.equal, ours, plain))


# ---- one model on every rank: replicated, sharded, or each of its matrices in parts ----


def _replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)


def _sharded(*, each_block: bool, reshard: bool) -> Callable[[Any, DeviceMesh], nn.Module]:
    def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
        for block in model.layers if each_block else ():
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        return model

    return shard


def _in_parts(model: Any, mesh: DeviceMesh) -> nn.Module:
    for block in model.layers:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


SPREADS: dict[str, Callable[[nn.Module, DeviceMesh], nn.Module]] = {
    "ddp": _replicated,
    "fsdp, blocks resharded": _sharded(each_block=True, reshard=True),
    "fsdp, blocks not resharded": _sharded(each_block=True, reshard=False),
    "fsdp, the root alone": _sharded(each_block=False, reshard=True),
    TENSOR_PARALLEL: _in_parts,
}


def build(device: str = "cpu") -> Stack:
    torch.manual_seed(3)
    return Stack(block, BLOCKS, WIDTH, 5).to(device)


def train(
    model: nn.Module, seed: int, device: str = "cpu", *, steps: int = STEPS, keeps: bool = True
) -> list[Tensor]:
    """Gradients of each step and the last weights, as far as this rank has them. seed: of its data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)  # some are DTensors, some are not

    def backward(step: int) -> None:
        for microbatch in range(MICROBATCHES):
            generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + seed)
            x = torch.randn(ROWS, WIDTH, generator=generator).to(device)
            model(x).square().mean().backward()

    return trained(model, optimizer, steps, backward, keeps=keeps)


def spread_over(spread: str, rank: int, mesh: DeviceMesh, modes: Sequence[Any] = MODES) -> dict[str, Any]:
    """By mode, applied before the model is spread and after, on the mesh's kind of device."""
    device = mesh.device_type
    seed = 0 if spread == TENSOR_PARALLEL else rank  # whose ranks work on one batch
    plain = train(SPREADS[spread](build(device), mesh), seed, device)
    found: dict[str, Any] = {}
    for mode in modes:
        for after in (False, True):
            with new_manager(device) as manager:
                model: nn.Module = build(device)
                handles = [] if after else [offload.apply(model, mode, min_numel=1)]
                model = SPREADS[spread](model, mesh)
                handles += [offload.apply(model, mode, min_numel=1)] if after else []
                ours = train(model, seed, device)
                found[f"{mode} {'after' if after else 'before'}"] = {
                    "bitwise": same(ours, plain),
                    "steps": manager.engine.step,
                    "saved_bytes": handles[0].report().as_dict()["saved_bytes"],
                    "spill_bytes": manager.stats.spill_bytes,
                    "alive": len(list(manager.living_blocks())),
                }
    return found


# ---- a model whose stages are on different ranks ----


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Pipeline:
    """The stages of this rank, each of blocks that know nothing of offload. mode: of `apply` on each stage's
    module, None for none; options: of it, too. ours: the stage class of this project, else torch's."""

    def __init__(self, name: str, rank: int, ranks: int, *, mode: Any, ours: bool, **options: Any) -> None:
        spec = schedule_named(name)
        count = ranks * spec.default_virtual_stages
        self.microbatches = PIPELINE_MICROBATCHES
        self.modules: list[nn.Module] = []
        self.handles: list[offload.Applied] = []
        self.stages: list[Any] = []
        for index in stages_of(spec, rank=rank, ranks=ranks, virtual_stages=spec.default_virtual_stages):
            torch.manual_seed(index)
            module = nn.Sequential(*(block() for _ in range(STAGE_BLOCKS)))
            if mode is not None:
                self.handles.append(offload.apply(module, mode, min_numel=1, **options))
            self.modules.append(module)
            self.stages.append(_stage(module, index, count, ours=ours))
        self.schedule = build_schedule(spec, self.stages, microbatches=self.microbatches, loss_fn=_loss)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]

    def step(self, seed: int) -> list[Tensor]:
        """Gradients, and losses where they are."""
        generator = torch.Generator().manual_seed(seed)
        rows = self.microbatches * ROWS
        batch, target = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
        first, last = (
            any(getattr(stage, which) for stage in self.stages) for which in ("is_first", "is_last")
        )
        losses: list[Tensor] = []
        self.schedule.step(
            *([batch] if first else []),
            target=target if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        return [parameter.grad.clone() for parameter in self.parameters() if parameter.grad is not None] + [
            loss.detach().clone() for loss in losses
        ]


def _stage(module: nn.Module, index: int, count: int, *, ours: bool) -> PipelineStage:
    if not ours:
        return PipelineStage(module, index, count, torch.device("cpu"))
    example = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
    return OffloadPipelineStage(
        module, index, count, torch.device("cpu"), input_args=example, output_args=example
    )


def train_pipeline(
    pipeline: Pipeline, *, optimizer: bool = True, steps: int = PIPELINE_STEPS
) -> tuple[list[Tensor], list[dict[str, int]]]:
    """Also what the manager counted of each step, where there is one."""
    sgd = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    manager = PipelineOffloadManager.OFFLOAD_MGR
    seen: list[Tensor] = []
    counted: list[dict[str, int]] = []
    for step in range(steps):
        seen += pipeline.step(step)
        if optimizer:
            sgd.step()
        sgd.zero_grad()
        if manager is not None:
            stats = manager.stats
            counted.append(
                {"ended": manager.engine.step, "saved": stats.saved, "spill_bytes": stats.spill_bytes}
            )
    return seen, counted


def _pipelines(name: str, rank: int, ranks: int) -> dict[str, Any]:
    """By class of stage and mode."""
    found: dict[str, Any] = {}
    plain, _ = train_pipeline(Pipeline(name, rank, ranks, mode=None, ours=False))
    for ours in (False, True):
        for mode in MODES:
            with new_manager() as manager:
                pipeline = Pipeline(name, rank, ranks, mode=mode, ours=ours)
                got, counted = train_pipeline(pipeline)
                found[f"{'ours' if ours else 'torch'} {mode}"] = {
                    "bitwise": same(got, plain),
                    "counted": counted,
                    "stages": len(pipeline.stages),
                    "alive": len(list(manager.living_blocks())),
                }
    return found


def rank_main(rank: int, ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (ranks,))
    found: dict[str, Any] = {spread: spread_over(spread, rank, mesh) for spread in SPREADS}
    found.update((name, _pipelines(name, rank, ranks)) for name in SCHEDULES)
    with new_manager():
        pipeline = Pipeline("1f1b", rank, ranks, mode=True, ours=True)
        _, found["no optimizer"] = train_pipeline(pipeline, optimizer=False)
    return found

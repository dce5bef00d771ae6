"""A small model trained on each rank by torch's AdamW and by the hybrid optimizer: replicas, FSDP2's shards,
or tensor parallel.

One invariant: both runs of a case see the same batches and issue the same collectives; only who steps
differs. `trained` is one rank.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from offload import OffloadEngine
from offload.device.sim import SimDevice
from offload.errors import OffloadError
from offload.optim import HybridDeviceOptimizer
from tests.loops import local

STEPS, WIDTH, BAD_STEP = 4, 33, 2
RECIPE: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    """How the model is spread and stepped. options: of the hybrid optimizer; expected: of another that gives
    the bits, else torch's.

    Replicas: bucket_view is gradient_as_bucket_view, summed a hook of the user's that only sums, kept zeroes
    gradients in place. Shards: called_alone runs one layer's forward before the model's, post_optim gives
    FSDP2 an event to wait for. bad: rank 1 makes infinities, or nan without a scaler, in one step. without:
    edges that are left out. slow: on a GPU,
    each copy of the optimizer takes milliseconds more.
    """

    over: Literal["replicas", "shards", "tensor"]
    options: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] | None = None
    microbatches: int = 1
    bucket_view: bool = False
    summed: bool = False
    kept: bool = False
    reshard: bool = True
    mixed: bool = False
    half: bool = False
    prefetch: bool = False
    called_alone: bool = False
    post_optim: bool = False
    clip: Literal["", "own", "argument", "torch"] = ""
    scaler: bool = False
    bad: bool = False
    attached: bool = True
    without: tuple[str, ...] = ()
    slow: bool = False


@dataclass
class Seen:
    """What one rank saw of a case. bits: of all weights, by run. landed: bytes that had left for the host
    before each step was called."""

    differing: list[str] = field(default_factory=list)
    bits: list[str] = field(default_factory=list)
    norms: list[list[str]] = field(default_factory=list)
    scales: list[list[float]] = field(default_factory=list)
    landed: list[int] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    error: str = ""


class Net(nn.Module):
    """Parameters of uneven sizes; the last layer's have fewer rows than there are ranks, but under tensor
    parallel."""

    def __init__(self, device: torch.device, *, even: bool = False) -> None:
        super().__init__()
        width = 72 if even else 71
        self.first, self.second, self.third = (
            nn.Linear(WIDTH, width),
            nn.Linear(width, 48),
            nn.Linear(48, 2 if even else 1),
        )
        self.norm = nn.LayerNorm(48)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.norm(self.second(torch.tanh(self.first(x)))))


def trained(rank: int, world: int, cases: dict[str, Case], device_type: str) -> dict[str, Seen]:
    """Every case by both optimizers, on this rank; a main of `run_ranks`."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    torch.use_deterministic_algorithms(True)
    mesh = init_device_mesh(device_type, (world,))
    trainings: dict[str, tuple[dict[str, Tensor], Seen]] = {}
    return {name: _compare(case, mesh, device, trainings) for name, case in cases.items()}


def _compare(
    case: Case, mesh: DeviceMesh, device: torch.device, trainings: dict[str, tuple[dict[str, Tensor], Seen]]
) -> Seen:
    """trainings: by the other optimizer, by case less the options of the hybrid one."""
    key = repr(replace(case, options={}, attached=True, without=(), slow=False))
    if key not in trainings:
        alone = Seen()
        trainings[key] = _train(case, mesh, device, alone, case.expected), alone
    expected, seen = trainings[key][0], copy.deepcopy(trainings[key][1])
    try:
        found = _train(case, mesh, device, seen, case.options)
    except OffloadError as error:
        if not case.without:
            raise
        seen.error = str(error)
        return seen
    seen.differing = [name for name, weights in expected.items() if not same_bits(weights, found[name])]
    return seen


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


# -- the model -----------------------------------------------------------------------------------------------
def build(case: Case, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    model = Net(device, even=case.over == "tensor")
    if case.half:
        model.bfloat16()
    if case.over == "replicas":
        replicas = DistributedDataParallel(
            model, gradient_as_bucket_view=case.bucket_view, bucket_cap_mb=0.01
        )
        if case.summed:
            replicas.register_comm_hook(None, _summed)
        return replicas
    if case.over == "tensor":
        plan = {
            "first": ColwiseParallel(),
            "second": RowwiseParallel(output_layouts=Shard(0)),
            "norm": SequenceParallel(sequence_dim=0),
            "third": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        }
        return parallelize_module(model, mesh, plan)
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if case.mixed
        else MixedPrecisionPolicy()
    )
    for module in (model.first, model.second, model.third, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=case.reshard, mp_policy=policy)
    if case.prefetch:
        _fsdp(model).set_modules_to_forward_prefetch([_fsdp(model.first), _fsdp(model.second)])
        _fsdp(model.first).set_modules_to_forward_prefetch([_fsdp(model.second), _fsdp(model.third)])
    return model


def _fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _summed(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Writes no version: a collective in place, and nothing else."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


# DDP compares them with the classes
_summed.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]})


# -- a run ---------------------------------------------------------------------------------------------------
def engine_for(device: torch.device, without: tuple[str, ...] = (), *, slow: bool = False) -> OffloadEngine:
    if device.type == "cpu":
        return OffloadEngine(device=SimDevice(without=set(without)))
    from tests.gpu.widened import WidenedDevice

    return OffloadEngine(
        device=WidenedDevice(slow_ms={"d2h": 5.0, "h2d": 5.0} if slow else {}, without=without)
    )


def hybrid(model: nn.Module, engine: OffloadEngine, /, **options: Any) -> HybridDeviceOptimizer:
    common = {"offload_fraction": 1.0, "bucket_bytes": 4096, "engine": engine, **RECIPE}
    if options.get("model") is not None and options.get("overlap_cpu_optimizer_d2h_h2d", True):
        common["overlap"] = "forward"
    return HybridDeviceOptimizer(model.parameters(), **{**common, **options})


def backward(case: Case, model: nn.Module, number: int, rank: int, scale: Tensor | float = 1.0) -> None:
    """Replicas and shards have a batch a rank; tensor parallel has one for all."""
    seed = 100 * number + (0 if case.over == "tensor" else rank)
    first = next(model.parameters())
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).to(first.device, first.dtype)
    if case.called_alone and isinstance(model, Net) and number > 0:
        model.first(x).float().square().mean().mul(1e-3).backward()
    (model(x).float().square().mean() * scale).backward()


def _train(
    case: Case, mesh: DeviceMesh, device: torch.device, seen: Seen, options: dict[str, Any] | None
) -> dict[str, Tensor]:
    """The whole weights after the steps. options: of the hybrid optimizer; None is torch's own."""
    rank = mesh.get_rank()
    with ExitStack() as stack:
        model = build(case, mesh, device)
        optimizer: Optimizer = AdamW(model.parameters(), **RECIPE)
        # the way that every optimizer goes
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        if options is not None:
            seen.said = stack.enter_context(_heard())
            engine = engine_for(device, case.without, slow=case.slow)
            stack.callback(engine.close)
            given = {**options, "max_grad_norm": 0.05} if case.clip == "argument" else options
            optimizer = hybrid(model, engine, model=model if case.attached else None, **given)
            stack.callback(optimizer.close)
            seen.places = {
                name: optimizer.place_of(parameter).value for name, parameter in model.named_parameters()
            }
            seen.sizes = {name: local(parameter).numel() for name, parameter in model.named_parameters()}
        scaler = (
            torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=2) if case.scaler else None
        )
        norms, scales = [], []
        for step in range(STEPS):
            bad = case.bad and step == BAD_STEP and rank == 1
            for microbatch in range(case.microbatches):
                last = microbatch == case.microbatches - 1
                with _accumulating(model, optimizer, not last):
                    factor = float("inf" if scaler else "nan") if bad else 1.0
                    scale = factor * scaler.scale(torch.ones((), device=device)) if scaler else factor
                    backward(case, model, step * case.microbatches + microbatch, rank, scale)
            if isinstance(optimizer, HybridDeviceOptimizer) and isinstance(
                optimizer.engine.device, SimDevice
            ):
                seen.landed.append(optimizer.engine.device.copied_bytes(optimizer.engine.device.d2h))
            if scaler and case.clip:
                scaler.unscale_(optimizer)
            norm = _clipped(case, model, optimizer)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            else:
                optimizer.step()
            if case.clip == "argument" and isinstance(optimizer, HybridDeviceOptimizer):
                norm = optimizer.last_grad_norm
            if norm is not None:
                norms.append(whole(norm).item().hex())
            if case.post_optim:
                _fsdp(model).set_post_optim_event(
                    torch.Event() if device.type == "cpu" else torch.cuda.current_stream().record_event()
                )
            optimizer.zero_grad(set_to_none=not case.kept)
        if isinstance(optimizer, HybridDeviceOptimizer):
            optimizer.synchronize_parameters()
        found = {name: whole(parameter) for name, parameter in model.named_parameters()}
    seen.norms.append(norms)
    seen.scales.append(scales)
    seen.bits.append(
        hashlib.sha256(
            b"".join(bytes(each.cpu().view(-1).view(torch.uint8)) for each in found.values())
        ).hexdigest()
    )
    return found


def _clipped(case: Case, model: nn.Module, optimizer: Optimizer) -> Tensor | None:
    if not case.clip:
        return None
    if isinstance(optimizer, HybridDeviceOptimizer) and case.clip != "torch":
        return optimizer.clip_grad_norm_(0.05) if case.clip == "own" else None
    # sums first, as we do: torch would scale each rank's share of a sum, and round it there
    for parameter in model.parameters():
        if (
            isinstance(parameter, DTensor)
            and isinstance(parameter.grad, DTensor)
            and parameter.grad.placements != parameter.placements
        ):
            parameter.grad = parameter.grad.redistribute(parameter.device_mesh, parameter.placements)
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05)


@contextmanager
def _accumulating(model: nn.Module, optimizer: Optimizer, only: bool) -> Iterator[None]:
    """only: nothing is reduced in the backward inside, and no gradient is final."""
    with ExitStack() as stack:
        if only and isinstance(optimizer, HybridDeviceOptimizer):
            stack.enter_context(optimizer.no_sync())
        if only and isinstance(model, DistributedDataParallel):
            stack.enter_context(model.no_sync())
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(not only)
        yield


@contextmanager
def _heard() -> Iterator[list[str]]:
    """What the optimizer says to its log inside."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, listener = logging.getLogger("offload.optim"), Listener()
    before = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before)

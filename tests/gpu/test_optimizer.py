"""The hybrid optimizer on a real GPU: the same bits whatever overlaps, host memory to the byte, and lanes
that are slow where it hurts.

pytest -m gpu -n 0 tests/gpu/test_optimizer.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import AdamW, Optimizer

from offload import FSDPGPUOptimizerWrapper, HybridDeviceOptimizer, OffloadEngine
from tests.gpu.widened import WidenedDevice, sleep

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
WIDTH, DEPTH = 1000, 6  # 6 M parameters, none of whose sizes is a power of two; 24 buckets of 1 MiB
RECIPE: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
BUCKET = 1 << 20


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH, device=DEVICE, dtype=dtype), nn.Tanh()]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, device=DEVICE, generator=generator) * 0.03)
    return model


def backward(model: nn.Module, number: int) -> None:
    dtype = next(model.parameters()).dtype
    generator = torch.Generator(device=DEVICE).manual_seed(100 + number)
    model(
        torch.randn(64, WIDTH, device=DEVICE, generator=generator).to(dtype)
    ).float().square().mean().backward()


def train(
    model: nn.Module, optimizer: Optimizer, steps: int = 5, *, microbatches: int = 2, slow_ms: float = 0.0
) -> list[Tensor]:
    """The weights after the steps. slow_ms: compute is behind the host by that much when each step is asked
    for."""
    for step in range(steps):
        for microbatch in range(microbatches):
            if isinstance(optimizer, HybridDeviceOptimizer):
                optimizer.last_microbatch = microbatch == microbatches - 1
            backward(model, step * microbatches + microbatch)
        if slow_ms:
            sleep(slow_ms)
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer.synchronize_parameters()
    return [parameter.detach().clone() for parameter in model.parameters()]


_open: list[tuple[HybridDeviceOptimizer, OffloadEngine]] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """What a test built gives its pinned memory back."""
    yield
    while _open:
        optimizer, engine = _open.pop()
        optimizer.close()
        engine.close()


def hybrid(
    parameters_of: nn.Module, device: WidenedDevice | None = None, /, **options: Any
) -> HybridDeviceOptimizer:
    engine = OffloadEngine(device=device if device is not None else "cuda")
    common: dict[str, Any] = {"engine": engine, "bucket_bytes": BUCKET, "cpu_share": 0.5, **RECIPE}
    if "model" in options:
        common["overlap"] = "forward"
    optimizer = HybridDeviceOptimizer(parameters_of.parameters(), 1.0, **{**common, **options})
    _open.append((optimizer, engine))
    return optimizer


def assert_same_bits(mine: list[Tensor], other: list[Tensor]) -> None:
    for place, (one, two) in enumerate(zip(mine, other, strict=True)):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8)), (
            f"parameter {place} differs by {(one - two).abs().max()}"
        )


@pytest.mark.usefixtures("deterministic")
@pytest.mark.req("S3-34")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_overlap_of_every_kind_gives_the_bits_of_none(share: float, dtype: torch.dtype) -> None:
    common: dict[str, Any] = {"cpu_share": share, "param_update_in_fp32": True}
    model = net(dtype)
    expected = train(model, hybrid(model, overlap_cpu_optimizer_d2h_h2d=False, **common))
    for options in ({}, {"overlap": "backward"}):
        model = net(dtype)
        optimizer = hybrid(model, model=model, **options, **common)
        assert_same_bits(train(model, optimizer), expected)
        optimizer.close()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.req("S3-34")
def test_with_clipping_overlap_gives_the_bits_of_none() -> None:
    model = net()
    expected = train(model, hybrid(model, overlap_cpu_optimizer_d2h_h2d=False, max_grad_norm=0.01))
    model = net()
    assert_same_bits(train(model, hybrid(model, model=model, max_grad_norm=0.01)), expected)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_what_a_grad_scaler_unscales_after_it_landed_counts_unscaled(share: float) -> None:
    """Its kernel moves no version counter: the copy that left in the backward has the scaled gradients."""

    def trained(**options: Any) -> list[Tensor]:
        model = net()
        optimizer = hybrid(model, cpu_share=share, **options, **({"model": model} if not options else {}))
        optimizer.last_microbatch = True
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
        for step in range(4):
            generator = torch.Generator(device=DEVICE).manual_seed(100 + step)
            scaler.scale(
                model(torch.randn(64, WIDTH, device=DEVICE, generator=generator)).square().mean()
            ).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        optimizer.synchronize_parameters()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert_same_bits(trained(), trained(overlap_cpu_optimizer_d2h_h2d=False))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("clip", [None, 0.01])
def test_the_streamed_place_has_the_bits_of_torchs_fused_adamw_on_the_gpu(clip: float | None) -> None:
    """Cut into buckets: an elementwise kernel does not see where it is cut."""
    reference, model = net(), net()
    expected = AdamW(reference.parameters(), fused=True, **RECIPE)
    optimizer = hybrid(model, cpu_share=0.0, model=model, max_grad_norm=clip)
    for step in range(4):
        for each, steps in ((reference, expected), (model, optimizer)):
            backward(each, step)
            if clip is not None and each is reference:
                nn.utils.clip_grad_norm_(reference.parameters(), clip)
            steps.step()
            steps.zero_grad()
    optimizer.synchronize_parameters()
    assert_same_bits([p.detach() for p in model.parameters()], [p.detach() for p in reference.parameters()])


@pytest.mark.usefixtures("deterministic")
def test_the_cpu_place_has_the_bits_of_torchs_fused_adamw_on_the_cpu() -> None:
    model = net()
    masters = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    expected, optimizer = AdamW(masters, fused=True, **RECIPE), hybrid(model, cpu_share=1.0, model=model)
    for step in range(4):
        backward(model, step)
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.cpu()
        expected.step()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize_parameters()
        assert_same_bits([p.detach().cpu() for p in model.parameters()], masters)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("slow", ["d2h", "h2d", "both", "compute"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_slow_lanes_change_no_bit(share: float, slow: str) -> None:
    model = net()
    expected = train(model, hybrid(model, cpu_share=share, overlap_cpu_optimizer_d2h_h2d=False), 3)
    device = WidenedDevice()
    model = net()
    optimizer = hybrid(model, device, cpu_share=share, model=model, bucket_bytes=4 * BUCKET)
    device.slow_ms = {lane: 3.0 for lane in ("d2h", "h2d") if slow in (lane, "both")}
    assert_same_bits(train(model, optimizer, 3, slow_ms=40.0 if slow == "compute" else 0.0), expected)
    device.slow_ms = {}
    optimizer.close()


def test_step_returns_while_the_gradients_are_still_being_made() -> None:
    model = net()
    optimizer = hybrid(model, model=model)
    train(model, optimizer, 2)
    backward(model, 9)
    sleep(200.0)
    optimizer.step()
    assert not torch.cuda.current_stream().query(), "nobody waited for the device"
    optimizer.zero_grad()
    optimizer.synchronize_parameters()
    optimizer.close()


@pytest.mark.req("S3-41")
@pytest.mark.parametrize(
    ("dtype", "share", "each"), [(torch.float32, 1.0, 16), (torch.float32, 0.0, 8), (torch.bfloat16, 1.0, 18)]
)
def test_host_memory_is_pinned_and_exact(dtype: torch.dtype, share: float, each: int) -> None:
    """Masters, gradients and two moments, 4 bytes each, and 2 for a half weight that lands beside its master
    (4 * 4 + 2 = 18); streamed, the two moments alone. Padded to 16 elements a parameter. Held in
    registrations."""
    model = net(dtype)
    optimizer = hybrid(model, cpu_share=share, param_update_in_fp32=True)
    padded = sum(-(-parameter.numel() // 16) * 16 for parameter in model.parameters())
    stats = optimizer.engine.arena.stats()
    assert stats.lent_bytes == each * padded
    assert stats.held_bytes - stats.lent_bytes < optimizer.engine.arena.registration_bytes
    optimizer.dummy_step()  # before a first step there is no state to see
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg"].is_pinned()
    optimizer.close()
    assert optimizer.engine.arena.lent_bytes == 0


@pytest.mark.usefixtures("clean_allocator")
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_device_holds_the_ring_and_nothing_else_of_the_optimizer(share: float) -> None:
    """Between steps, and as a peak over a step with gradients there: weights, gradients, the ring, and small
    change."""
    model = net()
    train(model, torch.optim.SGD(model.parameters(), lr=0.0), 1)  # cuBLAS gets its workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer = hybrid(model, cpu_share=share)
    train(model, optimizer, 2)
    torch.cuda.synchronize()
    # lets go of gradients that were still being read when it was last asked
    optimizer.synchronize_parameters()
    # counts and scalars, a block each
    small = 512 * sum(len(bucket.steps) for bucket in optimizer.placed.streamed.buckets) + (64 << 10)
    assert torch.cuda.memory_allocated() - before <= optimizer.ring_bytes + small
    assert optimizer.ring_bytes <= 3 * 2 * (BUCKET + 64)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - held <= small
    optimizer.close()


def test_gradients_of_the_last_step_are_gone_after_the_next_forward() -> None:
    model = net()
    optimizer = hybrid(model, model=model)
    train(model, optimizer, 2)
    backward(model, 5)
    gradients = [StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters() if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(2):
        with torch.no_grad():
            model(torch.zeros(1, WIDTH, device=DEVICE))
        torch.cuda.synchronize()
    with torch.no_grad():
        model(torch.zeros(1, WIDTH, device=DEVICE))
    assert gradients
    assert all(gradient.expired() for gradient in gradients)
    optimizer.close()


@pytest.mark.usefixtures("deterministic")
def test_a_run_goes_on_from_a_state_dict_with_the_same_bits() -> None:
    model = net(torch.bfloat16)
    optimizer = hybrid(model, model=model, param_update_in_fp32=True)
    train(model, optimizer, 3)
    saved = {
        "model": {key: value.clone() for key, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }
    expected = train(model, optimizer, 2)
    again = net(torch.bfloat16)
    other = hybrid(again, model=again, param_update_in_fp32=True)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert_same_bits(train(again, other, 2), expected)


def test_parameters_on_the_host_are_stepped_there() -> None:
    on_gpu, on_host = nn.Parameter(torch.ones(100, device=DEVICE)), nn.Parameter(torch.ones(100))
    for fraction in (0.0, 1.0):
        optimizer = HybridDeviceOptimizer([on_gpu, on_host], fraction, max_grad_norm=1e6, **RECIPE)
        before = on_gpu.detach().cpu().clone(), on_host.detach().clone()
        on_gpu.grad, on_host.grad = torch.ones(100, device=DEVICE), torch.ones(100)
        optimizer.step()
        torch.cuda.synchronize()
        assert (on_gpu.detach().cpu() < before[0]).all()
        assert (on_host.detach() < before[1]).all()
        optimizer.close()


class Momentum(Optimizer):
    """Not torch's, so it steps all; keeps the last gradient itself, and writes into the new one."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.state[parameter]
                parameter.grad.add_(entry.get("last", 0.5), alpha=0.5)
                entry["last"] = parameter.grad
                parameter.sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [torch.optim.RMSprop, Momentum])
def test_whole_parameters_are_stepped_in_pinned_memory_with_the_bits_of_the_class_on_the_host(
    cls: Any, dtype: torch.dtype
) -> None:
    """Compute is behind the host when step() copies gradients, and when the next one is issued."""
    model = net(dtype)
    twin = [nn.Parameter(parameter.detach().cpu().clone()) for parameter in model.parameters()]
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, cls, lr=1e-2)
    alone = cls(twin, lr=1e-2)
    stepped = [p for inside in optimizer.sub_optimizers for g in inside.param_groups for p in g["params"]]
    assert all(parameter.is_pinned() for parameter in stepped)
    for number in range(4):
        generator = torch.Generator(device=DEVICE).manual_seed(number)
        noise = [torch.randn(p.shape, device=DEVICE, generator=generator).to(dtype) for p in twin]
        for copy, each in zip(twin, noise, strict=True):
            copy.grad = each.cpu() * 2
        sleep(20)
        for parameter, each in zip(model.parameters(), noise, strict=True):
            parameter.grad = each * 2
        optimizer.step()
        optimizer.zero_grad()
        alone.step()
        found = [parameter.detach().clone() for parameter in model.parameters()]
        for mine, copy in zip(found, twin, strict=True):
            assert torch.equal(mine.cpu(), copy)
    optimizer.close()


def test_the_cores_near_the_gpu_are_cores_of_this_process() -> None:
    engine = OffloadEngine(device="cuda")
    assert engine.device.near_cores
    assert engine.device.near_cores <= os.sched_getaffinity(0)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.req("S3-46", "S3-47")
@pytest.mark.usefixtures("alone", "deterministic")
def test_fsdp2_with_parameters_on_the_host_steps_on_the_gpu_as_adam_there() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    reference, model = net(), net()
    expected = torch.optim.Adam(reference.parameters(), lr=1e-3, fused=True)
    mesh = init_device_mesh("cuda", (1,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    optimizer = FSDPGPUOptimizerWrapper(
        torch.optim.Adam(model.parameters(), lr=1e-3), DEVICE, bucket_bytes=BUCKET
    )
    assert optimizer.ring_bytes <= 3 * 4 * (BUCKET + 64)
    for step in range(10):
        for each, steps in ((reference, expected), (model, optimizer)):
            backward_of(each, step)
            steps.step()  # type: ignore[attr-defined]
            steps.zero_grad()  # type: ignore[attr-defined]
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.detach().cpu())  # type: ignore[attr-defined]
    optimizer.close()


def backward_of(model: nn.Module, number: int) -> None:
    """As `backward`, for a model whose parameters are not on the device it computes on."""
    generator = torch.Generator(device=DEVICE).manual_seed(100 + number)
    model(torch.randn(64, WIDTH, device=DEVICE, generator=generator)).square().mean().backward()

"""INT8 weights on a GPU: the kernel's bits, steps beside the expanded weights, memory, and what crosses."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import QuantLinear
from offload.device import rows
from tests.gpu.test_weights import BLOCKS, ROWS, WIDTH, Model, adam, step
from tests.inside import streaming_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("engine_of_the_gpu", "clean_allocator")]

BLOCK_BYTES = 8 * WIDTH * WIDTH * 2
INT8_BYTES = 8 * WIDTH * WIDTH + 4 * 5 * WIDTH


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(*weight.shape[:-1], 1, device=weight.device)
    rows.quantize_rows(weight, values, scales)
    return values, scales


def pair(checkpoints: bool | None = None) -> tuple[Model, Model]:
    """Frozen blocks, and the same with the elements that they are expanded to."""
    torch.manual_seed(0)
    model = Model(checkpoints=checkpoints).to("cuda", torch.bfloat16)
    model.layers.requires_grad_(False)
    for layer in model.layers:
        layer.norm.requires_grad_(True)
    plain = copy.deepcopy(model)
    for module in plain.layers.modules():
        if isinstance(module, nn.Linear):
            values, scales = rounded(module.weight.data)
            module.weight.data = (values.float() * scales).to(torch.bfloat16)
    return model, plain


@pytest.mark.req("Q-1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (5, 1000), (3, 64, 4096), (130, 18944)])
def test_the_gpu_rounds_and_expands_to_the_bits_of_the_cpu(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    spread = torch.logspace(-12, 4, shape[0]).view(-1, *[1] * (len(shape) - 1))
    weight = (torch.randn(shape) * spread).to(dtype)
    weight[0] = 0
    on_cpu, on_gpu = rounded(weight), rounded(weight.cuda())
    for mine, its in zip(on_gpu, on_cpu, strict=True):
        assert torch.equal(mine.cpu(), its)
    for to in (torch.bfloat16, torch.float16, torch.float32):
        out = torch.empty(shape, dtype=to, device="cuda")
        rows.expand_rows(*on_gpu, out)
        assert torch.equal(out.cpu(), (on_cpu[0].float() * on_cpu[1]).to(to))


def test_the_kernel_is_compiled_and_torchs_multiplication_has_its_bits() -> None:
    kernel = rows._kernel()
    assert kernel is not None
    values, scales = rounded(torch.randn(513, 4097, device="cuda").bfloat16())
    mine, its = (torch.empty(values.shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    kernel(values, scales, mine)
    torch.mul(values, scales, out=its)
    assert torch.equal(mine, its)


def test_the_kernel_is_bound_by_memory() -> None:
    """It takes less time than a copy of as many bytes takes twice."""
    values, scales = rounded(torch.randn(18944, 3584, device="cuda").bfloat16())
    out = torch.empty(values.shape, dtype=torch.bfloat16, device="cuda")
    source = torch.empty(values.numel() * 3 // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)  # read and written, as many bytes as an expansion has

    def ms(call: Any) -> float:
        times = []
        for _ in range(10):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    rows.expand_rows(values, scales, out)
    assert ms(lambda: rows.expand_rows(values, scales, out)) < 2 * ms(lambda: target.copy_(source))


@pytest.mark.req("Q-3")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("checkpoints", [None, False, True])
@pytest.mark.parametrize("weights", ["host", "100MB"])
def test_steps_have_the_bits_of_the_expanded_weights(checkpoints: bool | None, weights: str) -> None:
    model, plain = pair(checkpoints)
    handle = offload.apply(model, weights=weights, quantize="int8")
    ours, its = adam(model), adam(plain)
    for number in range(6):
        for mine, other in zip(step(model, number, ours), step(plain, number, its), strict=True):
            assert torch.equal(mine, other)
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name].to("cuda"), value), name
    handle.remove()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.req("Q-3")
def test_int8_crosses_the_link_and_the_window_is_one_block_and_a_staged_one() -> None:
    model, plain = pair(False)
    del plain
    before = torch.cuda.memory_allocated()
    handle = offload.apply(model, weights="host", quantize="int8")
    assert before - torch.cuda.memory_allocated() >= 0.98 * BLOCKS * BLOCK_BYTES
    optimizer, stream, figures = adam(model), streaming_of(handle), handle.weights
    assert figures is not None
    for number in range(4):
        step(model, number, optimizer)
    assert figures.int8_bytes == figures.streamed_bytes == BLOCKS * INT8_BYTES
    assert figures.in_bytes == 2 * (BLOCKS - 1) * INT8_BYTES
    assert stream.residency.present_bytes_peak <= BLOCK_BYTES + INT8_BYTES
    seen = []
    for number in range(10):
        step(model, number, optimizer)
        stats = torch.cuda.memory_stats()
        seen.append([stats[name] for name in ("segment.all.allocated", "num_alloc_retries")])
    assert seen[4] == seen[-1]


def test_reads_and_refused_writes_on_a_gpu() -> None:
    model, plain = pair()
    handle = offload.apply(model, weights="host", quantize="int8")
    step(model, 0, adam(model))
    with pytest.raises(offload.OffloadError, match="is held as INT8"), torch.no_grad():
        model.layers[3].up.weight.add_(1)
    assert torch.equal(model.layers[3].up.weight.detach(), plain.layers[3].up.weight)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    handle.dequantize("layers.3")
    with torch.no_grad():
        model.layers[3].up.weight.add_(1)
        plain.layers[3].up.weight.add_(1)
    assert torch.equal(model.layers[3].up.weight.detach(), plain.layers[3].up.weight)
    handle.remove()


@pytest.mark.req("Q-4")
@pytest.mark.parametrize("bias", [True, False])
def test_quant_linear_has_the_bits_of_torchs_linear(bias: bool) -> None:
    linear = nn.Linear(1024, 4096, bias=bias).to("cuda", torch.bfloat16)
    ours = QuantLinear(linear)
    linear.weight.data = ours.expanded(torch.bfloat16)
    linear.requires_grad_(False)
    inputs = [torch.ones(2, 512, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    inputs = [each.mul_(torch.linspace(-1, 1, 1024, device="cuda")).requires_grad_() for each in inputs]
    ours(inputs[0].detach())  # the library's workspace stays
    before = torch.cuda.memory_allocated()
    y = ours(inputs[0])
    assert torch.cuda.memory_allocated() - before < y.nbytes + linear.weight.nbytes  # none expanded is kept
    z = linear(inputs[1])
    assert torch.equal(y, z)
    for each in (y, z):
        each.float().square().sum().backward()
    assert torch.equal(*(each.grad for each in inputs))  # type: ignore[arg-type]


def test_slabs_on_a_gpu(tmp_path: Any) -> None:
    model, plain = pair()
    handle = offload.apply(model, weights="host", quantize="int8")
    path = handle.write_slab(tmp_path / "model")
    handle.remove()
    other = copy.deepcopy(plain).cpu()
    for module in other.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.zero_()
    handle = offload.apply(other, weights="host", quantize=path)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(other(x), plain(x))
    handle.remove()

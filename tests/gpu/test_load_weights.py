"""Weights from files on a GPU: bits, memory while they come, what stays reserved, and where they go."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import offload
from tests.gpu.test_weights import BLOCK_BYTES, BLOCKS, Model, adam, pair, step
from tests.inside import streaming_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("engine_of_the_gpu", "clean_allocator")]


def on_meta(**options: Any) -> Model:
    with torch.device("meta"):
        return Model(**options).to(torch.bfloat16)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Model, Path]:
    """A model on the GPU, and its files."""
    model, _ = pair()
    tensors = {name: value.cpu() for name, value in model.state_dict().items()}
    names = [*tensors]
    for at in range(3):
        save_file({name: tensors[name] for name in names[at::3]}, tmp_path / f"part-{at}.safetensors")
    return model, tmp_path


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("device", [None, "cuda", "cuda:0", 0])
@pytest.mark.parametrize("first", ["apply", "load"])
def test_a_model_on_meta_has_the_bits_of_the_one_that_was_saved(
    saved: tuple[Model, Path], device: Any, first: str
) -> None:
    plain, folder = saved
    model = on_meta()
    if first == "load":
        offload.load_weights(model, folder)
    handle = offload.apply(model, weights="host", device=device)
    if first == "apply":
        offload.load_weights(model, folder)
    ours, its = adam(model), adam(plain)
    for number in range(4):
        for mine, other in zip(step(model, number, ours), step(plain, number, its), strict=True):
            assert torch.equal(mine, other)
    handle.remove()
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other.cpu())


def test_no_more_than_a_window_is_on_the_device_while_weights_come(saved: tuple[Model, Path]) -> None:
    _, folder = saved
    model = on_meta()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    handle = offload.apply(model, weights="host")
    offload.load_weights(model, folder)
    largest = BLOCK_BYTES // 2  # one of a block's two weights
    resident = sum(nbytes for _, nbytes in handle.weights.resident.values())  # type: ignore[union-attr]
    assert torch.cuda.max_memory_allocated() - before <= resident + largest + (1 << 20)
    assert torch.cuda.memory_allocated() - before <= resident + (1 << 20)
    assert streaming_of(handle).residency.present_bytes_peak == 0


@pytest.mark.usefixtures("deterministic")
def test_frozen_weights_of_files_are_expanded_from_int8(saved: tuple[Model, Path]) -> None:
    plain, folder = saved
    model = on_meta()
    found = []
    for each in (model, plain):
        each.layers.requires_grad_(False)
        handle = offload.apply(each, weights="host", quantize="int8")
        if each is model:
            offload.load_weights(model, folder, "int8")
        optimizer = adam(each)
        found.append([step(each, number, optimizer) for number in range(3)])
        handle.remove()
    for mine, its in zip(*found, strict=True):
        assert all(map(torch.equal, mine, its))


def test_what_leaves_at_apply_goes_back_to_the_driver() -> None:
    model, plain = pair()
    del plain
    reserved = torch.cuda.memory_reserved()
    handle = offload.apply(model, weights="host")
    assert reserved - torch.cuda.memory_reserved() >= 0.8 * BLOCKS * BLOCK_BYTES
    assert torch.cuda.memory_reserved() <= torch.cuda.memory_allocated() + (64 << 20)
    handle.remove()


def test_weights_are_brought_to_a_device_and_left_on_the_host(saved: tuple[Model, Path]) -> None:
    plain, folder = saved
    for begins in ("meta", "cpu", "cuda"):
        for ends in ("cuda", "cpu", None):
            model = on_meta() if begins == "meta" else copy.deepcopy(plain).to(begins)
            handle = offload.apply(model, weights="host")
            if begins == "meta":
                offload.load_weights(model, folder)
            step(model, 0, torch.optim.SGD(model.parameters(), lr=0.0))
            handle.remove(device=ends)
            where = ends or begins.replace("meta", "cpu")
            assert {parameter.device.type for parameter in model.parameters()} == {where}
            assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.cpu(), other.cpu())


@pytest.mark.parametrize("begins", ["cpu", "cuda"])
def test_weights_that_do_not_fit_are_refused_before_one_has_moved(begins: str) -> None:
    model, plain = pair()
    model.to(begins).layers.requires_grad_(False)
    handle = offload.apply(model, weights="host")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step(model, 0, optimizer)
    torch.cuda.empty_cache()
    allocated, total = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((allocated + 7 * BLOCK_BYTES) / total)
    try:
        for options in [{"device": "cuda"}, {}][: 1 + (begins == "cuda")]:
            with pytest.raises(
                ValueError, match=r"brings [\d,]+ bytes of weights to cuda:0, and [\d,]+ are free"
            ):
                handle.remove(**options)
        assert torch.cuda.memory_allocated() == allocated
        step(model, 1, optimizer)
        handle.remove(device="cpu")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other.cpu())


def test_a_block_that_is_compiled_with_graphs_is_refused_in_both_orders() -> None:
    model, _ = pair()
    layers: Any = model.layers
    handle = offload.apply(model, weights="host")
    compiled = torch.compile(model, mode="reduce-overhead")
    x = torch.randn(4, layers[0].up.in_features, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"layers.0 is compiled with CUDA graphs"):
        compiled(x)
    handle.remove()
    with pytest.raises(ValueError, match="is compiled with CUDA graphs"):
        offload.apply(compiled, weights="host", blocks="*layers.*")


@pytest.mark.gpus(2)
def test_a_model_trains_on_the_device_that_apply_names(saved: tuple[Model, Path]) -> None:
    _, folder = saved
    model = on_meta()
    handle = offload.apply(model, weights="host", device="cuda:1")
    offload.load_weights(model, folder)
    with torch.cuda.device(1):
        x = torch.randn(4, model.embed.in_features, device="cuda:1", dtype=torch.bfloat16)
        model(x).sum().backward()
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cuda:1")}
    with pytest.raises(ValueError, match=r"device='cuda:0' beside .*, which is on another device"):
        offload.apply(on_meta(), weights="host", device="cuda:0")
    handle.remove()

"""Slabs: what is written, what is read back, and what does not fit is an error of its kind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import offload
from offload.errors import OffloadError, SlabError, SlabSignatureError, SlabTensorError, SlabVersionError
from tests.inside import streaming_of, streams_from
from tests.unit.groups.stack import build_manager, installed
from tests.unit.weights.streamed import BLOCKS, ROWS, WIDTH, Model, squares, streamed

Slab = tuple[Path, Model]


@pytest.fixture
def slab(tmp_path: Path) -> Slab:
    """A manifest, and a model with the elements that are in the slab."""
    with streamed(Model(), frozen=True, quantize="int8") as pair:
        found = pair.handle.write_slab(tmp_path / "model", "test")
        return found, pair.plain


def other(seed: int = 7) -> Model:
    torch.manual_seed(seed)
    model = Model()
    model.layers.requires_grad_(False)
    return model


@pytest.mark.req("Q-2")
def test_a_slab_has_the_values_by_the_formulas_and_a_manifest_of_them(slab: Slab) -> None:
    path, plain = slab
    manifest, tensors = json.loads(path.read_text()), load_file(path.with_name("model.safetensors"))
    topology = sorted(
        f"{name}:{module.in_features}:{module.out_features}:True"
        for name, module in plain.named_modules()
        if isinstance(module, nn.Linear)
    )
    assert manifest["model_signature"] == hashlib.sha256("|".join(topology).encode()).hexdigest()[:16]
    assert manifest["architecture_id"] == "test"
    assert manifest["quant_version"] == "squareq_bp8_v2"
    assert manifest["kernel_abi_version"] == 1
    assert manifest["layer_count"] == len(manifest["layers"]) == 2 * BLOCKS
    for layer in manifest["layers"]:
        module = plain.get_submodule(layer["canonical_name"])
        values, scales = tensors[layer["qweight_key"]], tensors[layer["scale_key"]]
        assert layer["orig_shape"] == list(module.weight.shape)
        assert layer["packed_shape"] == list(values.shape) == [module.out_features, 64]
        assert (layer["pad_k"], layer["quant_bits"], layer["quant_axis"]) == (64, 8, 0)
        assert layer["block_id"] == layer["canonical_name"].rpartition(".")[0]
        assert not values[:, module.in_features :].any()
        assert not tensors[layer["zero_point_key"]].any()
        elements = values[:, : module.in_features].float() * scales[:, None]
        assert torch.equal(elements, module.weight)
        assert torch.equal(tensors[layer["bias_key"]], module.bias)


def test_biases_that_stream_are_in_it(tmp_path: Path) -> None:
    model = other()
    with installed(build_manager()), streams_from(WIDTH):
        handle = offload.apply(model, weights="host", quantize="int8")
        handle.write_slab(tmp_path / "model")
        assert torch.equal(
            load_file(tmp_path / "model.safetensors")["layers.0.up.bias"], other().layers[0].up.bias
        )
        handle.remove()


@pytest.mark.req("Q-2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_trains_on_a_slab_as_on_the_weights_in_it(slab: Slab, dtype: torch.dtype) -> None:
    path, plain = slab
    model, plain = other().to(dtype), plain.to(dtype)
    if dtype is torch.bfloat16:  # expanded from INT8 to it, not from float32 rounded twice
        tensors = load_file(path.with_name("model.safetensors"))
        for name, module in plain.layers.named_modules():
            if isinstance(module, nn.Linear):
                values, scale = (tensors[f"layers.{name}.{kind}"] for kind in ("qweight", "scale"))
                module.weight.data = (values[:, : module.in_features].float() * scale[:, None]).to(dtype)
    for name in ("embed", "head"):  # are in no slab
        model.get_submodule(name).load_state_dict(plain.get_submodule(name).state_dict())
    for mine, its in zip(model.layers, plain.layers, strict=True):
        mine.norm.load_state_dict(its.norm.state_dict())
    with installed(build_manager("late")), streams_from(WIDTH * WIDTH):
        handle = offload.apply(model, weights="host", quantize=path)
        for _ in range(2):
            x = torch.randn(ROWS, WIDTH, dtype=dtype)
            losses = [squares(each, x) for each in (model, plain)]
            for loss in losses:
                loss.backward()
            assert torch.equal(*losses)
            for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
                assert (mine.grad is None and its.grad is None) or torch.equal(mine.grad, its.grad)
        again = handle.write_slab(path.with_name("again"))
        assert json.loads(again.read_text())["layers"] == json.loads(path.read_text())["layers"]
        first, second = (load_file(path.with_name(f"{name}.safetensors")) for name in ("model", "again"))
        assert all(torch.equal(first[key], second[key]) for key in first if not key.endswith("bias"))
        handle.remove()


def test_what_is_in_a_slab_and_does_not_stream_has_its_elements(slab: Slab) -> None:
    path, plain = slab
    model = other()
    model.layers[0].up.weight.requires_grad_(True)
    with installed(build_manager("late")), streams_from(WIDTH * WIDTH):
        handle = offload.apply(model, weights="host", quantize=path)
        assert [weight.int8 for weight in streaming_of(handle).blocks[0].weights] == [False, True]
        handle.remove()
    for name, value in plain.layers.state_dict().items():
        if "norm" not in name:
            assert torch.equal(model.layers.state_dict()[name], value), name


def test_a_model_on_meta_takes_a_slab_and_the_rest_of_files(slab: Slab) -> None:
    path, plain = slab
    with torch.device("meta"):
        model = other()
    names = [name for name in plain.state_dict() if "up" not in name and "down" not in name]
    save_file({name: plain.state_dict()[name] for name in names}, path.with_name("rest.safetensors"))
    save_file(plain.state_dict(), path.with_name("plain.safetensors"))
    with torch.device("meta"):
        empty = other()
    with installed(build_manager("late")), streams_from(WIDTH * WIDTH):
        handle = offload.apply(empty, weights="host", quantize="int8")
        with pytest.raises(ValueError, match="none with values"):
            handle.write_slab(path.with_name("empty"))
        empty.layers[0].up.weight.requires_grad_()
        with pytest.raises(OffloadError, match=r"layers.0.up.weight is held as INT8"):
            offload.load_weights(empty, path.with_name("plain.safetensors"))
        handle.remove()
        handle = offload.apply(model, weights="host", quantize=path)
        offload.load_weights(model, path.with_name("rest.safetensors"), strict=False)
        x = torch.randn(ROWS, WIDTH)
        assert torch.equal(model(x), plain(x))
        handle.remove()
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def change(path: Path, edit: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> None:
    file = path.with_name("model.safetensors")
    manifest, tensors = json.loads(path.read_text()), load_file(file)
    edit(manifest, tensors)
    path.write_text(json.dumps(manifest))
    save_file(tensors, file)


def put(key: str, value: Any, at: int | None = None) -> Any:
    def edit(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        (manifest if at is None else manifest["layers"][at])[key] = value

    return edit


def tensor(kind: str, change: Callable[[Tensor], Tensor | None]) -> Any:
    def edit(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        key = manifest["layers"][3][f"{kind}_key"]
        found = change(tensors.pop(key))
        if found is not None:
            tensors[key] = found

    return edit


def drop_layer(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del manifest["layers"][3]


BAD = [
    (put("model_signature", "0" * 16), SlabSignatureError, "has the signature|with the signature"),
    (put("quant_version", "squareq_bp4_v3"), SlabVersionError, "quant_version"),
    (put("kernel_abi_version", 2), SlabVersionError, "kernel_abi_version"),
    (put("quant_bits", 4, 2), SlabVersionError, "quant_bits of layers"),
    (put("quant_scheme", "per_group", 2), SlabVersionError, "quant_scheme"),
    (put("quant_axis", 1, 2), SlabVersionError, "quant_axis"),
    (put("packed_shape", [1, 2], 3), SlabTensorError, "is packed as"),
    (put("orig_shape", [2 * WIDTH, WIDTH + 1], 3), SlabTensorError, "is no parameter of the model"),
    (tensor("qweight", lambda _: None), SlabTensorError, "which the file has not"),
    (tensor("scale", lambda _: None), SlabTensorError, "which the file has not"),
    (tensor("qweight", lambda found: found.float()), SlabTensorError, "is F32 of"),
    (tensor("qweight", lambda found: found[:-1].clone()), SlabTensorError, "is I8 of"),
    (tensor("scale", lambda found: found.half()), SlabTensorError, "is F16 of"),
    (tensor("scale", lambda found: found[:-1].clone()), SlabTensorError, "is F32 of"),
    (tensor("scale", lambda found: found.fill_(float("nan"))), SlabTensorError, "inf, nan or all zero"),
    (
        tensor("scale", lambda found: found.index_fill_(0, torch.tensor(1), float("inf"))),
        SlabTensorError,
        "inf",
    ),
    (tensor("scale", torch.zero_), SlabTensorError, "all zero"),
    (tensor("zero_point", lambda found: found.fill_(1)), SlabTensorError, "zero points"),
    (drop_layer, SlabTensorError, "which streams and is frozen"),
    (put("layers", None), SlabError, "is no slab"),
]


@pytest.mark.req("Q-2")
@pytest.mark.parametrize(("edit", "kind", "text"), BAD)
def test_what_does_not_fit_is_an_error_of_its_kind_and_nothing_has_changed(
    slab: Slab, edit: Any, kind: type[SlabError], text: str
) -> None:
    path, _ = slab
    change(path, edit)
    model = other()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with installed(build_manager("late")) as manager, streams_from(WIDTH * WIDTH):
        with pytest.raises(kind, match=text) as caught:
            offload.apply(model, weights="host", quantize=path)
        assert str(path) in str(caught.value)
        assert isinstance(caught.value, OffloadError)
        assert manager.engine.arena.stats().lent_bytes == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_files_that_are_missing_or_broken(slab: Slab, tmp_path: Path) -> None:
    path, _ = slab
    with installed(build_manager("late")), streams_from(WIDTH * WIDTH):
        with pytest.raises(SlabError, match="is no slab"):
            offload.apply(other(), weights="host", quantize=tmp_path / "none.manifest.json")
        with pytest.raises(ValueError, match=r"must be .int8. or the path"):
            offload.apply(other(), weights="host", quantize=path.with_name("model.safetensors"))
        path.with_name("model.safetensors").write_bytes(b"short")
        with pytest.raises(SlabError, match="is no slab"):
            offload.apply(other(), weights="host", quantize=path)
        path.write_text("{")
        with pytest.raises(SlabError, match="is no slab"):
            offload.apply(other(), weights="host", quantize=path)


def test_a_slab_of_a_plain_model_fits_the_same_one_with_adapters(slab: Slab) -> None:
    peft = pytest.importorskip("peft")
    path, plain = slab
    model = peft.get_peft_model(other(), peft.LoraConfig(r=2, target_modules=["up", "down"]))
    with installed(build_manager("late")), streams_from(WIDTH * WIDTH):
        handle = offload.apply(model, weights="host", quantize=path, blocks="*.layers.?")
        elements = model.base_model.model.layers[2].up.base_layer.weight
        assert torch.equal(elements.detach(), plain.layers[2].up.weight)
        squares(model, torch.randn(ROWS, WIDTH)).backward()
        with pytest.raises(OffloadError, match="is held as INT8"):
            model.merge_adapter()
        handle.dequantize()
        model.merge_adapter()
        model.unmerge_adapter()
        handle.remove()


def test_only_int8_weights_are_written(tmp_path: Path) -> None:
    with streamed(Model(), frozen=True) as pair, pytest.raises(ValueError, match="of which no weights"):
        pair.handle.write_slab(tmp_path / "model")

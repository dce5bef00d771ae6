"""Tensors of safetensors files by name: one file, a folder, or an index of shards; and INT8 weights as files:
a slab of safetensors, and a JSON manifest that says what is in it.

    {name}.safetensors      values int8 (..., padded k), scales float32, zero points (zeros), biases float32
    {name}.manifest.json    the model's signature, versions, and an entry a weight

One invariant: opening reads and checks all headers, and no tensor. A tensor is a view of its mapped file,
which is page cache that the system can take back: no second copy. Nothing of a slab is read into a model
before all of the manifest fits the model and the file.
Source of slabs: SquareQ's version 2 (squareq_bp8_v2); its field names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from offload.device.rows import expand_rows
from offload.errors import SlabError, SlabSignatureError, SlabTensorError, SlabVersionError, WeightFileError
from offload.weights.weight import Weight


class TensorSource(Protocol):
    """Tensors by name, such as an open safetensors file."""

    def keys(self) -> Iterable[str]: ...

    def get_tensor(self, name: str, /) -> Tensor: ...


class Stored(NamedTuple):
    """A tensor's origin, for messages, and who reads it."""

    origin: str
    source: TensorSource


def stored_tensors(path: str | PathLike[str] | TensorSource) -> dict[str, Stored]:
    """By key. path: a file, a folder, an index, or an object that has them. Raises WeightFileError for what
    cannot be read, is cut short, has a key twice, or lacks a key that its index names."""
    if not isinstance(path, (str, PathLike)):
        return dict.fromkeys(path.keys(), Stored(f"the {type(path).__name__}", path))
    listed, files = _listed(Path(path))
    found: dict[str, Stored] = {}
    for file in files:
        source = _opened(file)
        for key in source.keys():  # noqa: SIM118 - an open file is no mapping
            if key in found:
                raise WeightFileError(f"{key} is in {found[key].origin} and in {file}; name one of them")
            found[key] = Stored(str(file), source)
    for key, file in listed.items():
        if key not in found or found[key].origin != str(file):
            raise WeightFileError(f"{path} says that {key} is in {file}, which has no such tensor")
    return found


def _opened(file: Path) -> TensorSource:
    from safetensors import SafetensorError, safe_open

    try:
        opened: TensorSource = safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise WeightFileError(
            f"{file} cannot be read as safetensors ({error}): fetch it again, or save it by safetensors"
        ) from error
    return opened


def _listed(path: Path) -> tuple[dict[str, Path], list[Path]]:
    """The file of each key, where an index says so; and all files."""
    if path.is_dir():
        indexes = sorted(path.glob("*.safetensors.index.json"))
        files = sorted(path.glob("*.safetensors"))
        if (path / "model.safetensors") in files:  # which transformers takes first as well
            return {}, [path / "model.safetensors"]
        if len(indexes) > 1 or not files:
            names = ", ".join(index.name for index in indexes) or "no *.safetensors"
            raise WeightFileError(f"{path} has {names}; name one file or index")
        if not indexes:
            return {}, files
        path = indexes[0]
    if path.suffix != ".json":
        return {}, [path]
    try:
        listed = {key: path.parent / name for key, name in json.loads(path.read_text())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightFileError(f"{path} has no weight_map from keys to files: {error!r}") from error
    return listed, list(dict.fromkeys(listed.values()))


AnyPath = str | PathLike[str]
_SLAB = {"quant_version": "squareq_bp8_v2", "kernel_abi_version": 1}
_LAYER = {"quant_bits": 8, "quant_scheme": "per_row_symmetric", "quant_axis": 0}
"""What a manifest, and each of its layers, has to say."""
_PACK = 64
"""Rows are padded to multiples of it."""
_DTYPES = {"qweight": "int8", "scale": "float32", "zero_point": "float32", "bias": "float32"}
_SUFFIX = ".manifest.json"


def plain_name(name: str) -> str:
    """The name of a parameter or module as it is without PEFT."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def signature(model: nn.Module, is_adapter: Callable[[str], bool]) -> str:
    """16 hexadecimal digits of the names and sizes of its linear layers, but for those of adapters."""
    linear = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and not is_adapter(n))
    rows = sorted(f"{plain_name(n)}:{m.in_features}:{m.out_features}:{m.bias is not None}" for n, m in linear)
    return hashlib.sha256("|".join(rows).encode()).hexdigest()[:16]


def write_slab(path: AnyPath, weights: Iterable[Weight], model_signature: str, architecture: str) -> Path:
    """Write INT8 weights as they wait on the host. Returns the manifest's path. Blocks the host."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    for weight in weights:
        values, scales = weight.int8_views(weight.master)
        name, width = plain_name(weight.name).removesuffix(".weight"), values.shape[-1]
        if width % _PACK:
            values = nn.functional.pad(values, (0, -width % _PACK))
        found = {"qweight": values.contiguous(), "scale": scales.squeeze(-1)}
        found["zero_point"] = torch.zeros(scales.shape[:-1])
        bias = getattr(weight.module(), "bias", None) if weight.attribute == "weight" else None
        if isinstance(bias, Tensor):
            found["bias"] = bias.detach().to("cpu", torch.float32, copy=True)
        tensors |= {f"{name}.{kind}": tensor for kind, tensor in found.items()}
        layers.append(
            {
                "canonical_name": name,
                **{f"{kind}_key": f"{name}.{kind}" if kind in found else None for kind in _DTYPES},
                "orig_shape": list(weight.parameter.shape),
                "packed_shape": list(values.shape),
                "pad_k": _PACK,
                **_LAYER,
                **{f"dtype_{kind}": _DTYPES[kind] for kind in ("qweight", "scale", "zero_point")},
                "block_id": plain_name(weight.block.name),
            }
        )
    manifest = {
        "model_signature": model_signature,
        "architecture_id": architecture,
        **_SLAB,
        "min_runtime_version": "0.1.0",
        "layer_count": len(layers),
        "total_qweight_bytes": sum(tensors[layer["qweight_key"]].numel() for layer in layers),
        "layers": sorted(layers, key=lambda layer: str(layer["canonical_name"])),
    }
    file = Path(f"{str(path).removesuffix(_SUFFIX)}{_SUFFIX}")
    save_file(tensors, str(file).removesuffix(_SUFFIX) + ".safetensors")
    file.write_text(json.dumps(manifest, indent=1))
    return file


class Slab:
    """A slab that fits a model. Raises SlabError, or one of its kinds, that says what does not fit."""

    def __init__(self, path: AnyPath, model: nn.Module, is_adapter: Callable[[str], bool]) -> None:
        """path: of the manifest, beside which the safetensors file is. Reads the manifest and the scales."""
        from safetensors import safe_open

        self._path = Path(path)
        file = Path(str(path).removesuffix(_SUFFIX) + ".safetensors")
        try:
            manifest = json.loads(self._path.read_text())
            opened: Any = safe_open(str(file), framework="pt")
            self._file = opened
            self._layers = {layer["canonical_name"]: layer for layer in manifest["layers"]}
            self._check_fixed("the manifest", manifest, _SLAB)
            found = signature(model, is_adapter)
            if manifest["model_signature"] != found:
                raise SlabSignatureError(
                    f"{path} is of a model with the signature {manifest['model_signature']}, and "
                    f"{type(model).__name__} has {found}: their linear layers have other names or sizes"
                )
            self._keys = set(self._file.keys())
            for name, layer in self._layers.items():
                self._check_fixed(name, layer, _LAYER)
                self._check_tensors(name, layer)
        except SlabError:
            raise
        except Exception as error:  # of files, of JSON, of the library, or of what the manifest has not
            raise SlabError(f"{path} with {file.name} is no slab: {type(error).__name__}: {error}") from error

    def _check_fixed(self, of: str, record: dict[str, Any], known: dict[str, Any]) -> None:
        for field, value in known.items():
            if record[field] != value:
                raise SlabVersionError(
                    f"{self._path}: {field} of {of} is {record[field]!r}, and {value!r} is what is read here"
                )

    def _check_tensors(self, name: str, layer: dict[str, Any]) -> None:
        shape, packed = layer["orig_shape"], layer["packed_shape"]
        rows = shape[:-1]
        if packed[:-1] != rows or packed[-1] < shape[-1]:
            raise SlabTensorError(f"{self._path}: {name} of {shape} is packed as {packed}")
        expected = {"qweight": packed, "scale": rows, "zero_point": rows}
        expected |= {"bias": None} if layer["bias_key"] else {}
        for kind, wanted in expected.items():
            if (key := layer[f"{kind}_key"]) not in self._keys:
                raise SlabTensorError(f"{self._path}: {name} has its {kind} in {key}, which the file has not")
            found = self._file.get_slice(key)
            has, dtype = found.get_shape(), {"I8": "int8", "F32": "float32"}.get(found.get_dtype())
            fits = wanted is None or has == wanted or (kind != "qweight" and has == [*wanted, 1])
            if not fits or dtype != _DTYPES[kind]:
                raise SlabTensorError(
                    f"{self._path}: {key} is {found.get_dtype()} of {has}, and must be {_DTYPES[kind]} of "
                    f"{wanted}"
                )
        scales, zeros = (self._file.get_tensor(layer[f"{kind}_key"]) for kind in ("scale", "zero_point"))
        if not (scales.isfinite().all() and scales.any() and not zeros.any()):
            raise SlabTensorError(
                f"{self._path}: {name} has scales that are inf, nan or all zero, or zero points other than 0"
            )

    def give(self, model: nn.Module, weights: Iterable[Weight]) -> None:
        """These INT8 weights get theirs from the slab when they are taken to the host, and the model's other
        parameters that are in it with `load_rest`."""
        self._parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        for name, layer in self._layers.items():
            wanted = {self._key_of(name): layer["orig_shape"]}
            if layer["bias_key"]:
                wanted[f"{name}.bias"] = self._file.get_slice(layer["bias_key"]).get_shape()
            for key, shape in wanted.items():
                if key not in self._parameters or list(self._parameters[key].shape) != shape:
                    raise SlabTensorError(f"{self._path}: {key} of {shape} is no parameter of the model's")
        self._given = {plain_name(weight.name): weight for weight in weights}
        without = self._given.keys() - {self._key_of(name) for name in self._layers}
        if without:
            raise SlabTensorError(
                f"{self._path} has {len(self._layers)} weights, and not {sorted(without)[0]}, which streams "
                f"and is frozen, as are {len(without) - 1} others that it has not"
            )
        for name, layer in self._layers.items():
            if (weight := self._given.get(self._key_of(name))) is not None:
                weight.source = partial(self._fill, layer)

    def _key_of(self, name: str) -> str:
        """A layer is a module with a weight, or a parameter."""
        return f"{name}.weight" if f"{name}.weight" in self._parameters else name

    def _fill(self, layer: dict[str, Any], weight: Weight) -> None:
        self._read(layer, *weight.int8_views(weight.master))

    def _read(self, layer: dict[str, Any], values: Tensor, scales: Tensor) -> None:
        values.copy_(self._file.get_tensor(layer["qweight_key"])[..., : values.shape[-1]])
        scales.copy_(self._file.get_tensor(layer["scale_key"]).view(scales.shape))

    def load_rest(self, fill: Callable[[Tensor, Tensor], None]) -> None:
        """Biases, and the elements of weights that are not held as INT8. fill: gives a parameter that is on
        meta a value on the CPU. Blocks the host."""
        for name, layer in self._layers.items():
            if layer["bias_key"]:
                self._put(f"{name}.bias", self._file.get_tensor(layer["bias_key"]), fill)
            if (key := self._key_of(name)) not in self._given:
                values = torch.empty(layer["orig_shape"], dtype=torch.int8)
                scales = torch.empty(*layer["orig_shape"][:-1], 1)
                self._read(layer, values, scales)
                elements = torch.empty(values.shape, dtype=self._parameters[key].dtype)
                expand_rows(values, scales, elements)
                self._put(key, elements, fill)

    def _put(self, key: str, value: Tensor, fill: Callable[[Tensor, Tensor], None]) -> None:
        parameter = self._parameters[key]
        if parameter.is_meta:
            fill(parameter, value.to(parameter.dtype))
        else:
            with torch.no_grad():
                parameter.copy_(value)

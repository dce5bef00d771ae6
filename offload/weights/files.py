"""Tensors of safetensors files by name: one file, a folder, or an index of shards.

One invariant: opening reads and checks all headers, and no tensor. A tensor is a view of its mapped file,
which is page cache that the system can take back: no second copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from offload.errors import WeightFileError


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

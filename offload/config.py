"""What a user can set, checked before anything is built.

One invariant: a config that exists is valid; nothing further down checks it again. Sizes are bytes, except
where a name says elements. They may be given as text ("8GB"), and are held as whole numbers.

`help()` shows a dataclass's fields with the docstring that stands under each (`described`). Python keeps none
of a field, so it is read from the source when the class is made; where there is no source, `help()` shows the
class's own text only.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args

from offload.sizes import is_count, optional_bytes, parse_bytes

Class = TypeVar("Class", bound=type)


def described(cls: Class) -> Class:
    """The class, with `__doc__` continued by its fields: name, type, default and docstring of each."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):
        return cls
    assert isinstance(tree, ast.ClassDef)
    fields = []
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        text = below.value if isinstance(below, ast.Expr) else None
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Constant):
            meaning = inspect.cleandoc(str(text.value))
            fields.append(f"{ast.unparse(field)}\n{textwrap.indent(meaning, '    ')}")
    cls.__doc__ = "\n\n".join([inspect.cleandoc(cls.__doc__ or ""), "Fields:", *fields])
    return cls


C = TypeVar("C")
P = ParamSpec("P")

MIB = 1 << 20

LEAST_DISK_BYTES = 16 * MIB
"""What the disk's file has from the start: a directory that has no room for so much is refused."""

Named = Literal["groups", "legacy", "disk", "checkpoint", "hidden_states", "selective", "auto", "watermark"]
Mode = bool | Literal["off"] | Named
MODES: tuple[Mode, ...] = (False, True, *get_args(Named))
"""What `offload.apply` can do to a model; its docstring has their meaning."""


def check_fraction(name: str, value: float) -> None:
    """ValueError unless `value` is a number in 0..1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise ValueError(
            f"{name} is {value!r}, must be a number between 0 and 1; 1 lets every eligible group leave, 0 "
            "none"
        )


def check_min_elements(value: int, name: str = "min_offloaded_tensor_size") -> None:
    """ValueError unless `value` is a count of elements."""
    if not is_count(value):
        raise ValueError(
            f"{name} is {value!r}, must be a whole number of elements, 0 or more (the default is {MIB:,})"
        )


def check_index(name: str, value: object, least: int = 0) -> None:
    """ValueError unless `value` counts from `least`: a rank, a virtual stage, a microbatch."""
    if not is_count(value, least):
        raise ValueError(f"{name} is {value!r}, must be a whole number, {least} or more")


def check_flags(config: Any) -> None:
    """ValueError for a field of a config whose default is True or False, and whose value is neither."""
    for one in fields(config):
        value = getattr(config, one.name)
        if isinstance(one.default, bool) and not isinstance(value, bool):
            raise ValueError(f"{one.name} is {value!r}, must be True or False")


def check_telemetry_file(path: object) -> None:
    """ValueError unless `path` is text that may name a file."""
    if not (path and isinstance(path, str)):
        raise ValueError(f"telemetry_file is {path!r}, must be the path of a file, as text")


def config_or_fields(kind: type[C], config: C | None, given: Mapping[str, Any], of: str) -> C:
    """`config`, or one of the fields that are given. of: who is built from it. Raises ValueError for both."""
    if config is not None and given:
        raise ValueError(
            f"{of} got a config and {', '.join(sorted(given))} beside it; write the fields into the config, "
            "or leave it out"
        )
    return kind(**given) if config is None else config


def naming_near(call: Callable[P, C]) -> Callable[P, C]:
    """`call`, whose TypeError for an argument that it does not have names the nearest one that there is."""
    known = signature(call).parameters

    @wraps(call)
    def called(*arguments: P.args, **named: P.kwargs) -> C:
        for name in (each for each in named if each not in known):
            said = f"{call.__qualname__.removesuffix('.__init__')}() has no argument {name!r}"
            for who, names in (("it", known), ("OffloadConfig", signature(OffloadConfig).parameters)):
                if near := get_close_matches(name, names, 1, 0.75):
                    raise TypeError(f"{said}; {who} has {near[0]!r}")
            raise TypeError(f"{said}; it has {', '.join(each for each in known if each != 'self')}")
        return call(*arguments, **named)

    return called


def check_mode(name: str, value: object) -> Mode:
    """`value`, False for "off"; ValueError unless it is one of MODES."""
    value = False if value == "off" else value
    if isinstance(value, (bool, str)) and value in MODES:
        return value
    near = get_close_matches(str(value).lower(), ("off", *get_args(Named)), 1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} is {value!r}, must be one of 'off', {', '.join(map(repr, MODES))}{meant}")


def check_bytes(name: str, value: object, *, least: int = 0) -> None:
    """ValueError unless `value` is a number of bytes."""
    if not is_count(value, least):
        raise ValueError(f"{name} is {value!r}, must be a whole number of bytes, {least:,} or more")


@described
@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Limits and thresholds of one engine. `None` means "derive it", not "off".

    A size in bytes may also be text, as in "8GB" (8e9), "8GiB" or "500 MB" (`offload.sizes`).
    """

    min_offloaded_tensor_size: int = MIB
    """Elements. A smaller saved tensor stays on the device: its copy would cost more host time than it
    frees."""

    activation_offloading: Mode = "groups"
    """What `offload.apply` does to a model where no `mode` is given: "off" (False), "groups", True (all
    saved tensors), "legacy", "disk", "checkpoint", "hidden_states", "selective", "auto" or "watermark". Marks
    do what they say whatever stands here."""

    activation_offload_fraction: float = 1.0
    """Share of the eligible groups of a chunk, in forward order, that leave after warm-up; the rest stay."""

    delta_offload_bytes_across_pp_ranks: int = 0
    """Bytes. Pipeline rank r keeps r * delta bytes on the device: early ranks hold more chunks, so they
    offload more."""

    pp_rank: int = 0
    """Pipeline rank, for the delta above."""

    max_inflight_offloads: int | None = None
    """Groups of one name whose spill may be pending at a commit. 0: compute waits at every commit. None: no
    such cap."""

    device_limit_bytes: int | None = None
    """Bytes of saved tensors on the device in any state: kept, leaving, coming back. A save or a read passes
    it where nothing more can be released. None: only the two caps below hold."""

    max_spilling_bytes: int | None = None
    """Bytes in flight to the host. Past it the compute lane, never the host, waits for the oldest. 0 refuses
    every spill.
    None: the room that the device limit leaves, or 1 GiB where there is no limit: 20 ms of a 55 GB/s link."""

    max_restoring_bytes: int | None = None
    """Bytes of coming reads that are fetched back ahead of their reader. 0: each tensor is fetched when it is
    read. None: a quarter of the device limit until the plan has measured what is best, or 1 GiB where there
    is no limit."""

    piece_bytes: int = 32 * MIB
    """Bytes. A group leaves in pieces of about this size, each under one event; 16 MiB already reach the
    link's rate."""

    host_limit_bytes: int | None = None
    """Most pinned bytes. With `configure(store=...)` all ranks of one host together may hold so many; without
    a store, this process may. None: 80% of the machine's memory."""

    host_reserve_bytes: int = 0
    """Bytes pinned at construction, so that the first step finds its blocks."""

    trim_host: bool = True
    """Give pinned memory back that a steady step does not use, once the plan is final. Blocks the host then,
    for at most half a GiB in a step and some steps apart. What a later step, of another shape, needs again is
    kept from then on, and goes back once a thousand steps have not wanted it."""

    trim_device: bool = True
    """Give cached device memory back, once the plan is final, where torch's allocator holds more than a
    thirty-second beyond what was ever in use at once: blocks of sizes that the first steps wanted. Blocks the
    host then, at the begin of one step."""

    disk_directory: str | None = None
    """Where what has left the device continues to a file, so that host memory only holds what is on its way:
    a directory of a fast local disk. None: it stays in host memory. Give each process a host_limit_bytes with
    it, whose quarter, 4 GiB at most, holds coming reads. The host can be blocked by a reader that comes
    before its bytes; a disk that is slower than the step fills host memory, and then tensors stay on the
    device. Captured graphs stay in host memory."""

    disk_limit_bytes: int | None = None
    """The largest size of that file, 16 MiB at least. None: all that the file system has free, but a
    twentieth of its size."""

    disk_ahead_bytes: int | None = None
    """Window over coming reads, in bytes: what lies in it is read from the file before the copy to the device
    wants it. None: 4 GiB, or a quarter of the host limit if that is less. 0: each is read when it is
    wanted."""

    audit: bool = False
    """Compare a checksum of every host copy before and after its life there, but for those of captured
    graphs, which each replay writes anew. Blocks the host: for debugging."""

    if TYPE_CHECKING:
        # A size may be given as text, and is held as a number: the fields say the second only.
        def __init__(
            self,
            *,
            min_offloaded_tensor_size: int = ...,
            activation_offloading: Mode = ...,
            activation_offload_fraction: float = ...,
            delta_offload_bytes_across_pp_ranks: float | str = ...,
            pp_rank: int = ...,
            max_inflight_offloads: int | None = ...,
            device_limit_bytes: float | str | None = ...,
            max_spilling_bytes: float | str | None = ...,
            max_restoring_bytes: float | str | None = ...,
            piece_bytes: float | str = ...,
            host_limit_bytes: float | str | None = ...,
            host_reserve_bytes: float | str = ...,
            trim_host: bool = ...,
            trim_device: bool = ...,
            disk_directory: str | None = ...,
            disk_limit_bytes: float | str | None = ...,
            disk_ahead_bytes: float | str | None = ...,
            audit: bool = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        check_min_elements(self.min_offloaded_tensor_size)
        mode = check_mode("activation_offloading", self.activation_offloading)
        object.__setattr__(self, "activation_offloading", mode)
        check_fraction("activation_offload_fraction", self.activation_offload_fraction)
        check_index("pp_rank", self.pp_rank)
        for one in (each for each in fields(self) if "bytes" in each.name):
            least = {"piece_bytes": 1, "disk_limit_bytes": LEAST_DISK_BYTES}.get(one.name, 0)
            parse = optional_bytes if one.default is None else parse_bytes
            object.__setattr__(self, one.name, parse(getattr(self, one.name), name=one.name, least=least))
        directory = self.disk_directory
        if directory is not None and (not isinstance(directory, str) or not directory):
            raise ValueError(
                f"disk_directory is {directory!r}, must be the path of a directory as a string, or None for "
                "host memory only"
            )
        for name in ("disk_limit_bytes", "disk_ahead_bytes"):
            if directory is None and getattr(self, name) is not None:
                raise ValueError(f"{name} is {getattr(self, name):,} without a disk_directory; give both")
        inflight = self.max_inflight_offloads
        if not (inflight is None or is_count(inflight)):
            raise ValueError(
                f"max_inflight_offloads is {inflight!r}, must be None (no cap) or a whole number of groups, "
                "0 or more"
            )
        if self.host_limit_bytes is not None and self.host_reserve_bytes > self.host_limit_bytes:
            raise ValueError(
                f"host_reserve_bytes is {self.host_reserve_bytes:,} but host_limit_bytes only "
                f"{self.host_limit_bytes:,}; raise the limit or reserve less"
            )


OffloadConfig.__init__ = naming_near(OffloadConfig.__init__)  # type: ignore[method-assign]


def checked_config(config: object) -> OffloadConfig:
    """The config itself, or the default one for None; ValueError for anything else."""
    if config is None:
        return OffloadConfig()
    if not isinstance(config, OffloadConfig):
        raise ValueError(
            f"config is a {type(config).__name__}, must be an OffloadConfig, or None for the default one"
        )
    return config


def load_fields(
    cls: type[Any], source: str | Path | Mapping[str, Any], way: tuple[str, ...], of: str
) -> Mapping[str, Any]:
    """Fields of the dataclass `cls` in a JSON file of the source systems, or in what such a file holds.

    way: names of the objects around them, the outermost first. of: what they belong to, for messages. Raises
    ValueError for another strategy, or a field that is not known.
    """
    where = "the config" if isinstance(source, Mapping) else f"{source}"
    try:
        found: Any = source if isinstance(source, Mapping) else json.loads(Path(source).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    for depth, name in enumerate(way):
        if not isinstance(found, Mapping) or name not in found:
            raise ValueError(
                f"{where} has no {'.'.join(way[: depth + 1])}; the fields of {of} are expected in "
                f"{'.'.join(way)}"
            )
        found = found[name]
        if not isinstance(found, Mapping):
            raise ValueError(
                f"{where} has {'.'.join(way[: depth + 1])} {found!r}, must be an object of named fields"
            )
        if name == "memory" and (strategy := found.get("strategy", "stagehand")) != "stagehand":
            raise ValueError(f"{where} has memory.strategy {strategy!r}, must be 'stagehand'")
    known = {one.name for one in fields(cls)}
    if unknown := sorted(map(str, found.keys() - known)):
        raise ValueError(
            f"{where} has fields that are not known: {', '.join(unknown)}; known are "
            f"{', '.join(sorted(known))}"
        )
    return dict(found)

"""What `apply` does to a model, as objects: each has the fields that it has a use for, and no others.

    offload.apply(model, optimizer=optimizer, policy=offload.Auto(device_total="22GB"))
    offload.apply(model, policy=offload.Fixed(weights=offload.Weights("6GB"), gradients=offload.Gradients()))
    offload.apply(model, policy=offload.Watermark(high="70GB"))

One invariant: a policy is the arguments of `apply` that it stands for, with their meanings and defaults; None
is "derive it". What belongs to the process, as limits of host memory, is `configure`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from os import PathLike
from typing import Any, Literal

import torch

from offload.config import Mode
from offload.modules.blocks import Modules


@dataclass(frozen=True)
class Activations:
    """Saved tensors by one of `apply`'s modes, but "auto" and "watermark", which are policies. limit: its
    `device_limit`."""

    mode: Mode = "groups"
    _: KW_ONLY
    limit: float | str | None = None
    blocks: Modules | None = None
    modules: Modules | None = None
    no_recompute: str | Sequence[str] | None = None
    recompute_differs: Literal["raise", "warn"] | None = None

    def __post_init__(self) -> None:
        if self.mode in ("auto", "watermark"):
            raise ValueError(f"Activations({self.mode!r}): give policy=offload.{str(self.mode).title()}()")


@dataclass(frozen=True)
class Weights:
    """Weights of blocks on the host. stay: bytes of them that stay or pass on the device, or "host" for two
    blocks: `apply`'s `weights`."""

    stay: float | str = "host"
    _: KW_ONLY
    quantize: str | PathLike[str] | None = None
    device: torch.device | int | str | None = None


@dataclass(frozen=True)
class Gradients:
    """Where gradients wait for the optimizer: `apply`'s `gradients`."""

    where: Literal["host", "device"] = "host"


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Each kind by itself; a kind that is None stays. min_numel: of a tensor of any of them that leaves."""

    activations: Activations | None = None
    weights: Weights | None = None
    gradients: Gradients | None = None
    min_numel: int | None = None


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Mode "auto": the shortest step within a total. Weights and gradients that are given are placed so, and
    the rest is planned around them."""

    device_total: float | str | None = None
    quantize: Literal["auto"] | None = None
    blocks: Modules | None = None
    min_numel: int | None = None
    no_recompute: str | Sequence[str] | None = None
    recompute_differs: Literal["raise", "warn"] | None = None
    weights: Weights | None = None
    gradients: Gradients | None = None


@dataclass(frozen=True, kw_only=True)
class Watermark:
    """Mode "watermark": the oldest saved tensors leave once device memory reaches `high`."""

    high: float | str | None = None
    low: float | str | None = None
    min_numel: int | None = None
    weights: Weights | None = None
    gradients: Gradients | None = None


Policy = Fixed | Auto | Watermark

_NAMES = {"limit": "device_limit", "stay": "weights", "where": "gradients"}
"""Fields whose argument has another name."""


def arguments_of(policy: Policy) -> dict[str, Any]:
    """The arguments of `apply` that it stands for. Raises ValueError for what is no policy, or two values of
    one argument."""
    if not isinstance(policy, Policy):
        raise ValueError(f"policy is {policy!r}, must be an offload.Auto, offload.Fixed or offload.Watermark")
    found: dict[str, Any] = {"mode": False if isinstance(policy, Fixed) else type(policy).__name__.lower()}
    parts = [value for each in fields(policy) if _is_part(value := getattr(policy, each.name))]
    for part in (policy, *parts):
        for each in fields(part):
            name, value = _NAMES.get(each.name, each.name), getattr(part, each.name)
            if value is None or _is_part(value):
                continue
            if name != "mode" and name in found:
                raise ValueError(f"{policy!r} gives {name} twice: {found[name]!r} and {value!r}")
            found[name] = value
    return found


def without_policy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `apply`, a policy among them by its own; for who looks at these before."""
    found = dict(arguments)
    policy = found.pop("policy", None)
    return found if policy is None else found | arguments_of(policy)


def _is_part(value: object) -> bool:
    return isinstance(value, (Activations, Weights, Gradients))

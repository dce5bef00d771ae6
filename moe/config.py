"""The shape of a mixture and of the small GPT around it, and which of its activations may leave the device.

One invariant: what cannot be built is refused here, with a ValueError that names the field and both numbers.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor

from offload import group_commit, group_start, offload_hooks

GROUP_NAMES = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
)
"""Every mark of a layer, in the order in which the forward meets it."""

EXPERTS = "experts"
"""The group of all that the experts save, which the modes "save_on_cpu" and "both" open."""

ExpertsMode = Literal["save_on_cpu", "checkpoint", "both"]
InputKept = Literal["permuted", "unpermuted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureConfig:
    """The shape of a mixture of experts, and of the GPT around it."""

    dim: int
    """Width of the residual stream."""
    expert_hidden: int
    """Width inside one expert, which is a gated MLP (SwiGLU)."""
    experts: int
    """How many there are; a group of ranks shares them equally."""
    top_k: int
    """Experts that each token goes to."""
    shared_hidden: int = 0
    """Width inside the expert that every token goes to as well; 0: there is none."""
    normalize: bool = True
    """A token's top_k probabilities are divided by their sum."""
    balance: Literal["loss", "bias"] | None = None
    """What keeps experts equally used. "loss": an auxiliary loss, whose gradient the layer adds by itself.
    "bias": a bias on the choice alone, which `update_balance` moves between steps."""
    balance_rate: float | None = None
    """The weight of the auxiliary loss, or by how much an update moves a bias. None: 0.01, or 0.001."""
    probabilities: Literal["activation", "output"] = "activation"
    """Where the router's probabilities are applied: to the activation, before an expert's second product, or
    to its output, which is then saved as well: top_k * tokens * dim elements."""
    layers: int = 4
    heads: int = 4
    """Query heads."""
    kv_heads: int | None = None
    """Key and value heads, each shared by heads / kv_heads query heads; None: as many."""
    head_dim: int | None = None
    """Channels of a head; None: dim / heads."""
    sequence: int = 1024
    """The longest sequence, in tokens."""
    vocabulary: int = 272
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    seed: int = 0
    """Parameters are drawn from it, layer by layer and expert by expert."""
    math_attention: bool = False
    """Attention by plain matrix products: slower and larger, but the same bits every time, also on a GPU."""

    def __post_init__(self) -> None:
        whole = ("dim", "expert_hidden", "experts", "top_k", "layers", "heads", "sequence", "vocabulary")
        given = (name for name in ("kv_heads", "head_dim") if getattr(self, name) is not None)
        for name in (*whole, *given):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, and at least 1")
        if self.top_k > self.experts:
            raise ValueError(f"top_k is {self.top_k}, and there are {self.experts} experts; lower top_k")
        if self.shared_hidden < 0:
            raise ValueError(f"shared_hidden is {self.shared_hidden}; 0 is none, and less means nothing")
        if self.balance not in ("loss", "bias", None):
            raise ValueError(f"balance is {self.balance!r}, must be 'loss', 'bias' or None")
        if self.balance_rate is not None and (self.balance is None or self.balance_rate < 0):
            raise ValueError(
                f"balance_rate is {self.balance_rate} with balance={self.balance!r}; it is the weight, 0 or "
                "more, of 'loss', or the step of 'bias'"
            )
        if self.probabilities not in ("activation", "output"):
            raise ValueError(
                f"probabilities is {self.probabilities!r}, must be 'activation', before the second product "
                "of an expert, or 'output'"
            )
        if (self.head_dim is None and self.dim % self.heads) or self.channels % 2:
            raise ValueError(
                f"dim {self.dim} over {self.heads} heads is {self.dim / self.heads:g} channels each; rotary "
                "pairs need an even whole number: give head_dim"
            )
        if self.heads % self.key_heads:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.kv_heads} key heads equally; kv_heads must "
                "divide heads"
            )

    @property
    def channels(self) -> int:
        """Channels of one head."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def key_heads(self) -> int:
        """Key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def rate(self) -> float:
        """`balance_rate`, or what it is when it is not given."""
        if self.balance_rate is not None:
            return self.balance_rate
        return 0.01 if self.balance == "loss" else 0.001

    def with_(self, **changes: Any) -> MixtureConfig:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)


class Marks:
    """The three lines of a mark, each for a chosen name only."""

    def __init__(self, chosen: Collection[str] = ()) -> None:
        self.chosen = frozenset(chosen)

    def start(self, x: Tensor, name: str) -> Tensor:
        return group_start(x, name) if name in self.chosen else x

    def hooks(self, name: str) -> AbstractContextManager[Any]:
        return offload_hooks() if name in self.chosen else nullcontext()

    def commit(self, y: Tensor, name: str) -> Tensor:
        return group_commit(y, name) if name in self.chosen else y


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where the activations of a layer live until the backward. It changes no bit."""

    offload_modules: Collection[str] = ()
    """Marks that are set, out of GROUP_NAMES."""
    experts_mode: ExpertsMode | None = None
    """"save_on_cpu": what the experts save leaves for the host. "checkpoint": they save their inputs alone
    and are recomputed. "both": those inputs leave."""
    input_kept: InputKept | None = None
    """What the first product of the experts keeps of its input: each token once for each of its experts, or
    once ("unpermuted"), to be gathered again in the backward. None: "unpermuted" where one rank has all
    experts, which is smaller and was no slower (docs/benchmarks.md); else "permuted", as rows arrive so."""
    recompute: bool = False
    """Each layer is recomputed from its input, but for its routing: `replaying_contexts`."""

    def __post_init__(self) -> None:
        chosen = frozenset(self.offload_modules)
        if isinstance(self.offload_modules, str) or (unknown := sorted(chosen - frozenset(GROUP_NAMES))):
            said = self.offload_modules if isinstance(self.offload_modules, str) else ", ".join(unknown)
            raise ValueError(
                f"offload_modules has {said!r}, which is no mark of a layer; the marks are "
                f"{', '.join(GROUP_NAMES)}: give a collection of them"
            )
        if "attn_proj" in chosen and "core_attn" not in chosen:
            raise ValueError(
                "attn_proj saves core_attn's output, which stays where that is; choose core_attn too, or "
                "leave attn_proj out"
            )
        if self.experts_mode not in (None, *get_args(ExpertsMode)):
            raise ValueError(
                f"experts_mode is {self.experts_mode!r}, must be one of {', '.join(get_args(ExpertsMode))}, "
                "or None"
            )
        of_experts = sorted(chosen & {"expert_fc1", "moe_act"})
        if self.experts_mode is not None and of_experts:
            raise ValueError(
                f"experts_mode={self.experts_mode!r} decides about all that the experts save, and "
                f"{', '.join(of_experts)} about a part of it; leave one of the two out"
            )
        if self.recompute and (chosen or self.experts_mode is not None):
            raise ValueError(
                f"recompute=True computes whole layers again, and offload_modules={sorted(chosen)} with "
                f"experts_mode={self.experts_mode!r} would keep parts of them; use one of the two"
            )
        if self.input_kept not in (None, *get_args(InputKept)):
            raise ValueError(f"input_kept is {self.input_kept!r}, must be 'permuted', 'unpermuted' or None")

    def input_on(self, ranks: int) -> InputKept:
        """What is kept of the input where so many ranks share the experts. Raises ValueError for
        "unpermuted" on several."""
        if ranks > 1 and self.input_kept == "unpermuted":
            raise ValueError(
                f"input_kept='unpermuted' with {ranks} ranks: rows arrive once for each expert, so there is "
                "no smaller input to keep; use 'permuted'"
            )
        return self.input_kept or ("unpermuted" if ranks == 1 else "permuted")

    @property
    def recomputes(self) -> bool:
        """Whether the experts are recomputed."""
        return self.experts_mode in ("checkpoint", "both")

    def marks(self) -> Marks:
        """The marks of a layer, among them the group of the modes that move what the experts save."""
        moves = self.experts_mode in ("save_on_cpu", "both")
        return Marks([*self.offload_modules, *([EXPERTS] if moves else [])])

"""Blocks of many families, tiny, and what runs one of them at each level of its own profile."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS

from offload import (
    PipelineOffloadManager,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
    step_end,
)
from offload.checkpoint.selective import contexts_for
from offload.planner.profile import BlockProfile
from offload.planner.profiler import BlockProfiler
from parallel.transformer import PRESETS, Block
from tests.unit.checkpoint.recomputed import put_on

ROWS, WIDTH = 10, 16
Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def seeded(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- this project's and plain torch's ------------------------------------------------------------------------
def gpt() -> Case:
    config = PRESETS["tiny"].with_(dim=WIDTH, heads=2, kv_heads=1, ffn=40, sequence=ROWS)
    angles = seeded(ROWS, WIDTH // 4, seed=9)
    return Block(config), (seeded(2, ROWS, WIDTH),), {"rotation": (angles.cos(), angles.sin())}


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.two = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.again = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.one(x)), inplace=True), 1)
        return F.relu(x + self.again(self.two(y)))


def conv() -> Case:
    return Conv(), (seeded(2, 4, 6, 6),), {}


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.native_dropout(F.gelu(self.fc1(x)), 0.3, True)[0]
        y = F.dropout(F.dropout(y, 0.2).exp() * 2.0, 0.1, inplace=True)
        return F.dropout(self.fc2(y), 0.5) + x


def dropping() -> Case:
    return Dropping(), (seeded(2, ROWS, WIDTH),), {}


class Writing(nn.Module):
    """Writes to what it has made, by tracked and by untracked views; autocasts a part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        one, two, three, four = self.layers
        y = one(x)
        y.mul_(2.0)
        z = two(F.silu(y))
        z[:, :2].add_(1.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            w = three(z.tanh()).float()
        parts = torch.unsafe_chunk(w.exp().log1p(), 2, dim=-1)
        parts[0].mul_(3.0)
        return F.relu_(four(torch.cat(parts, dim=-1).tanh())) + x


def writing() -> Case:
    return Writing(), (seeded(2, ROWS, WIDTH),), {}


class _Scale(torch.autograd.Function):
    """Products, and a write in place that no operator shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight
        unseen = torch.zeros_like(y)
        unseen.numpy()[...] += y.detach().numpy()  # as a kernel of Triton would
        scaled = y.sin()
        scaled.numpy()[...] *= 2.0
        ctx.save_for_backward(x, weight, y)
        return unseen + scaled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, y = ctx.saved_tensors
        grad = grad * (1.0 + 2.0 * y.cos())
        return grad @ weight.t(), x.t() @ grad


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(seeded(WIDTH, WIDTH) / 4)
        self.two = nn.Parameter(seeded(WIDTH, WIDTH, seed=2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        y = _Scale.apply(x, self.one)
        y = y.add_(1.0)
        return x + _Scale.apply(y.tanh(), self.two).sigmoid()


def custom() -> Case:
    return Custom(), (seeded(ROWS, WIDTH),), {}


# -- transformers --------------------------------------------------------------------------------------------
def _transformers(
    family: str, config: str, layer: str, *args: Any, attention: str = "sdpa", **settings: Any
) -> Any:
    pytest.importorskip("transformers")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    settings = {"hidden_size": WIDTH, "vocab_size": 32, "num_hidden_layers": 2, **settings}
    made = getattr(importlib.import_module(f"transformers.models.{family}.configuration_{family}"), config)(
        **settings
    )
    made._attn_implementation = attention
    made._experts_implementation = settings.get("experts", "eager")
    return getattr(module, layer)(made, *args)


def _rotary() -> dict[str, Any]:
    angles = seeded(1, ROWS, 4, seed=9)
    return {"position_embeddings": (angles.cos(), angles.sin())}


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}


def llama() -> Case:
    block = _transformers("llama", "LlamaConfig", "LlamaDecoderLayer", 0, **HEADS)
    return block, (seeded(2, ROWS, WIDTH),), _rotary()


def gpt2() -> Case:
    block = _transformers("gpt2", "GPT2Config", "GPT2Block", 0, n_embd=WIDTH, n_head=2)
    return block, (seeded(2, ROWS, WIDTH),), {}


def t5() -> Case:
    pytest.importorskip("transformers")
    module = importlib.import_module("transformers.models.t5.modeling_t5")
    config = importlib.import_module("transformers.models.t5.configuration_t5").T5Config(
        d_model=WIDTH, d_kv=8, d_ff=40, num_heads=2
    )
    config._attn_implementation = "eager"
    block = module.T5Block(config, has_relative_attention_bias=True, layer_idx=0)
    return block, (seeded(2, ROWS, WIDTH),), {}


def mixtral(experts: str) -> Case:
    block = _transformers(
        "mixtral",
        "MixtralConfig",
        "MixtralDecoderLayer",
        0,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts=experts,
        **HEADS,
    )
    return block, (seeded(2, ROWS, WIDTH),), _rotary()


def qwen3_moe() -> Case:
    block = _transformers(
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeDecoderLayer",
        0,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        head_dim=4,
        **HEADS,
    )
    return block, (seeded(2, ROWS, WIDTH),), _rotary()


def vit() -> Case:
    block = _transformers(
        "vit", "ViTConfig", "ViTLayer", num_attention_heads=2, intermediate_size=40, hidden_dropout_prob=0.1
    )
    return block, (seeded(2, ROWS, WIDTH),), {}


FAMILIES: dict[str, Callable[[], Case]] = {
    "gpt": gpt,
    "conv": conv,
    "dropout": dropping,
    "writes": writing,
    "custom function": custom,
    "llama": llama,
    "gpt2": gpt2,
    "t5": t5,
    "mixtral": lambda: mixtral("eager"),
    "mixtral, grouped": lambda: mixtral("grouped_mm"),
    "qwen3 moe": qwen3_moe,
    "vit": vit,
}


def build(family: str) -> Case:
    torch.manual_seed(0)
    module, args, kwargs = FAMILIES[family]()
    for parameter in module.parameters():  # experts are made empty
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    return module.train(), args, kwargs


# -- a run ---------------------------------------------------------------------------------------------------
class Run(NamedTuple):
    """values: outputs, gradients and buffers. saved_bytes: of the engine's records. again: calls of the
    recompute that ran."""

    values: list[Tensor]
    saved_bytes: int
    again: int


def values_of(module: nn.Module, x: Tensor, output: Any) -> list[Tensor]:
    """Of one backward, and what the block returned and left behind; gradients are taken away."""
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    sum(leaf.float().square().mean() for leaf in outputs if leaf.requires_grad).backward()  # type: ignore[union-attr]
    found = [x.grad, *(parameter.grad for parameter in module.parameters())]
    x.grad = None
    module.zero_grad(set_to_none=True)
    return [
        *(leaf.detach() for leaf in outputs),
        *(torch.zeros(()) if grad is None else grad for grad in found),
        *(buffer.clone() for buffer in module.buffers()),
    ]


def run_plain(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(7)
    x = args[0].clone().requires_grad_()
    return values_of(module, x, module(x * 1.0, *args[1:], **kwargs))


class _Counting(TorchDispatchMode):
    """Counts the calls that reach it, the engine's own not among them."""

    def __init__(self, manager: PipelineOffloadManager) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._engine = manager.engine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in SAC_IGNORED_OPS and not self._engine.at_work():
            self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def run(
    manager: PipelineOffloadManager,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    keep: Any,
    profiler: BlockProfiler | None = None,
) -> Run:
    """As a step of its own. keep: a keep set of a profile; None for the plain block. profiler: of that."""
    counting = _Counting(manager)
    torch.manual_seed(7)
    x = args[0].clone().requires_grad_()
    init_chunk_handler(None, None, 1)
    h = x * 1.0
    if keep is None:
        h = group_start(h, "block")
        with offload_hooks(), nullcontext() if profiler is None else watched(profiler):
            output = module(h, *args[1:], **kwargs)
        group_commit(next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), "block")
    else:
        inner = contexts_for(keep, "kept", lambda: manager) if keep else None

        def contexts() -> Any:
            forward, again = (nullcontext(), nullcontext()) if inner is None else inner()
            return forward, _both(counting, again)

        take_off = put_on(module, manager, contexts)
        output = module(h, *args[1:], **kwargs)
        take_off()
    del h
    values = values_of(module, x, output)
    del output
    stats = step_end()
    return Run(values, stats.saved_bytes, len(counting.calls))


@contextmanager
def watched(profiler: BlockProfiler) -> Iterator[None]:
    """A forward runs inside."""
    profiler.begin()
    try:
        yield
    except BaseException:
        profiler.end(failed=True)
        raise
    profiler.end(failed=False)


@contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


def profiled(
    manager: PipelineOffloadManager, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[BlockProfile, Run]:
    profiler = BlockProfiler(module, manager.engine, args, kwargs, min_elements=1)
    assert not profiler.ready()
    found = run(manager, module, args, kwargs, None, profiler)
    return profiler.profile(), found

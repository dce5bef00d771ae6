"""`offload.apply` on transformers' mixtures of experts, with random weights and each of their expert
implementations: gradients bitwise those of the model alone, in every mode.

Where a test says so, a router computes other logits in a recompute than in its forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import offload
from tests.unit.groups.stack import build_manager, installed

pytestmark = pytest.mark.usefixtures("one_thread")

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8} | dict.fromkeys(
    ("qk_rope_head_dim", "qk_nope_head_dim"), 8
)
GROUPED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("ForCausalLM", {"num_local_experts": 4}),
    "Qwen3Moe": ("ForCausalLM", {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 5}),
    "GptOss": ("ForCausalLM", {"head_dim": 8, "num_local_experts": 4}),
    "DeepseekV3": (
        "ForCausalLM",
        {"num_key_value_heads": 4, "moe_intermediate_size": 24, **GROUPED, **LATENT},
    ),
}
MODES: tuple[Any, ...] = ("groups", True, "watermark", "checkpoint", "hidden_states", "selective", "auto")
RECOMPUTING = MODES[-3:]


def build(name: str, implementation: str, **changes: Any) -> Any:
    head, sizes = NAMES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **sizes, **changes})
    model = getattr(transformers, name + head)(config).train()
    with torch.no_grad():
        for parameter in model.parameters():  # as they are drawn, experts differ by little
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.set_experts_implementation(implementation)
    return model


def train(model: Any, steps: int = 3, **arguments: Any) -> list[Tensor]:
    """Losses and gradients of steps of two microbatches of other lengths, and what is left at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(5)
    seen: list[Tensor] = []
    for _ in range(steps):
        for length in (9, 6):
            tokens = torch.randint(0, 61, (2, 1, length))
            out = model(input_ids=tokens[0], labels=tokens[1], **arguments)
            out.loss.backward()
            seen.append(out.loss.detach())
            if arguments:
                routers = [name for name, _ in model.named_modules() if name.endswith((".gate", ".router"))]
                assert len(out.router_logits) == len(routers)  # each layer's once
        seen += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(part.detach().clone() for part in (*model.parameters(), *model.buffers()))]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def other_logits_in_a_recompute(model: nn.Module, times: float) -> list[int]:
    """Returns a list to which each recompute of a router appends."""
    seen: list[int] = []
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.forward = _with_other_logits(module.forward, times, seen)
    return seen


def _with_other_logits(forward: Callable[..., Any], times: float, seen: list[int]) -> Callable[..., Any]:
    linear = functional.linear

    def scaled(*arguments: Any) -> Tensor:
        recomputes = torch._C._current_graph_task_id() != -1
        seen.extend([1] * recomputes)
        return linear(*arguments) * (times if recomputes else 1.0)

    def other(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(functional, "linear", scaled)
            return forward(*arguments)

    return other


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, "grouped_mm") for name in NAMES),
        *(("Qwen3Moe", "eager"), ("GptOss", "eager"), ("GptOss", "batched_mm")),
    ],
)
def test_every_mode_gives_the_gradients_of_the_model_alone(name: str, implementation: str) -> None:
    """The auxiliary loss too, whose router logits transformers collects by hooks."""
    collected = {} if name == "DeepseekV3" else {"output_router_logits": True}
    plain = build(name, implementation)
    expected, classes = train(plain, **collected), list(map(type, plain.modules()))
    for mode in MODES:
        with installed(build_manager(piece_bytes=1 << 16)) as manager:
            model = build(name, implementation)
            high = {"high": "0.01GB"} if mode == "watermark" else {}
            handle = offload.apply(model, mode=mode, min_numel=1, **high)
            assert equal(train(model, **collected), expected), mode
            assert list(map(type, model.modules())) == classes
            if mode != "watermark":
                assert (manager.stats.spill_bytes > 0) == (mode != "checkpoint"), mode
            handle.remove()


@functools.cache
def plain_steps(name: str, implementation: str) -> list[Tensor]:
    """Without a recompute a router has its own logits."""
    return train(build(name, implementation), 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", RECOMPUTING)
def test_a_recompute_has_the_rows_and_the_bits_of_its_forward_whatever_the_router_says(
    name: str, mode: Any
) -> None:
    """Another last bit; and -2.2 times the logits, which sends every token elsewhere."""
    for implementation, times in (("eager", -2.2), ("grouped_mm", 1 + 1e-6)):
        expected = plain_steps(name, implementation)
        with installed(build_manager()):
            model = build(name, implementation)
            recomputed = other_logits_in_a_recompute(model, times)
            offload.apply(model, mode=mode, min_numel=1)
            assert equal(train(model, 2), expected), implementation
            assert len(recomputed) >= 2

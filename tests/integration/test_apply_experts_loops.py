"""Loops around a mixture of transformers under `offload.apply`: gradients and outputs are bitwise those of
the model alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import offload.engine
from offload.compat import torchtitan
from offload.memory.arena import HostArena
from tests.unit.groups.stack import build_manager, installed

pytest.importorskip("transformers")

from tests.integration.test_apply_experts import build, equal

pytestmark = pytest.mark.usefixtures("one_thread")

MODES: tuple[Any, ...] = ("groups", True, "checkpoint", "hidden_states", "selective", "auto")


def batch(length: int = 9) -> dict[str, Tensor]:
    tokens = torch.randint(0, 61, (2, 1, length))
    return {"input_ids": tokens[0], "labels": tokens[1]}


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def steps(model: Any, count: int = 3) -> Iterator[None]:
    """After each yield, a step of AdamW."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(count):
        yield
        optimizer.step()
        optimizer.zero_grad()


def two_forwards(model: Any) -> list[Tensor]:
    """Before their backwards, which come in the order of the forwards."""
    found: list[Tensor] = []
    for _ in steps(model):
        first, second = model(**batch()).loss, model(**batch(6)).loss
        first.backward()
        second.backward()
        found += gradients(model)
    return found


def evaluation_between(model: Any) -> list[Tensor]:
    """Between a forward and its backward, in training, and after the step, in evaluation."""
    found: list[Tensor] = []
    for _ in steps(model):
        loss = model(**batch()).loss
        with torch.no_grad():
            found.append(model(**batch(6)).logits)
        loss.backward()
        found += gradients(model)
        model.eval()
        with torch.no_grad():
            found.append(model(**batch(5)).loss)
        model.train()
    return found


def generation_between(model: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for _ in steps(model):
        model(**batch()).loss.backward()
        found += gradients(model)
        model.eval()
        made = model.generate(batch(4)["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0)
        found.append(made)
        model.train()
    return found


def partial_gradients_first(model: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for _ in steps(model, 2):
        loss = model(**batch()).loss
        found += torch.autograd.grad(loss, list(model.model.layers[1].parameters()), retain_graph=True)
        loss.backward()
        found += gradients(model)
    return found


def autocast(model: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for _ in steps(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch()).loss
        loss.backward()
        found += gradients(model)
    return found


def its_own_checkpoints(model: Any) -> list[Tensor]:
    model.gradient_checkpointing_enable()
    return two_forwards(model)


LOOPS = (
    two_forwards,
    evaluation_between,
    generation_between,
    partial_gradients_first,
    autocast,
    its_own_checkpoints,
)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_a_loop_gives_what_it_gives_with_the_model_alone(
    name: str, loop: Callable[[Any], list[Tensor]]
) -> None:
    expected = loop(build(name, "grouped_mm"))
    for mode in MODES:
        if (loop, mode) == (its_own_checkpoints, "auto"):
            continue  # refused
        with installed(build_manager(piece_bytes=1 << 16)):
            model = build(name, "grouped_mm")
            offload.apply(model, mode=mode, min_numel=1)
            assert equal(loop(model), expected), mode


@pytest.mark.parametrize("of_experts", [False, True])
def test_lora_on_a_mixture(of_experts: bool) -> None:
    """On its attention; or on the experts' weights, which peft gives them for the time of a call."""
    peft = pytest.importorskip("peft")

    def wrapped() -> Any:
        experts = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
        torch.manual_seed(1)
        built = build("Qwen3Moe", "grouped_mm")
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj"], init_lora_weights=False, **(experts if of_experts else {})
        )
        return peft.get_peft_model(built, config)

    expected = two_forwards(wrapped())
    for mode in MODES:
        with installed(build_manager(piece_bytes=1 << 16)):
            offload.apply(model := wrapped(), mode=mode, min_numel=1)
            assert equal(two_forwards(model), expected), mode
    keys = {"enable_activation_offload": True, "activation_offload_min_tensor_size": 1}
    for mode in ("save_on_cpu", "checkpoint", "both"):
        with installed(build_manager(piece_bytes=1 << 16)):
            torchtitan.settings({**keys, "activation_offload_mode": mode}).apply(model := wrapped())
            assert equal(two_forwards(model), expected), mode


def test_counts_that_change_every_step_pin_nothing_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Zipf's law, with another order of the experts in each of 120 steps."""
    growth = 8 << 10  # a step lends many times of it, as in a run whose steps lend gigabytes
    small = functools.partial(HostArena, slab_bytes=1 << 20, registration_bytes=growth)
    monkeypatch.setattr(offload.engine, "HostArena", small)
    popularity, linear = -2 * torch.arange(1, 9).log(), functional.linear
    counts: set[tuple[int, ...]] = set()
    pinned, lent, refused = [], [], 0
    with installed(build_manager(max_spilling_bytes=None)) as manager:
        model = build("Qwen3Moe", "eager", num_experts=8, num_hidden_layers=1)
        offload.apply(model, modules={"experts": "*.mlp"}, blocks="model.layers.*", min_numel=64)
        for router in (module for module in model.modules() if type(module).__name__.endswith("Router")):
            forward = router.forward

            def skewed(x: Tensor, forward: Callable[[Tensor], Any] = forward) -> Any:
                with monkeypatch.context() as patch:
                    patch.setattr(functional, "linear", lambda *given: linear(*given) / 3 + order)
                    chosen = forward(x)
                counts.add(tuple(torch.bincount(chosen[2].flatten(), minlength=8).tolist()))
                return chosen

            router.forward = skewed
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(0)
        for step in range(120):
            order = popularity[torch.randperm(8)]
            losses = [model(**batch(48)).loss for _ in range(2)]
            for loss in reversed(losses):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            pinned.append(manager.engine.arena.stats().held_bytes)
            lent.append(manager.stats.host_bytes_lent_peak)
            refused += manager.stats.refused if step > 20 else 0
    assert len(counts) > 100
    assert min(lent[20:]) > 8 * growth
    assert set(pinned[20:]) == {pinned[-1]}
    assert refused == 0
    assert pinned[-1] <= 1.1 * max(lent) + growth

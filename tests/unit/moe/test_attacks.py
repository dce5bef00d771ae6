"""Loops that are right with plain torch, around mixtures whose activations leave: the same bits."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import offload
from moe import GROUP_NAMES, MixtureGPT, build_stage_module, products, replaying_contexts
from offload import init_chunk_handler, step_end
from tests.unit.moe.mixtures import SMALL, assert_same, grads_of, loss_of, offloading, step, text

CONFIG = SMALL.with_(layers=2, balance="loss")
SETTINGS: dict[str, dict[str, Any]] = {
    "marks": {"offload_modules": GROUP_NAMES},
    "marks, permuted": {"offload_modules": GROUP_NAMES, "input_kept": "permuted"},
    "save_on_cpu": {"experts_mode": "save_on_cpu"},
    "both": {"experts_mode": "both"},
    "recompute": {"recompute": True},
}
every_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


def once(model: MixtureGPT, tokens: Tensor | None = None, *, backwards: int = 1) -> Any:
    tokens = text() if tokens is None else tokens
    model.zero_grad()
    init_chunk_handler()
    logits = model(tokens)
    loss = loss_of(logits, tokens)
    for backward in range(backwards):
        loss.backward(retain_graph=backward + 1 < backwards)
    step_end()
    return [logits.detach()], grads_of(model)


@every_setting
def test_a_graph_that_is_read_twice(setting: dict[str, Any]) -> None:
    expected = once(MixtureGPT(CONFIG), backwards=2)
    with offloading():
        model = MixtureGPT(CONFIG, **setting)
        for _ in range(2):
            assert_same(once(model, backwards=2), expected)


@every_setting
def test_batches_of_other_sizes_and_evaluations_between_them(setting: dict[str, Any]) -> None:
    plain = MixtureGPT(CONFIG)
    with offloading():
        model = MixtureGPT(CONFIG, **setting)
        for batch, length in [(2, 16), (1, 3), (4, 16), (1, 2), (3, 11), (2, 16)]:
            tokens = torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(length))
            assert_same(once(model, tokens), once(plain, tokens))
            model.eval()
            with torch.no_grad():
                model(text(7))
            model(text(8))
            model.train()


@every_setting
def test_one_expert_has_every_token(setting: dict[str, Any]) -> None:
    """Equal probabilities: all tokens tie, and go to expert 0."""

    def made(**options: Any) -> MixtureGPT:
        model = MixtureGPT(CONFIG.with_(top_k=1), **options)
        for mixture in model.mixtures():
            torch.nn.init.zeros_(mixture.router.gate.weight)
        return model

    expected = once(made())
    grad = expected[1]["blocks.0.mixture.experts.w1_EGD"]
    assert grad[0].any()
    assert not grad[1:].any()
    with offloading():
        assert_same(once(made(**setting)), expected)


@every_setting
@pytest.mark.parametrize("frozen", ["experts", "router", "attn"])
def test_parts_that_are_frozen(setting: dict[str, Any], frozen: str) -> None:
    def made(**options: Any) -> MixtureGPT:
        model = MixtureGPT(CONFIG, **options)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        return model

    expected = once(made())
    with offloading():
        assert_same(once(made(**setting)), expected)


@every_setting
def test_float16_with_a_scaler_that_skips_steps(setting: dict[str, Any]) -> None:
    """The auxiliary loss's gradient is scaled as the trainer's own is: `scale_loss`."""

    def trained(context: Any, **options: Any) -> tuple[list[float], list[Tensor]]:
        with context:
            model = MixtureGPT(CONFIG, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
            scales = []
            for seed in range(6):
                optimizer.zero_grad()
                init_chunk_handler()
                model.scale_loss(scaler.get_scale())
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = loss_of(model(text(seed)), text(seed))
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                scaler.step(optimizer)
                scaler.update()
                step_end()
                scales.append(scaler.get_scale())
            return scales, [parameter.detach().clone() for parameter in model.parameters()]

    scales, expected = trained(nullcontext())
    assert min(scales) < 2.0**20  # steps were skipped
    assert len(set(scales)) > 1
    found = trained(offloading(), **setting)
    assert found[0] == scales
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected, strict=True))
    assert all(parameter.isfinite().all() for parameter in expected)


def test_the_scale_of_a_loss_is_that_of_its_gradients() -> None:
    expected = once(MixtureGPT(CONFIG))[1]
    model = MixtureGPT(CONFIG)
    model.scale_loss(8.0)
    (loss_of(model(text()), text()) * 8.0).backward()
    for name, grad in grads_of(model).items():
        assert torch.equal(grad, expected[name] * 8.0), name


@every_setting
def test_a_forward_that_raises_in_an_expert_leaves_nothing_open(setting: dict[str, Any]) -> None:
    expected = step(MixtureGPT(CONFIG))
    with offloading() as manager:
        model = MixtureGPT(CONFIG, **setting)
        handle = next(model.mixtures()).experts.register_forward_pre_hook(failing)
        init_chunk_handler()
        with pytest.raises(ArithmeticError, match="an expert"):
            model(text())
        step_end()
        handle.remove()
        for _ in range(2):
            assert_same(step(model), expected)
        assert manager.engine.arena.stats().lent_bytes == 0


def failing(*_arguments: Any) -> None:
    raise ArithmeticError("an expert")


@pytest.mark.parametrize(
    ("use_reentrant", "contexts"), [(False, None), (True, None), (False, replaying_contexts)]
)
def test_torchs_checkpoints_around_layers_whose_experts_are_recomputed(
    use_reentrant: bool, contexts: Callable[[], Any] | None
) -> None:
    expected = once(MixtureGPT(CONFIG))
    with offloading():
        model = MixtureGPT(CONFIG, experts_mode="checkpoint")
        more = {} if contexts is None else {"context_fn": contexts()}
        for block in model.blocks.values():
            block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant, **more)  # type: ignore[method-assign]
        for _ in range(2):
            assert_same(once(model), expected)


@pytest.mark.parametrize("mode", ["groups", "hidden_states", "selective", "auto", True, "legacy"])
@pytest.mark.parametrize("balance", ["loss", "bias"])
def test_offload_apply_around_a_mixture(mode: Any, balance: Any) -> None:
    config = CONFIG.with_(balance=balance)
    expected = step(MixtureGPT(config))
    with offloading():
        model = MixtureGPT(config)
        blocks = None if mode in (True, "legacy") else "blocks.*"
        handle = offload.apply(model, mode=mode, min_numel=16, blocks=blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(4):
            model.zero_grad()
            logits = [model(text(seed)) for seed in (0, 1)]
            for seed, each in reversed(list(enumerate(logits))):
                loss_of(each, text(seed)).backward()
            assert_same(([each.detach() for each in logits], grads_of(model)), expected)
            optimizer.step()
        handle.remove()
    for mixture in model.mixtures():  # no recompute was counted
        assert int(mixture.router.tokens_E.sum()) == 4 * 2 * text().numel() * config.top_k


@pytest.mark.parametrize("mode", ["checkpoint", "hidden_states", "selective", "auto"])
@pytest.mark.parametrize("balance", ["loss", "bias"])
def test_apply_recomputes_the_rows_of_the_forward_whatever_the_router_computes(
    mode: Any, balance: Any
) -> None:
    def made() -> MixtureGPT:
        model = MixtureGPT(CONFIG.with_(balance=balance))
        for mixture in model.mixtures():
            mixture.router.gate.register_forward_hook(other_scores)
        return model

    def other_scores(_module: Any, _args: Any, logits: Tensor) -> Tensor:
        return logits * (-2.2 if torch._C._current_graph_task_id() != -1 else 1.0)

    expected = [step(made()), step(made())]
    with offloading():
        model = made()
        offload.apply(model, mode=mode, min_numel=16, blocks="blocks.*")
        for each in expected:
            assert_same(step(model), each)


@every_setting
@pytest.mark.parametrize("shape", [(0, 16), (2, 0)])
def test_a_model_that_has_no_tokens(setting: dict[str, Any], shape: tuple[int, int]) -> None:
    tokens, expected = torch.zeros(shape, dtype=torch.int64), once(MixtureGPT(CONFIG))
    with offloading():
        model = MixtureGPT(CONFIG, **setting)
        for _ in range(2):
            model.zero_grad()
            init_chunk_handler()
            logits = model(tokens)
            assert logits.shape == (*shape, CONFIG.vocabulary)
            logits.sum().backward()
            assert not any(grad.any() for grad in grads_of(model).values())
            step_end()
            assert_same(once(model), expected)


def test_a_model_that_is_copied_pickled_or_loaded_into() -> None:
    config = CONFIG.with_(balance="bias")
    with offloading():
        model = MixtureGPT(config, offload_modules=GROUP_NAMES)
        expected = once(model)
        model.update_balance()
        biased = once(model)
        other = MixtureGPT(config.with_(seed=99), offload_modules=GROUP_NAMES)
        other.load_state_dict(model.state_dict())
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for each in (copy.deepcopy(model), other, torch.load(file, weights_only=False)):
            assert_same(once(each), biased)
        model.reset_parameters()
        assert_same(once(model), expected)


@pytest.mark.parametrize("name", ["marks, permuted", "both"])
def test_experts_that_are_compiled(name: str) -> None:
    config = CONFIG.with_(layers=1)
    expected = once(MixtureGPT(config))
    torch._dynamo.reset()
    with offloading():
        model = MixtureGPT(config, **SETTINGS[name])
        for mixture in model.mixtures():
            mixture.experts.compile(backend="aot_eager")
        for _ in range(2):
            assert_same(once(model), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", [None, "checkpoint"])
def test_compiled_experts_are_one_graph_where_products_are_grouped(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: forward and backward, without a break."""
    if not products._takes("cpu", torch.bfloat16, True):
        pytest.skip("this torch has no grouped_mm on the CPU")
    monkeypatch.setattr(products, "_is_grouped", lambda *_: True)
    config = CONFIG.with_(layers=1)
    expected = once(build_stage_module(config, dtype=torch.bfloat16))
    torch._dynamo.reset()
    model = build_stage_module(config, dtype=torch.bfloat16, experts_mode=mode)
    for mixture in model.mixtures():
        mixture.experts.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(once(model), expected, rtol=3e-2, atol=1e-3)
    torch._dynamo.reset()


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    mixture = next(MixtureGPT(CONFIG).mixtures())
    x = torch.randn(5, SMALL.dim, requires_grad=True)
    (grad,) = torch.autograd.grad(mixture(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()

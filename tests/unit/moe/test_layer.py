"""The layer and the model: marks and their commits, modes and stages that change no bit, what is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import moe.config
from moe import (
    GROUP_NAMES,
    DecoderLayer,
    Mixture,
    MixtureConfig,
    MixtureGPT,
    Placement,
    build_stage_module,
    layers_of_stage,
    replaying_contexts,
    stage_examples,
)
from tests.unit.groups.stack import EXECUTORS
from tests.unit.moe.mixtures import (
    BATCH,
    SMALL,
    assert_same,
    grads_of,
    loss_of,
    marked,
    noted_marks,
    offloading,
    step,
    text,
)

SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"offload_modules": {name}} for name in GROUP_NAMES if name != "attn_proj"},
    "attn_proj": {"offload_modules": {"core_attn", "attn_proj"}},
    "all": {"offload_modules": GROUP_NAMES},
    "all, permuted": {"offload_modules": GROUP_NAMES, "input_kept": "permuted"},
    "save_on_cpu": {"experts_mode": "save_on_cpu"},
    "checkpoint": {"experts_mode": "checkpoint"},
    "both": {"experts_mode": "both"},
    "both, permuted": {"experts_mode": "both", "input_kept": "permuted"},
    "both, attention": {"experts_mode": "both", "offload_modules": {"core_attn", "mlp_norm"}},
    "recompute": {"recompute": True},
}


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return noted_marks(monkeypatch, moe.config)


@pytest.mark.req("S2-96", "S2-97")
def test_layer_marks_all_its_groups_in_the_sources_order(marks: list[str]) -> None:
    one_layer = SMALL.with_(layers=1, shared_hidden=0)
    MixtureGPT(one_layer, offload_modules=GROUP_NAMES)(text())
    assert marks == [
        *("start attn_norm", "hooks", "end"),
        *marked("qkv_linear"),
        *marked("core_attn"),
        *marked("attn_proj"),
        "commit attn_norm",
        *("start mlp_norm", "hooks", "end"),
        *marked("expert_fc1"),  # the router, which saves the experts' input too
        *marked("expert_fc1"),
        *marked("moe_act"),
        "commit mlp_norm",
    ]


@pytest.mark.req("S2-97")
def test_moe_act_commits_the_second_products_output_and_mlp_norm_the_residual_sum(
    marks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    committed: dict[str, Tensor] = {}

    def commit(tensor: Tensor, name: str) -> Tensor:
        committed[name] = tensor
        return tensor

    monkeypatch.setattr(moe.config, "group_commit", commit)
    layer = MixtureGPT(SMALL.with_(layers=1, shared_hidden=0), offload_modules=GROUP_NAMES).blocks["0"]
    second: list[Tensor] = []
    layer.mixture.experts.register_forward_hook(lambda *arguments: second.append(arguments[2]))
    x = torch.randn(BATCH, SMALL.sequence, SMALL.dim)
    rotation = torch.ones(SMALL.sequence, 4), torch.zeros(SMALL.sequence, 4)
    output = layer(x, rotation)
    assert committed["moe_act"] is second[0]
    assert committed["mlp_norm"] is output


@pytest.mark.parametrize("name", [name for name in GROUP_NAMES if name not in ("attn_proj", "expert_fc1")])
def test_only_the_chosen_mark_is_set(marks: list[str], name: str) -> None:
    MixtureGPT(SMALL.with_(layers=1, shared_hidden=0), offload_modules={name})(text())
    assert marks == marked(name)


@functools.cache
def baseline(balance: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    return step(MixtureGPT(SMALL.with_(balance=balance)))


@pytest.mark.req("S2-98", "S3-57", "S3-58")
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("balance", [None, "loss"])
def test_logits_and_all_gradients_are_bitwise_the_baselines(setting: dict[str, Any], balance: Any) -> None:
    config, expected = SMALL.with_(balance=balance), baseline(balance)
    assert len(expected[1]) == len(list(MixtureGPT(config).parameters()))
    with offloading() as manager:
        model = MixtureGPT(config, **setting)
        for _ in range(3):
            assert_same(step(model), expected)
        moves = setting.get("offload_modules") or setting.get("experts_mode") in ("save_on_cpu", "both")
        assert (manager.stats.spill_bytes > 0) == bool(moves or "recompute" in setting)
        assert manager.engine.arena.stats().lent_bytes == 0


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("probabilities", ["activation", "output"])
def test_every_executor_gives_the_same_bits(executor: Any, probabilities: Any) -> None:
    config = SMALL.with_(probabilities=probabilities)
    expected = step(MixtureGPT(config), (0, 1, 2))
    for setting in ({"offload_modules": GROUP_NAMES}, {"experts_mode": "both"}):
        with offloading(executor):
            model = MixtureGPT(config, **setting)
            for _ in range(2):
                assert_same(step(model, (0, 1, 2)), expected)


def test_probabilities_before_the_second_product_or_after_it_are_nearly_the_same() -> None:
    inside = step(MixtureGPT(SMALL))
    outside = step(MixtureGPT(SMALL.with_(probabilities="output")))
    torch.testing.assert_close(inside, outside, rtol=1e-3, atol=1e-5)


def mixture_reference(mixture: Mixture, x: Tensor) -> Tensor:
    """Every expert on every token, weighted by what the router gives it."""
    flat = x.reshape(-1, x.shape[-1])
    routing = mixture.router(flat)
    dense = torch.zeros(flat.shape[0], mixture.config.experts, dtype=x.dtype)
    dense = dense.scatter(1, routing.experts_TK, routing.weights_TK.to(x.dtype))
    experts = [(weight, mixture.experts, number) for number, weight in enumerate(dense.unbind(1))]
    if mixture.shared is not None:
        experts.append((torch.ones(flat.shape[0], dtype=x.dtype), mixture.shared, 0))
    y = torch.zeros_like(flat)
    for weight, module, number in experts:
        gate, up = (flat @ module.w1_EGD[number].t()).chunk(2, -1)
        y = y + weight[:, None] * ((nn.functional.silu(gate) * up) @ module.w2_EDF[number].t())
    return y.view_as(x)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("probabilities", ["activation", "output"])
def test_mixture_is_the_weighted_sum_of_its_experts(probabilities: Any, normalize: bool) -> None:
    torch.manual_seed(0)
    mixture = Mixture(SMALL.with_(probabilities=probabilities, normalize=normalize)).double()
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 7, SMALL.dim, dtype=torch.float64, requires_grad=True)
    y, expected = mixture(x), mixture_reference(mixture, x)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    wanted = [x, *mixture.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(y, wanted, grad), torch.autograd.grad(expected, wanted, grad)
    )


@pytest.mark.parametrize("kept", ["permuted", "unpermuted"])
def test_autocast_is_of_the_rows_before_they_are_copied(kept: Any) -> None:
    """As a linear layer's: the output is in its dtype, and so is all that is saved of the width of x."""
    mixture = Mixture(SMALL, placement=Placement(input_kept=kept))
    dtypes: set[torch.dtype] = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[-1] in (SMALL.dim, 2 * SMALL.expert_hidden) and not isinstance(tensor, nn.Parameter):
            dtypes.add(tensor.dtype)
        return tensor

    x = torch.randn(5, SMALL.dim, requires_grad=True)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        y = mixture(x)
    assert y.dtype is torch.bfloat16
    assert dtypes == {torch.bfloat16}


def test_stages_hold_the_whole_models_parameters_and_compute_its_bits() -> None:
    whole = MixtureGPT(SMALL)
    parts = [build_stage_module(SMALL, stage, 3) for stage in range(3)]
    named = {name: part for stage in parts for name, part in stage.named_parameters()}
    assert named.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(named[name], parameter) for name, parameter in whole.named_parameters())
    hidden = text()
    for number, part in enumerate(parts):
        given, made = stage_examples(
            SMALL, number, 3, batch=BATCH, sequence=SMALL.sequence, dtype=torch.float32
        )
        assert (given.shape, given.dtype) == (hidden.shape, hidden.dtype)
        hidden = part(hidden)
        assert (made.shape, made.dtype) == (hidden.shape, hidden.dtype)
    assert torch.equal(hidden, whole(text()))
    assert [list(layers_of_stage(SMALL.with_(layers=7), stage, 3)) for stage in range(3)] == [
        [0, 1, 2],
        [3, 4],
        [5, 6],
    ]


def test_no_two_matrices_are_drawn_alike() -> None:
    matrices: list[Tensor] = []
    for parameter in MixtureGPT(SMALL).parameters():
        if parameter.dim() > 1:
            matrices += parameter if parameter.dim() == 3 else [parameter]
    firsts = {tuple((matrix.detach().flatten()[:3] / matrix.std()).tolist()) for matrix in matrices}
    assert len(firsts) == len(matrices)


# -- what a layer's recompute replays --


def count_calls(layer: nn.Module, x: Tensor, **options: Any) -> dict[str, int]:
    """Of operators, calls in the backward of a layer that is recomputed."""
    calls: dict[str, int] = {}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls[str(func)] = calls.get(str(func), 0) + 1
            return func(*args, **(kwargs or {}))

    rotation = torch.ones(SMALL.sequence, 4), torch.zeros(SMALL.sequence, 4)
    y = checkpoint(layer, x, rotation, use_reentrant=False, **options)
    with Counting():
        y.square().sum().backward()
    return calls


def test_a_recompute_routes_nothing_again() -> None:
    layer = DecoderLayer(SMALL)
    x = torch.randn(BATCH, SMALL.sequence, SMALL.dim, requires_grad=True)
    again = count_calls(layer, x)
    expected = grads_of(layer)
    layer.zero_grad()
    replayed = count_calls(layer, x, context_fn=replaying_contexts())
    for operator in ("aten.topk.default", "aten.sort.stable"):
        assert again[operator] == 1
        assert operator not in replayed
    found = grads_of(layer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_recompute_whose_router_would_choose_otherwise_replays_the_forwards_rows() -> None:
    """Between the forward and the backward the bias moves, so that a router that ran again would send every
    token elsewhere."""
    config = SMALL.with_(balance="bias", layers=1)
    expected = step(MixtureGPT(config), (0,))
    model = MixtureGPT(config, recompute=True)
    logits = model(text())
    router = next(model.mixtures()).router
    assert router.bias_E is not None
    with torch.no_grad():
        router.bias_E -= torch.arange(8.0)
    chosen = router(torch.randn(4, SMALL.dim)).experts_TK
    assert chosen.sort(1).values.tolist() == [[0, 1]] * 4
    loss_of(logits, text()).backward()
    assert_same(([logits], grads_of(model)), expected)


# -- refusals --


@pytest.mark.req("S2-96")
def test_names_that_are_no_marks_are_refused_and_attn_proj_needs_core_attn() -> None:
    for unknown in ("mlp_fc1", "experts", "all"):
        with pytest.raises(ValueError, match=f"offload_modules has '{unknown}', which is no mark of a layer"):
            MixtureGPT(SMALL, offload_modules={"core_attn", unknown})
    with pytest.raises(ValueError, match=r"offload_modules has 'core_attn', .*: give a collection"):
        MixtureGPT(SMALL, offload_modules="core_attn")
    with pytest.raises(ValueError, match="choose core_attn too"):
        MixtureGPT(SMALL, offload_modules={"attn_proj"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"experts_mode": "cpu"}, "experts_mode is 'cpu', must be one of save_on_cpu, checkpoint, both"),
        ({"input_kept": "both"}, "input_kept is 'both', must be 'permuted', 'unpermuted' or None"),
        (
            {"experts_mode": "both", "offload_modules": {"moe_act"}},
            "experts_mode='both' decides about all that the experts save, and moe_act about a part",
        ),
        ({"recompute": True, "experts_mode": "both"}, "recompute=True computes whole layers again"),
    ],
)
def test_placement_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Placement(**options)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dim": 30}, "dim 30 over 4 heads is 7.5 channels each"),
        ({"head_dim": 7}, "even whole number"),
        ({"kv_heads": 3}, "4 query heads cannot share 3 key heads equally"),
        ({"experts": 0}, "experts is 0; it must be a whole number, and at least 1"),
        ({"top_k": 9}, "top_k is 9, and there are 8 experts"),
        ({"shared_hidden": -1}, "shared_hidden is -1"),
        ({"balance": "losses"}, "balance is 'losses', must be 'loss', 'bias' or None"),
        ({"balance_rate": 0.1}, "balance_rate is 0.1 with balance=None"),
        ({"probabilities": "input"}, "probabilities is 'input'"),
        ({"kv_heads": 0}, "kv_heads is 0; it must be a whole number, and at least 1"),
        ({"head_dim": 0}, "head_dim is 0; it must be a whole number, and at least 1"),
        ({"dim": 32.0}, "dim is 32.0; it must be a whole number, and at least 1"),
    ],
)
def test_shape_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SMALL.with_(**changes)


def test_sequences_and_stages_beyond_the_config_are_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 17 tokens; the model's longest is 16"):
        MixtureGPT(SMALL)(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"a mixture of width 32 got \(4, 64\); the last size must be its dim"
    ):
        Mixture(SMALL)(torch.zeros(4, 64))
    with pytest.raises(ValueError, match=r"an input of shape \(4,\); this stage takes \(batch, sequence\)$"):
        MixtureGPT(SMALL)(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"of shape \(4, 2\); this stage takes \(batch, sequence, dim\)$"):
        MixtureGPT(SMALL, stage=1, num_stages=3)(torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"a mixture of width 32 got \(\)"):
        Mixture(SMALL)(torch.tensor(1.0))
    with pytest.raises(ValueError, match="3 layers cannot be cut into 4 stages"):
        MixtureGPT(SMALL, num_stages=4)
    with pytest.raises(ValueError, match="stage 3 of 3"):
        MixtureGPT(SMALL, stage=3, num_stages=3)


def test_every_field_can_be_given() -> None:
    config = MixtureConfig(dim=64, expert_hidden=32, experts=4, top_k=1, heads=4, head_dim=32, kv_heads=1)
    assert (config.channels, config.key_heads, config.rate) == (32, 1, 0.001)
    assert MixtureGPT(config.with_(sequence=8))(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 272)

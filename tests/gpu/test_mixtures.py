"""Mixtures of experts on a GPU: torch's grouped products, the same bits with offload and without, nothing
that waits for the device, graphs, and two ranks over NCCL.

pytest -m gpu tests/gpu/test_mixtures.py
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe import GROUP_NAMES, Mixture, MixtureConfig, MixtureGPT, build_stage_module
from moe.products import _takes, grouped_outer, grouped_product
from moe.router import _top_k, sorted_rows
from offload import OffloadConfig, capturing, configure, init_chunk_handler, step_end
from tests.gpu.captured import ByHand, eager, numbers, parameters_of
from tests.gpu.workbench import DEVICE, WIDTH, assert_same_bits, build_manager, installed
from tests.ranks import run_ranks
from tests.unit.moe.mixtures import assert_same, grads_of, loss_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

CONFIG = MixtureConfig(
    dim=256,
    expert_hidden=128,
    experts=8,
    top_k=2,
    shared_hidden=192,
    layers=3,
    heads=4,
    kv_heads=2,
    sequence=256,
    balance="loss",
    math_attention=True,
)
SETTINGS: list[dict[str, Any]] = [
    {"offload_modules": GROUP_NAMES},
    {"offload_modules": ("expert_fc1", "moe_act"), "input_kept": "permuted"},
    {"experts_mode": "save_on_cpu"},
    {"experts_mode": "checkpoint"},
    {"experts_mode": "both"},
    {"experts_mode": "both", "input_kept": "permuted"},
    {"recompute": True},
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def model_of(config: MixtureConfig = CONFIG, **options: Any) -> MixtureGPT:
    return build_stage_module(config, device=DEVICE, dtype=torch.bfloat16, **options)


def text(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (2, CONFIG.sequence), generator=generator).to(DEVICE)


def step(model: nn.Module, seeds: tuple[int, ...] = (0, 1)) -> tuple[list[Tensor], dict[str, Tensor]]:
    model.zero_grad()
    logits = []
    for seed in seeds:
        init_chunk_handler()
        logits.append(model(text(seed)))
    for seed, each in reversed(list(zip(seeds, logits, strict=True))):
        loss_of(each, text(seed)).backward()
    step_end()
    return [each.detach().clone() for each in logits], grads_of(model)


# -- products --


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [(100, 0, 28, 1, 0, 127), (0, 0, 256, 0, 0, 0), (0, 0, 0, 0, 0, 0)])
def test_products_are_near_the_loops_and_every_row_and_expert_is_written(
    dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    """New memory is filled with NaN here, so what is not written is seen."""
    rows = sum(counts)
    x, y = torch.randn(rows, 64, device=DEVICE).to(dtype), torch.randn(rows, 48, device=DEVICE).to(dtype)
    w = torch.randn(len(counts), 48, 64, device=DEVICE).to(dtype)
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    product, back = grouped_product(x, w.transpose(1, 2), ends), grouped_product(y, w, ends)
    outer = grouped_outer(y, x, ends)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        tolerance: dict[str, float] = {"rtol": 2e-2, "atol": 2e-1}
        torch.testing.assert_close(product[start:end], x[start:end] @ w[expert].t(), **tolerance)
        torch.testing.assert_close(back[start:end], y[start:end] @ w[expert], **tolerance)
        torch.testing.assert_close(outer[expert], y[start:end].t() @ x[start:end], **tolerance)
        if start == end:
            assert not outer[expert].any()
        start = end


def test_bfloat16_is_grouped() -> None:
    assert _takes("cuda", torch.bfloat16, True)


def test_ties_and_rows_are_ordered_as_on_the_host() -> None:
    scores = torch.randint(-3, 4, (4096, 64), generator=torch.Generator().manual_seed(0)).float() / 4
    chosen = _top_k(scores, 8)
    assert torch.equal(_top_k(scores.to(DEVICE), 8).cpu(), chosen)
    for found, expected in zip(
        sorted_rows(chosen.to(DEVICE).flatten(), 64), sorted_rows(chosen.flatten(), 64), strict=True
    ):
        assert torch.equal(found.cpu(), expected)


# -- a layer --


def test_a_layer_waits_for_nothing() -> None:
    """Neither forward nor backward reads anything back."""
    torch.use_deterministic_algorithms(False)  # of torch's own some wait
    mixture = Mixture(CONFIG).to(DEVICE, torch.bfloat16)
    x = torch.randn(512, CONFIG.dim, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    mixture(x).backward(grad)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mixture(x).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def mixture_of(**placement: Any) -> Mixture:
    """A layer as wide as the tests of graphs have their hidden states."""
    model = model_of(CONFIG.with_(dim=WIDTH, layers=1), **placement)
    return next(model.mixtures())


@pytest.mark.parametrize("one_graph", [True, False])
@pytest.mark.parametrize("offloads", [False, True])
def test_a_captured_layer_routes_each_replay_anew(one_graph: bool, offloads: bool) -> None:
    """With its groups in a captured region, too."""
    plain = mixture_of()
    ends = [
        (numbers(seed, dtype=torch.bfloat16), numbers(seed + 9, dtype=torch.bfloat16)) for seed in range(4)
    ]
    expected = [eager(plain, *each, parameters_of(plain)) for each in ends]
    with installed(build_manager() if offloads else None):
        if offloads:
            init_chunk_handler(1, 0, 1)
        mixture = mixture_of(offload_modules=("expert_fc1", "moe_act"))
        with capturing() if offloads else nullcontext() as region:
            by_hand = ByHand.capture(mixture, dtype=torch.bfloat16, one_graph=one_graph)
        for each, others in zip(ends, expected, strict=True):
            assert_same_bits(others, by_hand.run(*each))
        if offloads:
            assert region.spill_bytes > 0
            step_end()


def test_a_capture_that_would_count_no_tokens_is_refused() -> None:
    mixture = Mixture(CONFIG.with_(balance="bias")).to(DEVICE, torch.bfloat16)
    x = torch.randn(64, CONFIG.dim, device=DEVICE, dtype=torch.bfloat16)
    with (
        pytest.raises(RuntimeError, match="a replay would count no tokens"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        mixture(x)


def test_compiled_experts_are_near_the_plain_ones() -> None:
    """Of one mixture: compiled ones round otherwise, and a router behind them then chooses other experts for
    some tokens."""
    mixture = next(iter(model_of().mixtures()))
    x = torch.randn(512, CONFIG.dim, device=DEVICE, dtype=torch.bfloat16)

    def results() -> list[Tensor]:
        mixture.zero_grad()
        y = mixture(x)
        y.float().square().sum().backward()
        return [y.detach(), *(grad.clone() for grad in grads_of(mixture).values())]

    expected = results()
    mixture.experts.compile(fullgraph=True)
    for found, other in zip(results(), expected, strict=True):
        assert (found - other).float().norm() <= 0.02 * other.float().norm()


# -- a model --


@pytest.mark.req("S2-98")
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_logits_and_gradients_are_bitwise_the_baselines(setting: dict[str, Any]) -> None:
    expected = step(model_of())
    with installed(build_manager()):
        model = model_of(**setting)
        for _ in range(3):
            assert_same(step(model), expected)


@pytest.mark.req("S2-99")
@pytest.mark.usefixtures("clean_allocator")
@pytest.mark.parametrize("mode", ["save_on_cpu", "both"])
def test_the_peak_falls_by_what_leaves(mode: Any) -> None:
    """Many layers, so that what the windows hold is small; within 30% and 20 MiB of what the engine moved."""
    config = CONFIG.with_(layers=16, sequence=2048, vocabulary=272, math_attention=False)
    tokens = torch.randint(0, 256, (1, 2048), device=DEVICE)

    def peak_of(model: nn.Module) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["active_bytes.all.current"]
        init_chunk_handler()
        loss_of(model(tokens), tokens).backward()
        step_end()
        torch.cuda.synchronize()
        return int(torch.cuda.memory_stats()["active_bytes.all.peak"]) - before

    torch.use_deterministic_algorithms(False)
    beside = "checkpoint" if mode == "both" else None  # the same computation, and nothing leaves
    plain = model_of(config, experts_mode=beside)
    peak_of(plain)
    without = peak_of(plain)
    del plain
    manager = build_manager(
        min_offloaded_tensor_size=1 << 16, max_spilling_bytes=4 << 20, max_restoring_bytes=4 << 20
    )
    with installed(manager):
        model = model_of(config, experts_mode=mode)
        for _ in range(3):
            peak = peak_of(model)
        moved = manager.stats.spill_bytes
    saved = without - peak
    assert moved >= 2 << 20
    assert saved > 0
    assert abs(saved - moved) <= 0.3 * moved
    assert abs(saved - moved) <= 20 << 20


# -- two ranks --


def over_nccl(rank: int, world: int) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    group = dist.group.WORLD
    seeds = (2 * rank, 2 * rank + 1)
    expected = step(model_of(group=group), seeds)
    configure(
        OffloadConfig(min_offloaded_tensor_size=1, piece_bytes=256 << 10, host_reserve_bytes=128 << 20),
        print_summary=False,
    )
    found: dict[str, Any] = {}
    for setting in SETTINGS:
        if "input_kept" in setting:  # on two ranks there is no other
            continue
        model = model_of(group=group, **setting)
        found[str(setting)] = []
        for _ in range(3):
            logits, grads = step(model, seeds)
            found[str(setting)].append(
                all(torch.equal(one, other) for one, other in zip(logits, expected[0], strict=True))
                and all(torch.equal(grads[name], expected[1][name]) for name in expected[1])
            )
    captured = Mixture(CONFIG, group).to(DEVICE, torch.bfloat16)
    x = torch.randn(64, CONFIG.dim, device=DEVICE, dtype=torch.bfloat16)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            captured(x)
    except RuntimeError as error:
        found["refused"] = "its ranks exchange row counts" in str(error)
    return found


@pytest.mark.gpus(2)
def test_two_ranks_over_nccl_have_the_same_bits_with_offload_and_refuse_captures(tmp_path: Any) -> None:
    for rank in run_ranks(over_nccl, 2, tmp_path, backend="nccl"):
        assert rank.pop("refused")
        assert len(rank) == 5
        assert all(all(same) for same in rank.values())

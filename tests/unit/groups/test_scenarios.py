"""Whole steps on the simulated device: whatever the schedule, the model or the settings, gradients are those
without offload.

Every comparison is bitwise, against the same program run with no manager at all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offload import PipelineOffloadManager, init_chunk_handler, step_end
from parallel.transformer import GROUP_NAMES, TransformerConfig, build_stage_module
from tests.unit.groups.both import assert_nothing_is_left, between_marks, run_both
from tests.unit.groups.stack import (
    EXECUTORS,
    NAMES,
    ROWS,
    WIDTH,
    Action,
    assert_same,
    build_manager,
    build_stages,
    gpipe,
    installed,
    interleaved,
    lifo,
    no_pipeline,
    one_f_one_b,
)

# -- schedules -----------------------------------------------------------------------------------------------
SCHEDULES: dict[str, tuple[list[Action], int]] = {
    "no pipeline, one microbatch": (no_pipeline(1), 1),
    "no pipeline, three microbatches": (no_pipeline(3), 1),
    "gpipe": (gpipe(3), 1),
    "1F1B, last rank": (one_f_one_b(4, 1), 1),
    "1F1B, more microbatches than stages": (one_f_one_b(7, 3), 1),
    "two virtual stages, one microbatch at a time": (no_pipeline(2, stages=2), 2),
    "interleaved": (interleaved(4), 2),
    "interleaved, three virtual stages": (interleaved(2, stages=3), 3),
}


@pytest.mark.req("S2-98", "S2-102", "S3-76")
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_of_every_schedule_over_several_iterations(name: str, executor: Any) -> None:
    actions, stages = SCHEDULES[name]
    for announced in (False, True):
        for stats in run_both(
            [actions] * 3, build_manager(executor, seed=len(name)), announced=announced, count=stages
        ):
            assert stats.saved == stats.kept + stats.spilled
            assert stats.spilled > 0
            # what is not fetched back was read before its source was let go
            assert stats.restored <= stats.spilled


@pytest.mark.req("S2-102")
def test_backwards_of_paired_losses_come_last_in_first_out() -> None:
    run_both([lifo(4)] * 3, build_manager("random", seed=1))
    run_both([gpipe(2), lifo(3), lifo(3), gpipe(4)], build_manager("random", seed=2))


def test_one_backward_reads_several_forwards() -> None:
    """A contrastive loss: two forwards, one loss, so one backward goes through both chunks."""

    def gradients(module: nn.Module) -> list[Tensor]:
        outputs = []
        for seed in (1, 2, 3):
            if PipelineOffloadManager.OFFLOAD_MGR is not None:
                init_chunk_handler(None, None, 1)
            outputs.append(module(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))))
        (outputs[0] * outputs[1] + outputs[2]).square().mean().backward()
        found = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
        module.zero_grad()
        return found

    with installed(None):
        expected = [gradients(build_stages()[0])] * 3
    with installed(build_manager("random", seed=3)) as manager:
        module = build_stages()[0]
        found = []
        for _ in range(3):
            found.append(gradients(module))
            step_end()
            assert_nothing_is_left(manager)
    assert_same(expected, found)


@pytest.mark.req("S2-50", "S2-102")
@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_microbatch_counts_may_change_between_steps(stages: int, announced: bool) -> None:
    counts = [2, 4, 2, 6, 2]
    steps = [interleaved(count) if stages == 2 else one_f_one_b(count, 2) for count in counts]
    spilled = [
        stats.spilled
        for stats in run_both(steps, build_manager("random", seed=4), announced=announced, count=stages)
    ]
    assert spilled[3] > spilled[1] > spilled[2]  # the extra microbatches are not silently kept


@pytest.mark.req("S2-33")
@pytest.mark.parametrize("with_grad", [0, 1])
@pytest.mark.parametrize("announced", [False, True])
def test_evaluation_anywhere_changes_nothing(with_grad: int, announced: bool) -> None:
    """Before the first step, so before warm-up ends; between steps; and in the middle of one."""
    evaluation: Action = ("eval", with_grad, 2)
    steps: list[list[Action]] = [
        [evaluation],
        [evaluation, *gpipe(2)],
        gpipe(2),
        [*gpipe(2), evaluation],
        [evaluation, evaluation],
        [*gpipe(2)[:3], evaluation, *gpipe(2)[3:]],
        gpipe(2),
    ]
    manager = build_manager("random", seed=5)
    stats = run_both(steps, manager, announced=announced)
    assert not manager.is_warmup
    assert stats[-1].spilled > 0
    if announced or not with_grad:
        # such an evaluation is no microbatch: the plan still fits
        assert stats[-1].spilled == stats[2].spilled


# -- settings ------------------------------------------------------------------------------------------------
@pytest.mark.req("S2-104")
@pytest.mark.parametrize(
    "config",
    [
        {"activation_offload_fraction": 0.0},
        {"activation_offload_fraction": 0.5},
        {"pp_rank": 3, "delta_offload_bytes_across_pp_ranks": 2000},
        {"max_inflight_offloads": 0},
        {"max_inflight_offloads": 1},
        {"max_spilling_bytes": 0},
        {"max_spilling_bytes": 1},
        {"max_restoring_bytes": 0},
        {"max_restoring_bytes": 1},
        {"device_limit_bytes": 0},
        {"device_limit_bytes": 1},
        {"device_limit_bytes": 20_000, "max_spilling_bytes": 3000, "max_restoring_bytes": 3000},
        {"host_limit_bytes": 0},
        {"piece_bytes": 1},
        {"piece_bytes": 1 << 30},
        {"min_offloaded_tensor_size": ROWS * WIDTH + 1},
        {"audit": True},
    ],
    ids=lambda config: " ".join(f"{name}={value}" for name, value in config.items()),
)
def test_settings_change_time_and_memory_and_never_results(config: dict[str, Any]) -> None:
    for announced in (False, True):
        run_both([one_f_one_b(4, 2)] * 4, build_manager("random", seed=6, **config), announced=announced)


@pytest.mark.req("S2-98")
@pytest.mark.parametrize(
    "names",
    [*((name,) for name in GROUP_NAMES if name != "attn_proj"), ("core_attn", "attn_proj"), GROUP_NAMES],
    ids="+".join,
)
def test_gpt_with_each_mark_has_the_logits_and_gradients_of_the_one_without(names: tuple[str, ...]) -> None:
    config = TransformerConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, sequence=16)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))

    def run(module: nn.Module, steps: int) -> Iterator[list[Tensor]]:
        for _ in range(steps):
            found = []
            for _ in range(2):
                if PipelineOffloadManager.OFFLOAD_MGR is not None:
                    init_chunk_handler(None, None, 1)
                logits = module(tokens)
                found.append(logits.detach().clone())
                F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
            found += [
                parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None
            ]
            module.zero_grad()
            step_end()
            yield found

    with installed(None):
        expected = list(run(build_stage_module(config, 0, 1), 3))
    with installed(build_manager("random", seed=7)) as manager:
        module = build_stage_module(config.with_(offload_modules=frozenset(names)), 0, 1)
        manager.register_parameters(module)
        assert_same(expected, list(run(module, 3)))
        assert manager.stats.spilled > 0
        assert set(manager.offload_summary_bytes) == set(names)


# -- anything at all -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    """Random models, schedules, counts, evaluations, settings, executors and flips of the switch, all at
    once."""
    dice = random.Random(seed)
    build = {
        "count": dice.choice([1, 1, 2]),
        "layers": dice.choice([1, 2, 3]),
        "names": tuple(name for name in NAMES if dice.random() < 0.7),
        "delay": dice.random() < 0.3,
    }
    steps: list[list[Action]] = []
    for _ in range(dice.randint(2, 4)):
        count = dice.randint(1, 4) if dice.random() < 0.4 else 2
        if build["count"] == 2:
            actions = no_pipeline(count, 2) if dice.random() < 0.5 else interleaved(2 * ((count + 1) // 2))
        else:
            actions = dice.choice([no_pipeline(count), gpipe(count), lifo(count), one_f_one_b(count, 2)])
        for _ in range(dice.choice([0, 0, 1, 2])):
            actions.insert(dice.randint(0, len(actions)), ("eval", dice.randint(0, 1), 1))
        steps.append(actions)
    choices: dict[str, list[Any]] = {
        "activation_offload_fraction": [0.0, 0.3, 0.5],
        "device_limit_bytes": [0, 1000, 8000, 30_000],
        "max_spilling_bytes": [0, 1, 3000],
        "max_restoring_bytes": [0, 1, 3000],
        "max_inflight_offloads": [0, 1, 2],
        "piece_bytes": [1, 1_000_000],
        "host_limit_bytes": [0, 64 << 20],
    }
    config = {name: dice.choice(values) for name, values in choices.items() if dice.random() < 0.25}
    flips = set(dice.sample(range(1, 400), dice.choice([0, 0, 1, 3, 20])))
    seen = 0

    def flip() -> None:
        nonlocal seen
        seen += 1
        manager = PipelineOffloadManager.OFFLOAD_MGR
        if manager is not None and seen in flips:
            (manager.disable_offload if manager.do_offload else manager.enable_offload)()

    manager = build_manager(dice.choice(EXECUTORS), seed=seed, **config)
    if dice.random() < 0.3:
        manager.set_order([action for action in steps[-1] if action[0] != "eval"])
    with between_marks(flip):
        run_both(steps, manager, announced=dice.random() < 0.5, **build)

"""`offload plan --all-kinds`: one total for activations, weights, gradients and optimizer state."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from offload.parallel import plan
from offload.parallel.dry_run.job import Job, stages_of_job
from offload.parallel.dry_run.kinds import SharedPlan, _Work, plan_of_all_kinds
from offload.parallel.dry_run.models import ModelShape
from offload.parallel.dry_run.rates import gpu_named
from offload.parallel.dry_run.reference import Cut
from offload.parallel.orders import orders_of
from offload.policy.rule import Rule, peak_bytes
from offload.policy.splits import Split, device_bytes, step_s

GB = 10**9
SHAPE = ModelShape(
    name="7b", layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, ffn=18944, vocabulary=28
)


def job_of(total_gb: float, tokens: int = 16384, lora: int = 0, host_gb: float | None = None) -> Job:
    return Job(
        model=SHAPE,
        gpu=gpu_named("h200"),
        cut=Cut(sequence=tokens),
        orders=orders_of("1f1b", ranks=1, virtual_stages=None, microbatches=1),
        optimizer_bytes=4,
        lora=lora,
        device_total_bytes=round(total_gb * GB),
        host_bytes=None if host_gb is None else round(host_gb * GB),
    )


@cache
def planned(
    total_gb: float, tokens: int = 16384, lora: int = 0, host_gb: float | None = None
) -> SharedPlan | int:
    job = job_of(total_gb, tokens, lora, host_gb)
    return plan_of_all_kinds(job, stages_of_job(job))


def fits(total_gb: float, tokens: int = 16384, lora: int = 0) -> SharedPlan:
    found = planned(total_gb, tokens, lora)
    assert isinstance(found, SharedPlan)
    return found


@pytest.mark.parametrize(
    ("total_gb", "tokens", "lora", "measured_s"),
    [(24, 16384, 0, 2.4813), (48, 16384, 0, 1.9194), (3.2, 4096, 16, 0.4723)],
)
def test_a_step_is_within_a_twentieth_of_what_an_h200_took(
    total_gb: float, tokens: int, lora: int, measured_s: float
) -> None:
    """docs/benchmarks.md, "One total ..." and "Weights on the host"."""
    found = fits(total_gb, tokens, lora)
    assert found.step_s == pytest.approx(measured_s, rel=0.05)
    assert found.peak_bytes <= total_gb * GB


@pytest.mark.parametrize(
    ("part", "rule", "measured_s", "measured_gb"),
    [
        (0.0, Rule({0: frozenset(range(28))}, moves=False), 2.3951, 93.53),
        (0.0, Rule(moves=True), 2.7504, None),
        (0.5, Rule(moves=True), 2.5030, None),
        (0.5, Rule(moves=False), 2.4629, 28.81),
    ],
    ids=["plain, host", "moved, host", "moved, half", "recomputed, half"],
)
def test_splits_by_hand_are_near_what_an_h200_took(
    part: float, rule: Rule, measured_s: float, measured_gb: float | None
) -> None:
    """docs/benchmarks.md, "One total ..."; the peak of the first steps where weights are half on the host."""
    job = job_of(149)
    work = _Work(job, stages_of_job(job))
    weights = round(part * work.loads.weights) or work.loads.least_weights
    split = Split(weights, False, round(part * work.loads.state))
    ((waits_s, _),) = work.weights_at([weights])
    took_s = work.compute_s + work.recompute_s(rule) + waits_s + step_s(work.loads, split, work.both)
    assert took_s == pytest.approx(measured_s, rel=0.07)
    peak = peak_bytes(work.trace(device_bytes(work.loads, split)), work.costs, rule)
    assert measured_gb is None or peak == pytest.approx(measured_gb * GB, rel=0.02)


def test_more_memory_is_never_slower_and_all_of_it_is_left_alone_where_it_fits() -> None:
    seconds = [fits(total).step_s for total in (12, 24, 48, 80, 120, 149)]
    assert seconds == sorted(seconds, reverse=True)
    last = fits(149)
    assert last.split == Split(last.loads.weights, True, last.loads.state)
    assert last.plain == last.blocks
    assert last.recompute_s == last.waits_s == last.host_bytes == 0
    small = fits(24)
    away = small.loads.weights + small.loads.state + small.loads.gradients
    assert small.host_bytes == away + 28 * 16384 * 3584 * 2


def test_what_does_not_fit_says_the_least_that_would() -> None:
    least = planned(4)
    assert isinstance(least, int)
    assert isinstance(planned(0.99 * least / GB), int)
    assert fits(1.01 * least / GB).peak_bytes <= 1.01 * least


def test_the_host_bounds_what_may_wait_there() -> None:
    found = planned(24, host_gb=45)
    assert isinstance(found, SharedPlan)
    assert found.host_bytes <= 45 * GB < fits(24).host_bytes
    assert found.step_s >= fits(24).step_s
    with pytest.raises(ValueError, match=r"--host-gb is 10, and the shares that fit the device pin at least"):
        planned(24, host_gb=10)


def test_adapters_alone_have_gradients_and_state() -> None:
    found = fits(12, 4096, 16)
    elements = found.loads.gradients / 2
    per_layer = 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert elements == 28 * per_layer
    assert found.loads.state + found.loads.resident >= 4 * elements
    assert found.compute_s < 0.9 * fits(149, 4096).compute_s, "frozen weights have no gradient"


@pytest.fixture
def config(tmp_path: Path) -> str:
    shape = {"hidden_size": 256, "num_attention_heads": 2, "num_hidden_layers": 4, "intermediate_size": 512}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 512, **shape}))
    return str(tmp_path)


def test_the_command_prints_shares_and_says_whether_it_fits(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", config, "--sequence", "1024", "--microbatches", "2", "--all-kinds"]
    assert plan.main([*given, "--device-total-gb", "1"]) == plan.FITS
    printed = capsys.readouterr().out
    assert "weights of blocks: 0.01 GB on the device, of 0.01" in printed
    assert "activations: 4 of 4 blocks plain" in printed
    assert plan.main([*given, "--json"]) == plan.FITS
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["split"]["gradients"]
    assert plan.main([*given, "--device-total-gb", "0.001"]) == plan.DOES_NOT_FIT
    assert "with all that can wait on the host, a step takes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--pp", "2", "--microbatches", "4"], "is of one GPU and one stage, not of 2 ranks"),
        (["--lora", "-1"], "--lora is -1"),
        (["--plot", "step.png"], "--all-kinds makes none"),
        (["--offload", "groups"], "--offload groups beside --all-kinds"),
    ],
)
def test_what_it_cannot_plan_is_one_line(
    more: list[str], message: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", config, "--sequence", "1024", "--all-kinds", *more]
    assert plan.main(given) == plan.NO_QUESTION
    assert message in capsys.readouterr().err


def test_a_file_of_transformers_has_its_norms_which_save_more(config: str) -> None:
    shape = plan._model(config)
    assert shape.upcast_norms
    assert not plan._model("llama3-8b").upcast_norms

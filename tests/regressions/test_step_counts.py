"""A report counted other steps than the loop had made.

Three optimizer steps of four microbatches were "6 steps since apply": until an optimizer has stepped once, a
forward that finds nothing saved ends a step, and such guesses were counted for good. Three steps of LBFGS
were 2, and its last one was in no report: the hook ran before the closure, which has the forward. Each loop
here says how many optimizer steps it makes, and of how many equal microbatches the last one is; the report
has to agree in both, and the total with their sum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim.lr_scheduler import StepLR

import offload
from offload.telemetry.figures import Figures, Ledger
from tests.unit.modules.training import ROWS, WIDTH, Model, build

pytestmark = pytest.mark.usefixtures("manager")

Optimizer = torch.optim.Optimizer


def backward(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randn(ROWS, WIDTH)).square().mean()
    loss.backward()
    return loss


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(ROWS, WIDTH))


class Sam(Optimizer):
    """Two closures around an inner optimizer's step, which is given none."""

    def __init__(self, model: nn.Module) -> None:
        self.base = sgd(model)
        super().__init__(self.base.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        closure()
        self.base.step()


class Wrapper(Optimizer):
    """It passes the closure on, by name."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure=closure)


# -- loops: each makes some optimizer steps. Returns their number, the microbatches of the last, and of all --
def accumulates(model: Model) -> tuple[int, int, int]:
    optimizer = sgd(model)
    for _ in range(3):
        for _ in range(4):
            backward(model)
        optimizer.step()
        optimizer.zero_grad()
    return 3, 4, 12


def evaluates_before_between_and_after(model: Model) -> tuple[int, int, int]:
    optimizer = sgd(model)
    for _ in range(3):
        evaluate(model)
        for _ in range(2):
            backward(model)
            evaluate(model)
        optimizer.step()
        evaluate(model)
    return 3, 2, 6


def two_optimizers(model: Model) -> tuple[int, int, int]:
    parameters = [*model.parameters()]
    optimizers = [torch.optim.SGD(own, lr=0.01) for own in (parameters[:3], parameters[3:])]
    for _ in range(3):
        for _ in range(2):
            backward(model)
        for optimizer in optimizers:
            optimizer.step()
    return 3, 2, 6


def skipped_by_a_scaler(model: Model) -> tuple[int, int, int]:
    """The first two are skipped, as with a scale that is too large at first, and one later."""
    optimizer = sgd(model)
    for step in range(6):
        backward(model)
        if step not in (0, 1, 4):
            optimizer.step()
    return 3, 2, 6


def lbfgs(model: Model) -> tuple[int, int, int]:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=2, tolerance_change=0.0)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        calls.append(1)
        return backward(model)

    for _ in range(3):
        before = len(calls)
        optimizer.step(closure)
        evaluate(model)
    return 3, len(calls) - before, len(calls)


def forwards_in_a_closure_by_name(model: Model) -> tuple[int, int, int]:
    """As Lightning steps."""
    optimizer = Wrapper(sgd(model))
    scheduler = StepLR(optimizer.inner, 1)  # which wraps step()
    for _ in range(4):
        optimizer.step(closure=lambda: backward(model))
        scheduler.step()
    return 4, 1, 4


def a_closure_that_only_returns_the_loss(model: Model) -> tuple[int, int, int]:
    optimizer = sgd(model)
    for _ in range(3):
        losses = [backward(model) for _ in range(2)]
        optimizer.step(lambda losses=losses: losses[-1])
    return 3, 2, 6


def two_forwards_beside_one_outside(model: Model) -> tuple[int, int, int]:
    optimizer = Sam(model)
    for _ in range(3):
        backward(model)
        optimizer.step(lambda: backward(model))
    return 3, 3, 9


def without_an_optimizer(model: Model) -> tuple[int, int, int]:
    """Each backward is a step. The last one ends with the next forward."""
    for _ in range(4):
        backward(model)
    return 3, 1, 3


LOOPS: list[Callable[[Model], tuple[int, int, int]]] = [
    accumulates,
    evaluates_before_between_and_after,
    two_optimizers,
    skipped_by_a_scaler,
    lbfgs,
    forwards_in_a_closure_by_name,
    a_closure_that_only_returns_the_loss,
    two_forwards_beside_one_outside,
    without_an_optimizer,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("mode", ["groups", "watermark"])
def test_a_report_has_the_optimizer_steps_of_its_loop(
    mode: str, loop: Callable[[Model], tuple[int, int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    alone = build()
    with offload.activations(alone, min_numel=1) as applied:
        backward(alone)
        sgd(alone).step()
        a_microbatch = applied.report().total.saved_bytes
    model = build()
    high = {"high": "1GB"} if mode == "watermark" else {}
    handle = offload.apply(model, mode, min_numel=1, **high)
    with caplog.at_level(logging.ERROR):  # a small model's copies save nothing, which is said
        steps, last, microbatches = loop(model)
    found = handle.report()
    assert found.last is not None
    assert found.total.steps == steps
    if mode == "groups":
        assert found.last.saved_bytes == last * a_microbatch
        assert found.total.saved_bytes == microbatches * a_microbatch
    assert found.last.steps == 1
    assert found.total.peak_bytes >= found.last.peak_bytes > 0


@pytest.mark.parametrize("loop", LOOPS[:-1], ids=lambda loop: loop.__name__)
def test_weights_alone_count_the_steps_of_a_model_whose_inner_module_is_called(
    loop: Callable[[Model], tuple[int, int, int]],
) -> None:
    """As Lightning's training_step() calls it: the report said that no step had ended."""
    model = build()
    around = nn.Sequential(model)
    handle = offload.apply(around, optimizer=torch.optim.Adam(around.parameters()))
    evaluate(around)
    steps, _, _ = loop(model)
    assert handle.report().total.steps == steps


@pytest.mark.parametrize("removed", [True, False])
def test_a_reset_before_an_apply_does_not_end_the_inference_of_steps(removed: bool) -> None:
    """`reset` is `step_end`: one call was believed for good, and the next handle counted no step."""
    for _ in range(2):
        model = build()
        handle = offload.apply(model, min_numel=1)
        accumulates(model)
        assert handle.report().total.steps == 3
        offload.reset()
        if removed:
            handle.remove()


def test_ends_by_hand_stay_the_ends_when_another_model_is_applied() -> None:
    """Two optimizers' steps were two more ends, once."""
    models, handles, counts = [build(), build()], [], []
    for number in (1, 2):
        handles.append(offload.apply(models[number - 1], min_numel=1))
        for _ in range(3):
            for model in models[:number]:
                backward(model)
                sgd(model).step()
            offload.step_end()
        counts.append([handle.report().total.steps for handle in handles])
    assert counts == [[3], [6, 3]]


def test_the_figures_of_a_step_in_parts_are_sums_and_its_peaks_the_largest() -> None:
    ledger = Ledger()
    for peak_bytes in (5, 9):
        ledger.add(Figures(steps=1, saved_bytes=3, peak_bytes=peak_bytes, stall_ms=1.0), guessed=True)
        assert ledger.last.peak_bytes == peak_bytes, "until an optimizer steps it is a step"
    assert ledger.total.steps == 2
    ledger.add(Figures(steps=1, saved_bytes=4, peak_bytes=7, stall_ms=1.0))
    assert (ledger.total.steps, ledger.last.steps) == (1, 1)
    assert ledger.last.saved_bytes == ledger.total.saved_bytes == 10
    assert ledger.last.peak_bytes == ledger.total.peak_bytes == 9
    ledger.add(Figures(steps=1, saved_bytes=4, peak_bytes=7, stall_ms=1.0))
    assert (ledger.total.steps, ledger.last.saved_bytes, ledger.last.peak_bytes) == (2, 4, 7)


def test_a_closure_that_raises_ends_nothing_and_the_next_step_has_its_forward() -> None:
    model = build()
    handle = offload.apply(model, min_numel=1)
    optimizer = sgd(model)

    def raises() -> Tensor:
        backward(model)
        raise KeyboardInterrupt

    optimizer.step(lambda: backward(model))
    one = handle.report().total.saved_bytes
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(raises)
    assert handle.report().total.steps == 1
    optimizer.step(lambda: backward(model))
    found = handle.report()
    assert (found.total.steps, found.last.saved_bytes) == (2, 2 * one)


@pytest.mark.usefixtures("one_rank")
def test_a_pipelines_first_step_is_one_on_its_last_rank_too() -> None:
    """torch's own stage announces nothing, and 1F1B's last rank has nothing alive between microbatches."""
    model = build()
    handle = offload.apply(model, min_numel=1)
    rows = torch.randn(ROWS, WIDTH)
    stage = PipelineStage(
        model, 0, 1, torch.device("cpu"), input_args=(rows,), output_args=torch.randn(ROWS, 5)
    )
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
    optimizer = sgd(model)
    for _ in range(3):
        schedule.step(torch.randn(4 * ROWS, WIDTH), target=torch.randn(4 * ROWS, 5))
        optimizer.step()
    found = handle.report()
    assert found.last is not None
    assert found.total.steps == 3
    assert found.total.saved_bytes == 3 * found.last.saved_bytes


@pytest.mark.parametrize("accumulated", [1, 4])
def test_a_trainers_steps_are_its_global_steps(accumulated: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    rows = torch.randint(32, (32, 8))
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulated,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=data,
        eval_dataset=data[:4],
    )
    handle = offload.apply(trainer.model, min_numel=1)
    trainer.train()
    found = handle.report()
    assert found.last is not None
    assert found.total.steps == trainer.state.global_step == 3
    assert found.total.saved_bytes == 3 * found.last.saved_bytes

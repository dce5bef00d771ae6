"""What a bad argument, a bad gradient or a step that breaks off leaves behind: an error that says what, and
never half a step unsaid."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from offload import HostBudgetError, OffloadConfig, OffloadEngine
from offload.device.sim import ExecutorName, SimDevice
from offload.errors import OffloadError
from offload.optim import HybridDeviceOptimizer, streamed_step
from offload.optim.cpu_step import CpuBucket
from offload.optim.streamed_step import StreamedBucket
from offload.params.worker import Worker
from tests.unit.optim.rig import (
    FUSED,
    assert_same_bits,
    backward,
    broken_off,
    engine,
    failing,
    hybrid,
    net,
    train,
    weights,
)


# -- arguments -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload_fraction": 1.5}, "offload_fraction is 1.5, must be a number between 0 and 1"),
        ({"offload_fraction": -0.1}, "offload_fraction is -0.1"),
        ({"offload_fraction": True}, "offload_fraction is True"),
        ({"cpu_share": 2}, "cpu_share is 2"),
        ({"bucket_bytes": 10}, "bucket_bytes is 10"),
        ({"cpu_threads": 0}, "cpu_threads is 0, must be a whole number of threads, 1 or more"),
        (
            {"cpu_optimizer_cls": nn.Linear},
            r"cpu_optimizer_cls is <class .*Linear'>, must be a class derived from torch.optim.Optimizer",
        ),
        (
            {"cpu_optimizer_cls": Adam, "gpu_optimizer_cls": "AdamW"},
            "gpu_optimizer_cls is 'AdamW', must be a class",
        ),
        (
            {"cpu_optimizer_cls": torch.optim.SGD, "betas": (0.9, 0.99)},
            r"cpu_optimizer_cls SGD cannot be made with lr=0.01, betas=\(0.9, 0.99\): .*; it takes lr, "
            r"momentum",
        ),
        (
            {"cpu_optimizer_cls": torch.optim.SGD([torch.ones(1)])},
            "cpu_optimizer_cls is an object of SGD, must be a class",
        ),
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"capturable": True}, "capturable=True is for an optimizer that lives on the device"),
        (
            {"cpu_optimizer_cls": torch.optim.SGD, "cpu_share": 0.5, "offload_fraction": 1.0},
            "cpu_share is 0.5, but only torch's Adam and AdamW",
        ),
    ],
)
def test_an_argument_that_cannot_work_is_refused_before_anything_is_pinned(
    options: dict[str, Any], message: str
) -> None:
    engine = OffloadEngine(device=SimDevice())
    with pytest.raises(ValueError, match=message):
        hybrid(net(), engine=engine, **{"offload_fraction": 0.5, **options})
    assert engine.arena.held_bytes == 0


def test_parameters_that_cannot_be_stepped_are_refused_by_name() -> None:
    holes = nn.Parameter(torch.zeros(8, 8)[:, ::2])
    with pytest.raises(
        ValueError,
        match=r"parameter 1 \(32 elements of torch.float32\) has strides \(8, 2\) for shape \(8, 4\)",
    ):
        HybridDeviceOptimizer([nn.Parameter(torch.zeros(3)), holes], 1.0, lr=0.1)
    with pytest.raises(ValueError, match=r"params is a Linear; give what its \.parameters\(\) returns"):
        HybridDeviceOptimizer(nn.Linear(1, 1), lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 0 .* is not of a floating-point type"):
        HybridDeviceOptimizer([torch.zeros(3, dtype=torch.int32)], 1.0, torch.optim.Adagrad, lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 0 .* is on meta, and the optimizer's device is sim"):
        HybridDeviceOptimizer([nn.Parameter(torch.zeros(3, device="meta"))], 1.0, lr=0.1)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_too_little_host_memory_is_said_with_both_numbers_and_nothing_stays_pinned(share: float) -> None:
    engine = OffloadEngine(OffloadConfig(host_limit_bytes=10_000), device=SimDevice())
    padded = sum(-(-parameter.numel() // 16) * 16 for parameter in net().parameters())
    needed = padded * (16 if share else 8)
    with pytest.raises(
        HostBudgetError,
        match=(
            rf"parameters need {needed:,} bytes of host memory, and 10,000 of the host's "
            r"10,000 bytes are free"
        ),
    ):
        hybrid(net(), cpu_share=share, engine=engine)
    assert engine.arena.stats().lent_bytes == 0


# -- gradients -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("overlap", ["step", "forward"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_sparse_gradient_is_refused_by_name_before_anything_is_stepped(share: float, overlap: str) -> None:
    embedding, linear = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)
    model = nn.Sequential(embedding, linear)
    optimizer = hybrid(model, cpu_share=share, model=model, overlap=overlap)
    before = weights(model, optimizer)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        OffloadError,
        match=(
            r"parameter 0 \(0.weight, .*\) has a torch.sparse_coo gradient, and offloaded "
            r"parameters take dense"
        ),
    ):
        optimizer.step()
    assert_same_bits(weights(model, optimizer), before)
    assert len(optimizer.state) == 0, "no step was made"


# -- a step that breaks off ----------------------------------------------------------------------------------
class Breaks(AdamW):
    """Fails at its step number `at`, when half of its parameters are stepped."""

    at = -1
    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        type(self).calls += 1
        if type(self).calls == type(self).at:
            leaves = [leaf for group in self.param_groups for leaf in group["params"]]
            for leaf in leaves[: max(1, len(leaves) // 2)]:
                leaf.add_(1000.0)
                self.state[leaf] = {
                    "step": torch.tensor(99.0),
                    "exp_avg": torch.ones_like(leaf),
                    "exp_avg_sq": torch.ones_like(leaf),
                }
            raise MemoryError("no more")
        return super().step(closure)


@pytest.fixture
def breaks() -> type[Breaks]:
    Breaks.at, Breaks.calls = -1, 0
    return Breaks


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("bucket", [4, 0])
def test_a_class_that_may_fail_leaves_weights_and_state_of_the_last_whole_step(
    breaks: type[Breaks], overlap: bool, masters: bool, bucket: int
) -> None:
    """In the third step one bucket's optimizer fails, the first or the last; then the step is made again."""
    model, reference = net(torch.bfloat16), net(torch.bfloat16)
    common: dict[str, Any] = {
        "offload_fraction": 1.0,
        "cpu_share": 1.0,
        "param_update_in_fp32": masters,
        "fused": True,
    }
    expected = hybrid(reference, **common)
    optimizer = hybrid(
        model,
        cpu_optimizer_cls=breaks,
        atomic_step=True,
        overlap_cpu_optimizer_d2h_h2d=overlap,
        model=model,
        bucket_bytes=8192,
        **common,
    )
    train(model, optimizer, 2)
    before = weights(model, optimizer)
    state = optimizer.state_dict()["state"]
    breaks.at = breaks.calls + 1 + min(bucket, len(optimizer.cpu_optimizers) - 1)
    backward(model, 2)
    with pytest.raises(
        OffloadError,
        match=(
            r"the step failed in Breaks \(MemoryError: no more\); weights and state are those "
            r"of the last whole"
        ),
    ):
        optimizer.step()
    assert_same_bits(weights(model, optimizer), before)
    for index, of in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state[index][key]) for key, value in of.items())
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 1, first=3)
    assert_same_bits(weights(model, optimizer), train(reference, expected, 4))


def test_an_error_on_a_worker_is_raised_in_the_next_call_says_what_it_means_and_nothing_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, reference = net(), net()
    optimizer = hybrid(model, cpu_share=1.0, model=model, bucket_bytes=8192, overlap="forward")
    train(model, optimizer, 2)
    saved = {
        "model": {key: value.clone() for key, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }
    monkeypatch.setattr(CpuBucket, "step", failing(CpuBucket.step, 2))
    backward(model, 2)
    optimizer.step()
    message = (
        r"a step failed on a worker \(MemoryError: no more\), one of \d+ buckets in it; "
        r"weights and state of different parameters may be"
    )
    with pytest.raises(OffloadError, match=message):
        model(torch.zeros(1, 33))
    for call in (optimizer.step, optimizer.synchronize_parameters, optimizer.state_dict):
        with pytest.raises(OffloadError, match=message):
            call()
    monkeypatch.undo()
    optimizer.load_state_dict(saved["optimizer"])
    model.load_state_dict(saved["model"])
    optimizer.zero_grad()
    found = train(model, optimizer, 2, first=2)
    expected = train(reference, AdamW(reference.parameters(), lr=1e-2), 4)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    optimizer.close()


def test_an_optimizer_that_failed_can_be_closed(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = hybrid(model, cpu_share=1.0, model=model)
    monkeypatch.setattr(CpuBucket, "step", failing(CpuBucket.step, 1))
    backward(model, 0)
    optimizer.step()
    optimizer.close()


# -- what a failed step leaves in flight ---------------------------------------------------------------------
@pytest.mark.parametrize("executor", get_args(ExecutorName))
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_closing_after_a_failure_gives_memory_back_only_when_its_copies_have_ended(
    monkeypatch: pytest.MonkeyPatch, executor: ExecutorName, share: float, model: nn.Module
) -> None:
    """The buckets before the one that failed are still on their way when the next tenant of an engine is lent
    their bytes."""
    mine = engine(executor)
    optimizer = hybrid(model, cpu_share=share, engine=mine, model=model, fused=True)
    for kind in (CpuBucket, StreamedBucket):
        last = max(
            (bucket for bucket in optimizer._steps.in_order if isinstance(bucket, kind)),
            key=places_of,
            default=None,
        )
        monkeypatch.setattr(kind, "step", failing_at(last, kind.step))
    backward(model, 0)
    optimizer.step()
    optimizer._steps._stepper.synchronize()
    optimizer._steps._streamer.synchronize()
    assert optimizer._steps.failed
    optimizer.close()
    assert mine.arena.stats().lent_bytes == 0
    for block in iter(
        lambda: mine.arena.take(1 << 20) if mine.arena.lent_bytes < mine.arena.held_bytes else None, None
    ):
        for extent in block.extents:
            mine.device.note_write(mine.device.host, extent)


def places_of(bucket: CpuBucket | StreamedBucket) -> int:
    return bucket.layout.pieces[0].parameter


def failing_at(last: object, step: Callable[..., None]) -> Callable[..., None]:
    def fails(self: Any, *arguments: Any) -> None:
        if self is last:
            raise MemoryError("no more")
        step(self, *arguments)

    return fails


@pytest.mark.parametrize("executor", get_args(ExecutorName))
def test_what_a_bucket_issued_before_it_failed_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, executor: ExecutorName, model: nn.Module
) -> None:
    """The kernel of a bucket's first param group may run when that of its second fails: it reads gradients
    that go, and writes weights that are about to be loaded."""
    weight, *others = model.parameters()
    optimizer = hybrid(
        model,
        params=[{"params": [weight]}, {"params": others}],
        cpu_share=0.0,
        engine=engine(executor),
        fused=True,
    )
    saved = optimizer.state_dict()
    monkeypatch.setattr(streamed_step, "adam", fail)
    backward(model, 0)
    with pytest.raises(OffloadError, match="no more"):
        optimizer.step()
    monkeypatch.undo()
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    device = optimizer.engine.device
    for parameter in model.parameters():
        device.note_write(device.compute, parameter.detach().view(-1).view(torch.uint8))
    backward(model, 1)
    optimizer.step()
    optimizer.close()


def fail(*_: Any, **__: Any) -> None:
    raise MemoryError("no more")


@pytest.mark.parametrize("executor", get_args(ExecutorName))
@pytest.mark.parametrize(
    "fails_in", ["the copies in", "the first kernel", "the second kernel", "the copies out"]
)
@pytest.mark.parametrize("workers", [True, False])
@pytest.mark.parametrize("same_bucket", [True, False])
def test_a_streamed_step_that_breaks_off_leaves_its_slot_its_state_and_its_gradients_ordered(
    same_bucket: bool, workers: bool, fails_in: str, executor: ExecutorName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps after it use the same slots of the ring, and the same state or that of other buckets. Where
    step() waits for its end, or not."""
    model = net()
    weight, *others = model.parameters()
    optimizer = hybrid(
        model,
        params=[{"params": [weight]}, {"params": others}],
        cpu_share=0.0,
        engine=engine(executor),
        bucket_bytes=1 << 20 if same_bucket else 4096,
        overlap_cpu_optimizer_d2h_h2d=workers,
        fused=True,
    )
    saved = optimizer.state_dict()
    with monkeypatch.context() as patch:
        if fails_in.endswith("kernel"):
            patch.setattr(streamed_step, "adam", failing(streamed_step.adam, 1 if "first" in fails_in else 2))
        else:
            patch.setattr(SimDevice, "copy", broken_off(SimDevice.copy, 1 if fails_in.endswith("in") else 2))
        backward(model, 0)
        with pytest.raises((MemoryError, OffloadError), match="no more"):
            optimizer.step()
    optimizer.load_state_dict(saved)
    for number in range(1, 5):  # more than the ring has slots
        optimizer.zero_grad()
        backward(model, number)
        if not same_bucket:
            weight.grad = None  # of the bucket that broke off
        optimizer.step()
    optimizer.close()


# -- threads -------------------------------------------------------------------------------------------------
def test_an_optimizer_that_is_dropped_leaves_no_thread_and_no_hook_that_does_anything() -> None:
    gc.collect()
    before = threading.active_count()
    model = net()
    optimizer: Optimizer | None = hybrid(model, cpu_share=0.5, model=model)
    assert optimizer is not None
    train(model, optimizer, 2)
    assert threading.active_count() == before + 2
    optimizer = None
    gc.collect()
    assert threading.active_count() == before
    backward(model, 0)


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_step_whose_worker_cannot_start_is_an_error_and_the_next_one_makes_it(
    share: float, fraction: float, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets without a job were pending: the next call waited for them for ever. What stays on the GPU had
    been stepped already."""
    reference, model = net(), net()
    expected = AdamW(reference.parameters(), **FUSED)
    optimizer = hybrid(
        model,
        offload_fraction=fraction,
        cpu_share=share,
        model=model,
        overlap="backward" if early else "forward",
        fused=True,
    )
    optimizer.last_microbatch = True
    before = weights(model, optimizer)
    backward(reference, 0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        if not early:
            backward(model, 0)
        with pytest.raises(OffloadError, match=r"no thread for optimizer-(cpu|stream) beside its"):
            backward(model, 0) if early else optimizer.step()
        assert_same_bits(weights(model, optimizer), before)
        if early:  # the backward broke off, like any that raises
            optimizer.zero_grad()
            model.zero_grad()
    if early:
        backward(model, 0)
    for one in (expected, optimizer):
        one.step()
        one.zero_grad()
    train(reference, expected, 2, first=1)
    train(model, optimizer, 2, first=1)
    assert_same_bits(weights(model, optimizer), weights(reference, expected))
    optimizer.close()


def test_a_worker_runs_jobs_in_order_and_drops_those_after_an_error() -> None:
    worker, seen = Worker("test"), []

    def fails() -> None:
        raise KeyError("lost")

    worker.submit(lambda: seen.append("one"), lambda: seen.append("after one"))
    worker.submit(fails, lambda: seen.append("after failure"))
    worker.submit(lambda: seen.append("never"), lambda: seen.append("after never"))
    worker.synchronize()
    assert seen == ["one", "after one", "after failure", "after never"]
    assert isinstance(worker.error, KeyError)
    worker.clear_error()
    worker.submit(lambda: seen.append("again"), lambda: None)
    worker.synchronize()
    assert seen[-1] == "again"
    worker.close()
    worker.close()


def test_a_worker_leaves_the_caller_its_number_of_threads() -> None:
    before = torch.get_num_threads()
    found: list[int] = []
    worker = Worker("test", threads=before + 1)
    worker.submit(lambda: found.append(torch.get_num_threads()), lambda: None)
    worker.synchronize()
    worker.close()
    assert found == [before + 1]
    assert torch.get_num_threads() == before


def test_what_was_pinned_before_a_refusal_goes_back() -> None:
    """The CPU's part fits, the streamed part does not: nothing stays lent of an engine that others use."""
    padded = sum(-(-parameter.numel() // 16) * 16 for parameter in net().parameters())
    engine = OffloadEngine(OffloadConfig(host_limit_bytes=10 * padded), device=SimDevice())
    with pytest.raises(HostBudgetError, match="the streamed parameters need"):
        hybrid(net(), cpu_share=0.5, engine=engine)
    assert engine.arena.stats().lent_bytes == 0

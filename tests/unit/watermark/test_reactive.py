"""order="reactive", by the source system's letter: what each saved tensor does while a played meter says how
much memory is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.compat.stagehand.activations import ActivationRuntime, ActivationState
from offload.errors import OffloadError
from offload.saved.handles import Handle, Passed
from tests.inside import holds_lock
from tests.unit.watermark.training import (
    EXECUTORS,
    MIB,
    TENSOR,
    LivingStorages,
    batch,
    blocks,
    engine_of,
    runtime_of,
    train,
)

HIGH, LOW = 100, 60
FULL, EMPTY = HIGH, LOW - 1  # readings


class Keep(torch.autograd.Function):
    """Saves its input, and notes what autograd's graph is given for it, and what the backward gets."""

    packed: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (_,) = ctx.saved_tensors
        return grad * 2


@contextmanager
def reactive(readings: Callable[[], int] | list[int], **fields: Any) -> Iterator[ActivationRuntime]:
    played = iter(readings) if isinstance(readings, list) else None
    meter = (lambda: next(played)) if played is not None else readings
    with runtime_of(order="reactive", high=HIGH, low=LOW, memory_allocated=meter, **fields) as runtime:
        yield runtime


def sources(count: int) -> list[Tensor]:
    """Tensors that only the graph holds once they are deleted here; each has its own storage."""
    return [batch(seed).requires_grad_() * 1 for seed in range(count)]


def save_all(runtime: ActivationRuntime, tensors: list[Tensor]) -> list[Tensor]:
    with runtime.managed_forward():
        return [Keep.apply(tensor) for tensor in tensors]


@pytest.mark.req("S0-1", "S0-2")
def test_each_saved_tensor_passes_the_hooks_and_takes_one_reading() -> None:
    readings: list[int] = []

    def meter() -> int:
        readings.append(EMPTY)
        return EMPTY

    with reactive(meter) as runtime:
        tensors = sources(3)
        save_all(runtime, tensors)
        assert len(readings) == 3
        Keep.apply(tensors[0])  # outside
        assert len(readings) == 3
        assert runtime.engine.hooks.innermost() is None


@pytest.mark.req("S0-1")
def test_the_hooks_are_torchs_saved_tensor_hooks() -> None:
    with reactive([]) as runtime:
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        with runtime.managed_forward():
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            assert top == (runtime.engine.hooks.pack, runtime.engine.hooks.unpack)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def packed_by(runtime: ActivationRuntime, tensor: Tensor) -> Any:
    """What autograd's graph gets for `tensor`."""
    with runtime.managed_forward():
        return runtime.engine.hooks.pack(tensor)


@pytest.mark.req("S0-3", "S0-5", "S0-6")
def test_below_the_mark_a_tensor_is_kept_without_a_copy_an_allocation_or_a_transfer() -> None:
    with reactive([EMPTY]) as runtime:
        (tensor,) = sources(1)
        meter = LivingStorages(runtime.engine.device)  # type: ignore[arg-type]
        with meter:
            packed = packed_by(runtime, tensor)
            assert type(packed) is Passed
            assert packed.tensor is not tensor, "an alias: the tensor itself would hold its own graph"
            assert packed.tensor.grad_fn is None
            assert packed.tensor.data_ptr() == tensor.data_ptr()
            found = runtime.engine.hooks.unpack(packed)
        assert found.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        assert runtime.engine.transfers.counts.spilled == 0
        assert runtime.engine.arena.stats().lent == 0
        assert meter.allocated() <= tensor.nbytes  # of the aliases of the one storage
        metrics = runtime.step_end()
        assert (metrics.activations_saved, metrics.activations_kept) == (1, 1)


@pytest.mark.req("S0-4", "S0-5")
def test_above_the_mark_a_record_is_returned_and_the_device_tensor_let_go() -> None:
    with reactive([FULL]) as runtime:
        (tensor,) = sources(1)
        packed = packed_by(runtime, tensor)
        assert type(packed) is Handle
        record = runtime.registry.get(packed)
        assert record.state is ActivationState.SPILLED, "the forward's end has finalized it"
        block = packed.record.block
        assert block.device_bytes is None
        assert packed.probe.untyped_storage().nbytes() == 0
        assert record.buffer.lender is runtime.pool
        del tensor
        assert block.storage() is None, "nobody holds it any more"


@pytest.mark.req("S0-7", "S0-8", "S0-49")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_was_spilled_comes_back_bit_by_bit_before_it_is_read(executor: Any) -> None:
    plain = train(blocks(6), None)
    with reactive(lambda: FULL, executor=executor) as runtime:
        assert train(blocks(6), runtime) == plain
        metrics = runtime.last_metrics
        assert metrics.activations_spilled == metrics.activations_saved == 2 * 6 + 1


@pytest.mark.req("S0-31")
@pytest.mark.parametrize("nbytes", [12, 1000, 201 * MIB + 4])
def test_tensors_from_a_few_bytes_to_over_200_mb_come_back_from_a_slab(nbytes: int) -> None:
    with reactive([FULL], slabs_per_class=1) as runtime:
        packed = packed_by(runtime, torch.arange(nbytes // 4, dtype=torch.float32).requires_grad_() * 1)
        assert packed.record.block.device_bytes is None
        found = runtime.engine.hooks.unpack(packed)
        assert torch.equal(found, torch.arange(nbytes // 4, dtype=torch.float32))
        assert (runtime.pool.pool_hits, runtime.pool.pool_misses) == (1, 0)


@pytest.mark.req("S0-7")
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(7.0),
        torch.randn(5, 6).t(),
        torch.randn(4, 1).expand(4, 9),
        torch.randn(40)[3:27:2],
        torch.randn(3, 5).to(torch.bfloat16),
        torch.randn(300, 1000),
    ],
    ids=["short", "strided", "expanded", "offset", "bfloat16", "1.2 MB"],
)
def test_shape_strides_dtype_and_bits_are_those_that_were_saved(tensor: Tensor) -> None:
    with reactive([FULL]) as runtime:
        tensor = tensor.clone(memory_format=torch.preserve_format).requires_grad_() * 1
        packed = packed_by(runtime, tensor)
        assert type(packed) is Handle
        wanted = tensor.detach().clone(memory_format=torch.preserve_format)
        shape, stride, device = tensor.shape, tensor.stride(), tensor.device
        del tensor
        found = runtime.engine.hooks.unpack(packed)
        assert (found.shape, found.stride(), found.dtype, found.device) == (
            shape,
            stride,
            wanted.dtype,
            device,
        )
        assert torch.equal(found.detach(), wanted)


@pytest.mark.req("S0-12", "S0-13", "S0-14", "S0-15")
def test_with_a_cap_of_one_all_leave_one_after_the_other() -> None:
    with reactive(lambda: FULL) as runtime:
        finalized: list[int] = []
        finalize = runtime.transfer.finalize_all_spills

        def spied(records: Any) -> None:
            found = list(records)
            finalized.append(len(found))
            finalize(found)
            assert runtime.transfer.can_spill()

        runtime.transfer.finalize_all_spills = spied  # type: ignore[method-assign]
        in_flight: list[tuple[int, int]] = []
        tensors = sources(5)
        with runtime.managed_forward():
            outputs = []
            for tensor in tensors:
                outputs.append(Keep.apply(tensor))
                in_flight.append(runtime.engine.transfers.in_flight())
        assert in_flight == [(1, 0)] * 5
        assert finalized == [1, 1, 1, 1, 1], "four before the next spill, one at the forward's end"
        del tensors, tensor
        restoring: list[int] = []
        runtime.engine.on_read(lambda handle: restoring.append(runtime.engine.transfers.in_flight()[1]))
        for output in outputs:
            output.sum().backward()
        assert restoring == [0] * 5, "each is waited for by its own reader"
        metrics = runtime.step_end()
        assert (metrics.activations_spilled, metrics.activations_restored) == (5, 5)


@pytest.mark.req("S0-15")
def test_without_inline_finalize_exactly_one_leaves() -> None:
    with reactive(lambda: FULL, inline_finalize=False) as runtime:
        outputs = save_all(runtime, sources(5))
        metrics = runtime.step_end()
        assert (metrics.activations_spilled, metrics.activations_kept) == (1, 4)
        del outputs


@pytest.mark.req("S1-47")
@pytest.mark.parametrize("by", ["config", "arbiter"])
def test_a_cap_of_zero_keeps_everything_and_waits_for_nothing(by: str) -> None:
    """Whoever gives it: the cap is the limits', and the least bound holds."""
    with reactive(lambda: FULL, max_inflight_d2h=0 if by == "config" else 3) as runtime:
        limits = runtime.engine.limits
        if by == "arbiter":
            assert (limits.spills_in_flight, limits.held_by("spills_in_flight")) == (3, "watermark")
            with runtime.managed_forward():
                leaves = Keep.apply(torch.ones(64, requires_grad=True) * 1)
                limits.contributor("arbiter").bound("spills_in_flight", 0)
                stays = Keep.apply(torch.ones(64, requires_grad=True) * 1)
                assert runtime.engine.transfers.in_flight() == (1, 0), "nor for what is on its way"
            (leaves + stays).sum().backward()
            runtime.step_end()
        outputs = save_all(runtime, sources(3))
        for output in outputs:
            output.sum().backward()
        metrics = runtime.step_end()
        assert (metrics.activations_saved, metrics.activations_spilled) == (3, 0)
        assert metrics.stall_count == 0
        runtime.close()
        assert limits.held_by("spills_in_flight") == ("arbiter" if by == "arbiter" else "")


@pytest.mark.req("S0-18")
def test_time_in_inline_finalize_is_counted_as_stall() -> None:
    with reactive(lambda: FULL, executor="late") as runtime:
        outputs = save_all(runtime, sources(4))
        metrics = runtime.step_end()
        assert metrics.stall_count == 4, "no copy had ended when it was waited for"
        assert metrics.stall_time_ms > 0
        del outputs
    with reactive(lambda: FULL, executor="early") as runtime:
        outputs = save_all(runtime, sources(4))
        metrics = runtime.step_end()
        assert (metrics.stall_count, metrics.stall_time_ms) == (0, 0.0)
        del outputs


@pytest.mark.req("S0-9")
def test_a_finalized_spill_has_given_its_device_memory_back() -> None:
    engine = engine_of()
    meter = LivingStorages(engine.device)  # type: ignore[arg-type]
    with meter, reactive(lambda: FULL, engine=engine) as runtime:
        tensors = sources(4)
        with runtime.managed_forward():
            outputs = [Keep.apply(tensor) for tensor in tensors]
            del tensors
            before = meter.allocated()
            spilling = list(runtime.registry.iter_spilling())
            assert sum(record.nbytes for record in spilling) == TENSOR
            held: list[bool] = []
            runtime.transfer.finalize_all_spills(
                record for record in spilling if not held.append(holds_lock(engine))
            )
            assert held == [True], "other threads wait"
            assert before - meter.allocated() == TENSOR
            assert list(runtime.registry.iter_spilling()) == []
        del outputs


@pytest.mark.req("S0-11")
def test_between_the_marks_spilling_goes_on() -> None:
    readings = [EMPTY, LOW, FULL, LOW, EMPTY, LOW]
    with reactive(list(readings)) as runtime:
        outputs = save_all(runtime, sources(len(readings)))
        metrics = runtime.step_end()
        assert metrics.activations_spilled == 2, "at the mark, and until below the low one"
        del outputs


@pytest.mark.req("S0-43", "S0-44", "S0-33")
def test_hits_and_misses_of_the_fixed_pool_are_the_spilled_tensors() -> None:
    with reactive(lambda: FULL, pinned_pool_classes_mb=(1,), slabs_per_class=2) as runtime:
        outputs = save_all(runtime, sources(5))
        assert runtime.pool.free_slabs == {MIB: 0}
        for output in outputs:
            output.sum().backward()
        metrics = runtime.step_end()
        assert (metrics.pool_hits, metrics.pool_misses) == (2, 3)
        assert metrics.activations_spilled == 5
        assert metrics.spill_bytes == 5 * TENSOR
        del outputs, output
        runtime.step_end()
        assert runtime.pool.free_slabs == {MIB: 2}


@pytest.mark.req("S0-60")
def test_a_checksum_that_does_not_match_is_an_error() -> None:
    with reactive(lambda: FULL, debug_checksums=True) as runtime:
        (output,) = save_all(runtime, sources(1))
        (record,) = list(runtime.registry)
        record.buffer.extents[0].numpy()[3] ^= 1
        with pytest.raises(
            OffloadError, match=r"32,768 bytes in host memory are not the ones that .*checksum"
        ):
            output.sum().backward()
        assert runtime.engine.transfers.audit
    assert not runtime.engine.transfers.audit


@pytest.mark.req("S0-63", "S0-51")
def test_a_tensor_below_the_threshold_is_kept_unless_recompute_is_not_preferred() -> None:
    with reactive(lambda: FULL, recompute_threshold_bytes=TENSOR + 1) as runtime:
        outputs = save_all(runtime, sources(2))
        metrics = runtime.step_end()
        assert metrics.activations_spilled == 0
        runtime.checkpoints.prefer_recompute = False
        outputs += save_all(runtime, sources(2))
        metrics = runtime.step_end()
        assert metrics.activations_spilled == 2
        del outputs


def test_an_operator_that_writes_what_it_has_saved_is_waited_for() -> None:
    """rrelu hands its noise to autograd and draws it afterwards."""

    def loss_of(model: torch.nn.Module, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return torch.nn.functional.rrelu(model(x), training=True).square().mean()

    plain = train(blocks(2), None, loss_of=loss_of)
    with reactive(lambda: FULL, executor="early") as runtime:
        assert train(blocks(2), runtime, loss_of=loss_of) == plain


def test_the_simulated_device_wants_a_meter() -> None:
    with pytest.raises(ValueError, match="the simulated device counts no others; give memory_allocated="):
        ActivationRuntime(engine=engine_of(), order="reactive")


@pytest.mark.req("S0-72", "S0-41", "S0-44")
def test_the_sources_sample_step_has_its_counts_and_its_hit_rate() -> None:
    """636 saved, of which the first 214 are kept; of 422 that leave, 412 fit slabs of 1 MiB. The ten larger
    ones find the eight larger slabs."""
    small, large = 900_000, 2_300_000
    sizes = [small] * (214 + 412) + [large] * 10
    readings = iter([EMPTY] * 214 + [FULL] * 422)
    fields = {"pinned_pool_classes_mb": (1, 4, 16, 64, 256), "slabs_per_class": (512, 2, 2, 2, 2)}
    with reactive(lambda: next(readings), executor="early", **fields) as runtime:
        source = torch.zeros(large // 4)
        outputs = []
        with runtime.managed_forward():
            for nbytes in sizes:
                outputs.append(Keep.apply(source[: nbytes // 4].clone().requires_grad_())[:1])
        metrics = runtime.step_end()
        del outputs
    assert (metrics.activations_saved, metrics.activations_kept) == (636, 214)
    assert metrics.activations_spilled == 422
    assert metrics.spill_bytes == 412 * small + 10 * large == 393_800_000
    assert (metrics.pool_hits, metrics.pool_misses) == (420, 2)
    assert metrics.pool_hits / metrics.activations_spilled >= 0.98

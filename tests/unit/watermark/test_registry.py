"""The records of a step, as the source system names them."""

from __future__ import annotations

import pytest
import torch

from offload.compat.stagehand.activations import ActivationRecord, ActivationRuntime, ActivationState
from offload.errors import RecordStateError
from offload.saved.handles import Handle
from tests.unit.watermark.training import TENSOR, WIDTH, batch, runtime_of

State = ActivationState


def saved(runtime: ActivationRuntime, count: int = 3) -> list[Handle]:
    tensors = [(batch(seed).requires_grad_() * 1).t() for seed in range(count)]
    with runtime.managed_forward():
        return [runtime.engine.hooks.pack(tensor) for tensor in tensors]


@pytest.mark.req("S0-36", "S0-37")
def test_a_record_says_all_of_its_tensor_and_is_found_by_handle_and_by_id() -> None:
    with runtime_of(high=1 << 30, low=1 << 30) as runtime:
        (handle,) = saved(runtime, 1)
        record = runtime.registry.get(handle)
        assert runtime.registry.get(record.id) == record
        assert str(record.id) == "forward 0/saved#0[0]"
        assert record.state is State.KEPT
        assert (record.shape, record.stride, record.offset) == ((WIDTH, 128), (1, WIDTH), 0)
        assert (record.dtype, record.device) == (torch.float32, torch.device("cpu"))
        assert record.nbytes == record.logical_bytes == TENSOR
        assert (record.buffer, record.event) == (None, None)
        label = record.id
        del record, handle
        assert runtime.registry.get(label) is None, "nothing keeps it alive but its graph"


@pytest.mark.req("S0-16", "S0-35", "S0-37")
def test_records_are_iterated_by_state_and_cleared() -> None:
    with runtime_of(high=1 << 30, low=1 << 30) as runtime:
        handles = saved(runtime)
        registry, transfers = runtime.registry, runtime.engine.transfers
        blocks = [handle.record.block for handle in handles]

        def states() -> list[State]:
            return [record.state for record in registry]

        assert states() == [State.KEPT] * 3
        runtime.transfer.spill(blocks[:2])
        assert states() == [State.SPILLING, State.SPILLING, State.KEPT]
        assert [record.block for record in registry.iter_spilling()] == blocks[:2]
        assert runtime.transfer.can_spill()
        runtime.transfer.finalize_all_spills(registry.iter_spilling())
        assert states() == [State.SPILLED, State.SPILLED, State.KEPT]
        assert next(registry.iter_by_state(State.SPILLED)).event is not None
        transfers.restore([blocks[0]], 1)  # type: ignore[arg-type]
        assert states()[0] is State.RESTORING
        transfers.ready(blocks[0])
        assert states()[0] is State.RESTORED
        kept = next(registry.iter_by_state(State.KEPT))
        transfers.release(blocks[2])
        assert kept.state is State.RELEASED
        assert len(registry) == 3
        registry.clear()
        assert len(registry) == 0


@pytest.mark.req("S0-35")
def test_a_move_that_a_state_does_not_allow_raises() -> None:
    with runtime_of(high=1 << 30, low=1 << 30) as runtime:
        (handle,) = saved(runtime, 1)
        record = runtime.registry.get(handle)
        assert isinstance(record, ActivationRecord)
        with pytest.raises(
            RecordStateError, match=r"forward 0/saved#0\[0\] \(32,768 bytes\) cannot move RES"
        ):
            record.move_to(State.SPILLED)

"""Selective checkpoints: what is refused, and what was asked for and does not happen is said once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from offload import (
    OffloadError,
    PipelineOffloadManager,
    group_commit,
    group_start,
    init_chunk_handler,
    selective_contexts,
    step_end,
)
from tests.unit.checkpoint.regions import (
    BLOCKS,
    FC1_BYTES,
    MM,
    Block,
    assert_bits,
    build_blocks,
    forward,
    kept,
    plain,
    source,
    train,
    train_step,
)

pytestmark = pytest.mark.usefixtures("manager")

aten = torch.ops.aten


# -- what is kept --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keep_ops", "message"),
    [
        ({aten.mm}, r"aten.mm, which is a family of operators; name one of it, such as aten.mm.default"),
        ({aten.add_.Tensor}, r"aten.add_.Tensor writes to its inputs"),
        ({aten.mm.out}, r"aten.mm.out writes to its inputs"),
        ({aten.view.default}, r"aten.view.default returns a view of its input"),
        ([aten.split.Tensor], r"aten.split.Tensor returns a view of its input"),
        ({torch.mm}, r"a builtin_function_or_method; must be an operator such as torch.ops.aten.mm.default"),
        (set(), r"keep_ops is empty"),
        (
            "mm",
            r"keep_ops is a str, must be a set of operators, a set of pairs \(operator, call number\), or",
        ),
        ({(MM, 0), MM}, r"keep_ops holds .*aten.mm.* beside pairs; must be all operators, or all pairs"),
        ({(MM, -1)}, r"keep_ops holds \(.*, -1\) beside pairs"),
        ({(aten.t.default, 0)}, r"aten.t.default returns a view of its input"),
        (None, r"keep_ops is a NoneType"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_runs(keep_ops: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selective_contexts(keep_ops)


def test_a_group_needs_a_name() -> None:
    with pytest.raises(ValueError, match="group is '', must be a non-empty string"):
        selective_contexts({MM}, group="")


# -- policies ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("yes", "no"),
    [
        (True, False),
        (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE),
        (CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.MUST_RECOMPUTE),
        *[(member, False) for member in CheckpointPolicy if member.name.endswith("CPU_OFFLOAD")],
    ],
)
def test_a_policy_chooses_call_by_call_and_is_asked_in_the_forward_only(yes: Any, no: Any) -> None:
    """The first product of every other call is kept; a view operator is asked about and never kept."""
    asked: list[tuple[str, bool, bool]] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append((str(op), ctx.is_recompute, isinstance(ctx.op_output, (Tensor, tuple))))
        return yes if op is MM and args[0].size(1) < args[1].size(1) else no

    blocks = build_blocks()
    expected = train(blocks, plain)
    init_chunk_handler(None, None, 1)
    x = source()
    loss = forward(blocks, x, lambda block, h: kept(block, h, policy))
    calls = len(asked)
    loss.backward()
    assert len(asked) == calls
    assert set(asked) == {(name, False, True) for name, *_ in asked}
    assert not any(name.startswith("aten.detach") for name, *_ in asked)
    stats = step_end()
    assert (stats.saved, stats.spill_bytes) == (BLOCKS, BLOCKS * FC1_BYTES)
    x.grad = None
    for parameter in blocks.parameters():
        parameter.grad = None
    assert_bits(expected, train_step(blocks, lambda block, h: kept(block, h, policy))[0])


def test_a_policy_is_not_asked_about_what_the_engine_computes(manager: PipelineOffloadManager) -> None:
    """A commit inside the region copies; counted as the region's, its calls would be missed in the
    recompute."""

    class Marked(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = group_commit(self.fc1(group_start(self.norm(x), "fc1")).tanh(), "fc1")
            return x + torch.tanh(self.fc2(h))

    def asked() -> list[str]:
        names: list[str] = []

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            names.append(str(op))
            return op is MM

        stats = train_step(build_blocks(Marked), lambda block, h: kept(block, h, policy))[1]
        spilled.append(stats.spilled)
        return names

    spilled: list[int] = []
    with_copies = asked()
    manager.disable_offload()
    assert asked() == with_copies
    assert spilled == [2 * BLOCKS, 0]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda ctx, op, *args, **kwargs: op is aten.t.default, "aten.t.default returns a view of its input"),
        (
            lambda ctx, op, *args, **kwargs: "keep",
            r"the policy answered 'keep' for aten\..*; must be a bool or",
        ),
    ],
)
def test_a_policy_that_keeps_a_view_or_answers_otherwise_is_refused(policy: Any, message: str) -> None:
    init_chunk_handler(None, None, 1)
    with pytest.raises(ValueError, match=message):
        forward(build_blocks(), source(), lambda block, h: kept(block, h, policy))


# -- a region that does not repeat itself --------------------------------------------------------------------
def test_a_recompute_that_calls_the_operator_on_other_inputs_is_an_error() -> None:
    wide, narrow = torch.randn(16, 32, requires_grad=True), torch.randn(16, 16, requires_grad=True)

    def body(x: Tensor) -> Tensor:
        weights = (wide, narrow) if torch._C._current_graph_task_id() == -1 else (narrow, wide)
        return torch.cat([torch.sin(x @ weight) for weight in weights], dim=1).tanh()

    init_chunk_handler(None, None, 1)
    y = kept(body, source() * 1.0)  # type: ignore[arg-type]
    message = (
        r"call 0 of aten.mm.default in a checkpointed region had inputs float32\[12, 16\], float32\[16, 32\] "
        r"in the forward and "
        r"float32\[12, 16\], float32\[16, 16\] in the recompute"
    )
    with pytest.raises(OffloadError, match=message):
        y.sum().backward()
    with pytest.raises(OffloadError, match="the recompute of region 1 of a step"):
        step_end()


def test_a_recompute_that_calls_the_operator_once_more_is_an_error() -> None:
    weight = torch.randn(16, 16, requires_grad=True)

    def body(x: Tensor) -> Tensor:
        again = torch._C._current_graph_task_id() != -1
        y = torch.sin(x @ weight)
        if again:
            x.detach() @ weight.detach()
        return torch.tanh(y * x)

    init_chunk_handler(None, None, 1)
    y = kept(body, source() * 1.0)  # type: ignore[arg-type]
    with pytest.raises(
        OffloadError,
        match=r"aten.mm.default was called 1 times in the forward of a checkpointed region and once more",
    ):
        y.sum().backward()


# -- said once -----------------------------------------------------------------------------------------------
def test_operators_that_are_never_called_are_named_once_with_those_that_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)
    for _ in range(3):
        found, stats = train_step(
            blocks, lambda block, h: kept(block, h, {aten.addmm.default, aten.bmm.default})
        )
        assert_bits(expected, found)
        assert stats.saved == 0
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert f"{BLOCKS} checkpointed forwards called none of aten.addmm.default, aten.bmm.default" in message
    assert "aten.mm.default" in message.split("They called", 1)[1]


def test_a_policy_that_keeps_nothing_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def nothing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return False

    train_step(build_blocks(), lambda block, h: kept(block, h, nothing))
    (record,) = caplog.records
    assert "called none of what policy" in record.getMessage()
    assert "nothing asks for" in record.getMessage()

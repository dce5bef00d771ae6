"""torch's own checkpoints, patched so that their input leaves."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import PipelineOffloadManager, group_commit, group_start, init_chunk_handler, step_end
from offload.compat import hidden_states as drop_in
from offload.compat.hidden_states import hidden_states_offload
from tests.loops import ended_step
from tests.unit.checkpoint.recomputed import (
    BLOCKS,
    INPUT_BYTES,
    ROWS,
    Block,
    Model,
    assert_bits,
    source,
    train,
    values,
)
from tests.unit.checkpoint.regions import noted_reads

Manager = PipelineOffloadManager
ORIGINAL = torch_checkpoint.CheckpointFunction
GENERATOR = getattr(torch_checkpoint, drop_in._GENERATOR)
VARIANTS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    offload.unpatch_hidden_states_offload()
    assert torch_checkpoint.CheckpointFunction is ORIGINAL


class Checkpointed(Model):
    """Calls torch's checkpoint itself."""

    reentrant = True

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        h = x * 1.0
        for block in self.blocks:
            h = checkpoint(block, h, *args, use_reentrant=self.reentrant, **kwargs)
        return h


def checkpointed(reentrant: bool, kind: Any = Block) -> Checkpointed:
    torch.manual_seed(0)
    model = Checkpointed([kind() for _ in range(BLOCKS)])
    model.reentrant = reentrant
    return model


# -- what leaves ---------------------------------------------------------------------------------------------
@pytest.mark.req("S4-11", "S4-25", "S4-41")
@VARIANTS
def test_a_model_that_checkpoints_trains_with_the_bits_of_torchs_own_while_inputs_leave(
    manager: Manager, reentrant: bool
) -> None:
    """Nothing is announced: forwards and steps are found. dropout: the random state is torch's matter."""
    model = checkpointed(reentrant, lambda: Block(dropout=0.25))
    plain = copy.deepcopy(model)
    expected = [train(plain, seed=step) for step in range(4)]
    offload.patch_hidden_states_offload(model)
    assert torch_checkpoint.CheckpointFunction is not ORIGINAL
    found = [train(model, seed=step) for step in range(4)]
    for one, other in zip(expected, found, strict=True):
        assert_bits(one, other)
    assert manager.engine.step == 3  # the fourth ends when the next forward begins
    assert manager.stats.saved == BLOCKS
    assert manager.stats.spill_bytes == BLOCKS * INPUT_BYTES
    stats = ended_step()
    assert stats.saved == BLOCKS


@pytest.mark.req("S4-18")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("manager")
def test_parity_with_plain_reentrant_checkpoints_is_bitwise_in_both_precisions(dtype: torch.dtype) -> None:
    model = checkpointed(True).to(dtype)
    plain = copy.deepcopy(model)
    expected = train(plain, x=source().detach().to(dtype).requires_grad_())
    with hidden_states_offload():
        found = train(model, x=source().detach().to(dtype).requires_grad_())
    assert_bits(expected, found)
    stats = ended_step()
    assert stats.spill_bytes == BLOCKS * INPUT_BYTES * dtype.itemsize // 4


@pytest.mark.req("S4-2")
@VARIANTS
def test_a_mask_that_the_blocks_share_stays(manager: Manager, reentrant: bool) -> None:
    model = checkpointed(reentrant)
    plain = copy.deepcopy(model)
    mask = torch.rand(ROWS, ROWS)
    expected = train(plain, mask)
    with hidden_states_offload():
        found = train(model, mask)
    assert_bits(expected, found)
    stats = ended_step()
    assert (stats.saved, stats.spill_bytes) == (BLOCKS, BLOCKS * INPUT_BYTES)


@pytest.mark.req("S4-8", "S4-9")
@VARIANTS
def test_requires_grad_and_autocast_are_those_of_the_forward(manager: Manager, reentrant: bool) -> None:
    seen: list[tuple[bool, bool]] = []

    class Watching(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            seen.append((x.requires_grad, torch.is_autocast_enabled("cpu")))
            return super().forward(x, mask)

    model = checkpointed(reentrant, Watching)
    with hidden_states_offload(), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(source()).float().sum()
    loss.backward()
    step_end()
    assert seen == [(True, True)] * 2 * BLOCKS


@pytest.mark.req("S4-47")
@VARIANTS
def test_whoever_announces_forwards_is_believed(manager: Manager, reentrant: bool) -> None:
    model = checkpointed(reentrant)
    with hidden_states_offload():
        for _ in range(2):
            losses = []
            for microbatch in range(2):
                init_chunk_handler(None, None, 1)
                losses.append(model(source(microbatch)).square().mean())
            with noted_reads(manager) as reads:
                for loss in losses:
                    loss.backward()
            stats = ended_step()
            assert stats.saved == 2 * BLOCKS
            chunks = [label.partition("/")[0] for label in reads]
            assert chunks == ["s0m0"] * BLOCKS + ["s0m1"] * BLOCKS
    assert manager.engine.step == 2


# -- torch's errors, and where nothing leaves ----------------------------------------------------------------
@pytest.mark.req("S4-12")
def test_gradients_asked_for_by_inputs_raise_what_torch_raises(manager: Manager) -> None:
    model = checkpointed(True)
    for ask in (lambda y, x: torch.autograd.grad(y, [x]), lambda y, x: y.backward(inputs=[x])):
        messages = []
        for patched in (False, True):
            if patched:
                offload.patch_hidden_states_offload()
            x = source()
            y = model(x).sum()
            with pytest.raises(RuntimeError, match=r"incompatible with \.grad\(\)") as raised:
                ask(y, x)
            messages.append(str(raised.value))
            offload.unpatch_hidden_states_offload()
        assert messages[0] == messages[1]


@pytest.mark.req("S4-12")
def test_an_output_that_requires_no_gradient_raises_what_torch_raises(manager: Manager) -> None:
    def body(x: Tensor) -> Tensor:
        return x.detach() * 2

    offload.patch_hidden_states_offload()
    y = checkpoint(body, source() * 1.0, use_reentrant=True)
    with pytest.raises(RuntimeError, match="none of output has requires_grad=True"):
        y.sum().backward()


@pytest.mark.req("S4-45")
@VARIANTS
def test_without_gradients_and_in_a_backward_that_never_runs_nothing_stays(
    manager: Manager, reentrant: bool
) -> None:
    model = checkpointed(reentrant)
    with hidden_states_offload():
        with torch.no_grad():
            model(source())
        assert manager.engine.transfers.device_bytes == 0
        dropped = model(source())
        del dropped
        train(model)


@VARIANTS
def test_an_exception_in_the_function_leaves_no_hooks(manager: Manager, reentrant: bool) -> None:
    def body(x: Tensor) -> Tensor:
        raise KeyError("in the function")

    with hidden_states_offload(), pytest.raises(KeyError, match="in the function"):
        checkpoint(body, source() * 1.0, use_reentrant=reentrant)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    expected, model = train(checkpointed(reentrant)), checkpointed(reentrant)
    with hidden_states_offload():
        assert_bits(expected, train(model))


def test_a_checkpoint_that_cannot_begin_leaves_no_group_open(manager: Manager) -> None:
    def no_contexts() -> Any:
        raise ValueError("no contexts")

    with hidden_states_offload(), pytest.raises(ValueError, match="no contexts"):
        checkpoint(torch.sin, source() * 1.0, use_reentrant=False, context_fn=no_contexts)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    handler = manager.cur_forward_chunk()
    assert handler.innermost_open() is None


@VARIANTS
def test_while_offload_is_switched_off_no_forward_begins(manager: Manager, reentrant: bool) -> None:
    manager.disable_offload()
    with hidden_states_offload():
        train(checkpointed(reentrant))
    assert manager.cur_forward_chunk() is None


def test_a_checkpoint_inside_a_checkpoint_is_torchs_own(manager: Manager) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.first, x, use_reentrant=False)
            return checkpoint(self.second, y, use_reentrant=False)

    for reentrant in (True, False):
        model = checkpointed(reentrant, Nested)
        expected = train(model)
        with hidden_states_offload():
            assert_bits(expected, train(model))
        stats = ended_step()
        assert stats.saved == BLOCKS


def test_a_second_backward_raises_or_works_as_torchs_own(manager: Manager) -> None:
    model = checkpointed(True)
    plain = copy.deepcopy(model)

    def run(module: Model) -> list[Tensor]:
        x = source()
        loss = module(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return values(module, x)

    expected = run(plain)
    with hidden_states_offload():
        assert_bits(expected, run(model))


@pytest.mark.skipif(torch.__version__ < "2.14", reason="torch's selective checkpoints show hooks nothing")
@pytest.mark.parametrize("in_group", [False, True])
def test_what_torchs_selective_checkpoint_keeps_leaves_with_the_group_around_it_if_it_is_asked_to(
    manager: Manager, in_group: bool
) -> None:
    """And the drop-in takes its input alone, as ever."""

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        first, x = nn.Linear(ROWS, ROWS), torch.rand(ROWS, ROWS, requires_grad=True)
        init_chunk_handler()
        y = group_start(x, "block", hooks=in_group) * 1.0
        asked = {"context_fn": contexts, "respect_saved_tensors_hooks": True}
        y = checkpoint(lambda y: first(y).sin().cos(), y, use_reentrant=False, **asked)
        group_commit(y, "block").square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(weight.grad for weight in first.parameters() if weight.grad is not None)]

    contexts = partial(torch_checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    expected = run()
    step_end()
    with nullcontext() if in_group else hidden_states_offload():
        found = run()
    assert_bits(expected, found)
    stats = ended_step()
    assert stats.saved == 1 + in_group  # its input, and what it keeps


# -- the patch itself ----------------------------------------------------------------------------------------
@VARIANTS
def test_a_torch_whose_checkpoints_save_elsewhere_is_an_error_and_stays_as_it_is(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 2.14 on `checkpoint` called another generator: the replaced one was still there, nobody asked it,
    and nothing left. Here it calls what the drop-in does not know."""
    name = "_FUNCTION" if reentrant else "_GENERATOR"
    known = getattr(drop_in, name)
    former = getattr(torch_checkpoint, known)
    monkeypatch.setattr(torch_checkpoint, "former", former, raising=False)
    monkeypatch.setattr(drop_in, name, "former")
    drop_in._check_torch.cache_clear()
    said = f"saves the input of a {'' if reentrant else 'non-'}reentrant checkpoint elsewhere"
    for _ in range(2):
        with pytest.raises(offload.OffloadError, match=said), hidden_states_offload():
            raise AssertionError("not reached")
    assert torch_checkpoint.CheckpointFunction is ORIGINAL
    assert not drop_in._replaced


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_the_check_of_torch_runs_once_and_moves_nothing(around: Any, manager: Manager) -> None:
    drop_in._check_torch.cache_clear()
    states = torch.get_rng_state()
    with around(), hidden_states_offload():
        assert manager.cur_forward_chunk() is None
    assert drop_in._check_torch.cache_info().currsize == 1
    assert torch.equal(states, torch.get_rng_state())


@pytest.mark.req("S4-11")
def test_patching_twice_is_safe_and_unpatching_gives_back_the_very_original() -> None:
    offload.patch_hidden_states_offload()
    once = torch_checkpoint.CheckpointFunction
    offload.patch_hidden_states_offload()
    assert torch_checkpoint.CheckpointFunction is once
    assert issubclass(once, ORIGINAL)
    for _ in range(2):
        offload.unpatch_hidden_states_offload()
        assert torch_checkpoint.CheckpointFunction is ORIGINAL
        assert getattr(torch_checkpoint, drop_in._GENERATOR) is GENERATOR


@pytest.mark.req("S4-48")
def test_the_scoped_form_ends_with_its_with_and_leaves_an_outer_patch_on(manager: Manager) -> None:
    model = checkpointed(True)
    with hidden_states_offload():
        loss = model(source()).square().mean()
    assert torch_checkpoint.CheckpointFunction is ORIGINAL
    outside = model(source(2)).square().mean()
    (loss + outside).backward()
    stats = ended_step()
    assert stats.saved == BLOCKS  # of one of the two forwards
    with pytest.raises(KeyError), hidden_states_offload(), hidden_states_offload():
        raise KeyError("inside")
    assert torch_checkpoint.CheckpointFunction is ORIGINAL
    offload.patch_hidden_states_offload()
    with hidden_states_offload():
        pass
    assert torch_checkpoint.CheckpointFunction is not ORIGINAL


def test_a_patch_of_somebody_else_on_top_is_left_alone_which_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offload.patch_hidden_states_offload()

    class Theirs(ORIGINAL):  # type: ignore[misc,valid-type]
        pass

    monkeypatch.setattr(torch_checkpoint, "CheckpointFunction", Theirs)
    offload.unpatch_hidden_states_offload()
    assert torch_checkpoint.CheckpointFunction is Theirs
    assert getattr(torch_checkpoint, drop_in._GENERATOR) is GENERATOR
    assert "CheckpointFunction was replaced by somebody else" in caplog.text
    torch_checkpoint.CheckpointFunction = ORIGINAL  # type: ignore[misc]
    monkeypatch.undo()
    torch_checkpoint.CheckpointFunction = ORIGINAL  # type: ignore[misc]


@pytest.mark.req("S4-26")
def test_a_partly_frozen_model_is_refused() -> None:
    model = checkpointed(True)
    model.blocks[0].requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"4 of the 16 parameters of Checkpointed are frozen.*offload\.apply"
    ):
        offload.patch_hidden_states_offload(model)
    assert torch_checkpoint.CheckpointFunction is ORIGINAL
    with pytest.raises(ValueError, match=r"model is a str, must be a torch\.nn\.Module"):
        offload.patch_hidden_states_offload("model")  # type: ignore[arg-type]
    offload.patch_hidden_states_offload(model.requires_grad_(False))  # an evaluation


@pytest.mark.req("S4-27")
@pytest.mark.usefixtures("manager")
def test_a_model_with_an_adapter_is_patched_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = checkpointed(True)
    for block in model.blocks:
        block.fc1.requires_grad_(False)  # type: ignore[union-attr]
    model.peft_config = {}  # type: ignore[assignment]  # how peft's models are known
    expected = train(model)
    offload.patch_hidden_states_offload(model)
    assert_bits(expected, train(model))
    stats = ended_step()
    assert stats.saved == BLOCKS
    assert "has an adapter: checkpoints compute its frozen layers twice" in caplog.text

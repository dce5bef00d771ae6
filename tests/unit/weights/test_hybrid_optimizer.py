"""HybridDeviceOptimizer steps streamed weights where they wait: in their one copy on the host, and on the
device where their bytes stay there."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import offload
from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.optim import HybridDeviceOptimizer
from offload.optim.placing import Place
from offload.weights.weight import Weight
from tests.inside import impose
from tests.optim_pair import EXECUTORS, OVERLAPS, Overlap
from tests.unit.weights.streamed import (
    BLOCK_BYTES,
    BLOCKS,
    ROWS,
    WIDTH,
    Block,
    Model,
    Pair,
    squares,
    streamed,
)

SHARES = (0.0, 0.5, 1.0)  # of the elements, what the CPU steps
STAYING = {"host": 2, "12.3kB": 3, "30kB": BLOCKS}
"""Blocks that are on the device at once, by what `weights=` is given."""
ELEMENTS = BLOCKS * BLOCK_BYTES // 4


@pytest.fixture(params=OVERLAPS)
def overlap(request: Any) -> Overlap:
    return request.param


def close(optimizers: tuple[Optimizer, Optimizer]) -> None:
    for optimizer in optimizers:
        if isinstance(optimizer, HybridDeviceOptimizer):
            optimizer.close()


def test_only_steps_in_the_backward_queue_more_than_two_buckets_to_the_host(overlap: Overlap) -> None:
    """Four of 64 MiB take 16 ms, for which another client's copy would wait."""
    with streamed() as pair, pair.stepping(overlap) as optimizers:
        for _ in range(2):
            step(optimizers, pair)
        slots = 5 if overlap == "backward" else 3
        assert optimizers[0].ring_bytes == slots * 4096 * 4  # two moments, weights, gradients


def step(optimizers: tuple[Optimizer, Optimizer], pair: Pair, x: Tensor | None = None, **how: Any) -> None:
    x = torch.randn(ROWS, WIDTH) if x is None else x
    losses = [pair.model(x, **how).square().sum(), pair.plain(x, **how).square().sum()]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


# -- the same bits, and no byte more -------------------------------------------------------------------------
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("weights", STAYING)
def test_a_loop_has_the_bits_of_plain_torch_and_fetches_no_block_more(
    overlap: Overlap, share: float, weights: str
) -> None:
    """Each two of overlap, share and weights meet under each executor."""
    stay, nth = STAYING[weights], [*STAYING].index(weights)
    executor = EXECUTORS[(OVERLAPS.index(overlap) + SHARES.index(share) + nth) % 3]
    with (
        streamed(executor=executor, weights=weights) as pair,
        pair.stepping(overlap, cpu_share=share) as optimizers,
    ):
        pair.train(5, optimizers=optimizers)
        figures = pair.figures
        if overlap == "step":  # else a block whose step is not issued yet is fetched late, in another's place
            # as where all is frozen: the blocks that a pass used last are there for the next one
            assert figures.in_bytes == 2 * (BLOCKS - stay) * BLOCK_BYTES
        assert figures.out_bytes == 0  # the step itself writes the masters
        assert pair.stream.residency.present_bytes_peak == stay * BLOCK_BYTES


def test_a_block_has_weights_of_which_some_are_stepped_on_the_device(overlap: Overlap) -> None:
    """A step that claims the one sends no bytes of the other, which is written meanwhile."""
    with streamed(weights="30kB") as pair:
        made = [
            [getattr(layer, name).weight for name in ("up", "down") for layer in model.layers]
            for model in (pair.model, pair.plain)
        ]
        ours = HybridDeviceOptimizer(
            made[0], 0.5, overlap=overlap, model=pair.model, engine=pair.stream._engine, lr=1e-2, fused=True
        )
        pair.train(4, optimizers=(ours, AdamW(made[1], lr=1e-2, fused=True)))
        ours.close()


def test_a_step_that_holds_weights_beside_the_devices_part_is_nobody_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with streamed() as pair:
        ours = HybridDeviceOptimizer(pair.model.parameters(), 0.5, engine=pair.stream._engine)
        for _ in range(2):
            for _ in range(2):
                squares(pair.model, torch.ones(ROWS, WIDTH)).backward()
            ours.step()
            ours.zero_grad()
        assert "something else holds their memory" not in caplog.text
        pair.model.load_state_dict(pair.plain.state_dict())
        ours.close()


@pytest.mark.parametrize("share", SHARES)
def test_masters_of_half_precision_weights(overlap: Overlap, share: float) -> None:
    """Each overlap, and each share, under each kind of checkpoint."""
    reentrant = (None, False, True)[(OVERLAPS.index(overlap) + SHARES.index(share)) % 3]
    model = Model(reentrant=reentrant).to(torch.bfloat16)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x.to(torch.bfloat16).requires_grad_())

    with streamed(model) as pair, pair.stepping(overlap, masters=True, cpu_share=share) as optimizers:
        pair.train(5, loss, optimizers)


@pytest.mark.parametrize("gradients", ["host", "device"])
@pytest.mark.parametrize(("dtype", "per_element"), [(torch.float32, 8), (torch.bfloat16, 12)])
def test_weights_and_gradients_have_no_second_copy_on_the_host(
    dtype: torch.dtype, per_element: int, gradients: str
) -> None:
    """Moments and masters, and a gradient of each that does not wait on the host where the CPU steps."""
    with streamed(Model().to(dtype), gradients=gradients) as pair:
        weights = [w.parameter for block in pair.stream.blocks for w in block.weights]
        for share in (0.0, 1.0):
            ours = HybridDeviceOptimizer(
                weights, 1.0, cpu_share=share, param_update_in_fp32=True, engine=pair.stream._engine
            )
            assert ours.host_bytes == ELEMENTS * per_element
            squares(pair.model, torch.randn(ROWS, WIDTH, dtype=dtype)).backward()
            ours.step()
            copies = share == 1 and gradients == "device"
            assert ours.host_bytes == ELEMENTS * (per_element + 4 * copies)
            ours.close()
            pair.model.zero_grad()
        pair.model.load_state_dict(pair.plain.state_dict())


def test_a_settled_step_takes_no_memory(overlap: Overlap) -> None:
    with streamed() as pair:
        optimizers, arena = pair.with_state_on_host(overlap), pair.stream._engine.arena
        pair.train(3, optimizers=optimizers)
        before = arena.stats().lent_bytes, arena.held_bytes
        pair.train(3, optimizers=optimizers)
        assert (arena.stats().lent_bytes, arena.held_bytes) == before
        close(optimizers)


def test_a_block_that_is_stepped_on_the_device_leaves_once_its_step_is_issued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was to be used next, and is not: its step ends sooner rather than that more is on the device."""
    late: set[Weight] = set()
    is_under_way, await_step = Weight.is_under_way, Weight.await_step

    def issue(weight: Weight) -> None:
        late.discard(weight)
        await_step(weight)

    monkeypatch.setattr(
        Weight, "is_under_way", property(lambda weight: weight in late or is_under_way.fget(weight))
    )
    monkeypatch.setattr(Weight, "await_step", issue)
    with streamed() as pair, pair.stepping("forward", cpu_share=1.0) as optimizers:
        pair.train(2, optimizers=optimizers)
        for model, optimizer in zip((pair.model, pair.plain), optimizers, strict=True):
            squares(model, torch.ones(ROWS, WIDTH)).backward()
            optimizer.step()
        assert pair.stream.residency.present_bytes_peak == 2 * BLOCK_BYTES
        late.update(each for block in pair.stream.blocks for each in block.weights if each.stepped_here)
        assert len(late) == 4, "of two blocks"
        x = torch.randn(ROWS, WIDTH)
        assert torch.equal(*(model(x, (0, 1, 2)) for model in (pair.model, pair.plain)))
        assert pair.stream.residency.present_bytes_peak == 2 * BLOCK_BYTES


def test_accumulation_clipping_and_a_scaler() -> None:
    for overlap in OVERLAPS[:2]:
        with streamed() as pair, pair.stepping(overlap) as optimizers:
            scalers = [torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2) for _ in range(2)]
            for number in range(5):
                for model, optimizer, scaler in zip(
                    (pair.model, pair.plain), optimizers, scalers, strict=True
                ):
                    for batch in range(2):
                        x = torch.randn(
                            ROWS, WIDTH, generator=torch.Generator().manual_seed(2 * number + batch)
                        )
                        scaler.scale(squares(model, x) * (math.inf if number == 3 else 1)).backward()
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
            pair.check_weights()


def test_microbatches_of_a_step_in_the_backward() -> None:
    with streamed() as pair, pair.stepping("backward") as optimizers:
        for _ in range(4):
            with optimizers[0].no_sync():
                for model in (pair.model, pair.plain):
                    squares(model, torch.ones(ROWS, WIDTH)).backward()
            step(optimizers, pair)
        pair.check_weights()


# -- who else has the weights --------------------------------------------------------------------------------
def test_writes_between_steps_count_wherever_they_are_made(overlap: Overlap) -> None:
    for share in SHARES:
        with streamed() as pair, pair.stepping(overlap, cpu_share=share) as optimizers:
            for number in range(4):
                step(optimizers, pair)
                for model in (pair.model, pair.plain):
                    with torch.no_grad():
                        model.layers[number].up.weight.mul_(0.5)
                    model.state_dict()[f"layers.{number + 1}.down.weight"][2].add_(0.25)
                    model.layers[2].up.weight.data = torch.full((2 * WIDTH, WIDTH), 0.1)
            pair.check_weights()


@pytest.mark.parametrize("share", SHARES)
def test_masters_follow_writes_too(share: float) -> None:
    with (
        streamed(Model().to(torch.bfloat16)) as pair,
        pair.stepping("forward", masters=True, cpu_share=share) as optimizers,
    ):
        for optimizer in optimizers:
            optimizer.dummy_step()
            assert all(torch.equal(state["master_param"], p) for p, state in optimizer.state.items())
        for number in range(5):
            step(optimizers, pair, torch.randn(ROWS, WIDTH).to(torch.bfloat16))
            for model in (pair.model, pair.plain):
                with torch.no_grad():
                    model.layers[number].up.weight.mul_(0.75)
                model.state_dict()["layers.1.down.weight"][2].add_(0.25)
        pair.check_weights()


def test_a_state_dict_that_a_step_in_the_backward_makes_old_is_not_written() -> None:
    with streamed() as pair, pair.stepping("backward") as optimizers:
        step(optimizers, pair)  # which tells how many backwards a step has
        old = pair.model.state_dict()["layers.2.up.weight"]
        squares(pair.model, torch.ones(ROWS, WIDTH)).backward()
        old.mul_(2)
        with pytest.raises(OffloadError, match="or stepped, so it was an old one"):
            optimizers[0].step()
        pair.model.load_state_dict(pair.plain.state_dict())
        del old


@pytest.mark.parametrize("kind", ["torch's", *OVERLAPS])
def test_a_state_dict_that_somebody_has_is_the_stepped_one_and_may_be_written(kind: Any) -> None:
    """torch.distributed.checkpoint takes the model's, steps an optimizer that has no state, at a rate of 0,
    and loads into what it took: the write was an error."""
    with streamed() as pair:
        optimizers = pair.optimizers() if kind == "torch's" else pair.with_state_on_host(kind)
        models = pair.model, pair.plain
        given = [get_state_dict(*each) for each in zip(models, optimizers, strict=True)]
        generator = torch.Generator().manual_seed(1)
        new = {name: torch.rand(value.shape, generator=generator) for name, value in given[0][0].items()}
        for model, optimizer, (weights, state) in zip(models, optimizers, given, strict=True):
            for name, value in weights.items():
                value.copy_(new[name])
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        pair.check_weights()
        pair.train(2, optimizers=optimizers)
        for (name, mine), its in zip(given[0][0].items(), given[1][0].values(), strict=True):
            assert torch.equal(mine, its), name
        del given, weights, state, value, mine, its
        close(optimizers)


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_a_dummy_step_leaves_a_state_dict_that_may_be_written(fraction: float) -> None:
    with streamed() as pair:
        ours = HybridDeviceOptimizer(pair.model.parameters(), fraction, engine=pair.stream._engine)
        states = [model.state_dict() for model in (pair.model, pair.plain)]
        ours.dummy_step()
        for values in zip(*(state.values() for state in states), strict=True):
            for value in values:
                value.mul_(2)
        pair.model.load_state_dict(states[0])
        pair.check_weights()
        del states, values, value
        ours.close()


def test_reads_and_copies_at_any_moment_have_the_stepped_weights() -> None:
    x = torch.ones(ROWS, WIDTH)
    with streamed() as pair, pair.stepping("forward") as optimizers:
        for number in range(5):
            step(optimizers, pair)
            weights = [model.layers[2].down.weight for model in (pair.model, pair.plain)]
            if number == 0:
                assert torch.equal(*(weight.data.clone() for weight in weights))
            elif number == 1:
                assert torch.equal(copy.deepcopy(pair.model)(x), pair.plain(x))
            elif number == 2:
                assert torch.equal(*nn.utils.parameters_to_vector(weights).chunk(2))
            elif number == 3:
                with torch.inference_mode():
                    assert torch.equal(pair.model(x), pair.plain(x))
        pair.check_weights()


def test_state_is_by_parameter_and_goes_on_in_a_new_optimizer(overlap: Overlap) -> None:
    for share in SHARES:
        with streamed() as pair:
            ours, its = pair.with_state_on_host(overlap, cpu_share=share)
            pair.train(2, optimizers=(ours, its))
            assert set(ours.state) == set(pair.model.parameters())
            saved, model = copy.deepcopy(ours.state_dict()), copy.deepcopy(pair.model.state_dict())
            ours.close()
            pair.model.load_state_dict({name: value * 0 for name, value in model.items()})
            pair.model.load_state_dict(model)
            ours, _ = pair.with_state_on_host(overlap, cpu_share=share)
            ours.load_state_dict(saved)
            pair.train(2, optimizers=(ours, its))
            close((ours, its))


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_float32_weights_are_their_own_masters_and_their_state_loads(fraction: float) -> None:
    """A state dict of before a write has no old weight as a master."""
    with streamed() as pair:
        made = [
            HybridDeviceOptimizer(model.parameters(), fraction, param_update_in_fp32=True, engine=engine)
            for model, engine in (
                (pair.model, pair.stream._engine),
                (pair.plain, OffloadEngine(device="sim")),
            )
        ]
        for _ in range(3):
            step((made[0], made[1]), pair)
            for optimizer in made:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for model in (pair.model, pair.plain):
                with torch.no_grad():
                    model.layers[1].up.weight.mul_(0.5)
        assert "master_param" not in made[0].state[pair.model.layers[3].up.weight]
        close((made[0], made[1]))


def test_weights_that_are_given_back_end_the_optimizers_steps_and_keep_its_state(overlap: Overlap) -> None:
    with streamed() as pair:
        ours, its = pair.with_state_on_host(overlap)
        step((ours, its), pair)
        pair.handle.remove()
        pair.check_weights()
        squares(pair.model, torch.ones(ROWS, WIDTH)).backward() if overlap != "backward" else None
        with pytest.raises(OffloadError, match="is not any more"):
            ours.step()
        saved = ours.state_dict()
        ours.close()
        assert len(saved["state"]) == len(list(pair.model.parameters()))


def test_an_optimizer_that_is_closed_or_dropped_leaves_the_stepped_weights(overlap: Overlap) -> None:
    for dropped in (False, True):
        with streamed() as pair:
            ours, its = pair.with_state_on_host(overlap)
            step((ours, its), pair)
            if not dropped:
                ours.close()
            del ours
            gc.collect()
            pair.check_weights()
            pair.train(2, optimizers=pair.optimizers(fused=True))


# -- what trains may change ----------------------------------------------------------------------------------
@pytest.mark.parametrize("share", SHARES)
def test_blocks_that_are_frozen_skipped_or_never_used(overlap: Overlap, share: float) -> None:
    with streamed() as pair, pair.stepping(overlap, cpu_share=share) as optimizers:
        for number in range(8):
            trains = number % 4 < 2
            for model in (pair.model, pair.plain):
                model.layers[1].requires_grad_(trains)
                model.layers[4].up.requires_grad_(not trains)
            step(optimizers, pair, skip=(5, number % 3))
        pair.check_weights()


def test_two_optimizers_have_a_share_each_or_step_one_weight_in_turn(overlap: Overlap) -> None:
    with streamed() as pair:
        layers = [[*model.layers.parameters()] for model in (pair.model, pair.plain)]
        engine, made = pair.stream._engine, []
        second = slice(12, None) if overlap == "backward" else slice(8, None)  # which refuses a weight of two
        for part in (slice(0, 12), second):
            ours = HybridDeviceOptimizer(
                layers[0][part], 1.0, lr=1e-2, overlap=overlap, model=pair.model, engine=engine
            )
            made.append((ours, AdamW(layers[1][part], lr=1e-2, fused=True)))
        for _ in range(4):
            for model in (pair.model, pair.plain):
                squares(model, torch.ones(ROWS, WIDTH)).backward()
            for optimizers in made:
                for optimizer in optimizers:
                    optimizer.step()
            pair.model.zero_grad(), pair.plain.zero_grad()
        pair.check_weights()
        for optimizers in made:
            close(optimizers)


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_what_an_optimizer_keeps_on_the_device_steps_block_by_block(fraction: float) -> None:
    with streamed() as pair:
        ours = HybridDeviceOptimizer(
            pair.model.parameters(), fraction, lr=1e-2, fused=True, engine=pair.stream._engine
        )
        pair.train(4, optimizers=(ours, AdamW(pair.plain.parameters(), lr=1e-2, fused=True)))
        assert pair.stream.residency.present_bytes_peak == 2 * BLOCK_BYTES
        ours.close()


@pytest.mark.parametrize("share", [1.0])
def test_other_classes_of_torch_step_whole_weights_on_the_host(overlap: Overlap, share: float) -> None:
    with streamed() as pair:
        ours = HybridDeviceOptimizer(
            pair.model.parameters(),
            1.0,
            SGD,
            lr=1e-2,
            momentum=0.9,
            overlap=overlap,
            model=pair.model,
            engine=pair.stream._engine,
        )
        pair.train(4, optimizers=(ours, SGD(pair.plain.parameters(), lr=1e-2, momentum=0.9, fused=True)))
        ours.close()


# -- what is refused -----------------------------------------------------------------------------------------
def test_a_weight_that_is_touched_before_step_breaks_the_promise() -> None:
    with streamed() as pair:
        ours, _ = pair.with_state_on_host("backward")
        for _ in range(2):
            ours.step()
            ours.zero_grad()
            squares(pair.model, torch.ones(ROWS, WIDTH)).backward()
        with pytest.raises(OffloadError, match="were read or written before step"):
            pair.model.layers[2].up.weight.sum()
        pair.plain.load_state_dict(pair.model.state_dict())
        ours.close()


@pytest.mark.parametrize("change", ["to", "assign"])
def test_weights_that_are_converted_or_replaced_are_said(change: str, overlap: Overlap) -> None:
    with streamed() as pair:
        optimizers = pair.with_state_on_host(overlap)
        step(optimizers, pair)
        state = pair.plain.state_dict()
        if change == "to":
            pair.model.bfloat16()
            match = "build the optimizer after moving or converting"
        else:
            pair.model.load_state_dict(copy.deepcopy(state), assign=True)
            match = "or another parameter in its place"
        with pytest.raises(OffloadError, match=match):
            optimizers[0].step()
        close(optimizers)
        pair.model.float().load_state_dict(state)


def test_what_cannot_step_them_says_so() -> None:
    class Own(AdamW):
        pass

    with streamed() as pair:
        params, engine = [*pair.model.parameters()], pair.stream._engine
        for how in ({"cpu_optimizer_cls": Own}, {"atomic_step": True, "cpu_share": 1.0}):
            with pytest.raises(ValueError, match="steps copies of whole parameters"):
                HybridDeviceOptimizer(params, 1.0, lr=1e-2, engine=engine, **how)
        with pytest.raises(ValueError, match="by another engine"):
            HybridDeviceOptimizer(params, 1.0, engine=offload.OffloadEngine(device="sim"))


def test_int8_weights_are_left_out() -> None:
    with streamed(nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(3))}), frozen=True) as pair:
        engine = pair.stream._engine
        pair.handle.remove()
        handle = offload.apply(pair.model, weights="host", quantize="int8")
        optimizer = HybridDeviceOptimizer(pair.model.parameters(), 1.0, engine=engine)
        assert optimizer.place_of(next(pair.model.parameters())) is Place.FROZEN
        assert not optimizer.host_bytes
        optimizer.close()
        with pytest.raises(ValueError, match="waits on the host in INT8"):
            HybridDeviceOptimizer(pair.model.parameters(), 1.0, Adagrad, engine=engine)
        handle.remove()
        pair.model.load_state_dict(pair.plain.state_dict())


# -- gradients that a step in the backward has used ----------------------------------------------------------
@pytest.mark.parametrize("gradients", ["host", "device"])
@pytest.mark.parametrize("share", SHARES)
def test_they_take_no_memory_behind_their_step(
    gradients: str, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    with streamed(gradients=gradients) as pair:
        impose(pair.stream._engine, gradients_behind_bytes=BLOCK_BYTES)
        optimizers = pair.with_state_on_host("backward", cpu_share=share, bucket_bytes=1024)
        for _ in range(3):
            step(optimizers, pair)
        squares(pair.model, torch.ones(ROWS, WIDTH)).backward()
        streams = [weight.parameter for block in pair.stream.blocks for weight in block.weights]
        with torch._C.DisableTorchFunctionSubclass():
            held = sum(weight.grad.untyped_storage().nbytes() for weight in streams)  # type: ignore[union-attr]
        # what is not stepped yet, and the last; a bucket of two weights may find one's gradient on the host
        assert held <= BLOCK_BYTES * (1.5 if gradients == "device" else 3)
        optimizers[0].step()
        with pytest.raises(OffloadError, match=r"layers.2.up.weight.* was stepped in the backward"):
            pair.model.layers[2].up.weight.grad.sum()
        with pytest.raises(OffloadError, match=r"zero_grad\(set_to_none=True\)"):
            squares(pair.model, torch.ones(ROWS, WIDTH)).backward()
        pair.model.zero_grad()
        squares(pair.plain, torch.ones(ROWS, WIDTH)).backward()
        optimizers[1].step()
        pair.plain.zero_grad()
        assert not [record for record in caplog.records if "shares its memory" in record.message]
        close(optimizers)


def test_a_gradient_that_is_stepped_in_parts_may_have_been_lent_in_the_step_before() -> None:
    with streamed() as pair:
        impose(pair.stream._engine, gradients_behind_bytes=0)  # a part's step is waited for at once
        optimizers = pair.with_state_on_host("backward", bucket_bytes=1536)
        for _ in range(3):
            step(optimizers, pair)
        pair.check_weights()
        close(optimizers)


def test_the_waits_of_a_backward_for_its_steps_are_the_optimizers_stall() -> None:
    with streamed(executor="clock", gradients="device") as pair:
        share = impose(pair.stream._engine)
        optimizers = pair.with_state_on_host("backward", bucket_bytes=1024)
        found = []
        for nbytes in (None, None, 0, 0, 0):
            share.bound("gradients_behind_bytes", nbytes, replaces=("optim",))
            step(optimizers, pair)
            found.append(offload.report().as_dict()["kinds"]["optimizer"])
        assert found[4]["stall_ms"] > found[2]["stall_ms"]  # each is of the step before
        ring, (ours, _) = 5 * 3 * 1024, optimizers  # two moments, and weights that come in
        assert ours.ring_bytes == ring
        assert found[1]["device_bytes"] >= found[4]["device_bytes"] == ring + BLOCK_BYTES // 2
        close(optimizers)

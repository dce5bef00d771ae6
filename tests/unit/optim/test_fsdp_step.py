"""Shards on the host, stepped on the device: the bits of the optimizer itself, three buckets, and what FSDP2
must keep doing."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from offload import OffloadEngine
from offload.device.sim import ExecutorName, SimDevice
from offload.errors import OffloadError
from offload.modules.memory import parts_of
from offload.optim import FSDPGPUOptimizerWrapper, streamed_step
from tests.unit.optim.rig import assert_same_bits, backward, batch, broken_off, failing, net, train


def wrapped(
    model: nn.Module, cls: type[Optimizer] = Adam, *, executor: ExecutorName = "late", **options: Any
) -> FSDPGPUOptimizerWrapper:
    engine = OffloadEngine(device=SimDevice(executor=executor))
    return FSDPGPUOptimizerWrapper(
        cls(model.parameters(), **{"lr": 1e-2, **options}), "cpu", engine=engine, bucket_bytes=2048
    )


@pytest.mark.req("S3-47")
@pytest.mark.parametrize("executor", get_args(ExecutorName))
@pytest.mark.parametrize(
    ("cls", "options"), [(Adam, {}), (Adam, {"amsgrad": True}), (AdamW, {"weight_decay": 0.1})]
)
def test_ten_steps_equal_the_optimizer_itself(
    cls: type[Optimizer], options: dict[str, Any], executor: ExecutorName
) -> None:
    reference, model = net(), net()
    expected = train(reference, cls(reference.parameters(), lr=1e-2, fused=True, **options), 10)  # type: ignore[call-arg]
    assert_same_bits(train(model, wrapped(model, cls, executor=executor, **options), 10), expected)


def test_parameters_that_join_or_change_their_group_are_stepped_with_its_values() -> None:
    """More join than there were; where they change nothing has to be placed, the groups alone are others."""
    found = []
    for make in (lambda inner: inner, lambda inner: FSDPGPUOptimizerWrapper(inner, "cpu", bucket_bytes=2048)):
        model = net()
        first, *others = model.parameters()
        optimizer = make(Adam([{"params": [first], "lr": 0.1}], lr=1e-3, fused=True))
        train(model, optimizer, 1)
        optimizer.add_param_group({"params": others})
        train(model, optimizer, 1)
        one, other = optimizer.param_groups
        one["params"], other["params"] = [others[0]], [first, *others[1:]]
        found.append(train(model, optimizer, 2, first=1))
    assert_same_bits(found[1], found[0])
    optimizer.close()


def test_a_closure_is_evaluated_once_a_step_and_its_loss_returned(model: nn.Module) -> None:
    optimizer = wrapped(model)
    losses: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        losses.append(backward(model, 0))
        return losses[-1]

    assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1
    optimizer.close()


@pytest.mark.parametrize("executor", get_args(ExecutorName))
@pytest.mark.parametrize("fails_in", ["the copies in", "the kernel", "the copies out"])
def test_a_step_that_breaks_off_is_over_when_its_error_arrives(
    fails_in: str, executor: ExecutorName, monkeypatch: pytest.MonkeyPatch, model: nn.Module
) -> None:
    """The second of three buckets. Its caller owns gradients and weights again: it zeroes those, and may load
    these."""
    optimizer = wrapped(model, executor=executor)
    device = optimizer.engine.device
    with monkeypatch.context() as patch:
        if fails_in == "the kernel":
            patch.setattr(streamed_step, "adam", failing(streamed_step.adam, 2))
        else:
            patch.setattr(SimDevice, "copy", broken_off(SimDevice.copy, 3 if fails_in.endswith("in") else 4))
        backward(model, 0)
        with pytest.raises(MemoryError, match="no more"):
            optimizer.step()
    for parameter in model.parameters():
        assert parameter.grad is not None
        for of_caller in (parameter.detach(), parameter.grad):
            device.note_write(device.host, of_caller.view(-1).view(torch.uint8))
    optimizer.zero_grad()
    train(model, optimizer, 3, first=1)
    optimizer.close()


@pytest.mark.req("S3-47")
def test_the_device_holds_three_buckets_whatever_the_number_of_parameters(model: nn.Module) -> None:
    """A bucket of 2048 bytes of weights: those, their gradients and two moments. Uneven sections make no
    bucket longer than that."""
    optimizer = wrapped(model)
    assert optimizer.ring_bytes <= 3 * 4 * 2048
    device = optimizer.engine.device
    before = device.active_bytes()
    train(model, optimizer, 1)
    leaves = sum(4 * parameter.numel() for parameter in model.parameters())
    assert device.active_bytes() <= before + 2 * leaves, (
        "weights and gradients are host memory that the checker has met"
    )


@pytest.mark.req("S3-46")
def test_param_groups_zero_grad_and_schedulers_are_the_optimizers_own() -> None:
    def run(model: nn.Module, optimizer: Any, scheduled: Optimizer) -> list[torch.Tensor]:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.8)
        for step in range(5):
            backward(model, step)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            assert all(p.grad is None if step % 2 == 0 else not p.grad.any() for p in model.parameters())
        return [parameter.detach().clone() for parameter in model.parameters()]

    reference, model = net(), net()
    plain = AdamW(reference.parameters(), lr=1e-2, fused=True)
    optimizer = wrapped(model, AdamW)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert_same_bits(run(model, optimizer, optimizer.optimizer), run(reference, plain, plain))


@pytest.mark.req("S3-46")
def test_state_goes_out_and_in_again_and_a_plain_optimizers_state_is_taken_over() -> None:
    reference, model = net(), net()
    plain = AdamW(reference.parameters(), lr=1e-2, fused=True)
    train(reference, plain, 2)
    model.load_state_dict(reference.state_dict())
    optimizer = wrapped(model, AdamW)
    optimizer.load_state_dict(plain.state_dict())
    expected = train(reference, plain, 2, first=2)
    assert_same_bits(train(model, optimizer, 2, first=2), expected)

    again = net()
    again.load_state_dict(model.state_dict())
    other = wrapped(again, AdamW)
    other.load_state_dict(optimizer.state_dict())
    assert_same_bits(train(again, other, 2, first=4), train(reference, plain, 2, first=4))
    with pytest.raises(ValueError, match="different number of parameter groups"):
        other.load_state_dict({"state": {}, "param_groups": []})


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    reference, model = net(), net()
    plain, optimizer = AdamW(reference.parameters(), lr=1e-2, fused=True), wrapped(model, AdamW)
    for step in range(4):
        for each, steps in ((reference, plain), (model, optimizer)):
            backward(each, step)
            list(each.parameters())[step].grad = None
            steps.step()
            steps.zero_grad()
    assert_same_bits([p.detach() for p in model.parameters()], [p.detach() for p in reference.parameters()])


def test_what_cannot_be_streamed_is_refused() -> None:
    with pytest.raises(
        ValueError, match="optimizer is a SGD, and only torch's Adam and AdamW can be streamed"
    ):
        wrapped(net(), SGD)
    with pytest.raises(ValueError, match=r"parameter 0 .* is on meta, not on the host"):
        FSDPGPUOptimizerWrapper(Adam([nn.Parameter(torch.zeros(3, device="meta"))]), "cpu")


# -- FSDP2 ---------------------------------------------------------------------------------------------------
@pytest.mark.req("S3-46")
@pytest.mark.usefixtures("one_rank")
def test_sharded_parameters_are_stepped_and_their_state_is_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    reference, model = net(), net()
    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = wrapped(model, AdamW)
    expected = train(reference, AdamW(reference.parameters(), lr=1e-2, fused=True), 3)
    for step in range(3):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        found.append(parameter.full_tensor().detach())
    assert_same_bits(found, expected)
    state = optimizer.state_dict()["state"]
    assert all(isinstance(of["exp_avg"], DTensor) for of in state.values())
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state_dict()["state"][0]["exp_avg"].to_local().equal(state[0]["exp_avg"].to_local())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_gradients_of_shards_are_counted_and_stepped_as_they_are_whatever_they_were_reduced_in(
    reduce_dtype: torch.dtype | None,
) -> None:
    """Without a reduce_dtype torch reduces in param_dtype up to 2.14, and from 2.15 on as the shards are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    found = []
    for wrap in (False, True):
        model = fully_shard(net(), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        optimizer = wrapped(model, AdamW) if wrap else AdamW(model.parameters(), lr=1e-2, fused=True)
        (counted,) = (
            part
            for part in parts_of(model, torch.device("cpu"), None, None, (), None, None)
            if part.kind == "gradients"
        )
        for step in range(2):
            optimizer.zero_grad()
            model(batch(step)).float().square().mean().backward()
            optimizer.step()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert counted.device_bytes == sum(
            each.to_local().nbytes for each in gradients if isinstance(each, DTensor)
        )
        found.append([parameter.full_tensor().detach() for parameter in model.parameters()])
    assert_same_bits(*found)


@pytest.mark.req("S3-48")
def test_fsdp2_still_does_what_the_wrapper_relies_on() -> None:
    """Read from torch's source: copies in on one stream, gradients out on another under an event that the
    host waits for, memory freed by resizing to nothing. A torch that does otherwise fails here, not in
    somebody's weights."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group

    gather, reduce = (
        inspect.getsource(_fsdp_collectives.foreach_all_gather),
        inspect.getsource(_fsdp_collectives.foreach_reduce),
    )
    assert "with device_handle.stream(all_gather_copy_in_stream)" in gather
    assert "all_gather_stream.wait_stream(all_gather_copy_in_stream)" in gather
    assert "post_reduce_stream = reduce_scatter_stream" in reduce
    assert "grad_offload_event = post_reduce_stream.record_event()" in reduce
    assert "grad_offload_event.synchronize()" in inspect.getsource(_fsdp_param_group.FSDPParamGroup)
    assert "resize_(0)" in inspect.getsource(_fsdp_param.free_storage)
    assert "_post_accumulate_grad_hooks" in reduce, "and the hybrid optimizer's gradients land from there"


# -- the wrapped optimizer is the home of state --------------------------------------------------------------
def with_inner(wrap: bool) -> tuple[nn.Module, Any, Optimizer]:
    model = net()
    inner = AdamW(model.parameters(), lr=1e-2, fused=True)
    return model, FSDPGPUOptimizerWrapper(inner, "cpu", bucket_bytes=2048) if wrap else inner, inner


@pytest.mark.parametrize("through", ["inner", "wrapper"])
def test_a_checkpoint_library_finds_the_true_bytes_and_leaves_them(through: str) -> None:
    """DCP took zeros from the wrapped optimizer, whose state was elsewhere, and training went on from zeros;
    the wrapper was refused by a TypeError."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    found = []
    for wrap in (False, True):
        model, optimizer, inner = with_inner(wrap)
        train(model, optimizer, 3)
        given = inner if through == "inner" else optimizer
        saved: Any = copy.deepcopy(get_optimizer_state_dict(model, given))
        values = [each.clone().view(-1) for entry in saved["state"].values() for each in entry.values()]
        train(model, optimizer, 1, first=3)
        set_optimizer_state_dict(model, given, saved)
        found.append([*values, *train(model, optimizer, 2, first=4)])
    assert_same_bits(found[1], found[0])


def test_hooks_state_and_loads_of_the_wrapped_optimizer_count() -> None:
    """Its step hooks never ran, its state dict was empty, and state that was loaded into it for a new
    parameter was thrown away."""
    found = []
    for wrap in (False, True):
        model, optimizer, inner = with_inner(wrap)
        calls: list[str] = []
        inner.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))  # type: ignore[misc]
        inner.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))  # type: ignore[misc]
        train(model, optimizer, 2)
        assert calls == ["before", "after"] * 2
        late = nn.Parameter(torch.ones(50))
        optimizer.add_param_group({"params": [late]})
        saved = copy.deepcopy(inner.state_dict())
        assert len(saved["state"]) == 6
        saved["state"][6] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.full((50,), 2.0),
            "exp_avg_sq": torch.full((50,), 5.0),
        }
        inner.load_state_dict(saved)
        late.grad = torch.ones(50)
        weights = train(model, optimizer, 1, first=2)
        with torch.no_grad():  # between steps it is the user's
            inner.state[late]["exp_avg"].mul_(0.5)
            inner.state[late]["step"].fill_(9)
            inner.state[next(model.parameters())] = {}
        late.grad = torch.ones(50)
        weights += train(model, optimizer, 1, first=3)
        found.append(
            [*weights, late.detach(), inner.state[late]["step"].view(1), inner.state[late]["exp_avg"].clone()]
        )
    assert_same_bits(found[1], found[0])


def test_a_wrapper_that_is_closed_leaves_the_optimizer_its_state() -> None:
    found = []
    for wrap in (False, True):
        model, optimizer, inner = with_inner(wrap)
        train(model, optimizer, 2)
        if wrap:
            optimizer.close()
            with pytest.raises(OffloadError, match="the wrapper was closed; step the optimizer itself"):
                optimizer.step()
        found.append(train(model, inner, 2, first=2))
    assert_same_bits(found[1], found[0])


def test_a_replaced_parameter_is_let_go_and_a_scheduler_takes_the_wrapper() -> None:
    model, optimizer, _ = with_inner(wrap=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    held = optimizer._part.host_bytes
    replaced: list[weakref.ref[torch.Tensor]] = []
    for number in range(6):
        train(model, optimizer, 1, first=number)
        replaced += [weakref.ref(parameter) for parameter in model[4].parameters()]
        for parameter in model[4].parameters():
            replaced.append(weakref.ref(optimizer.state.pop(parameter)["exp_avg"]))
        del parameter
        model[4] = nn.Linear(48, 7)
        optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 5e-3
    gc.collect()
    assert not [reference() for reference in replaced if reference() is not None]
    assert optimizer._part.host_bytes < 2 * held
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copy.deepcopy(optimizer)
    optimizer.close()

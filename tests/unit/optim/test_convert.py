"""`apply(optimizer=...)`: an optimizer of torch's has its state on the host from then on, and again on the
device after remove(); one line moves four kinds, and one table says what each holds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import offload
from offload import HostBudgetError, HybridDeviceOptimizer, PipelineOffloadManager
from offload.conductor import ConductorConfig
from offload.optim.classes import step_alone
from tests.inside import streams_from
from tests.unit.groups.stack import build_manager, installed
from tests.unit.weights.streamed import BLOCK_BYTES, BLOCKS, ROWS, WIDTH, Model, squares

STREAMED = BLOCKS * BLOCK_BYTES  # their moments are two floats an element


@pytest.fixture(autouse=True)
def manager() -> Iterator[PipelineOffloadManager]:
    with installed(build_manager()) as built, streams_from(WIDTH * WIDTH):
        yield built


class Loop:
    """A model, an optimizer of torch's and a scheduler, which existed before `apply`."""

    def __init__(self, cls: Any = AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Model()
        groups = [
            {"params": [*self.model.layers.parameters()], "weight_decay": 0.1},
            {"params": [*self.model.embed.parameters(), *self.model.head.parameters()]},
        ]
        self.optimizer: Any = cls(groups, **({"lr": 1e-2, "fused": True} | options))
        self.scheduler = StepLR(self.optimizer, 1, 0.5)
        self.gradients: list[list[Tensor]] = []
        self.random = torch.Generator().manual_seed(1)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            squares(self.model, torch.randn(ROWS, WIDTH, generator=self.random)).backward()
            self.gradients.append([each.grad.clone() for each in self.model.parameters()])  # type: ignore
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def assert_same(self, other: Loop) -> None:
        for mine, its in zip(self.gradients, other.gradients, strict=True):
            assert all(map(torch.equal, mine, its))
        states = [loop.optimizer.state_dict() for loop in (self, other)]
        assert states[0]["param_groups"] == states[1]["param_groups"]
        for mine, its in zip(*(state["state"].values() for state in states), strict=True):
            assert mine.keys() == its.keys()
            assert all(torch.equal(mine[key], its[key]) for key in mine)
        for mine, its in zip(self.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(mine.detach(), its.detach())


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("cls", [Adam, AdamW, SGD])
def test_one_line_moves_four_kinds_of_a_loop_under_way_with_the_bits_of_plain_torch(
    cls: Any, before: int
) -> None:
    loops = Loop(cls), Loop(cls)
    for loop in loops:
        loop.train(before)
    ours, plain = loops
    optimizer, groups = ours.optimizer, [*ours.optimizer.param_groups]
    handle = offload.apply(
        ours.model, "hidden_states", optimizer=optimizer, weights="host", conductor=True, min_numel=33
    )
    assert isinstance(optimizer, HybridDeviceOptimizer)
    assert "optimizer's state" in repr(handle)
    for loop in loops:
        loop.train(3)
    ours.assert_same(plain)
    kinds = handle.report().as_dict()["kinds"]
    assert {*kinds} == {"activations", "weights", "gradients", "optimizer"}
    assert kinds["weights"]["host_bytes"] == kinds["gradients"]["host_bytes"] == STREAMED
    assert kinds["optimizer"]["host_bytes"] == optimizer.host_bytes > 0
    assert kinds["optimizer"]["device_bytes"] == optimizer.ring_bytes
    assert all(kinds[kind]["out_bytes"] for kind in ("activations", "gradients", "optimizer"))
    text = str(handle.report())
    assert all(f"\n{kind} " in text for kind in kinds)
    handle.remove()
    assert type(optimizer) is cls
    assert all(map(lambda one, other: one is other, groups, optimizer.param_groups))
    for loop in loops:
        loop.train(2)
    ours.assert_same(plain)
    assert ours.scheduler.get_last_lr() == plain.scheduler.get_last_lr()


def test_a_number_of_another_dtype_than_its_parameter_is_not_rounded() -> None:
    models, optimizers = [nn.Linear(WIDTH, WIDTH).bfloat16() for _ in range(2)], []
    models[0].load_state_dict(models[1].state_dict())
    for model in models:
        optimizers.append(torch.optim.NAdam(model.parameters()))

    def train() -> None:
        x = torch.randn(ROWS, WIDTH).bfloat16()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        for mine, its in zip(*(each.state_dict()["state"].values() for each in optimizers), strict=True):
            assert mine["mu_product"].dtype == torch.float32
            assert all(torch.equal(mine[key], its[key]) for key in its)

    train()
    handle = offload.apply(models[0], optimizer=optimizers[0])
    train()
    handle.remove()
    train()


def test_sgd_steps_a_layer_that_trains_later_with_the_momentum_of_its_own_first_step() -> None:
    ours, plain = (Loop(SGD, momentum=0.9, dampening=0.5, fused=None) for _ in range(2))
    handle = offload.apply(ours.model, optimizer=ours.optimizer)
    for trains in (False, True, True):
        x = torch.randn(ROWS, WIDTH)
        for loop in (ours, plain):
            loop.model.layers[2].requires_grad_(trains)
            squares(loop.model, x).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    handle.remove()
    for mine, its in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        buffers = ours.optimizer.state[mine], plain.optimizer.state[its]
        torch.testing.assert_close(*(each["momentum_buffer"] for each in buffers))


@pytest.mark.parametrize("closes", [False, True])
def test_where_some_momentum_begins_a_closure_is_called_and_each_group_stepped_once(closes: bool) -> None:
    found = []
    for fused in (True, False):
        early, late, other, plain = (nn.Parameter(torch.full((5,), n + 1.0)) for n in range(4))
        groups = [{"params": [early, late]}, {"params": [other], "momentum": 0.0}]
        optimizer = SGD(groups, lr=0.1, momentum=0.9, fused=fused)
        optimizer.add_param_group({"params": [plain], "fused": False})
        calls: list[int] = []

        def closure(parameters: Any = (early, late, other, plain), calls: list[int] = calls) -> Tensor:
            calls.append(1)
            for parameter in parameters:
                parameter.grad = parameter.detach() * 0.5
            return torch.stack([parameter.sum() for parameter in parameters]).sum()

        step = step_alone if fused else SGD.step
        closure((early, other, plain))
        step(optimizer)
        calls.clear()
        loss = step(optimizer, closure) if closes else (closure(), step(optimizer))[0]
        assert len(calls) == 1
        found.append([loss.detach(), *(each.detach() for each in (early, late, other, plain))])
        assert late.grad is not None
        assert early.grad is not None
    torch.testing.assert_close(*found)


def test_hooks_attributes_and_the_schedulers_count_stay_through_both_conversions(recwarn: Any) -> None:
    loop = Loop()
    seen: list[str] = []
    optimizer = loop.optimizer
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("state"))
    optimizer.tag = "mine"
    handle = offload.apply(loop.model, optimizer=optimizer)
    assert handle.mode is False
    loop.train(2)
    optimizer.later = "too"
    handle.remove()
    loop.train(1)
    assert seen == ["pre"] * 3, "a conversion asks for no state dict of the user's"
    assert (optimizer.tag, optimizer.later) == ("mine", "too")
    assert not [each for each in recwarn if "lr_scheduler" in str(each.message)]
    optimizer.state_dict()
    assert seen[3:] == ["state"]


def test_a_state_alone_moves_and_comes_back_and_the_host_has_its_memory_again(
    manager: PipelineOffloadManager,
) -> None:
    loop = Loop()
    handle = offload.apply(loop.model, optimizer=loop.optimizer, conductor=True)
    loop.train(1)
    assert manager.engine.arena.stats().lent_bytes > 0
    handle.remove()
    gc.collect()
    assert manager.engine.arena.stats().lent_bytes == 0
    assert all(len(entry) == 3 for entry in loop.optimizer.state.values())
    handle.remove()


def test_one_of_ours_stays_as_it_is() -> None:
    model = Model()
    optimizer = HybridDeviceOptimizer(model.parameters(), 0.5, lr=1e-2)
    handle = offload.apply(model, optimizer=optimizer)
    handle.remove()
    assert type(optimizer) is HybridDeviceOptimizer
    squares(model, torch.randn(ROWS, WIDTH)).backward()
    optimizer.step()
    optimizer.close()


class Own(AdamW):
    """A class that is not torch's."""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda model: model, "a Model, must be an optimizer of torch.optim"),
        (lambda model: AdamW([nn.Parameter(torch.ones(3))]), "none of which is Model's"),
        (lambda model: Own(model.parameters()), "Own, whose object does not tell its arguments"),
        (lambda model: AdamW(Model().to("meta").parameters()), "none of which is Model's"),
    ],
)
def test_what_cannot_be_converted_is_named(given: Any, said: str) -> None:
    model = Model()
    with pytest.raises(ValueError, match=said):
        offload.apply(model, optimizer=given(model))


def test_parameters_on_meta_are_refused() -> None:
    model = Model().to("meta")
    with pytest.raises(ValueError, match=r"on meta.*load_weights"):
        offload.apply(model, weights="host", optimizer=AdamW(model.parameters()))


def test_a_step_that_somebody_else_has_put_there_is_refused() -> None:
    loop = Loop()
    loop.optimizer.zero_grad = lambda: None
    with pytest.raises(ValueError, match=r"has a zero_grad\(\) of its own"):
        offload.apply(loop.model, optimizer=loop.optimizer)
    assert type(loop.optimizer) is AdamW


def test_a_conversion_that_fails_leaves_the_optimizer_and_the_weights_as_they_were(
    manager: PipelineOffloadManager,
) -> None:
    ours, plain = Loop(), Loop()
    for loop in (ours, plain):
        loop.train(1)
    ours.optimizer.defaults["capturable"] = True  # which is refused once the weights have moved
    with pytest.raises(ValueError, match="capturable=True is for"):
        offload.apply(ours.model, optimizer=ours.optimizer, weights="host", conductor=True)
    ours.optimizer.defaults["capturable"] = False
    assert type(ours.optimizer) is AdamW
    assert all(type(each) is nn.Parameter for each in ours.model.parameters())
    gc.collect()
    assert manager.engine.arena.stats().lent_bytes == 0
    assert manager.engine.on_phase is None, "nor is there a conductor"
    for loop in (ours, plain):
        loop.train(2)
    ours.assert_same(plain)


# -- totals --------------------------------------------------------------------------------------------------
def state_bytes(optimizer: Optimizer) -> int:
    return sum(2 * 4 * each.numel() for group in optimizer.param_groups for each in group["params"])


def test_a_host_that_cannot_have_all_parts_is_refused_with_each_of_them(
    manager: PipelineOffloadManager,
) -> None:
    """Each part alone would fit, so none refuses by itself."""
    loop, before = Loop(), manager.engine.config
    moments = state_bytes(loop.optimizer)
    limit = 2 * STREAMED + moments - 1
    with pytest.raises(HostBudgetError) as caught:
        offload.apply(loop.model, optimizer=loop.optimizer, weights="host", host_limit=f"{limit}B")
    said = str(caught.value)
    for part in (f"streamed weights {STREAMED / 1e3:.2f} kB", f"gradients {STREAMED / 1e3:.2f} kB"):
        assert part in said
    assert f"optimizer state {moments / 1e3:.2f} kB" in said
    assert "leave optimizer= out" in said
    assert 'gradients="device"' in said
    assert manager.engine.config == before
    assert type(loop.optimizer) is AdamW
    assert manager.engine.arena.stats().lent_bytes == 0


def test_a_device_that_cannot_have_all_parts_is_refused_with_each_of_them(
    manager: PipelineOffloadManager,
) -> None:
    loop = Loop()
    sizes = [each.numel() * 4 for each in (*loop.model.embed.parameters(), *loop.model.head.parameters())]
    sizes += [4 * WIDTH] * 3 * BLOCKS + [4 * 2 * WIDTH] * BLOCKS  # norms and biases
    resident = sum(sizes)
    window = 2 * BLOCK_BYTES
    gradients = 3 * BLOCK_BYTES // 2  # those of three weights at once
    everything = resident + window + resident + gradients
    ring = 4 * STREAMED  # one slot of moments, weight and gradient of the larger of two buckets
    everything += ring
    config = ConductorConfig(
        vram_hard_cap_mb=(everything - 1) / 2**20, vram_soft_cap_mb=0.01, telemetry_interval=0
    )
    options: dict[str, Any] = {"optimizer": loop.optimizer, "weights": "host"}
    with pytest.raises(ValueError, match=r"vram_hard_cap_mb is .* and the parts need") as caught:
        offload.apply(loop.model, conductor=config, **options)
    said = str(caught.value)
    for kind, nbytes in (("resident weights and buffers", resident), ("streamed weights", window)):
        assert f"{kind} {nbytes / 1e3:.2f} kB" in said
    assert "lower weights=" in said
    assert type(loop.optimizer) is AdamW
    assert manager.engine.on_phase is None
    enough = ConductorConfig(vram_hard_cap_mb=everything / 2**20, vram_soft_cap_mb=0.01, telemetry_interval=0)
    with pytest.raises(ValueError, match=r"saved tensors 1\.00 kB; .*lower device_limit="):
        offload.apply(loop.model, "selective", conductor=enough, device_limit="1kB", min_numel=1, **options)
    with offload.apply(loop.model, conductor=enough, **options):
        loop.train(1)
        assert loop.optimizer.placed.streamed.ring_bytes == ring


def test_where_a_state_does_not_fit_on_the_device_all_goes_on_until_remove_is_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, plain = Loop(), Loop()
    handle = offload.apply(ours.model, optimizer=ours.optimizer, weights="host")
    for loop in (ours, plain):
        loop.train(1)
    with monkeypatch.context() as patched:
        patched.setattr(AdamW, "load_state_dict", full_device)
        with pytest.raises(torch.OutOfMemoryError):
            handle.remove()
    assert type(ours.optimizer) is HybridDeviceOptimizer
    for loop in (ours, plain):
        loop.train(1)
    kinds = handle.report().as_dict()["kinds"]
    assert kinds["weights"]["in_bytes"] > 0
    handle.remove()
    assert type(ours.optimizer) is AdamW
    for loop in (ours, plain):
        loop.train(1)
    ours.assert_same(plain)


def full_device(*_: Any) -> None:
    raise torch.OutOfMemoryError

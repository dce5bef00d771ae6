"""Programs that broke `offload.apply` once: transforms, interrupts, threads, exchanged weights, hooks of
others, closures."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

import offload
from offload import OffloadError, PipelineOffloadManager, RecomputeDiffersError
from tests.inside import caps_of
from tests.unit.modules.training import ROWS, WIDTH, Block, Model, build, equal, seeded, train, warnings_of

MODES: tuple[Any, ...] = ("groups", True, "hidden_states", "selective")


def hooks_left() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def inputs(seed: int = 7) -> Tensor:
    with seeded(seed):
        return torch.randn(ROWS, WIDTH)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*model.parameters()]))


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_inside_a_transform_of_torch_func_passes_through_and_is_named(
    mode: Any, manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    def run(model: Model) -> list[Tensor]:
        model.eval()
        weights = {name: weight.detach() for name, weight in model.named_parameters()}

        def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, weights, (x,)).square().mean()

        one = torch.func.grad(loss)(weights, inputs())
        many = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, inputs()[None])
        mapped = torch.func.vmap(model)(inputs()[None]).square().mean()
        jacobian = torch.func.jacrev(model)(inputs()[0])
        return [*one.values(), *many.values(), *gradients(model, mapped), jacobian.detach(), *train(model)]

    plain = run(build())
    model = build()
    offload.apply(model, mode, min_numel=1)
    assert equal(run(model), plain)
    (message,) = [text for text in warnings_of(caplog) if "torch.func" in text]
    assert message.startswith("a forward of Model runs inside a transform of torch.func")
    assert manager.stats.spill_bytes > 0, "the training that follows is offloaded"
    assert not hooks_left()


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_functional_call_exchanges_are_those_of_the_recompute(mode: Any) -> None:
    def run(model: Model) -> list[Tensor]:
        weights = dict(model.named_parameters())
        with seeded(1):
            loss = torch.func.functional_call(model, weights, (inputs(),)).square().mean()
            grads = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
            fast = {name: weight - grad for (name, weight), grad in zip(weights.items(), grads, strict=True)}
            loss = torch.func.functional_call(model, fast, (inputs(),)).square().mean()
        before = [id(parameter) for parameter in model.parameters()]
        made = gradients(model, loss)
        assert [id(parameter) for parameter in model.parameters()] == before
        return made

    plain = run(build())
    model = build()
    offload.apply(model, mode, min_numel=1)
    assert equal(run(model), plain)


class Interrupted(nn.Module):
    """raises: on its next call."""

    raises = False

    def forward(self, x: Tensor) -> Tensor:
        if self.raises:
            self.raises = False
            raise KeyboardInterrupt
        return x


def by_hand(model: Model, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("forward", [Model.__call__, by_hand])
def test_after_an_interrupt_the_next_forward_closes_what_was_left_open(
    forward: Callable[[Model, Tensor], Tensor], mode: Any
) -> None:
    model = build()
    model.layers[1].drop = middle = Interrupted()
    another = build()
    for each in (model, another):
        offload.apply(each, mode, min_numel=1)
    middle.raises = True
    with pytest.raises(KeyboardInterrupt):
        forward(model, inputs())
    with seeded(3):
        another(inputs()).sum().backward()  # whose own saves would go to what is open
    with seeded(3):
        forward(model, inputs()).sum().backward()
    assert not hooks_left()
    ours = [layer.fc1.weight.grad for layer in model.layers]
    plain = build()
    plain.layers[1].drop = Interrupted()
    with seeded(3):
        forward(plain, inputs()).sum().backward()
    assert equal(ours, [layer.fc1.weight.grad for layer in plain.layers])


@pytest.mark.parametrize("opened", [offload.activations, offload.apply])
def test_after_an_interrupt_remove_closes_what_was_left_open(opened: Any) -> None:
    model = build()
    model.layers[1].drop = middle = Interrupted()
    middle.raises = True
    with pytest.raises(KeyboardInterrupt), opened(model, min_numel=1) as handle:
        model(inputs())
    assert "removed" in repr(handle)
    assert not hooks_left()


def test_what_an_interrupted_recompute_was_given_to_keep_is_an_error_and_never_other_bytes() -> None:
    model = build()
    model.layers[1].drop = middle = Interrupted()
    offload.apply(model, "hidden_states", min_numel=1)
    middle.raises = True
    with pytest.raises(KeyboardInterrupt):
        model(inputs())
    loss = model.embed(inputs()).sum()  # saved by the checkpoint that was left open
    model(inputs())
    with pytest.raises(OffloadError, match="was interrupted"):
        loss.backward()


@pytest.mark.parametrize("mode", ["groups", "hidden_states"])
def test_what_an_interrupt_left_open_is_closed_below_the_hooks_of_others(mode: Any) -> None:
    """The backward of an earlier forward pushes those of its checkpoint, or the next forward has some around
    it, and theirs went instead."""

    def run(model: Model) -> list[Any]:
        seen: list[torch.Size] = []
        earlier = checkpoint(by_hand, model, inputs(), use_reentrant=False).sum()
        model.layers[1].drop.raises = True  # type: ignore[union-attr]
        with pytest.raises(KeyboardInterrupt):
            model(inputs())
        earlier.backward()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.shape) or x, lambda x: x):
            loss = model(inputs()).sum()
        assert not hooks_left()
        assert seen
        loss.backward()
        return [parameter.grad for parameter in model.layers.parameters()]

    plain, model = build(), build()
    for each in (plain, model):
        for layer in each.layers:
            layer.drop = Interrupted()
    offload.apply(model, mode, min_numel=1)
    assert equal(run(model), run(plain))


def test_remove_inside_a_forward_is_refused() -> None:
    model = build()
    handle = offload.apply(model, min_numel=1)
    hook = model.layers[1].fc1.register_forward_hook(lambda *_: handle.remove())
    with pytest.raises(ValueError, match="inside a forward of its modules"):
        model(inputs())
    hook.remove()
    assert not hooks_left()
    train(model, steps=1)
    handle.remove()


@pytest.mark.parametrize("mode", MODES)
def test_forwards_in_two_threads_at_once_have_the_bits_of_a_run_without(mode: Any) -> None:
    class Meet(nn.Module):
        """Both threads are inside a block at once."""

        def __init__(self, barrier: threading.Barrier) -> None:
            super().__init__()
            self.barrier = barrier

        def forward(self, x: Tensor) -> Tensor:
            if torch._C._current_graph_task_id() == -1:
                self.barrier.wait(20)
            return x

    def run(model: Model) -> list[Tensor]:
        barrier = threading.Barrier(2)
        for layer in model.layers:
            layer.drop = Meet(barrier)
        losses: dict[int, Tensor] = {}
        left: list[bool] = []

        # before the threads: they draw from one generator
        given = [inputs(number) for number in range(2)]

        def forward(number: int) -> None:
            losses[number] = model(given[number]).square().mean()
            left.append(hooks_left())

        threads = [threading.Thread(target=forward, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert left == [False, False]
        return gradients(model, losses[0] + losses[1])

    plain = run(build())
    model = build()
    offload.apply(model, mode, min_numel=1)
    assert equal(run(model), plain)


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_pre_hook_that_a_recompute_would_run_twice_is_an_error(everywhere: bool) -> None:
    def double(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return (args[0] * 2,) if isinstance(module, Block) else None

    model = build()
    offload.apply(model, "hidden_states", min_numel=1)
    if everywhere:
        hook = register_module_forward_pre_hook(double)
    else:
        hook = model.layers[1].register_forward_pre_hook(double, prepend=True)
    try:
        loss = model(inputs()).sum()
        loss.backward()
        with pytest.raises(RecomputeDiffersError, match="a hook"):
            offload.step_end()
    finally:
        hook.remove()


def test_legacy_on_two_models_ends_when_the_last_handle_is_removed(manager: PipelineOffloadManager) -> None:
    before = caps_of(manager.engine)
    models = build(), build()
    first, second = (offload.apply(model, "legacy") for model in models)
    first.remove()
    assert manager.engine.limits.max_spilling_bytes == 1
    assert manager.engine.limits.held_by("max_spilling_bytes") == "legacy"
    second.remove()
    assert caps_of(manager.engine) == before


def test_the_limits_of_legacy_end_with_a_model_that_is_dropped_without_remove(
    manager: PipelineOffloadManager,
) -> None:
    first, second = build(), build()
    offload.apply(first, "legacy", min_numel=1)
    offload.apply(second, "legacy", min_numel=1)
    train(first, steps=1)
    del first
    gc.collect()
    assert (manager.engine.limits.max_spilling_bytes, manager.engine.limits.max_restoring_bytes) == (1, 0)
    del second
    gc.collect()
    caps = ("max_spilling_bytes", "max_restoring_bytes")
    assert {manager.engine.limits.held_by(cap) for cap in caps} == {"plan"}, "of the step that ended"
    assert not manager.engine.limits.named


def test_limits_that_somebody_set_in_the_meantime_outlive_legacy(manager: PipelineOffloadManager) -> None:
    """And one copy at a time holds meanwhile, of the two the least: it did not, and its end was missed."""
    model = build()
    handle = offload.apply(model, "legacy")
    own = replace(manager.engine.config, max_spilling_bytes=5_000)
    new = offload.marks.change_limits(own)
    assert (new.engine.limits.max_spilling_bytes, new.engine.limits.max_restoring_bytes) == (1, 0)
    handle.remove()
    assert new.engine.config == own
    assert new.engine.limits.max_spilling_bytes == 5_000
    assert new.engine.limits.held_by("max_spilling_bytes") == "config"


WHOLE = (
    "all of Model runs inside a checkpoint, which recomputes what it saves: nothing leaves. Checkpoint its "
    "blocks instead; or use mode='hidden_states', and no checkpoint"
)


@pytest.mark.parametrize("mode", ["groups", "hidden_states", True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_whole_model_gets_all_tensors_and_is_named(
    reentrant: bool, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A reentrant one was taken for a model that never runs; of a non-reentrant one tensors were taken."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.model, x.requires_grad_(), use_reentrant=reentrant)

    plain = train(Whole())
    ours = Whole()
    offload.apply(ours.model, mode, min_numel=1)
    assert equal(train(ours), plain)
    assert warnings_of(caplog) == [WHOLE]
    assert offload.report().total.moved_bytes == 0


def nothing_leaves(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text.split(":")[0] for text in warnings_of(caplog)]


def test_that_nothing_leaves_is_said_for_each_handle_and_not_for_one_whose_bytes_leave(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build()
    with offload.activations(model, min_numel=10_000):
        train(model)
    assert nothing_leaves(caplog) == ["nothing leaves"]
    with offload.activations(model, min_numel=20_000):
        train(model)
    assert nothing_leaves(caplog) == ["nothing leaves"] * 2
    assert "20,000 elements here" in warnings_of(caplog)[1]
    # tanh of fc1's output
    assert f"The largest tensor that is too small has {2 * ROWS * WIDTH} elements" in warnings_of(caplog)[1]
    # two at once, whose groups have one name; the plan of the first is made by now
    good, small = build(), build()
    offload.apply(good, min_numel=1)
    train(good)
    offload.apply(small, min_numel=30_000)
    train(small)
    train(good)
    assert nothing_leaves(caplog) == ["nothing leaves"] * 3
    assert "30,000 elements here" in warnings_of(caplog)[2]


def test_an_optimizer_with_a_closure_is_not_taken_for_one_whose_model_never_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build()
    offload.apply(model, min_numel=1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(inputs()).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert not [text for text in warnings_of(caplog) if "no forward of it was seen" in text]


def test_blocks_called_one_by_one_are_one_step_though_the_first_saves_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build()
    offload.apply(model, min_numel=1)
    with torch.no_grad():
        x = model.layers[0](inputs())
    for layer in model.layers[1:]:
        x = layer(x)
    x.sum().backward()
    assert not [text for text in warnings_of(caplog) if "did not run through their hooks" in text]


def test_a_mode_after_disk_writes_to_no_disk_that_nobody_asked_for() -> None:
    model = build()
    with offload.activations(model, "disk", min_numel=1):
        train(model, steps=1)
    assert offload.marks.default_manager().stats.disk_write_bytes > 0
    offload.apply(model, min_numel=1)
    train(model, steps=2)
    last = offload.marks.default_manager()
    assert last.stats.spill_bytes > 0
    assert (last.stats.disk_write_bytes, last.engine.config.disk_directory) == (0, None)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ((nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)), 0),
        ((nn.Linear(WIDTH, 4), nn.GELU(), nn.Linear(4, WIDTH)), 1),
    ],
)
def test_a_selective_block_whose_products_nobody_reads_is_not_told_that_they_are_too_small(
    layers: tuple[nn.Module, ...],
    said: int,
    manager: PipelineOffloadManager,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(*(nn.Sequential(*copy.deepcopy(layers)) for _ in range(2)))
    with offload.activations(model, "selective", min_numel=ROWS * WIDTH):
        model(inputs()).sum().backward()
        manager.step_end()
    assert nothing_leaves(caplog) == ["group 'selective' moved nothing"] * said


def test_an_output_that_a_selective_block_changes_in_place_is_recomputed_which_is_said_once(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))

    torch.manual_seed(0)
    model = nn.Sequential(block(), block())
    plain = copy.deepcopy(model)
    plain(inputs()).sum().backward()
    expected = [parameter.grad for parameter in plain.parameters()]
    with offload.activations(model, "selective", min_numel=1):
        for _ in range(3):
            model.zero_grad()
            model(inputs()).sum().backward()
            assert all(map(torch.equal, expected, [parameter.grad for parameter in model.parameters()]))
            manager.step_end()
    (text,) = [text for text in warnings_of(caplog) if "in place" in text]
    assert text.startswith("Sequential changes what aten.addmm.default returns in place, so mode='selective'")

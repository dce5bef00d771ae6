"""Groups that stay, step after step: what is taken for known gives the same bits and the same counts, and
what has changed is judged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload import PipelineOffloadManager, StaleHandleError, StepStats, init_chunk_handler
from offload.groups import chunk as chunk_module
from offload.saved.staying import JUDGED_EVERY, StayingSaves
from offload.transfer.layout import WeakStorage
from tests.unit.groups.both import run_both
from tests.unit.groups.stack import build_manager, gpipe, installed, no_pipeline

ELEMENTS = 64
NBYTES = 4 * ELEMENTS
Forward = Callable[[Tensor], Tensor]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many saves each closed forward has taken for known."""
    found: list[int] = []
    close = StayingSaves.close

    def counting(self: StayingSaves) -> None:
        if self._saves is not None:
            found.append(sum(save is not None for save in self._saves[: len(self._handles)]))
        close(self)

    monkeypatch.setattr(StayingSaves, "close", counting)
    return found


def group(body: Forward, x: Tensor, name: str = "a", **commit: Any) -> Tensor:
    x = offload.group_start(x, name)
    with offload.offload_hooks():
        y = body(x)
    return offload.group_commit(y, name, **commit)


def step(forward: Forward, x: Tensor | None = None) -> tuple[Tensor, StepStats]:
    """One microbatch: the gradient of its input, and the step's figures."""
    init_chunk_handler(None, None, 1)
    leaf = (torch.linspace(-1, 1, ELEMENTS) if x is None else x).clone().requires_grad_()
    forward(leaf * 1).sum().backward()
    stats = offload.step_end()
    assert leaf.grad is not None
    assert stats is not None
    return leaf.grad, stats


def plain(forward: Forward, x: Tensor | None = None) -> Tensor:
    with installed(None):
        leaf = (torch.linspace(-1, 1, ELEMENTS) if x is None else x).clone().requires_grad_()
        forward(leaf * 1).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.fixture
def manager() -> Iterator[PipelineOffloadManager]:
    with installed(build_manager(activation_offload_fraction=0.0, piece_bytes=1 << 20)) as built:
        assert built is not None
        yield built


def sines(count: int) -> Forward:
    def forward(x: Tensor) -> Tensor:
        for _ in range(count):
            x = x.sin()
        return x

    return forward


def figures(manager: PipelineOffloadManager) -> list[tuple[object, ...]]:
    return [
        (
            handler.id,
            group.name,
            group.total_offload_bytes,
            group.logical_bytes,
            group.total_tensor_count,
            group.slot_bytes,
        )
        for handler in manager._handlers.values()
        for group in handler.groups
    ]


# -- the same forward again ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("fraction", "piece_bytes"), [(0.0, 3 * NBYTES), (0.5, 1)])
def test_known_saves_change_no_gradient_and_no_figure(
    fraction: float, piece_bytes: int, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step looks like to the planner, the table and the telemetry does not depend on whether its saves
    were known."""
    found = []
    for every in (1, JUDGED_EVERY):
        monkeypatch.setattr(chunk_module, "JUDGED_EVERY", every)
        taken.clear()
        manager = build_manager(activation_offload_fraction=fraction, piece_bytes=piece_bytes)
        stats = run_both([gpipe(2)] * 3 + [no_pipeline(1)], manager, layers=1)
        counts = [(s.saved, s.kept, s.spilled, s.spill_bytes, s.device_bytes_peak) for s in stats]
        found.append((counts, manager.offload_summary_bytes))
        assert any(taken) == (every != 1)
    assert found[0] == found[1]


def test_each_group_looks_to_the_planner_as_it_did_when_it_was_judged(
    manager: PipelineOffloadManager, taken: list[int]
) -> None:
    def forward(x: Tensor) -> Tensor:
        y = group(lambda x: (x.sin() * x).view(8, 8).t().exp()[:, ::2].tanh(), x, "a")
        return group(lambda x: torch.cat(x.split(2, dim=1)).sin() * x.new_ones(()), y, "b")

    expected = plain(forward)
    seen = []
    for _ in range(5):
        assert torch.equal(step(forward)[0], expected)
        seen.append(figures(manager))
    assert sum(taken) > 0
    assert seen[1:] == [seen[1]] * 4


def test_a_storage_that_is_saved_twice_in_a_group_is_counted_once(
    manager: PipelineOffloadManager, taken: list[int]
) -> None:
    def forward(x: Tensor) -> Tensor:
        return group(lambda x: x.sin() + x.cos() + x * x.view(ELEMENTS), x)

    stats = [step(forward)[1] for _ in range(4)]
    assert taken[-1] == 4
    assert [s.saved for s in stats] == [1] * 4
    assert [s.device_bytes_peak for s in stats] == [NBYTES] * 4


def test_what_a_group_that_leaves_saves_too_is_not_taken_for_known(taken: list[int]) -> None:
    """The record of the first save is what later ones join, so that nothing is moved in vain."""

    def forward(x: Tensor) -> Tensor:
        x = group(lambda x: x.sin(), x, "left")
        shared: list[Tensor] = []
        x = group(lambda x: shared.append(x) or x.cos(), x, "left too")  # type: ignore[func-returns-value]
        return group(lambda x: x * shared[0] + x.tanh(), x, "kept")

    expected = plain(forward)
    with installed(build_manager(activation_offload_fraction=0.0)) as manager:
        assert manager is not None
        moved = []
        for _ in range(5):
            handler = manager._handlers.get(next(iter(manager._handlers))) if manager._handlers else None
            if handler is not None:
                handler.stays = frozenset({2})  # as a plan would
            gradient, stats = step(forward)
            assert torch.equal(gradient, expected)
            moved.append((stats.saved, stats.spilled, stats.device_bytes_peak))
    assert taken[-1] == 2, "the output of the group and its tanh, and not what `left too` saved"
    assert len(set(moved[1:])) == 1


# -- what has changed ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", [0, 3, 5])
@pytest.mark.parametrize(
    "change", ["larger", "view", "dtype", "more", "fewer", "shared", "unshared", "parameter"]
)
def test_a_changed_forward_is_judged_from_the_change_on_and_counted_as_it_is(
    change: str, place: int, manager: PipelineOffloadManager, taken: list[int]
) -> None:
    weight = torch.nn.Parameter(torch.full((ELEMENTS,), 0.5))

    def body(changed: bool) -> Forward:
        def run(x: Tensor) -> Tensor:
            for number in range(6):
                before = x
                x = x.sin()
                if number == place and changed:
                    if change == "larger":
                        x = torch.cat([x, x]).exp()[:ELEMENTS] * 1.5
                    elif change == "view":
                        x = torch.stack([x, x], dim=1)[:, 1].cos()
                    elif change == "dtype":
                        x = x.double().exp().float()
                    elif change == "more":
                        x = x.exp()
                    elif change == "fewer":
                        return x
                    elif change == "shared":
                        x = x * before
                    elif change == "parameter":
                        x = x * weight
                elif number == place and change == "unshared":
                    x = x * before
            return x

        return lambda x: group(run, x)

    steps = [False, False, False, True, False, False, True, True, True, False]
    expected = {changed: plain(body(changed)) for changed in (False, True)}
    counts: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for number, changed in enumerate(steps):
        gradient, stats = step(body(changed))
        assert torch.equal(gradient, expected[changed])
        if number:  # all leaves in the first
            counts[changed].append((stats.saved, stats.device_bytes_peak))
        assert (manager.engine.transfers.device_bytes, manager.engine.transfers.in_flight()) == (0, (0, 0))
    assert taken[0] > 0
    assert counts[False][:4] == [counts[False][0]] * 4, (
        "judged in one step, known in the next, and so again after a change"
    )
    assert counts[True][2] == counts[True][3]
    # in the step of a change, what is shared with a save before it may be counted twice
    for found in counts.values():
        assert all(least <= again for least, again in zip(min(found), found[0], strict=True))
        assert max(saved for saved, _ in found) <= min(saved for saved, _ in found) + 1


@pytest.mark.parametrize("committed", [True, False])
def test_bytes_of_a_piece_are_counted_as_they_come(committed: bool, manager: PipelineOffloadManager) -> None:
    assert manager.engine.config.piece_bytes >= 6 * NBYTES
    for _ in range(3):
        step(lambda x: group(sines(6), x))
    init_chunk_handler(None, None, 1)
    leaf = torch.ones(ELEMENTS, requires_grad=True)
    x = offload.group_start(leaf * 1, "a")
    with offload.offload_hooks():
        y = sines(2)(x)
        assert manager.engine.transfers.resident_bytes == 2 * NBYTES
        if committed:
            y = offload.group_commit(y, "a")
            assert manager.engine.transfers.resident_bytes == 2 * NBYTES
            assert manager.cur_forward_chunk().groups[0].total_offload_bytes == 2 * NBYTES  # type: ignore[union-attr]
            y = y.tanh()  # is nobody's
    if committed:
        y.sum().backward()
        del x, y
        manager.engine.transfers.bury()
        assert manager.engine.transfers.resident_bytes == 0
    offload.step_end()
    assert manager.engine.transfers.resident_bytes == 0


def test_known_saves_are_judged_anew_now_and_then(
    manager: PipelineOffloadManager, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_module, "JUDGED_EVERY", 4)
    for _ in range(9):  # the group of index 0 in steps 0, 4 and 8; in step 0 it left
        step(lambda x: group(sines(3), x))
    assert taken == [3] * 5


def test_another_smallest_size_judges_anew(manager: PipelineOffloadManager, taken: list[int]) -> None:
    for _ in range(3):
        step(lambda x: group(sines(3), x))
    assert taken == [3]
    init_chunk_handler(None, None, ELEMENTS + 1)
    group(sines(3), torch.ones(ELEMENTS, requires_grad=True) * 1).sum().backward()
    stats = offload.step_end()
    assert stats is not None
    assert (stats.saved, taken) == (0, [3])


# -- reads ---------------------------------------------------------------------------------------------------
def test_a_known_save_that_is_changed_in_place_is_found_out_by_its_read(
    manager: PipelineOffloadManager,
) -> None:
    def forward(x: Tensor) -> Tensor:
        return group(lambda x: x.sin().sin(), x)

    for _ in range(3):
        step(forward)
    init_chunk_handler(None, None, 1)
    x = torch.ones(ELEMENTS, requires_grad=True) * 1
    y = forward(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Reads(torch.autograd.Function):
    """x * y, whose backward reads what it saved twice, and spoils what it was given first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, x)
        return x * y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        for tensor in ctx.saved_tensors:
            tensor.requires_grad_()
            tensor.data = torch.zeros(3)
        x, y, again = ctx.saved_tensors
        assert x.data_ptr() == again.data_ptr()
        return grads[0] * y, grads[0] * x


def test_each_read_of_a_known_save_is_an_alias_of_its_own_in_every_pass(
    manager: PipelineOffloadManager, taken: list[int]
) -> None:
    def forward(x: Tensor) -> Tensor:
        return group(lambda x: Reads.apply(x, x.sin()).tanh(), x)  # type: ignore[no-any-return]

    expected = plain(lambda x: (x * x.sin()).tanh())
    for _ in range(4):
        init_chunk_handler(None, None, 1)
        leaf = torch.linspace(-1, 1, ELEMENTS).requires_grad_()
        y = forward(leaf * 1).sum()
        for _ in range(2):
            leaf.grad = None
            y.backward(retain_graph=True)
            assert torch.equal(leaf.grad, expected)
        del y
        offload.step_end()
    assert taken[-1] == 5


def test_known_saves_that_are_left_over_are_named_and_let_go_of(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        step(lambda x: group(sines(3), x))
    init_chunk_handler(None, None, 1)
    storages: list[WeakStorage] = []

    def body(x: Tensor) -> Tensor:
        for _ in range(3):
            storages.append(WeakStorage(x.untyped_storage()))
            x = x.sin()
        return x

    y = group(body, torch.ones(ELEMENTS, requires_grad=True) * 1)
    assert all(storage.storage() is not None for storage in storages)
    with caplog.at_level(logging.WARNING, "offload"):
        offload.step_end()
    assert f"step 3 ended with 3 saved tensors ({3 * NBYTES} bytes) whose backward has not run" in caplog.text
    assert [storage.storage() for storage in storages] == [None] * 3
    with pytest.raises(StaleHandleError):
        y.sum().backward()


def test_bytes_of_a_piece_go_with_their_nodes_and_its_count_with_the_last(
    manager: PipelineOffloadManager,
) -> None:
    for _ in range(3):
        step(lambda x: group(sines(3), x))
    init_chunk_handler(None, None, 1)
    storages: list[WeakStorage] = []
    living: list[int] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.detach()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            living.append(sum(storage.storage() is not None for storage in storages))
            return grads[0]

    def body(x: Tensor) -> Tensor:
        for _ in range(3):
            storages.append(WeakStorage(x.untyped_storage()))
            x = Look.apply(x).sin()
        return x

    group(body, torch.ones(ELEMENTS, requires_grad=True) * 1).sum().backward()
    assert living == [2, 1, 0]
    manager.engine.transfers.bury()
    assert manager.engine.transfers.resident_bytes == 0


# -- beside others -------------------------------------------------------------------------------------------
def last_of_five(forward: Callable[[Tensor, bool], Tensor]) -> tuple[Tensor, StepStats]:
    """The fifth step, the only one of which `forward` is told so, when the first group of each chunk stays
    and the others leave."""
    with installed(build_manager(activation_offload_fraction=1.0)) as manager:
        assert manager is not None
        for number in range(5):
            for handler in manager._handlers.values():
                handler.stays = frozenset({0})
            found = step(lambda x, last=number == 4: forward(x, last))  # type: ignore[misc]
    return found


def test_a_known_save_holds_back_the_forced_release_of_its_storage_by_another_group(
    taken: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """The group that leaves saves the storage of a known save for the first time; freed by force, the other
    would read nothing."""

    def forward(x: Tensor, release: bool) -> Tensor:
        saved: list[Tensor] = []
        y = group(lambda x: saved.append(x) or x.sin(), x, "kept")  # type: ignore[func-returns-value]
        z = offload.group_start(y, "left")
        with offload.offload_hooks():
            z = z * saved[0] if release else z.cos()
        return offload.group_commit(z, "left", saved if release else None)

    expected = plain(lambda x: forward(x, True))
    with caplog.at_level(logging.WARNING, "offload"):
        gradient, _ = last_of_five(forward)
    assert taken[-1] == 1
    assert torch.equal(gradient, expected)
    assert "another save still keeps it on the device" in caplog.text


def test_a_storage_that_another_group_begins_to_save_is_counted_twice_at_most_and_never_less(
    taken: list[int],
) -> None:
    def forward(x: Tensor, shared: bool) -> Tensor:
        saved: list[Tensor] = []
        y = group(lambda x: saved.append(x) or x.sin(), x, "kept")  # type: ignore[func-returns-value]
        return group(lambda x: x * saved[0] if shared else x * x, y, "left")

    expected = plain(lambda x: forward(x, True))
    gradient, stats = last_of_five(forward)
    assert taken[-1] == 1
    assert torch.equal(gradient, expected)
    assert 2 * NBYTES <= stats.device_bytes_peak <= 3 * NBYTES


def test_offloading_that_is_switched_off_takes_nothing(
    manager: PipelineOffloadManager, taken: list[int]
) -> None:
    for _ in range(3):
        step(lambda x: group(sines(3), x))
    offload.disable_offload()
    _, stats = step(lambda x: group(sines(3), x))
    offload.enable_offload()
    _, after = step(lambda x: group(sines(3), x))
    assert (stats.saved, after.saved) == (0, 3)
    assert taken == [3, 3]

"""`offload.apply`: any model, in any training loop, with the bits that it has without."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import PipelineOffloadManager, StepStats
from tests.unit.groups.stack import build_manager, installed
from tests.unit.modules.training import CALLS, ROWS, WIDTH, Model, build, equal, seeded, train

MODES: tuple[Any, ...] = ("groups", True, "legacy", "disk", "hidden_states", "selective")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_gradients_and_weights_have_the_bits_of_a_run_without(
    call: str, mode: Any, manager: PipelineOffloadManager, tmp_path: Path
) -> None:
    plain = train(build(call))
    model = build(call)
    if mode == "disk":
        manager = offload.marks.change_limits(replace(manager.engine.config, disk_directory=str(tmp_path)))
    with offload.activations(model, mode, min_numel=1):
        if call == "in place" and mode in ("hidden_states", "selective"):
            # what would be recomputed from is gone: as with torch's checkpoint
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                train(model)
            return
        ours = train(model)
    assert equal(ours, plain)
    assert manager.stats.spill_bytes > 0
    # whether anything is written in time is the writer's: a reader that comes first calls the write off
    assert (manager.engine.transfers.disk is not None) == (mode == "disk")
    assert len(list(manager.living_blocks())) == 0


def test_a_block_frees_what_it_saves_and_the_plan_follows_the_step(manager: PipelineOffloadManager) -> None:
    model = build(blocks=4)
    handle = offload.apply(model, min_numel=1)
    assert repr(handle) == "<offload.apply(Model, mode='groups'): layers: 4 modules, layers.0 to layers.3>"
    train(model, steps=2, microbatches=3)
    # each microbatch of three is a chunk, and nothing is alive between steps
    assert [chunk.id for chunk in manager.seen_chunks()] == [] if hasattr(manager, "seen_chunks") else True
    # norm: input, mean, rstd; fc1: its input; tanh and dropout: output, mask and fc2's input
    assert manager.stats.saved % 3 == 0
    assert manager.step_offload_bytes.keys() == {"layers"}


def test_a_step_ends_where_the_optimizer_steps(manager: PipelineOffloadManager) -> None:
    model = build()
    offload.apply(model, min_numel=1)
    train(model, steps=1)
    before = manager.engine.step
    train(model, steps=3)
    assert manager.engine.step == before + 3


class _Loop:
    """Step ends that a loop was seen to have."""

    def __init__(self, manager: PipelineOffloadManager, model: nn.Module) -> None:
        self.manager, self.model = manager, model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        offload.apply(model, min_numel=1)
        self.once()
        self.optimizer.step()
        self.start = manager.engine.step

    def once(self) -> Tensor:
        loss: Tensor = self.model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        return loss

    @property
    def ends(self) -> int:
        return self.manager.engine.step - self.start


def test_an_optimizer_of_another_model_ends_nothing(manager: PipelineOffloadManager) -> None:
    loop = _Loop(manager, build())
    other = nn.Linear(2, 2)
    loop.once()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert loop.ends == 0
    loop.optimizer.step()
    assert loop.ends == 1


def test_a_wrapped_optimizer_ends_a_step_once(manager: PipelineOffloadManager) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    loop = _Loop(manager, build())
    wrapped = Wrapper(loop.optimizer)
    for _ in range(3):
        loop.once()
        wrapped.step()
    assert loop.ends == 3


def test_an_optimizer_that_steps_in_the_backward_ends_nothing_there(manager: PipelineOffloadManager) -> None:
    loop = _Loop(manager, build())
    for parameter in loop.model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    loop.once()
    loop.once()
    assert loop.ends == 0
    loop.optimizer.step()
    assert loop.ends == 1


def test_a_loop_without_an_optimizer_ends_a_step_at_the_next_forward(manager: PipelineOffloadManager) -> None:
    model = build()
    offload.apply(model, min_numel=1)
    for _ in range(4):
        model(torch.randn(ROWS, WIDTH)).sum().backward()
    assert manager.engine.step == 3


def test_a_step_that_a_scaler_skips_is_part_of_the_next_one(manager: PipelineOffloadManager) -> None:
    loop = _Loop(manager, build())
    loop.once()  # inf: step() is not called
    loop.once()
    loop.optimizer.step()
    assert loop.ends == 1


def test_what_is_alive_at_an_end_is_carried_over_two_ends_and_then_named_and_dropped(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    loop = _Loop(manager, build())
    loop.optimizer = torch.optim.SGD([loop.model.head.bias], lr=0.1)  # which no graph has saved
    graphs = [loop.model(torch.randn(ROWS, WIDTH)).sum() for _ in range(2)]
    for _ in range(2):
        loop.optimizer.step()
        loop.once()
    graphs[0].backward()  # two steps later
    assert warnings_of(caplog) == []
    loop.optimizer.step()
    (message,) = warnings_of(caplog)
    assert "whose backward has not run; they are dropped" in message
    assert message.endswith("They were saved in s0m1/layers")
    with pytest.raises(offload.StaleHandleError):
        graphs[1].backward()


def test_a_generator_and_a_discriminator_have_the_bits_of_a_run_without(
    manager: PipelineOffloadManager,
) -> None:
    def gan(apply: Callable[[nn.Module], object]) -> list[Tensor]:
        torch.manual_seed(0)
        made, judged = Model(), Model()
        apply(made)
        apply(judged)
        generator = torch.optim.Adam(made.parameters(), lr=0.01)
        judge = torch.optim.Adam(judged.parameters(), lr=0.01)
        adapt = nn.Linear(5, WIDTH)
        for step in range(4):
            with seeded(step):
                fake = adapt(made(torch.randn(ROWS, WIDTH)))
                judge.zero_grad()
                loss = judged(fake.detach()).mean() - judged(torch.randn(ROWS, WIDTH)).mean()
                loss.backward()
                judge.step()
                generator.zero_grad()
                judged(fake).mean().backward()  # reads what the generator saved before the judge's step
                generator.step()
        return [parameter.detach().clone() for model in (made, judged) for parameter in model.parameters()]

    plain = gan(lambda _: None)
    assert equal(gan(lambda model: offload.apply(model, min_numel=1)), plain)
    assert manager.stats.spill_bytes > 0


def test_a_users_own_step_end_and_chunks_are_believed(manager: PipelineOffloadManager) -> None:
    model = build()
    offload.apply(model, min_numel=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ended: list[StepStats | None] = []
    for _ in range(3):
        for _ in range(2):
            offload.init_chunk_handler()
            model(torch.randn(ROWS, WIDTH)).sum().backward()
        optimizer.step()
        ended.append(offload.step_end())
    assert manager.engine.step == 3
    assert len({stats.saved for stats in ended if stats is not None}) == 1


def test_blocks_that_are_called_without_their_model_begin_chunks_of_their_own(
    manager: PipelineOffloadManager,
) -> None:
    def loop(model: Model) -> list[Tensor]:
        x = torch.ones(ROWS, WIDTH, requires_grad=True)
        y = x
        for layer in model.layers.eval():
            y = layer(y)
        y.sum().backward()
        assert x.grad is not None
        return [x.grad]

    plain = loop(build())
    model = build()
    offload.apply(model, min_numel=1)
    assert equal(loop(model), plain)
    assert manager.step_end().spill_bytes > 0


def test_evaluation_and_a_second_forward_pass_through(manager: PipelineOffloadManager) -> None:
    model = build()
    offload.apply(model, min_numel=1)
    train(model)
    step, saved = manager.engine.step, manager.stats.saved
    with torch.no_grad():
        model(torch.randn(ROWS, WIDTH))
    with torch.inference_mode():
        model(torch.randn(ROWS, WIDTH))
    train(model, steps=1)
    assert (manager.engine.step, manager.stats.saved) == (step + 1, saved)


class BrokenError(RuntimeError):
    pass


@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt])
@pytest.mark.parametrize("mode", MODES)
def test_a_forward_that_raises_leaves_nothing_open(
    mode: Any, error: type[BaseException], manager: PipelineOffloadManager
) -> None:
    def interrupted(model: Model) -> list[Tensor]:
        hook = model.layers[1].fc2.register_forward_hook(_raise)
        with pytest.raises(error):
            model(torch.ones(ROWS, WIDTH))
        hook.remove()
        return train(model)

    def _raise(*_: object) -> None:
        raise error

    plain = interrupted(build())
    model = build()
    offload.apply(model, mode, min_numel=1)
    assert equal(interrupted(model), plain)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert manager.stats.spill_bytes > 0


def test_remove_puts_the_model_back_and_leaves_a_pending_backward_right(
    manager: PipelineOffloadManager,
) -> None:
    plain, model = build(), build()
    handle = offload.apply(model, min_numel=1)
    results = []
    for each in (plain, model):
        with seeded(1):
            loss = each(torch.ones(ROWS, WIDTH)).sum()
        if each is model:
            handle.remove()
            handle.remove()
        loss.backward()
        results.append([parameter.grad for parameter in each.parameters()])
    assert equal(results[1], results[0])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert "removed" in repr(handle)
    again = offload.apply(model, min_numel=1)
    assert len(again.blocks) == 3


def test_a_copy_of_the_model_is_as_it_was_before(manager: PipelineOffloadManager) -> None:
    model = build()
    keys = list(model.state_dict())
    model.call = torch.nn.Module.__call__  # a function that pickle finds
    offload.apply(model, min_numel=1)
    assert list(model.state_dict()) == keys
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        train(copied)
        assert manager.stats.saved == 0
        assert not offload.apply(copied, min_numel=1).groups.keys() ^ {"layers"}


def test_a_model_that_is_dropped_is_freed_with_its_hooks(manager: PipelineOffloadManager) -> None:
    gc.disable()
    try:
        model = build()
        handle = offload.apply(model, min_numel=1)
        train(model)
        alive = weakref.ref(model)
        del model
        assert alive() is None
    finally:
        gc.enable()
    handle.remove()


def test_what_is_applied_already_is_refused(manager: PipelineOffloadManager) -> None:
    model = build()
    handle = offload.apply(model, min_numel=1)
    with pytest.raises(ValueError, match=r"is offloaded already, by <offload.apply\(Model, mode='groups'\)"):
        offload.apply(model)
    with pytest.raises(ValueError, match=r"a mode that takes every saved tensor goes with no other one"):
        offload.apply(nn.Sequential(model), True)
    handle.remove()
    assert offload.apply(model, True).blocks == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "disc"}, r"mode is 'disc', must be one of False, 'groups', True"),
        ({"mode": True, "blocks": "layers.*"}, r"blocks='layers.\*' with mode=True, which takes every saved"),
        ({"blocks": "layer.*"}, r"'layer.\*' matches no module of Model; the nearest names are layers"),
        ({"min_numel": -1}, r"min_numel is -1, must be a whole number of elements"),
        ({"device_limit": 8}, r"device_limit is 8, which is 8 bytes; write '8GB', or '8B' if so few are mea"),
        ({"host_limit": 4096}, r"host_limit is 4096, which is 4,096 bytes; write '4096GB', or '4096B' if so"),
        ({"device_limit": "much"}, r"device_limit is 'much'"),
        ({"host_limit": 1.5}, r"host_limit is 1.5"),
        (
            {"host_limit": "50%"},
            r"host_limit is '50%': a share is for device_limit alone; write b",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_has_changed(
    arguments: dict[str, Any], message: str, manager: PipelineOffloadManager
) -> None:
    model = build()
    with pytest.raises(ValueError, match=message):
        offload.apply(model, **arguments)
    assert not any(module._forward_hooks for module in model.modules())
    assert offload.marks.existing_manager() is manager


def test_limits_are_those_of_the_process_whose_device_stays(manager: PipelineOffloadManager) -> None:
    model = build()
    offload.apply(model, device_limit="1 MiB", host_limit="1GB", min_numel=1)
    changed = offload.marks.existing_manager()
    assert changed is not None
    assert changed.engine is manager.engine
    config = changed.engine.config
    assert (config.device_limit_bytes, config.host_limit_bytes) == (1 << 20, 10**9)
    offload.apply(build(), device_limit="8B")
    assert offload.marks.default_manager().engine.config.device_limit_bytes == 8


def test_a_host_limit_that_ranks_share_is_changed_by_configure_alone() -> None:
    store = torch.distributed.HashStore()
    offload.configure(offload.OffloadConfig(host_limit_bytes=1 << 30), device="sim", store=store)
    with pytest.raises(ValueError, match=r"share a limit of 1,073,741,824 bytes; give the new one to conf"):
        offload.apply(build(), host_limit="2GiB")
    offload.apply(build(), device_limit="2GiB")
    changed = offload.marks.default_manager().engine
    assert changed.config.device_limit_bytes == changed.arena.budget.limit_bytes * 2


def test_the_mode_of_the_config_is_taken_where_none_is_given() -> None:
    offload.configure(offload.OffloadConfig(activation_offloading="hidden_states"), device="sim")
    assert offload.apply(build()).mode == "hidden_states"
    offload.configure(offload.OffloadConfig(activation_offloading=False), device="sim")
    model = build()
    handle = offload.apply(model)
    assert repr(handle) == "<offload.apply(Model, mode=False): nothing>"
    assert not model._forward_hooks
    with pytest.raises(ValueError, match=r"activation_offloading is 'offload_disk', must be one of False,"):
        offload.OffloadConfig(activation_offloading="offload_disk")


def test_the_disk_mode_uses_the_directory_for_temporary_files_where_none_is_given() -> None:
    model = build()
    offload.apply(model, "disk", min_numel=1)
    train(model)
    stats = offload.marks.default_manager().stats
    assert 0 < stats.disk_write_bytes <= stats.spill_bytes


def test_the_report_of_a_handle_counts_from_apply_on(manager: PipelineOffloadManager) -> None:
    model = build()
    with offload.activations(model, min_numel=1):
        train(model, steps=2)
    handle = offload.apply(model, min_numel=1)
    assert handle.report().as_dict()["moved_bytes"] == 0
    train(model, steps=1, microbatches=1)
    figures = handle.report().as_dict()
    assert figures["moved_bytes"] == manager.stats.spill_bytes > 0
    assert figures["saved_bytes"] == figures["moved_bytes"] + figures["kept_bytes"]


def test_the_report_of_a_model_for_which_nothing_was_asked_says_so(manager: PipelineOffloadManager) -> None:
    handle = offload.apply(build(), False)
    assert str(handle.report()).endswith("mode=False, as it was asked: nothing of Model leaves")
    other = build()
    with offload.activations(other, min_numel=1):
        train(other, steps=1)
    # what others moved, and that it is not this model's
    text = str(handle.report())
    assert "moved to the host" in text
    assert "mode=False, as it was asked: nothing of Model leaves" in text


def test_where_steps_are_inferred_nobody_asked_for_the_table_of_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with installed(build_manager(print_summary=True)):
        model = build()
        offload.apply(model, min_numel=1)
        train(model)
        assert capsys.readouterr().out == ""


@pytest.mark.req("S4-21")
def test_legacy_waits_for_each_copy_until_it_is_removed(manager: PipelineOffloadManager) -> None:
    limits, before = manager.engine.limits, manager.engine.config
    model = build()
    handle = offload.apply(model, "legacy", min_numel=1)
    assert (limits.max_spilling_bytes, limits.max_restoring_bytes) == (1, 0)
    model(torch.randn(ROWS, WIDTH)).sum().backward()
    stats = manager.step_end()
    # of everything that left, one copy may be under way; each read waits for its own
    assert stats.stall_count > 0
    handle.remove()
    assert manager.engine.config == before


@pytest.mark.req("S4-30")
def test_the_head_and_the_loss_stay(manager: PipelineOffloadManager) -> None:
    model = build(blocks=1)
    offload.apply(model, True, min_numel=1)
    hidden = torch.randn(ROWS, WIDTH)
    model(hidden).square().mean().backward()
    column, narrow = ROWS * 4, ROWS * WIDTH * 4
    # embed: its input; norm: its input, mean, deviation; fc1: its input; tanh: its output; dropout: noise;
    # fc2: its input. The head's input is the last block's output
    saved = narrow + (narrow + 2 * column) + narrow + 2 * narrow + 2 * narrow + 2 * narrow
    assert manager.step_end().spill_bytes == saved


def test_blocks_that_are_called_by_their_forward_are_named(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(lambda block, x: block.forward(x))
    offload.apply(model, min_numel=1)
    train(model)
    assert warnings_of(caplog) == [
        "blocks of Model did not run through their hooks in this step, 3 of 3, and nothing of them left: "
        "layers.0, layers.1, layers.2. Call a block as a module, block(x), not block.forward(x)"
    ]


def test_a_model_whose_forward_is_never_called_as_a_module_is_named(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    class Direct(nn.Module):
        def __init__(self, model: Model) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model.head(self.model.embed(x))

    model = build()
    offload.apply(model, min_numel=1)
    train(Direct(model))
    (message,) = warnings_of(caplog)
    assert message.startswith(
        "an optimizer steps parameters of Model, and no forward of it was seen since apply()"
    )


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(x + self.second(torch.relu_(self.norm(self.first(x)))))


class Convolutional(nn.Module):
    """As torchvision's: each stage a Sequential of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.stem = nn.Conv2d(3, 8, 3)
        self.layer1 = nn.Sequential(*(Residual(8) for _ in range(2)))
        self.layer2 = nn.Sequential(*(Residual(8) for _ in range(3)))
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


@pytest.mark.parametrize("mode", MODES)
def test_a_convolutional_net_has_its_bits_and_the_running_statistics_of_one_forward(mode: Any) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(2, 3, 8, 8)).square().mean().backward()
            optimizer.step()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return [*gradients, *model.parameters(), *model.buffers()]

    model = Convolutional().to(memory_format=torch.channels_last)
    handle = offload.apply(model, mode, min_numel=1)
    assert {group: len(names) for group, names in handle.groups.items()} in ({}, {"layer1": 2, "layer2": 3})
    assert equal(run(model), run(Convolutional().to(memory_format=torch.channels_last)))
    assert offload.marks.default_manager().stats.spill_bytes > 0


def test_modules_inside_blocks_are_groups_of_their_own_and_the_rest_stays(
    manager: PipelineOffloadManager,
) -> None:
    model = build()
    handle = offload.apply(model, modules=["*.norm", "*.fc2"], min_numel=1)
    assert {group: len(names) for group, names in handle.groups.items()} == {"norm": 3, "fc2": 3}
    plain = train(build())
    assert equal(train(model), plain)
    narrow, column = ROWS * WIDTH * 4, ROWS * 4
    # three blocks, two microbatches. norm: its input, mean and deviation; fc2: its input
    assert manager.stats.saved_bytes == 2 * 3 * ((narrow + 2 * column) + 2 * narrow)


def test_a_model_inside_another_one_is_part_of_its_forwards_and_steps(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()
            self.after = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.inner(x))

    plain, model = Outer(), Outer()
    offload.apply(model, blocks="after", min_numel=1)
    offload.apply(model.inner, "hidden_states", min_numel=1)
    plain.load_state_dict(model.state_dict())
    ours = train(model)
    assert equal(ours, train(plain))
    assert warnings_of(caplog) == []
    # one chunk a microbatch: of each block its input, of `after` the inputs of its layers and its output
    narrow, small = ROWS * WIDTH * 4, ROWS * 5 * 4
    assert manager.stats.saved_bytes == 2 * (3 * narrow + 3 * small)


def test_the_first_step_after_a_change_of_mode_keeps_nothing_by_the_plan_of_the_mode_before(
    manager: PipelineOffloadManager,
) -> None:
    model = build()
    handle = offload.apply(model, min_numel=1)
    train(model, microbatches=1)
    assert manager.stats.kept_bytes > 0
    handle.remove()
    offload.apply(model, "hidden_states", min_numel=1)
    train(model, steps=1, microbatches=1)
    assert (manager.stats.kept_bytes, manager.stats.spill_bytes) == (0, 3 * ROWS * WIDTH * 4)

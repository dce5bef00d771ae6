"""The stage, on one rank: what it announces, what it keeps, what evaluation leaves alone, and what it
refuses.

Two neighbouring stages on one rank hand tensors over directly; messages between ranks are in
tests/integration/test_schedules.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import offload
import parallel
from offload import OffloadConfig, PipelineOffloadManager, configure, group_commit, group_start, offload_hooks
from offload.pipelining.stage import OffloadPipelineStage, actions_of
from offload.telemetry.speaker import Once
from parallel.schedules import SCHEDULES, build_schedule

pytestmark = pytest.mark.usefixtures("one_rank")

WIDTH, MICROBATCHES = 4, 4
BY_CONTEXT = hasattr(PipelineStage, "register_forward_context")
"""torch 2.15 and later."""


class Listener:
    """An announcer that writes down, and knows what is running."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.running: list[tuple[str, int, int]] = []

    def begin_chunk(self, stage: int, microbatch: int) -> None:
        self.begin_backward(stage, microbatch, "F")

    def end_forward(self, stage: int, microbatch: int) -> None:
        self.end_backward(stage, microbatch, "F")

    def begin_backward(self, stage: int, microbatch: int, kind: str) -> None:
        self.said.append(f"{stage}{kind}{microbatch}")
        self.running.append((kind, stage, microbatch))

    def end_backward(self, stage: int, microbatch: int, kind: str) -> None:
        self.running.remove((kind, stage, microbatch))

    def register_external(self, tensor: Tensor) -> None:
        self.said.append(f"external {tuple(tensor.shape)}")


def example(*, requires_grad: bool = True) -> Tensor:
    return torch.empty(1, WIDTH, device="meta", requires_grad=requires_grad)


def alone(module: nn.Module, index: int = 0, count: int = 1, **options: Any) -> OffloadPipelineStage:
    """A stage that is told of nobody, unless `announcer` says of whom."""
    inputs = example(requires_grad=index > 0)
    return OffloadPipelineStage(
        module, index, count, torch.device("cpu"), input_args=inputs, output_args=example(), **options
    )


def schedule_over(
    name: str, stages: list[Any], loss_fn: Any = lambda output, target: (output - target).square().sum()
) -> Any:
    return build_schedule(SCHEDULES[name], stages, microbatches=MICROBATCHES, loss_fn=loss_fn)


def new_manager() -> PipelineOffloadManager:
    return configure(OffloadConfig(min_offloaded_tensor_size=1), device="sim", print_summary=False)


class Marked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = group_start(x, "linear")
        with offload_hooks():
            y = super().forward(x).tanh()
        return group_commit(y, "linear")


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def pipeline(name: str, listener: Listener | None) -> tuple[Any, list[OffloadPipelineStage]]:
    torch.manual_seed(0)
    count = SCHEDULES[name].default_virtual_stages
    stages = [alone(layer(), index, count, announcer=listener) for index in range(count)]
    return schedule_over(name, stages), stages


def run(schedule: Any, *, evaluate: bool = False) -> list[Tensor]:
    losses: list[Tensor] = []
    step = schedule.eval if evaluate else schedule.step
    step(
        torch.ones(MICROBATCHES, WIDTH),
        target=torch.zeros(MICROBATCHES, WIDTH),
        losses=losses,
        return_outputs=False,
    )
    return losses


def kept_forwards(stage: OffloadPipelineStage) -> list[tuple[Any, list[Tensor]]]:
    """What torch keeps of each forward: its outputs, and its inputs."""
    if BY_CONTEXT:
        return [(each.live_outputs, each.input_values) for each in stage._forward_chunk_states.values()]
    return list(stage.fwd_cache.values())


def received_bytes(stage: OffloadPipelineStage) -> int:
    infos = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
    buffers = [getattr(info, "buffer", None) for each in infos for info in each]
    return sum(buffer.nbytes for buffer in buffers if buffer is not None and not buffer.is_meta)


def test_chunks_and_their_backwards_are_announced_and_ended() -> None:
    listener = Listener()
    schedule, _ = pipeline("gpipe", listener)
    run(schedule)
    assert listener.said == ["0F0", "0F1", "0F2", "0F3", "0B0", "0B1", "0B2", "0B3"]
    assert listener.running == []


def test_split_backward_is_announced_as_its_two_halves() -> None:
    listener = Listener()
    schedule, _ = pipeline("zbv", listener)
    run(schedule)
    for kind in "FIW":
        assert sorted(said for said in listener.said if said[1] == kind) == [
            f"{stage}{kind}{mb}" for stage in (0, 1) for mb in range(4)
        ]
    assert not any("B" in said for said in listener.said)


def test_input_half_of_the_first_stage_reads_nothing_and_its_weight_half_everything() -> None:
    listener = Listener()
    schedule, _ = pipeline("zbv", listener)
    reads: dict[tuple[str, int], int] = {}

    def unpack(tensor: Tensor) -> Tensor:
        kind, stage, _ = listener.running[-1]
        reads[kind, stage] = reads.get((kind, stage), 0) + 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        run(schedule)
    assert ("I", 0) not in reads
    assert reads["W", 0] > 0
    assert reads["I", 1] > 0
    assert reads["W", 1] > 0


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception_in_a_chunk_comes_through_and_its_announcement_is_ended(where: str) -> None:
    listener = Listener()
    schedule, stages = pipeline("gpipe", listener)

    def fail(*_: Any) -> None:
        raise KeyError("broken layer")

    if where == "forward":
        stages[0].submod.register_forward_pre_hook(fail)
    else:
        stages[0].submod.register_full_backward_pre_hook(fail)
    with pytest.raises(RuntimeError, match=rf"(?i)failed to run.* {where}") as raised:
        run(schedule)
    assert isinstance(raised.value.__cause__, KeyError)
    assert listener.running == []
    assert listener.said[-1] == ("0F0" if where == "forward" else "0B0")


@pytest.mark.parametrize("name", SCHEDULES)
def test_evaluation_announces_nothing_keeps_no_graph_and_leaves_gradients_alone(name: str) -> None:
    listener = Listener()
    schedule, stages = pipeline(name, listener)
    losses = run(schedule)
    before = [
        parameter.grad.clone()
        for stage in stages
        for parameter in stage.submod.parameters()
        if parameter.grad is not None
    ]
    listener.said.clear()
    evaluated = run(schedule, evaluate=True)
    after = [parameter.grad for stage in stages for parameter in stage.submod.parameters()]
    assert listener.said == []
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    assert [loss.item() for loss in evaluated] == [loss.item() for loss in losses]
    kept = [each for stage in stages for each in kept_forwards(stage)]
    assert kept
    assert not any(output.requires_grad for outputs, _ in kept for output in outputs)
    assert not any(inputs for _, inputs in kept)
    run(schedule)
    assert len(listener.said) >= 2 * MICROBATCHES


@pytest.mark.parametrize("name", ["interleaved1f1b", "zbv"])
def test_input_of_a_stage_is_gone_when_its_backward_is_over(name: str) -> None:
    schedule, stages = pipeline(name, None)
    inputs: list[weakref.ref[Tensor]] = []
    stages[1].submod.register_forward_pre_hook(lambda _module, args: inputs.append(weakref.ref(args[0])))
    run(schedule)
    assert len(inputs) == MICROBATCHES
    assert not any(ref() is not None for ref in inputs)


def test_loss_lets_go_of_its_graph_after_the_backward() -> None:
    schedule, _ = pipeline("gpipe", None)
    assert all(loss.grad_fn is None for loss in run(schedule))


def test_leftovers_of_a_step_that_raised_are_dropped_by_the_next() -> None:
    schedule, stages = pipeline("zbv", None)
    handle = stages[1].submod.register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises((RuntimeError, ZeroDivisionError)):  # wrapped or not, by torch's version
        run(schedule)
    handle.remove()
    stages[0].clear_runtime_states()
    stages[1].clear_runtime_states()
    for stage in stages:
        assert not any((kept_forwards(stage), stage.bwd_cache, stage.backward_state, stage.dw_runner))
        assert received_bytes(stage) == 0


def test_a_step_has_nothing_of_one_that_raised_before_a_stage_came_to_read_what_it_was_handed() -> None:
    """torch 2.15 refuses to hand over what was not read, as if a message were still on its way."""
    schedule, stages = pipeline("loopedbfs", None)
    forwards = []

    def third(*_: Any) -> None:
        forwards.append(1)
        if len(forwards) == 3:
            raise KeyError("broken layer")

    handle = stages[0].submod.register_forward_pre_hook(third)
    with pytest.raises(RuntimeError, match="failed to run forward"):
        run(schedule)
    handle.remove()
    schedule._internal_losses.clear()  # torch keeps those of a step that raised
    assert received_bytes(stages[1]) == 2 * WIDTH * 4
    assert len(run(schedule)) == MICROBATCHES
    assert received_bytes(stages[1]) == 0


def test_a_stage_that_nobody_has_any_more_is_gone() -> None:
    gone = weakref.ref(alone(layer(), announcer=None))
    assert gone() is None


@pytest.mark.skipif(not BY_CONTEXT, reason="torch 2.15 has contexts around forwards")
def test_contexts_of_the_users_run_inside_the_announcement_and_each_takes_itself_out() -> None:
    """torch has a place for one, in which the announcement is."""
    listener = Listener()
    schedule, (stage,) = pipeline("gpipe", listener)

    def context(name: str) -> Any:
        @contextmanager
        def around(info: Any) -> Iterator[None]:
            assert listener.running == [("F", info.stage_index, info.microbatch_index)]
            listener.said.append(f"{name} begins")
            yield
            listener.said.append(f"{name} ends")

        return around

    first, second = (stage.register_forward_context(context(name)) for name in ("first", "second"))
    run(schedule)
    assert listener.said[:5] == ["0F0", "first begins", "second begins", "second ends", "first ends"]
    assert listener.running == []
    first.remove()
    second.remove()
    listener.said.clear()
    run(schedule)
    assert listener.said[:4] == ["0F0", "0F1", "0F2", "0F3"]


def test_shapes_that_promise_no_gradient_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"stage 1 of 2: input_args\[0\] of shape \(1, 4\) does not require grad"
    ):
        OffloadPipelineStage(
            layer(), 1, 2, torch.device("cpu"), input_args=example(requires_grad=False), output_args=example()
        )
    with pytest.raises(ValueError, match=r"stage 0 of 2: output_args\[0\]"):
        OffloadPipelineStage(
            layer(), 0, 2, torch.device("cpu"), input_args=example(), output_args=example(requires_grad=False)
        )


@pytest.mark.skipif(
    not (BY_CONTEXT or hasattr(PipelineStage, "_warmup_forward_vote")),
    reason="before torch 2.13 each stage decides for itself",
)
def test_hidden_forward_for_another_stage_without_shapes_is_refused() -> None:
    stages = [alone(layer(), 0, 2, announcer=None), PipelineStage(layer(), 1, 2, torch.device("cpu"))]
    schedule = schedule_over("interleaved1f1b", stages, lambda output, _: output.sum())
    with pytest.raises(ValueError, match="would run a hidden forward"):
        run(schedule)


def test_stage_is_a_name_of_the_package_and_works_alone_with_the_configured_manager() -> None:
    """As README has it: the name was an AttributeError, and the class announced to nobody unless it was
    told whom."""
    PipelineOffloadManager.close_instance()  # an earlier test may have left one
    stage = parallel.OffloadPipelineStage(
        Marked(WIDTH, WIDTH), 0, 1, torch.device("cpu"), input_args=example(), output_args=example()
    )
    PipelineOffloadManager.close_instance()
    assert stage.announcer is None
    try:
        manager = new_manager()
        assert stage.announcer is manager
        run(schedule_over("gpipe", [stage]))
        assert manager.step_end().spilled == 2 * MICROBATCHES
    finally:
        PipelineOffloadManager.close_instance()
    with pytest.raises(AttributeError, match="no attribute 'stages'"):
        parallel.stages  # noqa: B018


def test_a_stage_without_an_announcer_is_told_so_by_its_marks(caplog: pytest.LogCaptureFixture) -> None:
    new_manager()
    try:
        run(schedule_over("gpipe", [alone(Marked(WIDTH, WIDTH), announcer=None)]))
    finally:
        PipelineOffloadManager.close_instance()
    (message,) = caplog.messages
    assert message.startswith("group 'linear' is started while no chunk is current")
    assert "use OffloadPipelineStage and leave its announcer out" in message


# ---- whom a stage finds, and what it tells him of the schedule ----


@pytest.fixture
def no_manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("offload.pipelining.stage._said", Once())
    PipelineOffloadManager.close_instance()
    yield
    PipelineOffloadManager.close_instance()


@pytest.mark.usefixtures("no_manager")
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbv"])
def test_the_order_of_a_schedule_that_is_followed_is_known_to_each_manager_from_its_first_step(
    name: str,
) -> None:
    count = SCHEDULES[name].default_virtual_stages
    stages = [alone(layer(), index, count) for index in range(count)]
    schedule = schedule_over(name, stages)
    stages[-1].follow(schedule)
    for _ in range(2):
        manager = new_manager()
        run(schedule)
        assert manager.tracker._lookahead.actions == actions_of(schedule, 0)
        assert manager.tracker._lookahead.seen == actions_of(schedule, 0)


@pytest.mark.usefixtures("no_manager")
def test_a_stage_follows_only_the_schedule_that_runs_it() -> None:
    stage, other = alone(layer()), alone(layer(), 1, 2)
    with pytest.raises(
        ValueError, match=r"stage 1 was told to follow a ScheduleGPipe that runs stages \[0\]"
    ):
        other.follow(schedule_over("gpipe", [stage]))
    deaf = alone(layer(), announcer=Listener())
    with pytest.raises(ValueError, match="the announcer is a Listener without set_order"):
        deaf.follow(schedule_over("gpipe", [deaf]))
    silent = alone(layer(), announcer=None)
    silent.follow(schedule_over("gpipe", [silent]))
    assert silent.announcer is None


@pytest.mark.usefixtures("no_manager")
def test_a_stage_in_a_process_without_a_manager_says_once_that_nothing_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schedule = schedule_over("gpipe", [alone(Marked(WIDTH, WIDTH))])
    run(schedule)
    run(schedule)
    (message,) = caplog.messages
    assert message == (
        "stage 0 announces its chunks to nobody, so nothing leaves: this process has no manager. Before the "
        "first step call offload.apply(module) for each stage's module, or offload.configure(...) if its "
        "layers carry marks; announcer=None says that nothing is to leave"
    )


@pytest.mark.usefixtures("no_manager")
def test_a_stage_that_was_told_that_nothing_is_to_leave_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    declined = layer()
    offload.apply(declined, mode=False)
    run(schedule_over("gpipe", [alone(declined)]))
    run(schedule_over("gpipe", [alone(layer(), announcer=None)]))
    assert caplog.messages == []


@pytest.mark.usefixtures("no_manager")
def test_steps_of_marked_stages_end_with_the_optimizer_until_somebody_calls_step_end() -> None:
    manager, module = new_manager(), Marked(WIDTH, WIDTH)
    schedule = schedule_over("gpipe", [alone(module)])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        run(schedule)
        optimizer.step()
        assert manager.engine.step == step + 1
        assert manager.stats.saved == 2 * MICROBATCHES
    run(schedule)
    assert manager.step_end().saved == 2 * MICROBATCHES
    optimizer.step()
    run(schedule)
    optimizer.step()
    assert manager.engine.step == 3


@pytest.mark.usefixtures("no_manager")
def test_a_model_beside_the_stages_has_chunks_of_its_own() -> None:
    """A loss that is a network: it was numbered as a stage is, and its forward began that stage's chunk
    anew."""
    manager, module = new_manager(), nn.Sequential(layer(), layer())
    judge = nn.Sequential(layer(), layer())
    offload.apply(judge, min_numel=1)
    offload.apply(module, min_numel=1)
    run(
        schedule_over(
            "gpipe", [alone(module)], lambda output, target: (judge(output) - target).square().sum()
        )
    )
    begun = [handler.id for handler in manager.tracker.handlers.values() if handler.begun]
    assert len(begun) == 2 * MICROBATCHES
    assert len(manager.tracker.retired) == 0

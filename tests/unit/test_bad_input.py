"""What every public function says to a wrong argument: the thing, the numbers, the next step; and nothing has
moved.

A row is a call and what its message must hold. After each one the chunk that was open is as it was: its
forward goes on, its gradients are right, and not a byte more has been copied, kept or lent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload import (
    ActivationOffloadContext,
    ChunkOffloadHandler,
    GroupOrderError,
    HostBudgetError,
    OffloadConfig,
    OffloadEngine,
    OffloadTensorGroup,
    PipelineOffloadManager,
    StaleHandleError,
    configure,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
)
from offload import fine_grained_activation_offload as page
from tests.unit.groups.stack import build_manager, installed

X = torch.ones(4, requires_grad=True)


@pytest.fixture
def manager() -> Iterator[PipelineOffloadManager]:
    with installed(build_manager(host_limit_bytes=1 << 30)) as built:
        yield built


def handler() -> ChunkOffloadHandler:
    found = PipelineOffloadManager.get_instance().cur_forward_chunk()
    assert found is not None
    return found


def the_manager() -> PipelineOffloadManager:
    return PipelineOffloadManager.get_instance()


Call = Callable[[], object]
CALLS: dict[str, tuple[Call, type[BaseException], str]] = {
    # a forward begins
    "vp_stage beyond vp_size": (
        lambda: init_chunk_handler(2, 2, 1),
        ValueError,
        r"vp_stage is 2 and vp_size 2; vp_stage must be in 0\.\.vp_size-1",
    ),
    "vp_stage without vp_size": (
        lambda: init_chunk_handler(None, 1, 1),
        ValueError,
        "vp_stage is 1 and vp_size None; vp_stage must be in",
    ),
    "vp_size 0": (
        lambda: init_chunk_handler(0, 0, 1),
        ValueError,
        "vp_stage is 0 and vp_size 0; .* and vp_size 1 or more",
    ),
    "negative vp_stage": (
        lambda: init_chunk_handler(2, -1, 1),
        ValueError,
        "vp_stage is -1, must be a whole number, 0 or more",
    ),
    "vp_stage of text": (
        lambda: init_chunk_handler(2, "1", 1),
        ValueError,
        "vp_stage is '1', must be a whole number, 0 or more",
    ),  # type: ignore[arg-type]
    "vp_stage between two": (
        lambda: init_chunk_handler(2, 0.5, 1),
        ValueError,
        "vp_stage is 0.5, must be a whole number",
    ),  # type: ignore[arg-type]
    "vp_size of text": (
        lambda: init_chunk_handler("2", 0, 1),
        ValueError,
        "vp_size is '2', must be a whole number",
    ),  # type: ignore[arg-type]
    "negative size": (
        lambda: init_chunk_handler(None, None, -1),
        ValueError,
        r"min_offloaded_tensor_size is -1, must be a whole number of elements, 0 or more \(the default is "
        r"1,048,576\)",
    ),
    "size of text": (
        lambda: init_chunk_handler(None, None, "1"),
        ValueError,
        "min_offloaded_tensor_size is '1', must be",
    ),  # type: ignore[arg-type]
    "fraction above 1": (
        lambda: init_chunk_handler(None, None, 1, activation_offload_fraction=1.5),
        ValueError,
        "activation_offload_fraction is 1.5, must be a number between 0 and 1; 1 lets every eligible group "
        "leave, 0 none",
    ),
    "fraction below 0": (
        lambda: init_chunk_handler(activation_offload_fraction=-0.1),
        ValueError,
        "activation_offload_fraction is -0.1",
    ),
    "no number for a fraction": (
        lambda: init_chunk_handler(activation_offload_fraction=float("nan")),
        ValueError,
        "activation_offload_fraction is nan",
    ),
    "negative delta": (
        lambda: init_chunk_handler(delta_offload_bytes_across_pp_ranks=-1),
        ValueError,
        "delta_offload_bytes_across_pp_ranks is -1, must be a whole number of bytes, 0 or more",
    ),
    "negative rank": (
        lambda: init_chunk_handler(pp_rank=-1),
        ValueError,
        "pp_rank is -1, must be a whole number, 0 or more",
    ),
    "negative cap": (
        lambda: init_chunk_handler(max_inflight_offloads=-1),
        ValueError,
        r"max_inflight_offloads is -1, must be None \(no cap\) or a whole number of groups",
    ),
    "a fourth positional": (
        lambda: init_chunk_handler(None, None, 1, 0),
        TypeError,
        "from 0 to 3 positional arguments but 4",
    ),  # type: ignore[misc]
    "an unknown keyword": (
        lambda: init_chunk_handler(fraction=1),
        TypeError,
        r"init_chunk_handler\(\) has no argument 'fraction'; it has vp_size, .*activation_offload_fraction",
    ),  # type: ignore[call-arg]
    "a limit by its name in apply": (
        lambda: OffloadConfig(device_limit="1GB"),
        TypeError,
        r"OffloadConfig\(\) has no argument 'device_limit'; it has 'device_limit_bytes'",
    ),  # type: ignore[call-arg]
    "a limit without a config": (
        lambda: configure(device_limit="1GB"),
        TypeError,
        r"configure\(\) has no argument 'device_limit'; OffloadConfig has 'device_limit_bytes'",
    ),  # type: ignore[call-arg]
    "a word that is misspelt": (
        lambda: offload.apply(torch.nn.Linear(1, 1), device_totl="1GB"),
        TypeError,
        r"apply\(\) has no argument 'device_totl'; it has 'device_total'",
    ),  # type: ignore[call-arg]
    "a mark of the watermark": (
        lambda: offload.ActivationRuntime(vram_high_watermark=1),
        TypeError,
        r"ActivationConfig\(\) has no argument 'vram_high_watermark'; it has 'vram_high_watermark_mb'",
    ),
    "a word of compare": (
        lambda: offload.compare(torch.nn.Linear(1, 1), int, withn="1GB"),
        TypeError,
        r"compare\(\) has no argument 'withn'; it has 'within'",
    ),  # type: ignore[call-arg]
    "a word that is like no other": (
        lambda: configure(zebra=1),
        TypeError,
        r"configure\(\) has no argument 'zebra'; it has config, device, store",
    ),  # type: ignore[call-arg]
    "announced stage": (
        lambda: the_manager().begin_chunk(-1, 0),
        ValueError,
        "stage is -1, must be a whole number, 0 or more",
    ),
    "announced microbatch": (
        lambda: the_manager().begin_chunk(0, "1"),
        ValueError,
        "microbatch is '1', must be a whole number",
    ),  # type: ignore[arg-type]
    "announced kind": (
        lambda: the_manager().begin_backward(0, 0, "X"),
        ValueError,
        r"backward kind is 'X', must be 'B' \(whole\), 'I' \(input half\) or 'W' \(weight half\)",
    ),
    "kind of an end": (
        lambda: the_manager().end_backward(0, 0, "Z"),
        ValueError,
        "backward kind is 'Z', must be 'B'",
    ),
    "announced backward": (
        lambda: the_manager().begin_backward(0, -1, "B"),
        ValueError,
        "microbatch is -1, must be a whole number",
    ),
    # marks
    "start of no tensor": (
        lambda: group_start(None, "a"),
        ValueError,
        r"group_start\(\.\.\., 'a'\) got a NoneType, must be a tensor that",
    ),  # type: ignore[arg-type]
    "start of a list": (
        lambda: group_start([X], "a"),
        ValueError,
        r"group_start\(\.\.\., 'a'\) got a list, must be a tensor",
    ),  # type: ignore[arg-type]
    "start without a name": (
        lambda: group_start(X, ""),
        ValueError,
        "group_start with name '': a group's name must be a non-empty string",
    ),
    "name of another type": (
        lambda: group_start(X, 5),
        ValueError,
        "group_start with name 5: .* such as 'core_attn'",
    ),  # type: ignore[arg-type]
    "long start without a name": (
        lambda: page.fine_grained_offloading_group_start(X),
        ValueError,
        "group_start with name None",
    ),
    "commit without start": (
        lambda: group_commit(X, "never"),
        GroupOrderError,
        r"chunk s0m0: commit of group 'never', which has not been started; open: open\. Call "
        r"group_start\(tensor, 'never'\) before it, .* where the model is called, unless init_chunk_handler",
    ),
    "commit of no tensor": (
        lambda: group_commit(5, "open"),
        ValueError,
        r"group_commit\(\.\.\., 'open'\) got a int, must be a tensor",
    ),  # type: ignore[type-var]
    "commit of a list of none": (
        lambda: group_commit([5], "open"),
        ValueError,
        r"group_commit\(\.\.\., 'open'\) got a int",
    ),
    "commit without a name": (lambda: group_commit(X, None), ValueError, "group_commit with name None"),  # type: ignore[arg-type]
    "forced release of a tensor": (
        lambda: group_commit(X, "open", X),  # type: ignore[arg-type]
        ValueError,
        "forced_released_tensors is Tensor, must be a list of tensors, or None",
    ),
    "forced release of numbers": (
        lambda: group_commit(X, "open", [X, 5]),
        ValueError,
        r"forced_released_tensors is \['Tensor', 'int'\]",
    ),  # type: ignore[list-item]
    "class on no tensor": (
        lambda: ActivationOffloadContext(True, 5, "a"),
        ValueError,
        r"Interface\(\.\.\., 'a'\) got a int",
    ),  # type: ignore[arg-type]
    "class without a name": (
        lambda: ActivationOffloadContext(True, X, ""),
        ValueError,
        "Interface with name ''",
    ),
    "event for a forward": (
        lambda: offload.forward_record(None),
        ValueError,
        r"forward_record got a NoneType, must be an event with record\(\), such as torch\.cuda\.Event\(\)",
    ),
    "event for a backward": (
        lambda: offload.backward_record(X, 5),
        ValueError,
        "backward_record got a int, must be an event",
    ),
    "record of no tensor": (
        lambda: offload.backward_record(5, None),
        ValueError,
        "backward_record got a int, must be a tensor",
    ),  # type: ignore[arg-type]
    "opting out text": (
        lambda: offload.mark_not_offloadable("x"),
        ValueError,
        "mark_not_offloadable got a str, must be a tensor",
    ),  # type: ignore[arg-type]
    # the manager
    "external of no tensor": (
        lambda: the_manager().register_external(5),
        ValueError,
        "register_external got a int, must be a tensor",
    ),  # type: ignore[arg-type]
    "parameters of a tensor": (
        lambda: the_manager().register_parameters(X),  # type: ignore[arg-type]
        ValueError,
        r"register_parameters got a Tensor, must be a torch\.nn\.Module; mark_not_offloadable takes tensors",
    ),
    "negative reserve": (
        lambda: the_manager().reserve_host(-1),
        ValueError,
        "reserve_host is -1, must be a whole number of bytes, 0 or more",
    ),
    "reserve of text": (
        lambda: the_manager().reserve_host("1"),
        ValueError,
        "reserve_host is '1', must be a whole number of bytes",
    ),  # type: ignore[arg-type]
    "reserve beyond the limit": (
        lambda: the_manager().reserve_host(2 << 30),
        HostBudgetError,
        r"1,073,741,824 .*, or raise host_limit \(host_limit_bytes in",
    ),
    "order of an unknown kind": (
        lambda: the_manager().set_order([("X", 0, 0)]),
        ValueError,
        r"action \('X', 0, 0\) is not \(F, B, I or W;",
    ),
    "order of pairs": (
        lambda: the_manager().set_order([("F", 0)]),
        ValueError,
        r"action \('F', 0\) is not \(F, B, I or W",
    ),  # type: ignore[list-item]
    "order of text": (
        lambda: the_manager().set_order("F0"),
        ValueError,
        "the step's actions are 'F0', must be a list of",
    ),  # type: ignore[arg-type]
    "push of no chunk": (
        lambda: the_manager().push(5),
        ValueError,
        r"push of a int, must be a ChunkOffloadHandler such as cur_forward_chunk",
    ),  # type: ignore[arg-type]
    "delayed no function": (
        lambda: the_manager().push_offload_groups(5),
        ValueError,
        "push_offload_groups got a int, must be a function",
    ),  # type: ignore[arg-type]
    "delayed forced release": (
        lambda: the_manager().push_offload_groups(print, 5),  # type: ignore[arg-type]
        ValueError,
        "forced_released_tensors is int, must be a list of tensors",
    ),
    "no chunk to pop": (
        lambda: the_manager().pop_backward_chunk("never"),
        AssertionError,
        "No non-empty chunk found among 1 queued chunks for group 'never'",
    ),
    "save outside": (
        lambda: the_manager().on_save_for_backward(X),
        AssertionError,
        "Must be inside offload context: use `with manager:`",
    ),
    "get of what was never saved": (
        lambda: the_manager().on_get_saved_tensor(5),  # type: ignore[arg-type]
        AssertionError,
        "unpack of a int; give it what pack returned",
    ),
    # a chunk by hand
    "handler of a negative size": (
        lambda: ChunkOffloadHandler(-1),
        ValueError,
        "min_offloaded_tensor_size is -1, must be",
    ),
    "group without a name": (
        lambda: handler().on_group_start_forward(""),
        ValueError,
        "a group's name is '', must be a non-empty string",
    ),
    "group of another name": (lambda: OffloadTensorGroup(None), ValueError, "a group's name is None"),  # type: ignore[arg-type]
    "commit by hand": (
        lambda: handler().on_group_commit_forward(name="never"),
        GroupOrderError,
        "commit of group 'never', which has not been",
    ),
    "tag that nobody has": (
        lambda: handler().tensor_pop((9, 9)),
        KeyError,
        r"s0m0 holds no tensor under tag \(9, 9\); it holds 0 others",
    ),  # type: ignore[arg-type]
    "no tag": (
        lambda: handler().tensor_pop(5),
        ValueError,
        "tensor_pop of a int, must be the tag that tensor_push gave",
    ),  # type: ignore[arg-type]
    "reload of no state": (
        lambda: handler().reload(5),
        ValueError,
        "reload of a int, must be what offload returned",
    ),  # type: ignore[arg-type]
    "offload of a list": (
        lambda: handler().offload([1.0]),
        ValueError,
        "offload of a list, must be a tensor on sim",
    ),  # type: ignore[arg-type]
    "offload of another device": (
        lambda: handler().offload(torch.empty(4, device="meta")),
        ValueError,
        "offload of a tensor on meta, but the engine's device is sim; move it there first",
    ),
    # building
    "unknown device": (
        lambda: configure(device="tpu"),
        ValueError,
        "unknown device 'tpu'; known: 'cuda', 'cuda:N', 'sim'",
    ),
    "no config": (
        lambda: configure({"piece_bytes": 5}),
        ValueError,
        "config is a dict, must be an OffloadConfig, or None for the default",
    ),  # type: ignore[arg-type]
    "no config for an engine": (
        lambda: OffloadEngine(5),
        ValueError,
        "config is a int, must be an OffloadConfig",
    ),  # type: ignore[arg-type]
    "no engine": (
        lambda: PipelineOffloadManager(OffloadConfig()),
        ValueError,
        "engine is a OffloadConfig, must be an OffloadEngine, or",
    ),  # type: ignore[arg-type]
    "no model": (lambda: offload.apply(3), ValueError, "apply got a int, must be a torch.nn.Module"),  # type: ignore[arg-type]
    "no directory": (
        lambda: OffloadConfig(disk_directory=3),  # type: ignore[arg-type]
        ValueError,
        "disk_directory is 3, must be the path of a directory as a string",
    ),
    "a disk's limit and no directory": (
        lambda: OffloadConfig(disk_limit_bytes=1 << 30),
        ValueError,
        "disk_limit_bytes is 1,073,741,824 without a disk_directory; give both",
    ),
    "negative bytes in the table": (
        lambda: offload.print_offload_summary_table({"a": -1}),
        ValueError,
        "group 'a' reports -1 bytes offloaded, the least is 0; pass what was counted",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_wrong_argument_is_named_and_moves_nothing(manager: PipelineOffloadManager, case: str) -> None:
    call, error, said = CALLS[case]
    leaf = torch.randn(64, requires_grad=True)
    init_chunk_handler(None, None, 1)
    x = group_start(leaf, "open")
    with offload_hooks():
        y = x * x
    before = observed(manager)
    with pytest.raises(error, match=said):
        call()
    assert observed(manager) == before
    assert PipelineOffloadManager.OFFLOAD_MGR is manager
    group_commit(y, "open").sum().backward()
    assert torch.equal(leaf.grad, 2 * leaf.detach())  # type: ignore[arg-type]
    stats = offload.step_end()
    assert (stats.saved, stats.spilled) == (1, 1)


def observed(manager: PipelineOffloadManager) -> tuple[Any, ...]:
    engine = manager.engine
    chunk = manager.cur_forward_chunk()
    group = chunk.innermost_open()
    return (
        str(chunk.id),
        group,
        [other.name for other in chunk.groups],
        manager.cur_backward_chunk(),
        manager.front_backward_chunk(),
        manager.settings,
        manager.do_offload,
        manager._lookahead.actions,
        dict(manager._counts),
        len(manager._delayed),
        engine.hooks.innermost(),
        engine.transfers.counts.saved,
        engine.transfers.device_bytes,
        engine.arena.stats(),
        len(engine.externals.kinds),
        manager.cpu_tensor_pool.stats,
        dict(getattr(engine.device, "waits", {})),
    )


@pytest.mark.req("S2-104")
@pytest.mark.parametrize("value", [-0.01, 1.01, float("nan"), "0.5", None, True])
def test_fraction_of_the_config_outside_its_range_is_named_with_its_value(value: Any) -> None:
    with pytest.raises(
        ValueError, match=f"activation_offload_fraction is {value!r}, must be a number between 0 and 1"
    ):
        OffloadConfig(activation_offload_fraction=value)


def saved_in_a_group(x: Tensor) -> Tensor:
    x = group_start(x, "a")
    with offload_hooks():
        y = x * x
    return group_commit(y, "a")


@pytest.mark.usefixtures("manager")
def test_backward_after_the_step_has_ended_names_the_tensor_and_says_what_to_do() -> None:
    init_chunk_handler(None, None, 1)
    y = saved_in_a_group(torch.randn(64, requires_grad=True))
    offload.step_end()
    with pytest.raises(
        StaleHandleError,
        match=(
            r"s0m0/a#0\[0\] \(256 bytes\) was saved in a step that has ended; run its "
            r"backward before step_end"
        ),
    ):
        y.sum().backward()


@pytest.mark.usefixtures("manager")
def test_write_in_place_to_what_was_saved_is_the_error_that_autograd_would_raise() -> None:
    init_chunk_handler(None, None, 1)
    leaf = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    x = group_start(leaf * 1, "a")
    with offload_hooks():
        y = x * x
    y = group_commit(y, "a")
    x.add_(1)
    with pytest.raises(
        RuntimeError,
        match=(
            r"modified by an inplace operation: torch\.float64 \[4, 16\] is at version 1, "
            r"expected version 0"
        ),
    ):
        y.sum().backward()

"""What every public function says to a wrong argument: the thing, the numbers, the next step; and nothing has
moved.

A row is what the message must hold and the call. After each one the chunk that was open is as it was: its
forward goes on, its gradients are right, and not a byte more has been copied, kept or lent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

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


ERRORS: dict[type[BaseException], dict[str, Callable[[], object]]] = {
    ValueError: {
        r"vp_stage is 2 and vp_size 2; vp_stage must be in 0\.\.vp_size-1": lambda: init_chunk_handler(
            2, 2, 1
        ),
        "vp_stage is 1 and vp_size None; vp_stage must be in": lambda: init_chunk_handler(None, 1, 1),
        "vp_stage is 0 and vp_size 0; .* and vp_size 1 or more": lambda: init_chunk_handler(0, 0, 1),
        "vp_stage is -1, must be a whole number, 0 or more": lambda: init_chunk_handler(2, -1, 1),
        "vp_stage is '1', must be a whole number, 0 or more": lambda: init_chunk_handler(2, "1", 1),
        "vp_stage is 0.5, must be a whole number": lambda: init_chunk_handler(2, 0.5, 1),
        "vp_size is '2', must be a whole number": lambda: init_chunk_handler("2", 0, 1),
        r"min_offloaded_tensor_size is -1, must be a whole number of elements, 0 or more \(the default is "
        r"1,048,576\)": lambda: init_chunk_handler(None, None, -1),
        "min_offloaded_tensor_size is '1', must be": lambda: init_chunk_handler(None, None, "1"),
        "activation_offload_fraction is 1.5, must be a number between 0 and 1; 1 lets every eligible group "
        "leave, 0 none": lambda: init_chunk_handler(None, None, 1, activation_offload_fraction=1.5),
        "activation_offload_fraction is -0.1": lambda: init_chunk_handler(activation_offload_fraction=-0.1),
        "activation_offload_fraction is nan": lambda: init_chunk_handler(
            activation_offload_fraction=float("nan")
        ),
        "delta_offload_bytes_across_pp_ranks is -1, must be a whole number of bytes, 0 or more": lambda: (
            init_chunk_handler(delta_offload_bytes_across_pp_ranks=-1)
        ),
        "pp_rank is -1, must be a whole number, 0 or more": lambda: init_chunk_handler(pp_rank=-1),
        r"max_inflight_offloads is -1, must be None \(no cap\) or a whole number of groups": lambda: (
            init_chunk_handler(max_inflight_offloads=-1)
        ),
        "stage is -1, must be a whole number, 0 or more": lambda: the_manager().begin_chunk(-1, 0),
        "microbatch is '1', must be a whole number": lambda: the_manager().begin_chunk(0, "1"),
        r"backward kind is 'X', must be 'B' \(whole\), 'I' \(input half\) or 'W' \(weight half\)": lambda: (
            the_manager().begin_backward(0, 0, "X")
        ),
        "backward kind is 'Z', must be 'B'": lambda: the_manager().end_backward(0, 0, "Z"),
        "microbatch is -1, must be a whole number": lambda: the_manager().begin_backward(0, -1, "B"),
        r"group_start\(\.\.\., 'a'\) got a NoneType, must be a tensor that": lambda: group_start(None, "a"),
        r"group_start\(\.\.\., 'a'\) got a list, must be a tensor": lambda: group_start([X], "a"),
        "group_start with name '': a group's name must be a non-empty string": lambda: group_start(X, ""),
        "group_start with name 5: .* such as 'core_attn'": lambda: group_start(X, 5),
        "group_start with name None": lambda: page.fine_grained_offloading_group_start(X),
        r"group_commit\(\.\.\., 'open'\) got a int, must be a tensor": lambda: group_commit(5, "open"),
        r"group_commit\(\.\.\., 'open'\) got a int": lambda: group_commit([5], "open"),
        "group_commit with name None": lambda: group_commit(X, None),
        "forced_released_tensors is Tensor, must be a list of tensors, or None": lambda: group_commit(
            X, "open", X
        ),
        r"forced_released_tensors is \['Tensor', 'int'\]": lambda: group_commit(X, "open", [X, 5]),
        r"Interface\(\.\.\., 'a'\) got a int": lambda: ActivationOffloadContext(True, 5, "a"),
        "Interface with name ''": lambda: ActivationOffloadContext(True, X, ""),
        r"forward_record got a NoneType, must be an event with record\(\), such as torch\.cuda": lambda: (
            offload.forward_record(None)
        ),
        "backward_record got a int, must be an event": lambda: offload.backward_record(X, 5),
        "backward_record got a int, must be a tensor": lambda: offload.backward_record(5, None),
        "mark_not_offloadable got a str, must be a tensor": lambda: offload.mark_not_offloadable("x"),
        "register_external got a int, must be a tensor": lambda: the_manager().register_external(5),
        r"register_parameters got a Tensor, must be a torch\.nn\.Module; mark_not_offloadable": lambda: (
            the_manager().register_parameters(X)
        ),
        "reserve_host is -1, must be a whole number of bytes, 0 or more": lambda: the_manager().reserve_host(
            -1
        ),
        "reserve_host is '1', must be a whole number of bytes": lambda: the_manager().reserve_host("1"),
        r"action \('X', 0, 0\) is not \(F, B, I or W;": lambda: the_manager().set_order([("X", 0, 0)]),
        r"action \('F', 0\) is not \(F, B, I or W": lambda: the_manager().set_order([("F", 0)]),
        "the step's actions are 'F0', must be a list of": lambda: the_manager().set_order("F0"),
        r"push of a int, must be a ChunkOffloadHandler such as cur_forward_chunk": lambda: the_manager().push(
            5
        ),
        "push_offload_groups got a int, must be a function": lambda: the_manager().push_offload_groups(5),
        "forced_released_tensors is int, must be a list of tensors": lambda: (
            the_manager().push_offload_groups(print, 5)
        ),
        "min_offloaded_tensor_size is -1, must be": lambda: ChunkOffloadHandler(-1),
        "a group's name is '', must be a non-empty string": lambda: handler().on_group_start_forward(""),
        "a group's name is None": lambda: OffloadTensorGroup(None),
        "tensor_pop of a int, must be the tag that tensor_push gave": lambda: handler().tensor_pop(5),
        "reload of a int, must be what offload returned": lambda: handler().reload(5),
        "offload of a list, must be a tensor on sim": lambda: handler().offload([1.0]),
        "offload of a tensor on meta, but the engine's device is sim; move it there first": lambda: (
            handler().offload(torch.empty(4, device="meta"))
        ),
        "unknown device 'tpu'; known: 'cuda', 'cuda:N', 'sim'": lambda: configure(device="tpu"),
        "config is a dict, must be an OffloadConfig, or None for the default": lambda: configure(
            {"piece_bytes": 5}
        ),
        "config is a int, must be an OffloadConfig": lambda: OffloadEngine(5),
        "engine is a OffloadConfig, must be an OffloadEngine, or": lambda: PipelineOffloadManager(
            OffloadConfig()
        ),
        "apply got a int, must be a torch.nn.Module": lambda: offload.apply(3),
        "disk_directory is 3, must be the path of a directory as a string": lambda: OffloadConfig(
            disk_directory=3
        ),
        "disk_limit_bytes is 1,073,741,824 without a disk_directory; give both": lambda: OffloadConfig(
            disk_limit_bytes=1 << 30
        ),
        "group 'a' reports -1 bytes offloaded, the least is 0; pass what was counted": lambda: (
            offload.print_offload_summary_table({"a": -1})
        ),
    },
    TypeError: {
        "from 0 to 3 positional arguments but 4": lambda: init_chunk_handler(None, None, 1, 0),
        r"init_chunk_handler\(\) has no argument 'fraction'; it has vp_size, .*offload_fraction": lambda: (
            init_chunk_handler(fraction=1)
        ),
        r"OffloadConfig\(\) has no argument 'device_limit'; it has 'device_limit_bytes'": lambda: (
            OffloadConfig(device_limit="1GB")
        ),
        r"configure\(\) has no argument 'device_limit'; OffloadConfig has 'device_limit_bytes'": lambda: (
            configure(device_limit="1GB")
        ),
        r"apply\(\) has no argument 'device_totl'; it has 'device_total'": lambda: offload.apply(
            torch.nn.Linear(1, 1), device_totl="1GB"
        ),
        r"ActivationConfig\(\) has no argument 'vram_high_watermark'; .* 'vram_high_watermark_mb'": lambda: (
            offload.ActivationRuntime(vram_high_watermark=1)
        ),
        r"compare\(\) has no argument 'withn'; it has 'within'": lambda: offload.compare(
            torch.nn.Linear(1, 1), int, withn="1GB"
        ),
        r"configure\(\) has no argument 'zebra'; it has config, device, store": lambda: configure(zebra=1),
    },
    GroupOrderError: {
        r"chunk s0m0: commit of group 'never', which has not been started; open: open\. Call group_start"
        r"\(tensor, 'never'\) before it, .* where the model is called, unless init_chunk_handler": lambda: (
            group_commit(X, "never")
        ),
        "commit of group 'never', which has not been": lambda: handler().on_group_commit_forward(
            name="never"
        ),
    },
    HostBudgetError: {
        r"1,073,741,824 .*, or raise host_limit \(host_limit_bytes in": lambda: the_manager().reserve_host(
            2 << 30
        ),
    },
    AssertionError: {
        "No non-empty chunk found among 1 queued chunks for group 'never'": lambda: (
            the_manager().pop_backward_chunk("never")
        ),
        "Must be inside offload context: use `with manager:`": lambda: the_manager().on_save_for_backward(X),
        "unpack of a int; give it what pack returned": lambda: the_manager().on_get_saved_tensor(5),
    },
    KeyError: {
        r"s0m0 holds no tensor under tag \(9, 9\); it holds 0 others": lambda: handler().tensor_pop((9, 9)),
    },
}


@pytest.mark.parametrize(
    ("error", "said"), [(error, said) for error, calls in ERRORS.items() for said in calls]
)
def test_wrong_argument_is_named_and_moves_nothing(
    manager: PipelineOffloadManager, error: type[BaseException], said: str
) -> None:
    leaf = torch.randn(64, requires_grad=True)
    init_chunk_handler(None, None, 1)
    x = group_start(leaf, "open")
    with offload_hooks():
        y = x * x
    before = observed(manager)
    with pytest.raises(error, match=said):
        ERRORS[error][said]()
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
        manager.tracker._lookahead.actions,
        dict(manager.tracker._counts),
        len(manager.scopes.delayed),
        engine.hooks.innermost(),
        engine.transfers.counts.saved,
        engine.transfers.device_bytes,
        engine.arena.stats(),
        len(engine.externals.kinds),
        manager.cpu_tensor_pool.stats,
        dict(getattr(engine.device, "waits", {})),
    )

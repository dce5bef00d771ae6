"""The drop-in for Megatron-core without Megatron: a package of that name is written where it is needed.

pytest tests/unit/parallel/test_megatron.py
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
import offload.fine_grained_activation_offload as engine_page
from offload import (
    GPUTensorPool,
    OffloadConfig,
    OffloadEngine,
    OffloadError,
    PipelineOffloadManager,
    configure,
)
from offload.device.sim import SimDevice
from parallel import megatron
from parallel.megatron_page import FineGrainedActivationOffloadingInterface as Interface
from parallel.megatron_page import is_tagged_to_stay, megatron_version, names_of
from tests.forks import forked

ROOT = Path(__file__).resolve().parents[3]
USER = "megatron.core.pipeline_parallel.schedules"
BYTES = 64 * 4  # one saved tensor of 64 float32


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Neither a loaded Megatron nor a manager of another test, and none left behind."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"}
    for name in before:
        del sys.modules[name]
    yield
    megatron.uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]
    sys.modules.update(before)
    PipelineOffloadManager.reset_instance()


@pytest.fixture
def manager() -> PipelineOffloadManager:
    return configure(OffloadConfig(), device="sim", print_summary=False)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A megatron.core with a page of its own and a module that imports from it."""
    folder = tmp_path / "megatron" / "core" / "pipeline_parallel"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("__version__ = '0.16.1'\n")
    (folder / "__init__.py").write_text("from . import schedules\n")
    (folder / "schedules.py").write_text(
        f"from {megatron.PAGE} import FineGrainedActivationOffloadingInterface as off_interface\n"
    )
    (folder / "fine_grained_activation_offload.py").write_text(
        "class FineGrainedActivationOffloadingInterface: own = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return folder


def version(text: str) -> None:
    """As if that version of Megatron were loaded."""
    sys.modules["megatron.core.package_info"] = module = ModuleType("megatron.core.package_info")
    vars(module)["__version__"] = text


def begin() -> None:
    Interface.init_chunk_handler(vp_size=None, vp_stage=None, min_offloaded_tensor_size=1)


def spilled(manager: PipelineOffloadManager) -> int:
    """Bytes that have been sent in the step so far; ends it."""
    manager.step_end()
    return manager.stats.spill_bytes


def leaf() -> torch.Tensor:
    return torch.arange(64.0).requires_grad_()


# ---- install ----


def test_import_of_the_drop_in_imports_neither_megatron_nor_comes_with_parallel(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise AssertionError('imported')\n")
    code = (
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport parallel\n"
        "assert 'parallel.megatron' not in sys.modules\nimport parallel.megatron as m\nm.install()\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'megatron']\n"
    )
    with forked(code) as process:
        assert process.ended().code == 0


def test_importers_get_the_engine_after_install_however_they_import(package: Path) -> None:
    megatron.install()
    assert importlib.import_module(USER).off_interface is Interface
    parent = importlib.import_module("megatron.core.pipeline_parallel")
    assert parent.fine_grained_activation_offload is sys.modules[megatron.PAGE]


def test_second_install_changes_nothing_even_once_the_page_is_loaded(package: Path) -> None:
    megatron.install()
    page = importlib.import_module(megatron.PAGE)
    finders = len(sys.meta_path)
    megatron.install()
    assert len(sys.meta_path) == finders
    assert importlib.import_module(megatron.PAGE) is page


def test_install_does_not_ask_whether_megatron_has_such_a_page(package: Path) -> None:
    (package / "fine_grained_activation_offload.py").unlink()
    importlib.import_module("megatron.core")  # part of it is already loaded
    megatron.install()
    assert importlib.import_module(USER).off_interface is Interface


def test_install_without_megatron_leaves_the_import_error_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron.install()
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    monkeypatch.setattr(
        sys, "meta_path", [finder for finder in sys.meta_path if "editable" not in repr(finder)]
    )
    with pytest.raises(ModuleNotFoundError, match="'megatron'"):
        importlib.import_module(megatron.PAGE)


def test_install_after_megatrons_own_page_says_what_to_do(package: Path) -> None:
    importlib.import_module(USER)
    with pytest.raises(
        OffloadError,
        match=rf"{megatron.PAGE} is already loaded from .*activation_offload.py.*before the first import",
    ):
        megatron.install()
    assert importlib.import_module(USER).off_interface.own


def test_uninstall_gives_megatron_its_own_page_back(package: Path) -> None:
    megatron.install()
    importlib.import_module(USER)
    megatron.uninstall()
    megatron.uninstall()
    assert not hasattr(
        importlib.import_module("megatron.core.pipeline_parallel"), "fine_grained_activation_offload"
    )
    assert importlib.import_module(megatron.PAGE).FineGrainedActivationOffloadingInterface.own


@pytest.mark.parametrize("is_loaded", [False, True])
def test_uninstall_leaves_what_somebody_else_put_in_the_pages_place(package: Path, is_loaded: bool) -> None:
    megatron.install()
    parent = importlib.import_module("megatron.core.pipeline_parallel")
    importlib.import_module(megatron.PAGE)
    other = parent.fine_grained_activation_offload = ModuleType("other")
    if not is_loaded:
        del sys.modules[parent.__name__]
    megatron.uninstall()
    assert megatron.PAGE not in sys.modules
    assert parent.fine_grained_activation_offload is other


def test_version_is_that_of_what_is_loaded(package: Path) -> None:
    assert megatron_version() is None
    importlib.import_module("megatron.core")
    assert megatron_version() == (0, 16)
    version("0.19.2rc1")
    assert megatron_version() == (0, 19)


# ---- names ----


def test_page_has_the_names_of_both_generations() -> None:
    names = names_of(sys)
    assert names["OffloadTensorPool"] is names["GPUTensorPool"] is GPUTensorPool
    assert isinstance(names["logger"], logging.Logger)
    assert set(engine_page.__all__) < set(names)
    assert {"fine_grained_offloading_group_offload", "fine_grained_offloading_group_commit"} < set(names)
    for name in (
        "group_commit",
        "group_offload",
        "mark_not_offload",
        "mark_not_offloadable",
        "enter_replay",
        "exit_replay",
    ):
        assert callable(getattr(Interface, name))


def test_debug_messages_follow_the_flags_of_the_page(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron.install()
    page: Any = importlib.import_module(megatron.PAGE)
    page.debug_rank("silent")
    page.DEBUG = True
    page.debug_rank("heard")
    page.DEBUG_RANK = 1
    page.debug_rank("another rank's")
    assert capsys.readouterr().out == "heard\n"


# ---- a microbatch begins ----


@pytest.mark.parametrize(
    ("loaded", "arguments", "keywords", "stage", "settings"),
    [
        (None, (2, 1, 7), {}, 1, (1.0, 0, 0, None)),
        ("0.16.1", (2, 1, 7), {}, 1, (1.0, 0, 0, None)),
        ("0.18.1", (2, 1, 7), {}, 1, (1.0, 0, 0, None)),
        ("0.18.1", (2, 1, 7, 2), {}, 1, (1.0, 0, 0, 2)),
        (
            "0.18.1",
            (),
            {"vp_size": 2, "vp_stage": 1, "min_offloaded_tensor_size": 7, "max_inflight_offloads": 2},
            1,
            (1.0, 0, 0, 2),
        ),
        (None, (2, 1, 7), {"max_inflight_offloads": 2}, 1, (1.0, 0, 0, 2)),
        (None, (3, 2, 1, 7), {}, 1, (1.0, 0, 3, None)),
        ("0.17.1", (3, 2, 1, 7), {}, 1, (1.0, 0, 3, None)),
        ("0.19.2", (0, 2, 1), {"min_offloaded_tensor_size": 7}, 1, (1.0, 0, 0, None)),
        ("0.16.1", (3, 2, 1, 7, 100, 0.5), {}, 1, (0.5, 100, 3, None)),
        ("0.19.2", (3, 2, 1, 7, 100, 0.5, 2), {}, 1, (0.5, 100, 3, 2)),
        (None, (), {"vp_size": 2, "vp_stage": 1, "min_offloaded_tensor_size": 7}, 1, (1.0, 0, 0, None)),
        (
            None,
            (),
            {
                "pp_rank": 3,
                "vp_size": None,
                "vp_stage": None,
                "min_offloaded_tensor_size": 7,
                "activation_offload_fraction": 0.25,
            },
            0,
            (0.25, 0, 3, None),
        ),
    ],
)
def test_order_of_arguments_is_read_from_them_and_else_from_the_version(
    manager: PipelineOffloadManager,
    loaded: str | None,
    arguments: Any,
    keywords: Any,
    stage: int,
    settings: Any,
) -> None:
    if loaded is not None:
        version(loaded)
    Interface.init_chunk_handler(*arguments, **keywords)
    chunk = manager.cur_forward_chunk()
    assert (chunk.id.stage, chunk.min_offloaded_tensor_size) == (stage, 7)
    seen = manager.settings
    assert settings == (
        seen.activation_offload_fraction,
        seen.delta_offload_bytes_across_pp_ranks,
        seen.pp_rank,
        seen.max_inflight_offloads,
    )


def test_no_cap_in_flight_takes_back_an_earlier_cap(manager: PipelineOffloadManager) -> None:
    Interface.init_chunk_handler(0, 1, 0, 1, 0, 1.0, 2)
    assert manager.settings.max_inflight_offloads == 2
    Interface.init_chunk_handler(0, 1, 0, 1, 0, 1.0)
    assert manager.settings.max_inflight_offloads is None
    Interface.init_chunk_handler(1, 0, 1, max_inflight_offloads=3)
    assert manager.settings.max_inflight_offloads == 3
    Interface.init_chunk_handler(1, 0, 1)  # core 0.16 knows of none
    assert manager.settings.max_inflight_offloads == 3
    Interface.init_chunk_handler(1, 0, 1, max_inflight_offloads=None)
    assert manager.settings.max_inflight_offloads is None


@pytest.mark.usefixtures("manager")
def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"activation_offload_fraction is 1\.5"):
        Interface.init_chunk_handler(0, 1, 0, 1, 0, 1.5)
    with pytest.raises(ValueError, match="vp_stage"):
        Interface.init_chunk_handler(1, 1, 1)
    with pytest.raises(TypeError, match="unheard"):
        Interface.init_chunk_handler(1, 0, 1, unheard=3)
    with pytest.raises(ValueError, match="name None"):
        Interface(True, leaf(), None).__enter__()  # type: ignore[arg-type]


# ---- groups ----


@pytest.mark.req("S2-92", "S2-93")
@pytest.mark.parametrize("way", ["0.16", "0.19", "of the class"])
def test_every_way_to_close_a_group_sends_its_bytes_and_passes_the_gradient(
    manager: PipelineOffloadManager, way: str
) -> None:
    begin()
    source = leaf()
    opened = Interface(True, source * 1, "core_attn")
    with opened as x:
        y = x.sin()
    if way == "0.16":
        y = Interface.group_commit(y, name="core_attn", forced_released_tensors=[])
    elif way == "0.19":
        y = opened.group_offload(y, forced_released_tensors=[])
    else:
        y = Interface.group_offload(y, "core_attn")
    y.sum().backward()
    assert torch.equal(source.grad, leaf().detach().cos())
    assert spilled(manager) == BYTES


def test_object_that_does_not_offload_reads_none_of_its_arguments(manager: PipelineOffloadManager) -> None:
    nothing: Any = object()
    opened = Interface(False, nothing, "whatever")
    with opened as x:
        assert x is nothing
    assert opened.group_offload(nothing, forced_released_tensors=[nothing], delay_offload=True) is nothing


def test_context_installs_the_hooks_of_an_open_group(manager: PipelineOffloadManager) -> None:
    begin()
    x = names_of(sys)["fine_grained_offloading_group_start"](leaf() * 1, "core_attn")
    with Interface.get_context(False):
        x = x.sin()
    with Interface.get_context(True):
        y = x.sin()
    Interface.group_commit(y, "core_attn").sum().backward()
    assert spilled(manager) == BYTES


def tagged(tensor: Tensor) -> Tensor:
    vars(tensor)["_TE_do_not_offload"] = True
    return tensor


@pytest.mark.parametrize(
    "tag",
    [
        {"offloading_activation": False},
        {"_do_not_offload": True},
        {"_TE_do_not_offload": True},
        {"get_data_tensors": lambda: (None, tagged(torch.ones(2)))},
    ],
)
def test_tagged_tensor_stays_and_its_neighbour_leaves(
    manager: PipelineOffloadManager, tag: dict[str, Any]
) -> None:
    """TransformerEngine tags what lies in its quantized tensors, which nobody looked into."""
    begin()
    stays, leaves = leaf() * 1, leaf() * 2
    vars(stays).update(tag)
    with Interface(True, stays, "core_attn"):
        y = stays * leaves
    Interface.group_commit(y, "core_attn").sum().backward()
    assert spilled(manager) == BYTES


@pytest.mark.usefixtures("manager")
def test_a_wrapper_whose_data_cannot_be_asked_for_leaves_as_any_other() -> None:
    def empty() -> tuple[Tensor, ...]:
        raise RuntimeError("no data")

    begin()
    x = leaf() * 1
    for members in (empty, lambda: (None, torch.ones(2))):
        vars(x)["get_data_tensors"] = members
        assert not is_tagged_to_stay(x)


def test_tagged_tensor_stays_whatever_group_is_around(manager: PipelineOffloadManager) -> None:
    begin()
    stays = leaf() * 1
    vars(stays).update({"_do_not_offload": True})
    with Interface(True, leaf(), "attn_norm"), Interface(True, stays, "core_attn"):
        y = stays.sin()
    y = Interface.group_commit(Interface.group_commit(y, "core_attn"), "attn_norm")
    y.sum().backward()
    assert spilled(manager) == 0


@pytest.mark.req("S2-52")
@pytest.mark.parametrize("mark", [Interface.mark_not_offload, Interface.mark_not_offloadable])
def test_marked_tensor_stays(manager: PipelineOffloadManager, mark: Any) -> None:
    begin()
    stays = leaf() * 1
    mark(stays)
    mark(None)
    with Interface(True, stays, "core_attn"):
        y = stays.sin()
    Interface.group_commit(y, "core_attn").sum().backward()
    assert spilled(manager) == 0


# ---- graphs ----


@pytest.mark.parametrize(
    ("core", "in_a_replay", "sent"),
    [("0.16", False, False), ("0.16", True, False), ("0.19", False, True), ("0.19", True, False)],
)
def test_a_delay_waits_for_the_flush_and_that_of_0_19_in_a_replay_alone(
    manager: PipelineOffloadManager, core: str, in_a_replay: bool, sent: bool
) -> None:
    def has_left() -> bool:
        return any(record.state.name != "RESIDENT" for record in manager.living_blocks())

    if in_a_replay:
        Interface.enter_replay()
    begin()
    opened = Interface(True, leaf() * 1, "moe_act")
    with opened as x:
        y = x.sin()
    if core == "0.16":
        y = Interface.group_commit(y, "moe_act", delay_offload=True)
    else:
        y = opened.group_offload(y, delay_offload=True)
    assert has_left() is sent
    Interface.flush_delayed_groups()
    assert has_left()
    y.sum().backward()
    Interface.reset()
    if in_a_replay:
        Interface.exit_replay()


@pytest.mark.usefixtures("manager")
def test_group_inside_a_capture_is_refused_unless_offloading_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_page, "is_graph_capturing", lambda: True)
    begin()
    with pytest.raises(
        megatron.GraphCaptureError,
        match=r"'core_attn' is opened while a CUDA graph is captured.*offload_modules",
    ):
        Interface(True, leaf(), "core_attn").__enter__()
    Interface.disable_offload()
    with Interface(True, leaf(), "core_attn") as x:
        Interface.group_commit(x.sin(), "core_attn")
    Interface.enable_offload()


def test_group_inside_a_capture_that_a_region_watches_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both generations' ways to close it; what Megatron tags stays, as outside of captures."""
    device = SimDevice()
    manager = PipelineOffloadManager(
        OffloadEngine(OffloadConfig(min_offloaded_tensor_size=1), device=device), print_summary=False
    )
    manager.reserve_host(1 << 20)
    monkeypatch.setattr(offload.marks, "process_manager", manager)
    monkeypatch.setattr(engine_page, "is_graph_capturing", device.is_capturing)
    begin()
    with offload.capturing() as region, device.capture():
        with Interface(True, leaf(), "core_attn") as x:
            y = x.sin()
        Interface.group_commit(y, "core_attn")
        opened = Interface(True, leaf(), "moe_act")
        with opened as x:
            y = x.sin()
        opened.group_offload(y)
    assert region.spill_bytes == 2 * leaf().numel() * leaf().element_size()
    manager.close()


@pytest.mark.usefixtures("manager")
def test_graph_stream_and_event_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for ask in (
        Interface.cuda_graph_stream,
        Interface.cuda_graph_event,
        Interface.forward_record,
        lambda: Interface.backward_record(leaf()),
    ):
        with pytest.raises(OffloadError, match="torch sees no GPU; set cuda_graph_impl"):
            ask()


@pytest.mark.gpu
def test_real_capture_in_a_region_is_replayed_on_megatrons_stream() -> None:
    """As Transformer Engine does it: captured and replayed on the graphs' own stream, which records their
    event where compute ends."""
    configure(OffloadConfig(host_reserve_bytes=1 << 20), device="cuda", print_summary=False)
    begin()
    x = torch.zeros(64, device="cuda").requires_grad_()
    forward, backward, stream = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), Interface.cuda_graph_stream()
    with offload.capturing() as region:
        with torch.cuda.graph(forward, stream=stream):
            with Interface(True, Interface.backward_record(x), "core_attn") as marked:
                y = marked.sin()
            y = Interface.group_commit(y, "core_attn") * 1.0
            Interface.forward_record()
        with torch.cuda.graph(backward, stream=stream, pool=forward.pool()):
            (gradient,) = torch.autograd.grad(y.sum(), x)
    assert region.spill_bytes == BYTES
    for value in (0.5, 1.5):
        with torch.no_grad():
            x.fill_(value)
        for graph in (forward, backward):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.replay()
            torch.cuda.current_stream().wait_event(Interface.cuda_graph_event())
        assert torch.equal(gradient, x.detach().cos())


@pytest.mark.gpu
def test_real_capture_is_refused_and_its_stream_and_event_are_made_once() -> None:
    manager = configure(OffloadConfig(), device="cuda", print_summary=False)
    begin()
    x = torch.arange(64.0, device="cuda").requires_grad_()
    with (
        pytest.raises(megatron.GraphCaptureError),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=Interface.cuda_graph_stream()),
    ):
        Interface(True, x, "core_attn").__enter__()
    event = Interface.cuda_graph_event()
    assert Interface.cuda_graph_stream() not in (
        torch.cuda.current_stream(),
        manager.d2h_stream,
        manager.h2d_stream,
    )
    Interface.forward_record()
    Interface.backward_record(x * 1).sum().backward()
    assert Interface.cuda_graph_event() is event
    torch.cuda.synchronize()
    assert x.grad is not None


class Event:
    recorded = 0

    def record(self) -> None:
        self.recorded += 1


@pytest.mark.usefixtures("manager")
def test_records_take_an_event_as_0_16_gives_one() -> None:
    event = Event()
    Interface.forward_record(event)
    assert event.recorded == 1
    marked = Interface.backward_record(leaf(), event)
    assert event.recorded == 1
    marked.sum().backward()
    assert event.recorded == 2


# ---- the step and its table ----


def test_reset_ends_the_step_and_keeps_the_process_group(manager: PipelineOffloadManager) -> None:
    group = object()
    Interface.reset(process_group=group)
    assert manager.process_group is group
    Interface.reset()
    assert manager.process_group is group
    other = object()
    manager.reset(process_group=other)  # core 0.20
    assert manager.process_group is other
    manager.reset()
    manager.post_warmup_callback(process_group=group)
    assert manager.process_group is group


def test_reset_without_a_manager_makes_none() -> None:
    PipelineOffloadManager.OFFLOAD_MGR = None
    Interface.reset()
    assert PipelineOffloadManager.OFFLOAD_MGR is None


def test_table_says_that_duplicates_have_no_column(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    show = names_of(sys)["print_offload_summary_table"]
    show({"core_attn": 2**20}, {"core_attn": 1234})
    assert "core_attn" in capsys.readouterr().out
    assert "1,234 bytes" in caplog.text
    caplog.clear()
    show({"core_attn": 2**20}, {"core_attn": (2, 1234), "moe_act": (1, 10)}, process_group=None)
    assert "1,244 bytes" in caplog.text  # as 0.20 has them: copies, and their bytes
    caplog.clear()
    show({"core_attn": 2**20}, {}, process_group=None)
    assert not caplog.text

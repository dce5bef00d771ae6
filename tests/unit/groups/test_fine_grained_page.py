"""The module page under Megatron-core's names: every name is there, and is the function that its short name
is, but for those that apply autograd Functions (tests/unit/compat/test_autograd.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import offload
from offload import PipelineOffloadManager
from offload import fine_grained_activation_offload as page
from tests.unit.groups.stack import build_manager, installed

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.req("S2-1")
def test_debug_is_off_and_for_rank_zero() -> None:
    assert page.DEBUG is False
    assert page.DEBUG_RANK == 0


@pytest.mark.req("S2-2")
def test_debug_rank_prints_only_when_debugging_and_only_on_its_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page.debug_rank("silent")
    monkeypatch.setattr(page, "DEBUG", True)
    page.debug_rank("said")  # without a process group: this is rank 0
    monkeypatch.setattr(page, "DEBUG_RANK", 1)
    page.debug_rank("another rank's")
    assert capsys.readouterr().out == "said\n"


@pytest.mark.req("S2-2")
def test_debug_rank_asks_the_process_group_for_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page, "DEBUG", True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        page.debug_rank(f"rank {rank}")
    assert capsys.readouterr().out == "rank 0\n"


@pytest.mark.req("S2-83", "S2-84", "S2-86", "S2-87", "S2-88", "S2-89")
def test_long_names_are_the_short_ones() -> None:
    same = {
        "group_flush_delayed_groups": offload.flush_delayed_groups,
        "disable_offload": offload.disable_offload,
        "enable_offload": offload.enable_offload,
        "forward_record": offload.forward_record,
        "init_chunk_handler": offload.init_chunk_handler,
        "reset": offload.reset,
    }
    for name, function in same.items():
        assert getattr(page, f"fine_grained_offloading_{name}") is function
    for name in page.__all__:
        assert hasattr(page, name), name


@pytest.mark.req("S2-83")
def test_long_group_start_may_be_called_without_a_name_and_says_that_it_needs_one() -> None:
    x = torch.ones(2)
    assert page.fine_grained_offloading_group_start(x, "a") is x
    with pytest.raises(
        ValueError,
        match="group_start with name None: a group's name must be a non-empty string such as 'core_attn'",
    ):
        page.fine_grained_offloading_group_start(x)


@pytest.mark.req("S2-94")
def test_long_context_is_the_class_methods() -> None:
    with installed(build_manager()) as manager:
        assert page.get_fine_grained_offloading_context(True) is manager
        with page.get_fine_grained_offloading_context(False) as nothing:
            assert nothing is None
    assert page.PipelineOffloadManager is PipelineOffloadManager


@pytest.mark.req("S3-1")
def test_import_needs_no_training_framework() -> None:
    """A fresh interpreter: what importing the engine brings in beside torch's own needs. The compiler is
    imported by set-up, neither by the package nor in the first step."""
    code = (
        "import sys, torch; before = {name.split('.')[0] for name in sys.modules}\n"
        "import offload, offload.fine_grained_activation_offload\n"
        "after = {name.split('.')[0] for name in sys.modules} - before - set(sys.stdlib_module_names)\n"
        "after -= {'offload', 'tabulate', 'numpy', 'wcwidth'}\n"
        "print(*(name for name in after if not name.startswith('_sysconfigdata')))\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not {'torch._dynamo', 'torch.distributed.tensor'} & set(sys.modules)\n"  # two seconds each
        "offload.configure(device='sim', print_summary=False)\n"
        "assert 'torch._dynamo' in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    # of torch's own: what its compiler is made of, where it is installed
    assert {*done.stdout.split()} <= {"jinja2", "markupsafe", "triton"}

"""Rules that hold for every test: which machine a test needs, and that the requirement it claims to prove
exists."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from offload import PipelineOffloadManager, engine
from offload.telemetry import speaker
from scripts.requirements_table import TABLE, ProofsThatRan, read_rows
from tests.fixtures import manager, mesh, no_manager, one_rank, one_thread, rig, rigs_end, small_streams

__all__ = ["manager", "mesh", "no_manager", "one_rank", "one_thread", "rig", "rigs_end", "small_streams"]

ROWS = read_rows()

# a GPU machine may have pytest and no hypothesis; the property tests skip themselves there
with contextlib.suppress(ImportError):
    from hypothesis import settings

    # A shared or loaded machine is slow, not wrong: no example has a time limit.
    settings.register_profile("pipeline-offload", deadline=None, print_blob=True)
    settings.load_profile("pipeline-offload")


if not torch.accelerator.is_available():
    # torch.manual_seed queues a seed for every kind of device that there may be later, each with the text of
    # its caller's stack, which is deep here: together they take more than what many a test does
    for _kind in (torch.cuda, torch.xpu, torch.mtia):
        _kind.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _messages_as_they_are_written(request: pytest.FixtureRequest) -> Iterator[None]:
    """Without "offload:" before them, which tests/unit/telemetry/test_speaker.py is about. Not by
    `monkeypatch`: what a test patches has to be undone before the fixtures end that come after this one."""
    if request.path.name == "test_speaker.py":
        yield
        return
    with patch.object(speaker._Speaker, "process", lambda self, msg, kwargs: (msg, kwargs)):
        yield


@pytest.fixture(autouse=True)
def _no_default_engine_of_another_test() -> Iterator[None]:
    """Whoever is given no engine takes the process's own, or its manager's, which must not be one that a test
    has left: its memory would be counted in the next one."""
    yield
    engine._defaults.clear()
    PipelineOffloadManager.OFFLOAD_MGR = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-row",
        action="store_true",
        help="fail if no proof ran of a row that docs/requirements.md calls proved",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProofsThatRan(ROWS))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for mark in metafunc.definition.iter_markers("req"):
        for number in mark.args or ("no number",):
            if number not in ROWS:
                test = metafunc.definition.nodeid
                raise pytest.Collector.CollectError(
                    f"{test}: {TABLE.name} has no row for req({number!r}); correct the mark or add the row"
                )


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: a full collection of a test, of which there are hundreds,
    does not walk it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _what_a_file_leaves_stays() -> Iterator[None]:
    """The same of what a file's tests have imported, and of their reports."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before -m is applied, so that gpus(n) is left out wherever gpu is
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpus") is not None:
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = max(
        [
            int(item.get_closest_marker("gpu") is not None),
            *(int(mark.args[0]) for mark in item.iter_markers("gpus")),
        ]
    )
    if needed == 0:
        return
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if present < needed:
        devices = "device" if needed == 1 else "devices"
        pytest.skip(
            f"needs {needed} CUDA {devices}, this machine has {present}; run scripts/test.sh -m gpu where "
            "they are"
        )

"""How a rank ends: exit codes and last words, each in a process of its own, since `run_rank` never
returns."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import cast

import pytest
import torch

from parallel.launch import Ranks, choose_device, ranks_from_environment
from tests.once import made_once

ROOT = Path(__file__).resolve().parents[3]
ALONE = Ranks(0, 1, 0, 1)
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


PRELUDE = textwrap.dedent("""
    import sys, time, threading
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from parallel import launch
    launch._GRACE = 0.5
    ranks = launch.ranks_from_environment()
""")


def _main(body: str) -> str:
    return "def main():\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n"


def start(body: str, **environment: str) -> subprocess.Popen[str]:
    """Run `body` as the main function of a rank."""
    return _started(PRELUDE + _main(body) + "launch.run_rank(main, ranks)\n", **environment)


def _started(program: str, **environment: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={
            **clean,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], seconds: float = 30) -> tuple[int, str]:
    """Exit code and standard error; a process that does not end fails the test."""
    try:
        _, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, errors


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == word


BODIES = {
    "alone": """
        with launch.launched(ranks, torch.device("cpu")) as rank:
            assert dist.get_world_size(rank.group) == 1
            assert rank.mesh.mesh_dim_names == ("pp",)
            assert rank.store.add("pinned", 3) == 3
        assert not dist.is_initialized()
        return 0
    """,
    "value": "raise ValueError('no layer has the mark x')",
    "file": "raise FileNotFoundError('there is no such file')",
    "lines": "raise RuntimeError('lost\\n  its way')",
    "interrupt": "raise KeyboardInterrupt('after 3 of 20 steps')",
    "cause": """
        try:
            raise KeyError("wq")
        except KeyError as error:
            raise RuntimeError("a table over several lines") from error
    """,
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and standard error of each body, in a process of its own: a fork of one that has imported
    torch, for all of them."""
    return cast(dict[str, tuple[int, str]], made_once(tmp_path_factory, "launch", _forked))


def _forked(folder: Path) -> dict[str, tuple[int, str]]:
    each = textwrap.dedent("""
        import os
        bodies, folder, codes = {bodies!r}, {folder!r}, {{}}
        for name, body in bodies.items():
            child = os.fork()
            if child == 0:
                os.dup2(os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY), 2)
                exec(body)
                launch.run_rank(main, ranks)
            codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(codes)
    """).format(bodies={name: _main(body) for name, body in BODIES.items()}, folder=str(folder))
    process = _started(PRELUDE + each)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    codes = ast.literal_eval(output)
    return {name: (codes[name], (folder / name).read_text()) for name in BODIES}


def test_rank_alone_gets_a_process_group_a_mesh_and_a_store_and_ends_well(
    ends: dict[str, tuple[int, str]],
) -> None:
    assert ends["alone"] == (0, "")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        ("value", 2, "no layer has the mark x"),
        ("file", 2, "there is no such file"),
        ("lines", 1, "RuntimeError: lost its way"),
        ("interrupt", 130, "interrupted after 3 of 20 steps"),
    ],
)
def test_failure_is_one_line_and_an_exit_code(
    raised: str, code: int, said: str, ends: dict[str, tuple[int, str]]
) -> None:
    returned, errors = ends[raised]
    assert (returned, errors.strip()) == (code, said)


def test_first_cause_is_told_instead_of_the_message_wrapped_around_it(
    ends: dict[str, tuple[int, str]],
) -> None:
    assert ends["cause"] == (1, "\nKeyError: 'wq'\n")


def test_interrupt_ends_a_rank_that_waits_for_a_message() -> None:
    body = """
        store = dist.HashStore()
        print("waiting", flush=True)
        store.wait(["what never comes"], timedelta(seconds=60))
    """
    process = start(body)
    wait_for(process, "waiting")
    time.sleep(1.0)  # it said so before it waits
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, errors = ended(process)
    assert (code, errors.strip()) == (130, "interrupted while waiting")
    assert time.monotonic() - began < 10


def test_interrupt_that_a_finaliser_swallowed_is_repeated() -> None:
    body = """
        class Swallows:
            def __del__(self):
                print("finalising", flush=True)
                time.sleep(0.4)
        def work():
            Swallows()
            time.sleep(60)
        try:
            work()
        except KeyboardInterrupt:
            raise KeyboardInterrupt("after its work") from None
    """
    process = start(body)
    wait_for(process, "finalising")
    process.send_signal(signal.SIGINT)
    code, errors = ended(process)
    assert (code, errors.strip()) == (130, "interrupted after its work")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
def test_rank_does_not_outlive_its_launcher(tmp_path: Path) -> None:
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    rank = """
        with launch.launched(ranks, torch.device("cpu")):
            print("up", flush=True)
            time.sleep(60)
        return 0
    """
    launcher = textwrap.dedent(f"""
        import subprocess, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_launch
        child = test_launch.start({rank!r}, **{environment!r})
        test_launch.wait_for(child, "up")
        print(child.pid, flush=True)
        child.wait()
    """)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", launcher],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    for _ in range(100):
        if not running(child):
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the rank went on without its launcher")


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_environment_of_torchrun_is_read_and_half_of_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert ranks_from_environment() == ALONE
    assert not ALONE.under_torchrun
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ValueError, match="start with torchrun, or unset RANK"):
        ranks_from_environment()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ranks_from_environment() == Ranks(3, 4, 1, 2)


def test_device_is_a_gpu_for_each_local_rank_or_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", Ranks(5, 8, 1, 2)) == torch.device("cuda", 1)
    assert choose_device("cpu", Ranks(5, 8, 1, 2)) == torch.device("cpu")
    with pytest.raises(
        ValueError,
        match="4 ranks on this host want a GPU each, and torch sees 2; start 2 ranks or take --device cpu",
    ):
        choose_device("auto", Ranks(0, 4, 0, 4))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto", ALONE) == torch.device("cpu")
    with pytest.raises(ValueError, match="torch sees 0; take --device cpu"):
        choose_device("cuda", ALONE)
    with pytest.raises(ValueError, match="no device is called 'tpu'"):
        choose_device("tpu", ALONE)

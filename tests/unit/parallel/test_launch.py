"""How a rank ends: exit codes and last words, each in a process of its own, since `run_rank` never
returns."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from offload import OffloadError
from parallel import launch
from parallel.launch import Ranks, choose_device, ranks_from_environment
from tests.forks import LONG_S, Ended, forked

ALONE = Ranks(0, 1, 0, 1)
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


PRELUDE = textwrap.dedent("""
    import signal, sys, time, threading
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from parallel import launch
    launch._GRACE = 0.5
    ranks = launch.ranks_from_environment()
""")


def program(body: str) -> str:
    """Runs `body` as the main function of a rank."""
    main = "def main():\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return f"{PRELUDE}{main}\nlaunch.run_rank(main, ranks)\n"


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


def end_of(body: str) -> Ended:
    with forked(program(body)) as process:
        return process.ended()


def test_rank_alone_gets_a_process_group_a_mesh_and_a_store_and_ends_well() -> None:
    assert end_of(BODIES["alone"]) == (0, "", "")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        ("value", 2, "no layer has the mark x"),
        ("file", 2, "there is no such file"),
        ("lines", 1, "RuntimeError: lost its way"),
        ("interrupt", 130, "interrupted after 3 of 20 steps"),
    ],
)
def test_failure_is_one_line_and_an_exit_code(raised: str, code: int, said: str) -> None:
    ended = end_of(BODIES[raised])
    assert (ended.code, ended.errors.strip()) == (code, said)


def test_first_cause_is_told_instead_of_the_message_wrapped_around_it() -> None:
    assert end_of(BODIES["cause"]) == (1, "", "\nKeyError: 'wq'\n")


def test_a_cause_that_was_named_is_not_told_instead_of_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    named = OffloadError("stage 1 of 2: update to torch 2.13")
    named.__cause__ = RuntimeError("Attribute '_input_metadata' is invalid")
    error = RuntimeError("over several lines")
    error.__cause__ = named
    launch._explained(error, Ranks(0, 2, 0, 2))
    assert capsys.readouterr().err == f"\nrank 0: OffloadError: {named}\n"


@pytest.mark.parametrize(
    ("error", "rank", "waits"),
    [
        (ValueError("no layer has the mark x"), 0, False),
        (ValueError("no layer has the mark x"), 1, True),
        (RuntimeError("its host burns"), 1, False),
        (RuntimeError("Connection closed by peer"), 0, True),
    ],
)
def test_rank_leaves_it_to_another_to_say_what_that_knows_as_well_or_better(
    error: Exception,
    rank: int,
    waits: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """torchrun ends it meanwhile."""
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        assert capsys.readouterr().err == ""

    monkeypatch.setattr(time, "sleep", sleep)
    launch._explained(error, Ranks(rank, 2, rank, 2))
    assert str(error) in capsys.readouterr().err
    assert waited == [launch._GRACE] * waits


INTERRUPTED = {
    "waiting": """
        gate = threading.Semaphore(0)
        def told():
            gate.acquire()
            print("waiting", flush=True)
        threading.Thread(target=told, daemon=True).start()
        sys.setswitchinterval(1000)  # the thread goes on once this one is inside wait()
        gate.release()
        dist.HashStore().wait(["what never comes"], timedelta(seconds=600))
    """,
    "finalising": """
        class Swallows:
            def __del__(self):
                print("finalising", flush=True)
                signal.pause()
        def work():
            Swallows()
            signal.pause()
        try:
            work()
        except KeyboardInterrupt:
            raise KeyboardInterrupt("while finalising") from None
    """,
}


@pytest.mark.parametrize("doing", INTERRUPTED)
def test_interrupt_ends_a_rank_that_waits_and_is_repeated_where_a_finaliser_swallowed_it(doing: str) -> None:
    with forked(program(INTERRUPTED[doing])) as process:
        process.wait_for(f"{doing}\n")
        process.send_signal(signal.SIGINT)
        code, _, errors = process.ended()
    assert (code, errors.strip()) == (130, f"interrupted while {doing}")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
def test_rank_does_not_outlive_its_launcher() -> None:
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
            signal.pause()
        return 0
    """
    launcher = textwrap.dedent(f"""
        import os
        child = os.fork()
        if child == 0:
            exec({program(rank)!r}, {{"__name__": "__main__"}})
        print("launched", child, flush=True)
        os.waitpid(child, 0)
    """)
    with forked(launcher, environment=environment) as process:
        process.wait_for("up\n")
        process.wait_for("launched ")
        child = int(process.output.split("launched ")[1].split()[0])
        process.send_signal(signal.SIGKILL)
        assert process.ended().code == -signal.SIGKILL
        try:
            end = time.monotonic() + LONG_S
            while running(child) and time.monotonic() < end:
                time.sleep(0.01)
            assert not running(child), "the rank went on without its launcher"
        finally:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


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

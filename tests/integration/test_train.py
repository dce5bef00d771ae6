"""The main job as a user starts it: it trains, it proves its gradients, it says why when it cannot go on, and
it always ends. Where torchrun has a part in that, it starts the ranks.

pytest tests/integration/test_train.py
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.schedules import SCHEDULES
from tests.forks import LONG_S, Ended, forked, forked_ranks

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "scripts" / "train.py"
SMALL = [
    "--layers",
    "4",
    "--dim",
    "32",
    "--ffn",
    "64",
    "--sequence",
    "32",
    "--batch",
    "2",
    "--min-offloaded-tensor-size",
    "256",
]
ON_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")


@contextmanager
def under_torchrun(arguments: list[str], mark: str) -> Iterator[subprocess.Popen[str]]:
    """Two ranks of scripts/train.py; whatever the test does, nothing of them stays behind.

    mark: found in the environment of every process of this start.
    """
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [sys.executable, *launcher, str(TRAIN), "--device", "cpu", *arguments],
        env={**clean, "OMP_NUM_THREADS": "1", "TRAIN_TEST": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in members(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    output, errors = process.communicate(timeout=LONG_S)
    return process.returncode, output, errors


def run(arguments: list[str], *, ranks: int | None = None) -> Ended:
    """Exit code 0, or one that is not; what the first rank wrote, and the errors of all."""
    arguments = ["--device", "cpu", *arguments]
    if ranks is None:
        with forked(TRAIN, arguments) as process:
            return process.ended()
    with forked_ranks(TRAIN, arguments, ranks=ranks) as processes:
        each = [process.ended() for process in processes]
    assert not any(other.output for other in each[1:])
    return Ended(max(one.code for one in each), each[0].output, "".join(one.errors for one in each))


def members(mark: str) -> dict[int, dict[str, str]]:
    """The environments of the living processes of one start, by process id. torchrun gives its ranks sessions
    of their own."""
    alive = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        if state != "Z" and environment.get("TRAIN_TEST") == mark:
            alive[int(folder.name)] = environment
    return alive


def pid_of_rank(mark: str, rank: int) -> int:
    return next(pid for pid, environment in members(mark).items() if environment.get("RANK") == str(rank))


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


def wait_for_steps(telemetry: Path, count: int) -> None:
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        if telemetry.exists() and telemetry.read_text().count("\n") >= count:
            return
        time.sleep(0.1)
    pytest.fail(f"{count} steps were not made in {LONG_S:.0f} seconds")


def lines_of(telemetry: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in telemetry.read_text().splitlines()]


# ---- it trains ----


def test_above_a_mark_it_trains_with_every_gradient_verified(tmp_path: Path) -> None:
    telemetry = tmp_path / "steps.jsonl"
    marks = ["--offload", "watermark", "--high-gb", "0.0005", "--low-gb", "0.0004"]
    code, output, errors = run(
        ["--steps", "2", "--verify", "--telemetry", str(telemetry), *marks, *SMALL], ranks=None
    )
    assert code == 0, errors
    assert "every gradient of all 2 steps is bit for bit what it is without offload" in output
    for step in lines_of(telemetry):
        (rank,) = step["ranks"]
        assert rank["engine"]["clients"]["watermark"]["out_bytes"] == rank["engine"]["spill_bytes"] > 0


def test_within_a_total_stages_of_one_layer_train_with_every_gradient_verified() -> None:
    total = ["--offload", "auto", "--device-total-gb", "0.00025"]
    stages = ["--schedule", "zbv", *SMALL, "--layers", "2"]
    code, output, errors = run(["--steps", "4", "--verify", *total, *stages], ranks=None)
    assert code == 0, errors
    assert "every gradient of all 4 steps is bit for bit what it is without offload" in output
    assert "hidden_states" in output


def test_two_ranks_train_with_every_gradient_verified(tmp_path: Path) -> None:
    telemetry = tmp_path / "steps.jsonl"
    code, output, errors = run(["--steps", "3", "--verify", "--telemetry", str(telemetry), *SMALL], ranks=2)
    assert code == 0, errors
    assert "Activation Offload Summary (MB)" in output
    assert "Rank 1" in output
    assert "every gradient of all 3 steps is bit for bit what it is without offload" in output
    steps = lines_of(telemetry)
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert steps[-1]["loss"] < steps[0]["loss"]
    for step in steps:
        assert len(step["ranks"]) == 2
        for rank in step["ranks"]:
            assert rank["engine"]["spill_bytes"] > 0
            assert rank["engine"]["restore_bytes"] > 0


def test_process_alone_compares_the_steps_with_and_without_offload(tmp_path: Path) -> None:
    telemetry = tmp_path / "steps.jsonl"
    code, output, errors = run(["--steps", "3", "--compare", "2", "--telemetry", str(telemetry), *SMALL])
    assert code == 0, errors
    assert "The losses of all 3 steps are equal in all 4 runs, bit for bit" in output
    assert "a CPU does not have" in output
    assert output.count("Activation Offload Summary") == 1
    arms = [(step["arm"], step["run"]) for step in lines_of(telemetry)]
    assert arms[:6:3] == [("offload off", 0), ("offload on", 0)], "each alone, for its memory"
    in_turn = ["offload off", "offload on", "offload on", "offload off", "offload off", "offload on"]
    assert arms[6:] == [(name, 1) for name in in_turn]
    alone, _, together = errors.partition("offload off and offload on")
    assert "stall" in alone
    assert "stall" not in together, "the engine's is of the step before, which another arm made"
    assert re.search(r"A step takes \d+\.\d\d times as long \(.* in 3 pairs of steps\) with offload", output)
    saved_off, saved_on = (
        float(line.split()[-1]) for line in output.splitlines() if line.startswith("rank 0  offload o")
    )
    assert 0 < saved_on <= saved_off


def test_two_equal_arms_take_equally_long(tmp_path: Path) -> None:
    """Nothing is offloaded in either, and the clock counts its readings: what an arm does beyond the other in
    the time that is compared would show. tests/unit/scripts/test_training.py has a machine that is held
    up."""
    counted = tmp_path / "counted.py"
    counted.write_text(
        "import runpy, sys\n"
        "from tests.ticks import counted_time\n"
        f"sys.argv[0] = {str(TRAIN)!r}\n"
        "with counted_time():\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    arguments = ["--device", "cpu", "--steps", "4", "--compare", "3", "--offload-modules", "none", *SMALL]
    with forked(counted, arguments) as process:
        code, output, errors = process.ended()
    assert code == 0, errors
    assert "So 1.00 times as long (1.00 to 1.00 in 8 pairs of steps)" in output, output
    assert "offload report" not in output


def test_without_offload_nothing_is_recomputed_beside_mode_auto(tmp_path: Path) -> None:
    counted = tmp_path / "counted.py"
    counted.write_text(
        "import os, runpy, sys\n"
        "from collections import Counter\n"
        "from offload.marks import default_manager\n"
        "from parallel.transformer import Block\n"
        f"sys.argv[0] = {str(TRAIN)!r}\n"
        "calls, forward = Counter(), Block.forward\n"
        "def counting(block, *args):\n"
        "    calls[default_manager().do_offload] += 1\n"
        "    return forward(block, *args)\n"
        "Block.forward, leave = counting, os._exit\n"
        "os._exit = lambda code: leave(print('calls', *map(calls.get, (False, True)), flush=True) or code)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    total = ["--offload", "auto", "--device-total-gb", "0.00025"]
    arguments = ["--device", "cpu", "--steps", "4", "--compare", "2", "--microbatches", "2", *total, *SMALL]
    with forked(counted, arguments) as process:
        code, output, errors = process.ended()
    assert code == 0, errors
    assert "The losses of all 4 steps are equal in all 4 runs, bit for bit" in output
    off, on = map(int, re.search(r"calls (\d+) (\d+)", output).groups())  # type: ignore[union-attr]
    assert off == 4 * 2 * 4 * 2, "layers, microbatches, steps, runs"
    assert on > off
    (saved_off,) = re.findall(r"^rank 0  offload off .* ([\d.]+)$", output, re.MULTILINE)
    assert float(saved_off) > 0, "of what the arm with offload kept and moved"


def test_the_end_of_a_run_is_checked_reported_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, telemetry = tmp_path / "step.png", tmp_path / "steps.jsonl"
    arguments = ["--steps", "3", "--check-end", "2", "--plot", str(picture), "--telemetry", str(telemetry)]
    code, output, errors = run([*arguments, *SMALL], ranks=2)
    assert code == 0, errors
    steps = lines_of(telemetry)
    assert "gradients bitwise equal with and without offload: all 39 of the last step, 2 times" in output
    assert re.search(r"forward and backward take .* times as long \(.* in 2 pairs of steps\)", output)
    assert "offload report: 3 steps since configure, on a simulated link" in output, "the check is not in it"
    moved = [sum(step["ranks"][rank]["engine"]["spill_bytes"] for step in steps) for rank in (0, 1)]
    for rank in (0, 1):
        assert re.search(rf"rank {rank} +\S+ .B +{moved[rank] / 1e6:.2f} MB", output), output
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("schedule", ["zbv", "interleavedzerobubble"])
def test_split_backward_trains_alone_with_every_gradient_verified(schedule: str) -> None:
    code, output, errors = run(["--steps", "2", "--verify", "--schedule", schedule, *SMALL])
    assert code == 0, errors
    assert "bit for bit what it is without offload" in output


@pytest.mark.parametrize(("schedule", "layers", "weights"), [("1f1b", "6", "0.0001"), ("zbv", "12", "host")])
def test_two_ranks_stream_their_stages_weights_with_every_gradient_verified(
    tmp_path: Path, schedule: str, layers: str, weights: str
) -> None:
    """Three blocks a stage, so that no block's weights are there all the time."""
    telemetry, streamed = tmp_path / "steps.jsonl", tmp_path / "streamed.py"
    streamed.write_text(
        "import runpy, sys\n"
        "from tests.inside import streams_from\n"
        f"sys.argv[0] = {str(TRAIN)!r}\n"
        "with streams_from(64):\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    arguments = ["--device", "cpu", "--steps", "2", "--verify", "--schedule", schedule, "--weights", weights]
    more = [*SMALL, "--layers", layers, "--telemetry", str(telemetry)]
    with forked_ranks(streamed, [*arguments, *more], ranks=2) as processes:
        for code, _, errors in [process.ended() for process in processes]:
            assert code == 0, errors
    for rank in lines_of(telemetry)[-1]["ranks"]:
        figures = rank["engine"]["clients"]["weights"]
        assert figures["in_bytes"] > figures["lent_bytes"] > 0
        assert rank["engine"]["spill_bytes"] > 0


MIXTURE = ["--preset", "moe", *SMALL, "--ffn", "32", "--experts", "4", "--steps", "2", "--verify"]


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "1f1b"])
def test_a_mixture_trains_alone_under_each_schedule_with_every_gradient_verified(schedule: str) -> None:
    """1f1b is that of the next tests."""
    code, output, errors = run([*MIXTURE, "--schedule", schedule, "--steps", "1"])
    assert code == 0, errors
    assert "every gradient of all 1 steps is bit for bit what it is without offload" in output
    assert "expert_fc1" in output
    assert "moe_act" in output


@pytest.mark.parametrize("mode", ["save_on_cpu", "checkpoint", "both"])
def test_a_mixture_trains_alone_in_each_mode_of_its_experts(mode: str, tmp_path: Path) -> None:
    telemetry = tmp_path / "steps.jsonl"
    more = ["--experts-mode", mode, "--offload-modules", "core_attn", "--telemetry", str(telemetry)]
    code, output, errors = run([*MIXTURE, *more])
    assert code == 0, errors
    assert "every gradient of all 2 steps is bit for bit what it is without offload" in output
    groups = output.partition("last step, by group")[2].partition("never leaves")[0]
    assert ("experts" in groups) is (mode != "checkpoint")
    assert "expert_fc1" not in output


def test_ranks_share_the_experts_in_two_pipelines_and_learn_as_one_rank_does(tmp_path: Path) -> None:
    """Two pipelines of two stages; each pair of ranks with the same stages has half of the experts each, and
    sequences of its own. One rank has the sequences of both."""
    shared, alone = tmp_path / "shared.jsonl", tmp_path / "alone.jsonl"
    more = ["--expert-parallel", "2", "--schedule", "zbv", "--microbatches", "4", "--steps", "3"]
    code, output, errors = run([*MIXTURE, *more, "--telemetry", str(shared)], ranks=4)
    if torch.__version__ < (2, 13):
        assert "lost an autograd.Function between the halves of a split backward" in errors
        return
    assert code == 0, errors
    assert "every gradient of all 3 steps is bit for bit what it is without offload" in output
    assert "on 4 ranks: zbv, 4 stages, 4 microbatches of 2; 2 ranks share the experts" in output
    assert "Rank 3" in output
    steps = lines_of(shared)
    for step in steps:
        assert len(step["ranks"]) == 4
        assert all(rank["engine"]["spill_bytes"] > 0 for rank in step["ranks"])
    twice = ["--batch", "4", "--microbatches", "4", "--steps", "3", "--telemetry", str(alone)]
    code, _, errors = run([*MIXTURE, *twice])
    assert code == 0, errors
    expected = lines_of(alone)
    assert [step["tokens"] for step in steps] == [step["tokens"] for step in expected]
    # the same sums in another order; gradients that are not averaged are 3e-3 off in the third step
    assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in expected], rel=1e-4)
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_wrong_gradient_is_named_and_ends_the_job(tmp_path: Path) -> None:
    """A sitecustomize in the rank's path makes one restored tensor wrong, as a broken engine would."""
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import sys, runpy, torch\n"
        f"sys.argv = [{str(ROOT / 'scripts' / 'train.py')!r}, *sys.argv[1:]]\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'scripts')!r}]\n"
        "import training.job\n"
        "honest = training.job.Job._forward_backward\n"
        "def dishonest(self, batch):\n"
        "    loss = honest(self, batch)\n"
        "    if self.manager.do_offload:\n"
        "        self._parameters()[3].grad[0, 0] += 1\n"
        "    return loss\n"
        "training.job.Job._forward_backward = dishonest\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    with forked(broken, ["--device", "cpu", "--steps", "2", "--verify", *SMALL]) as process:
        code, _, errors = process.ended()
    assert code == 1
    said = (
        "step 0: the gradient of stage 0's blocks.0.attn.wk.weight differs with offload in 1 of 512 elements"
    )
    assert said in errors


# ---- it says why it cannot ----


def test_refusal_is_one_line_and_exit_code_2_on_two_ranks() -> None:
    """The second rank leaves it to the first for a while, in which torchrun ends it."""
    arguments = ["--device", "cpu", "--offload-modules", "core_attn,attention"]
    with forked_ranks(TRAIN, arguments, ranks=2) as (first, _):
        code, output, errors = first.ended()
    assert (code, output) == (2, "")
    assert errors.strip().startswith("no layer has the mark 'attention'; the marks are")
    assert "\n" not in errors.strip()


# ---- it always ends ----


@ON_LINUX
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path, mark: str) -> None:
    telemetry = tmp_path / "steps.jsonl"
    with under_torchrun(["--steps", "100000", "--telemetry", str(telemetry), *SMALL], mark) as process:
        wait_for_steps(telemetry, 2)
        assert len(members(mark)) == 3
        process.kill()
        process.wait()
        end = time.monotonic() + LONG_S
        while members(mark):
            assert time.monotonic() < end, "the ranks went on without torchrun"
            time.sleep(0.1)


@ON_LINUX
def test_interrupt_ends_the_job_and_leaves_no_orphan(tmp_path: Path, mark: str) -> None:
    telemetry = tmp_path / "steps.jsonl"
    with under_torchrun(["--steps", "100000", "--telemetry", str(telemetry), *SMALL], mark) as process:
        wait_for_steps(telemetry, 2)
        # as Ctrl-C does: the ranks are in sessions of their own, torchrun tells them
        process.send_signal(signal.SIGINT)
        code, _, errors = ended(process)
        assert code != 0
        assert "\ninterrupted" in errors
        assert not members(mark)


def test_interrupt_of_a_process_alone_says_how_far_it_came(tmp_path: Path) -> None:
    telemetry = tmp_path / "steps.jsonl"
    arguments = ["--device", "cpu", "--steps", "100000", "--telemetry", str(telemetry), *SMALL]
    with forked(TRAIN, arguments) as process:
        wait_for_steps(telemetry, 2)
        process.send_signal(signal.SIGINT)
        code, _, errors = process.ended()
        assert code == 130
        assert "of 100000 steps" in errors
        assert "Traceback" not in errors


def test_rank_that_fails_says_why_and_ends_the_job(tmp_path: Path) -> None:
    """Rank 1 reads other text than rank 0: found when they compare, after both are up."""
    words = tmp_path / "words.txt"
    words.write_text("some words " * 1000)
    starter = tmp_path / "starter.py"
    starter.write_text(
        "import os, runpy, sys\n"
        f"sys.argv = [{str(ROOT / 'scripts' / 'train.py')!r}, *sys.argv[1:]]\n"
        f"if os.environ['RANK'] == '1':\n    sys.argv += ['--data', {str(words)!r}]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    with forked_ranks(starter, ["--device", "cpu", *SMALL], ranks=2) as processes:
        each = [process.ended() for process in processes]
    assert [one.code for one in each] == [1, 1]
    assert any("ValueError: the ranks read different text" in one.errors for one in each)

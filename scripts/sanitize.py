"""Watch the GPU tests with torch's CUDA sanitizer, and sum up what it reports.

    python scripts/sanitize.py                         the log goes to sanitize/
    python scripts/sanitize.py -- -k exact                 what follows -- goes to pytest
    python scripts/sanitize.py --read sanitize/csan.log    sum up a log again

One invariant: every report is in the summary, under the two operations, the engine's own frames in their
stacks and the tests that it came from; exit status 1 if one of them touches the engine, has no explanation
here and is not from a test that leaves an edge out.

What it (TORCH_CUDA_SANITIZER=1, torch/cuda/_sanitizer.py) sees: pairs of dispatched operations on
device memory of one address, from two streams, that no event, wait or synchronisation orders. So, of the
engine's edges (the notes in offload/transfer):

    spill, allocate, read   seen: kernels on both sides, on device memory that is alive
    restore, reuse          not seen: the bytes are in host memory, which it does not follow
    settle, abandon         not seen: it forgets an address when the allocator's block is freed

Expected reports, and why each is none of the engine's:

    tests/gpu/test_races.py, test_without_its_edge_*   a hazard, on purpose: the edge is left out. spill,
                                                       allocate and read report, and the test fails there,
                                                       since a report ends it before it can compare bytes
    torch.empty(0) on two streams                      none: a tensor without bytes goes by its Python id,
                                                       which a later one may get
    EXPLAINED                                          by their operators, wherever they occur; each with its
                                                       reason below

Not run with it, because it cannot be right about them:

    tests of CUDA graphs     it takes a call under capture for work that runs then, on the capture's stream,
                             and sees no replay; so a copy into a graph's input races with what was captured.
                             test_without_offload_replays_have_the_bits_of_eager, where nothing of the engine
                             runs, is reported like the rest (74 reports in 52 tests, one H200, November 2026)
    tests of torch.compile   it is a dispatch mode, under which nothing is compiled

Two reports would have been false and are avoided where the engine makes them (offload/device/cuda.py):
an event that a poll found passed (the sanitizer sees no query), and a tensor made over bytes that are there
(`set_` counts as a kernel that writes them). tests/property/test_sanitizer.py runs the same sanitizer over
simulated lanes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ON_PURPOSE = "test_without_its_edge_"
TOO_LONG = ("test_soak.py", "test_overlap.py", "test_composition.py")
"""Two thousand steps, figures of time, and ranks of their own: nothing in them that the others do not do."""
NOT_SEEN = ("test_graphs.py", "test_optimizer_graphs.py", "test_compile.py")
"""What the sanitizer cannot follow; see above."""

EXPLAINED = {
    ("aten::_unsafe_view", "spill"): (
        "the operator gives a view of its input and declares a new tensor, which the sanitizer takes for "
        "written; no kernel runs"
    ),
    ("aten::_amp_foreach_non_finite_check_and_unscale_", "land"): (
        "a GradScaler rewrites gradients that may be on their way to the host; what landed before is thrown "
        "away and lands again"
    ),
}
"""By the operator of the later access and a function of the engine in the earlier one's stack: why the pair
is harmless."""

PACKAGES = ("offload", "parallel", "moe", "tests")
TEST = re.compile(r"^(?P<test>tests/\S+?\.py::\S+(?: [^\[\]]*\])?)")
ACCESS = re.compile(r"^(?:Access|Previous access) by stream (?P<stream>\d+) during kernel:$")
FRAME = re.compile(r'^  File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$')


class Access(NamedTuple):
    """One side of a report. frames: the innermost ones of this repository, as path:function."""

    stream: str
    operator: str
    kind: str
    frames: tuple[str, ...]

    @property
    def of_engine(self) -> bool:
        return any(frame.startswith("offload/") for frame in self.frames)

    def __str__(self) -> str:
        return f"{self.operator} {self.kind} ({' < '.join(self.frames[:3]) or 'no frame of this repository'})"


class Report(NamedTuple):
    test: str
    now: Access
    before: Access

    @property
    def on_purpose(self) -> bool:
        return ON_PURPOSE in self.test

    @property
    def of_engine(self) -> bool:
        return self.now.of_engine or self.before.of_engine

    @property
    def explanation(self) -> str | None:
        calls = {frame.split(":")[-1] for frame in self.before.frames}
        return next(
            (
                why
                for (operator, call), why in EXPLAINED.items()
                if operator == self.now.operator and call in calls
            ),
            None,
        )

    @property
    def alarming(self) -> bool:
        return self.of_engine and not self.on_purpose and self.explanation is None

    @property
    def verdict(self) -> str:
        if self.on_purpose:
            return "edge left out on purpose"
        if self.explanation is not None:
            return f"explained: {self.explanation}"
        return "TOUCHES THE ENGINE" if self.of_engine else "not of the engine"


def reports_in(lines: Sequence[str]) -> Iterator[Report]:
    """What torch's sanitizer printed into the output of `pytest -v -s`, with the test under way."""
    test = "before the first test"
    accesses: list[Access] = []
    at = 0
    while at < len(lines):
        if found := TEST.match(lines[at]):
            test = found["test"]
        if (found := ACCESS.match(lines[at])) and at + 2 < len(lines):
            operator, kind = lines[at + 1].strip().split("(")[0], lines[at + 2].strip()
            end = next(
                (number for number in range(at + 3, len(lines)) if not _is_of_stack(lines[number])),
                len(lines),
            )
            accesses.append(Access(found["stream"], operator, kind, tuple(_own_frames(lines[at + 3 : end]))))
            at = end
            if len(accesses) == 2:
                yield Report(test, *accesses)
                accesses.clear()
            continue
        at += 1


def _is_of_stack(line: str) -> bool:
    return not line.strip() or line.startswith((" ", "With stack trace:"))


def _own_frames(lines: Sequence[str]) -> list[str]:
    """Innermost first, each function once."""
    frames = [found for line in lines if (found := FRAME.match(line))]
    own: dict[str, None] = {}
    for found in reversed(frames):
        start = max(found["path"].rfind(f"/{package}/") for package in PACKAGES)
        if start >= 0:
            own[f"{found['path'][start + 1 :]}:{found['name']}"] = None
    return list(own)


def summary_of(reports: Sequence[Report]) -> list[str]:
    """A line for each kind of report, most frequent first."""
    tests: dict[tuple[str, str, str], list[str]] = {}
    for report in reports:
        tests.setdefault((report.verdict, str(report.now), str(report.before)), []).append(report.test)
    lines = []
    for (verdict, now, before), found in sorted(tests.items(), key=lambda item: -len(item[1])):
        lines += [
            f"{len(found)} x {verdict}",
            f"    {now}",
            f"    after {before}",
            f"    in {', '.join(list(dict.fromkeys(found))[:3])}",
        ]
    alarming = sum(report.alarming for report in reports)
    return [
        *lines,
        f"torch's sanitizer: {len(reports)} reports, {alarming} of them touch the engine and have no "
        "explanation",
    ]


def run_csan(folder: Path, arguments: Sequence[str]) -> list[str]:
    """Run the tests from the repository root; their output goes to a log and is returned."""
    ignored = [f"--ignore=tests/gpu/{name}" for name in (*TOO_LONG, *NOT_SEEN)]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-s", "--tb=line", "tests/gpu"]
    command += [*ignored, *arguments]
    log = folder / "csan.log"
    print(f"{' '.join(command)} > {log}", flush=True)
    # unbuffered: a report must stand behind the name of its test
    changed = {**os.environ, "PYTHONUNBUFFERED": "1", "TORCH_CUDA_SANITIZER": "1"}
    with log.open("w") as output:
        subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=changed, check=False)
    return log.read_text(errors="replace").splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the GPU tests under torch's CUDA sanitizer.")
    parser.add_argument("--read", type=Path, metavar="LOG", help="sum up a log instead of running anything")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "sanitize", metavar="DIR", help="of the log (default: sanitize/)"
    )
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.read:
        lines = arguments.read.read_text().splitlines()
    else:
        lines = run_csan(arguments.out, arguments.pytest)
    reports = list(reports_in(lines))
    print(*summary_of(reports), *(line for line in lines[-1:] if " in " in line), sep="\n")
    return 1 if any(report.alarming for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())

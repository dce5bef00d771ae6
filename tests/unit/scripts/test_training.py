"""What scripts/train.py is asked for: refused before anything starts, or run; and what its comparison says.

pytest tests/unit/scripts/test_training.py
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from offload import Report
from offload.sizes import bytes_text
from parallel.launch import Ranks
from parallel.transformer import GROUP_NAMES
from scripts.train import in_turn, planned
from training.arguments import _parser
from training.comparison import comparison, ratio_text, spread_of
from training.figures import Arm, EndCheck, RankFigures
from training.options import Options, fraction_without_room, read_options
from training.report import Reporter, summary
from training.text import read_text

ALONE = Ranks(0, 1, 0, 1)
TWO = Ranks(0, 2, 0, 2)

# ---- what it refuses ----


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--offload-modules", "core_attn,attention"],
            rf"no layer has the mark 'attention'; the marks are {GROUP_NAMES[0]}, .*{GROUP_NAMES[-1]}",
        ),
        (["--offload-modules", "attn_proj"], "choose core_attn too"),
        (
            ["--preset", "moe", "--offload-modules", "mlp_fc1"],
            r"'?mlp_fc1'?, which is no mark of a layer; the marks are attn_norm, .*moe_act",
        ),
        (["--preset", "moe", "--offload-modules", ","], "names no mark; give all, none, .* moe_act"),
        (
            ["--preset", "moe", "--experts-mode", "both", "--offload-modules", "moe_act"],
            "experts_mode='both' decides about all that the experts save",
        ),
        (
            ["--preset", "moe", "--experts-mode", "both", "--offload", "auto"],
            "--experts-mode both goes with --offload groups",
        ),
        (["--experts", "4"], "--experts is of a mixture; give --preset moe, or leave it out"),
        (["--expert-parallel", "2"], "--expert-parallel is of a mixture"),
        (
            ["--preset", "moe", "--expert-parallel", "3"],
            "8 experts cannot be shared equally by --expert-parallel 3 ranks",
        ),
        (["--preset", "moe", "--expert-parallel", "4"], "--expert-parallel 4 does not divide 2 ranks"),
        (["--preset", "moe", "--top-k", "9"], "top_k is 9, and there are 8 experts"),
        (["--data", "no/such/file"], "--data no/such/file: there is no such file"),
        (["--telemetry", "no/such/folder/steps.jsonl"], "there is no folder .*no/such/folder"),
        (
            ["--schedule", "1f1b", "--microbatches", "1"],
            "1f1b needs a microbatch for every stage: 1 for 2 stages",
        ),
        (
            ["--schedule", "dualpipev", "--microbatches", "3"],
            "dualpipev needs a microbatch for every stage: 3 for 4 stages",
        ),
        (["--schedule", "interleaved1f1b", "--microbatches", "5"], "take --microbatches 4 or 6"),
        (["--schedule", "zbv", "--virtual-stages", "3"], "zbv gives a rank two stages"),
        (["--schedule", "chimera"], "no schedule is called 'chimera'; there are gpipe, "),
        (["--schedule", "loopedbfs", "--virtual-stages", "3"], "4 layers cannot be cut into 6 stages"),
        (["--heads", "3"], "dim 128 over 3 heads"),
        (["--min-offloaded-tensor-size", "-1"], "--min-offloaded-tensor-size is -1; it must be at least 0"),
        (["--device-limit-mib", "0"], "--device-limit-mib is 0; it must be at least 1"),
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--verify", "--compare"], "run them one after the other"),
        (["--compare", "1"], "give at least 2 runs of each arm"),
        (["--seed", "4294967296"], "--seed is 4294967296; it must be at least 0 and at most 4,294,967,295"),
        (["--seed", "-1"], "--seed is -1"),
        (["--timeout", "nan"], "--timeout is nan; it must be at least 1"),
        (["--timeout", "inf"], "--timeout is inf"),
        (["--lr", "nan"], "--lr is nan"),
        (["--dim", str(10**25)], "it must be at least 1 and at most 2,147,483,647"),
        (
            ["--offload-modules", ","],
            "--offload-modules ',' names no mark; give all, none, or some of attn_norm",
        ),
        (["--offload-modules", ""], "names no mark"),
        (["--verify", "--offload-modules", "none"], "--verify needs something that is offloaded"),
        (["--plot", "step.png", "--offload-modules", "none"], "--plot needs something that is offloaded"),
        (["--plot", "step.jpg"], "--plot step.jpg must end in .png, .svg, .pdf"),
        (["--plot", "no/such/folder/step.png"], "--plot .*: there is no folder .*no/such/folder"),
        (["--high-gb", "8"], "--high-gb 8.0 goes with --offload watermark"),
        (["--device-total-gb", "8"], "--device-total-gb 8.0 goes with --offload auto"),
        (["--weights", "0"], "0 must be a number of GB above 0, or host"),
        (["--weights", "host", "--compare"], "--weights does not go with --compare"),
        (["--offload", "auto", "--device-total-gb", "nan"], "--device-total-gb is nan; it must be above 0"),
        (["--offload", "watermark"], "--offload watermark needs --high-gb, in GB of 1e9 bytes"),
        (
            ["--offload", "watermark", "--high-gb", "8", "--low-gb", "9"],
            "--high-gb 8.0 and --low-gb 9.0: the low mark must be above 0, and not above the high one",
        ),
        (["--offload", "watermark", "--high-gb", "nan"], "--high-gb nan and --low-gb None"),
        (["--check-end", "-1"], "--check-end is -1; it must be at least 0"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(arguments: list[str], said: str) -> None:
    if "needs something that is offloaded" in said:
        pytest.importorskip("matplotlib")
    with pytest.raises((ValueError, OSError), match=said):
        read_options(arguments, TWO)


@pytest.mark.parametrize("wrong", ["1.5", "most"])
def test_a_fraction_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong} must be a number from 0 to 1, or auto"):
        read_options([f"--optimizer-offload-fraction={wrong}"], ALONE)


def test_auto_is_what_finds_no_room() -> None:
    gb = 10**9
    assert fraction_without_room(state_bytes=10 * gb, other_bytes=20 * gb, device_bytes=100 * gb) == 0.0
    assert fraction_without_room(state_bytes=10 * gb, other_bytes=85 * gb, device_bytes=100 * gb) == 0.5
    assert fraction_without_room(state_bytes=10 * gb, other_bytes=84 * gb, device_bytes=100 * gb) == 0.4
    assert fraction_without_room(state_bytes=10 * gb, other_bytes=95 * gb, device_bytes=100 * gb) == 1.0
    assert fraction_without_room(state_bytes=0, other_bytes=95 * gb, device_bytes=100 * gb) == 0.0


# ---- files ----


def test_telemetry_that_is_the_data_is_refused_under_every_name(tmp_path: Path) -> None:
    """Once it was opened for writing after the text had been read, and the text was gone."""
    data = tmp_path / "words.txt"
    data.write_text("some words " * 1000)
    (tmp_path / "symbolic").symlink_to(data)
    os.link(data, tmp_path / "hard")
    for name in ("words.txt", "symbolic", "hard", "./../" + tmp_path.name + "/words.txt"):
        with pytest.raises(
            ValueError, match=r"is the same file as --data .*words.txt, which it would destroy"
        ):
            read_options(["--data", str(data), "--telemetry", str(tmp_path / name)], ALONE)


def test_telemetry_writes_over_earlier_telemetry_only(tmp_path: Path) -> None:
    """The file is as it was until the run has started."""
    notes, empty, earlier = tmp_path / "notes", tmp_path / "empty", tmp_path / "earlier"
    notes.write_text("what I wanted to keep")
    empty.touch()
    reporter = Reporter(read_options(["--telemetry", str(earlier)], ALONE))
    reporter.step(Arm("training"), [figures(1.0)])
    reporter.end()
    written = earlier.read_text()
    with pytest.raises(FileExistsError, match="notes holds something else than telemetry; give another name"):
        read_options(["--telemetry", str(notes)], ALONE)
    for allowed in (empty, earlier, tmp_path / "new", Path(os.devnull)):
        assert read_options(["--telemetry", str(allowed)], ALONE).telemetry == allowed
    assert written
    assert earlier.read_text() == written


def test_telemetry_that_is_a_folder_or_leads_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder; give the name of a file in it"):
        read_options(["--telemetry", str(tmp_path)], ALONE)
    (tmp_path / "link").symlink_to(tmp_path / "absent" / "steps.jsonl")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*absent; make it first"):
        read_options(["--telemetry", str(tmp_path / "link")], ALONE)


def test_files_without_permission_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may do everything
    with pytest.raises(PermissionError, match=r"--data .*closed: this user may not read it"):
        read_options(["--data", str(closed)], ALONE)
    with pytest.raises(PermissionError, match=r"--telemetry .*closed: this user may not write it"):
        read_options(["--telemetry", str(closed)], ALONE)


def test_of_a_large_file_only_the_first_four_mib_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file of 1 TB, which no host could read whole."""
    large, never = tmp_path / "large", tmp_path / "never"
    with large.open("wb") as file:
        file.truncate(10**12)
    never.touch()
    opened: list[Any] = []
    open_ = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *mode: opened.append(path) or open_(path, *mode))
    text = read_text([large, never], tokens=16)
    assert text.learned.numel() == (4 << 20) + 1
    assert text.source == "the first 4.0 MiB of 2 files"
    assert opened == [large]


def test_text_too_short_for_a_sequence_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("to be or not to be")
    with pytest.raises(ValueError, match="18 bytes of text are too few for sequences of 32 tokens"):
        read_text([short], tokens=32)


def test_given_text_is_what_is_learned(tmp_path: Path) -> None:
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("a" * 300)
    second.write_text("b" * 300)
    text = read_text([first, second], tokens=16)
    assert set(text.learned.tolist()) == {ord("a"), ord("b"), 256}
    inputs, targets = text.batch(4, 16, seed=0, step=3)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert inputs.equal(text.batch(4, 16, seed=0, step=3)[0])
    assert not inputs.equal(text.batch(4, 16, seed=0, step=4)[0]) or not targets.equal(
        text.batch(4, 16, seed=0, step=4)[1]
    )


def test_defaults_of_every_preset_and_schedule_can_be_run() -> None:
    for preset in ("tiny", "small", "medium", "large"):
        for schedule in (
            "gpipe",
            "1f1b",
            "interleaved1f1b",
            "loopedbfs",
            "interleavedzerobubble",
            "zbv",
            "dualpipev",
        ):
            for ranks in (ALONE, TWO):
                options = read_options(["--preset", preset, "--schedule", schedule], ranks)
                assert options.microbatches >= 4
                assert options.offloads


# ---- the comparison ----


def figures(seconds: float, *, loss: float = 1.0, spill_bytes: int = 5 << 20) -> RankFigures:
    engine = {
        "spill_bytes": spill_bytes,
        "saved": 4,
        "host_bytes_held": 8 << 20,
        "device_bytes_peak": 3 << 20,
        "stall_ms": 0.0,
    }
    return RankFigures(loss=loss, seconds=seconds, active_bytes=None, reserved_bytes=None, engine=engine)


def compared(off: list[float], on: list[float], options: Options, **changes: Any) -> str:
    """The comparison of two runs of each arm, whose steps took so many seconds in the second."""
    runs = [
        [
            Arm(
                name,
                offloads=name == "on",
                run=run,
                steps=[[figures(seconds, **changes)] for seconds in times],
            )
            for run, times in enumerate(([9.0] * len(of_arm), of_arm))
        ]
        for name, of_arm in (("off", off), ("on", on))
    ]
    return comparison(options, *runs, Report(since="configure", ranks={0: {"would_hold_bytes": 7 << 20}}))


def test_the_arms_of_a_comparison_are_made_alone_once_and_then_step_by_step_in_turn() -> None:
    """Where the arm without offload always went first, 0.91 was measured for two equal arms."""
    runs = planned(read_options(["--compare"], ALONE))
    assert [[(arm.offloads, arm.run) for arm in run] for run in runs] == [
        [(False, 0)],
        [(True, 0)],
        [(False, 1), (True, 1)],
        [(False, 2), (True, 2)],
    ]
    assert [[arm.offloads for arm in in_turn(runs[2], step)] for step in range(3)] == [
        [False, True],
        [True, False],
        [False, True],
    ]
    assert [[arm.name for arm in run] for run in planned(read_options([], ALONE))] == [["offload on"]]
    (only,) = planned(read_options(["--offload-modules", "none"], ALONE))
    assert [arm.name for arm in only] == ["training"]


def test_comparison_gives_the_median_of_the_pairs_and_their_spread() -> None:
    text = compared([1.0, 2.0, 1.0], [1.1, 2.0, 1.5], read_options(["--compare"], ALONE))
    assert "A step takes 1.10 times as long (1.00 to 1.50 in 3 pairs of steps) with offload." in text
    rows = [line.split() for line in text.splitlines() if line.startswith("rank 0")]
    assert rows[0][2:7] == ["off", "1,000.0", "1,000.0", "to", "2,000.0"]
    assert rows[1][2:7] == ["on", "1,500.0", "1,100.0", "to", "2,000.0"]
    assert rows[0][-1] == "7.0"
    assert rows[1][-1] == "3.0"
    assert "The losses of all 3 steps are equal in all 4 runs, bit for bit." in text


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["--min-offloaded-tensor-size", "9999999"],
            "all of them stayed (--min-offloaded-tensor-size 9,999,999)",
        ),
        (["--offload-modules", "none"], "--offload-modules none asks for that"),
    ],
)
def test_comparison_says_when_nothing_was_offloaded_in_either_arm(arguments: list[str], why: str) -> None:
    options = read_options(["--compare", "2", *arguments], ALONE)
    text = compared([1.0, 1.0], [0.9, 1.0], options, spill_bytes=0)
    assert (
        f"Nothing was offloaded in either arm: {why}. So 0.95 times as long (0.90 to 1.00 in 2 pairs of "
        "steps) is how far equal steps differ."
    ) in text
    assert "A step takes" not in text


def test_two_equal_arms_are_1_within_their_spread_on_a_machine_that_grows_warm_and_is_held_up() -> None:
    """200 comparisons of equal arms, whose steps take half as long again at the end, with noise of 3%, and
    one in twenty of them twice as long."""
    missed, widths = 0, []
    for seed in range(200):
        noise = random.Random(seed)
        clock = 0.0
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for step in range(38):
            for arm in (False, True) if step % 2 == 0 else (True, False):
                clock += 1
                held_up = 2.0 if noise.random() < 0.05 else 1.0
                seconds[arm].append((1 + clock / 152) * (1 + 0.03 * noise.random()) * held_up)
        ratios = [on / off for off, on in zip(seconds[False], seconds[True], strict=True)]
        least, most = spread_of(ratios)
        missed += not least <= 1.0 <= most
        widths.append(most - least)
    assert missed == 0
    assert statistics.median(widths) < 0.15, "and the spread says something"


def test_a_spread_is_of_all_of_a_few_and_of_four_fifths_of_many() -> None:
    assert spread_of([1.0, 3.0, 2.0]) == (1.0, 3.0)
    assert spread_of([float(value) for value in range(11)]) == (1.0, 9.0)
    assert ratio_text([1.0] * 10) == "1.00 times as long (1.00 to 1.00 in 80% of 10 pairs of steps)"


def test_the_summary_ends_with_the_check_and_the_engines_report() -> None:
    options = read_options(["--check-end", "2"], ALONE)
    arm = Arm("offload on", steps=[[figures(1.0)]])
    check = EndCheck(gradients=39, off_seconds=[1.0, 2.0], on_seconds=[1.1, 2.0])
    text = summary(options, arm, "some text", Report(since="configure"), [check])
    assert "gradients bitwise equal with and without offload: all 39 of the last step, 2 times" in text
    assert "forward and backward take 1.05 times as long (1.00 to 1.10 in 2 pairs of steps)" in text
    assert "on a CPU this is the work of the simulated device" in text
    assert text.endswith("offload report: 0 steps since configure")


# ---- the picture ----


def test_a_picture_writes_over_earlier_pictures_only(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    notes, picture = tmp_path / "notes.png", tmp_path / "step.png"
    notes.write_text("what I wanted to keep")
    picture.write_bytes(b"\x89PNG and so on")
    with pytest.raises(FileExistsError, match=r"notes.png holds something else than a png picture"):
        read_options(["--plot", str(notes)], ALONE)
    assert read_options(["--plot", str(picture)], ALONE).plot == picture


def test_a_picture_without_matplotlib_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"--plot .*pip install '\.\[plot\]'"):
        read_options(["--plot", str(tmp_path / "step.png")], ALONE)


def test_the_allocators_segments_are_set_to_expand_before_torch_is_imported() -> None:
    """Steps of many shapes reserved 100.9 GB where 40.5 were enough."""
    source = (Path(__file__).parents[3] / "scripts" / "train.py").read_text()
    set_at = source.index('setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")')
    assert set_at < source.index("\nimport torch") < source.index("\nfrom offload import")


def test_the_help_says_units_as_the_engine_has_them() -> None:
    """It said that MB in the engine's table is 1,048,576 bytes: 149.2 MiB is 156.47 there."""
    text = " ".join(_parser().format_help().split())
    assert "MB and GB are 10**6 and 10**9, here and in the engine's table, report and warnings" in text
    assert "--device-limit-mib INT saved activations on the device at once, in MiB of 1,048,576 bytes" in text
    assert bytes_text(1_492 * 2**20 // 10) == "156.45 MB"

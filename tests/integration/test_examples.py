"""The examples run as a user would run them, and what they say is so."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import PipelineOffloadManager
from offload.groups.follower import Follower
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("no_manager")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
OF_RANKS = ("experts", "fsdp2", "pipeline")


def run(name: str, **arguments: Any) -> Any:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="example")["main"](**arguments)


def moved_bytes() -> int:
    return offload.report().as_dict()["moved_bytes"]


def share_held() -> float:
    """Peak of saved bytes on the device, over the peak with nothing offloaded: two lines of the report that
    each example prints."""
    last = offload.report().as_dict()["last_step"]
    return last["peak_bytes"] / last["would_hold_bytes"]


def test_a_loop_of_ones_own_moves_what_its_blocks_save(capsys: pytest.CaptureFixture[str]) -> None:
    run("own_loop")
    out = capsys.readouterr().out
    assert "blocks: 4 modules, 0 to 3" in out
    assert "offload report: 4 steps since apply" in out
    # what norm and up are given, and what gelu and down are given, which is four times as wide
    rows, width = 1024, 256
    figures = offload.report().as_dict()
    assert figures["last_step"]["saved_bytes"] == 4 * (2 + 2 * 4) * rows * width * 4
    assert figures["moved_bytes"] > 0
    assert figures["peak_bytes"] <= 20_000_000
    assert share_held() < 0.5


def test_what_torch_remat_saves_of_a_block_leaves_with_the_bits_of_no_offload() -> None:
    """It packs by the hooks around its checkpoint, which are offload's."""
    pytest.importorskip("torch_remat", reason="test_trainers_wheels.py installs torch_remat")
    plain = run("remat", steps=2, offloaded=False).state_dict()
    found = run("remat", steps=2).state_dict()
    assert all(torch.equal(found[name], wanted) for name, wanted in plain.items())
    # of each block the input, what the norm gives the attention, and the mlp's: two and two wide ones
    assert offload.report().as_dict()["last_step"]["saved_bytes"] == 4 * (4 + 2 * 4) * 1024 * 256 * 4
    assert moved_bytes() > 0
    assert share_held() < 0.5


def test_a_model_that_is_larger_than_its_device_trains_with_the_bits_of_plain_torch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    layers, width = 8, 512
    block = 2 * 4 * width * width * 4
    for row in run("larger_than_device", layers=layers, width=width, steps=2):
        assert row["weights"] >= layers * block > 3 * row["total"]
        assert row["peak"] == 2 * block <= row["total"]
        assert row["bits"]
    out = capsys.readouterr().out
    assert out.count("8 blocks of 67.11 MB wait on the host, at most 16.78 MB on the device") == 2
    assert len(re.findall(r"^(?:LoRA|full) .* equal$", out, flags=re.MULTILINE)) == 2


def test_three_kinds_move_at_once_under_one_arbiter(capsys: pytest.CaptureFixture[str]) -> None:
    line = run("conductor")
    assert line["runtime_snapshots"] == {
        "stagehand": {"max_inflight": 2, "prefetch_window": None},
        "activation_stagehand": {"max_d2h": 2, "max_h2d": 2},
    }
    # pinned: 4 blocks of two weights of 512 x 2048, and what Adam keeps of the head's 512 x 256
    assert line["pinned_granted_mb"] >= (4 * 2 * 512 * 2048 * 4 + 2 * 512 * 256 * 4) / 2**20
    assert all(seconds > 0 for seconds in line["phase_durations"].values())
    out = capsys.readouterr().out
    assert out.count("loss") == 4
    assert "answers of the conductor" in out


def test_images_of_several_sizes_leave_only_above_the_mark(capsys: pytest.CaptureFixture[str]) -> None:
    run("watermark", high_mb=1000.0)
    assert capsys.readouterr().out.count(" 0.00 MB left in 0 of 50") == 6
    run("watermark")
    left = [float(found) for found in re.findall(r"(\d+\.\d\d) MB left", capsys.readouterr().out)]
    assert left[0::3] < left[2::3], "40 pixels save more than 32"
    assert all(small == 0 for small in left[1::3]), "24 pixels fit"


def test_a_transformers_model_recomputes_its_layers_and_their_inputs_move(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    run("transformers_model")
    assert "model.layers: 4 modules" in capsys.readouterr().out
    steps, layers, an_input = 3, 4, 2 * 128 * 128 * 4
    assert moved_bytes() == steps * layers * an_input
    assert share_held() < 0.8


def test_the_trainers_callback_gives_its_reporters_what_moved_in_a_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A callback that a Trainer is given stands behind TensorBoard's and W&B's, so they never saw its
    figures, which were sums since the begin of training and did not say so."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    written: list[dict[str, float]] = []

    class Reporter(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            written.append(dict(logs))

    monkeypatch.setitem(transformers.integrations.INTEGRATION_TO_CALLBACK, "a reporter", Reporter)
    steps: list[int] = []
    ended = Follower.end_inferred_step

    def spied(follower: Follower, *, guessed: bool = False) -> None:
        ended(follower, guessed=guessed)
        if not guessed:
            steps.append(offload.report().last_step["moved_bytes"])

    monkeypatch.setattr(Follower, "end_inferred_step", spied)
    trainer = run("transformers_trainer", steps=4, report_to=["a reporter"])
    found = [entry["offload/to_host_bytes"] for entry in written if "loss" in entry]
    assert found == steps
    assert len(found) == trainer.state.global_step == 4
    assert 0 < max(found) < sum(found) == moved_bytes()
    assert share_held() < 0.5
    assert all("offload/stall_ms" in entry for entry in written if "loss" in entry)
    trainer.evaluate(trainer.train_dataset[:2])
    assert not any(name.startswith("offload/") for name in written[-1]), "of an evaluation"
    assert "offload report: 4 steps since apply" in capsys.readouterr().out
    assert not any(module._forward_pre_hooks for module in trainer.model.modules())


@pytest.mark.req("S4-19", "S4-23", "S4-39")
def test_each_mode_reaches_the_trainer_and_its_weights_have_the_bits_of_no_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    fetched: list[tuple[bool, bool]] = []
    apply = offload.apply

    def spied(*arguments: Any, **named: Any) -> Any:
        handle = apply(*arguments, **named)
        engine = PipelineOffloadManager.get_instance().engine
        fetched.append((engine.limits.max_restoring_bytes > 0, engine.config.disk_directory is not None))
        return handle

    module = pytest.importorskip("offload.integrations.transformers")
    monkeypatch.setattr(module, "apply", spied)
    weights = {}
    for mode in (False, "hidden_states", True, "legacy", "disk"):
        weights[mode] = run("transformers_trainer", mode=mode).model.state_dict()
        assert (moved_bytes() > 0) is (mode is not False)
        PipelineOffloadManager.close_instance()
    # legacy fetches nothing ahead, and only disk goes on to a file
    assert fetched == [(True, False), (True, False), (True, False), (False, False), (True, True)]
    for mode, found in weights.items():
        assert all(torch.equal(found[name], wanted) for name, wanted in weights[False].items()), mode


@pytest.mark.parametrize("mode", ["hidden_states", True])
def test_lora_trains_with_hidden_states_and_with_every_saved_tensor_out(mode: bool | str) -> None:
    pytest.importorskip("peft")
    run("peft_lora", mode=mode, steps=2)
    assert moved_bytes() > 0
    assert share_held() < 0.8


def test_the_hybrid_optimizers_resumed_run_has_the_bits_of_the_whole_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The example once printed that its step needs no offload, as three others did."""
    run("hybrid_optimizer")
    assert share_held() < 0.5
    out = capsys.readouterr().out
    assert "averaged weights bitwise equal: True" in out
    whole, resumed = out.split("resumed:")
    assert re.findall(r"step [345]: .*", whole) == re.findall(r"step [345]: .*", resumed)


def _rank(rank: int, world: int, name: str) -> tuple[int, float]:
    run(name)
    found = moved_bytes(), share_held()
    PipelineOffloadManager.close_instance()
    return found


@pytest.mark.parametrize("name", OF_RANKS)
def test_an_example_of_several_ranks_moves_bytes_and_frees_memory_on_each(name: str, tmp_path: Path) -> None:
    for moved, share in run_ranks(_rank, 2, tmp_path, name):
        assert moved > 0
        assert share < 0.9


@pytest.mark.parametrize("name", OF_RANKS)
def test_an_example_of_several_ranks_names_its_launcher_where_there_is_none(name: str) -> None:
    with pytest.raises(SystemExit, match=f"torchrun --nproc-per-node 2 examples/{name}.py"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_runs_by_the_command_that_it_names(name: str, tmp_path: Path) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    (command,) = re.findall(r"^(?:    )?((?:python|torchrun) .*)$", text, re.M)
    launcher = ["-m", "torch.distributed.run"] if command.startswith("torchrun") else []
    done = subprocess.run(
        [sys.executable, *launcher, *command.split()[1:-1], str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"offload report|MB left in|^Rank 1 ", done.stdout, re.M)


def test_the_megatron_example_uses_names_that_there_are() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (EXAMPLES / "megatron.md").read_text(), flags=re.DOTALL)
    tree = ast.parse(code)
    assert len([line for line in code.splitlines() if line.strip()]) <= 13
    from parallel import megatron

    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert calls == ["megatron.install", "TransformerConfig"]
    assert callable(megatron.install)


def test_the_page_of_the_examples_lists_each_of_them() -> None:
    page = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".md"}} - {"README.md"}
    assert set(re.findall(r"^\| \[([\w.]+)\]\(\1\)", page, flags=re.MULTILINE)) == files

"""`offload plan`: what it says and prints, its exit codes, and torch's orders from numbers alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from offload.policy.actions import Rates
from parallel import plan
from parallel.dry_run.measure import Sizes, measured
from parallel.dry_run.models import KNOWN, model_from_config
from parallel.dry_run.rates import GPUS, gpu_of_doctor
from parallel.orders import has_one_line, orders_of
from parallel.schedules import SCHEDULES

SMALL = {
    "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 256,
}  # fmt: skip
LINK = Rates(d2h_bytes_per_s=55e9, h2d_bytes_per_s=55e9, duplex_bytes_per_s=100e9)
TWO_RANKS = ["--pp", "2", "--microbatches", "4", "--sequence", "1024"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = plan.main([*arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_job_that_fits_is_said_to_with_its_fullest_rank(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, _ = asked(capsys, "--model", config, *TWO_RANKS)
    assert code == 0
    assert "fits: rank 0 is fullest with" in said
    assert "on 2 h200 (pp 2 x tp 1 x dp 1), 2 stages, 4 chunks a rank and step, 1024 tokens each" in said
    assert "not counted, or taken for granted:" in said


def test_a_job_that_does_not_fit_is_told_the_size_and_the_modes_that_do(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, whole, _ = asked(capsys, "--model", config, *TWO_RANKS, "--json")
    none, checkpoint = (
        next(mode["device_bytes"] for mode in json.loads(whole)["modes"] if mode["mode"] == name) / 1e9
        for name in ("off", "checkpoint")
    )
    between = str((none + checkpoint) / 2)
    code, said, _ = asked(capsys, "--model", config, *TWO_RANKS, "--device-total-gb", between)
    assert code == 3
    assert "does not fit: rank 0 is fullest with" in said
    times = line_of(said, "least time, in seconds a step, of each mode that fits: ").split(", ")
    assert [time.split()[0] for time in times] == ["checkpoint", "selective", "groups", "auto"]
    fastest = min(times, key=lambda time: float(time.split()[1])).split()[0]
    assert said.splitlines()[-1] == f"take --offload {fastest}"
    code, said, _ = asked(
        capsys, "--model", config, *TWO_RANKS, "--device-total-gb", between, "--offload", "groups"
    )
    assert code == 0
    assert "GB pinned by the 2 ranks of the fullest" in said
    code, said, _ = asked(
        capsys, "--model", config, *TWO_RANKS, "--device-total-gb", between, "--offload", "groups",
        "--host-gb", "0.001",
    )  # fmt: skip
    assert code == 3
    assert "\nfits: " not in said, "it said that it fits, and then that it does not"
    assert "of 0.0 GB; raise --host-gb, or take a mode that moves less" in said
    assert said.splitlines()[-1].startswith("take --offload ")


def line_of(said: str, begin: str) -> str:
    """What comes after `begin` in the one line that begins so."""
    (found,) = [line.removeprefix(begin) for line in said.splitlines() if line.startswith(begin)]
    return found


def test_where_no_mode_fits_the_ways_out_are_named_with_what_they_need(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with "no mode fits", with two thirds of the memory in optimizer state and no word of it."""
    answer = json.loads(asked(capsys, "--model", config, *TWO_RANKS, "--json")[1])
    least = min(answer["modes"], key=lambda mode: mode["device_bytes"])
    state = max(position["held"]["optimizer"] for position in answer["positions"])
    total = (least["device_bytes"] - state / 2) / 1e9
    smaller = ["--model", config, *TWO_RANKS, "--device-total-gb", str(total)]
    for replicas in ((), ("--dp", "2", "--zero", "0")):  # without --zero 1 each has all of the state
        code, said, _ = asked(capsys, *smaller, *replicas)
        assert "- --zero 1 with --dp 2 or more" in said
    assert code == 3
    assert f"no mode fits {total:.1f} GB: --offload {least['mode']} needs" in said
    for way in ("With HybridDeviceOptimizer", 'weights="host"', "- FSDP2 cuts", "- LoRA has"):
        assert way in said.split("no mode fits")[1], way
    code, said, _ = asked(capsys, *smaller, "--offload", least["mode"], "--optimizer-bytes", "0")
    assert code == 0, "the first way out leads out"


def test_where_only_the_host_is_short_the_mode_that_pins_least_says_how_much(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = json.loads(asked(capsys, "--model", config, *TWO_RANKS, "--json")[1])
    room = {mode["mode"]: mode["device_bytes"] for mode in answer["modes"]}
    staying = min(room["off"], room["checkpoint"])
    assert min(room.values()) < staying, "else nothing has to move"
    total = str((min(room.values()) + staying) / 2e9)
    code, said, _ = asked(
        capsys,
        "--model",
        config,
        *TWO_RANKS,
        "--device-total-gb",
        total,
        "--offload",
        "groups",
        "--host-gb",
        "0",
    )
    assert code == 3
    assert "no mode fits: --offload " in said.splitlines()[-1]
    assert "pins least, and needs --host-gb" in said.splitlines()[-1]


def test_a_gpu_of_ones_own_figures_is_slower_in_proportion_and_says_what_it_takes_for_granted(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ("--gpu-gb", "24", "--gpu-tflops", "0.697", "--link-gbs", "5.53", "--offload", "groups")
    known = json.loads(asked(capsys, "--model", config, *TWO_RANKS, "--offload", "groups", "--json")[1])
    found = json.loads(asked(capsys, "--model", config, *TWO_RANKS, *own, "--json")[1])
    assert found["device_total_bytes"] == 24e9
    for position, before in zip(found["positions"], known["positions"], strict=True):
        for name in ("d2h_bytes_per_s", "h2d_bytes_per_s"):
            assert position["rates"][name] == pytest.approx(before["rates"][name] / 10)
    assert found["step_s"] > 2 * known["step_s"]
    assert any("in proportion to --gpu-tflops and --link-gbs" in text for text in found["left_out"])


def test_a_models_folder_is_as_good_as_its_config(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(config).parent
    assert asked(capsys, "--model", str(folder), *TWO_RANKS) == asked(capsys, "--model", config, *TWO_RANKS)
    code, _, error = asked(capsys, "--model", str(folder.parent), *TWO_RANKS)
    assert code == 2
    assert "config.json" in error


def test_the_help_has_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for default in ("chunks of a step and rank (8)", "replicas (1)", "what it has", "(no limit)", "12 (12)"):
        assert default in said, default


def test_json_has_every_position_in_bytes_and_seconds(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, _ = asked(capsys, "--model", config, *TWO_RANKS, "--dp", "2", "--json")
    answer = json.loads(said)
    assert code == 0
    assert (answer["ranks"], len(answer["positions"])) == (4, 2)
    first = answer["positions"][0]
    assert first["replicas"] == 2
    assert first["peak_bytes"] == max(first["peak_by_phase"].values())
    assert answer["step_s"] == pytest.approx(
        answer["pipeline_s"] + answer["gradients_s"] + answer["optimizer_s"]
    )


def test_the_step_is_drawn(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "step.png"
    code, _, _ = asked(capsys, "--model", config, *TWO_RANKS, "--schedule", "zbv", "--plot", str(path))
    assert code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_refused_before_anything_is_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    question = ["--model", "llama9", "--sequence", "1024"]
    assert asked(capsys, *question, "--plot", "a.png")[2].startswith("a plot needs matplotlib")
    assert asked(capsys, *question)[2].startswith("no model is called 'llama9'")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "llama9"], "no model is called 'llama9'; there are llama3-8b, llama3-70b"),
        (["--model", "nowhere/config.json"], "No such file or directory"),
        (["--model", "llama3-8b", "--gpu", "abacus"], "no GPU is called 'abacus'; known are h200, h100"),
        (["--model", "llama3-8b", "--schedule", "zigzag"], "no schedule is called 'zigzag'"),
        (["--model", "llama3-8b", "--tp", "0"], "--tp is 0; it must be at least 1"),
        *(
            (["--model", "llama3-8b", option, value], f"{option} is {value}; it must be {limit}")
            for option, value, limit in (
                ("--vpp", "0", "at least 1"),
                ("--device-total-gb", "-3", "at least 0.001"),
                ("--device-total-gb", "5000", "at most 149.3, what a h200 has; --gpu-gb is for another one"),
                ("--device-total-gb", "nan", "at least 0.001"),
                ("--other-gb", "-1", "at least 0"),
                ("--other-gb", "200", "at most 149.3, all that a GPU may hold"),
                ("--host-gb", "-1", "at least 0"),
                ("--host-gb", "inf", "at most 1,000,000.0, a petabyte"),
                ("--gpu-tflops", "0", "at least 0.001"),
                ("--optimizer-bytes", "-4", "at least 0"),
            )
        ),
        (["--model", "llama3-8b", "--tp", "5"], "heads 32 over --tp 5 is no whole number"),
    ],
)
def test_a_question_without_sense_is_one_line_and_code_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, error = asked(capsys, *arguments, "--sequence", "1024")
    assert (code, said) == (2, "")
    assert text in error
    assert error.count("\n") == 1


def test_rates_are_measured_on_the_device_that_is_here() -> None:
    """On a CPU, small: the arithmetic, not the figures."""
    sizes = Sizes(side=64, tokens=64, heads=2, channels=16, elements=1 << 12, calls=20)
    found = measured(GPUS["h200"], torch.device("cpu"), sizes, LINK)
    known = GPUS["h200"]
    for name in ("matmul_flops", "attention_flops", "attention_backward_flops", "memory_rate", "call_s"):
        assert 0 < getattr(found, name) != getattr(known, name)
    rates, said = found.link(8)
    assert (rates.d2h_bytes_per_s, rates.together_bytes_per_s) == (55e9, 100e9)
    assert said == "the link was measured with 1 GPUs copying, not with 8"
    assert found.peer_rate == known.peer_rate


@pytest.mark.skipif("torch.cuda.is_available()", reason="there is a GPU")
def test_rates_cannot_be_measured_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = asked(capsys, "--model", "llama3-8b", "--sequence", "1024", "--measure")
    assert (code, error) == (2, "--measure needs a GPU here; without one give --gpu\n")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"layers: 3", "config.json is no JSON: Expecting value"),
        (b"\xff\xfe\x00", "config.json is no JSON: 'utf-8' codec"),
        (b"[]", "config.json has a list; a model's config is an object of names"),
        (b'{"model_type": ["llama"]}', "model_type is \"['llama']\"; described are"),
    ],
)
def test_a_config_that_is_none_is_one_line_that_names_it(
    content: bytes, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    code, said, error = asked(capsys, "--model", str(path), "--sequence", "1024")
    assert (code, said, error.count("\n")) == (2, "", 1)
    assert text in error


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_torch_gives_each_chunk_one_forward_and_one_whole_backward(name: str) -> None:
    orders = orders_of(name, ranks=2, virtual_stages=None, microbatches=4)
    virtual = SCHEDULES[name].default_virtual_stages
    assert {action.stage for order in orders for action in order} == set(range(2 * virtual))
    for order in orders:
        made = sorted(action.chunk for action in order if action.kind == "F")
        read = sorted(action.chunk for action in order if action.kind in "BW")
        assert made == read
        assert len(made) == 4 * virtual


def test_messages_have_one_line_a_rank_where_torch_sends_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.__version__ >= "2.12":
        assert not has_one_line()
    monkeypatch.setattr(schedules, "_batch_p2p", lambda ops, desc=None: dist.batch_isend_irecv(ops))
    assert has_one_line()


def test_a_transformers_config_is_read_and_what_it_does_not_describe_is_said() -> None:
    llama = model_from_config(SMALL, "mine")
    assert (llama.layers, llama.head_dim, llama.kv_heads, llama.experts, llama.left_out) == (8, 64, 4, 0, ())
    for kind, tied in (("llama", False), ("smollm3", True)):  # by a class's own default
        assert model_from_config(SMALL | {"model_type": kind}, "mine").tied is tied
    windowed = model_from_config(SMALL | {"sliding_window": 256, "attention_dropout": 0.1}, "mine")
    assert windowed.left_out == (
        "the attention window of 256 tokens: attention is over all", "attention_dropout 0.1",
    )  # fmt: skip
    mixed = model_from_config(
        SMALL | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, "mine"
    )
    assert (mixed.experts, mixed.experts_per_token, mixed.expert_ffn) == (8, 2, 1024)
    gpt2 = model_from_config(
        {
            "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
            "n_positions": 1024, "resid_pdrop": 0.1,
        },
        "gpt2",
    )  # fmt: skip
    assert (gpt2.ffn, gpt2.gated, gpt2.tied, gpt2.left_out) == (3072, False, True, ("resid_pdrop 0.1",))


def test_configs_of_transformers_own_classes_are_the_known_models() -> None:
    transformers = pytest.importorskip("transformers")
    deepseek = transformers.DeepseekV3Config().to_dict()  # its defaults are DeepSeek-V3's
    read = model_from_config(deepseek, "deepseek-v3")
    assert read.latent == KNOWN["deepseek-v3"].latent
    for name in ("layers", "hidden", "heads", "head_dim", "ffn", "experts", "expert_ffn", "dense_layers"):
        assert getattr(read, name) == getattr(KNOWN["deepseek-v3"], name), name


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "perceiver"}, "mine: model_type is 'perceiver'; described are deepseek_v2"),
        ({"hidden_size": None}, "mine: hidden_size is None; it must be a whole number, 1 or more"),
        ({"num_key_value_heads": 3}, "mine: 8 query heads cannot share 3 key heads equally"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4},
            "mine: 2 experts, 4 a token, of width 1024; give a token 1..2 experts",
        ),
    ],
)
def test_a_config_that_cannot_be_described_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text.replace(".", r"\.")):
        model_from_config(SMALL | change, "mine")


def test_a_card_by_its_data_sheet_says_so_and_a_file_of_doctor_has_its_own_link(tmp_path: Path) -> None:
    published = GPUS["gb200"]
    assert "none was measured" in published.assumed[0]
    values = {"d2h_bytes_per_s": 2e9, "h2d_bytes_per_s": 3e9, "both_bytes_per_s": 4e9}
    values |= {"model": "NVIDIA GB200", "memory_bytes": 7}
    found = gpu_of_doctor({"lines": [{"values": {}}, {"values": values}]}, "seen.json")
    assert (found.name, found.memory_bytes, found.links[1].h2d_bytes_per_s) == ("gb200", 7, 3e9)
    assert "seen.json" in found.assumed[-1]
    for answer, why in (({"lines": []}, "no link was measured"), ([], "no link was measured")):
        with pytest.raises(ValueError, match=why):
            gpu_of_doctor(answer, "seen.json")
    values["model"] = "NVIDIA T4"
    with pytest.raises(ValueError, match="has no NVIDIA T4"):
        gpu_of_doctor({"lines": [{"values": values}]}, "seen.json")
    file = tmp_path / "seen.json"
    file.write_text("no")
    assert plan.main(["--model", "llama3-8b", "--sequence", "64", "--gpu", str(file)]) == 2

"""What is installed works: the wheel in an environment that has no extra, as a user's has.

The tests' own environment has all extras, so none of them would see that a run needs one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from parallel import plan as planner
from tests.integration.test_readme import DOCS, README, examples
from tests.integration.user_environment import ROOT, environment_of, run_each, run_in, wheel_of
from tests.once import made_once

PAGES = sorted(page for page in DOCS.glob("*.md") if examples(page))
EXTRAS = ["scipy", "matplotlib", "transformers", "peft", "accelerate", "pytest", "hypothesis", "mkdocs"]


NO_EXTRA = f"""
from importlib.util import find_spec
import offload
assert [name for name in {EXTRAS} if find_spec(name)] == []
assert not offload.__file__.startswith({str(ROOT)!r}), offload.__file__
"""
JOB = ["--model", "llama3-8b", "--pp", "4", "--sequence", "4096", "--offload", "auto"]
PLOT = f"""
from offload.commands import main
import sys
sys.argv[1:] = ["plan", *{JOB}, "--plot", "step.png"]
sys.exit(main())
"""
README_SAYS = (
    # of 8 blocks each saves two tensors of 4 MiB: what its activation is given, and what that returns
    """
figures = offload.report().as_dict()
assert figures["last_step"]["saved_bytes"] == 8 * 2 * 4096 * 256 * 4, figures
assert figures["last_step"]["moved_bytes"] > 30e6 or torch.cuda.is_available(), "it shows what leaves"
assert figures["peak_bytes"] <= 30_000_000, figures
offload.PipelineOffloadManager.close_instance()
""",
    # each layer saves what up and down are given, and what act is given
    """
figures = offload.report().as_dict()
assert figures["last_step"]["saved_bytes"] == 3 * 4096 * (256 + 1024 + 1024) * 4, figures
assert figures["last_step"]["moved_bytes"] > 0, figures
""",
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_of(tmp_path_factory, wheel_of(tmp_path_factory))


@pytest.fixture(scope="module")
def ran(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """What each page's examples, one after the other, have printed."""
    first, marks, *rest = examples(README)
    optimizer = "assert isinstance(optimizer, offload.HybridDeviceOptimizer)\n"
    programs = {page.name: "".join(examples(page)) for page in PAGES}
    programs[README.name] = "".join((first, README_SAYS[0], marks, README_SAYS[1], *rest, optimizer))
    programs |= {"no extra": NO_EXTRA, "plot": PLOT}
    return made_once(tmp_path_factory, "pages", lambda folder: run_each(python, folder, programs))


def test_a_users_environment_has_no_extra_and_not_the_checkout(ran: dict[str, tuple[int, str, str]]) -> None:
    code, _, errors = ran["no extra"]
    assert code == 0, errors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_example_of_a_page_runs(page: Path, ran: dict[str, tuple[int, str, str]]) -> None:
    code, out, errors = ran[page.name]
    assert code == 0, out + errors
    if page.name == "getting-started.md":
        assert "<offload.apply(Sequential, mode='auto'): blocks: 8 modules, 0 to 7>" in out
        assert "auto: the plan is settled" in out
        explained = page.read_text().split("| line of the report |")[1].split("\n\n")[0]
        lines = [row.split("|")[1].strip() for row in explained.splitlines()[2:]]
        assert len(lines) > 4
        assert [line for line in lines if line not in out] == []


def test_the_examples_of_the_readme_run_and_the_first_keeps_its_total(
    ran: dict[str, tuple[int, str, str]],
) -> None:
    """README once began with a mode that loses, and its second example moved nothing. The first one trains in
    mode "auto", which once raised in its second step without scipy."""
    code, out, errors = ran[README.name]
    assert code == 0, out + errors
    assert "30 steps since apply" in out
    assert "auto: the plan is settled" in out


def test_the_dry_run_plans_without_an_extra_and_says_at_once_what_a_picture_needs(
    python: Path, ran: dict[str, tuple[int, str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offload = str(python.with_name("offload"))  # the console script
    assert planner.main([*JOB, "--json"]) == 0
    modes = json.loads(capsys.readouterr().out)["modes"]
    least = {mode["mode"]: mode["device_bytes"] for mode in modes}
    between = str((least["off"] + least["checkpoint"]) / 2e9)
    answer = json.loads(run_in(Path(offload), tmp_path, "plan", *JOB, "--device-total-gb", between, "--json"))
    assert answer["fits"]
    said = {mode["mode"]: mode["device_bytes"] for mode in answer["modes"]}
    assert said == least, "the wheel says what the checkout does"
    code, out, errors = ran["plot"]
    *of_torch, last = errors.splitlines()
    assert (code, out, [line for line in of_torch if "/site-packages/torch/" not in line]) == (2, "", [])
    assert last == (
        "a plot needs matplotlib, which is not installed: pip install matplotlib, or in a checkout "
        "pip install '.[plot]'"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, whose machine may be right or not")
def test_the_doctor_needs_no_extra_and_says_nothing_beside_its_answer(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a locale that is not installed, and in a folder that has modules of the command's names."""
    monkeypatch.setenv("LC_ALL", "xx_XX")
    for name in ("compare", "doctor", "plan", "commands"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the user was imported')\n")
    assert run_in(python, tmp_path, "-m", "offload", "doctor", "--json", code=3) == ""


def test_tests_run_where_no_extra_is_but_what_runs_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without peft or transformers a plain `pytest` stopped at collection, and without accelerate examples
    failed. Collected are the files that name an extra, and those that import from a helper that does."""
    more = ("pytest", "hypothesis", "filelock", "packaging")
    python = environment_of(tmp_path_factory, wheel_of(tmp_path_factory), "user who tests", more)
    peers = "the_trainers_callback or lora_trains or a_transformers_model_recomputes"
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    naming = [path for path, text in texts.items() if any(name in text for name in EXTRAS[:5])]
    words = [path.stem for path in naming if not path.stem.startswith("test_")]
    files = {path for path, text in texts.items() if any(f".{word} import" in text for word in words)}
    files = {str(path) for path in files | set(naming) if path.stem.startswith("test_")}
    assert len(files) < len(texts) / 2
    said = run_in(python, ROOT, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", peers, *sorted(files))
    assert re.match(r"\d+ skipped, \d+ deselected", said.splitlines()[-1]), said

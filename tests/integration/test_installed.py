"""What is installed works: the wheel in an environment that has no extra, as a user's has.

The tests' own environment has all extras, so none of them would see that a run needs one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.integration.test_readme import DOCS, README, examples
from tests.integration.user_environment import ROOT, environment_of, run_in, wheel_of

PAGES = [README, *sorted(page for page in DOCS.glob("*.md") if examples(page))]
EXTRAS = ["scipy", "matplotlib", "transformers", "peft", "accelerate", "pytest", "hypothesis", "mkdocs"]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_of(tmp_path_factory, wheel_of(tmp_path_factory))


def test_a_users_environment_has_no_extra_and_not_the_checkout(python: Path, tmp_path: Path) -> None:
    code = f"""
from importlib.util import find_spec
import offload
assert [name for name in {EXTRAS} if find_spec(name)] == []
assert not offload.__file__.startswith({str(ROOT)!r}), offload.__file__
"""
    run_in(python, tmp_path, "-c", code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_example_of_a_page_runs(page: Path, python: Path, tmp_path: Path) -> None:
    """README's first one trains in mode "auto", which once raised in its second step without scipy."""
    script = tmp_path / "page.py"
    script.write_text("".join(examples(page)))
    run_in(python, tmp_path, str(script))


def test_the_dry_run_plans_without_an_extra_and_says_at_once_what_a_picture_needs(
    python: Path, tmp_path: Path
) -> None:
    job = ["--model", "llama3-8b", "--pp", "4", "--sequence", "4096", "--offload", "auto"]
    offload = str(python.with_name("offload"))  # the console script
    plan = [offload, "plan", *job]
    whole = json.loads(run_in(python, tmp_path, *plan, "--json"))
    least = {mode["mode"]: mode["device_bytes"] for mode in whole["modes"]}
    between = str((least["none"] + least["checkpoint"]) / 2e9)
    assert "fits" in run_in(python, tmp_path, *plan, "--device-total-gb", between)
    said = run_in(python, tmp_path, *plan, "--plot", "step.png", code=2)
    assert said == (
        "a plot needs matplotlib, which is not installed: pip install matplotlib, or in a checkout "
        "pip install '.[plot]'\n"
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
    failed."""
    more = ("pytest", "hypothesis", "filelock", "packaging")
    python = environment_of(tmp_path_factory, wheel_of(tmp_path_factory), "user who tests", more)
    peers = "the_trainers_callback or lora_trains or a_transformers_model_recomputes"
    said = run_in(python, ROOT, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", peers)
    assert re.match(r"\d+ skipped, \d+ deselected", said.splitlines()[-1]), said

"""The wheel: what is in it, and that it works where the repository is not."""

from __future__ import annotations

import itertools
import re
import runpy
import sys
from email import message_from_string
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import setuptools

import offload
from tests.integration.user_environment import ROOT, environment_of, run_each, wheel_of
from tests.once import made_once


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(tmp_path_factory)


def test_the_wheel_has_one_package_at_top_level_with_every_file_of_the_three_folders(wheel: Path) -> None:
    """It once had `parallel` and `moe` there, which hid a user's own packages, or were hidden by them."""
    with ZipFile(wheel) as archive:
        files = set(archive.namelist())
    assert {name.split("/")[0] for name in files if ".dist-info/" not in name} == {"offload"}
    assert {"offload/py.typed", "offload/telemetry/page.html"} <= files
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "offload").rglob("*.py")}
    for folder in ("parallel", "moe"):
        source |= {f"offload/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    assert source == {name for name in files if name.endswith(".py")}


def test_the_wheels_metadata_is_complete_and_its_version_the_packages(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        info = f"pipeline_offload-{offload.__version__}.dist-info"
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
    assert metadata["Version"] == offload.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The pipeline-offload authors"
    assert metadata["Requires-Python"] == ">=3.11"
    extras = {"test", "doctor", "plot", "plan", "bench", "docs"}
    assert set(metadata.get_all("Provides-Extra") or ()) == extras
    assert not re.search(RELATIVE, str(metadata.get_payload()))
    assert f"\n## {offload.__version__} " in (ROOT / "CHANGELOG.md").read_text()
    needed = [line for line in metadata.get_all("Requires-Dist") or () if "extra ==" not in line]
    names = {re.match(r"[\w-]+", line)[0] for line in needed}  # type: ignore[index]
    assert names == {"torch", "jinja2", "numpy", "safetensors", "tabulate", "tqdm"}


RELATIVE = re.compile(r"\]\((?!https?://)")


def test_a_build_that_is_given_an_address_has_absolute_links(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.setenv("OFFLOAD_ADDRESS", "https://host.example/owner/name/")
    runpy.run_path(str(ROOT / "setup.py"))
    text, readme = given["long_description"], (ROOT / "README.md").read_text()
    assert not re.search(RELATIVE, text)
    for target in re.findall(r"\]\(https://host\.example/owner/name/(?:blob|raw)/v[^/]+/([^)#]*)", text):
        assert (ROOT / target).exists(), target
    assert text.count("https://host.example/owner/name/raw/") == readme.count("![") > 0
    assert re.sub(r"\]\([^)]*\)", "", text) == re.sub(r"\]\([^)]*\)", "", readme)
    assert all(url.startswith("https://host.example/owner/name/") for url in given["project_urls"].values())


NAMES = """
import sys, warnings
import offload
on_use = {"parallel", "moe", "offload.parallel", "offload.moe", "offload.pipelining", "offload.integrations"}
assert not on_use & set(sys.modules)
import offload.parallel.schedules, offload.moe
import offload.parallel.dry_run.answer
from offload.parallel import megatron
"""
USERS_FOLDER = f"""{NAMES}
import parallel, moe
assert parallel.whose == moe.whose == "the user's"
import parallel.schedules
assert parallel.schedules.whose == "the user's"
assert megatron.HybridDeviceOptimizer.__module__ == "offload.parallel.megatron_optimizer"
from offload.pipelining import OffloadPipelineStage, actions_of
assert offload.parallel.OffloadPipelineStage is OffloadPipelineStage
"""
FORMER = f"""{NAMES}
def imported(warned):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import parallel.megatron
        from parallel.megatron import install
        import parallel.dry_run.rates
        import moe
    assert parallel is offload.parallel and moe is offload.moe
    assert parallel.megatron is megatron and install is megatron.install
    assert parallel.dry_run.rates is offload.parallel.dry_run.rates
    assert [str(one.message).partition(";")[0] for one in caught] == warned
    assert all(one.category is DeprecationWarning for one in caught)
"""
FORMER_NAMES = ("parallel", "parallel.megatron", "parallel.dry_run", "parallel.dry_run.rates", "moe")
WARNED = [f"{name} is offload.{name} now" for name in FORMER_NAMES]
FIRST = """
import parallel.megatron, moe  # before offload
import offload.parallel.megatron, offload.moe
assert parallel.megatron is offload.parallel.megatron and moe is offload.moe
"""
OF_USER = "a user's own parallel and moe"
INSTALLED = {OF_USER: USERS_FOLDER, "former names": f"{FORMER}\nimported({WARNED})"}
CHECKOUT = {
    OF_USER: f"import sys; sys.path.append({str(ROOT)!r})\n{USERS_FOLDER}",
    **{
        name: f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"
        for name, program in (("former names", f"{FORMER}\nimported([])"), ("former names first", FIRST))
    },
}


@pytest.fixture(scope="module")
def ran(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[int, str, str]]]:
    """Of each program: beside the installed wheel, and beside a checkout."""

    def run(folder: Path) -> dict[str, dict[str, tuple[int, str, str]]]:
        found = {}
        of_user = environment_of(tmp_path_factory, wheel)
        for where, python, programs in (
            ("installed", of_user, INSTALLED),
            ("checkout", Path(sys.executable), CHECKOUT),
        ):
            (folder / where / OF_USER / "parallel").mkdir(parents=True)
            for name in ("parallel/__init__", "parallel/schedules", "moe"):
                (folder / where / OF_USER / f"{name}.py").write_text('whose = "the user\'s"\n')
            found[where] = run_each(python, folder / where, programs)
        return found

    found: dict[str, dict[str, tuple[int, str, str]]] = made_once(tmp_path_factory, "names", run)
    return found


@pytest.mark.parametrize(
    ("where", "name"),
    [
        *itertools.product(("installed", "checkout"), (OF_USER, "former names")),
        ("checkout", "former names first"),
    ],
)
def test_a_users_own_packages_work_and_former_names_are_the_same_modules_and_warn_where_installed(
    where: str, name: str, ran: dict[str, dict[str, tuple[int, str, str]]]
) -> None:
    code, _, errors = ran[where][name]
    assert code == 0, errors

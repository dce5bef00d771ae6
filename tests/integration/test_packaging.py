"""The wheel: what is in it, and that it works where the repository is not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pytest

import offload
from tests.once import made_once

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("offload", "parallel", "moe")


def build_wheel(folder: Path) -> Path:
    """Build from a copy, because setuptools writes beside what it builds; by the hook that pip calls too."""
    tree = folder / "tree"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    built = run("from setuptools import build_meta; print(build_meta.build_wheel('..'))", tree)
    return folder / built.splitlines()[-1]


def run(code: str, folder: Path, *path: Path) -> str:
    """What the code prints, in a process that finds packages in `path` and not in the repository."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = made_once(tmp_path_factory, "wheel", build_wheel)
    return found


def test_the_wheel_has_the_three_packages_with_their_types_and_nothing_else(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        files = set(archive.namelist())
    assert {name.split("/")[0] for name in files if ".dist-info/" not in name} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= files
    source = {
        path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    }
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
    assert set(metadata.get_all("Provides-Extra") or ()) == {"test", "plot", "plan", "bench", "docs"}
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    needed = [line for line in metadata.get_all("Requires-Dist") or () if "extra ==" not in line]
    assert {re.match(r"[\w-]+", line)[0] for line in needed} == {"torch", "numpy", "tabulate", "tqdm"}  # type: ignore[index]


def test_the_installed_wheel_runs_where_the_repository_is_not(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    first = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[0]
    files = "import parallel, moe\nfor package in (offload, parallel, moe): print('from', package.__file__)"
    said = run(f"{first}\n{files}", tmp_path, target)
    assert "offload report: 8 steps since apply" in said
    found = re.findall(r"^from (.*)$", said, flags=re.MULTILINE)
    assert [Path(file).relative_to(target).parts[0] for file in found] == list(PACKAGES)


USERS_FOLDER = """
import sys
import offload
assert not {"parallel", "moe", "offload.pipelining"} & set(sys.modules), "import offload loads none of them"
import parallel, moe
assert parallel.whose == moe.whose == "the user's"
from offload.pipelining import OffloadPipelineStage, actions_of
assert not [name for name in sys.modules if name.startswith(("parallel.", "moe."))]
print(OffloadPipelineStage.__name__)
"""


def test_a_users_own_parallel_and_moe_leave_offload_and_its_pipeline_stage_whole(tmp_path: Path) -> None:
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "__init__.py").write_text('whose = "the user\'s"\n')
    (tmp_path / "moe.py").write_text('whose = "the user\'s"\n')
    # `-c` puts the folder that it runs in first, as a script's own folder is
    assert run(USERS_FOLDER, tmp_path, ROOT) == "OffloadPipelineStage\n"


def test_both_packages_name_the_same_stage() -> None:
    import offload.pipelining
    import parallel
    import parallel.order
    import parallel.stage

    assert parallel.OffloadPipelineStage is parallel.stage.OffloadPipelineStage
    assert parallel.OffloadPipelineStage is offload.pipelining.OffloadPipelineStage
    assert parallel.actions_of is parallel.order.actions_of is offload.pipelining.actions_of

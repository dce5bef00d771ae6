"""An environment as a user has it after `pip install` of the wheel: what a run needs, and no extra.

torch and the other requirements are the installed ones, linked and not copied. One invariant: what is no
requirement of the wheel, nor one of a requirement, cannot be imported there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from email import message_from_string
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from tests.once import made_once

ROOT = Path(__file__).resolve().parents[2]
_BUILT = ("offload", "parallel", "moe")
_FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
_WRITTEN = ("code", "output", "errors")
_EACH = """
import os, runpy, sys, torch
for script in sys.argv[1:]:
    folder = os.path.dirname(script)
    if (child := os.fork()) == 0:
        os.chdir(folder)
        for number, name in ((1, "output"), (2, "errors")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        sys.argv, sys.path[0] = [script], folder
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    with open(os.path.join(folder, "code"), "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


def wheel_of(factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built once for all workers."""
    return made_once(factory, "wheel", _build_wheel)


def environment_of(
    factory: pytest.TempPathFactory, wheel: Path, name: str = "user", more: tuple[str, ...] = ()
) -> Path:
    """The interpreter of an environment with the wheel, and with `more` distributions."""
    return made_once(factory, name, lambda folder: _build_environment(folder, wheel, more))


def run_in(python: Path, folder: Path, *arguments: str, code: int = 0) -> str:
    """What the interpreter prints in `folder`, where nothing of the checkout is found, or its errors where it
    is to fail. code: the exit status that it has."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(python), *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stderr if code else done.stdout


def run_each(python: Path, folder: Path, programs: Mapping[str, str]) -> dict[str, tuple[int, str, str]]:
    """Exit code, output and errors of each program, run as a script in a folder of its own, of that name,
    below `folder`. Each is a fork of one interpreter that has imported torch and nothing else."""
    for name, program in programs.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "program.py").write_text(program)
    run_in(python, folder, "-c", _EACH, *(str(folder / name / "program.py") for name in programs))
    texts = {name: [(folder / name / file).read_text() for file in _WRITTEN] for name in programs}
    return {name: (int(code), output, errors) for name, (code, output, errors) in texts.items()}


def _build_wheel(folder: Path) -> Path:
    """Build from a copy, because setuptools writes beside what it builds; by the hook that pip calls too."""
    tree = folder / "tree"
    for package in _BUILT:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _FILES:
        shutil.copy(ROOT / name, tree)
    code = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    return folder / run_in(Path(sys.executable), tree, "-c", code).splitlines()[-1]


def _build_environment(folder: Path, wheel: Path, more: tuple[str, ...]) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    target = Path(run_in(python, folder, "-c", "import site; print(site.getsitepackages()[0])").strip())
    for name in _with_requirements([*_requirements(wheel), *more]):
        _link(metadata.distribution(name), target)
    # --no-index and no configuration: what is missing is an error. From a folder that find-links named pip
    # once took another torch, and wrote it through the links over the installed one
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    # without PYTHONPATH, by which pip finds the metadata of an editable install and leaves the wheel out
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    environment = kept | {"PIP_CONFIG_FILE": os.devnull}
    subprocess.run(
        [*pip, "install", "--quiet", "--no-compile", "--no-index", str(wheel)], env=environment, check=True
    )
    return python


def _requirements(wheel: Path) -> list[str]:
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_string(archive.read(name).decode()).get_all("Requires-Dist") or []


def _with_requirements(texts: Iterable[str]) -> set[str]:
    """Names of these distributions and of all that they require, with the extras that one asks another
    for."""
    found: set[tuple[str, frozenset[str]]] = set()
    ahead = [(text, frozenset({""})) for text in texts]
    while ahead:
        text, asked = ahead.pop()
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in asked):
            continue
        extras = frozenset({"", *requirement.extras})
        if (requirement.name, extras) not in found:
            found.add((requirement.name, extras))
            ahead += [(each, extras) for each in metadata.requires(requirement.name) or ()]
    return {name for name, _ in found}


def _link(distribution: metadata.Distribution, target: Path) -> None:
    """Links to what the distribution has at the top of its site-packages: packages, modules, metadata."""
    for name in {file.parts[0] for file in distribution.files or ()} - {".."}:
        if not (target / name).exists():
            (target / name).symlink_to(Path(str(distribution.locate_file(name))).resolve())

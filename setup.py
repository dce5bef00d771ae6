"""Packaging of `offload`, with the folders parallel/ and moe/ as two packages in it. One invariant: what a
run needs is in `install_requires`, and nothing else is. The version is the one that offload/__init__.py
states.

There is no public address yet. A release gives one to the build, OFFLOAD_ADDRESS=https://host/owner/name, for
the project's URLs and the links of README. Without it, those that name files of the repository are text.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "offload/__init__.py").read_text(), re.MULTILINE)
assert VERSION is not None, "offload/__init__.py states no __version__"
ADDRESS = os.environ.get("OFFLOAD_ADDRESS", "").rstrip("/")
BESIDE = find_packages(include=["parallel", "parallel.*", "moe", "moe.*"])


def absolute(link: re.Match[str]) -> str:
    """A link or a picture of README, by which the metadata's readers find what it names."""
    picture, text, target = link.groups()
    if not ADDRESS:
        return "" if picture else text
    return f"{picture}[{text}]({ADDRESS}/{'raw' if picture else 'blob'}/v{VERSION[1]}/{target})"


RELATIVE = r"(!?)\[([^]]+)\]\((?!https?:|#)([^)\s]+)\)"
README = re.sub(RELATIVE, absolute, (ROOT / "README.md").read_text(encoding="utf-8"))
MAIN = "blob/main"
PAGES = {"Documentation": f"{MAIN}/docs/index.md", "Changelog": f"{MAIN}/CHANGELOG.md", "Issues": "issues"}

setup(
    name="pipeline-offload",
    version=VERSION[1],
    description=(
        "Moves activations, weights, gradients and optimizer state between GPU and "
        "pinned host memory while a model trains"
    ),
    long_description=README,
    long_description_content_type="text/markdown",
    author="The pipeline-offload authors",
    url=ADDRESS or None,
    project_urls={name: f"{ADDRESS}/{page}" for name, page in PAGES.items()} if ADDRESS else {},
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords="pytorch training activation offload checkpointing pipeline-parallel optimizer memory",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",  # the tests run on 3.11 and 3.12
    # nothing but `offload` at top level: users have packages called `parallel` and `moe` of their own
    packages=[*find_packages(include=["offload", "offload.*"]), *(f"offload.{name}" for name in BESIDE)],
    package_dir={f"offload.{name}": name for name in ("parallel", "moe")},
    package_data={"offload": ["py.typed", "telemetry/page.html"]},
    entry_points={"console_scripts": ["offload = offload.commands:main"]},
    zip_safe=False,  # a type checker reads py.typed from a folder
    install_requires=[
        "torch>=2.11",  # without an upper bound, which a release would outrun: offload/versions.py warns
        "jinja2",  # as torch; a report's page
        "numpy",
        "safetensors",  # only what reads weights of files imports it
        "tabulate",
        "tqdm",
    ],
    extras_require={
        "test": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "filelock",
            "ruff",
            "mypy",
            "types-tabulate",
            "types-tqdm",
            # a wheel is built by the tests
            "setuptools>=77",
            # the examples, which the tests run, train models of theirs
            "transformers",
            "peft",
            "accelerate",
            "lightning",
            # optimizers that the hybrid one has to step as they do
            "schedulefree",
            "prodigyopt",
        ],
        "doctor": ["nvidia-ml-py"],  # PCIe generation and width where /sys does not have them
        "plot": ["matplotlib"],
        "plan": ["scipy"],  # the bounds of scripts/bench; the package imports none of it
        "bench": ["scipy"],  # the extra's former name
        "docs": ["mkdocs<2", "mkdocstrings[python]", "ruff"],  # ruff writes signatures, an argument a line
    },
)

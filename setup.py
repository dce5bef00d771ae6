"""Packaging of the three packages. One invariant: what a run needs is in `install_requires`, and nothing else
is."""

from setuptools import find_packages, setup

setup(
    name="pipeline-offload",
    version="0.1.0",
    description=(
        "Moves activations, weights, gradients and optimizer state between GPU and "
        "pinned host memory while a model trains"
    ),
    python_requires=">=3.11",
    packages=find_packages(include=["offload", "offload.*", "parallel", "parallel.*", "moe", "moe.*"]),
    install_requires=[
        "torch>=2.11,<2.14",
        "numpy",
        "tabulate",
        "tqdm",
        "safetensors",
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
        ],
        "plot": ["matplotlib"],
        "bench": ["scipy"],
    },
)

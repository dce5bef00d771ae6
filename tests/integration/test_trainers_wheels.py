"""TRL, axolotl, torchtitan, torch_remat, TensorBoard and wandb, unchanged, in a folder of their own: beside
what scripts/env.sh installs they would make each import of transformers' Trainer a second longer.

As far as a CPU can: torchtitan_on_cpu.py answers what torchtitan asks of a GPU. axolotl's command has a
folder with the versions that it asks for, and what it imports of the rest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wheels import ROOT, install, passed

TRAINERS = (
    *("trl==1.16.0", "axolotl==0.19.0", "torchtitan==0.3.0", "datasets==5.2.0"),
    *("tensorboard==2.21.0", "wandb==0.31.0"),
)
THEIRS = (
    *("pandas", "pyarrow", "dill<0.4.2", "multiprocess<0.70.20", "xxhash"),  # of datasets
    *("absl-py", "grpcio", "protobuf<8", "Werkzeug"),  # of tensorboard
    *("torchdata", "torch_checkpointing", "spmd_types==0.2.3", "einops", "tyro"),  # of torchtitan
    *("typeguard", "docstring_parser"),  # of tyro
    "addict",  # of axolotl
    *("requests", "urllib3", "certifi", "charset_normalizer"),  # of wandb
    *("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-semantic-conventions"),
)
PHASES = (
    *("trl==1.16.0", "verl==0.9.1", "datasets==5.2.0", "tensordict", "ray", "hydra-core", "codetiming"),
    *(
        "pandas<3",
        "pytz",
        "python-dateutil",
        "six",
        "pyarrow",
        "dill<0.4.2",
        "multiprocess<0.70.20",
        "xxhash",
    ),
    *("omegaconf", "antlr4-python3-runtime==4.9.3", "pylatexenc", "torchdata", "cloudpickle", "msgpack"),
    *("jsonschema", "jsonschema-specifications", "referencing", "rpds-py", "attrs", "orjson", "pyvers"),
    *("protobuf<7", "requests", "urllib3", "certifi", "charset_normalizer", "idna"),
)
AXOLOTL = (
    *("axolotl==0.19.0", "axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6"),
    *("transformers==5.16.1", "trl==1.9.0", "accelerate==1.13.0", "peft==0.20.0", "tokenizers==0.23.1"),
    *("huggingface_hub==1.17.0", "httpx<1", "httpcore", "datasets==4.8.4", "fsspec==2025.10.0", "pytz"),
    *("pandas<3", "pyarrow", "dill==0.4.1", "multiprocess==0.70.19", "xxhash", "evaluate==0.4.1"),
    *("bitsandbytes==0.50.2", "triton", "numba==0.68.1", "llvmlite==0.50.0", "nvidia-ml-py==12.560.30"),
    *("pydantic==2.12.5", "pydantic_core==2.41.5", "addict", "colorama", "fire", "termcolor", "fastcore"),
    *("posthog==6.7.11", "backoff", "six", "distro", "wandb==0.31.0", "protobuf<8"),
    *("requests", "urllib3", "certifi", "charset_normalizer"),
    *("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-semantic-conventions"),
)


@pytest.mark.slow
def test_the_trainers_that_are_not_installed_train_with_the_same_bits(tmp_path: Path) -> None:
    target = install(tmp_path, *TRAINERS, *THEIRS)
    page = "tests/integration/test_integrations.py"
    assert passed(target, page, "-k", "trls or axolotls or torchtitans or tensorboard or wandb") == 5


@pytest.mark.slow
def test_the_trainers_that_generate_park_with_the_same_bits(tmp_path: Path) -> None:
    target = install(tmp_path, *PHASES)
    for name in ("scripts", "tests"):  # verl's wheel has folders of these names, which would hide ours
        shutil.rmtree(target / name, ignore_errors=True)
    assert passed(target, "tests/integration/test_phases.py") == 5


@pytest.mark.slow
def test_axolotls_command_trains_with_the_same_bits(tmp_path: Path) -> None:
    target = install(tmp_path, *AXOLOTL)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("axolotl_on_cpu.py"))],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(target)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "equal: hidden_states, optimizer"


@pytest.mark.slow
def test_what_torch_remat_saves_leaves(tmp_path: Path) -> None:
    target = install(tmp_path, "torch_remat==0.2.2")
    assert passed(target, "tests/integration/test_examples.py", "-k", "torch_remat") == 1

"""TRL, axolotl, torchtitan, TensorBoard and wandb, unchanged, in a folder of their own: beside what
scripts/env.sh installs they would make each import of transformers' Trainer a second longer.

As far as a CPU can: torchtitan_on_cpu.py answers what torchtitan asks of a GPU, and of axolotl, whose other
requirements are those of a GPU, its plugins and its dict are run, and not its command.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wheels import install, passed

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


@pytest.mark.slow
def test_the_trainers_that_are_not_installed_train_with_the_same_bits(tmp_path: Path) -> None:
    target = install(tmp_path, *TRAINERS, *THEIRS)
    page = "tests/integration/test_integrations.py"
    assert passed(target, page, "-k", "trls or axolotls or torchtitans or tensorboard or wandb") == 5

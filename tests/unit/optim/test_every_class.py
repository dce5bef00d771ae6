"""Every optimizer class of five packages beside itself: see tests/optim_packages.py. `-m slow` installs their
wheels; torch.compile is off, since torchao's steps ask for a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.optim_packages import PACKAGES
from tests.wheels import ROOT, install

WHEELS = {
    "pytorch_optimizer": ("pytorch_optimizer", "einops"),
    "timm.optim": ("timm", "torchvision", "pillow", "huggingface_hub", "pyyaml"),
    "schedulefree": ("schedulefree",),
    "prodigyopt": ("prodigyopt",),
    "torchao.optim": ("torchao",),
}
TRUE_REASONS = {
    "has a graph (create_graph=True)": {"AdaHessian", "Adahessian", "SophiaH"},
    "has no param_groups, or steps tensors that it was not given": {"SafeFP16Optimizer"},
    "to a class that takes a module, offload_fraction=0": {"AdamMini"},
}
"""What a class may be refused for above a fraction of 0, and which are."""
NOT_ALONE = {
    "AdaLOMO": "has no step()",
    "LOMO": "has no step()",
    "BSAM": "raises in its own step",
    "CPUOffloadOptimizer": "needs a GPU",
    "GSAM": "is given an optimizer and a module first",
    "WSAM": "is given a module first",
}
"""Classes that the loop cannot call, with us or without."""


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_every_class_has_its_own_bits_or_is_refused_by_name(package: str, tmp_path: Path) -> None:
    target = install(tmp_path, *WHEELS[package])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.optim_packages", package],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(target))),
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line[0] == "{"]
    assert found
    assert [each["name"] for each in found if each["differs"]] == []
    assert {
        each["name"]: each["alone"] for each in found if each["alone"] and each["name"] not in NOT_ALONE
    } == {}
    for each in found:
        reasons = [reason for reason, names in TRUE_REASONS.items() if each["name"] in names]
        assert set(each["refused"]) == ({"0.5", "1.0"} if reasons else set()), each
        assert all(reasons[0] in said for said in each["refused"].values()), each

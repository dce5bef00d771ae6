"""Training in mode "auto" once needed scipy, which only an extra installs.

After `pip install .`, `apply` succeeded and the second `optimizer.step()` raised an ImportError, whose remedy
named a package that no index has. So training, explain() and the dry run are run here with an import of scipy
that fails.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import offload
from parallel import plan


@pytest.fixture(autouse=True)
def _no_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy", None)


def trained(mode: str | None, total: str | None = None) -> tuple[list[Tensor], str]:
    """Weights after six steps, and what explain() says."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = None if mode is None else offload.apply(model, mode=mode, device_total=total, min_numel=1)
    for _ in range(6):
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    said = "" if handle is None else str(handle.explain())
    if handle is not None:
        handle.remove()
    return [weight.detach().clone() for weight in model.parameters()], said


@pytest.mark.parametrize("total", ["40000B", None])
def test_mode_auto_trains_plans_and_explains(total: str | None) -> None:
    plain, _ = trained(None)
    ours, said = trained("auto", total)
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    assert "A step of plain blocks computes" in said, "a plan was made"


def test_the_dry_run_plans_a_job_that_does_not_fit_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {
        "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 256,
    }  # fmt: skip
    config = tmp_path / "config.json"
    config.write_text(json.dumps(shape))
    job = ["--model", str(config), "--pp", "2", "--microbatches", "4", "--sequence", "1024"]
    assert plan.main([*job, "--json"]) == 0
    least = {mode["mode"]: mode["device_bytes"] for mode in json.loads(capsys.readouterr().out)["modes"]}
    total_gb = (least["checkpoint"] + least["off"]) / 2e9
    assert plan.main([*job, "--offload", "auto", "--device-total-gb", f"{total_gb}"]) == 0
    assert "fits" in capsys.readouterr().out

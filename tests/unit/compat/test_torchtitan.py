"""torchtitan's keys: a dict or a TOML table in, one call of `offload.apply` out, or the marks of this
project's own layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import moe
import offload
from offload import PipelineOffloadManager
from offload.compat import torchtitan
from offload.device.sim import SimDevice
from offload.modules.blocks import find_experts
from tests.inside import streams_from
from tests.unit.groups.stack import build_manager, installed
from tests.unit.moe.mixtures import SMALL, loss_of, text

ON = {"enable_activation_offload": True, "activation_offload_min_tensor_size": 1}
BOTH = {**ON, "activation_offload_modules": "expert_fc1,moe_act"}
ROWS, WIDTH, INNER = 24, 8, 12


class Experts(nn.Module):
    """Of somebody else: stacked weights, and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, WIDTH, INNER) / 3)
        self.w2 = nn.Parameter(torch.randn(4, INNER, WIDTH) / 3)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        order = index.argsort()
        y = torch.zeros_like(x)
        for expert, rows in enumerate(order.split(torch.bincount(index, minlength=4).tolist())):
            y = y.index_add(0, rows, functional.silu(x[rows] @ self.w1[expert]) @ self.w2[expert])
        return y


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        top = scores.max(-1)
        return self.experts(x, top.indices) * top.values[:, None]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x).tanh()
        return x + self.moe(self.norm(x))


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(4)))


def gradients(model: nn.Module, step: Callable[[], object] = lambda: None) -> list[Tensor]:
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(ROWS, WIDTH)).square().sum().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        step()
    return found


def calls_in_a_backward(model: nn.Module, *names: str) -> set[str]:
    """To which the modules of these names are added that are called in a backward."""
    seen: set[str] = set()

    def note(name: str) -> None:
        if torch._C._current_graph_task_id() != -1:
            seen.add(name)

    for path, module in model.named_modules():
        if (name := path.rpartition(".")[2]) in names:
            module.register_forward_pre_hook(lambda *_, name=name: note(name))
    return seen


@pytest.mark.req("S3-49", "S3-50", "S3-51")
@pytest.mark.parametrize("nested", [False, True])
def test_a_table_is_one_call_of_apply(nested: bool, manager: PipelineOffloadManager, tmp_path: Path) -> None:
    expected = gradients(layers())
    lines = ["[training]", "batch_size = 4", "enable_activation_offload = true"]
    lines += ['activation_offload_modules = "expert_fc1,moe_act"', "activation_offload_min_tensor_size = 150"]
    (path := tmp_path / "train.toml").write_text("\n".join(lines))
    keys = {**BOTH, "activation_offload_min_tensor_size": 150, "batch_size": 4}
    settings = torchtitan.settings(path if nested else keys)
    assert settings == torchtitan.settings({"training": keys, "model": {}})
    handle = settings.apply(model := layers())
    assert all(map(torch.equal, gradients(model, manager.step_end), expected))
    assert dict(handle.groups) == {"experts": tuple(f"{at}.moe" for at in range(4))}
    assert manager.stats.spill_bytes > 0
    assert torchtitan.settings({}).activation_offload_min_tensor_size == 1 << 20


@pytest.mark.req("S3-49")
def test_enable_alone_is_about_the_experts(manager: PipelineOffloadManager) -> None:
    """It raised: neither modules nor a mode said of what."""
    alone, named = torchtitan.settings(ON), torchtitan.settings(BOTH)
    assert alone.placement() == named.placement()
    assert alone.flags() == named.flags() == {"offload_expert_fc1": True, "offload_moe_act": True}
    expected = gradients(layers())
    handle = alone.apply(model := layers())
    assert all(map(torch.equal, gradients(model, manager.step_end), expected))
    assert dict(handle.groups) == {"experts": tuple(f"{at}.moe" for at in range(4))}
    assert manager.stats.spill_bytes > 0


@pytest.mark.req("S3-49")
def test_without_enable_nothing_is_offloaded(manager: PipelineOffloadManager) -> None:
    settings = torchtitan.settings({**BOTH, "enable_activation_offload": False})
    handle = settings.apply(model := layers())
    gradients(model, manager.step_end)
    assert (handle.mode, manager.stats.spill_bytes) == (False, 0)
    assert settings.flags() == {"offload_expert_fc1": False, "offload_moe_act": False}
    assert settings.placement() == {"offload_modules": frozenset(), "experts_mode": None}


@pytest.mark.req("S3-53")
@pytest.mark.parametrize("mode", [None, "save_on_cpu", "checkpoint", "both"])
def test_weights_leave_with_or_without_activations(mode: str | None, manager: PipelineOffloadManager) -> None:
    expected = gradients(layers())
    keys = {"enable_weight_offload": True}
    keys |= {} if mode is None else {**ON, "activation_offload_mode": mode}
    assert not torchtitan.settings({}).enable_weight_offload
    with streams_from(WIDTH * INNER):
        handle = torchtitan.settings(keys).apply(model := layers())
    assert all(map(torch.equal, gradients(model, manager.step_end), expected))
    assert handle.weights is not None
    experts_bytes = 4 * 2 * 4 * 4 * WIDTH * INNER  # of each layer
    # activation_offload_min_tensor_size is of both: of one element, what is small streams, too
    assert (handle.weights.streamed_bytes > experts_bytes) == (mode in ("save_on_cpu", "both"))
    assert handle.weights.streamed_bytes >= experts_bytes
    assert handle.weights.in_bytes > 0
    assert (manager.stats.spill_bytes > 0) == (mode in ("save_on_cpu", "both"))
    handle.remove()
    with pytest.raises(ValueError, match="a placement is about activations"):
        torchtitan.settings(keys).placement()


@pytest.mark.req("S3-52", "S3-56", "S3-57", "S3-58")
def test_modes_of_the_experts_of_any_model(manager: PipelineOffloadManager) -> None:
    """What the last step moved, and what was called in a backward, say what a mode does."""
    expected = gradients(layers())
    moved, recomputed = {}, {}
    for mode in ("save_on_cpu", "checkpoint", "both"):
        model = layers()
        products = calls_in_a_backward(model, "attention", "gate", "experts")
        handle = torchtitan.settings({**ON, "activation_offload_mode": mode}).apply(model)
        assert all(map(torch.equal, gradients(model, manager.step_end), expected)), mode
        inside = ".experts" if mode == "checkpoint" else ""
        assert dict(handle.groups) == {"experts": tuple(f"{at}.moe{inside}" for at in range(4))}
        moved[mode], recomputed[mode] = manager.stats.spill_bytes, products
        handle.remove()
    assert recomputed == {"save_on_cpu": set(), "checkpoint": {"experts"}, "both": {"experts", "gate"}}
    assert moved["checkpoint"] == 0
    assert 4 * ROWS * WIDTH * 4 <= moved["both"] < moved["save_on_cpu"]


@pytest.mark.req("S3-59")
def test_the_input_of_experts_of_any_model_leaves_while_the_attention_after_them_computes() -> None:
    """It is under way when the next attention begins and has left before it ends, and nobody waits."""
    attention_s, nbytes = 1e-3, ROWS * WIDTH * 4
    device = SimDevice(executor="clock", d2h_gb_s=nbytes / (0.5 * attention_s) / 1e9)
    seen: list[tuple[int, bool, bool]] = []

    def attends(*_: Any) -> None:
        begun = device.d2h.time_s > device.compute.time_s
        device.compute_for(attention_s)
        seen.append((device.d2h.copied_bytes, begun, device.d2h.time_s <= device.compute.time_s))

    expected = gradients(layers())
    with installed(build_manager(device=device)) as manager:
        keys = {**ON, "activation_offload_mode": "both", "activation_offload_min_tensor_size": ROWS * WIDTH}
        torchtitan.settings(keys).apply(model := layers())
        for layer in model.children():
            layer.attention.register_forward_pre_hook(attends)
        assert all(map(torch.equal, gradients(model, manager.step_end), expected))
        stats = manager.stats
    forward = seen[-4:]
    assert [sent - forward[0][0] for sent, _, _ in forward] == [0, nbytes, 2 * nbytes, 3 * nbytes]
    assert [(begun, ended) for _, begun, ended in forward[1:]] == [(True, True)] * 3
    assert stats.saved_bytes == 4 * nbytes


@pytest.mark.req("S3-55")
@pytest.mark.parametrize(
    "keys", [BOTH, {**ON, "activation_offload_modules": "moe_act"}, {**ON, "activation_offload_mode": "both"}]
)
def test_marks_of_this_projects_own_layers(keys: dict[str, Any], manager: PipelineOffloadManager) -> None:
    settings = torchtitan.settings(keys)
    plain, model = moe.MixtureGPT(SMALL), moe.MixtureGPT(SMALL, **settings.placement())
    for step in range(2):
        for built in (plain, model):
            built.zero_grad()
            offload.init_chunk_handler()
            loss_of(built(text(step)), text(step)).backward()
        offload.reset()
        assert all(
            torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True)
        )
    assert manager.stats.spill_bytes > 0
    names = {"expert_fc1", "moe_act"} & settings.names
    assert {name for name, on in settings.flags().items() if on} == {f"offload_{name}" for name in names}


@pytest.mark.req("S3-49", "S3-50", "S3-51", "S3-52", "S2-96")
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"activation_offload_modules": "expert_fc1,moe"}, "has 'moe'; the names are attn_norm, .*, moe_act"),
        ({"activation_offload_modules": "attn_proj"}, "without core_attn: name both"),
        ({"activation_offload_mode": "cpu"}, "is 'cpu', must be one of save_on_cpu, checkpoint, both"),
        (
            {"activation_offload_mode": "both", "activation_offload_modules": "moe_act"},
            "moe_act in activ.* a part",
        ),
        ({"enable_weight_offload": 1}, "enable_weight_offload is 1, must be bool"),
        ({"enable_activation_offload": "yes"}, "enable_activation_offload is 'yes', must be bool"),
        ({"activation_offload_min_tensor_size": True}, "is True, must be int"),
        ({"activation_offload_min_tensor_size": -1}, "is -1, must be a whole number of elements"),
        ({"activation_offload_modes": "both"}, "the nearest is activation_offload_mode"),
        ({"enable_activation_offlod": True}, "the nearest is enable_activation_offload"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        torchtitan.settings({**ON, **keys})


def test_models_without_what_is_asked_for_are_refused() -> None:
    with pytest.raises(ValueError, match="name expert_fc1 and moe_act both, and no other"):
        torchtitan.settings({**ON, "activation_offload_modules": "moe_act"}).apply(layers())
    with pytest.raises(ValueError, match="Sequential has no experts that can be found"):
        torchtitan.settings(BOTH).apply(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_experts_are_found_by_their_weights_or_as_a_list() -> None:
    gpt = moe.MixtureGPT(SMALL)
    held = [f"blocks.{at}.mixture.{name}" for at in range(3) for name in ("experts", "shared")]
    assert find_experts(gpt) == (held, [f"blocks.{at}.mixture" for at in range(3)])
    listed = nn.ModuleDict({"gate": nn.Linear(2, 2), "experts": nn.ModuleList([nn.Linear(2, 2)] * 1)})
    listed["experts"].append(nn.Linear(2, 2))
    assert find_experts(nn.Sequential(listed)) == (["0.experts.0", "0.experts.1"], ["0"])
    inside_blocks = nn.Sequential(Experts(), Experts())  # the experts are the blocks themselves
    assert find_experts(inside_blocks) == (["0", "1"], ["0", "1"])
    with pytest.raises(ValueError, match="has no experts that can be found"):
        find_experts(nn.Sequential(nn.Conv1d(2, 2, 3), nn.Bilinear(2, 2, 2)))


def test_modules_may_be_given_by_the_name_of_their_group(manager: PipelineOffloadManager) -> None:
    model = layers()
    handle = offload.apply(model, modules={"expert_fc1": ["*.experts"], "norms": "*.norm"}, min_numel=1)
    assert dict(handle.groups) == {
        "expert_fc1": tuple(f"{at}.moe.experts" for at in range(4)),
        "norms": tuple(f"{at}.norm" for at in range(4)),
    }
    expected = gradients(layers())
    assert all(map(torch.equal, gradients(model, manager.step_end), expected))
    for wrong in ({}, {"": "*.norm"}, {1: "*.norm"}):
        with pytest.raises(ValueError, match="must name each group"):
            offload.apply(layers(), modules=wrong)  # type: ignore[arg-type]

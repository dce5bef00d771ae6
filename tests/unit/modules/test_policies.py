"""Policies are the arguments of `apply` that they stand for, and each has its own alone."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import Activations, Auto, Fixed, Gradients, Watermark, Weights
from offload.policies import Policy, arguments_of, without_policy
from tests.unit.modules.training import ROWS, WIDTH, build

MADE: list[tuple[Policy, dict[str, Any]]] = [
    (Auto(device_total="22GB"), {"mode": "auto", "device_total": "22GB"}),
    (
        Auto(quantize="auto", blocks="layers.*", weights=None, gradients=Gradients("device")),
        {"mode": "auto", "quantize": "auto", "blocks": "layers.*", "gradients": "device"},
    ),
    (Fixed(), {"mode": False}),
    (
        Fixed(
            activations=Activations("hidden_states", limit="20GB"),
            weights=Weights("6GB"),
            gradients=Gradients(),
        ),
        {"mode": "hidden_states", "device_limit": "20GB", "weights": "6GB", "gradients": "host"},
    ),
    (
        Fixed(weights=Weights(quantize="int8", device="cpu")),
        {"mode": False, "weights": "host", "quantize": "int8", "device": "cpu"},
    ),
    (Watermark(high="70GB", min_numel=1), {"mode": "watermark", "high": "70GB", "min_numel": 1}),
]


@pytest.mark.parametrize(("policy", "arguments"), MADE, ids=lambda each: type(each).__name__)
def test_a_policy_stands_for_arguments_that_apply_has(policy: Policy, arguments: dict[str, Any]) -> None:
    assert arguments_of(policy) == arguments
    assert {*arguments} <= {*inspect.signature(offload.apply).parameters}


def test_every_field_has_its_argument() -> None:
    known = {*inspect.signature(offload.apply).parameters}
    full = [
        Fixed(
            activations=Activations(True, limit=1, blocks="b", modules="m", no_recompute="n"),
            weights=Weights(2, quantize="int8", device="cpu"),
            gradients=Gradients(),
            min_numel=1,
        ),
        Auto(device_total=1, blocks="b", min_numel=1, no_recompute="n", recompute_differs="warn"),
        Watermark(high=2, low=1, min_numel=1),
    ]
    assert all({*arguments_of(each)} <= known for each in full)
    parts = {"activations", "weights", "gradients"}
    for each in full:
        own = {field.name for field in fields(each)} - parts
        assert {name for name in own if getattr(each, name) is not None} <= {*arguments_of(each)}


def test_who_looks_at_arguments_before_apply_sees_those_of_a_policy() -> None:
    """Lightning refuses a watermark without a module, of which it would see no forward."""
    found = without_policy({"policy": Watermark(high="1GB"), "optimizer": True})
    assert found == {"mode": "watermark", "high": "1GB", "optimizer": True}
    assert without_policy({"mode": "auto"}) == {"mode": "auto"}


def trained(**given: Any) -> list[torch.Tensor]:
    model = build(blocks=3)
    handle = offload.apply(model, min_numel=1, **given) if given and "policy" not in given else None
    handle = offload.apply(model, **given) if "policy" in given else handle
    torch.manual_seed(1)
    for _ in range(3):
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
    found = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    if handle is not None:
        assert handle.report() is not None
        handle.remove()
    return found


@pytest.mark.parametrize(
    "policy",
    [
        Auto(device_total="1MB", min_numel=1),
        Fixed(activations=Activations("hidden_states"), gradients=Gradients(), min_numel=1),
        Fixed(activations=Activations(limit="2048B"), min_numel=1),
        Fixed(weights=Weights(), min_numel=1),
        Watermark(high="1GB", low="0.5GB", min_numel=1),
    ],
    ids=repr,
)
def test_gradients_are_those_without(policy: Policy) -> None:
    assert all(map(torch.equal, trained(policy=policy), trained()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": "auto"}, "must be an offload.Auto, offload.Fixed or offload.Watermark"),
        ({"policy": Auto(), "mode": "auto"}, "beside arguments that it stands for"),
        ({"policy": Auto(), "weights": "host"}, "beside arguments that it stands for"),
        ({"policy": Auto(), "recompute_differs": "warn"}, "beside arguments that it stands for"),
        ({"policy": Fixed(activations=Activations("recompute"))}, "must be one of 'off'"),  # type: ignore[arg-type]
        ({"policy": Auto(quantize="auto", weights=Weights(quantize="int8"))}, "gives quantize twice"),
        ({"policy": Fixed(activations=Activations("groups", no_recompute="x"))}, "recomputes nothing"),
    ],
)
def test_what_a_policy_cannot_say_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offload.apply(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), **given)


def test_fields_of_another_policy_and_changes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"give policy=offload\.Auto\(\)"):
        Activations("auto")
    with pytest.raises(TypeError, match="device_total"):
        Watermark(device_total="1GB")  # type: ignore[call-arg]
    with pytest.raises(FrozenInstanceError):
        Auto().device_total = 1  # type: ignore[misc]

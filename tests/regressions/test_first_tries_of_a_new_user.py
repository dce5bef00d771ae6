"""What a new user tried first, and was refused, told about something else, or could not undo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import offload
from offload import PipelineOffloadManager
from tests.unit.groups.stack import build_manager, installed
from tests.unit.modules.training import build, train


@pytest.fixture(autouse=True)
def manager() -> Iterator[PipelineOffloadManager]:
    with installed(build_manager()) as found:
        assert found is not None
        yield found


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_handle_that_nobody_has_is_removed_by_its_model() -> None:
    """`offload.apply(model)` without a name for the handle could not be undone."""
    model, other = build(), build()
    offload.apply(model, min_numel=1)
    offload.apply(model, "watermark", high="8GB")
    offload.apply(other, min_numel=1)
    assert hooks_of(model)
    assert hooks_of(other)
    offload.remove(nn.Sequential(model))  # or what holds it
    assert not hooks_of(model)
    assert hooks_of(other)
    offload.remove(model)  # nothing is left to do
    offload.apply(model, "hidden_states", min_numel=1)
    train(model, steps=2)


def test_remove_of_a_part_names_the_model_that_has_the_hooks() -> None:
    model = build()
    handle = offload.apply(model, min_numel=1)
    part = model.get_submodule(handle.blocks[0])
    with pytest.raises(ValueError, match=r"remove\(\) of a \w+ that is a part of what <offload.apply\("):
        offload.remove(part)
    assert hooks_of(model)
    with pytest.raises(ValueError, match="remove got a Applied, must be"):
        offload.remove(handle)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "meant"), [("hiddenstates", "hidden_states"), ("Auto", "auto"), ("disc", "disk")]
)
def test_a_mode_with_a_slip_names_the_nearest(asked: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"; did you mean '{meant}'\\?"):
        offload.apply(build(), asked)  # type: ignore[arg-type]


def test_a_small_model_is_a_first_try_of_weights_and_gradients() -> None:
    """Parameters below 1 Mi elements stayed whatever `min_numel` was, so no small model could be tried."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))
    with pytest.raises(ValueError, match="lower min_numel"):
        offload.apply(model, weights="host")
    with pytest.raises(ValueError, match="lower min_numel"):
        offload.apply(model, gradients="host")
    with offload.apply(model, weights="host", min_numel=1000) as handle:
        assert handle.weights is not None
        assert handle.weights.streamed_bytes == 3 * 32 * 32 * 4  # no bias
        model(torch.randn(2, 32)).sum().backward()
    with offload.apply(model, gradients="host", min_numel=0) as handle:
        model(torch.randn(2, 32)).sum().backward()
        assert handle.gradients is not None
        assert handle.gradients.count == 6

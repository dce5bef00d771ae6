"""What `offload.apply` is given, its limits and directories, and what it reports and warns of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import PipelineOffloadManager
from offload.modules.settings import EXCLUDED, is_checkpointing
from tests.unit.groups.stack import build_manager, installed
from tests.unit.modules.training import Model, build, train, warnings_of


def test_limits_are_those_of_the_process_whose_device_stays(manager: PipelineOffloadManager) -> None:
    model = build()
    offload.apply(model, device_limit="1 MiB", host_limit="1GB", min_numel=1)
    changed = offload.marks.existing_manager()
    assert changed is not None
    assert changed.engine is manager.engine
    config = changed.engine.config
    assert (config.device_limit_bytes, config.host_limit_bytes) == (1 << 20, 10**9)
    offload.apply(build(), device_limit="8B")
    assert offload.marks.default_manager().engine.config.device_limit_bytes == 8


def test_a_host_limit_that_ranks_share_is_changed_by_configure_alone() -> None:
    store = torch.distributed.HashStore()
    offload.configure(offload.OffloadConfig(host_limit_bytes=1 << 30), device="sim", store=store)
    with pytest.raises(ValueError, match=r"share a limit of 1,073,741,824 bytes; give the new one to conf"):
        offload.apply(build(), host_limit="2GiB")
    offload.apply(build(), device_limit="2GiB")
    changed = offload.marks.default_manager().engine
    assert changed.config.device_limit_bytes == changed.arena.budget.limit_bytes * 2


def test_the_mode_of_the_config_is_taken_where_none_is_given() -> None:
    offload.configure(offload.OffloadConfig(activation_offloading="hidden_states"), device="sim")
    assert offload.apply(build()).mode == "hidden_states"
    offload.configure(offload.OffloadConfig(activation_offloading=False), device="sim")
    model = build()
    handle = offload.apply(model)
    assert repr(handle) == "<offload.apply(Model, mode=False): nothing>"
    assert not model._forward_hooks
    with pytest.raises(
        ValueError, match=r"activation_offloading is 'offload_disk', must be one of 'off', False,"
    ):
        offload.OffloadConfig(activation_offloading="offload_disk")


@pytest.mark.req("S4-22")
def test_the_disk_mode_uses_the_directory_for_temporary_files_where_none_is_given() -> None:
    model = build()
    offload.apply(model, "disk", min_numel=1)
    for _ in range(20):  # what a busy host has not written yet is read from host memory, and never written
        train(model)
        stats = offload.marks.default_manager().stats
        assert stats.disk_write_bytes <= stats.spill_bytes
        if stats.disk_write_bytes:
            break
    assert stats.disk_write_bytes > 0


def test_the_report_of_a_handle_counts_from_apply_on(manager: PipelineOffloadManager) -> None:
    model = build()
    with offload.activations(model, min_numel=1):
        train(model, steps=2)
    handle = offload.apply(model, min_numel=1)
    assert handle.report().as_dict()["moved_bytes"] == 0
    train(model, steps=1, microbatches=1)
    figures = handle.report().as_dict()
    assert figures["moved_bytes"] == manager.stats.spill_bytes > 0
    assert figures["saved_bytes"] == figures["moved_bytes"] + figures["kept_bytes"]


def test_the_report_of_a_model_for_which_nothing_was_asked_says_so() -> None:
    handle = offload.apply(build(), False)
    nothing = "offload: mode=False, as it was asked: no saved tensor of Model leaves"
    assert str(handle.report()).startswith(nothing)
    other = build()
    with offload.activations(other, min_numel=1):
        train(other, steps=1)
        assert offload.report().as_dict()["moved_bytes"] > 0
    # once it had what others moved: "Did it work? Yes"
    assert str(handle.report()).startswith(nothing)
    assert handle.report().as_dict()["moved_bytes"] == 0
    assert handle.report().verdict == f"{nothing}; where a step does not fit, give another mode="


def test_where_steps_are_inferred_nobody_asked_for_the_table_of_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with installed(build_manager(print_summary=True)):
        model = build()
        offload.apply(model, min_numel=1)
        train(model)
        assert capsys.readouterr().out == ""


def test_blocks_that_are_called_by_their_forward_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(lambda block, x: block.forward(x))
    offload.apply(model, min_numel=1)
    train(model)
    assert warnings_of(caplog) == [
        "blocks of Model did not run through their hooks in this step, 3 of 3, and nothing of them left: "
        "layers.0, layers.1, layers.2. Call a block as a module, block(x), not block.forward(x)"
    ]


def test_a_model_whose_forward_is_never_called_as_a_module_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Direct(nn.Module):
        def __init__(self, model: Model) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model.head(self.model.embed(x))

    model = build()
    offload.apply(model, min_numel=1)
    train(Direct(model))
    (message,) = warnings_of(caplog)
    assert message.startswith(
        "an optimizer steps parameters of Model, and no forward of it was seen since apply()"
    )


@pytest.mark.parametrize(
    ("argument", "mode"),
    [(name, mode) for name, modes, _ in EXCLUDED for mode in modes if mode is not False],
)
def test_an_argument_that_its_mode_has_no_use_for_is_refused_before_anything_changes(
    argument: str, mode: Any
) -> None:
    """Each was refused by a check of its own, and `recompute_differs` in a mode that recomputes nothing by
    none."""
    model, given = build(), "warn" if argument == "recompute_differs" else "1GB"
    with pytest.raises(ValueError, match=rf"^{argument}='{given}' with mode={mode!r}\W.+"):
        offload.apply(model, mode, **{argument: given})
    assert not any(module._forward_hooks for module in model.modules())


class Says(nn.Linear):
    gradient_checkpointing: Any = True


class Answers(nn.Linear):
    @property
    def gradient_checkpointing(self) -> bool:
        return True


class Around(nn.Module):
    """Has what it wraps as its own, as torch's and peft's wrappers do."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "wrapped" else getattr(self.wrapped, name)


@pytest.mark.parametrize("kind", [Says, Answers])
def test_a_module_that_checkpoints_says_so_itself_or_its_class_or_what_it_wraps(
    kind: type[nn.Linear],
) -> None:
    """torch's modules are asked without their slow way to say that they have no such thing."""
    silent, own, module = nn.Linear(1, 1), nn.Linear(1, 1), kind(1, 1)
    assert not is_checkpointing(silent)
    own.gradient_checkpointing = True  # type: ignore[assignment]
    assert is_checkpointing(own)
    assert is_checkpointing(module)
    assert is_checkpointing(Around(module))
    assert not is_checkpointing(Around(silent))
    own.gradient_checkpointing = False  # type: ignore[assignment]
    assert not is_checkpointing(own)

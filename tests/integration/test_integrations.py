"""offload.integrations against the real trainers. Each training is compared, bit for bit, with the same one
without offload; saved tensors leave on a simulated device whose copies run as late as they may.

transformers, accelerate and Lightning are installed by scripts/env.sh. TRL, axolotl, torchtitan, TensorBoard
and wandb are not: test_trainers_wheels.py, in the slow run, runs the tests of those.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import PipelineOffloadManager

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate  # noqa: E402

from offload.integrations import step_figures  # noqa: E402
from offload.integrations.accelerate import apply as apply_prepared  # noqa: E402
from offload.integrations.accelerate import log  # noqa: E402
from offload.integrations.transformers import OffloadCallback  # noqa: E402

pytestmark = pytest.mark.usefixtures("manager")

ROWS = torch.randint(61, (12, 16), generator=torch.Generator().manual_seed(0))
DATA = [{"input_ids": row, "labels": row} for row in ROWS]
NAMES = {"offload/to_host_bytes", "offload/to_device_bytes", "offload/peak_bytes", "offload/stall_ms"}
State = dict[str, Tensor]


def llama(width: int = 32) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=61,
        attention_dropout=0.1,
    )
    return transformers.LlamaForCausalLM(config)


def settings(folder: Path, **named: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **named,
    }


@pytest.fixture(autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    """Lightning's DDP sets LOCAL_RANK, by which accelerate begins a process group in a later test."""
    with patch.dict(os.environ):
        yield


def trainer_of(folder: Path, callback: OffloadCallback | None, model: Any = None, **named: Any) -> Any:
    given = {"model_init": named.pop("model_init")} if "model_init" in named else {"model": model or llama()}
    cls = named.pop("cls", transformers.Trainer)
    arguments = transformers.TrainingArguments(**settings(folder, **named))
    trainer = cls(args=arguments, train_dataset=DATA, eval_dataset=DATA[:3], **given)
    if callback is not None:
        callback.add_to(trainer)
    return trainer


class Stops(transformers.TrainerCallback):  # type: ignore[misc]
    """After two steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop = state.global_step == 2


class Breaks(transformers.Trainer):  # type: ignore[misc]
    """Its fourth forward raises, in the middle of a step."""

    forwards = 0

    def compute_loss(self, *values: Any, **named: Any) -> Any:
        self.forwards += 1
        found = super().compute_loss(*values, **named)
        if self.forwards == 4:
            raise RuntimeError("in the middle")
        return found


def whole(folder: Path, callback: OffloadCallback | None, **named: Any) -> State:
    trainer = trainer_of(folder, callback, **named)
    trainer.train()
    return dict(trainer.model.state_dict())


def resumed(folder: Path, callback: OffloadCallback | None) -> State:
    first = trainer_of(folder, callback, save_strategy="steps", save_steps=1)
    first.add_callback(Stops())
    first.train()
    assert first.state.global_step == 2
    second = trainer_of(folder, callback, model=llama())
    second.train(resume_from_checkpoint=True)
    return dict(second.model.state_dict())


def fitted_twice(folder: Path, callback: OffloadCallback | None) -> State:
    trainer = trainer_of(folder, callback, model_init=lambda: llama())
    trainer.train()
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    return {**trainer.model.state_dict(), **{f"1.{name}": one for name, one in first.state_dict().items()}}


def broken(folder: Path, callback: OffloadCallback | None) -> State:
    trainer = trainer_of(folder, callback, cls=Breaks)
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.train()
    trainer.evaluate()
    trainer.train()
    return dict(trainer.model.state_dict())


def wrapped(folder: Path, callback: OffloadCallback | None) -> State:
    """In DistributedDataParallel, of one rank, as a Trainer of several wraps its model."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        trainer = trainer_of(folder, callback, model=Wide(), max_steps=2)
        trainer.model_wrapped = nn.parallel.DistributedDataParallel(trainer.model)
        trainer.train()
        return {name: one.clone() for name, one in trainer.model.state_dict().items()}
    finally:
        torch.distributed.destroy_process_group()


def evaluated(folder: Path, callback: OffloadCallback | None) -> State:
    """In bf16, with an evaluation and a checkpoint a step, of which the best is loaded at the end."""
    every = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    return whole(folder, callback, **every, load_best_model_at_end=True, bf16=True)


def checkpointed(folder: Path, callback: OffloadCallback | None) -> State:
    return whole(folder, callback, gradient_checkpointing=True)


class Wide(nn.Module):
    """Its blocks' weights are large enough to stream."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(61, 1024)
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(3))
        self.head = nn.Linear(1024, 61)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize(
    ("train", "arguments"),
    [
        (resumed, {}),
        (fitted_twice, {}),
        (broken, {}),
        (wrapped, {"weights": "host", "optimizer": True}),
        (evaluated, {"mode": "hidden_states"}),
        (checkpointed, {}),
    ],
)
def test_a_trainer_with_the_callback_ends_with_the_bits_of_one_without(
    train: Callable[[Path, OffloadCallback | None], State], arguments: dict[str, Any], tmp_path: Path
) -> None:
    plain = train(tmp_path / "plain", None)
    callback = OffloadCallback(**arguments)
    found = train(tmp_path / "ours", callback)
    assert plain.keys() == found.keys()
    first = (Wide() if train is wrapped else llama()).state_dict()
    assert not any(torch.equal(plain[name], one) for name, one in first.items() if one.dim() == 2), "trained"
    assert [name for name, wanted in plain.items() if not torch.equal(found[name], wanted)] == []
    assert callback.handle is not None
    assert step_figures(callback.handle)["offload/to_host_bytes"] > 0
    assert "removed" in repr(callback.handle)


def test_a_handle_of_before_the_trainer_is_logged_and_stays(
    manager: PipelineOffloadManager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = whole(tmp_path, None)
    model = llama()
    handle = offload.apply(model, min_numel=1)
    trainer = trainer_of(tmp_path, None, model=model, report_to=[])
    trainer.args.report_to = ["tensorboard"]
    trainer.add_callback(OffloadCallback(handle))
    trainer.train()
    assert all(torch.equal(model.state_dict()[name], wanted) for name, wanted in plain.items())
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 4
    assert all(entry.keys() >= NAMES for entry in logged)
    moved = [entry["offload/to_host_bytes"] for entry in logged]
    assert sum(moved) == handle.report().total.moved_bytes > 0
    assert manager.engine.step == 5, "the four, and before an optimizer has stepped a forward may end one"
    assert "removed" not in repr(handle)
    assert caplog.text.count("figures do not reach tensorboard") == 1
    with pytest.raises(ValueError, match="the Trainer trains another LlamaForCausalLM"):
        trainer_of(tmp_path, OffloadCallback(handle), model=llama()).train()
    with pytest.raises(ValueError, match="a handle and mode: give one of the two"):
        OffloadCallback(handle, mode="groups")


def test_figures_of_each_step_reach_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="test_trainers_wheels.py installs TensorBoard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    whole(tmp_path, OffloadCallback(min_numel=1), report_to="tensorboard")
    (written,) = tmp_path.rglob("events.*")
    found = EventAccumulator(str(written)).Reload()
    for name in NAMES:
        assert [one.step for one in found.Scalars(f"train/{name}")] == [1, 2, 3, 4]
    assert all(one.value > 0 for one in found.Scalars("train/offload/to_host_bytes"))


def test_figures_of_each_step_reach_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offline run needs no account. What it was given, and the summary that wandb made of it."""
    wandb = pytest.importorskip("wandb", reason="test_trainers_wheels.py installs wandb")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    with patch.object(wandb.Run, "log", autospec=True, side_effect=wandb.Run.log) as log:
        whole(tmp_path, OffloadCallback(min_numel=1), report_to="wandb")
    *steps, _ = [call.args[1] for call in log.call_args_list]  # the last is of the whole training
    summary = dict(wandb.run.summary)
    wandb.finish()
    assert [values["train/global_step"] for values in steps] == [1, 2, 3, 4]
    for name in NAMES:
        assert summary[f"train/{name}"] == steps[-1][f"train/{name}"]
        assert all(f"train/{name}" in values for values in steps)
    assert all(values["train/offload/to_host_bytes"] > 0 for values in steps)


@pytest.mark.parametrize(
    ("mode", "named", "error"),
    [
        ("auto", {"gradient_checkpointing": True}, "set activation_checkpointing=False"),
        ("auto", {"activation_checkpointing": True}, "set activation_checkpointing=False"),
        (
            "groups",
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}},
            "TrainingArguments offloads activations itself",
        ),
        ("groups", {"activation_offloading": True}, "use one of the two"),
        ("groups", {"_n_gpu": 2}, "copy the model to 2 GPUs of one process"),
    ],
)
def test_what_the_trainer_would_do_to_the_same_tensors_is_refused_before_anything_moves(
    mode: Any, named: dict[str, Any], error: str, tmp_path: Path
) -> None:
    known = {name: value for name, value in named.items() if "_checkpointing" in name}
    arguments = transformers.TrainingArguments(**settings(tmp_path, **known))
    for name in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):  # not in transformers 6
        vars(arguments).pop(name)
    for name in named.keys() - known.keys():  # of TRL's arguments, and of a machine of two GPUs
        setattr(arguments, name, named[name])
    model = llama()
    with pytest.raises(ValueError, match=error):
        OffloadCallback(mode=mode).on_train_begin(arguments, None, None, model=model)
    assert not any(module._forward_pre_hooks for module in model.modules())


class Tracker(accelerate.tracking.GeneralTracker):  # type: ignore[misc]
    name = "list"
    requires_logging_directory = False

    tracker = property(lambda self: self.written)

    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []
        super().__init__()

    def store_init_configuration(self, values: Any) -> None: ...

    def log(self, values: dict[str, float], step: int | None = None, **named: Any) -> None:
        assert step is not None
        self.written.append((step, values))


def test_a_prepared_model_accumulates_saves_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    def trained(*, offloaded: bool) -> tuple[State, list[tuple[int, dict[str, float]]]]:
        tracker = Tracker()
        accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2, log_with=tracker
        )
        accelerator.init_trackers("run")
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(list(ROWS), batch_size=3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        handle = apply_prepared(accelerator, model, mode="groups") if offloaded else None
        for epoch in range(3):
            for index, rows in enumerate(loader):
                with accelerator.accumulate(model):
                    loss = model(input_ids=rows, labels=rows).loss
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                if handle is not None and accelerator.sync_gradients:
                    log(accelerator, handle, 2 * epoch + index // 2, {"loss": loss.item()})
            if epoch == 0:
                accelerator.save_state(str(tmp_path / str(offloaded)))
            if epoch == 1:
                accelerator.load_state(str(tmp_path / str(offloaded)))
        if handle is not None:
            assert handle.blocks == ("model.layers.0", "model.layers.1")
            assert handle.report().total.moved_bytes == sum(
                one["offload/to_host_bytes"] for _, one in tracker.written
            )
        return dict(accelerator.unwrap_model(model).state_dict()), tracker.written

    plain, _ = trained(offloaded=False)
    found, logged = trained(offloaded=True)
    assert all(torch.equal(found[name], wanted) for name, wanted in plain.items())
    assert [step for step, _ in logged] == [*range(6)]
    assert all(
        values.keys() == {*NAMES, "loss"} and values["offload/to_host_bytes"] > 0 for _, values in logged
    )


def test_a_prepared_optimizers_state_waits_on_the_host() -> None:
    """accelerate's wrapper of it was once refused, with a way out that led nowhere."""

    def trained(*, offloaded: bool) -> State:
        accelerator = accelerate.Accelerator(cpu=True)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        handle = apply_prepared(accelerator, model, optimizer=optimizer) if offloaded else None
        for rows in ROWS.split(3):
            accelerator.backward(model(input_ids=rows, labels=rows).loss)
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            assert step_figures(handle)["offload/to_host_bytes"] > 0
            handle.remove()
        return dict(model.state_dict())

    plain, found = trained(offloaded=False), trained(offloaded=True)
    assert all(torch.equal(found[name], wanted) for name, wanted in plain.items())


def test_trls_trainer_with_its_defaults_and_adapters_has_the_same_bits(tmp_path: Path) -> None:
    """SFTTrainer checkpoints layers by default: their inputs leave. Its own offloading beside ours is an
    error, as is a mode that would choose what to recompute."""
    trl = pytest.importorskip("trl", reason="test_trainers_wheels.py installs TRL")
    peft = pytest.importorskip("peft")
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    data = Dataset.from_dict({"input_ids": ROWS.tolist(), "labels": ROWS.tolist()})
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0")),
        pad_token="w1",
        eos_token="w2",
    )

    def trained(
        callback: OffloadCallback | None, *, lora: bool = False, offloads: bool = False, **named: Any
    ) -> State:
        torch.manual_seed(0)
        trainer = trl.SFTTrainer(
            model=llama(),
            args=trl.SFTConfig(**settings(tmp_path, max_length=16, **named)),
            train_dataset=data,
            processing_class=words,
            peft_config=peft.LoraConfig(target_modules=["q_proj"], r=2) if lora else None,
        )
        trainer.args.activation_offloading = offloads  # now: without a GPU, TRL's own cannot be built
        if callback is not None:
            callback.add_to(trainer)
        trainer.train()
        return dict(trainer.model.state_dict())

    for lora, mode, named in [
        (False, "groups", {}),
        (True, True, {"gradient_checkpointing": False}),
        (False, "auto", {"gradient_checkpointing": False}),
    ]:
        plain = trained(None, lora=lora, **named)
        callback = OffloadCallback(mode=mode)
        found = trained(callback, lora=lora, **named)
        assert all(torch.equal(found[name], wanted) for name, wanted in plain.items()), mode
        assert callback.handle is not None
        assert mode == "auto" or step_figures(callback.handle)["offload/to_host_bytes"] > 0
    with pytest.raises(ValueError, match="SFTConfig offloads activations itself"):
        trained(OffloadCallback(), offloads=True)
    with pytest.raises(ValueError, match="activation_checkpointing=True of SFTConfig"):
        trained(OffloadCallback(mode="auto"))


def test_a_lightning_module_fits_twice_breaks_and_resumes_with_the_same_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("lightning")
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    from offload.integrations.lightning import OffloadCallback as LightningCallback

    class Module(pl.LightningModule):  # type: ignore[misc]
        breaks_at = -1

        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def training_step(self, rows: Tensor, index: int) -> Tensor:
            loss: Tensor = self.model(input_ids=rows, labels=rows).loss
            self.log("loss", loss)
            if self.global_step == self.breaks_at:
                raise RuntimeError("in the middle")
            return loss

        def validation_step(self, rows: Tensor, index: int) -> None:
            self.log("val", self.model(input_ids=rows, labels=rows).loss)

        def configure_optimizers(self) -> Any:
            clips = self.trainer.precision == "32-true"  # elsewhere Lightning refuses what is fused
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=clips)

    def trained(folder: Path, callback: LightningCallback | None, **named: Any) -> State:
        def trainer(epochs: int) -> pl.Trainer:
            return pl.Trainer(
                max_epochs=epochs,
                accelerator="cpu",
                callbacks=[] if callback is None else [callback],
                accumulate_grad_batches=2,
                gradient_clip_val=1.0,
                logger=CSVLogger(folder),
                log_every_n_steps=1,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
                **named,
            )

        loader = torch.utils.data.DataLoader(ROWS, batch_size=3)
        module = Module()
        first = trainer(1)
        first.fit(module, loader, loader)
        module.breaks_at = 1
        with pytest.raises(RuntimeError, match="in the middle"):
            trainer(1).fit(module, loader)
        module.breaks_at = -1
        trainer(3).fit(module, loader, loader, ckpt_path=first.checkpoint_callback.best_model_path)
        return dict(module.state_dict())

    for mode, name, named in [
        ("groups", "model", {}),
        (True, "model", {"precision": "bf16-mixed"}),
        (None, "", {"strategy": "ddp"}),
    ]:
        if named.get("strategy"):
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        plain = trained(tmp_path / f"plain{mode}{named}", None, **named)
        callback = LightningCallback(module=name, mode=mode, optimizer=mode is None or None)
        found = trained(tmp_path / f"ours{mode}{named}", callback, **named)
        assert all(torch.equal(found[name], wanted) for name, wanted in plain.items()), (mode, named)
        assert callback.handle is not None
        assert "removed" in repr(callback.handle)
        *_, last = sorted((tmp_path / f"ours{mode}{named}").rglob("metrics.csv"))
        assert {*last.read_text().splitlines()[0].split(",")} >= NAMES
        assert step_figures(callback.handle)["offload/to_host_bytes"] > 0
    torch.distributed.destroy_process_group()
    with pytest.raises(ValueError, match="name the module that it calls"):
        LightningCallback(mode=True)
    two = SimpleNamespace(optimizers=[torch.optim.AdamW(Module().parameters()) for _ in range(2)])
    with pytest.raises(ValueError, match="optimizer=True is the trainer's own, and there are 2"):
        LightningCallback(module="model", optimizer=True).on_train_start(two, Module())
    with pytest.raises(ValueError, match="module='modle' names no module of Module; it has model"):
        LightningCallback(module="modle").on_train_start(None, Module())


def test_axolotls_yaml_is_mapped_and_switched_off_for_axolotl() -> None:
    pytest.importorskip("axolotl", reason="test_trainers_wheels.py installs axolotl")
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault

    from offload.integrations.axolotl import arguments_of

    on = {"gradient_checkpointing": True}
    for yaml, wanted in [
        (on, {"mode": "checkpoint"}),
        ({**on, "activation_offloading": "hidden_states"}, {"mode": "hidden_states"}),
        ({**on, "activation_offloading": True}, {"mode": "hidden_states"}),
        ({**on, "activation_offloading": True, "adapter": "lora"}, {"mode": True}),
        ({**on, "activation_offloading": "disk"}, {"mode": "disk"}),
        ({"gradient_checkpointing": "offload_disk"}, {"mode": "disk"}),
        ({"gradient_checkpointing": "offload", "adapter": "lora"}, {"mode": True}),
        ({**on, "layer_offloading": True}, {"mode": "checkpoint", "weights": "host"}),
        ({"offload": {"mode": "auto", "device_total": "8GB"}}, {"mode": "auto", "device_total": "8GB"}),
    ]:
        assert arguments_of(DictDefault(yaml)) == wanted, yaml
    for yaml, error in [
        ({**on, "offload": {"mode": "auto"}}, "which say another mode"),
        ({**on, "selective_checkpointing": True}, "selective_checkpointing beside"),
        ({}, "add offload: {mode: ...}"),
        ({"offload": "auto"}, "offload: 'auto' has what apply does not know"),
        ({"offload": {"modee": "auto"}}, "offload: {'modee': 'auto'} has what apply does not know"),
        ({"offload": {"mode": "atuo"}}, "is 'atuo', must be one of"),
        ({**on, "activation_offloading": "hiden_states"}, "is 'hiden_states', must be one of"),
        ({"gradient_checkpointing": "unsloth"}, "gradient_checkpointing: 'unsloth' beside"),
    ]:
        with pytest.raises(ValueError, match=error):
            arguments_of(DictDefault(yaml))
    manager = PluginManager.get_instance()
    manager.register("offload.integrations.axolotl.OffloadPlugin")
    cfg = DictDefault({**on, "activation_offloading": "hidden_states", "offload": {"min_numel": 1}})
    for plugin in manager.plugins.values():
        plugin.register(cfg)
    assert not any(cfg.get(key) for key in ("gradient_checkpointing", "activation_offloading", "offload"))


@pytest.mark.req("S4-24")
@pytest.mark.parametrize("mode", ["legacy", "disk"])
def test_axolotl_goes_on_recomputing_where_every_weight_trains(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both switched the recompute of a full finetune off, and every saved tensor left. A stand-in has
    axolotl's base class alone."""
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = object  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "offload.integrations.axolotl", raising=False)
    plugin = importlib.import_module("offload.integrations.axolotl").OffloadPlugin()
    sys.modules.pop("offload.integrations.axolotl")

    def recomputes(**yaml: Any) -> bool:
        plugin.register(yaml)
        assert plugin._arguments == {"mode": mode}
        assert not yaml["activation_offloading"]
        return bool(yaml["gradient_checkpointing"])

    on = {"gradient_checkpointing": True, "activation_offloading": mode}
    assert recomputes(**on)
    assert recomputes(activation_offloading=mode)
    assert not recomputes(**on, adapter="lora")
    assert not recomputes(offload={"mode": mode})


@pytest.mark.req("S4-24")
@pytest.mark.parametrize("mode", ["legacy", "disk"])
def test_beside_the_trainers_recompute_the_inputs_of_its_checkpoints_leave(mode: str, tmp_path: Path) -> None:
    def moved(checkpoints: bool) -> int:
        whole(
            tmp_path, OffloadCallback(mode=mode, min_numel=1), gradient_checkpointing=checkpoints, max_steps=1
        )
        return PipelineOffloadManager.get_instance().stats.spilled

    assert 0 < 3 * moved(True) < moved(False)


def test_torchtitans_trainer_has_the_same_bits_and_logs_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="test_trainers_wheels.py installs torchtitan")
    script = Path(__file__).with_name("torchtitan_on_cpu.py")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "equal: groups, hidden_states, True"

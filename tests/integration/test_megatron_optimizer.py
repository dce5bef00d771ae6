"""Megatron-core's own optimizer code over this project's hybrid optimizer: a small GPTModel, two
data-parallel gloo ranks, five steps.

Skipped where megatron.core cannot be imported; test_megatron.py says how to run it. It has been run with core
0.16.1, 0.17.1, 0.18.1 and 0.19.2. Without Transformer Engine, so Megatron's own optimizer is torch's AdamW,
asked here for torch's fused kernel, as Megatron asks for it once it offloads: then the weights are equal bit
by bit. Megatron's own hybrid optimizer cannot run without a GPU, and is compared with where there is one.

KINDS are Megatron's wrappers around an optimizer. It recommends the last one to whoever offloads, whose
checkpoints are tested too, in each
format: there the device's optimizer counts its steps in its param groups, as Transformer Engine's does.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(ROOT))

from offload import OffloadError  # noqa: E402
from parallel import megatron  # noqa: E402
from tests.integration.megatron_on_cpu import (  # noqa: E402
    NOT_IMPORTABLE,
    needs_megatron,
    on_the_cpu,
    package,
    reports_of,
    without_transformer_engine,
)

HIDDEN, HEADS, SEQUENCE, BATCH, VOCABULARY, LAYERS = 64, 4, 32, 2, 96, 2
STEPS = 5
KINDS = {  # (bf16, distributed optimizer, precision-aware)
    "float32": (False, False, False),
    "bf16": (True, False, False),
    "float32 in shards": (False, True, False),
    "bf16 in shards": (True, True, False),
    "precision-aware": (True, True, True),
}
FRACTIONS = {
    "0.0, overlap": (0.0, True),
    "0.5, overlap": (0.5, True),
    "0.5, no overlap": (0.5, False),
    "1.0, overlap": (1.0, True),
}
FORMATS = ("dp_zero", "fully_reshardable", "dp_reshardable")


# ---- one rank ----


class CountingAdamW(torch.optim.Optimizer):
    """The conventions of Transformer Engine's FusedAdam: the arguments of Megatron's call, and one count for
    a whole group."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
                first, second = group["betas"]
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                root = state["exp_avg_sq"].sqrt() / math.sqrt(1 - second ** group["step"]) + group["eps"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - first ** group["step"]))


class Training:
    """A model and Megatron's optimizer for it. fraction: None is Megatron without offload, on torch's fused
    AdamW."""

    def __init__(self, kind: str, fraction: float | None, overlap: bool = True, *, seed: int = 3) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.transformer_config import TransformerConfig

        bf16, sharded, precise = KINDS[kind]
        dtype = torch.bfloat16 if bf16 else torch.float32
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            ffn_hidden_size=2 * HIDDEN,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bf16=bf16,
            params_dtype=dtype,
            pipeline_dtype=dtype,
        )
        torch.manual_seed(seed)
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            share_embeddings_and_output_weights=False,
        ).to(dtype)
        self.where = torch.empty(0, device="cuda").device.type  # the CPU where on_the_cpu answers
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=sharded, grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, ddp, model.to(self.where))
        with asked_for_the_fused_kernel() if fraction is None else nullcontext():
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=1e-2,
                    weight_decay=0.1,
                    clip_grad=1.0,
                    bf16=bf16,
                    params_dtype=dtype,
                    use_distributed_optimizer=sharded,
                    use_precision_aware_optimizer=precise and fraction is not None,
                    optimizer_cpu_offload=fraction is not None,
                    optimizer_offload_fraction=fraction or 0.0,
                    overlap_cpu_optimizer_d2h_h2d=overlap,
                ),
                [self.model],
            )

    def step(self, number: int) -> tuple[float, float]:
        """(loss, gradient norm); each rank has tokens of its own."""
        source = torch.Generator().manual_seed(100 * dist.get_rank() + number)
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=source).to(self.where)
        places = torch.arange(SEQUENCE, device=self.where).expand_as(tokens)
        future = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=self.where), 1)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.model(tokens, places, future, labels=tokens).float().mean()
        loss.backward()
        self.model.finish_grad_sync()
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + number)  # as a schedule does
        _, norm, _ = self.optimizer.step()
        return float(loss.detach()), float(norm)

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    @property
    def wrapper(self) -> Any:
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])[0]


@contextmanager
def asked_for_the_fused_kernel() -> Iterator[None]:
    own = torch.optim.AdamW

    class FusedAdamW(own):  # type: ignore[valid-type,misc]
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **{**keywords, "fused": True})

    torch.optim.AdamW = FusedAdamW  # type: ignore[misc]
    try:
        yield
    finally:
        torch.optim.AdamW = own  # type: ignore[misc]


def train(kind: str, reference: Training, losses: list[Any]) -> dict[str, Any]:
    report = {}
    for name, (fraction, overlap) in FRACTIONS.items():
        training = Training(kind, fraction, overlap)
        seen = [training.step(number) for number in range(STEPS)]
        inner = training.wrapper.optimizer
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        offloaded = [parameter for parameter in parameters if inner.hybrid.place_of(parameter).value == "cpu"]
        report[name] = {
            "class": type(inner).__module__,
            "bitwise": all(map(torch.equal, training.weights(), reference.weights())) and seen == losses,
            "parameters": len(parameters),
            "share": sum(p.numel() for p in offloaded) / sum(p.numel() for p in parameters),
            "classes in groups": sum(
                isinstance(value, type) for group in inner.param_groups for value in group.values()
            ),
        }
        inner.close()
    return report


def reload(kind: str) -> Any:
    """New weights in the model, which Megatron then says to the optimizer: whether the next step is the one
    of Megatron's own, too."""
    weights = []
    for training in (
        Training(kind, 0.5),
        Training("bf16 in shards" if kind == "precision-aware" else kind, None),
    ):
        training.step(0)
        training.model.load_state_dict(Training(kind, 0.5, seed=5).model.state_dict())
        try:
            training.optimizer.reload_model_params()
        except OffloadError as error:
            return str(error)
        training.step(1)
        weights.append(training.weights())
    return all(map(torch.equal, *weights))


def checkpoint(form: str, fraction: float, folder: str) -> Any:
    """Whether two steps after a checkpoint, and the same two of a new training that loaded it, end in the
    same bits."""
    from megatron.core import dist_checkpointing

    first = Training("precision-aware", fraction)
    for number in range(3):
        first.step(number)
    model = {
        key: value.clone() for key, value in first.model.state_dict().items() if isinstance(value, Tensor)
    }
    metadata = {"distrib_optim_sharding_type": form}
    if form == "dp_zero":
        shards = Path(f"{folder}.shards")
        torch.save(first.wrapper.state_dict(), f"{folder}.common.{dist.get_rank()}")
        first.wrapper.save_parameter_state(str(shards))
    else:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir()
        dist.barrier()
        sharded = first.model.module.sharded_state_dict()
        dist_checkpointing.save(
            {"model": sharded, "optimizer": first.wrapper.sharded_state_dict(sharded, metadata=metadata)},
            folder,
        )
    losses = [first.step(number) for number in (3, 4)]
    second = Training("precision-aware", fraction, seed=7)
    second.model.load_state_dict(model, strict=False)
    if form == "dp_zero":
        second.wrapper.load_state_dict(torch.load(f"{folder}.common.{dist.get_rank()}", weights_only=False))
        second.wrapper.load_parameter_state(str(shards))
    else:
        sharded = second.model.module.sharded_state_dict()
        wanted = {
            "model": sharded,
            "optimizer": second.wrapper.sharded_state_dict(sharded, is_loading=True, metadata=metadata),
        }
        found = dist_checkpointing.load(wanted, folder)
        second.model.module.load_state_dict(found["model"], strict=False)
        second.wrapper.load_state_dict(found["optimizer"])
    again = [second.step(number) for number in (3, 4)]
    same = all(map(torch.equal, first.weights(), second.weights()))
    return {"losses": again == losses, "weights": same}


def as_with_transformer_engine() -> None:
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer

    optimizers.Adam = distrib_optimizer.Adam = CountingAdamW
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


def main(rank: int, ranks: int, meeting_place: str, what: str) -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if what != "own":
        megatron.install()
    try:
        from megatron.core import parallel_state
    except ImportError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the reason to skip
        return NOT_IMPORTABLE
    if what == "cpu":
        on_the_cpu()
    without_transformer_engine()
    dist.init_process_group(
        "gloo" if what == "cpu" else "nccl",
        init_method=f"file://{meeting_place}",
        rank=rank,
        world_size=ranks,
    )
    parallel_state.initialize_model_parallel(1, 1)
    if what != "cpu":
        return on_a_gpu(meeting_place)
    report: dict[str, Any] = {
        "page": getattr(sys.modules[megatron.OPTIMIZER_PAGE], "__file__", None),
        "kinds": {},
        "checkpoints": {},
    }
    for kind in KINDS:
        reference = Training(kind if kind != "precision-aware" else "bf16 in shards", None)
        losses = [reference.step(number) for number in range(STEPS)]
        report["kinds"][kind] = train(kind, reference, losses)
    report["reload"] = {kind: reload(kind) for kind in KINDS}
    as_with_transformer_engine()
    writers = importlib.util.find_spec("psutil") is not None  # which core 0.18 and later need to save
    for form, fraction in itertools.product(FORMATS, (0.0, 0.5, 1.0)):
        done = (
            checkpoint(form, fraction, f"{meeting_place}.checkpoint")
            if writers or form == "dp_zero"
            else "psutil is missing"
        )
        report["checkpoints"][f"{form}, {fraction}"] = done
    Path(f"{meeting_place}.{rank}").write_text(json.dumps(report))
    dist.barrier()
    return 0


def on_a_gpu(meeting_place: str) -> int:
    """Weights after five steps, of Megatron's own hybrid optimizer or of this one, by fraction."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(3)
    torch.use_deterministic_algorithms(True, warn_only=True)
    weights = {}
    for name, (fraction, overlap) in FRACTIONS.items():
        training = Training("precision-aware", fraction, overlap)
        for number in range(STEPS):
            training.step(number)
        weights[name] = [weight.cpu() for weight in training.weights()]
        if hasattr(training.wrapper.optimizer, "close"):
            training.wrapper.optimizer.close()
    torch.save(weights, f"{meeting_place}.weights")
    return 0


# ---- what they report ----

pytestmark = needs_megatron


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = [said for _, _, said in reports_of(__file__, (2,), tmp_path_factory.mktemp("megatron"), "cpu")]
    assert [said["page"] for said in found] == [None, None], "Megatron's own page was loaded"
    return found


@pytest.mark.req("S3-28")
@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_norms_have_the_bits_of_megatrons_own_optimizer(
    reports: list[dict[str, Any]], kind: str, fraction: str
) -> None:
    for said in reports:
        run = said["kinds"][kind][fraction]
        assert run["class"] == "offload.parallel.megatron_optimizer"
        assert run["parameters"] > 10
        assert run["bitwise"]
        assert run["classes in groups"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_fraction_of_megatrons_config_leaves_the_device(reports: list[dict[str, Any]], kind: str) -> None:
    for said in reports:
        shares = {fraction: run["share"] for fraction, run in said["kinds"][kind].items()}
        assert shares["0.0, overlap"] == 0
        assert 0.5 <= shares["0.5, overlap"] == shares["0.5, no overlap"] < 1
        assert shares["1.0, overlap"] == 1


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoint_goes_on_with_the_same_bits(
    reports: list[dict[str, Any]], form: str, fraction: float
) -> None:
    for said in reports:
        done = said["checkpoints"][f"{form}, {fraction}"]
        if isinstance(done, str):
            pytest.skip(done)
        assert done == {"losses": True, "weights": True}


def test_new_weights_of_the_model_are_taken_over_or_refused(reports: list[dict[str, Any]]) -> None:
    for said in reports:
        found = said["reload"]
        assert [found[kind] for kind in ("float32", "bf16", "float32 in shards", "precision-aware")] == [
            True
        ] * 4
        assert "set use_precision_aware_optimizer=True" in found["bf16 in shards"]


def test_every_name_of_the_hybrid_optimizer_that_megatron_uses_is_there() -> None:
    """Names: of the class that is replaced. Used: an attribute of that name of anything, in the modules that
    import the class."""
    folder = package()
    assert folder is not None
    own = ast.parse((folder / "optimizer" / "cpu_offloading" / "hybrid_optimizer.py").read_text())
    names = {node.name for node in ast.walk(own) if isinstance(node, ast.FunctionDef)}
    names |= {
        node.attr
        for node in ast.walk(own)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and getattr(node.value, "id", None) == "self"
    }
    optimizer = megatron.HybridDeviceOptimizer([torch.nn.Parameter(torch.zeros(3))])
    used = set()
    for path in (folder / "optimizer").glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {
            alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        if "HybridDeviceOptimizer" in imported:
            used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & names
    assert {
        "dummy_step",
        "sub_optimizers",
        "_sync_hdo_state_to_sub_optimizers",
        "update_fp32_param_by_new_param",
    } <= used
    assert [name for name in sorted(used) if not hasattr(optimizer, name)] == []


@pytest.mark.gpu
def test_weights_have_the_bits_of_megatrons_own_hybrid_optimizer(tmp_path: Path) -> None:
    found: list[dict[str, list[Tensor]]] = []
    for what in ("own", "ours"):
        place = tmp_path / what
        done = subprocess.run(
            [sys.executable, __file__, "0", "1", str(place), what],
            env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode == NOT_IMPORTABLE:
            pytest.skip(f"megatron.core is there but cannot be imported: {done.stderr.splitlines()[-1]}")
        assert done.returncode == 0, done.stderr[-4000:]
        found.append(torch.load(f"{place}.weights"))
    for fraction in FRACTIONS:
        own, ours = (weights[fraction] for weights in found)
        different = [
            index for index, pair in enumerate(zip(own, ours, strict=True)) if not torch.equal(*pair)
        ]
        assert different == [], fraction


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]))

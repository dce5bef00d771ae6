"""The real Megatron-core under the drop-in: its GPTModel and its schedules on gloo ranks, each group alone
and all of them together.

Skipped where megatron.core cannot be imported; it is no dependency of this project. `pip install --no-deps
--target DIR megatron-core` (0.18 and later need triton and einops beside it) and `PYTHONPATH=DIR pytest
tests/integration/test_megatron.py` run it. It has been run with core 0.16.1, 0.17.1, 0.18.1 and 0.19.2, whose
pages are those of every release from 0.16.1 to 0.19.2.

What Megatron asks of a GPU is answered by megatron_on_cpu.py. Each start of ranks (this file run as a script
is one rank) goes through all cases; each test then looks at one thing they report.
"""

from __future__ import annotations

import ast
import io
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from offload import OffloadConfig, PipelineOffloadManager, configure  # noqa: E402
from parallel import megatron  # noqa: E402
from tests.integration.megatron_on_cpu import NOT_IMPORTABLE, needs_megatron, on_the_cpu, package, reports_of  # noqa: E402

HIDDEN, HEADS, SEQUENCE, BATCH, VOCABULARY, LAYERS = 64, 4, 32, 2, 96, 4
MB = 1_000_000
# of a dense model without Transformer Engine
NAMES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
CASES = {
    "attn_norm": ("attn_norm",),
    "qkv_linear": ("qkv_linear",),
    "core_attn": ("core_attn",),
    "attn_proj": ("core_attn", "attn_proj"),  # Megatron refuses attn_proj without core_attn
    "mlp_norm": ("mlp_norm",),
    "all": NAMES,
}
# (pipeline ranks, virtual stages a rank)
SCHEDULES = {"no pipelining": (1, None), "1F1B": (2, None), "interleaved": (2, 2)}


# ---- one rank ----


class Training:
    """This rank's part of one model under one schedule."""

    def __init__(self, schedule: str, modules: tuple[str, ...]) -> None:
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        ranks, virtual = SCHEDULES[schedule]
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            ffn_hidden_size=2 * HIDDEN,
            attention_dropout=0.1,
            hidden_dropout=0.1,
            pipeline_model_parallel_size=ranks,
            virtual_pipeline_model_parallel_size=virtual,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            fine_grained_activation_offloading=bool(modules),
            offload_modules=list(modules),
            min_offloaded_tensor_size=256,
        )
        torch.manual_seed(11)
        self.models = []
        for stage in range(virtual or 1):
            place = {} if virtual is None else {"vp_stage": stage}
            first = parallel_state.is_pipeline_first_stage(
                **({"ignore_virtual": False} | place if virtual else {})
            )
            last = parallel_state.is_pipeline_last_stage(
                **({"ignore_virtual": False} | place if virtual else {})
            )
            self.models.append(
                GPTModel(
                    config,
                    get_gpt_layer_local_spec(),
                    vocab_size=VOCABULARY,
                    max_sequence_length=SEQUENCE,
                    pre_process=first,
                    post_process=last,
                    share_embeddings_and_output_weights=False,
                    **place,
                )
            )

    def step(self, number: int, microbatches: int, *, forward_only: bool = False) -> list[float]:
        """Gradients are left in the parameters. Returns the losses, on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for model in self.models:
            model.zero_grad(set_to_none=True)
        torch.manual_seed(number)
        source = torch.Generator().manual_seed(number)
        batches = [
            torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=source) for _ in range(microbatches)
        ]
        data = [iter(batches) for _ in self.models]
        one = len(self.models) == 1
        with torch.no_grad() if forward_only else nullcontext():
            report = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=data[0] if one else data,
                model=self.models[0] if one else self.models,
                num_microbatches=microbatches,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
                forward_only=forward_only,
            )
        return [entry["loss"] for entry in report]

    def gradients(self) -> list[torch.Tensor]:
        return [
            parameter.grad.clone()
            for model in self.models
            for parameter in model.parameters()
            if parameter.grad is not None
        ]


def forward_step(
    batches: Iterator[torch.Tensor], model: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    tokens = next(batches)
    places = torch.arange(SEQUENCE).expand_as(tokens)
    future = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    output = model(tokens, places, future, labels=tokens)
    return output, lambda losses: (losses.mean(), {"loss": float(losses.mean())})


def train(schedule: str, modules: tuple[str, ...], microbatches: int) -> dict[str, Any]:
    """Three steps with an evaluation after the first; what they computed, and what the engine says of
    them."""
    manager = configure(OffloadConfig())
    training = Training(schedule, modules)
    printed = io.StringIO()
    losses, gradients, spilled = [], [], []
    for number in range(3):
        with redirect_stdout(printed):
            losses.append(training.step(number, microbatches))
        gradients.append(training.gradients())
        spilled.append(manager.stats.spill_bytes)
        if number == 0:
            losses.append(training.step(9, microbatches, forward_only=True))
    return {
        "losses": losses,
        "gradients": gradients,
        "spilled": spilled,
        "leftover": sum(1 for _ in manager.living_blocks()),
        "summary": dict(manager.offload_summary_bytes),
        "table": printed.getvalue(),
        "refused": manager.stats.refused,
    }


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def compare(schedule: str) -> dict[str, Any]:
    """Every case with one and with four microbatches, against the same training with offload off."""
    report: dict[str, Any] = {}
    for microbatches in (1, 4):
        plain = train(schedule, (), microbatches) if microbatches > 1 or schedule != "interleaved" else None
        for case, modules in CASES.items():
            if plain is None:
                continue  # Megatron's interleaved schedule wants a multiple of the ranks
            heard = Warnings()
            logging.getLogger("offload").addHandler(heard)
            seen = train(schedule, modules, microbatches)
            logging.getLogger("offload").removeHandler(heard)
            pairs = [
                (with_it, without)
                for steps in zip(seen.pop("gradients"), plain["gradients"], strict=True)
                for with_it, without in zip(*steps, strict=True)
            ]
            seen["compared"] = len(pairs)
            seen["bitwise"] = all(torch.equal(*pair) for pair in pairs) and seen["losses"] == plain["losses"]
            seen["warnings"] = heard.texts
            report[f"{case}/{microbatches}"] = seen
    return report


def main(rank: int, ranks: int, meeting_place: str) -> int:
    warnings.simplefilter("ignore")
    megatron.install()
    try:
        from megatron.core import parallel_state
    except ImportError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the reason to skip
        return NOT_IMPORTABLE
    on_the_cpu()
    dist.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=ranks)
    report: dict[str, Any] = {"page": getattr(sys.modules[megatron.PAGE], "__file__", None)}
    for schedule, (wanted, virtual) in SCHEDULES.items():
        if wanted != ranks:
            continue
        parallel_state.initialize_model_parallel(1, ranks, virtual_pipeline_model_parallel_size=virtual)
        report[schedule] = compare(schedule)
        parallel_state.destroy_model_parallel()
    Path(f"{meeting_place}.{rank}").write_text(json.dumps(report))
    dist.barrier()
    PipelineOffloadManager.reset_instance()
    return 0


# ---- what they report ----

Reports = dict[str, list[dict[str, Any]]]


pytestmark = needs_megatron


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """By schedule, one report a rank. One rank and two ranks run at the same time."""
    by_schedule: Reports = {}
    for _, _, said in reports_of(__file__, (1, 2), tmp_path_factory.mktemp("megatron")):
        assert said.pop("page") is None, "Megatron's own page was loaded"
        for schedule, seen in said.items():
            by_schedule.setdefault(schedule, []).append(seen)
    return by_schedule


@pytest.mark.req("S2-95", "S2-102")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_and_losses_have_the_bits_of_offload_off(
    reports: Reports, schedule: str, case: str
) -> None:
    seen = [run for rank in reports[schedule] for name, run in rank.items() if name.split("/")[0] == case]
    assert seen
    for run in seen:
        assert run["compared"] > 30
        assert run["bitwise"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_group_leaves_in_warm_up_and_nothing_is_left_over(reports: Reports, schedule: str) -> None:
    for rank in reports[schedule]:
        for name, run in rank.items():
            assert run["spilled"][0] > 0, name
            assert run["leftover"] == run["refused"] == 0, name


@pytest.mark.parametrize("schedule", ["no pipelining", "1F1B"])
def test_table_says_what_leaves_in_a_step_of_one_microbatch(reports: Reports, schedule: str) -> None:
    for rank in reports[schedule]:
        for case, modules in CASES.items():
            run = rank[f"{case}/1"]
            assert set(run["summary"]) <= set(modules)
            assert sum(run["summary"].values()) == run["spilled"][1] == run["spilled"][2] > 0, case


@pytest.mark.parametrize("schedule", ["no pipelining", "1F1B"])
def test_printed_table_adds_up_the_ranks(reports: Reports, schedule: str) -> None:
    ranks = reports[schedule]
    for case in CASES:
        table = ranks[0][f"{case}/1"]["table"]
        total = sum(sum(rank[f"{case}/1"]["summary"].values()) for rank in ranks)
        assert table.splitlines()[-1].split()[-1] == f"{total / MB:.2f}", table
        assert [rank[f"{case}/1"]["table"] for rank in ranks[1:]] == [""] * (len(ranks) - 1)


def test_warm_up_sends_four_microbatches_as_four_times_one(reports: Reports) -> None:
    for schedule in ("no pipelining", "1F1B"):
        for rank in reports[schedule]:
            for case in CASES:
                assert rank[f"{case}/4"]["spilled"][0] == 4 * rank[f"{case}/1"]["spilled"][0], (
                    schedule,
                    case,
                )


def test_bytes_of_a_norm_are_those_of_its_input(reports: Reports) -> None:
    hidden_states = SEQUENCE * BATCH * HIDDEN * 4
    for name in ("attn_norm", "qkv_linear", "mlp_norm"):
        assert reports["no pipelining"][0][f"{name}/1"]["spilled"][0] == LAYERS * hidden_states


def test_what_the_plan_keeps_is_no_reason_to_warn(reports: Reports) -> None:
    assert {
        text
        for ranks in reports.values()
        for rank in ranks
        for run in rank.values()
        for text in run["warnings"]
        if "as if none had left" not in text  # what leaves has room beside what stays: true here
    } == set()


def test_page_has_every_name_that_megatrons_own_defines() -> None:
    folder = package()
    assert folder is not None
    own = ast.parse((folder / "pipeline_parallel" / "fine_grained_activation_offload.py").read_text())
    from parallel.megatron_page import names_of

    page = names_of(sys)
    for node in own.body:
        if isinstance(node, ast.Assign):
            assert all(target.id in page for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name != "_te_do_not_offload":
            assert node.name in page
            if node.name == "FineGrainedActivationOffloadingInterface":
                methods = {method.name for method in node.body if isinstance(method, ast.FunctionDef)}
                assert methods <= set(dir(page[node.name]))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))

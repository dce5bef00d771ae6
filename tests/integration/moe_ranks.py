"""What each rank of a launch does in tests/integration/test_moe_ranks.py: mixtures whose experts four ranks
share."""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moe import (
    GROUP_NAMES,
    Mixture,
    MixtureConfig,
    MixtureGPT,
    build_stage_module,
    expert_parameters,
    names_of_this_rank,
    replaying_contexts,
    stage_examples,
)
from offload import OffloadConfig, apply, configure, init_chunk_handler, step_end
from parallel.schedules import build_schedule, schedule_named, stages_of
from parallel.stage import OffloadPipelineStage
from tests.inside import by_expert, streams_from
from tests.unit.groups.stack import EXECUTORS
from tests.unit.moe.mixtures import SMALL, grads_of, loss_of, offloading, step, text

CONFIG = SMALL.with_(layers=2, balance="loss")
COMBINATIONS: dict[str, tuple[str, ...]] = {
    "attn_norm": ("attn_norm",),
    "qkv_linear": ("qkv_linear",),
    "core_attn": ("core_attn",),
    "attn_proj": ("core_attn", "attn_proj"),
    "mlp_norm": ("mlp_norm",),
    "expert_fc1": ("expert_fc1",),
    "moe_act": ("moe_act",),
    "experts": ("expert_fc1", "moe_act"),
    "all": GROUP_NAMES,
}
STAGED = ["1f1b"] + ["interleavedzerobubble", "zbv"] * (torch.__version__ >= (2, 13))
"""Schedules that this torch runs: 2.11 and 2.12 lose autograd.Functions in a split backward."""
MODES: dict[str, dict[str, Any]] = {
    **{name: {"offload_modules": names} for name, names in COMBINATIONS.items()},
    **{name: {"experts_mode": name} for name in ("save_on_cpu", "checkpoint", "both")},
    "recompute": {"recompute": True},
}


def configured(rank: int, device: str = "cpu") -> Any:
    """device: "cpu" takes the simulated one."""
    limits = OffloadConfig(
        min_offloaded_tensor_size=16,
        piece_bytes=2048,
        max_spilling_bytes=8192,
        host_reserve_bytes=16 << 20,
        pp_rank=rank,
    )
    return configure(limits, device="sim" if device == "cpu" else device, print_summary=False)


def config_for(device: str, **changes: Any) -> MixtureConfig:
    """Attention on a GPU has the same bits every time."""
    return CONFIG.with_(math_attention=device != "cpu", **changes)


def seeds_of(rank: int) -> tuple[int, int]:
    """Each rank has text of its own."""
    return 10 * rank, 10 * rank + 1


def is_same(found: Any, expected: Any) -> bool:
    (logits, grads), (others, other_grads) = found, expected
    return (
        all(torch.equal(one, other) for one, other in zip(logits, others, strict=True))
        and grads.keys() == other_grads.keys()
        and all(torch.equal(grads[name], other_grads[name]) for name in grads)
    )


def near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names whose gradients differ by more than the source's tolerance, of the largest."""
    return [
        name
        for name, grad in expected.items()
        if not torch.allclose(found[name], grad, rtol=1e-3, atol=1e-3 * float(grad.abs().max()))
    ]


def one_ranks(config: MixtureConfig, seeds: list[tuple[int, ...]], device: str = "cpu") -> dict[str, Tensor]:
    """The mean of what the ranks' losses give, of the whole model in one process; the auxiliary loss sees all
    of a microbatch's tokens at once, as it does over ranks."""
    whole = MixtureGPT(config).to(device)
    for microbatch in zip(*seeds, strict=True):
        tokens = torch.cat([text(seed) for seed in microbatch]).to(device)
        loss_of(whole(tokens), tokens).backward()
    return grads_of(whole)


def whole_of(model: MixtureGPT, grads: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Gradients of the model as one rank would have them: experts beside each other, the rest averaged."""
    own = set(names_of_this_rank(model))
    found = {}
    for name, grad in grads.items():
        parts = [torch.empty_like(grad) for _ in range(group.size())]
        dist.all_gather(parts, grad.contiguous(), group=group)
        found[name] = torch.cat(parts) if name in own else torch.stack(parts).mean(0)
    return found


def shared_by_all(rank: int, group: dist.ProcessGroup, device: str = "cpu") -> dict[str, Any]:
    """The group's ranks share the experts: each setting beside none, and none beside one rank."""
    manager = configured(rank, device)
    config = config_for(device)
    manager.disable_offload()
    plain = MixtureGPT(config, group).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # names that torch gives up
        expected = step(plain, seeds_of(rank))
    grads = whole_of(plain, expected[1], group)
    alone = one_ranks(config, [seeds_of(each) for each in dist.get_process_group_ranks(group)], device)
    manager.enable_offload()
    found: dict[str, Any] = {"far": near(grads, alone), "gradients": [len(grads), len(alone)]}
    for name, setting in MODES.items():
        model = MixtureGPT(config, group, **setting).to(device)
        same = [is_same(step(model, seeds_of(rank)), expected) for _ in range(2)]
        found[name] = {
            "same": same,
            "spilled": manager.stats.spill_bytes,
            "lent": manager.engine.arena.stats().lent_bytes,
        }
    return found


def in_any_order(rank: int) -> dict[str, list[bool]]:
    """Copies that end early, at random or by a clock, on ranks that come to their layers at other times."""
    expected = step(MixtureGPT(CONFIG, dist.group.WORLD), seeds_of(rank))
    pauses = random.Random(rank)
    found = {}
    for executor in EXECUTORS[1:]:
        with offloading(executor, seed=rank):
            model = MixtureGPT(CONFIG, dist.group.WORLD, offload_modules=GROUP_NAMES)
            for mixture in model.mixtures():
                mixture.register_forward_pre_hook(lambda *_: time.sleep(pauses.random() * 0.02))
            found[executor] = [is_same(step(model, seeds_of(rank)), expected) for _ in range(2)]
    return found


def saved_kinds(rank: int) -> set[str]:
    """Classes of the tensors that a forward saves, with the probabilities applied to what comes back, which
    is saved for that."""
    found: set[str] = set()

    def pack(tensor: Tensor) -> Tensor:
        found.add(type(tensor).__name__)
        return tensor

    config = CONFIG.with_(probabilities="output")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        MixtureGPT(config, dist.group.WORLD)(text(rank))
    return found


# -- layouts that are not even --

TOKENS = (0, 5, 1, 30)


def uneven(rank: int, world: int, *, one_expert: bool) -> dict[str, Any]:
    """A layer alone, with other numbers of tokens on each rank, or with all of them for rank 0's experts."""
    group, config = dist.group.WORLD, CONFIG.with_(balance=None)
    torch.manual_seed(0)
    whole = Mixture(config)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.3)
    if one_expert:
        nn.init.zeros_(whole.router.gate.weight)  # ties: experts 0 and 1, of rank 0
    mine = Mixture(config, group)
    own = CONFIG.experts // world
    weights = whole.state_dict()
    for name in ("experts.w1_EGD", "experts.w2_EDF"):
        weights[name] = weights[name][rank * own : (rank + 1) * own]
    mine.load_state_dict(weights)
    x_TD, coefficients_TD = torch.randn(sum(TOKENS), SMALL.dim), torch.randn(sum(TOKENS), SMALL.dim)
    x_TD.requires_grad_()
    y_TD = whole(x_TD)
    (y_TD * coefficients_TD).sum().backward()
    first = sum(TOKENS[:rank])
    rows = slice(first, first + TOKENS[rank])
    x_own = x_TD.detach()[rows].requires_grad_()
    y_own = mine(x_own)
    (y_own * coefficients_TD[rows]).sum().backward()
    assert x_TD.grad is not None
    assert x_own.grad is not None
    expected = {name: grad[rank * own : (rank + 1) * own] / world for name, grad in grads_of(whole).items()}
    grads = {name: grad for name, grad in grads_of(mine).items() if name.startswith("experts.")}
    return {
        "near": torch.allclose(y_own, y_TD[rows], atol=1e-4)
        and torch.allclose(x_own.grad, x_TD.grad[rows], rtol=1e-3, atol=1e-3),
        "far": near(grads, {name: expected[name] for name in grads}),
        "rows": int(mine.router.tokens_E.sum()) if mine.router.tokens_E is not None else None,
    }


# -- what a recompute sends --


class Counting(TorchDispatchMode):
    """Calls by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def sent_in_a_backward(rank: int, world: int) -> dict[str, dict[str, int]]:
    """Collectives of a layer's backward: without a recompute, with one, and with one that replays."""
    layer = MixtureGPT(CONFIG.with_(layers=1), dist.group.WORLD).blocks["0"]
    rotation = torch.ones(SMALL.sequence, 4), torch.zeros(SMALL.sequence, 4)
    x = torch.randn(2, SMALL.sequence, SMALL.dim, requires_grad=True)
    again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    runs = {
        "plain": lambda: layer(x, rotation),
        "recomputed": lambda: checkpoint(layer, x, rotation, **again),
        "replayed": lambda: checkpoint(layer, x, rotation, context_fn=replaying_contexts(), **again),
    }
    found = {}
    for name, run in runs.items():
        y = run()
        with Counting() as counting:
            y.square().sum().backward()
        found[name] = {
            operator: counting.calls[operator] for operator in ("all_to_all_single", "all_gather_into_tensor")
        }
    return found


def order_of_a_forward(rank: int) -> list[str]:
    """Exchanges, activations, and reads of rows that are under way, in the order of one forward."""
    found: list[str] = []

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func).split(".")[1]
            if any(isinstance(each, AsyncCollectiveTensor) for each in args):
                found.append("read")
            elif name in ("all_to_all_single", "silu"):
                found.append(name)
            return func(*args, **(kwargs or {}))

    mixture = next(MixtureGPT(CONFIG, dist.group.WORLD).mixtures())
    with torch.no_grad(), Recording():
        mixture(torch.randn(2, SMALL.sequence, SMALL.dim))
    return found


def experts_on_the_host(rank: int, device: str = "cpu") -> dict[str, Any]:
    """All ranks share frozen experts, and each streams its own by the expert, beside the same without."""
    manager = configured(rank, device)
    models = [MixtureGPT(config_for(device), dist.group.WORLD).to(device) for _ in range(2)]
    for model in models:
        for parameter in expert_parameters(model):
            parameter.requires_grad_(False)
    with streams_from(64):
        handle = apply(models[0], weights="host", blocks="blocks.*")
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in models]
    same = []
    for number in range(4):
        grads = []
        for model, optimizer in zip(models, optimizers, strict=True):
            tokens = text(10 * rank + number).to(device)
            loss_of(model(tokens), tokens).backward()
            grads.append(grads_of(model))
            optimizer.step()
            optimizer.zero_grad()
        same.append(is_same(([], grads[0]), ([], grads[1])))
    streamed = len(by_expert(handle))
    handle.remove()
    return {"same": same, "streamed": streamed, "lent": manager.engine.arena.stats().lent_bytes}


# -- beside data parallelism and pipelines --


def new_groups(rank: int, sets: list[list[int]]) -> dist.ProcessGroup:
    """This rank's of several groups."""
    groups = [dist.new_group(ranks) for ranks in sets]
    return groups[next(number for number, ranks in enumerate(sets) if rank in ranks)]


def beside_ddp(rank: int, pair: dist.ProcessGroup, across: dist.ProcessGroup) -> dict[str, Any]:
    """Two ranks share the experts, twice; DistributedDataParallel has the rest, over all four."""
    config = CONFIG.with_(balance="bias")
    alone = one_ranks(config, [seeds_of(each) for each in range(4)])
    found: dict[str, Any] = {}
    expected = None
    for setting in ({}, {"offload_modules": GROUP_NAMES}, {"experts_mode": "both"}):
        model = MixtureGPT(config, pair, **setting)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names_of_this_rank(model))
        wrapped = DistributedDataParallel(model)
        model.zero_grad()
        for seed in seeds_of(rank):
            init_chunk_handler()
            loss_of(wrapped(text(seed)), text(seed)).backward()
        step_end()
        for parameter in expert_parameters(model):
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=across)
            parameter.grad /= across.size()
        grads = grads_of(model)
        if expected is None:
            expected = grads
            found["far"] = near(whole_of(model, grads, pair), alone)
            model.update_balance(dist.group.WORLD)
            biases = [mixture.router.bias_E.tolist() for mixture in model.mixtures()]
            everybodys: list[Any] = [None] * 4
            dist.all_gather_object(everybodys, biases)
            found["biases"] = everybodys
        else:
            found[str(setting)] = is_same(([], grads), ([], expected))
    return found


def beside_fsdp(rank: int, pair: dist.ProcessGroup, manager: Any) -> dict[str, Any]:
    """Two ranks share the experts, twice; FSDP2 shards them over the two that have the same, and the rest
    over all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    everyone = init_device_mesh("cpu", (4,))
    config = CONFIG.with_(balance=None)
    alone = one_ranks(config, [seeds_of(each) for each in range(4)])
    found: dict[str, Any] = {}
    expected = None
    for setting in (
        {},
        {"offload_modules": GROUP_NAMES},
        {"experts_mode": "both"},
        {"experts_mode": "save_on_cpu"},
    ):
        model = MixtureGPT(config, pair, **setting)
        step(model, seeds_of(rank), ordered=True)
        unsharded = manager.stats.saved_bytes
        model.zero_grad()
        own = set(names_of_this_rank(model))
        for block in model.blocks.values():
            fully_shard(block.mixture.experts, mesh=mesh["copies"])
            fully_shard(block, mesh=everyone)
        fully_shard(model, mesh=everyone)
        for seed in seeds_of(rank):
            init_chunk_handler()
            loss_of(model(text(seed)), text(seed)).backward()
        step_end()
        grads = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
        if expected is None:
            expected = grads
            whole = {}
            for name, grad in grads.items():
                parts = [torch.empty_like(grad) for _ in range(2)]
                dist.all_gather(parts, grad.contiguous(), group=pair)
                whole[name] = torch.cat(parts) if name in own else grad
            found["far"] = near(whole, alone)
        else:
            found[str(setting)] = is_same(([], grads), ([], expected))
            found[f"saved {setting}"] = (manager.stats.saved_bytes, unsharded)
    return found


def beside_stages(
    rank: int, pair: dist.ProcessGroup, across: dist.ProcessGroup, device: str = "cpu"
) -> dict[str, Any]:
    """Two stages, each shared by two ranks; every rank of a pair runs the same schedule."""
    found = {}
    for name in STAGED:
        spec = schedule_named(name)
        manager = configured(rank, device)
        virtual = spec.default_virtual_stages
        config = config_for(device, layers=2 * virtual, balance=None)
        stages = []
        for index in stages_of(spec, rank=across.rank(), ranks=2, virtual_stages=virtual):
            module = build_stage_module(
                config, index, 2 * virtual, group=pair, offload_modules=GROUP_NAMES
            ).to(device)
            given, made = stage_examples(
                config, index, 2 * virtual, batch=2, sequence=SMALL.sequence, dtype=torch.float32
            )
            stages.append(
                OffloadPipelineStage(
                    module,
                    index,
                    2 * virtual,
                    torch.device(device),
                    input_args=given,
                    output_args=made,
                    group=across,
                    announcer=manager,
                )
            )
        schedule = build_schedule(spec, stages, microbatches=4, loss_fn=loss_of)
        tokens = torch.cat([text(4 * pair.rank() + microbatch) for microbatch in range(4)]).to(device)
        results = []
        for offloads in (False, True, True):
            (manager.enable_offload if offloads else manager.disable_offload)()
            for stage in stages:
                stage.submod.zero_grad(set_to_none=True)
            schedule.step(
                *([tokens] if any(stage.is_first for stage in stages) else []),
                target=tokens if any(stage.is_last for stage in stages) else None,
                return_outputs=False,
            )
            manager.step_end()
            results.append({f"{each.stage_index}": grads_of(each.submod) for each in stages})
        whole_batch = one_ranks(config, [tuple(range(4)), tuple(range(4, 8))], device)
        alone = {key: grad / 4 for key, grad in whole_batch.items()}
        far, same = [], []
        for stage in stages:
            off, *on = (result[f"{stage.stage_index}"] for result in results)
            same += [is_same(([], each), ([], off)) for each in on]
            whole = whole_of(stage.submod, off, pair)
            far += near(whole, {key: alone[key] for key in whole})
        found[name] = {
            "same": same,
            "far": far,
            "spilled": manager.stats.spill_bytes,
            "lent": manager.engine.arena.stats().lent_bytes,
        }
    return found


def recomputed_by_apply(rank: int) -> dict[str, bool]:
    """Modes of offload.apply that recompute a model whose layers exchange rows."""
    group = dist.group.WORLD
    found = {}
    for mode in ("hidden_states", "selective", "auto"):
        configured(rank)
        expected = step(MixtureGPT(CONFIG, group), seeds_of(rank))
        model = MixtureGPT(CONFIG, group)
        handle = apply(model, mode=mode, blocks="blocks.*", min_numel=16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        same = []
        for _ in range(4):
            model.zero_grad()
            logits = [model(text(seed)) for seed in seeds_of(rank)]
            for seed, each in reversed(list(zip(seeds_of(rank), logits, strict=True))):
                loss_of(each, text(seed)).backward()
            same.append(is_same((logits, grads_of(model)), expected))
            optimizer.step()
        handle.remove()
        found[mode] = all(same)
    return found


def rank_main(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {"all": shared_by_all(rank, dist.group.WORLD)}
    found["any order"] = in_any_order(rank)
    found["order"] = order_of_a_forward(rank)
    found["kinds"] = saved_kinds(rank)
    found["sent"] = sent_in_a_backward(rank, world)
    found["uneven"] = uneven(rank, world, one_expert=False)
    found["one expert"] = uneven(rank, world, one_expert=True)
    pair, across = new_groups(rank, [[0, 1], [2, 3]]), new_groups(rank, [[0, 2], [1, 3]])
    configured(rank)
    found["ddp"] = beside_ddp(rank, pair, across)
    found["fsdp"] = beside_fsdp(rank, pair, configured(rank))
    found["apply"] = recomputed_by_apply(rank)
    found["stages"] = beside_stages(rank, pair, across)
    found["weights"] = experts_on_the_host(rank)
    return found


# -- a rank that fails --


def failing_main(rank: int, world: int) -> None:
    """Rank 1 raises between the rows' arrival and their return, in the second step."""
    model = MixtureGPT(CONFIG, dist.group.WORLD)
    step(model, seeds_of(rank))
    if rank == 1:

        def fail(*_arguments: Any) -> None:
            raise ValueError("an expert of rank 1 cannot go on")

        next(model.mixtures()).experts.register_forward_pre_hook(fail)
    step(model, seeds_of(rank))

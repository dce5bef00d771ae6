"""What each rank of a launch does in tests/integration/test_moe_ranks.py: mixtures whose experts four ranks
share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe import GROUP_NAMES, MixtureConfig, MixtureGPT, names_of_this_rank
from offload import OffloadConfig, configure
from tests.unit.moe.mixtures import SMALL, grads_of, loss_of, step, text

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
MODES: dict[str, dict[str, Any]] = {
    **{name: {"offload_modules": names} for name, names in COMBINATIONS.items()},
    **{name: {"experts_mode": name} for name in ("save_on_cpu", "checkpoint", "both")},
    "recompute": {"recompute": True},
}


def configured(rank: int) -> Any:
    limits = OffloadConfig(
        min_offloaded_tensor_size=16,
        piece_bytes=2048,
        max_spilling_bytes=8192,
        host_reserve_bytes=16 << 20,
        pp_rank=rank,
    )
    return configure(limits, device="sim", print_summary=False)


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


def one_ranks(config: MixtureConfig, ranks: int, seeds: list[tuple[int, ...]]) -> dict[str, Tensor]:
    """The mean of what the ranks' losses give, of the whole model in one process; the auxiliary loss sees all
    of a microbatch's tokens at once, as it does over ranks."""
    whole = MixtureGPT(config)
    for microbatch in zip(*seeds, strict=True):
        tokens = torch.cat([text(seed) for seed in microbatch])
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


def shared_by_all(rank: int, world: int) -> dict[str, Any]:
    """Four ranks share the experts: each setting beside none, and none beside one rank."""
    manager = configured(rank)
    group = dist.group.WORLD
    manager.disable_offload()
    plain = MixtureGPT(CONFIG, group)
    expected = step(plain, seeds_of(rank))
    grads = whole_of(plain, expected[1], group)
    alone = one_ranks(CONFIG, world, [seeds_of(each) for each in range(world)])
    manager.enable_offload()
    found: dict[str, Any] = {"far": near(grads, alone), "gradients": [len(grads), len(alone)]}
    for name, setting in MODES.items():
        model = MixtureGPT(CONFIG, group, **setting)
        same = [is_same(step(model, seeds_of(rank)), expected) for _ in range(2)]
        found[name] = {
            "same": same,
            "spilled": manager.stats.spill_bytes,
            "lent": manager.engine.arena.stats().lent_bytes,
        }
    return found


def rank_main(rank: int, world: int) -> dict[str, Any]:
    return {"all": shared_by_all(rank, world)}

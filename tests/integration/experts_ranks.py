"""What each rank runs for test_apply_experts_ranks.py: a mixture of transformers that is replicated or
sharded, trained with `offload.apply` and without, and compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.compat import torchtitan
from tests.integration.apply_ranks import new_manager, same
from tests.integration.test_apply_experts import build, other_logits_in_a_recompute
from tests.loops import trained

STEPS = 3
KEYS = {
    "enable_activation_offload": True,
    "activation_offload_min_tensor_size": 1,
    "enable_cpu_offload": True,
}
NO_TITAN = ("groups", True, "hidden_states", "selective", "auto")
TITAN = ("save_on_cpu", "checkpoint", "both")


def _sharded(policy: OffloadPolicy) -> Callable[[Any, DeviceMesh], nn.Module]:
    def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        return model  # type: ignore[no-any-return]

    return shard


SPREADS: dict[str, Callable[[Any, DeviceMesh], nn.Module]] = {
    "ddp": lambda model, mesh: DistributedDataParallel(model),
    "fsdp": _sharded(OffloadPolicy()),
    "fsdp, parameters on the host": _sharded(CPUOffloadPolicy(pin_memory=False)),
}


def _train(model: nn.Module, rank: int) -> list[Tensor]:
    """Gradients of each step and the last weights, as far as this rank has them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)

    def backward(step: int) -> None:
        for length in (9, 6):
            tokens = torch.randint(0, 61, (2, 1, length), generator=generator)
            model(input_ids=tokens[0], labels=tokens[1]).loss.backward()

    return trained(model, optimizer, STEPS, backward)


def _built() -> tuple[Any, list[int]]:
    """A mixture whose router says something else in a recompute, and how often it did."""
    model = build("Qwen3Moe", "grouped_mm")
    return model, other_logits_in_a_recompute(model, -2.2)


def rank_main(rank: int, world: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, Any] = {}
    for spread, distribute in SPREADS.items():
        plain = _train(distribute(_built()[0], mesh), rank)
        for mode in (*NO_TITAN, *TITAN):
            with new_manager() as manager:
                model, recomputed = _built()
                if mode in TITAN:
                    torchtitan.settings({**KEYS, "activation_offload_mode": mode}).apply(model)
                else:
                    offload.apply(model, mode=mode, min_numel=1)
                ours = _train(distribute(model, mesh), rank)
                found[f"{spread}, {mode}"] = {
                    "bitwise": same(ours, plain),
                    "recomputed": len(recomputed),
                    "spill_bytes": manager.stats.spill_bytes,
                    "alive": len(list(manager.living_blocks())),
                }
    return found

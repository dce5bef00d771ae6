"""FSDP2: weights are sharded over ranks, and what each block saves waits on the host. Gathered weights stay
where FSDP puts them.

    torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import offload


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def main(steps: int = 3) -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    torch.manual_seed(0)  # the same weights on each rank, before they are sharded
    model = nn.Sequential(*[Block(256) for _ in range(3)]).to(kind)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    handle = offload.apply(model, min_numel=100_000, device_limit="6MB")  # after fully_shard
    torch.manual_seed(1 + dist.get_rank())
    for step in range(steps):
        x = torch.randn(512, 256, device=kind)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()}, step {step}: loss {loss.item():.4f}")
    print(f"rank {dist.get_rank()}: {handle.report()}")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("launch it: torchrun --nproc-per-node 2 examples/fsdp2.py")
    dist.init_process_group()
    main()
    dist.destroy_process_group()

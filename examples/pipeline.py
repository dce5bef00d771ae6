"""A model of your own under a schedule of torch.distributed.pipelining; each rank keeps its saved tensors
under a limit.

    torchrun --nproc-per-node 2 examples/pipeline.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import offload
from offload.pipelining import OffloadPipelineStage  # the same as parallel.OffloadPipelineStage

WIDTH, ROWS, MICROBATCHES = 256, 512, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def main(steps: int = 3) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if gpu else torch.device("cpu")
    torch.manual_seed(rank)
    model = nn.Sequential(*[Block() for _ in range(3)]).to(device)  # this rank's part

    handle = offload.apply(model, device_limit="12MB", min_numel=100_000)
    example = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)  # one microbatch
    stage = OffloadPipelineStage(model, rank, ranks, device, input_args=example, output_args=example)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    stage.follow(schedule)  # what is read next is known from step 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for step in range(steps):
        batch = torch.randn(MICROBATCHES * ROWS, WIDTH, device=device)
        losses = []
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}")
    print(f"rank {rank}: {handle.report()}")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("launch it: torchrun --nproc-per-node 2 examples/pipeline.py")
    dist.init_process_group()
    main()
    dist.destroy_process_group()

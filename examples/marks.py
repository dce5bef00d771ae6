"""Marks: groups of saved tensors that begin and end where the forward says so; each rank's bytes in a table.

torchrun --nproc-per-node 2 examples/marks.py
"""

import torch
import torch.distributed as dist
from torch import nn

from offload import group_commit, group_start, init_chunk_handler, offload_hooks, step_end

if dist.is_torchelastic_launched():  # by torchrun
    dist.init_process_group()
rank = dist.get_rank() if dist.is_initialized() else 0
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
layers = nn.ModuleList(
    nn.ModuleDict({"up": nn.Linear(256, 1024), "act": nn.GELU(), "down": nn.Linear(1024, 256)})
    for _ in range(3)
).to(device)

for _ in range(3):
    init_chunk_handler()  # a forward begins
    y = torch.randn(4096 + 1024 * rank, 256, device=device)
    for parts in layers:
        for name, part in parts.items():
            y = group_start(y, name)  # opens a group; returns y itself
            with offload_hooks():
                y = part(y)  # what autograd saves in here belongs to the group
            y = group_commit(y, name)  # its bytes are copied out beside the compute
    y.square().mean().backward()  # they are copied back ahead of their readers
    step_end()  # once a step, when gradients are final

if dist.is_torchelastic_launched():
    dist.destroy_process_group()

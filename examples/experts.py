"""A mixture whose experts two ranks share: what the experts save waits on the host, and so does attention's
output. DistributedDataParallel has the rest of the model.

    torchrun --nproc-per-node 2 examples/experts.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.moe import MixtureConfig, MixtureGPT, names_of_this_rank

ROWS, SEQUENCE = 4, 256
SHAPE = MixtureConfig(
    dim=128, expert_hidden=256, experts=8, top_k=2, layers=4, sequence=SEQUENCE, balance="bias"
)


def main(steps: int = 6) -> None:
    rank, gpu = dist.get_rank(), torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if gpu else torch.device("cpu")
    limits = offload.OffloadConfig(min_offloaded_tensor_size=100_000, device_limit_bytes=16_000_000)
    offload.configure(limits, device="cuda" if gpu else "sim")

    # with experts_mode="both" in place of the last two, experts are recomputed and their input alone leaves
    marks = ("core_attn", "expert_fc1", "moe_act")
    model = MixtureGPT(SHAPE, dist.group.WORLD, offload_modules=marks).to(device)
    # an expert's gradient is already of all ranks' tokens
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names_of_this_rank(model))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + rank)
    for step in range(steps):
        first = torch.randint(256, (ROWS, 1), device=device)
        text = (first + torch.arange(SEQUENCE + 1, device=device)) % 256  # the next token is the next number
        offload.init_chunk_handler()  # a forward begins
        logits = wrapped(text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        offload.step_end()  # once a step, when gradients are final
        optimizer.step()
        optimizer.zero_grad()
        model.update_balance()  # rarely chosen experts are chosen more often
        print(f"rank {rank}, step {step}: loss {loss.item():.4f}")
    print(f"rank {rank}: {offload.report()}")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("launch it: torchrun --nproc-per-node 2 examples/experts.py")
    dist.init_process_group()
    main()
    dist.destroy_process_group()

"""A model that is larger than the device: LoRA, and full training, with weights that wait on the host.

The model is built on meta, so nothing has it twice: `load_weights` brings one weight after the other to
pinned memory, and each block's come to the device before it computes. On a GPU torch is allowed no more than
`device_gb`, which is less than the weights. Full training steps each weight in the backward, as soon as its
gradient is final, by torch's Adafactor, so that neither gradients nor state add up. Without a GPU all is
small, and the peak is of streamed weights alone.

    python examples/larger_than_device.py
"""

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload


class Adapted(nn.Linear):
    """A linear layer with an adapter of rank 8."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        if rank:
            self.weight.requires_grad_(False)
            self.lora_a = nn.Parameter(torch.empty(rank, inputs))
            self.lora_b = nn.Parameter(torch.empty(outputs, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + x @ self.lora_a.T @ self.lora_b.T if hasattr(self, "lora_a") else y


class Block(nn.Module):
    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, elementwise_affine=False)
        self.up, self.down = Adapted(width, 4 * width, rank), Adapted(4 * width, width, rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int, width: int, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, rank) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Values:
    """Random ones, made when they are asked for: in place of a folder of safetensors files."""

    def __init__(self, model: nn.Module) -> None:
        self.like = model.state_dict()
        self.made: dict[torch.Size, torch.Tensor] = {}  # one for each shape: that is quicker

    def keys(self):
        return self.like.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        shape = self.like[name].shape
        if shape not in self.made:
            self.made[shape] = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
        return self.made[shape].to(self.like[name].dtype)


def optimizer_of(model: nn.Module, rank: int) -> torch.optim.Optimizer | None:
    """AdamW of the adapters; of a whole model, a step in the backward for each weight, and None."""
    if rank:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for parameter in model.parameters():
        optimizer = torch.optim.Adafactor([parameter], lr=1e-3)

        def step(parameter: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    return None


def train(model: nn.Module, rank: int, device: str, tokens: int, steps: int) -> list[float]:
    optimizer = optimizer_of(model, rank)
    width, dtype = model.layers[0].up.in_features, model.layers[0].up.weight.dtype
    losses = []
    for step in range(steps):
        x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(step)).to(device, dtype)
        loss = (model(x) - x.roll(1, 0)).float().square().mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def build(layers: int, width: int, rank: int, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        return Model(layers, width, rank).to(dtype)


def equals_plain(width: int, rank: int, device: str, dtype: torch.dtype) -> bool:
    """Whether three small layers, which fit, have the bits of a training without `apply`."""
    model = build(3, width, rank, dtype)
    offload.load_weights(model, Values(model))
    plain = copy.deepcopy(model).to(device)
    handle = offload.apply(model, weights="host", device=device)
    ours, its = (train(each, rank, device, 64, 3) for each in (model, plain))
    handle.remove()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return ours == its and all(torch.equal(mine, other.cpu()) for mine, other in pairs)


def main(
    layers: int | None = None,
    width: int | None = None,
    device_gb: float | None = None,
    tokens: int | None = None,
    steps: int = 3,
) -> list[dict]:
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    layers, width = layers or (64 if gpu else 8), width or (4096 if gpu else 512)
    total = int(1e9 * (device_gb or (6 if gpu else 0.02)))
    if gpu:
        torch.cuda.set_per_process_memory_fraction(total / torch.cuda.mem_get_info()[1])
    rows = []
    for training, rank in (("LoRA", 8), ("full", 0)):
        bits = equals_plain(512, rank, device, dtype)
        model = build(layers, width, rank, dtype)
        weights = sum(parameter.nbytes for parameter in model.parameters())
        handle = offload.apply(model, weights="host", device=device)
        offload.load_weights(model, Values(model))
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        losses = train(model, rank, device, tokens or (4096 if gpu else 64), steps)
        print(f"{training}: losses {', '.join(f'{loss:.4f}' for loss in losses)}\n{handle.report()}")
        peak = torch.cuda.max_memory_allocated() if gpu else handle.weights.limit_bytes
        rows.append({"training": training, "weights": weights, "total": total, "peak": peak, "bits": bits})
        handle.remove(device="cpu")
    print(f"{'GB':10}{'weights':>10}{'device':>10}{'peak':>10}  bits of plain torch, of a model that fits")
    for row in rows:
        sizes = "".join(f"{row[key] / 1e9:10.3f}" for key in ("weights", "total", "peak"))
        print(f"{row['training']:10}{sizes}  {'equal' if row['bits'] else 'DIFFERENT'}")
    if gpu:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return rows


if __name__ == "__main__":
    main()

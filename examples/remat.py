"""torch_remat says what of a block is recomputed and what is saved, call by call; what it saves leaves.

    pip install torch_remat
    python examples/remat.py

It packs what a checkpoint keeps by the saved-tensor hooks around it, which are offload's here.
"""

import torch
import torch_remat as remat
from torch import nn

import offload


class Block(nn.Module):
    """The norms are recomputed; the attention's input and the wide activations are saved, and leave."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def body(self, x):
        attended = remat.region(self.attention, "attention", recompute=False)(self.norm(x))
        remat.recompute_needs_tensor(attended)
        x = x + attended
        wide = remat.region(self.mlp, "mlp", recompute=False)(x)
        remat.recompute_needs_tensor(wide)
        return x + wide

    def forward(self, x):
        return remat.checkpoint(region_name="block")(self.body)(x)


def main(steps: int = 4, width: int = 256, offloaded: bool = True) -> nn.Module:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(*[Block(width) for _ in range(4)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = None
    if offloaded:
        handle = offload.apply(model, mode="groups", device_limit="20MB", min_numel=100_000)
    for step in range(steps):
        x = torch.randn(1024, width, device=device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    if handle is not None:
        print(handle.report())
        handle.remove()
    return model


if __name__ == "__main__":
    main()

"""A model and a loop of your own: one line offloads it.

python examples/own_loop.py
"""

import torch
from torch import nn

import offload


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(steps: int = 4) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(*[Block(256) for _ in range(4)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # host_reserve: what a step moves is pinned now; else the first steps pin beside their work
    handle = offload.apply(model, device_limit="20MB", host_reserve="64MB", min_numel=100_000)
    print(handle)
    for step in range(steps):
        x = torch.randn(1024, 256, device=device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    print(handle.report())
    handle.remove()  # the model is as it was


if __name__ == "__main__":
    main()

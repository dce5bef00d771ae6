"""Images of several sizes through a model with convolutions, attention and skip connections: saved tensors
leave only where memory is short.

    python examples/watermark.py
"""

import torch
from torch import nn
from torch.nn import functional

import offload


class Stage(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x):
        x = x + functional.silu(self.conv(self.norm(x)))
        q, k, v = self.qkv(x).flatten(2).transpose(1, 2).chunk(3, dim=2)
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x + self.out(seen.reshape(x.shape))


class Denoiser(nn.Module):
    """Down, through the middle, and up again, with a skip connection at each size."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.into = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Stage(width) for _ in range(depth))
        self.middle = Stage(width)
        self.up = nn.ModuleList(Stage(width) for _ in range(depth))
        self.out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x):
        x, skips = self.into(x), []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for stage in self.up:
            x = functional.interpolate(x, scale_factor=2.0) + skips.pop()
            x = stage(x)
        return self.out(x)


def main(steps: int = 6, high_mb: float = 20.0) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Denoiser().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # without a GPU the saved bytes that the engine knows are what the marks are compared with
    runtime = offload.ActivationRuntime(
        vram_high_watermark_mb=high_mb, vram_low_watermark_mb=0.9 * high_mb, telemetry_enabled=False
    )
    for step in range(steps):
        size = (32, 24, 40)[step % 3]
        image = torch.randn(2, 3, size, size, device=device)
        noise = torch.randn_like(image)
        runtime.step_begin(step)
        with runtime.managed_forward():
            loss = (model(image + noise) - noise).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done = runtime.step_end()
        print(
            f"step {step}, {size} pixels: loss {loss.item():.3f}, {done.spill_bytes / 1e6:.2f} MB left in "
            f"{done.activations_spilled} of {done.activations_saved} saved tensors"
        )
    runtime.close()


if __name__ == "__main__":
    main()

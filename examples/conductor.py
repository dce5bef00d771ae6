"""Three kinds at once on one link: frozen weights stream, what blocks save waits on the host, and so does the
state of the head's optimizer. One arbiter answers for all of them.

    python examples/conductor.py
"""

from typing import Any

import torch
from torch import nn

import offload
from offload.conductor import ConductorConfig

ROWS, WIDTH, CLASSES = 128, 512, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.up, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block().requires_grad_(False) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))  # trained, before the frozen blocks
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main(steps: int = 4) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Model().to(device)
    # a line a step would go to telemetry_file; without it the last one is at hand all the same
    config = ConductorConfig(vram_soft_cap_mb=900, vram_hard_cap_mb=1000, telemetry_interval=0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    handle = offload.apply(
        model,
        "groups",
        weights="host",
        optimizer=optimizer,
        device_limit="3MB",
        min_numel=1,
        conductor=config,
    )

    for step in range(steps):
        x = torch.randn(ROWS, WIDTH, device=device)
        labels = (x[:, 0] > 0).long()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")

    conductor = handle.conductor
    assert conductor is not None
    line = conductor.telemetry.last
    assert line is not None
    print(f"answers of the conductor: {line['grant_count']} granted, {line['deny_count']} denied")
    print(handle.report())
    handle.remove()
    return line


if __name__ == "__main__":
    main()

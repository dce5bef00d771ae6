#!/usr/bin/env python3
"""A report's page of a small model, and a picture of it for docs/report.md.

    python scripts/report_page.py report.html                            the page, with a traced step
    python scripts/report_page.py report.html --picture docs/report.png  and its first screen, by Chromium

It takes a GPU where there is one, and else the simulated device.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import bench  # noqa: F401
import offload

WIDTH, BLOCKS, ROWS, STEPS = 256, 6, 4096, 8
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
_COLORS_OF_FILE = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.act, self.down = nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return y


def save_page(path: Path, steps: int = STEPS) -> offload.Report:
    """Train, trace the last step, and write the page. Returns the report."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(2):  # microbatches
            model(torch.randn(ROWS, WIDTH, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    handle = offload.apply(model, mode="auto", device_total="110MB", min_numel=1024)
    for _ in range(steps - 1):
        step()
    with offload.tracing() as trace:
        step()
    report = handle.report()
    report.save(path, trace=trace)
    handle.remove()
    return report


def take_picture(page: Path, picture: Path) -> None:
    """The first screen of a page in a window of 1,400 pixels."""
    from PIL import Image

    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"a picture needs one of {', '.join(BROWSERS)}, none of which is installed")
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1400,1220"]
    command = [browser, *options, f"--screenshot={picture.resolve()}", page.resolve().as_uri()]
    subprocess.run(command, check=True, capture_output=True)
    Image.open(picture).convert("RGB").quantize(_COLORS_OF_FILE).save(picture, optimize=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="HTML to write")
    parser.add_argument("--picture", type=Path, help="PNG to write")
    parsed = parser.parse_args(arguments)
    print(save_page(parsed.page).verdict)
    if parsed.picture is not None:
        take_picture(parsed.page, parsed.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())

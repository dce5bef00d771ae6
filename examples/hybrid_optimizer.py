"""Optimizer state on the host, with what a real loop has: a scheduler, clipping, averaged weights, saving and
resuming. The resumed run has the bits of one that was never interrupted.

    python examples/hybrid_optimizer.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import offload

STEPS = 6


class Training:
    """All that a run has to save."""

    def __init__(self) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
        self.model = nn.Sequential(*blocks).to(device)
        self.handle = offload.apply(self.model, min_numel=100_000, device_limit="2MB")
        self.optimizer = offload.HybridDeviceOptimizer(
            self.model.parameters(), offload_fraction=1.0, lr=1e-3, overlap="forward", model=self.model
        )
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=STEPS)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            torch.manual_seed(step)
            x = torch.randn(512, 256, device=next(self.model.parameters()).device)
            loss = (self.model(x) - x).square().mean()
            loss.backward()
            self.optimizer.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.average.update_parameters(self.model)
            print(f"step {step}: loss {loss.item():.6f}, lr {self.scheduler.get_last_lr()[0]:.2e}")

    def parts(self) -> dict:
        return {name: vars(self)[name] for name in ("model", "optimizer", "scheduler", "average")}

    def save(self, path: Path) -> None:
        torch.save({name: part.state_dict() for name, part in self.parts().items()}, path)

    def load(self, path: Path) -> None:
        saved = torch.load(path)
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])

    def close(self) -> None:
        self.optimizer.close()
        self.handle.remove()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = Training()
        whole.run(0, STEPS // 2)
        whole.save(Path(folder) / "checkpoint.pt")
        whole.run(STEPS // 2, STEPS)
        print(whole.handle.report())
        whole.close()

        print("resumed:")
        resumed = Training()
        resumed.load(Path(folder) / "checkpoint.pt")
        resumed.run(STEPS // 2, STEPS)
        resumed.close()

    pairs = zip(whole.average.state_dict().values(), resumed.average.state_dict().values(), strict=True)
    print("averaged weights bitwise equal:", all(torch.equal(one, other) for one, other in pairs))


if __name__ == "__main__":
    main()

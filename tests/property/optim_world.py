"""What a random training program acts on: a model of uneven parameters, its optimizers, and what was seen.

One invariant: a world is made twice from the same numbers, for torch's optimizer and for the hybrid one, and
nothing in it but `make` differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

WIDTH = 9
MASTER = "master_param"


def batch(number: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 + number)).to(dtype)


class Layers(nn.Module):
    """Twelve parameters of 0 to 660 elements: in modules, in none, tied, read past their modules, of four
    dimensions, unused."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 20)
        self.middle = nn.Sequential(nn.Linear(20, 33, bias=False), nn.Tanh())
        self.conv = nn.Conv2d(2, 3, 2, bias=False)
        self.head = nn.Linear(33, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.spare = nn.Linear(5, 3)
        self.pair = nn.ParameterList([torch.empty(2, 3), torch.empty(2, 3)])
        self.late: nn.Module | None = None
        self.to(dtype)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: Tensor, how: int = 0) -> Tensor:
        """how: 1 reads a weight before its module's call, 2 past it, 3 tied, 4 uses the spare layer."""
        if how == 1:
            gram = torch.tanh(self.middle[0].weight.t() @ self.middle[0].weight)
            inner = self.middle(self.first(x) @ gram)
        elif how == 2:
            inner = torch.tanh(F.linear(self.first(x), self.middle[0].weight))
        else:
            inner = self.middle(self.first(x))
        inner = inner * (1 + self.pair[0].sum() - self.pair[1].square().sum())
        images = inner[:, :18].reshape(-1, 2, 3, 3)
        y = self.head(inner) * self.scale + self.conv(images).sum((1, 2, 3)).unsqueeze(1)
        if how == 3:
            y = y + F.linear(torch.tanh(y), self.first.weight).sum(1, keepdim=True)
        if how == 4:
            y = y + self.spare(y[:, :5]).sum(1, keepdim=True)
        if self.late is not None:
            y = y + self.late(x)
        return y


class World:
    """make: an optimizer of a list of parameters or param groups, with further arguments. seen: bits that
    must be equal, each with its name."""

    def __init__(self, make: Callable[..., Optimizer], dtype: torch.dtype, optimizers: str) -> None:
        self.dtype = dtype
        self.model = Layers(dtype)
        self.make = make
        every = list(self.model.parameters())
        lists = {
            "one": [every],
            "groups": [[{"params": every[:4], "weight_decay": 0.3}, {"params": every[4:]}]],
            "disjoint": [every[::2], every[1::2]],
            "sharing": [every[:7], every[3:]],
        }[optimizers]
        self.optimizers = [make(self.model, each) for each in lists]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        self.seen: list[tuple[str, Tensor]] = []
        self.kept: dict[str, Any] = {}
        self.number = 0

    def see(self, name: str, value: Tensor | float) -> None:
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        self.seen.append((f"action {self.number}, {name}", tensor))

    def see_weights(self, name: str = "weight") -> None:
        for key, parameter in self.model.named_parameters():
            self.see(f"{name} {key}", parameter)

    def with_gradient(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                yield parameter, parameter.grad

    def trained(self) -> list[nn.Parameter]:
        return [each for each in self.model.parameters() if each.numel() and each.requires_grad]

    def optimizer(self, number: int) -> Optimizer:
        return self.optimizers[number % len(self.optimizers)]

    def loss(self, number: int, how: int = 0) -> Tensor:
        return self.model(batch(number, self.dtype), how).float().square().mean()

    def attempt(self, name: str, run: Callable[[], Any]) -> None:
        """What may be refused, by both in the same way: torch's scaler asks for gradients, for one."""
        try:
            run()
        except (AssertionError, RuntimeError, ValueError, KeyError) as error:
            if type(error).__module__.startswith("offload"):
                raise
            self.see(f"{name} refused", 1.0)


class Mastered(Optimizer):
    """What the hybrid optimizer promises for low-precision weights with masters, in torch's own words.

    Each step is a step of `cls` on float32 copies, then rounded. An element whose bits its master does not
    round to was written by somebody: it wins.
    """

    def __init__(self, params: Any, cls: type[Optimizer], **options: Any) -> None:
        self.cls = cls
        self.masters: dict[Tensor, Tensor] = {}  # outlive moments that are cleared
        super().__init__(params, {**cls([torch.zeros(1)], **options).defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        masters: dict[Tensor, nn.Parameter] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                weight = parameter.detach()
                master = self.state[parameter].get(MASTER, self.masters.get(parameter, weight.float()))
                kept = master.to(weight.dtype).view(torch.int16) == weight.view(torch.int16)
                master = torch.where(kept, master, weight.float())
                masters[parameter] = nn.Parameter(master)
                # of the weight's strides, as the master is: see tests/optim_pair.py
                masters[parameter].grad = torch.empty_like(master).copy_(parameter.grad)
        groups = [
            {**group, "params": [masters[each] for each in group["params"] if each in masters]}
            for group in self.param_groups
        ]
        inner = self.cls([group for group in groups if group["params"]] or [torch.zeros(1)])
        for parameter, master in masters.items():
            inner.state[master] = {k: v for k, v in self.state[parameter].items() if k != MASTER}
        if masters:
            inner.step()
        for parameter, master in masters.items():
            self.masters[parameter] = master.detach()
            self.state[parameter] = {**inner.state[master], MASTER: master.detach()}
            parameter.copy_(master)
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        for place, state in state_dict["state"].items():  # torch's would round to the parameter's type
            self.state[every[place]] = {key: value.clone() for key, value in state.items()}
        self.masters.update((each, state[MASTER]) for each, state in self.state.items() if MASTER in state)

"""An interrupt in a step left it torn, and going on.

Ctrl-C inside `step()` left 4 of 48 parameters new and 46 that still changed while a checkpoint was written;
in `submit` it left a bucket that nobody would step, and `close()` and the exit waited for it for ever. Here
an interrupt falls before every thirteenth line that the optimizer runs in the training thread.
"""

from __future__ import annotations

import linecache
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadEngine
from offload.compat.tensor_pool import TensorPool
from offload.compat.tensors import _Loan
from offload.device._cuda_memory import PinnedMemory
from offload.device._sim_bytes import TrackedBytes
from offload.device.cuda import _CudaEvent
from offload.device.sim import SimDevice
from offload.errors import OffloadError
from offload.optim import HybridDeviceOptimizer
from offload.saved.handles import Record
from offload.transfer.block import WeakStorage
from tests.optim_pair import copies

STRIDE = 13
"""Lines from one place to the next: each test has another first one."""


class Interrupt:
    """Raises KeyboardInterrupt before the line of that number, counted over the optimizer's files."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        return self._line if "/offload/optim/" in name or name.endswith("/offload/params/worker.py") else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        # the end of a with statement is an event of its line too: signals come neither there nor to `pass`
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith(("with ", "pass")):
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line

    def run(self, call: Callable[[], Any]) -> bool:
        """Whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def made(options: dict[str, Any], steps: int = 1) -> tuple[nn.Module, HybridDeviceOptimizer]:
    """After so many steps, and with the gradients of another one."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(24, 24) for _ in range(3)])
    engine = OffloadEngine(device=SimDevice(executor="late"))
    given = {"lr": 0.1, "bucket_bytes": 2048, "engine": engine, **options}
    if given.get("overlap") == "forward":
        given["model"] = model
    optimizer = HybridDeviceOptimizer(model.parameters(), **given)
    for number in range(steps + 1):
        if number:
            optimizer.step()
            optimizer.zero_grad()
        model(torch.full((2, 24), 1.0 + number)).square().sum().backward()
    optimizer.synchronize_parameters()
    return model, optimizer


def ends(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it hangs"


CONFIGURATIONS: list[dict[str, Any]] = [
    {"offload_fraction": 1.0, "cpu_share": 1.0},
    {"offload_fraction": 1.0, "cpu_share": 0.0},
    {"offload_fraction": 0.5, "cpu_share": 0.5, "overlap": "forward"},
    {"offload_fraction": 0.7, "cpu_share": 0.5, "overlap_cpu_optimizer_d2h_h2d": False, "fused": True},
    {"offload_fraction": 1.0, "cpu_optimizer_cls": torch.optim.RMSprop},
]


@pytest.mark.parametrize("first", range(len(CONFIGURATIONS)))
def test_an_interrupted_step_is_whole_or_says_that_it_is_torn_and_is_over(first: int) -> None:
    options = CONFIGURATIONS[first]
    model, optimizer = made(options, steps=2)
    new = copies(model)
    optimizer.close()
    model, optimizer = made(options)
    old, counter = copies(model), Interrupt(-1)
    counter.run(optimizer.step)
    optimizer.synchronize_parameters()
    optimizer.close()
    assert not all(map(torch.equal, old, new))

    ended = {"old": 0, "new": 0, "torn": 0}
    for at in range(1 + first % STRIDE, counter.lines + 1, STRIDE):
        model, optimizer = made(options)
        assert Interrupt(at).run(optimizer.step)
        if options.get("overlap") != "forward":
            found = [parameter.detach().clone() for parameter in model.parameters()]
            time.sleep(0.002)
            assert all(map(torch.equal, found, copies(model))), f"it goes on after an interrupt at line {at}"
        ended[how_it_ended(model, optimizer, old, new, at)] += 1
        ends(optimizer.close)
    assert ended["old"]
    assert ended["new"]
    if options.get("cpu_share") in (0.0, 1.0):  # nothing but workers' buckets
        assert not ended["torn"], ended


def how_it_ended(
    model: nn.Module, optimizer: HybridDeviceOptimizer, old: list[Tensor], new: list[Tensor], at: int
) -> str:
    if optimizer._steps.torn:
        for call in (optimizer.state_dict, optimizer.step):
            with pytest.raises(OffloadError, match=r"step\(\) was broken off by an exception"):
                call()
        return "torn"
    saved = optimizer.state_dict()
    for name, weights, count in (("old", old, 1), ("new", new, 2)):
        if all(map(torch.equal, copies(model), weights)):
            counts = {float(entry["step"]) for entry in saved["state"].values()}
            assert counts == {count}, f"weights of step {count}, counts {counts}: interrupted at line {at}"
            return name
    raise AssertionError(f"weights of two steps, and nobody says so: interrupted at line {at}")


class Closes(torch.optim.Optimizer):
    """Counts in its group; its closure finds the weights moved."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1.0)
        closure()
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])


def test_an_interrupted_step_of_a_class_with_its_closure_is_whole_or_says_that_it_is_torn() -> None:
    def run(at: int) -> tuple[nn.Module, HybridDeviceOptimizer, Interrupt, bool]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, Closes, lr=0.1)
        interrupt = Interrupt(at)

        def closure() -> None:
            optimizer.zero_grad()
            with torch.enable_grad():
                model(torch.ones(2, 8)).square().sum().backward()

        return model, optimizer, interrupt, interrupt.run(lambda: optimizer.step(closure))

    model, _, counter, _ = run(-1)
    new = copies(model)
    torch.manual_seed(0)
    old = copies(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    ended = {"old": 0, "new": 0, "torn": 0}
    for at in range(1, counter.lines + 1, STRIDE - 2):
        model, optimizer, _, interrupted = run(at)
        assert interrupted
        if optimizer._steps.torn:
            ended["torn"] += 1
            continue
        count = optimizer.state_dict()["param_groups"][0]["count"]
        assert all(map(torch.equal, copies(model), new if count else old)), f"interrupted at line {at}"
        ended["new" if count else "old"] += 1
        optimizer.close()
    assert ended["old"]
    assert ended["torn"]


def test_training_goes_on_after_an_interrupt_and_after_a_load() -> None:
    options = {"offload_fraction": 1.0, "cpu_share": 1.0}
    model, optimizer = made(options)
    saved = {key: value.clone() for key, value in model.state_dict().items()}, optimizer.state_dict()
    optimizer.step()
    expected = copies(model)
    optimizer._steps.torn = True  # as an interrupt leaves it in the class's own step
    with pytest.raises(OffloadError, match="Load the last state dict"):
        optimizer.step()
    optimizer.load_state_dict(saved[1])
    model.load_state_dict(saved[0])
    optimizer.step()
    assert all(map(torch.equal, copies(model), expected))
    optimizer.close()


def test_an_interrupt_in_a_constructor_leaves_nothing_for_the_finaliser_to_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    for each in (Record, WeakStorage, TrackedBytes, _CudaEvent, PinnedMemory, _Loan, TensorPool):
        each.__new__(each)  # made, and interrupted before its first member was there
    assert not said

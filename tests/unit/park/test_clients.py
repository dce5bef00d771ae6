"""Models and optimizers that the rest of this package, or others, have in their hands: what is on the host
already crosses no link, what wraps a tensor moves by its parts, and training goes on with its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.testing._internal.two_tensor import TwoTensor

import offload
from offload import HybridDeviceOptimizer, marks
from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.groups.manager import GroupsManager
from tests.inside import streams_from
from tests.unit.park.states import WIDTH, Net, engine_of, same, state_of, train

Make = Callable[[nn.Module, OffloadEngine], Optimizer]


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    engine = engine_of()
    marks.put_manager(GroupsManager(engine))
    with streams_from(16):
        yield engine
    marks.put_manager(None)


def hybrid(fraction: float, **options: Any) -> Make:
    def make(model: nn.Module, engine: OffloadEngine) -> Optimizer:
        more = {"model": model} if options.get("overlap") else {}
        return HybridDeviceOptimizer(
            model.parameters(), fraction, AdamW, lr=1e-2, engine=engine, fused=True, **options, **more
        )

    return make


def plain(cls: type[Optimizer], **options: Any) -> Make:
    return lambda model, engine: cls(model.parameters(), lr=1e-2, **options)  # type: ignore[call-arg]


class Quantized(SGD):
    """Keeps what it has in a wrapper of two tensors, in a list, as 8-bit optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["moments"] = [TwoTensor(torch.zeros_like(p.data), torch.zeros_like(p.data))]
                old = state["moments"][0]
                state["moments"][0] = TwoTensor(old.a * 0.9 + p.grad, old.b + 1)
                p.data.sub_(state["moments"][0].a, alpha=group["lr"])


OPTIMIZERS: dict[str, Make] = {
    "hybrid, all": hybrid(1.0),
    "hybrid, half": hybrid(0.5),
    "hybrid, half, forward": hybrid(0.5, overlap="forward"),
    "hybrid, masters": hybrid(0.5, param_update_in_fp32=True),
    "hybrid, on the CPU": hybrid(1.0, cpu_share=0.5),
    "hybrid, in place": hybrid(0.0),
    "capturable": plain(AdamW, capturable=False, fused=True),
    "SGD": plain(SGD, momentum=0.9),
    "quantized": plain(Quantized),
    "LBFGS": lambda model, engine: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_goes_on_with_its_bits(engine: OffloadEngine, name: str) -> None:
    models = [Net(), Net()]
    if "masters" in name:
        models = [model.bfloat16() for model in models]
    ours, other = (OPTIMIZERS[name](model, engine) for model in models)

    def step(model: nn.Module, optimizer: Optimizer, at: int) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(at)).to(
            next(model.parameters()).dtype
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        if name == "LBFGS":
            optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            optimizer.step()

    for at in range(4):
        step(models[0], ours, at)
        step(models[1], other, at)
        parked = offload.park(models[0], ours, engine=engine)
        assert parked.report.staying == []
        with pytest.raises(OffloadError, match="wake"):
            ours.step()
        if at == 2 and "quantized" not in name:
            saved, expected = ours.state_dict()["state"], other.state_dict()["state"]
            for key, entry in expected.items():
                for each, value in entry.items():
                    assert not isinstance(value, Tensor) or torch.equal(saved[key][each], value)
        parked.wake()
        assert same(models[0].parameters(), models[1].parameters())
    for each in (ours, other):
        if hasattr(each, "placed"):
            each.close()  # type: ignore[attr-defined]


def test_a_park_between_a_backward_that_steps_and_its_step_is_refused(engine: OffloadEngine) -> None:
    models = [Net(), Net()]
    optimizers = [hybrid(0.5, overlap="backward")(model, engine) for model in models]
    for at in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(at))
            model(x).square().mean().backward()
            if model is models[0] and at:  # the first backward steps nothing
                with pytest.raises(OffloadError, match=r"between a backward that steps and step\(\)"):
                    offload.park(model, optimizer, engine=engine)
            optimizer.step()
        parked = offload.park(models[0], engine=engine)  # whose optimizer is known without being named
        assert parked.report.staying == []
        parked.wake()
        assert same(models[0].parameters(), models[1].parameters())
    for each in optimizers:
        each.close()  # type: ignore[attr-defined]


def test_state_of_a_hybrid_optimizer_that_stays_on_the_device_leaves_with_the_ring(
    engine: OffloadEngine,
) -> None:
    models = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [hybrid(1.0)(model, engine) for model in models]
    stays = optimizers[0].keep_on_device(1 << 20)
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer)
        with offload.parked(models[0], optimizers[0], kinds=["optimizer"], engine=engine):
            assert optimizers[0].placed.streamed.resident_bytes == 0
            state = optimizers[0].state_dict()["state"]
            assert torch.equal(state[0]["exp_avg"], optimizers[1].state_dict()["state"][0]["exp_avg"])
        assert optimizers[0].placed.streamed.resident_bytes == stays > 0
    assert all(map(torch.equal, *(model.parameters() for model in models)))
    for optimizer in optimizers:
        optimizer.close()


def test_the_ring_of_a_hybrid_optimizer_leaves_without_a_copy(engine: OffloadEngine) -> None:
    model = Net()
    optimizer = hybrid(1.0)(model, engine)
    assert isinstance(optimizer, HybridDeviceOptimizer)
    train(model, optimizer)
    before = optimizer.ring_bytes
    parked = offload.park(model, optimizer, kinds=["optimizer"], engine=engine)
    assert (optimizer.ring_bytes, parked.report.kinds["optimizer"].moved_bytes) == (0, 0)
    assert parked.report.kinds["optimizer"].clean_bytes == before
    with pytest.raises(
        OffloadError, match=r"step\(\) of HybridDeviceOptimizer while optimizer of Net are parked"
    ):
        optimizer.step()
    state = optimizer.state_dict()
    parked.wake()
    assert optimizer.ring_bytes == before
    optimizer.load_state_dict(state)
    train(model, optimizer)
    optimizer.close()


@pytest.mark.parametrize("gradients", [False, True])
def test_weights_that_stream_give_back_their_window_and_cross_no_link(
    engine: OffloadEngine, gradients: bool
) -> None:
    models = [
        nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)))
        for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    handle = offload.apply(models[0], weights="host", gradients="host" if gradients else "device")
    optimizers = [AdamW(model.parameters(), lr=1e-2) for model in models]
    for at in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(at))
            model(x).square().mean().backward()
            optimizer.step()
        models[0](x)  # what was written is on the host, and a window is on the device
        with torch.no_grad():
            torch._foreach_norm([*models[0].parameters()])
        engine.copier.take_counts()
        parked = offload.park(models[0], kinds=["weights"], engine=engine)
        weights = parked.report.kinds["weights"]
        assert weights.moved_bytes == 0
        assert weights.clean_bytes > 0
        assert "park" not in engine.copier.take_counts()
        with pytest.raises(OffloadError, match="a forward of Sequential"):
            models[0](x)
        parked.wake()
        parked = offload.park(models[0], optimizers[0], engine=engine)
        parked.wake()
        assert same(models[0].parameters(), models[1].parameters())
    handle.remove()
    assert same(state_of(*_pair(models, optimizers, 0)), state_of(*_pair(models, optimizers, 1)))


def _pair(models: Any, optimizers: Any, at: int) -> Any:
    return models[at], optimizers[at]


def test_a_wrapper_that_has_an_optimizer_is_unwrapped(engine: OffloadEngine) -> None:
    class Accelerated:
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

    model = Net()
    optimizers = [AdamW(model.first.parameters()), AdamW(model.norm.parameters())]
    for each in optimizers:
        train(model, each)
    parked = offload.park(model, [Accelerated(optimizers[0]), optimizers[1]], engine=engine)
    sizes = 2 * 4 * (WIDTH * WIDTH + WIDTH + 2 * WIDTH) + 4 * 4
    assert parked.report.kinds["optimizer"].moved_bytes == sizes
    for each in optimizers:
        with pytest.raises(OffloadError, match="wake"):
            each.step()
    parked.wake()


def test_modules_lists_and_averages_leave_as_extra(engine: OffloadEngine) -> None:
    model = Net()
    average = torch.optim.swa_utils.AveragedModel(model)
    scale = [torch.ones(3), {"x": (torch.full((2,), 2.0),)}]
    with offload.parked(model, extra=[average, scale], engine=engine) as parked:
        assert parked.report.kinds["extra"].moved_bytes == sum(
            each.nbytes for each in (*average.parameters(), *average.buffers())
        ) + 4 * (3 + 2)
        with pytest.raises(OffloadError, match=r'extra\[0\].*wake\("extra"\)'):
            average.update_parameters(model)
    assert scale[1]["x"][0].eq(2).all()  # type: ignore[call-overload]
    average.update_parameters(model)


def test_parameters_in_one_flat_buffer_and_odd_layouts_move(engine: OffloadEngine) -> None:
    model, twin = nn.Module(), nn.Module()
    for each in (model, twin):
        flat = torch.arange(24.0)
        each.a, each.b = nn.Parameter(flat[:10]), nn.Parameter(flat[10:].view(2, 7).t())
        each.c = nn.Parameter(torch.arange(5.0).expand(3, 5))
        each.d = nn.Parameter(torch.arange(8.0).to(torch.bfloat16)[1::2], requires_grad=False)
        each.e = nn.Parameter(torch.empty(0))
        each.register_buffer("f", torch.arange(4).to(torch.complex64).conj())
        del flat
    with torch.inference_mode():
        model.register_buffer("g", torch.ones(3))
        parked = offload.park(model, engine=engine)
    assert parked.report.staying == []
    assert all(
        torch.equal(value, twin.state_dict()[name])
        for name, value in model.state_dict().items()
        if name != "g"
    )
    parked.wake()
    assert same(state_of(twin), (each for each in state_of(model) if each is not model.g))

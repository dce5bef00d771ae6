"""Optimizer classes that people install, each with a habit that torch's own do not have.

A class with `fused` in its signature was made with fused=True; a list of param groups that SAM shares with
the optimizer inside it was replaced, so that a group which came later was never stepped; of a step that
failed, what SOAP keeps in lists stayed; properties read old weights; frozen parameters used up the fraction.
Each class here is one such habit: beside itself alone, through a resume, at fractions 0, 0.5 and 1.
`python -m tests.optim_packages` does the same with whole packages.
"""

from __future__ import annotations

import copy
import functools
import inspect
from abc import ABC
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from offload import OffloadEngine
from offload.device.sim import SimDevice
from offload.errors import OffloadError
from offload.optim import FSDPGPUOptimizerWrapper, HybridDeviceOptimizer
from offload.optim.placing import Place

Make = Callable[[Any], Any]
ENGINE = OffloadEngine(device=SimDevice())


class Momentum(Optimizer):
    """What the classes below share: one moment a parameter, where `moment` puts it."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    def every(self) -> list[tuple[dict[str, Any], Tensor]]:
        return [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]

    def moment(self, parameter: Tensor) -> Tensor:
        return self.state[parameter].setdefault("m", torch.zeros_like(parameter))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group, parameter in self.every():
            parameter.sub_(self.moment(parameter).mul_(0.9).add_(parameter.grad), alpha=group["lr"])


class Slots:
    __slots__ = ("_slot",)


class NoDict(Slots, ABC, Momentum):
    """Its first base has no `__dict__`, as ABC: the bases of nearly all of pytorch_optimizer."""


class ByKeys(Momentum):
    """Wants a key in each group, and refuses a flat list; knows what it is given."""

    def __init__(self, params: Any) -> None:
        for group in params:
            assert "use_muon" in group
            group.setdefault("lr", 0.02 if group["use_muon"] else 1e-3)
        Optimizer.__init__(self, params, {})


class OwnFused(Momentum):
    """`fused` means something else."""

    def __init__(self, params: Any, lr: float = 1e-2, fused: bool = False) -> None:
        super().__init__(params, lr)
        assert not fused


class Subclass(AdamW):
    """Not torch's: the kernel that torch chooses."""


class Sam(Momentum):
    """One list of groups with the optimizer inside."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.inner = SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.inner.param_groups
        self.defaults.update(self.inner.defaults)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


class Property(Optimizer):
    """`param_groups` without a setter, as Lookahead's."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        self.inner = SGD(params, lr=lr, momentum=0.9)
        self.defaults, self.state = self.inner.defaults, self.inner.state
        self.__setstate__({})

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @param_groups.deleter
    def param_groups(self) -> None: ...

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    state_dict = Sam.state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.state = self.inner.state


class Splits(Momentum):
    """Makes groups of its own, by name, as Adam-mini does."""

    def __init__(self, params: Any) -> None:
        named = list(params)
        of_kind = [[each for each in named if ("bias" in each[0]) is biases] for biases in (False, True)]
        super().__init__([{"params": each, "lr": 10.0**-at} for at, each in enumerate(of_kind, 2)])


class Packed(Tensor):
    """State as torchao's quantized one: a subclass that can be written, read and moved, and not cloned."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor) -> Packed:
        made: Packed = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes = codes
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], *_: Any) -> Packed:
        return cls(parts["codes"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.copy_.default:
            args[0].codes.copy_(args[1].codes if isinstance(args[1], Packed) else args[1].bfloat16())
            return args[0]
        if func in (aten.detach.default, aten._to_copy.default):
            return cls(args[0].codes)
        raise NotImplementedError(f"{func}")


class Quantized(Momentum):
    """Its state is `Packed`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group, p in self.every():
            state = self.state[p]
            if not state:
                state["m"] = Packed(torch.zeros_like(p, dtype=torch.bfloat16))
            moment = state["m"].codes.float().mul_(0.9).add_(p.grad)
            state["m"].copy_(moment)
            p.sub_(moment, alpha=group["lr"])


class Listed(Momentum):
    """State in lists, objects and attributes, as SOAP's, Shampoo's and Kron's; a gradient that it writes."""

    class Box:
        def __init__(self) -> None:
            self.steps = 0
            self.log: list[int] = []

    fails: ClassVar[bool] = False

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        # as DeMo, which makes state in its constructor, and classes that know a weight by a mark on it
        every = self.param_groups[0]["params"]
        assert all(type(p) is nn.Parameter and p.requires_grad and p.kind == "any" for p in every)
        self.box, self.count = Listed.Box(), torch.zeros(())
        self.seen: set[int] = set()

    def moment(self, parameter: Tensor) -> Tensor:
        return self.state[parameter].setdefault("GG", [torch.zeros_like(parameter)])[0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.box.steps += 1
        self.box.log.append(self.box.steps)
        self.count += 1
        self.seen.add(self.box.steps)
        for _, parameter in self.every():
            parameter.grad.mul_(1 + self.count / 8 + len(self.box.log) + len(self.seen))
        super().step()
        if Listed.fails:
            raise MemoryError("as one that runs out would")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def backward(model: nn.Module, number: int) -> None:
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))).square().mean().backward()


def keyed(model: nn.Module) -> list[dict[str, Any]]:
    weights = [{"params": [p for p in model.parameters() if (p.ndim > 1) is muon]} for muon in (True, False)]
    return [{**group, "use_muon": muon} for group, muon in zip(weights, (True, False), strict=True)]


def given(cls: type[Optimizer], model: nn.Module) -> Any:
    for parameter in model.parameters():
        parameter.kind = "any"  # type: ignore[attr-defined]
    named = cls is Splits
    return keyed(model) if cls is ByKeys else list(model.named_parameters() if named else model.parameters())


def trained(make: Make, cls: type[Optimizer], *, adds: bool = False) -> list[Tensor]:
    """The weights after each step, and the learning rates; a resume, and a group that comes later."""
    model, late = net(), nn.Linear(4, 4)
    optimizer = make(given(cls, model))
    found: list[Tensor] = []
    for number in range(5):
        if number == 2:
            saved = optimizer.state_dict()
            optimizer = make(given(cls, model))
            optimizer.load_state_dict(saved if cls is Quantized else copy.deepcopy(saved))
        if number == 3 and adds:
            optimizer.add_param_group({"params": list(late.parameters()), "use_muon": True, "lr": 1e-2})
        if number == 4:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        optimizer.zero_grad()
        late.zero_grad()
        backward(nn.Sequential(model, late), number)
        optimizer.step()
        found += [p.detach().clone() for p in [*model.parameters(), *late.parameters()]]
    return [*found, torch.tensor([group["lr"] for group in optimizer.param_groups])]


def hybrid(params: Any, *, cls: Any, fraction: float, **options: Any) -> HybridDeviceOptimizer:
    return HybridDeviceOptimizer(params, fraction, cls, bucket_bytes=2048, engine=ENGINE, **options)


CLASSES = (NoDict, ByKeys, OwnFused, Subclass, Sam, Property, Splits, Quantized, Listed)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_class_of_others_has_its_own_bits_at_every_fraction(cls: type[Optimizer]) -> None:
    adds = cls is not Splits
    alone = trained(cls, cls, adds=adds)
    for fraction in (0.0, 0.5, 1.0):
        make = functools.partial(hybrid, cls=cls, fraction=fraction)
        ours = trained(make, cls, adds=adds)
        assert len(ours) == len(alone)
        assert all(map(torch.equal, ours, alone)), fraction


def test_nothing_offloaded_is_an_object_of_a_class_without_a_dictionary() -> None:
    optimizer: Any = HybridDeviceOptimizer(net().parameters(), 0.0, NoDict)
    assert isinstance(optimizer, NoDict)
    assert isinstance(optimizer, HybridDeviceOptimizer)
    assert "offload_fraction" in inspect.signature(HybridDeviceOptimizer).parameters


def test_a_state_dict_of_quantized_state_is_a_copy() -> None:
    """Packed.to() gives an alias."""
    model = net()
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, Quantized)
    codes = []
    for number in range(2):
        backward(model, number)
        optimizer.step()
        codes.append(optimizer.state_dict()["state"][0]["m"].codes)
    assert not torch.equal(*codes)
    optimizer.close()


def test_groups_that_a_class_makes_are_the_users() -> None:
    model = net()
    optimizer = HybridDeviceOptimizer(model.named_parameters(), 1.0, Splits)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-3]
    assert optimizer.param_groups[1]["params"][0] is model[0].bias
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "2.weight"]
    before = model[2].weight.detach().clone()
    del optimizer.param_groups[0]["params"][1]
    backward(model, 0)
    optimizer.step()
    assert torch.equal(model[2].weight, before)
    optimizer.close()


def test_a_step_that_failed_leaves_lists_objects_attributes_and_gradients() -> None:
    found = []
    for fails in (False, True):
        model = net()
        optimizer: Any = HybridDeviceOptimizer(given(Listed, model), 1.0, Listed)
        for number in range(3):
            backward(model, number)
            if fails and number == 1:
                Listed.fails = True
                with pytest.raises(
                    OffloadError, match=r"weights and state are those of the last whole step$"
                ):
                    optimizer.step()
                Listed.fails = False
            optimizer.step()
        found.append([*model.parameters(), optimizer.state[model[0].weight]["GG"][0], optimizer.count])
        optimizer.close()
    assert all(map(torch.equal, *found))


class Holds(Listed):
    """Holds what no walk can put back."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rng, self.net = torch.Generator(), nn.Linear(1, 1)


def test_what_a_failed_step_could_not_put_back_is_named() -> None:
    model = net()
    optimizer = HybridDeviceOptimizer(given(Holds, model), 1.0, Holds)
    backward(model, 0)
    Listed.fails = True
    with pytest.raises(OffloadError, match=r"not put back: (rng|net) \((Generator|Linear)\), (rng|net) \("):
        optimizer.step()
    Listed.fails = False
    optimizer.close()


class Looks(Momentum):
    """Properties that read and write weights; a step with an argument of its own."""

    @property
    def sums(self) -> tuple[float, float]:
        return sum(p.sum().item() for _, p in self.every()), sum(p.grad.sum().item() for _, p in self.every())  # type: ignore[union-attr]

    @sums.setter
    def sums(self, factor: float) -> None:
        with torch.no_grad():
            [p.mul_(factor) for _, p in self.every()]

    @torch.no_grad()
    def step(self, closure: Any = None, bs: int = 1) -> Any:
        [p.sub_(p.grad / bs) for _, p in self.every()]  # type: ignore[operator]


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_properties_see_the_model_and_a_step_takes_its_arguments(fraction: float) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer: Any = HybridDeviceOptimizer([weight], fraction, Looks)
    (weight * 3).sum().backward()
    with torch.no_grad():
        weight.mul_(2)
    assert optimizer.sums == (8.0, 12.0)
    optimizer.sums = 2.0
    assert weight[0].item() == 4.0
    optimizer.step(bs=2)
    optimizer.step(None, 3)
    assert weight[0].item() == 4.0 - 1.5 - 1.0
    with pytest.raises(TypeError, match="step\\(\\) takes a closure alone"):
        HybridDeviceOptimizer([weight], 1.0, SGD, lr=0.1).step(bs=2)  # type: ignore[call-arg]


class Foreign(Momentum):
    """Is given an optimizer, which has tensors of its own."""

    def __init__(self, params: Any, inner: Optimizer) -> None:
        super().__init__(params)
        self.param_groups = inner.param_groups


class Ungrouped(Optimizer):
    """Has no groups at all."""

    def __init__(self, params: Any) -> None:
        self.defaults: dict[str, Any] = {}


@pytest.mark.filterwarnings("ignore:Using backward")
def test_what_a_class_cannot_be_given_is_refused_by_name() -> None:
    model = net()
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, Momentum)
    model(torch.ones(2, 8)).sum().backward(create_graph=True)
    with pytest.raises(OffloadError, match=r"parameter 0 .* has a graph \(create_graph=True\), and Momentum"):
        optimizer.step()
    with pytest.raises(
        ValueError, match="Foreign has no param_groups, or steps tensors that it was not given"
    ):
        HybridDeviceOptimizer(model.parameters(), 1.0, Foreign, inner=SGD(model.parameters()))
    with pytest.raises(ValueError, match="Ungrouped has no param_groups"):
        HybridDeviceOptimizer(model.parameters(), 1.0, Ungrouped)
    optimizer.zero_grad()
    optimizer.close()


# -- torch's own classes -------------------------------------------------------------------------------------
KERNELS: list[tuple[Any, dict[str, Any]]] = [
    (AdamW, {}),
    (AdamW, {"fused": False}),
    (AdamW, {"foreach": False}),
    (AdamW, {"foreach": True}),
    (SGD, {}),
    (Adagrad, {"fused": False}),
    (RMSprop, {"foreach": True}),
]


@pytest.mark.parametrize(("cls", "asked"), KERNELS, ids=str)
def test_all_parts_of_one_optimizer_have_one_kernel(cls: Any, asked: dict[str, Any]) -> None:
    """The one that was asked for, else the fused one. At 0.5 the device's part had torch's default, and
    AdamW was streamed by the fused kernel whatever was asked."""
    options = {"lr": 1e-2, **({"momentum": 0.9} if cls is SGD else {})}
    named = asked or {"fused": True}
    alone = trained(lambda params: cls(params, **options, **named), cls)
    for fraction, atomic in ((0.5, None), (0.5, False), (1.0, None)):
        ours = {"cls": cls, "fraction": fraction, "atomic_step": atomic, **options, **asked}
        assert all(map(torch.equal, trained(functools.partial(hybrid, **ours), cls), alone)), ours


def test_a_group_that_names_another_kernel_is_refused() -> None:
    params = list(net().parameters())
    with pytest.raises(
        ValueError, match="asks for AdamW's loop kernel, and all groups are stepped with the fused"
    ):
        HybridDeviceOptimizer([{"params": params, "fused": False}], 1.0)
    HybridDeviceOptimizer([{"params": params, "fused": True}], 1.0).close()


# -- frozen parameters ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cls", "fraction"), [(Adam, 0.5), (Adam, 1.0), (SGD, 0.5), (Adagrad, 0.5), (Momentum, 1.0)], ids=str
)
def test_a_parameter_that_is_unfrozen_trains_as_with_torchs(cls: Any, fraction: float) -> None:
    """Also one that gets a gradient by hand, and one that was frozen again when its state was saved."""
    found = []
    fused = {"fused": True} if cls is not Momentum else {}
    for make in (
        lambda params: cls(params, lr=1e-2, **fused),
        functools.partial(hybrid, cls=cls, fraction=fraction, lr=1e-2),
    ):
        model = net()
        model[0].requires_grad_(False)
        optimizer: Any = make(list(model.parameters()))
        for number in range(6):
            model[0].weight.requires_grad_(number in (1, 2, 5))
            if number == 3:
                model[0].bias.grad = torch.ones(16)
            if number == 4:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = make(list(model.parameters()))
                optimizer.load_state_dict(saved)
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
        found.append(list(model.parameters()))
    assert all(map(torch.equal, *found))


def test_a_frozen_parameter_takes_no_memory_and_none_of_the_fraction() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    model[0].requires_grad_(False)
    quantized = nn.Parameter(torch.zeros(64, dtype=torch.int8), requires_grad=False)
    alone = HybridDeviceOptimizer([p for p in model.parameters() if p.requires_grad], 0.5, lr=1e-2)
    optimizer = HybridDeviceOptimizer([quantized, *model.parameters()], 0.5, lr=1e-2)
    assert (optimizer.host_bytes, optimizer.ring_bytes) == (alone.host_bytes, alone.ring_bytes)
    places = [optimizer.place_of(layer.weight) for layer in model]
    assert places == [Place.FROZEN, Place.STREAMED, Place.STREAMED, Place.GPU]
    wrapped = AdamW(model.parameters(), lr=1e-2)
    shards = FSDPGPUOptimizerWrapper(wrapped, "cpu")
    pinned = shards._part.host_bytes
    model[0].requires_grad_(True)
    model(torch.ones(2, 64)).square().mean().backward()
    shards.step()
    assert shards._part.host_bytes * 3 == pinned * 4
    assert wrapped.state[model[0].weight]["step"] == 1
    for each in (shards, alone, optimizer):
        each.close()

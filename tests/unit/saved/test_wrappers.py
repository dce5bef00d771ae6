"""Tensors that are made of others: DTensor, jagged tensors, a handwritten wrapper, and the result of a
collective that still runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.utils._pytree import tree_map

from offload.saved.handles import Handle, Passed
from offload.transfer.block import WeakStorage
from tests.unit.saved.rig import ELEMENTS, Rig, assert_equal_bits
from tests.unit.saved.test_views import keep


def distributed(mesh: DeviceMesh, placement: Shard | Replicate, *size: int) -> DTensor:
    """Made where it is: one that was sent may be held a little longer, by the thread that sent it."""
    return DTensor.from_local(torch.randn(*size), mesh, [placement])


def local(value: Tensor | None) -> Tensor:
    assert isinstance(value, DTensor)
    return value.to_local()


# -- DTensor -------------------------------------------------------------------------------------------------
def test_the_local_shard_of_a_dtensor_leaves_and_comes_back(mesh: DeviceMesh, rig: Rig) -> None:
    """Its members are the shard and, in newer versions of torch, the mesh, which is no tensor."""

    def program(x: DTensor) -> Tensor:
        return ((x * 2).sin() @ (x * 3).t().exp()).pow(2).sum()

    x = distributed(mesh, Shard(0), 8, 16).requires_grad_()
    (expected,) = torch.autograd.grad(program(x), [x])
    with rig.group():
        y = program(x)
    rig.leave()
    (found,) = torch.autograd.grad(y, [x])
    assert_equal_bits([local(expected)], [local(found)])
    del y
    stats = rig.end()
    assert stats.saved > 0
    assert stats.spilled == stats.saved == stats.restored


def test_a_dtensor_is_put_together_with_its_placements(rig: Rig, mesh: DeviceMesh) -> None:
    value = distributed(mesh, Shard(1), 8, 16)
    expected = local(value).clone()
    with rig.group():
        packed = rig.engine.hooks.pack(value)
    del value
    rig.leave()
    found = rig.engine.hooks.unpack(packed)
    assert isinstance(found, DTensor)
    assert (found.placements, found.device_mesh) == ((Shard(1),), mesh)
    assert_equal_bits([expected], [local(found)])
    assert rig.restored_bytes == 8 * 16 * 4


def test_a_saved_dtensor_holds_no_bytes_of_its_own(mesh: DeviceMesh, rig: Rig) -> None:
    distributed(mesh, Shard(0), 8, 16).detach()  # torch's first dispatch of an operation leaves a ring behind
    value = distributed(mesh, Shard(0), 8, 16)
    storage = WeakStorage(local(value).untyped_storage())
    with rig.group():
        _packed = rig.engine.hooks.pack(value)
    del value
    rig.leave()
    assert storage.storage() is None


@pytest.mark.parametrize("leaves", [True, False], ids=["spilled", "kept"])
def test_a_dtensor_that_is_changed_after_it_was_saved_is_found_out(mesh: DeviceMesh, leaves: bool) -> None:
    """The change moves the version of the wrapper and not that of its shard."""
    x = distributed(mesh, Shard(0), 8, 16).requires_grad_()
    rig = Rig()
    with rig.group(leaves=leaves):
        y = x * 2
        z = y.sin()
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize("autocast", [False, True])
def test_the_weights_of_a_distributed_layer_never_leave(mesh: DeviceMesh, autocast: bool, rig: Rig) -> None:
    layer = distribute_module(nn.Linear(16, 32), mesh)
    x = distributed(mesh, Replicate(), 4, 16).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), rig.group():
        y = layer(x)
    assert {size[0] for size in rig.sizes} == {4}  # rows of the input
    y.sum().backward()


def test_the_shard_of_a_registered_or_opted_out_dtensor_stays(rig: Rig, mesh: DeviceMesh) -> None:
    layer = distribute_module(nn.Linear(16, 16, bias=False), mesh)
    rig.engine.register_parameters(layer)
    table = distributed(mesh, Replicate(), 16, 16)
    rig.engine.mark_not_offloadable(table)
    with rig.group():
        packed = [rig.engine.hooks.pack(value) for value in (layer.weight.detach(), table, table.t())]
    assert rig.saved == 0
    assert local(rig.engine.hooks.unpack(packed[1])).data_ptr() == local(table).data_ptr()


def test_fully_sharded_layers_give_the_same_gradients_and_their_weights_stay(mesh: DeviceMesh) -> None:
    """FSDP2 frees the unsharded weight after the forward and refills it before the backward, under the same
    storage."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)))
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    x = torch.randn(4, 16)

    def gradients() -> list[Tensor]:
        found = [local(parameter.grad).clone() for parameter in model.parameters()]
        model.zero_grad()
        return found

    model(x).sum().backward()
    expected = gradients()
    rig = Rig()
    with rig.group():
        y = model(x).sum()
    rig.leave()
    y.backward()
    assert_equal_bits(expected, gradients())
    assert {size[0] for size in rig.sizes} == {4}


# -- collectives ---------------------------------------------------------------------------------------------
def test_the_result_of_a_running_collective_is_waited_for_before_it_leaves(mesh: DeviceMesh) -> None:
    rig = Rig()
    value = torch.randn(ELEMENTS)
    x = torch.randn(ELEMENTS, requires_grad=True)
    running = collectives.all_reduce(value, "sum", mesh.get_group())
    assert isinstance(running, collectives.AsyncCollectiveTensor)
    assert not running.completed
    with rig.group():
        packed = rig.engine.hooks.pack(running)
        assert running.completed
        assert type(packed) is Handle
        del packed
        y = x * running
    del running
    rig.leave()
    y.sum().backward()
    assert x.grad is not None
    assert_equal_bits([value], [x.grad])
    del y
    assert rig.end().spilled == 2


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_gathered_tensor_may_be_saved_by_several_operations(mesh: DeviceMesh, rig: Rig) -> None:
    x = torch.randn(ELEMENTS, requires_grad=True)

    def program() -> Tensor:
        gathered = collectives.all_gather_tensor_autograd(x, 0, mesh.get_group())
        return (gathered.sin() * gathered).sum()

    (expected,) = torch.autograd.grad(program(), [x])
    with rig.group():
        y = program()
    rig.leave()
    (found,) = torch.autograd.grad(y, [x])
    assert_equal_bits([expected], [found])


# -- handwritten wrappers ------------------------------------------------------------------------------------
class Scaled(Tensor):
    """value * scale, kept as its two parts; as a float8 tensor is."""

    data_part: Tensor
    scale_part: Tensor

    @staticmethod
    def __new__(cls, data_part: Tensor, scale_part: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(cls, data_part.size(), dtype=torch.float32)  # type: ignore[attr-defined]
        made.data_part, made.scale_part = data_part, scale_part
        return made

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["data_part", "scale_part"], "context"

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: str, size: Any, stride: Any) -> Scaled:
        assert context == "context"
        return Scaled(inner["data_part"], inner["scale_part"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Scaled(args[0].data_part, args[0].scale_part)
        plain = tree_map(
            lambda value: value.data_part.float() * value.scale_part if isinstance(value, Scaled) else value,
            args,
        )
        return function(*plain, **(kwargs or {}))


class Opaque(Tensor):
    """A wrapper that does not say what it is made of; its storage has a size and no bytes. Copying it ended
    the process."""

    hidden: Tensor

    @staticmethod
    def __new__(cls, hidden: Tensor) -> Opaque:
        made: Opaque = Tensor._make_wrapper_subclass(cls, hidden.size(), dtype=hidden.dtype)  # type: ignore[attr-defined]
        made.hidden = hidden
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map(lambda value: value.hidden if isinstance(value, Opaque) else value, args)
        result = function(*plain, **(kwargs or {}))
        return Opaque(result) if function is torch.ops.aten.detach.default else result


class InDict(Scaled):
    """Its parts are in a dictionary that its aliases share, under properties; or its alias is itself."""

    parts: dict[str, Tensor]
    data_part = property(lambda self: self.parts["data"], lambda self, to: self.parts.update(data=to))  # type: ignore[assignment]
    scale_part = property(lambda self: self.parts["scale"], lambda self, to: self.parts.update(scale=to))  # type: ignore[assignment]
    is_own_alias = False

    @staticmethod
    def __new__(cls, data_part: Tensor, scale_part: Tensor, parts: dict[str, Tensor] | None = None) -> InDict:
        made: InDict = Tensor._make_wrapper_subclass(cls, data_part.size(), dtype=torch.float32)  # type: ignore[attr-defined]
        made.parts = {"data": data_part, "scale": scale_part} if parts is None else parts
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            (of,) = args
            return of if cls.is_own_alias else InDict(of.data_part, of.scale_part, of.parts)
        return super().__torch_dispatch__(function, types, args, kwargs)


class Named(Tensor):
    """A subclass that only adds a name to ordinary bytes."""


def test_the_parts_of_a_wrapper_leave_each_on_its_own(rig: Rig) -> None:
    data, scale = torch.randint(-128, 127, (ELEMENTS,), dtype=torch.int8), torch.randn(1)
    expected = data.float() * scale
    x = torch.randn(ELEMENTS, requires_grad=True)
    with rig.group(min_elements=2):
        y = x * Scaled(data, scale)
    assert (rig.saved, rig.spilled_bytes) == (1, ELEMENTS)  # the scale is small
    del data
    rig.leave()
    y.sum().backward()
    assert x.grad is not None
    assert_equal_bits([expected], [x.grad])
    assert rig.restored_bytes == ELEMENTS


@pytest.mark.parametrize("is_own_alias", [False, True])
def test_a_wrapper_whose_aliases_share_what_holds_its_parts_keeps_them(
    monkeypatch: pytest.MonkeyPatch, is_own_alias: bool, rig: Rig
) -> None:
    """What counts its versions was an alias whose members were set to None, and so were the wrapper's: a
    quantized weight was gone after the first save of it."""
    monkeypatch.setattr(InDict, "is_own_alias", is_own_alias)
    data, scale = torch.randint(-128, 127, (ELEMENTS,), dtype=torch.int8), torch.randn(1)
    whole = InDict(data, scale)
    with rig.group():
        packed = rig.engine.hooks.pack(whole)
    assert whole.parts == {"data": data, "scale": scale}
    rig.leave()
    storage = WeakStorage(data.untyped_storage())
    del whole, data
    assert storage.storage() is None
    found = rig.engine.hooks.unpack(packed)
    assert isinstance(found, Scaled)
    assert torch.equal(found.scale_part, scale)


@pytest.mark.parametrize(("tagged", "leaves"), [("whole", 0), ("data", 0), ("scale", ELEMENTS)])
def test_a_tag_on_a_wrapper_or_on_a_part_of_it_keeps_what_it_is_on(tagged: str, leaves: int) -> None:
    rig = Rig()
    data, scale = torch.randint(-128, 127, (ELEMENTS,), dtype=torch.int8), torch.randn(1)
    whole = Scaled(data, scale)
    kept = {"whole": whole, "data": data, "scale": scale}[tagged]
    with rig.group(stays=lambda tensor: tensor is kept):
        packed = rig.engine.hooks.pack(whole)
    assert rig.spilled_bytes == leaves + (4 if tagged == "data" else 0)
    found = rig.engine.hooks.unpack(packed)
    assert isinstance(found, Scaled)
    assert_equal_bits([data, scale], [found.data_part, found.scale_part])


def test_a_wrapper_in_a_wrapper_is_taken_apart_to_the_bottom(rig: Rig) -> None:
    inner = Scaled(torch.ones(ELEMENTS, dtype=torch.int8), torch.randn(1))
    with rig.group():
        packed = rig.engine.hooks.pack(Scaled(inner, torch.randn(1)))
    assert rig.saved == 3
    found = rig.engine.hooks.unpack(packed)
    assert isinstance(found, Scaled)
    assert isinstance(found.data_part, Scaled)


def test_a_wrapper_that_does_not_say_what_it_is_made_of_passes_through(rig: Rig) -> None:
    x, value = torch.randn(ELEMENTS, requires_grad=True), torch.randn(ELEMENTS)
    with rig.group():
        y = x * Opaque(value)
    assert rig.saved == 0
    y.sum().backward()
    assert x.grad is not None
    assert_equal_bits([value], [x.grad])


def test_a_subclass_of_ordinary_bytes_passes_through_and_keeps_its_type(rig: Rig) -> None:
    value = torch.randn(ELEMENTS).as_subclass(Named)
    found: list[Tensor] = []
    with rig.group():
        assert type(rig.engine.hooks.pack(value)) is Passed
        y = keep(found, value)
    torch.autograd.backward([y.as_subclass(Tensor)])
    assert type(found[0]) is Named
    assert rig.end().saved == 0


@pytest.mark.filterwarnings("ignore")
def test_a_jagged_tensor_keeps_its_ragged_size(rig: Rig) -> None:
    """Two ragged sizes are equal if their offsets are one object, so the offsets stay; the values leave."""
    parts = [torch.randn(3, 4), torch.randn(5, 4)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    (expected,) = torch.autograd.grad((x * x.sin()).values().sum(), [x])
    with rig.group():
        y = x * x.sin()
    rig.leave()
    (found,) = torch.autograd.grad(y.values().sum(), [x])
    assert_equal_bits([expected.values()], [found.values()])
    assert rig.restored_bytes == 8 * 4 * 4  # of the sine; x lives


@pytest.mark.filterwarnings("ignore")
def test_a_jagged_tensor_that_was_saved_keeps_its_lengths_and_is_found_out_if_changed(rig: Rig) -> None:
    """Its least and greatest length were gone from it, and padding it gave other sizes: another loss."""
    x = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)], layout=torch.jagged)
    padded = torch.nested.to_padded_tensor(x, 0.0)
    with rig.group():
        packed = rig.engine.hooks.pack(x)
    assert torch.equal(torch.nested.to_padded_tensor(x, 0.0), padded)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rig.engine.hooks.unpack(packed)

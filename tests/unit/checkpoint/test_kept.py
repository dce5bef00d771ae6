"""One kept call: what may be kept, what is given again, and what becomes of the random state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from offload import OffloadError
from offload.checkpoint.kept import KeptCall, RandomStep, alias_of, check_keepable, make_of, version_probe
from offload.saved.handles import Passed
from offload.transfer.block import WeakStorage

aten = torch.ops.aten


def stays(packed: Any) -> Tensor:
    pytest.fail(f"a {type(packed).__name__} was never given away")


def call_of(operator: Any, *args: Any, **kwargs: Any) -> tuple[KeptCall, Any]:
    started = RandomStep.start(operator, args, kwargs)
    outputs = operator(*args, **kwargs)
    return KeptCall(operator, 0, make_of(args, kwargs), outputs, RandomStep.end(started)), outputs


# -- operators -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "operator",
    [
        aten.mm.default,
        aten.addmm.default,
        aten.native_dropout.default,
        aten._scaled_dot_product_flash_attention.default,
        aten.native_layer_norm.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops.higher_order.flex_attention,
    ],
)
def test_operators_that_only_make_something_new_may_be_kept(operator: Any) -> None:
    assert check_keepable(operator) is operator


@pytest.mark.parametrize(
    "operator",
    [aten.relu_.default, aten.mm.out, aten.t.default, aten.detach.default, aten.split.Tensor, aten.mm, len],
)
def test_others_may_not(operator: Any) -> None:
    with pytest.raises(ValueError, match="keep_ops"):
        check_keepable(operator)


# -- outputs -------------------------------------------------------------------------------------------------
def test_an_alias_counts_versions_with_its_tensor_and_has_no_history() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    alias = alias_of(y)
    y.add_(1)
    assert alias._version == y._version == 1
    assert alias.grad_fn is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [None, torch.strided, torch.jagged])
def test_a_probe_counts_versions_with_its_tensor_and_holds_none_of_its_bytes(layout: Any) -> None:
    """A strided nested tensor cannot have its bytes taken out as another one's are, and that raised."""
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    x = parts[1] if layout is None else torch.nested.nested_tensor(parts, layout=layout)
    probe = version_probe(x)
    storage = WeakStorage((x if layout is None else x.values()).untyped_storage())
    x.mul_(2)
    assert probe._version == x._version == 1
    del x, parts
    assert storage.storage() is None


def test_what_is_no_tensor_is_given_again_as_it_was() -> None:
    """max_q and max_k of fused attention are numbers, and absent tensors are None."""
    x = torch.ones(2, 3)
    outputs = (x, None, 7, [x + 1])
    call = KeptCall(aten.mm.default, 0, make_of((x,), {}), outputs, None)
    first, none, number, (second,) = call.again((x,), {}, stays)
    assert (none, number) == (None, 7)
    assert torch.equal(first, x)
    assert torch.equal(second, x + 1)
    assert first is not x


def test_only_unchanged_outputs_leave_and_a_changed_one_is_an_error_when_it_is_read() -> None:
    x = torch.ones(2, 2)
    changed, same = torch.zeros(2), torch.zeros(3)
    call = KeptCall(aten.mm.default, 3, make_of((x,), {}), (changed, same), None)
    changed.add_(1)
    left: list[Tensor] = []

    def pack(tensor: Tensor) -> Passed:
        left.append(tensor)
        return Passed(tensor)

    assert call.leave(pack) == []
    assert [tuple(tensor.shape) for tensor in left] == [(3,)]
    with pytest.raises(
        OffloadError, match=r"output of call 3 of aten.mm.default is kept .* changed in place"
    ):
        call.again((x,), {}, stays)


def test_a_call_on_the_parameter_is_not_one_on_a_tensor_of_its_shape() -> None:
    """Autocast casts a weight once in the forward and again in the recompute: the n-th cast may be
    another's."""
    weight, x = torch.nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4)
    call, _ = call_of(aten.exp.default, x)
    with pytest.raises(
        RuntimeError, match=r"call 0 of aten.exp.default .* had inputs float32\[4, 4\] in the forward"
    ):
        call.again((weight,), {}, stays)
    call.again((x,), {}, stays)


# -- random numbers ------------------------------------------------------------------------------------------
def test_the_state_after_a_kept_call_is_the_one_that_it_left() -> None:
    x = torch.ones(64)
    torch.manual_seed(5)
    call, (expected, mask) = call_of(aten.native_dropout.default, x, 0.5, True)
    following = torch.rand(4)
    torch.manual_seed(5)
    again, mask_again = call.again((x, 0.5, True), {}, stays)
    assert torch.equal(expected, again)
    assert torch.equal(mask, mask_again)
    assert torch.equal(following, torch.rand(4))


def test_a_state_that_is_not_the_forwards_is_left_alone() -> None:
    x = torch.ones(64)
    call, _ = call_of(aten.native_dropout.default, x, 0.5, True)
    torch.manual_seed(6)
    before = torch.get_rng_state()
    call.again((x, 0.5, True), {}, stays)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("operator", "args", "kwargs"),
    [
        (aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {}),
        (aten.native_dropout.default, (torch.ones(2), 0.5, False), {}),
        (aten.bernoulli.default, (torch.ones(2),), {"generator": torch.Generator()}),
        (aten.rand_like.default, (torch.ones(2, device="meta"),), {}),
    ],
    ids=["no numbers", "none drawn", "from its own generator", "without bytes"],
)
def test_a_call_that_draws_no_number_of_the_default_generator_keeps_no_state(
    operator: Any, args: Any, kwargs: Any
) -> None:
    assert RandomStep.end(RandomStep.start(operator, args, kwargs)) is None
    call, _ = call_of(operator, *args, **kwargs)
    assert call._random is None

"""What never leaves: parameters, their views and casts, opted-out storages, and tensors without bytes of
their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from offload.device.sim import SimDevice
from offload.saved.filters import ExternalKind, ExternalStorages, Verdict, judge
from offload.saved.handles import Handle, Passed
from tests.unit.saved.rig import ELEMENTS, Rig, assert_equal_bits, gradients
from tests.unit.saved.test_views import keep


def verdict_of(
    tensor: Tensor, *, externals: ExternalStorages | None = None, min_elements: int = 0
) -> Verdict:
    return judge(tensor, SimDevice(), ExternalStorages() if externals is None else externals, min_elements)


# -- parameters ----------------------------------------------------------------------------------------------
PARAMETER = nn.Parameter(torch.randn(16, 16))
OF_A_PARAMETER: dict[str, Callable[[], Tensor]] = {
    "itself": lambda: PARAMETER,
    "transposed": lambda: PARAMETER.t(),
    "sliced": lambda: PARAMETER[:4],
    "viewed": lambda: PARAMETER.view(4, 64),
    "expanded": lambda: PARAMETER[:1].expand(8, 16),
    "cast": lambda: PARAMETER.to(torch.bfloat16),
    "cast and transposed": lambda: PARAMETER.to(torch.bfloat16).t(),
    "cast, viewed, transposed and cast": lambda: (
        PARAMETER.to(torch.float16).view(16, 16).t().to(torch.float64)
    ),
    "split": lambda: PARAMETER.to(torch.bfloat16).split(4)[1],
    "frozen": lambda: nn.Parameter(torch.randn(4), requires_grad=False),
    "frozen and transposed": lambda: nn.Parameter(torch.randn(4, 4), requires_grad=False).t(),
}


@pytest.mark.parametrize("name", OF_A_PARAMETER)
def test_a_parameter_is_recognised_through_views_and_casts_without_being_registered(name: str) -> None:
    assert verdict_of(OF_A_PARAMETER[name]()) is Verdict.PARAMETER


@pytest.mark.parametrize(
    "make",
    [lambda: PARAMETER * 1, lambda: PARAMETER.exp(), lambda: (PARAMETER * 2).t(), lambda: PARAMETER.clone()],
)
def test_what_is_computed_from_a_parameter_is_an_activation(make: Callable[[], Tensor]) -> None:
    assert verdict_of(make()) is Verdict.ELIGIBLE


def test_a_leaf_that_is_no_parameter_is_an_activation() -> None:
    leaf = torch.randn(16, 16, requires_grad=True)
    assert verdict_of(leaf) is Verdict.ELIGIBLE
    assert verdict_of(leaf.to(torch.bfloat16).t()) is Verdict.ELIGIBLE


def test_a_registered_parameter_is_recognised_behind_detach(rig: Rig) -> None:
    layer = nn.Linear(16, 16)
    layer.register_buffer("table", torch.randn(16))
    found: list[Tensor] = []
    with rig.group():
        keep([], layer.weight.detach())
    assert rig.saved == 1
    rig.engine.register_parameters(layer)
    with rig.group():
        y = keep(found, layer.weight.detach(), layer.weight.data, layer.weight.detach()[3:5].t(), layer.table)  # type: ignore[arg-type]
    assert rig.saved == 1
    y.backward()
    assert found[0].data_ptr() == layer.weight.data_ptr()


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("autocast", [False, True])
def test_the_weights_of_real_layers_never_leave(autocast: bool, rig: Rig) -> None:
    """`nn.Linear` saves weight.t(), and under autocast the transpose of a cast: neither is the Parameter
    itself, so an engine that asks for Parameters only would offload its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.RMSNorm(64), nn.Linear(64, 32))
    x = torch.randn(4, 32)

    def run(rig: Rig | None) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            if rig is None:
                y = model(x)
            else:
                with rig.group():
                    y = model(x)
                rig.leave()
        return list(torch.autograd.grad(y.float().sum(), list(model.parameters())))

    assert_equal_bits(run(None), run(rig))
    assert {size[0] for size in rig.sizes} == {4}  # rows of activations; a weight has 32 or 64


def test_two_microbatches_under_autocast_do_not_send_the_cast_weight_twice_or_once(rig: Rig) -> None:
    layer = nn.Linear(64, 64)
    outputs = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            rig.chunk()
            with rig.group():
                outputs.append(layer(torch.randn(4, 64)))
    assert rig.spilled_bytes == 2 * 4 * 64 * 2  # the inputs, in bfloat16


def frozen_linear(rig: Rig | None, layer: nn.Linear, inputs: list[Tensor]) -> list[Tensor]:
    """The gradients of the inputs, one chunk each, all forwards first."""
    outputs = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for x in inputs:
            if rig is None:
                outputs.append(layer(x))
            else:
                rig.chunk()
                with rig.group():
                    outputs.append(layer(x))
    if rig is not None:
        rig.leave()
    return [torch.autograd.grad(y.float().square().sum(), x)[0] for y, x in zip(outputs, inputs, strict=True)]


def test_the_cast_of_a_frozen_weight_belongs_to_its_graph_and_leaves(rig: Rig) -> None:
    """torch caches the casts of leaves that require gradients only, so a frozen weight is cast anew by every
    operation: each graph holds a copy of its own, as large as the weight, until its backward. It is an
    activation by what owns it, and it had better leave. Nor could it be told from one: neither base nor
    grad_fn leads back to the weight, and an input of the same shape looks just like it."""
    layer = nn.Linear(64, 64, bias=False).requires_grad_(False)
    inputs = [torch.randn(4, 64, requires_grad=True) for _ in range(2)]
    rig.engine.register_parameters(layer)
    assert_equal_bits(frozen_linear(None, layer, inputs), frozen_linear(rig, layer, inputs))
    assert rig.sizes.count((64, 64)) == 2  # one a microbatch; of a trainable weight none, and only one exists
    assert rig.spilled_bytes == 2 * 64 * 64 * 2


def test_a_frozen_weight_in_the_dtype_of_autocast_is_not_cast_and_never_leaves(rig: Rig) -> None:
    """What to do about the copies: they cost device memory with offload and without."""
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    inputs = [torch.randn(4, 64, requires_grad=True) for _ in range(2)]
    assert_equal_bits(frozen_linear(None, layer, inputs), frozen_linear(rig, layer, inputs))
    assert (64, 64) not in rig.sizes


# -- opted out, small, elsewhere -----------------------------------------------------------------------------
def test_an_opted_out_storage_stays_with_all_its_views(rig: Rig) -> None:
    table = torch.randn(ELEMENTS)
    rig.engine.mark_not_offloadable(table)
    with rig.group():
        y = keep([], table, table[3:], table.view(torch.int32), torch.randn(8))
    assert rig.saved == 1
    y.backward()


def test_the_size_limit_counts_elements_and_spares_the_tensor_that_has_exactly_as_many() -> None:
    for dtype in (torch.int8, torch.float64):
        rig = Rig()
        with rig.group(min_elements=100):
            _y = keep([], torch.zeros(99, dtype=dtype), torch.zeros(100, dtype=dtype))
        assert [record.nbytes for record in rig.blocks()] == [100 * dtype.itemsize]


@pytest.mark.req("S3-60")
def test_a_tensor_of_another_device_stays() -> None:
    assert verdict_of(torch.empty(4, device="meta")) is Verdict.ELSEWHERE


def test_the_engine_s_own_host_memory_is_not_of_the_device() -> None:
    device = SimDevice()
    (piece,) = device.host_memory(4096, 4096).pieces
    assert judge(piece, device, ExternalStorages(), 0) is Verdict.ELSEWHERE


# -- without bytes -------------------------------------------------------------------------------------------
@pytest.mark.req("S3-60")
def test_a_freed_storage_passes_through_and_may_be_refilled_before_it_is_read(rig: Rig) -> None:
    """FSDP2 frees an unsharded weight after the forward and refills it before the backward, under the same
    storage."""
    value = torch.randn(ELEMENTS)
    expected = value.clone()
    value.untyped_storage().resize_(0)
    found: list[Tensor] = []
    with rig.group():
        y = keep(found, value)
    value.untyped_storage().resize_(ELEMENTS * 4)
    value.data.copy_(expected)  # under a version of its own, as FSDP does
    y.backward()
    assert_equal_bits([expected], found)
    assert rig.end().saved == 0


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.randn(ELEMENTS)


NOT_PLAIN: dict[str, Callable[[], Tensor]] = {
    "fake": lambda: FakeTensorMode().from_tensor(torch.randn(ELEMENTS)),
    "functional": lambda: torch._to_functional_tensor(torch.randn(ELEMENTS)),
    "inference": inference,
    "sparse": lambda: torch.eye(8).to_sparse(),
    "compressed sparse": lambda: torch.eye(8).to_sparse_csr(),
    "conjugate": lambda: torch.randn(8, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(8, dtype=torch.complex64).conj().imag,
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(8), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
    # its bytes are at address 0: reading them ended the process
    "zero, without memory": lambda: torch._efficientzerotensor((8,)),
}
NOT_OF_A_LAYOUT = {
    "fake": Verdict.NO_BYTES,
    "functional": Verdict.NO_BYTES,
    "inference": Verdict.INFERENCE,
}


@pytest.mark.req("S3-60")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NOT_PLAIN)
def test_a_tensor_whose_elements_are_not_its_bytes_passes_through(rig: Rig, name: str) -> None:
    value = NOT_PLAIN[name]()
    assert verdict_of(value) is NOT_OF_A_LAYOUT.get(name, Verdict.LAYOUT)
    with rig.group():
        packed = rig.engine.hooks.pack(value)
    assert rig.engine.hooks.unpack(packed) is value
    assert rig.saved == 0


PROGRAMS: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "a conjugate": (lambda x: ((x * 2).conj() * x.exp()).sum().abs(), torch.complex64),
    "a sparse product": (
        lambda x: torch.sparse.mm(torch.eye(16).to_sparse(), x.view(16, 16)).sin(),
        torch.float32,
    ),
    "attention": (
        lambda x: F.scaled_dot_product_attention(*(x.view(1, 2, 16, 8) * 2,) * 3, is_causal=True),
        torch.float32,
    ),
    "vmap": (lambda x: torch.vmap(lambda row: row.sin() * row.sum())(x.view(16, 16)), torch.float32),
    "indexing": (lambda x: (x * 2)[torch.arange(0, 256, 3)].sin(), torch.float32),
    "sorting": (lambda x: (x * 2).sort().values.cumsum(0), torch.float32),
    "a norm": (lambda x: F.layer_norm(x.view(16, 16), [16]), torch.float32),
    "dropout": (lambda x: F.dropout(x, 0.5), torch.float32),
    "cross entropy": (lambda x: F.cross_entropy(x.view(16, 16), torch.arange(16)), torch.float32),
    "convolution": (lambda x: F.conv1d(x.view(1, 16, 16), torch.ones(4, 16, 3)).relu(), torch.float32),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_what_saves_unusual_tensors_are_the_same(name: str, rig: Rig) -> None:
    program, dtype = PROGRAMS[name]
    x = torch.randn(ELEMENTS, dtype=dtype, requires_grad=True)
    torch.manual_seed(7)
    expected = gradients(program, [x])
    torch.manual_seed(7)
    assert_equal_bits(expected, gradients(program, [x], rig))
    assert rig.saved > 0


# -- the registry --------------------------------------------------------------------------------------------
def test_the_stricter_kind_wins_in_either_order() -> None:
    value = torch.randn(4)
    key = value.untyped_storage()._cdata
    for kinds in (
        (ExternalKind.BUFFER, ExternalKind.PARAMETER),
        (ExternalKind.PARAMETER, ExternalKind.BUFFER),
    ):
        registry = ExternalStorages()
        for kind in kinds:
            registry.register(value, kind)
        assert registry.kinds.get(key) is ExternalKind.PARAMETER
        assert len(registry.kinds) == 1


def test_a_registered_storage_is_not_kept_alive_and_is_forgotten() -> None:
    registry = ExternalStorages()
    value = torch.randn(4)
    key = value.untyped_storage()._cdata
    registry.register(value, ExternalKind.OPTED_OUT)
    del value
    # the address is pinned as long as the entry lives
    assert registry.kinds.get(key) is ExternalKind.OPTED_OUT
    registry.forget_dead()
    assert len(registry.kinds) == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_and_parameters_without_a_shape_yet_can_be_registered() -> None:
    """A model has them as buffers, and a lazy module makes its weights in the first forward."""
    externals, sparse, compressed = (
        ExternalStorages(),
        torch.eye(16).to_sparse(),
        torch.eye(16).to_sparse_csr(),
    )
    externals.register_parameters([sparse, compressed, *nn.LazyLinear(4).parameters()])
    for values in (sparse._values(), compressed.values()):
        assert verdict_of(values, externals=externals) is Verdict.PARAMETER
    assert len(externals.kinds) == 3, "and the coordinates of the first"


def test_a_step_s_end_forgets_receive_buffers_that_are_gone(rig: Rig) -> None:
    rig.engine.register_external(torch.randn(4))
    rig.end()
    assert len(rig.engine.externals.kinds) == 0


def test_packing_in_no_scope_passes_everything_through(rig: Rig) -> None:
    assert type(rig.engine.hooks.pack(torch.randn(ELEMENTS))) is Passed
    with rig.group():
        assert type(rig.engine.hooks.pack(torch.randn(ELEMENTS))) is Handle

"""What cannot be streamed is resident and said, or an error before anything has moved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import HybridDeviceOptimizer
from offload.errors import HostBudgetError
from offload.modules.weights import weights_limit
from tests.inside import streams_from
from tests.unit.groups.stack import build_manager, installed
from tests.unit.weights.streamed import BLOCK_BYTES, BLOCKS, ROWS, WIDTH, Block, Model, squares, streamed


@pytest.fixture(autouse=True)
def small_weights_stream() -> Any:
    with installed(build_manager()), streams_from(WIDTH * WIDTH):
        yield


@pytest.fixture
def model() -> Model:
    return Model()


def is_plain(model: nn.Module) -> bool:
    return all(
        type(parameter) is nn.Parameter and parameter.untyped_storage().nbytes()
        for parameter in model.parameters()
    )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("1kB", "one block computes while the next arrives"),
        (5, "write '5GB'"),
        ("gpu", "weights is 'gpu', must be .*; or weights=\"host\": those of all blocks wait there"),
        (True, 'weights is True, must be .*; or weights="host"'),
        (-1, "must be a whole number of bytes"),
    ],
)
def test_a_limit_that_is_none(model: Model, weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offload.apply(model, weights=weights)
    assert is_plain(model)
    offload.apply(model, weights="host").remove()


def test_weights_that_the_host_has_no_room_for(model: Model) -> None:
    with pytest.raises(HostBudgetError, match=rf"streamed weights {BLOCKS * BLOCK_BYTES / 1000:.2f} kB"):
        offload.apply(model, weights="host", host_limit="8192B")
    assert is_plain(model)


def test_host_memory_that_ends_while_weights_move_leaves_them_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model()
    plain = copy.deepcopy(model)
    engine = offload.configure(device="sim").engine
    contiguous, asked = engine.arena.contiguous, []

    def runs_out(nbytes: int) -> Any:
        asked.append(nbytes)
        if len(asked) > 5:
            raise HostBudgetError("no more")
        return contiguous(nbytes)

    monkeypatch.setattr(engine.arena, "contiguous", runs_out)
    with pytest.raises(HostBudgetError, match="no more"):
        offload.apply(model, weights="host")
    assert is_plain(model)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert engine.arena.lent_bytes == 0
    x = torch.randn(ROWS, WIDTH)
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda: nn.LayerNorm(8), {}, r"no weight of Sequential that streams: 6 are smaller than 256"),
        (lambda: torch.jit.script(nn.Linear(WIDTH, WIDTH)), {}, r"0 is a module of torch\.jit"),
        (Block, {"modules": "*.up"}, "name whole blocks with blocks"),
    ],
)
def test_models_and_modules_that_do_not_stream(build: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offload.apply(nn.Sequential(*(build() for _ in range(3))), weights="host", **options)


def test_a_model_that_is_streamed_already(model: Model) -> None:
    with offload.apply(model, weights="host"):
        for options in ({"weights": "host"}, {"mode": "groups"}):
            with pytest.raises(ValueError, match=r"call remove\(\) on that handle first"):
                offload.apply(model, **options)  # type: ignore[arg-type]


def test_blocks_compiled_with_graphs(model: Model) -> None:
    layers: Any = model.layers
    layers[1].compile(mode="reduce-overhead")
    with pytest.raises(ValueError, match=r"layers.1 is compiled with CUDA graphs"):
        offload.apply(model, weights="host")
    layers[1]._compiled_call_impl = None
    with streamed(model) as pair:
        layers[1].compile(mode="reduce-overhead")
        with pytest.raises(ValueError, match=r"layers.1 is compiled with CUDA graphs"):
            pair.model(torch.randn(ROWS, WIDTH))
        layers[1]._compiled_call_impl = None


@pytest.mark.parametrize("compiled", ["function", "model", "block"])
def test_graphs_that_are_recorded_around_blocks(compiled: str) -> None:
    """Nothing of the model says so: only the call comes from compiled code."""
    model = nn.Sequential(nn.Sequential(*Model().layers))
    if compiled == "model":
        run = torch.compile(model, mode="reduce-overhead")
    with offload.apply(model, weights="host", blocks="0.*"):
        if compiled == "function":
            run = torch.compile(lambda x: model(x), mode="reduce-overhead")
        if compiled == "block":
            model[0][1] = torch.compile(model[0][1], mode="reduce-overhead")  # type: ignore[index, operator]
            run = model
        with pytest.raises(ValueError, match=r"0\.[01] is compiled with CUDA graphs"):
            run(torch.randn(ROWS, WIDTH))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sharded", ["model", "blocks"])
def test_parameters_that_fsdp_takes_over_afterwards(sharded: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = Model()
    with offload.apply(model, weights="host"):
        part: Any = model if sharded == "model" else model.layers[0]  # type: ignore[index]
        with pytest.raises(offload.OffloadError, match=r"fully_shard\(\) of .* \(layers.0.up.weight\): FSDP"):
            fully_shard(part)


def test_compiled_blocks() -> None:
    with streamed(Model(3)) as pair:
        for model in (pair.model, pair.plain):
            for layer in model.layers:
                layer.compile(backend="aot_eager")
        pair.train(3)
        for model in (pair.model, pair.plain):
            for layer in model.layers:
                layer._compiled_call_impl = None


def test_the_hybrid_optimizer_does_not_step_what_streams_whichever_comes_first(model: Model) -> None:
    handle = offload.apply(model, weights="host")
    with pytest.raises(ValueError, match=r"is streamed by apply\(weights=...\)"):
        HybridDeviceOptimizer(model.parameters(), 1.0)
    handle.remove()
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0)
    with pytest.raises(ValueError, match=r"layers.0.up.weight is stepped by a HybridDeviceOptimizer"):
        offload.apply(model, weights="host")
    optimizer.close()


@pytest.mark.parametrize("overlap", ["step", "forward", "backward"])
def test_the_hybrid_optimizer_steps_what_does_not_stream(overlap: Any) -> None:
    with streamed(frozen=True) as pair:
        trained = [p for p in pair.model.parameters() if p.requires_grad]
        ours = HybridDeviceOptimizer(trained, 1.0, lr=1e-2, overlap=overlap, model=pair.model)
        its = torch.optim.AdamW([p for p in pair.plain.parameters() if p.requires_grad], lr=1e-2, fused=True)
        for _ in range(3):
            x = torch.randn(ROWS, WIDTH)
            for model, optimizer in ((pair.model, ours), (pair.plain, its)):
                optimizer.zero_grad()
                squares(model, x).backward()
                optimizer.step()
        ours.synchronize_parameters()
        pair.check_weights()
        ours.close()


def test_tied_and_shared_weights_adapters_and_small_ones_are_resident_and_said(model: Model) -> None:
    layers: Any = model.layers
    layers[1].up = layers[0].up  # a module of two blocks
    layers[3].down.weight = layers[2].down.weight  # a parameter of two modules
    model.head.weight = nn.Parameter(layers[4].up.weight.data[:3])  # another one in the same memory
    layers[5].up.lora_A = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    layers[5].register_buffer("links", torch.eye(3).to_sparse(), False)  # of no storage
    with streamed(model) as pair:
        figures = pair.figures
        assert {why: number for why, (number, _) in figures.resident.items()} == {
            "smaller than 256 elements": 23,
            "tied, or of a module that is used in two places": 2,
            "in one storage with another parameter or buffer": 1,
            "of an adapter": 1,
            "outside of the blocks": 4,
        }
        text = str(pair.handle.report())
        for why in figures.resident:
            assert f"resident, {why}:" in text
        x = torch.randn(ROWS, WIDTH)
        for each in (pair.model, pair.plain):
            squares(each, x).backward()
        pair.check_gradients()
    assert "wait on the host" in repr(pair.handle)


def test_memory_that_others_hold_when_it_leaves_is_theirs_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    held = model.layers[2].up.weight.data  # type: ignore[union-attr]
    before = held.clone()
    with streamed(model) as pair:
        pair.train(2)
        assert torch.equal(held, before)  # as it was when apply() was called
    assert (
        "1 streamed weights of Model share their memory with something else (the first: layers.2"
        in caplog.text
    )


@pytest.mark.usefixtures("one_rank")
def test_a_distributed_wrapper_is_built_before() -> None:
    with streamed() as pair, pytest.raises(offload.errors.OffloadError, match="Build it first"):
        nn.parallel.DistributedDataParallel(pair.model)
    model = Model()
    plain = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    handle = offload.apply(wrapped, weights="host")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH)
        for each, optimizer in zip((wrapped, plain), optimizers, strict=True):
            squares(each, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(offload.errors.OffloadError, match="its end sends them"), wrapped.join():
        pass
    with wrapped.join():
        handle.remove()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded = Model()
    for layer in sharded.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"FSDP manages .*CPUOffloadPolicy.*FSDPGPUOptimizerWrapper"):
        offload.apply(sharded, weights="host")


def test_hooks_of_the_users_that_keep_what_they_are_given() -> None:
    with streamed(frozen=True) as pair:
        kept: list[object] = []

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            def pack(tensor: Tensor) -> object:
                kept.append(tensor)
                return (tensor,)

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0]):
                return squares(model, x)

        pair.train(2, loss)
        kept.clear()
        pair.train(2)


def test_the_limit_in_words() -> None:
    assert (weights_limit(None), weights_limit("host"), weights_limit("6GB")) == (None, None, 6 * 10**9)

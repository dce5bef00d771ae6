"""Weights from safetensors files: into a model whose weights stream, or that streams afterwards."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import offload
from offload.errors import HostBudgetError, WeightFileError
from offload.marks import default_manager
from tests.inside import streaming_of, streams_from
from tests.unit.groups.stack import build_manager, installed
from tests.unit.weights.streamed import BLOCK_BYTES, BLOCKS, ROWS, WIDTH, Model, Pair, adam, expand_as

Files = dict[str, dict[str, Tensor]]


class Turned(nn.Module):
    """A buffer that no file has, and one that files have."""

    def __init__(self, computes: bool = True) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(WIDTH, dtype=torch.float32) / 7, persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        if computes:
            self.reset_parameters = self._compute

    def _compute(self) -> None:
        self.angles.copy_(torch.arange(WIDTH, dtype=torch.float32) / 7)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angles.cos() + self.count


class Whole(Model):
    """As Model, with a tied pair and buffers."""

    def __init__(self, computes: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.turned = Turned(computes)
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again.weight = self.embed.weight

    def forward(self, x: Tensor, skip: tuple[int, ...] = ()) -> Tensor:
        return super().forward(self.turned(self.again(x)), skip)


@pytest.fixture(autouse=True)
def small_weights_stream() -> Iterator[None]:
    with installed(build_manager()), streams_from(WIDTH * WIDTH):
        yield


@pytest.fixture
def plain() -> Whole:
    torch.manual_seed(0)
    model = Whole()
    model.turned.count.fill_(3)
    return model


def on_meta(**options: Any) -> Whole:
    with torch.device("meta"):
        return Whole(**options)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """As safetensors files have them: one name of a tied pair."""
    return {name: value for name, value in model.state_dict().items() if name != "again.weight"}


def write(folder: Path, shards: Files, index: bool = True) -> Path:
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    if index:
        where = {key: name for name, tensors in shards.items() for key in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def in_three(model: nn.Module) -> Files:
    tensors = tensors_of(model)
    keys = [*tensors]
    return {f"part-{at}.safetensors": {key: tensors[key] for key in keys[at::3]} for at in range(3)}


@pytest.fixture
def folder(plain: Whole, tmp_path: Path) -> Path:
    return write(tmp_path, in_three(plain))


def has_values_of(model: nn.Module, plain: nn.Module) -> None:
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("mode", [None, "hidden_states", "groups", True])
@pytest.mark.parametrize("first", ["apply", "load"])
def test_a_model_on_meta_trains_as_the_one_that_was_saved(
    plain: Whole, folder: Path, mode: Any, first: str
) -> None:
    model = on_meta()
    objects = [*model.parameters()]
    if first == "apply":
        handle = offload.apply(model, mode, weights="host")
        offload.load_weights(model, folder)
    else:
        offload.load_weights(model, folder)
        assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
        handle = offload.apply(model, mode, weights="host")
    assert all(map(lambda a, b: a is b, model.parameters(), objects))
    pair = Pair(model, plain, handle)
    pair.train()
    assert pair.stream.residency.present_bytes_peak == 2 * BLOCK_BYTES
    handle.remove()
    has_values_of(model, plain)
    assert all(type(each) is nn.Parameter and each.device.type == "cpu" for each in model.parameters())
    assert model.again.weight is model.embed.weight


def test_an_optimizer_that_was_there_first_steps_what_was_loaded(plain: Whole, folder: Path) -> None:
    model = on_meta()
    optimizer = adam(model)
    with offload.apply(model, weights="host") as handle:
        offload.load_weights(model, folder)
        Pair(model, plain, handle).train(optimizers=(optimizer, adam(plain)))


def test_one_tensor_at_a_time_is_in_memory_twice_and_no_weight_reaches_the_device(plain: Whole) -> None:
    given = tensors_of(plain)
    alive: list[weakref.ref[Tensor]] = []
    most = []

    class Source:
        def keys(self) -> Any:
            return given.keys()

        def get_tensor(self, name: str) -> Tensor:
            alive.append(weakref.ref(value := given[name].clone()))
            most.append(sum(each() is not None for each in alive))
            return value

    model = on_meta()
    with offload.apply(model, weights="host", gradients="device") as handle:
        lent = default_manager().engine.arena.lent_bytes
        offload.load_weights(model, Source())
        assert (len(most), max(most)) == (len(given), 2)  # the next is read while the last goes
        assert (lent, default_manager().engine.arena.lent_bytes) == (0, BLOCKS * BLOCK_BYTES)
        assert streaming_of(handle).residency.present_bytes_peak == 0
        Pair(model, plain, handle).train()


def test_another_load_replaces_trained_weights(plain: Whole, folder: Path) -> None:
    saved = copy.deepcopy(plain)
    model = copy.deepcopy(plain)
    with offload.apply(model, weights="host") as handle:
        Pair(model, plain, handle).train(1)
        offload.load_weights(model, folder)
        Pair(model, saved, handle).train(2)


def test_each_value_takes_the_dtype_of_its_parameter(plain: Whole, folder: Path) -> None:
    model = on_meta().bfloat16()
    with offload.apply(model, weights="host") as handle:
        offload.load_weights(model, folder)
        Pair(model, plain.bfloat16(), handle).check_weights()


def test_a_model_may_be_in_one_file_in_files_without_an_index_or_on_the_device(
    plain: Whole, tmp_path: Path
) -> None:
    write(tmp_path, {"model.safetensors": tensors_of(plain)}, index=False)
    for path in (tmp_path, tmp_path / "model.safetensors", str(tmp_path / "model.safetensors")):
        model = on_meta()
        assert offload.load_weights(model, path) == ([], [])
        has_values_of(model, plain)
    (tmp_path / "model.safetensors").unlink()
    write(tmp_path, in_three(plain), index=False)
    torch.manual_seed(1)
    model = Whole()
    offload.load_weights(model, tmp_path)
    has_values_of(model, plain)


def test_names_that_do_not_fit_are_taken_without_strict(plain: Whole, tmp_path: Path) -> None:
    tensors = tensors_of(plain)
    bias = tensors.pop("head.bias")
    write(tmp_path, {"model.safetensors": tensors | {"more.weight": torch.zeros(2)}}, index=False)
    torch.manual_seed(0)
    model = Whole()
    with pytest.raises(WeightFileError, match=r"1 \(head.bias\) are missing.*1 \(more.weight\) are unexp"):
        offload.load_weights(model, tmp_path)
    assert offload.load_weights(model, tmp_path, strict=False) == (["head.bias"], ["more.weight"])
    has_values_of(model, plain)
    assert torch.equal(model.head.bias, bias)
    with pytest.raises(WeightFileError, match=r"of them 1 \(head.bias\) on meta"):
        offload.load_weights(on_meta(), tmp_path, strict=False)


def _cut_short(folder: Path, shards: Files) -> None:
    write(folder, shards)
    path = folder / "part-1.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def _gone(folder: Path, shards: Files) -> None:
    write(folder, shards)
    (folder / "part-1.safetensors").unlink()


def _twice(folder: Path, shards: Files) -> None:
    shards["part-2.safetensors"]["embed.weight"] = torch.zeros(WIDTH, WIDTH)
    write(folder, shards)


def _wrong_index(folder: Path, shards: Files) -> None:
    write(folder, shards)
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"embed.weight": "part-0', '"embed.weight": "part-1'))


def _no_index(folder: Path, shards: Files) -> None:
    write(folder, shards, index=False)
    (folder / "model.safetensors.index.json").write_text("[]")


def _shape(folder: Path, shards: Files) -> None:
    shards["part-0.safetensors"]["embed.weight"] = torch.zeros(WIDTH, 3)
    write(folder, shards)


def _whole_numbers(folder: Path, shards: Files) -> None:
    shards["part-0.safetensors"]["embed.weight"] = torch.zeros(WIDTH, WIDTH, dtype=torch.int8)
    write(folder, shards)


def _one_byte(folder: Path, shards: Files) -> None:
    shards["part-0.safetensors"]["embed.weight"] = torch.zeros(WIDTH, WIDTH).to(torch.float8_e4m3fn)
    write(folder, shards)


def _differ(folder: Path, shards: Files) -> None:
    shards["part-0.safetensors"]["again.weight"] = torch.zeros(WIDTH, WIDTH)
    write(folder, shards)


def _nothing(folder: Path, shards: Files) -> None:
    pass


def _two_indexes(folder: Path, shards: Files) -> None:
    write(folder, shards)
    (folder / "other.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_cut_short, r"part-1.safetensors cannot be read as safetensors"),
        (_gone, r"part-1.safetensors cannot be read as safetensors"),
        (_twice, r"embed.weight is in .*part-\d.safetensors and in .*part-\d.safetensors"),
        (_wrong_index, r"says that embed.weight is in .*part-1.safetensors, which has no such"),
        (_no_index, r"index.json has no weight_map"),
        (_shape, r"embed.weight is \(16, 3\) in .*part-0.safetensors, and \(16, 16\) in the model"),
        (_whole_numbers, r"embed.weight is torch.int8 in .*, and torch.float32 in the model"),
        (_one_byte, r"embed.weight is torch.float8_e4m3fn in .*, and torch.float32 in the model"),
        (_differ, r"\w+.weight and \w+.weight are one weight in the model, and differ in"),
        (_nothing, r"has no \*.safetensors; name one file or index"),
        (_two_indexes, r"has model.safetensors.index.json, other.safetensors.index.json; name one"),
    ],
)
def test_files_that_do_not_fit_are_named_before_anything_has_moved(
    plain: Whole, tmp_path: Path, spoil: Any, message: str
) -> None:
    spoil(tmp_path, in_three(plain))
    torch.manual_seed(1)
    model, empty = Whole(), on_meta()
    before = copy.deepcopy(model)
    handles = [offload.apply(each, weights="host") for each in (model, empty)]
    for each in (model, empty):
        with pytest.raises(WeightFileError, match=message):
            offload.load_weights(each, tmp_path)
    assert all(each.is_meta for each in (*empty.parameters(), *empty.buffers()))
    has_values_of(model, before)
    for handle in handles:
        handle.remove()


def test_a_buffer_that_nothing_computes_is_named(folder: Path) -> None:
    model = on_meta(computes=False)
    offload.apply(model, weights="host")
    with pytest.raises(ValueError, match=r"turned.angles of Whole is a buffer on meta and in no file"):
        offload.load_weights(model, folder)
    assert all(each.is_meta for each in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("hold", ["hook", "weak", "graph"])
def test_a_parameter_on_meta_that_torch_gives_no_memory_is_named(folder: Path, hold: str) -> None:
    model = on_meta()
    weight = model.layers[1].up.weight  # type: ignore[union-attr]
    held = {
        "hook": lambda: weight.register_post_accumulate_grad_hook(lambda _: None),
        "weak": lambda: weakref.ref(weight),
        "graph": lambda: (weight * 2).sum(),
    }[hold]()
    offload.apply(model, weights="host")
    with pytest.raises(ValueError, match=r"layers.1.up.weight is on the meta device, and a hook"):
        offload.load_weights(model, folder)
    assert all(each.is_meta for each in model.parameters())
    del held


def frozen(model: Whole) -> Whole:
    model.layers.requires_grad_(False)
    return model


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_frozen_weights_of_files_wait_as_int8(plain: Whole, folder: Path, quantize: Any) -> None:
    model = frozen(on_meta())
    handle = offload.apply(model, weights="host", quantize="int8")
    offload.load_weights(model, folder, quantize)
    assert default_manager().engine.arena.lent_bytes == handle.weights.int8_bytes < BLOCKS * BLOCK_BYTES / 3
    pair = Pair(model, frozen(plain), handle)
    expand_as(pair)
    pair.train()
    with pytest.raises(offload.OffloadError, match=r"is held as INT8 and cannot be written"):
        offload.load_weights(model, folder)
    pair.train()
    handle.remove()
    has_values_of(model, pair.plain)


def test_int8_weights_of_files_that_are_not_finite_are_named_and_can_come_later(
    plain: Whole, folder: Path
) -> None:
    model = frozen(on_meta())
    handle = offload.apply(model, weights="host", quantize="int8")
    spoiled = copy.deepcopy(plain)
    spoiled.layers[3].down.weight.data[2, 2] = torch.nan  # type: ignore[union-attr, operator]
    for name, tensors in in_three(spoiled).items():
        save_file(tensors, folder / name)
    with pytest.raises(ValueError, match=r"layers.3.down.weight has values that are inf or nan"):
        offload.load_weights(model, folder)
    for name, tensors in in_three(plain).items():
        save_file(tensors, folder / name)
    handle.remove()
    model.to("meta")
    model.again.weight = model.embed.weight
    handle = offload.apply(model, weights="host", quantize="int8")
    offload.load_weights(model, folder)
    handle.remove()


def test_the_weights_beside_those_of_a_slab_come_from_files(plain: Whole, folder: Path) -> None:
    model = frozen(copy.deepcopy(plain))
    handle = offload.apply(model, weights="host", quantize="int8")
    handle.write_slab(folder / "slab")
    handle.remove()
    (folder / "slab.safetensors").rename(folder.parent / "slab.safetensors")
    (folder / "slab.manifest.json").rename(folder.parent / "slab.manifest.json")
    model = frozen(on_meta())
    handle = offload.apply(model, weights="host", quantize=folder.parent / "slab.manifest.json")
    loaded = offload.load_weights(model, folder, strict=False)
    assert len(loaded.unexpected_keys) == 2 * BLOCKS  # which the slab has
    pair = Pair(model, frozen(plain), handle)
    expand_as(pair)
    pair.train()
    handle.remove()


def test_memory_of_another_order_and_a_load_in_inference_mode(tmp_path: Path) -> None:
    def build() -> nn.Module:
        blocks = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3))
        model = nn.Sequential(blocks, nn.Conv2d(16, 2, 3))
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    plain = build()
    tensors = {name: value.contiguous() for name, value in plain.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = build()
        handle = offload.apply(model, weights="host", blocks="0.*")
        with torch.inference_mode():
            offload.load_weights(model, tmp_path)
    x = torch.randn(2, 8, 9, 9)
    for each in (model, plain):
        each(x).sum().backward()
    handle.remove()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, its)
        assert mine.stride() == its.stride()
        assert torch.equal(mine.grad, its.grad)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantize_has_to_be_what_apply_was_given(folder: Path, quantize: str) -> None:
    model = frozen(on_meta())
    for _ in range(2):
        with pytest.raises(ValueError, match=f"quantize='{quantize}' has to be what apply"):
            offload.load_weights(model, folder, quantize)
        offload.apply(model, weights="host").remove()
    assert all(each.is_meta for each in model.parameters())


def test_before_its_values_have_come_a_model_says_so_and_can_be_removed(plain: Whole, folder: Path) -> None:
    model = on_meta()
    handle = offload.apply(model, weights="host")
    x = torch.randn(ROWS, WIDTH)
    with pytest.raises(offload.OffloadError, match=r"on the meta device, which has no values .*embed.weight"):
        model(x)
    with pytest.raises(offload.OffloadError, match=r"layers.0.up.weight is on meta, without values"):
        model.layers[0](x)  # type: ignore[operator]
    assert all(value.is_meta for value in model.state_dict().values())
    assert all(each.is_meta for each in copy.deepcopy(model).parameters())
    assert default_manager().engine.arena.lent_bytes == 0
    with pytest.raises(ValueError, match=r"remove\(device='cpu'\) on meta"):
        handle.remove(device="cpu")
    handle.remove()
    assert all(each.is_meta for each in (*model.parameters(), *model.buffers()))
    offload.load_weights(model, folder)
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_state_dict_that_is_assigned_gives_values_as_well(plain: Whole, quantize: Any) -> None:
    model, plain = (each if quantize is None else frozen(each) for each in (on_meta(), plain))
    with offload.apply(model, weights="host", quantize=quantize) as handle:
        model.load_state_dict(copy.deepcopy(plain.state_dict()), assign=True)
        model.again.weight = model.embed.weight  # a state dict ties nothing
        model.turned.angles = plain.turned.angles.clone()
        pair = Pair(model, plain, handle)
        if quantize is not None:
            expand_as(pair)
        pair.train()


def test_a_model_that_is_on_meta_in_part(plain: Whole, tmp_path: Path) -> None:
    """Blocks whose one weight has values, and the other one none yet."""
    model = on_meta()
    for ours, its in zip(model.layers, plain.layers, strict=True):
        ours.up = copy.deepcopy(its.up)  # type: ignore[union-attr]
    stored = {name: value for name, value in tensors_of(plain).items() if ".up." not in name}
    write(tmp_path, {"model.safetensors": stored}, index=False)
    handle = offload.apply(model, weights="host")
    with pytest.raises(offload.OffloadError, match=r"layers.0.down.weight is on meta"):
        model.layers[0](torch.randn(ROWS, WIDTH))  # type: ignore[operator]
    offload.load_weights(model, tmp_path, strict=False)
    Pair(model, plain, handle).train()
    handle.remove()
    has_values_of(model, plain)


def test_host_memory_that_ends_while_weights_come_is_said_and_the_rest_can_come_later(
    plain: Whole, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_meta()
    with offload.apply(model, weights="host") as handle:
        arena = default_manager().engine.arena
        contiguous, asked = arena.contiguous, []

        def runs_out(nbytes: int) -> Any:
            asked.append(nbytes)
            if len(asked) == 5:
                raise HostBudgetError("no more")
            return contiguous(nbytes)

        monkeypatch.setattr(arena, "contiguous", runs_out)
        with pytest.raises(HostBudgetError, match="no more"):
            offload.load_weights(model, folder)
        with pytest.raises(offload.OffloadError, match="which has no values"):
            model(torch.randn(ROWS, WIDTH))
        offload.load_weights(model, folder)
        Pair(model, plain, handle).train()


# -- where it trains, and where weights go -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu"}, r"device='cpu' without weights="),
        ({"weights": "host", "device": "cuda:7"}, r"device='cuda:7': weights stream to one of 0 GPUs"),
        ({"weights": "host", "device": "meta"}, r"device='meta': weights stream to one of"),
        ({"weights": "host", "device": "gpu"}, r"device='gpu' is no device"),
        ({"weights": "host", "device": 3}, r"device=3"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the GPUs of a machine without one")
def test_a_device_that_is_none(options: Any, message: str) -> None:
    model = Model()
    with pytest.raises(ValueError, match=message):
        offload.apply(model, **options)
    offload.apply(model, weights="host", device="cpu").remove()


def test_weights_that_do_not_fit_where_they_would_go_are_refused_first(
    plain: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(plain)
    handle = offload.apply(model, weights="host")
    pair = Pair(model, plain, handle)
    pair.train(2)
    there = pair.present_bytes
    needed = BLOCKS * BLOCK_BYTES - there
    device: Any = default_manager().engine.device
    monkeypatch.setattr(device, "free_bytes", lambda: needed - 1)
    for options in ({}, {"device": "cpu"}):
        with pytest.raises(ValueError, match=f"brings {needed:,} bytes .* and {needed - 1:,} are free"):
            handle.remove(**options)
    assert pair.present_bytes == there
    pair.train(2)
    monkeypatch.setattr(device, "free_bytes", lambda: needed)
    handle.remove(device="cpu")
    has_values_of(model, plain)


def test_a_device_for_remove_needs_weights_that_moved(plain: Whole) -> None:
    handle = offload.apply(plain, "groups")
    with pytest.raises(ValueError, match=r"which moved no weights; use model.to\(\)"):
        handle.remove(device="cpu")
    handle.remove()


def test_a_model_that_is_applied_again_shares_its_memory_with_nobody(
    plain: Whole, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        handle = offload.apply(plain, weights="host")
        plain(torch.randn(ROWS, WIDTH)).sum().backward()
        handle.remove()
    assert "share their memory" not in caplog.text


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_a_hybrid_optimizer_steps_what_was_loaded(plain: Whole, folder: Path, overlap: Any) -> None:
    """Its hooks came before those of the gradients, which a parameter on meta may not have: HazardError."""
    model = on_meta()
    with offload.apply(model, weights="host"):
        offload.load_weights(model, folder)
        trained = [*model.layers.parameters()]
        engine = default_manager().engine
        ours = offload.HybridDeviceOptimizer(
            trained, offload_fraction=1.0, lr=1e-2, overlap=overlap, model=model, engine=engine
        )
        its = adam(plain.layers)
        for seed in range(4):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
            for each, optimizer in ((model, ours), (plain, its)):
                each(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                each.zero_grad()
        for mine, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        ours.close()

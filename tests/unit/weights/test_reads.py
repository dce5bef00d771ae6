"""Weights that are away are read, written, copied, saved, loaded and converted as torch's own, any time."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from offload.errors import OffloadError
from offload.optim import HybridDeviceOptimizer
from tests.unit.weights.streamed import BLOCK_BYTES, ROWS, WIDTH, Model, Pair, squares, streamed


def weight_of(model: Any, layer: int = 3) -> Any:
    return model.layers[layer].up.weight


def leave(pair: Pair) -> None:
    """Every block that is looked at below has left, for the device has room for two."""
    pair.model(torch.randn(ROWS, WIDTH))


def saved(value: object) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


READS: dict[str, Any] = {
    "sum": lambda w: w.sum(),
    "item": lambda w: w[0, 0].item(),
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "viewed": lambda w: w.view_as(w),
    "transposed": lambda w: w.t(),
    "of a view": lambda w: w.detach()[1:3].t().contiguous(),
    "product": lambda w: w @ w.t(),
    "clone": lambda w: w.clone(),
    "cpu": lambda w: w.cpu() + 0,
    "array": lambda w: w.detach().numpy(),
    "asarray": lambda w: np.asarray(w.detach()),
    "list": lambda w: w.tolist(),
    "text": lambda w: repr(w.detach()),
    "deepcopy": copy.deepcopy,
    "saved": saved,
    "parameter": nn.Parameter,
    "norms": lambda w: torch._foreach_norm([w, w.data])[0],
    "compared": lambda w: torch.equal(w, w.clone()),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_gives_the_weight(read: str) -> None:
    with streamed() as pair:
        pair.train(2)
        found, expected = (READS[read](weight_of(model)) for model in (pair.model, pair.plain))
        if isinstance(expected, Tensor):
            assert isinstance(found, nn.Parameter) == isinstance(expected, nn.Parameter)
            assert torch.equal(found, expected)
        else:
            assert np.all(found == expected)
        assert pair.present_bytes <= 2 * BLOCK_BYTES


def test_an_alias_from_outside_is_read_and_written_wherever_the_bytes_are() -> None:
    with streamed() as pair:
        aliases = [
            (weight_of(model).data, weight_of(model).detach()[1]) for model in (pair.model, pair.plain)
        ]
        for _ in range(2):
            leave(pair)
            for whole, row in aliases:
                with torch.no_grad():
                    whole.mul_(2)
                    row.add_(1)
            leave(pair)
            assert all(torch.equal(mine, its) for mine, its in zip(*aliases, strict=True))
            pair.check_weights()
        pair.train(2)
    assert all(type(alias) is Tensor for alias in aliases[0])
    assert torch.equal(aliases[0][0], weight_of(pair.model))


def test_writes_of_one_weight_and_of_lists() -> None:
    with streamed() as pair:
        for model in (pair.model, pair.plain):
            with torch.no_grad():
                weight_of(model).add_(1)
                nn.init.ones_(weight_of(model, 1))
                for parameter in model.parameters():
                    parameter.lerp_(torch.ones_like(parameter), 0.25)
                torch._foreach_mul_([parameter.data for parameter in model.parameters()], 0.5)
                flat = nn.utils.parameters_to_vector(model.parameters())
                nn.utils.vector_to_parameters(3 * flat, model.parameters())
        pair.check_weights()
        pair.train(2)


def test_a_list_of_weights_is_worked_on_within_the_window() -> None:
    with streamed() as pair:
        weights = [list(model.parameters()) for model in (pair.model, pair.plain)]
        norms = [torch._foreach_norm(each) for each in weights]
        assert all(map(torch.equal, *norms))
        with torch.no_grad():
            for each in weights:
                torch._foreach_add_(each, each, alpha=0.5)
        assert pair.stream.residency.present_bytes_peak <= 2 * BLOCK_BYTES
        pair.check_weights()


def test_an_array_of_a_weight_cannot_be_written_where_nobody_would_see_it() -> None:
    with streamed() as pair, pytest.raises(ValueError, match="read-only"):
        weight_of(pair.model).detach().numpy()[0] = 1


@pytest.mark.parametrize("name", ["data_ptr", "untyped_storage", "share_memory_", "__dlpack__"])
def test_what_would_outlive_the_bytes_is_an_error_that_says_what_to_do(name: str) -> None:
    with streamed() as pair, pytest.raises(OffloadError, match=r"layers.3.up.weight.*Use clone\(\)"):
        getattr(weight_of(pair.model), name)()


def test_a_state_dict_has_live_views_of_the_hosts_copy_each_with_its_own_bytes_only() -> None:
    with streamed() as pair:
        state = pair.model.state_dict()
        of_block = [value for name, value in state.items() if ".up.weight" in name or ".down.weight" in name]
        assert all(value.device.type == "cpu" and isinstance(value, Tensor) for value in of_block)
        assert all(v.untyped_storage().nbytes() == v.numel() * v.element_size() for v in of_block)
        file = io.BytesIO()
        torch.save(state, file)
        values = sum(value.numel() * value.element_size() for value in state.values())
        assert len(file.getvalue()) < values + 1000 * len(state)
        assert pair.model.state_dict(keep_vars=True)["layers.3.up.weight"] is weight_of(pair.model)
        pair.train(2)
        pair.model.state_dict()  # what it gave before is the newest then
        assert all(torch.equal(state[name], value) for name, value in pair.plain.state_dict().items())
        del state, values, of_block


SNAPSHOTS: dict[str, Any] = {
    "cpu": lambda v: v.cpu(),
    "cpu of an alias": lambda v: v.detach().data[:].cpu(),
    "cpu of the same": lambda v: v.float().contiguous().cpu(),
    "to": lambda v: v.to("cpu"),
    "to a device": lambda v: v.to(torch.device("cpu"), torch.float32, non_blocking=True),
    "to by name": lambda v: v.to(device="cpu", dtype=v.dtype),
    "to another": lambda v: v.to(torch.empty(1)),
    "array": lambda v: torch.from_numpy(v.cpu().numpy()),
    "clone": lambda v: v.clone(),
    "deepcopy": copy.deepcopy,
    "saved": lambda v: saved(v),
}


@pytest.mark.parametrize("hybrid", [False, True])
def test_what_is_copied_to_the_cpu_is_a_snapshot_as_on_a_gpu(hybrid: bool) -> None:
    """`{k: v.cpu() for k, v in model.state_dict().items()}` was no copy, which later steps tore."""
    with streamed() as pair:
        optimizers = pair.with_state_on_host("step") if hybrid else pair.optimizers()
        value = pair.model.state_dict()["layers.3.up.weight"]
        expected = value.clone()
        taken = {name: snapshot(value) for name, snapshot in SNAPSHOTS.items()}
        options = StateDictOptions(cpu_offload=True)
        taken["dcp"] = get_model_state_dict(pair.model, options=options)["layers.3.up.weight"]
        for model, optimizer in zip((pair.model, pair.plain), optimizers, strict=True):
            squares(model, torch.ones(ROWS, WIDTH)).backward()
            optimizer.step()
        pair.model.state_dict()
        assert not torch.equal(value, expected)
        for name, snapshot in taken.items():
            assert torch.equal(snapshot, expected), name
            assert type(snapshot) is Tensor, name
        del value, taken
        if isinstance(optimizers[0], HybridDeviceOptimizer):
            optimizers[0].close()


def test_a_value_of_a_state_dict_is_live_where_it_is_not_copied() -> None:
    with streamed() as pair:
        value = pair.model.state_dict()["layers.3.up.weight"]
        assert value.to(torch.float32) is value
        parameter = nn.Parameter(value, requires_grad=False)
        assert type(parameter) is nn.Parameter
        assert not vars(parameter)
        with torch.no_grad():
            for each in (pair.plain.layers[3].up.weight, value.view(-1)):  # type: ignore[union-attr]
                each.zero_()  # type: ignore[operator]
        assert not weight_of(pair.model).any()
        assert torch.flatten(input=value).sum() + torch.cat([value]).sum() + parameter.sum() == 0
        del value, parameter, each


def test_what_is_written_to_a_state_dict_is_written_to_the_model() -> None:
    with streamed(weights="20.5kB") as pair:
        for _ in range(2):
            for model in (pair.model, pair.plain):
                with torch.no_grad():
                    for value in model.state_dict().values():
                        value.mul_(0.5)
            pair.train(2)


def test_a_write_between_a_forward_and_its_backward_is_torchs_own_error_also_through_the_host() -> None:
    with streamed() as pair:
        state = pair.model.state_dict()
        loss = squares(pair.model, torch.randn(ROWS, WIDTH))
        state["layers.3.up.weight"].zero_()
        pair.model.state_dict()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with torch.no_grad():
            pair.plain.layers[3].up.weight.zero_()
        pair.model.zero_grad()
        del state


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_state_dict(assign: bool) -> None:
    with streamed() as pair:
        pair.train(2)
        other = Model().state_dict()
        for model in (pair.model, pair.plain):
            model.load_state_dict(copy.deepcopy(other), assign=assign)
        pair.check_weights()
        pair.train(3)
        assert pair.present_bytes <= 2 * BLOCK_BYTES


def test_a_weight_that_assign_has_replaced_says_so_when_it_is_read() -> None:
    with streamed() as pair:
        old = weight_of(pair.model)
        pair.model.load_state_dict(Model().state_dict(), assign=True)
        pair.plain.load_state_dict(pair.model.state_dict())
        with pytest.raises(OffloadError, match="another parameter in its place"):
            old.sum()


def test_a_parameter_that_the_loop_replaces_is_resident_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with streamed() as pair:
        value = torch.randn(2 * WIDTH, WIDTH)
        for model in (pair.model, pair.plain):
            model.layers[2].up.weight = nn.Parameter(value.clone())
        pair.train(3)
        assert "have another parameter in their place (the first: layers.2.up.weight)" in caplog.text


def test_a_module_that_is_deleted_before_the_backward_of_its_forward_is_an_error_there() -> None:
    with streamed() as pair:
        loss = squares(pair.model, torch.randn(ROWS, WIDTH))
        pair.model.layers[2].up = pair.plain.layers[2].up = nn.Identity()
        pair.model.layers[2].down = pair.plain.layers[2].down = nn.Identity()
        with pytest.raises(OffloadError, match=r"layers.2.* was replaced, converted"):
            loss.backward()
        pair.model.zero_grad()
        pair.train(2)


def test_conversions_convert_the_hosts_copy() -> None:
    with streamed() as pair:
        pair.train(2)
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            for model in (pair.model, pair.plain):
                model.to(dtype)
            pair.check_weights()
            pair.train(2, lambda model, x, dtype=dtype: squares(model, x.to(dtype)))
            width = BLOCK_BYTES * dtype.itemsize // 4
            assert pair.present_bytes <= 2 * width
            # masters, and gradients
            assert pair.stream._engine.arena.lent_bytes == 2 * len(pair.model.layers) * width
        pair.model.to("cpu")  # where it is


def test_data_that_is_set_is_the_weights_and_no_alias() -> None:
    with streamed() as pair:
        value = torch.randn(2 * WIDTH, WIDTH)
        for model in (pair.model, pair.plain):
            weight_of(model).data = value.clone()
            weight_of(model, 1).data = weight_of(model, 1).data * 2
            with torch.no_grad():  # torch asks no class about set_, which parametrize calls
                weight_of(model, 2).set_(value * 3)
        pair.check_weights()
        assert pair.present_bytes < 6 * BLOCK_BYTES
        pair.train(2)
        with pytest.raises(OffloadError, match=r"remove\(\) on apply's handle first"):
            weight_of(pair.model).data = torch.zeros(3)
        with pytest.raises(OffloadError, match=r"set_\(\) of layers.3.up.weight"):
            weight_of(pair.model).set_()


def test_a_copy_of_the_model_is_plain_and_computes_the_same() -> None:
    with streamed() as pair:
        pair.train(2)
        for copied in (copy.deepcopy(pair.model), saved(pair.model)):
            assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
            x = torch.randn(ROWS, WIDTH)
            assert torch.equal(copied(x), pair.plain(x))
            copied.state_dict()
        assert pair.present_bytes <= 2 * BLOCK_BYTES


def test_an_average_of_the_weights() -> None:
    with streamed() as pair:
        averages = [
            AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for model in (pair.model, pair.plain)
        ]
        optimizers = pair.optimizers()
        for _ in range(3):
            pair.train(1, optimizers=optimizers)
            for average, model in zip(averages, (pair.model, pair.plain), strict=True):
                average.update_parameters(model)
        for mine, its in zip(*(average.parameters() for average in averages), strict=True):
            assert torch.equal(mine, its)


def test_remove_gives_the_weights_back_and_apply_takes_them_again() -> None:
    with streamed() as pair:
        pair.train(2)
    with streamed(pair.model) as again:
        again.train(2)

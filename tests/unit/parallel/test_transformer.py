"""The model: the same bits in one piece and in stages, marks where they belong, and configurations that are
refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import parallel.transformer
from parallel.transformer import (
    GROUP_NAMES,
    PRESETS,
    TransformerConfig,
    build_stage_module,
    group_names,
    layers_of_stage,
    saved_bytes_of_layer,
    stage_examples,
)
from tests.unit.moe.mixtures import marked, noted_marks

SMALL = TransformerConfig(dim=32, layers=3, heads=4, kv_heads=2, ffn=64, sequence=16, seed=3)


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(0, 256, (batch, SMALL.sequence), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return noted_marks(monkeypatch, parallel.transformer)


@pytest.mark.parametrize("stages", [2, 3])
def test_model_in_stages_computes_the_bits_of_the_model_in_one_piece(stages: int) -> None:
    whole = build_stage_module(SMALL, 0, 1)
    hidden = tokens()
    for stage in range(stages):
        hidden = build_stage_module(SMALL, stage, stages)(hidden)
    assert torch.equal(hidden, whole(tokens()))


def test_stage_holds_the_parameters_that_the_whole_model_has_under_the_same_names() -> None:
    whole = dict(build_stage_module(SMALL, 0, 1).named_parameters())
    parts = {
        name: part
        for stage in range(3)
        for name, part in build_stage_module(SMALL, stage, 3).named_parameters()
    }
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_later_tokens_do_not_reach_earlier_ones() -> None:
    module = build_stage_module(SMALL, 0, 1)
    changed = tokens()
    changed[:, 9] += 1
    before, after = module(tokens()), module(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_attention_knows_positions() -> None:
    module = build_stage_module(SMALL, 0, 1)
    repeated = torch.full((1, SMALL.sequence), 65)
    repeated[0, 3] = 66
    shifted = repeated.roll(1, dims=1)
    assert not torch.allclose(module(repeated)[0, 8], module(shifted)[0, 8], atol=1e-7)


def test_math_attention_agrees_with_the_other() -> None:
    plain, math = build_stage_module(SMALL, 0, 1), build_stage_module(SMALL.with_(math_attention=True), 0, 1)
    torch.testing.assert_close(plain(tokens()), math(tokens()), rtol=1e-4, atol=1e-5)


@pytest.mark.req("S2-96", "S2-97")
def test_layer_marks_all_its_groups_and_the_norms_commit_after_their_residual(marks: list[str]) -> None:
    config = SMALL.with_(layers=1, offload_modules=group_names("all"))
    build_stage_module(config, 0, 1)(tokens())
    assert marks == [
        *("start attn_norm", "hooks", "end"),
        *marked("qkv_linear"),
        *marked("core_attn"),
        *marked("attn_proj"),
        "commit attn_norm",
        *("start mlp_norm", "hooks", "end"),
        *marked("mlp_fc1"),
        *marked("mlp_act"),
        *marked("mlp_fc2"),
        "commit mlp_norm",
    ]


def test_mlp_norm_commits_the_sum_with_the_residual(
    marks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    committed: list[Tensor] = []
    monkeypatch.setattr(
        parallel.transformer, "group_commit", lambda tensor, name: committed.append(tensor) or tensor
    )
    module = build_stage_module(SMALL.with_(offload_modules=frozenset({"mlp_norm"})), 1, 3)
    output = module(torch.randn(2, SMALL.sequence, SMALL.dim))
    assert marks == ["start mlp_norm", "hooks", "end"]
    assert len(committed) == 1
    assert committed[0] is output


@pytest.mark.parametrize("name", [name for name in GROUP_NAMES if name != "attn_proj"])
def test_only_the_chosen_mark_is_set(marks: list[str], name: str) -> None:
    build_stage_module(SMALL.with_(layers=1, offload_modules=frozenset({name})), 0, 1)(tokens())
    assert marks == marked(name)


@pytest.mark.req("S2-96")
def test_unknown_mark_is_refused_with_the_known_ones_and_attn_proj_needs_core_attn() -> None:
    with pytest.raises(
        ValueError, match=r"no layer has the mark 'attention', 'mpl_act'; the marks are attn_norm, .*mlp_fc2"
    ):
        group_names("mpl_act,core_attn,attention")
    for unknown in ("attention", "expert_fc1", "moe_act", "all"):
        with pytest.raises(ValueError, match=f"no layer has the mark '{unknown}'; the marks are attn_norm"):
            group_names(f"core_attn,{unknown}")
        with pytest.raises(ValueError, match=f"no layer has the mark '{unknown}'"):
            SMALL.with_(offload_modules=frozenset({unknown}))
    with pytest.raises(ValueError, match="choose core_attn too"):
        SMALL.with_(offload_modules=frozenset({"attn_proj"}))
    assert group_names(" core_attn , attn_proj") == {"core_attn", "attn_proj"}
    assert group_names("all") == set(GROUP_NAMES)
    assert group_names("none") == group_names("") == frozenset()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dim": 30}, "dim 30 over 4 heads is 7.5 channels each"),
        ({"dim": 36}, "dim 36 over 4 heads is 9 channels each"),
        ({"kv_heads": 3}, "4 query heads cannot share 3 key heads equally"),
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"vocabulary": 256}, "need 257"),
    ],
)
def test_shape_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SMALL.with_(**changes)


def test_longer_sequence_than_the_model_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 17 tokens; the model's longest is 16"):
        build_stage_module(SMALL, 0, 1)(torch.zeros(1, 17, dtype=torch.int64))


def test_layers_are_shared_out_evenly_and_fewer_layers_than_stages_are_refused() -> None:
    config = PRESETS["tiny"].with_(layers=7)
    assert [list(layers_of_stage(config, stage, 3)) for stage in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    with pytest.raises(ValueError, match="7 layers cannot be cut into 8 stages"):
        layers_of_stage(config, 0, 8)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_examples_have_the_shapes_dtypes_and_gradients_of_the_real_thing(stage: int) -> None:
    dtype = torch.bfloat16
    inputs, outputs = stage_examples(SMALL, stage, 3, batch=2, sequence=8, dtype=dtype)
    module = build_stage_module(SMALL, stage, 3, dtype=dtype)
    real = module(torch.zeros(2, 8, dtype=torch.int64) if stage == 0 else torch.zeros(2, 8, 32, dtype=dtype))
    assert (outputs.shape, outputs.dtype, outputs.stride()) == (real.shape, real.dtype, real.stride())
    assert inputs.requires_grad == (stage > 0)
    assert outputs.requires_grad
    assert inputs.is_meta


def test_estimate_of_saved_bytes_is_near_what_a_layer_really_saves() -> None:
    config = PRESETS["tiny"].with_(layers=1, offload_modules=group_names("all"))
    storages: dict[int, int] = {}
    tensors: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        tensors.append(tensor)  # alive, so that no address is used twice
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    block = build_stage_module(config.with_(offload_modules=frozenset()), 0, 1).blocks["0"]
    rotation = (torch.ones(256, 16), torch.zeros(256, 16))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(torch.randn(1, 256, 128, requires_grad=True), rotation)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    really = sum(nbytes for address, nbytes in storages.items() if address not in parameters)
    assert (
        really * 0.8
        <= saved_bytes_of_layer(config, batch=1, sequence=256, dtype=torch.float32)
        <= really * 1.3
    )

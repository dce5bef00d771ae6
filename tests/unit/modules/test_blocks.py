"""Which modules of a model are its blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import offload
from offload.modules.blocks import find_blocks, match_modules, without_nested


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(2, 2)
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))


class TwoStacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.Sequential(nn.Linear(2, 2), *(Block() for _ in range(3)), nn.ReLU())


def test_runs_of_neighbours_of_one_class_are_found_and_what_lies_in_them_is_not() -> None:
    model = TwoStacks()
    found = find_blocks(model)
    assert {group: list(modules) for group, modules in found.items()} == {
        "encoder": ["encoder.0", "encoder.1"],
        "decoder": ["decoder.1", "decoder.2", "decoder.3"],
    }
    assert found["decoder"]["decoder.2"] is model.decoder[2]


def test_a_dictionary_with_numbers_as_keys_is_a_list() -> None:
    blocks = {str(layer): Block() for layer in (4, 5)}
    assert list(find_blocks(nn.ModuleDict({"layers": nn.ModuleDict(blocks)}))) == ["layers"]
    with pytest.raises(ValueError, match="no blocks that can be found"):
        find_blocks(nn.ModuleDict({"en": nn.Linear(2, 2), "de": nn.Linear(2, 2)}))


def test_the_model_itself_may_be_the_container() -> None:
    assert list(find_blocks(nn.Sequential(Block(), Block()))) == ["blocks"]
    # neighbours of another class are no run
    with pytest.raises(ValueError, match=r"Sequential has no blocks that can be found"):
        find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))


class Mixer(nn.Module):
    """A layer: 32 features from and to, `width` inside."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return made


class Attention(Mixer):
    def __init__(self) -> None:
        super().__init__(512)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixer(), Mixer()])


class Adapter(nn.Module):
    """A Linear as peft wraps it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.lora_A = nn.Linear(32, 32), nn.Linear(32, 4)


M, A = Mixer, Attention


def lone() -> nn.ModuleList:
    return nn.ModuleList([Mixer()])


@pytest.mark.parametrize(
    ("members", "in_list", "in_sequence"),
    [
        ([M, M, A, M, M, A], "0 1 2 3 4 5", "0 1 2 3 4 5"),  # Jamba, Zamba
        ([A, M, A, M], "0 1 2 3", "0 1 2 3"),
        ([A, M, M], "0 1 2", "1 2"),
        ([M, A, M, nn.Identity, linear_32 := lambda: nn.Linear(32, 32)], "0 1 2", "0 1 2"),
        ([M], "0", ""),  # an encoder of one layer
        ([M, A], "0 1", ""),
        ([linear_32, nn.GELU, linear_32], "", ""),
        ([linear_32, linear_32, nn.GELU, linear_32], "0 1", "0 1"),
        ([Adapter, nn.GELU, Adapter], "", ""),
        ([lambda: nn.Sequential(nn.Linear(2, 2)), nn.GELU, lambda: nn.Sequential(nn.Linear(2, 2))], "", ""),
        ([Tower], "0.layers.0 0.layers.1", "0.layers.0 0.layers.1"),
        ([lone, lone], "0.0 1.0", "0.0 1.0"),  # stages: a list is never called
    ],
)
def test_which_members_of_a_list_are_blocks(
    members: list[Callable[[], nn.Module]], in_list: str, in_sequence: str
) -> None:
    """A layer without a neighbour of its class was none, and nobody said so: 3 of Jamba's 8, and encoders of
    one layer."""
    built = [member() for member in members]
    lists: tuple[nn.Module, ...] = nn.ModuleList(built), nn.Sequential(*built)
    for model, expected in zip(lists, (in_list, in_sequence), strict=True):
        try:
            found = [name for named in find_blocks(model).values() for name in named]
        except ValueError:
            found = []
        assert found == expected.split()


def test_layers_of_two_classes_are_all_in_the_report_and_what_is_no_block_is_named() -> None:
    layers = [Mixer(), Mixer(), Attention(), Mixer(), Mixer(), Attention()]
    model = nn.Sequential(nn.Linear(32, 32), *layers, nn.Tanh())
    handle = offload.apply(model, "groups", min_numel=1)
    assert repr(handle).endswith("blocks: 6 modules, 1 to 6; no block: 0 (Linear)>")
    model(torch.ones(64, 32)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    # the input of each layer, and what tanh gives to `down`
    saved_bytes = 64 * 4 * (6 * 32 + 4 * 32 + 2 * 512)
    assert handle.report().last_step["groups"]["blocks"]["saved_bytes"] == saved_bytes
    handle.remove()
    assert "no block" not in repr(offload.apply(model, "groups", [str(at) for at in range(1, 7)]))


class Plain(nn.Module):
    def __init__(self, *classes: Callable[[], nn.Module]) -> None:
        super().__init__()
        for name, build in zip(("first", "second"), classes, strict=False):
            self.add_module(name, build())


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def test_a_model_without_blocks_is_refused_with_its_children_and_what_would_match() -> None:
    with pytest.raises(
        ValueError, match=r"Its children are first \(Linear\), second \(ReLU\)\. Name .*blocks="
    ) as two:
        find_blocks(Plain(linear, nn.ReLU))
    assert "blocks=['first', 'second'], or take mode=True, which needs none" in str(two.value)
    with pytest.raises(ValueError, match=r"such as blocks='first', or take mode=True"):
        find_blocks(Plain(linear))
    # one block is no run, and its list is known all the same
    with pytest.raises(ValueError, match=r"such as blocks='first\.\*', or take mode=True"):
        find_blocks(Plain(lambda: nn.ModuleList([linear()]), nn.ReLU))


def test_of_a_bare_module_all_tensors_may_leave_and_the_refusal_of_other_modes_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"It has no children\. Take mode=True, which needs none: every saved"
    ):
        find_blocks(linear())
    bare = nn.Linear(8, 8)
    with offload.activations(bare, True, min_numel=1) as handle:
        bare(torch.ones(4, 8)).sum().backward()
        torch.optim.SGD(bare.parameters(), lr=0.1).step()
        # its input
        assert handle.report().last_step["saved_bytes"] == 4 * 8 * 4


def test_a_pattern_takes_the_outer_of_two_modules_and_names_its_group() -> None:
    model = TwoStacks()
    assert {group: list(found) for group, found in match_modules(model, "encoder.*", "blocks").items()} == {
        "encoder": ["encoder.0", "encoder.1"]
    }
    both = match_modules(model, ["*.experts.*", "*.attention", "encoder.*"], "modules")
    assert {group: len(modules) for group, modules in both.items()} == {
        "experts": 15,
        "attention": 5,
        "encoder": 2,
    }
    assert {group: len(modules) for group, modules in without_nested(both).items()} == {
        "experts": 9,
        "attention": 3,
        "encoder": 2,
    }


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ValueError, match=r"blocks: 'encodr.\*' matches no module of TwoStacks; .* encoder"):
        match_modules(TwoStacks(), "encodr.*", "blocks")


@pytest.mark.parametrize("given", ["", [], [3], [""]])
def test_what_is_no_pattern_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match=r"modules is .* must be a pattern such as 'encoder\.\*', or a list"):
        match_modules(TwoStacks(), given, "modules")  # type: ignore[arg-type]


def test_a_class_as_a_pattern_is_refused_with_the_names_of_its_modules() -> None:
    model = TwoStacks()
    name = type(model.encoder[0]).__name__
    with pytest.raises(
        ValueError, match=rf"blocks: '{name}' matches no module of TwoStacks; patterns are names of"
    ) as of:
        match_modules(model, name, "blocks")
    # the decoder has others beside
    assert str(of.value).endswith(
        "patterns are names of modules, not of classes. Modules of that class are encoder.0, encoder.1, "
        "decoder.1, decoder.2, decoder.3: write ['encoder.*', 'decoder.1', 'decoder.2', 'decoder.3']"
    )

"""The layout: where parameters lie and where they are cut. Everything else counts on these few facts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.params.sections import ALIGN, Section, lay_out, layout_to_json

SIZES = st.lists(st.integers(0, 300), min_size=1, max_size=12)


def made(sizes: list[int], bucket: int, section: int, *, whole: bool) -> tuple[Section, ...]:
    return lay_out(list(enumerate(sizes)), bucket_numel=bucket, section_numel=section, whole=whole)


@given(SIZES, st.integers(16, 200), st.integers(16, 600), st.booleans())
def test_every_element_lies_in_one_piece_and_pieces_begin_and_are_cut_at_multiples_of_16(
    sizes: list[int], bucket: int, section: int, whole: bool
) -> None:
    found: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(sizes))}
    for part in made(sizes, bucket, section, whole=whole):
        ends = 0
        assert part.buckets[0].start == 0
        for cut in part.buckets:
            assert cut.start == ends
            ends = cut.end
            for piece in cut.pieces:
                assert cut.start <= piece.start
                assert piece.start + piece.numel <= cut.end
                assert piece.start % ALIGN == piece.first % ALIGN == 0
                found[piece.parameter].append((piece.first, piece.numel))
        assert ends == part.numel
    for index, pieces in found.items():
        at = 0
        for first, numel in pieces:
            assert first == at
            at += numel
        assert at == sizes[index]
        assert pieces, "a parameter without elements has a piece too"
        if whole:
            assert len(pieces) == 1


@given(SIZES, st.integers(16, 200), st.integers(16, 600))
def test_a_parameter_is_one_unbroken_range_of_one_section(
    sizes: list[int], bucket: int, section: int
) -> None:
    seen = [known for part in made(sizes, bucket, section, whole=False) for known in part.parameters]
    assert [index for index, _, _ in seen] == list(range(len(sizes)))
    assert [numel for _, _, numel in seen] == sizes
    assert all(start % ALIGN == 0 for _, start, _ in seen)


@given(SIZES, st.integers(16, 200))
def test_a_bucket_is_never_longer_than_asked_but_for_rounding(sizes: list[int], bucket: int) -> None:
    for part in made(sizes, bucket, 10_000, whole=False):
        assert all(cut.numel < bucket + ALIGN for cut in part.buckets)
        assert max(cut.numel for cut in part.buckets) - part.buckets[0].numel == 0, (
            "no short bucket before the last"
        )


def test_a_whole_parameter_may_make_its_bucket_longer() -> None:
    (part,) = made([100, 20, 20, 500, 8], 64, 10_000, whole=True)
    assert [[piece.parameter for piece in cut.pieces] for cut in part.buckets] == [[0], [1, 2], [3], [4]]


def test_a_long_parameter_has_a_section_of_its_own() -> None:
    parts = made([10, 10, 1000, 10], 64, 64, whole=False)
    assert [[index for index, _, _ in part.parameters] for part in parts] == [[0, 1], [2], [3]]
    assert len(parts[1].buckets) == 16


def test_a_layout_is_written_as_lists_of_numbers() -> None:
    written = layout_to_json(made([10, 40], 32, 100, whole=False))
    assert (
        json.loads(json.dumps(written))
        == written
        == [{"parameters": [[0, 0, 10], [1, 16, 40]], "cuts": [[0, 32], [32, 64]]}]
    )


def test_a_bucket_without_room_for_a_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_numel is 8, must be at least 16"):
        made([10], 8, 64, whole=False)

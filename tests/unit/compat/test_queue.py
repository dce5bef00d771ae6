"""The virtual-pipeline queue: which chunk's backward should come next, told from the order of the forwards
alone."""

from __future__ import annotations

from typing import Any

import pytest

from offload.compat import VirtualPipelineQueue


class Chunk:
    def __init__(self, label: str, *names: str) -> None:
        self.label = label
        self.names = names or ("a",)

    def is_empty_chunk(self, name: str | None = None) -> bool:
        return name is not None and name not in self.names

    def __repr__(self) -> str:
        return self.label


class Empty(Chunk):
    def is_empty_chunk(self, name: str | None = None) -> bool:
        return True


def filled(order: str, stages: int) -> Any:
    """`order`: each forward as its virtual stage's digit; chunks are called s0m0, s1m0, ..."""
    queue: Any = VirtualPipelineQueue()
    counts = [0] * stages
    for digit in order:
        stage = int(digit)
        queue.resize(stages)
        queue.stage(Chunk(f"s{stage}m{counts[stage]}"), stage)
        counts[stage] += 1
    return queue


@pytest.mark.req("S2-49")
@pytest.mark.parametrize(
    ("order", "stages", "expected"),
    [
        ("0", 1, "s0m0"),
        ("000", 1, "s0m0 s0m1 s0m2"),
        ("01", 2, "s1m0 s0m0"),
        ("0011", 2, "s1m0 s1m1 s0m0 s0m1"),
        ("00110011", 2, "s1m0 s1m1 s0m0 s0m1 s1m2 s1m3 s0m2 s0m3"),
        ("012", 3, "s2m0 s1m0 s0m0"),
        ("001122", 3, "s2m0 s2m1 s1m0 s1m1 s0m0 s0m1"),
    ],
)
def test_last_virtual_stage_is_queued_at_once_and_the_others_after_it_in_reverse(
    order: str, stages: int, expected: str
) -> None:
    queue = filled(order, stages)
    assert " ".join(map(str, queue.chunks)) == expected
    assert all(not staged for staged in queue.stages)


@pytest.mark.req("S2-49")
def test_stages_that_grew_even_are_queued_before_the_last_stages_next_chunk() -> None:
    """The last stage came first, so the others only caught up with it: nobody looked until its next chunk."""
    queue = filled("2012", 3)
    assert " ".join(map(str, queue.chunks)) == "s2m0 s1m0 s0m0 s2m1"
    assert [list(map(str, staged)) for staged in queue.stages] == [[], [], ["s2m1"]]


@pytest.mark.req("S2-35")
def test_flush_waits_until_the_first_and_the_last_stage_have_equally_many() -> None:
    queue: Any = VirtualPipelineQueue()
    queue.resize(2)
    first, last = Chunk("s0m0"), Chunk("s1m0")
    queue.stages[0].append(first)
    queue.flush()
    assert queue.chunks == []
    assert queue.stages == [[first], []]
    queue.stages[1].append(last)
    queue.chunks.append(last)  # the last stage is queued as it comes
    queue.flush()
    assert queue.chunks == [last, first]
    assert queue.stages == [[], []]


@pytest.mark.req("S2-36")
def test_flush_refuses_stages_that_lost_a_chunk_and_leaves_them_as_they_are() -> None:
    queue: Any = VirtualPipelineQueue()
    queue.resize(3)
    for stage in (0, 2):
        queue.stages[stage].append(Chunk(f"s{stage}m0"))
    with pytest.raises(AssertionError, match=r"All stages must have same chunk count, got \[1, 0, 1\]"):
        queue.flush()
    assert [len(staged) for staged in queue.stages] == [1, 0, 1]
    assert queue.chunks == []


def test_stage_never_asserts_where_flush_would() -> None:
    """The engine's own path takes any order of forwards: an evaluation of one stage, a microbatch more on
    another."""
    queue = filled("0202", 3)
    assert [len(staged) for staged in queue.stages] == [2, 0, 2]
    assert [str(chunk) for chunk in queue.chunks] == ["s2m0", "s2m1"]


@pytest.mark.req("S2-44", "S2-45")
def test_front_looks_and_pop_takes_the_next_chunk_that_has_the_group() -> None:
    queue: Any = VirtualPipelineQueue()
    chunks = [Empty("empty"), Chunk("without", "b"), Chunk("with", "a", "b"), Chunk("later", "a")]
    queue.chunks.extend(chunks)
    assert str(queue.front()) == "without"
    assert str(queue.front("a")) == "with"
    assert queue.chunks == chunks
    assert str(queue.pop("a")) == "with"  # the ones before it are passed over for good
    assert [str(chunk) for chunk in queue.chunks] == ["later"]
    assert str(queue.pop()) == "later"


@pytest.mark.req("S2-44", "S2-45")
def test_pop_of_a_group_that_nobody_has_is_refused_and_drops_nothing() -> None:
    queue: Any = VirtualPipelineQueue()
    queue.chunks.extend([Empty("empty"), Chunk("without", "b")])
    assert queue.front("a") is None
    with pytest.raises(AssertionError, match="No non-empty chunk found among 2 queued chunks for group 'a'"):
        queue.pop("a")
    assert len(queue.chunks) == 2


def test_discarded_chunk_is_gone_wherever_it_stands_and_an_unknown_one_is_nothing() -> None:
    queue = filled("0011", 2)
    queue.discard(queue.chunks[2])
    queue.discard(Chunk("unknown"))
    assert [str(chunk) for chunk in queue.chunks] == ["s1m0", "s1m1", "s0m1"]
    queue.clear()
    assert queue.front() is None

"""The states of Python's and numpy's shared generators: seen whatever moves them, and read only then."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from offload.checkpoint import generators
from offload.checkpoint.generators import GeneratorsBefore


def states() -> list[Any]:
    of_numpy: Any = np.random.get_state(legacy=False)
    return [random.getstate(), repr(of_numpy)]


@pytest.fixture(autouse=True)
def own_states() -> Iterator[None]:
    before = states()[0], np.random.get_state()
    random.seed(1)
    np.random.seed(1)
    with np.printoptions(threshold=1000):  # all of a state is in its repr
        yield
    random.setstate(before[0])
    np.random.set_state(before[1])


@pytest.mark.parametrize("num_before", [0, 1, 2])
@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(0.0, 1.0),
        lambda: random.sample(range(9), 4),
        np.random.rand,
        np.random.standard_normal,
        lambda: list(np.random.permutation(9)),
        lambda: (random.random(), np.random.standard_normal()),
    ],
)
def test_a_recompute_draws_what_its_forward_drew_and_leaves_the_states_of_now(
    draw: Callable[[], object], num_before: int
) -> None:
    """Of two normals that are made together one is left, which the next draw takes: no bits are drawn."""
    for _ in range(num_before):
        random.gauss(0.0, 1.0)
        np.random.standard_normal()
        GeneratorsBefore([])
    before = GeneratorsBefore([])
    drawn = draw()
    before.learn()
    random.random()
    np.random.standard_normal()
    found = states()
    with before.in_place():
        assert draw() == drawn
    assert states() == found


def test_a_state_that_was_set_back_is_the_one_of_then() -> None:
    """With one normal of a pair left, and then without: the bits are the same."""
    np.random.standard_normal()
    one_left = np.random.get_state()
    GeneratorsBefore([])
    np.random.standard_normal()
    GeneratorsBefore([])
    np.random.set_state(one_left)
    before = GeneratorsBefore([])
    drawn = np.random.standard_normal()
    before.learn()
    with before.in_place():
        assert np.random.standard_normal() == drawn


def test_other_bits_than_numpys_own_are_looked_at_themselves() -> None:
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        before = GeneratorsBefore([])
        before.learn()
        np.random.rand()
        found = states()
        with before.in_place():
            assert states() == found  # the forward drew nothing
    finally:
        np.random.set_bit_generator(own)


def test_a_state_is_read_once_while_nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0
    shared = generators._numpys(), generators._pythons()

    def counting(read: Callable[[], Any]) -> Callable[[], Any]:
        def counted() -> Any:
            nonlocal reads
            reads += 1
            return read()

        return counted

    for one in shared:
        monkeypatch.setattr(one, "_read", counting(one._read))
        monkeypatch.setattr(one, "_last", (None, None))
    for number in range(6):
        before = GeneratorsBefore([])
        if number == 3:
            np.random.rand()
            random.random()
        before.learn()
    assert reads == 2 * 2

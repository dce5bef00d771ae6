"""Hypothesis strategies for the programs of programs.py: models, orders of actions, limits.

One invariant: every order is legal. A backward comes after its forward and after the backward of the next
stage, a weight half after its input half; whatever else a schedule may do, some seed does.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from hypothesis import strategies as st

from offload import OffloadConfig
from tests.property.layers import DEAD, NBYTES, NUMEL, OPS, REGIONS, ActionKey, Group, Op, Overlap, Say
from tests.property.programs import Program, Step
from tests.property.speakers import Settings

NAMES = st.sampled_from(["attn", "mlp", "norm"])
STYLES = ("gpipe", "1f1b", "lifo", "zero-bubble", "random")


@cache
def _ops() -> st.SearchStrategy[Op]:
    return st.builds(
        Op, st.sampled_from([*OPS, *REGIONS, *REGIONS, *DEAD]), st.integers(0, 3), st.integers(0, 3)
    )


def _around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    body = st.lists(inner, min_size=1, max_size=4).map(tuple)
    short = st.lists(inner, min_size=1, max_size=2).map(tuple)
    group = st.builds(
        Group, NAMES, st.integers(0, 2), st.sampled_from(["all", "all", "rest", "none"]), st.booleans(), body
    )
    return st.one_of(group, group, st.builds(Overlap, NAMES, NAMES, st.tuples(short, short, short)))


def models(
    ops: st.SearchStrategy[Op] | None = None, *, flips: bool = True
) -> st.SearchStrategy[tuple[tuple[Any, ...], ...]]:
    """Up to three stages: each a group whose saves can leave, and then whatever else. flips: offloading is
    switched off and on."""
    op = _ops() if ops is None else ops
    leaf = st.one_of(*[op] * 5, st.builds(Say, st.sampled_from(["on", "off", "flush"]))) if flips else op
    first = st.builds(
        Group,
        NAMES,
        st.just(0),
        st.just("all"),
        st.just(False),
        st.lists(op, min_size=1, max_size=3).map(tuple),
    )
    rest = st.lists(st.recursive(leaf, _around, max_leaves=8), max_size=4)
    stage = st.tuples(first, rest).map(lambda pair: (Op("linear", 0, 0), pair[0], *pair[1]))
    return st.lists(stage, min_size=1, max_size=3).map(tuple)


MODELS = models()


def legal_order(
    stages: int, microbatches: int, style: str, split: frozenset[tuple[int, int]], pick: random.Random
) -> list[ActionKey]:
    """A topological order of one step's actions; `style` says which of the possible ones is taken next."""
    done: set[ActionKey] = set()
    order: list[ActionKey] = []

    def ready(action: ActionKey) -> bool:
        kind, stage, microbatch = action
        if kind == "F":
            return stage == 0 or ("F", stage - 1, microbatch) in done
        if kind == "W":
            return ("I", stage, microbatch) in done
        after = ("I" if (stage + 1, microbatch) in split else "B", stage + 1, microbatch)
        return ("F", stage, microbatch) in done and (stage == stages - 1 or after in done)

    todo = [("F", s, m) for s in range(stages) for m in range(microbatches)]
    for s in range(stages):
        for m in range(microbatches):
            todo += [("I", s, m), ("W", s, m)] if (s, m) in split else [("B", s, m)]
    ahead = pick.randint(1, max(1, stages * microbatches))
    while todo:
        possible = [action for action in todo if ready(action)]
        backwards = [action for action in possible if action[0] in "BI"]
        forwards = [action for action in possible if action[0] == "F"]
        open_chunks = sum(kind == "F" for kind, _, _ in done) - sum(kind in "BW" for kind, _, _ in done)
        if style == "gpipe" and forwards:
            chosen = forwards[0]
        elif style == "lifo" and backwards and (not forwards or open_chunks >= ahead):
            chosen = max(backwards, key=lambda action: order.index(("F", action[1], action[2])))
        elif style == "1f1b" and backwards and (not forwards or open_chunks >= ahead):
            chosen = min(backwards, key=lambda action: action[2])
        elif style == "zero-bubble" and (backwards or forwards):
            chosen = backwards[0] if backwards and (not forwards or open_chunks >= ahead) else forwards[0]
        else:
            chosen = pick.choice(possible)
        todo.remove(chosen)
        done.add(chosen)
        order.append(chosen)
    return order


@st.composite
def steps_of(draw: st.DrawFn, stages: int, max_steps: int = 3) -> list[Step]:
    found = []
    for _ in range(draw(st.integers(1, max_steps))):
        microbatches = draw(st.integers(1, 4))
        pick = random.Random(draw(st.integers(0, 1 << 16)))
        chunks = [(s, m) for s in range(stages) for m in range(microbatches)]

        def some(
            rate: float, chunks: list[tuple[int, int]] = chunks, pick: random.Random = pick
        ) -> frozenset[tuple[int, int]]:
            return frozenset(chunk for chunk in chunks if pick.random() < rate)

        style = draw(st.sampled_from(STYLES))
        split = (
            frozenset(chunks) if style == "zero-bubble" else some(0.3) if style == "random" else frozenset()
        )
        order = legal_order(stages, microbatches, style, split, pick)
        odd = draw(st.booleans())
        left = some(0.15) if odd else frozenset()
        # no gradient comes from later ones
        left = frozenset((s, m) for s, m in chunks if any((t, m) in left for t in range(s, stages)))
        order = [action for action in order if action[0] == "F" or action[1:] not in left]
        if odd:
            for _ in range(pick.randint(0, 2)):
                order.insert(
                    pick.randint(0, len(order)),
                    (pick.choice("EC"), pick.randrange(stages), pick.randrange(microbatches)),
                )
        found.append(
            Step(
                seed=draw(st.integers(0, 7)),
                actions=tuple(order),
                twice=(some(0.3) - split) if odd else frozenset(),
                again=some(0.15) if odd else frozenset(),
                leftover=left,
                thread=some(0.2) if odd else frozenset(),
                buffers=draw(st.booleans()),
            )
        )
    return found


def _caps(*sizes: int | None) -> st.SearchStrategy[int | None]:
    return st.sampled_from([None, 0, 1, NBYTES, 3 * NBYTES, 10 * NBYTES, *sizes])


configs = st.builds(
    OffloadConfig,
    min_offloaded_tensor_size=st.sampled_from([0, 1, NUMEL // 2, NUMEL - 1, NUMEL, NUMEL + 1, 2 * NUMEL]),
    piece_bytes=st.sampled_from([1, NBYTES - 1, NBYTES, 2 * NBYTES + 1, 1 << 20]),
    device_limit_bytes=_caps(40 * NBYTES),
    max_spilling_bytes=_caps(),
    max_restoring_bytes=_caps(),
    host_limit_bytes=st.sampled_from([1 << 28, 1 << 28, 0, 4096, 3 * 4096, 8 * 4096]),
    max_inflight_offloads=st.sampled_from([None, None, 0, 1, 2]),
    activation_offload_fraction=st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0]),
    delta_offload_bytes_across_pp_ranks=st.sampled_from([0, 0, NBYTES]),
    pp_rank=st.integers(0, 2),
    audit=st.sampled_from([False] * 7 + [True]),
)


def engines() -> st.SearchStrategy[Settings]:
    return st.builds(
        Settings,
        executor=st.sampled_from(["late", "random", "clock", "early"]),
        seed=st.integers(0, 1 << 16),
        gb_s=st.sampled_from([50.0, 1e-1, 1e3]),
        compute_s=st.sampled_from([1e-8, 0.0, 1e-6]),
        lanes=st.sampled_from([1, 1, 2]),
        announced=st.booleans(),
        config=configs,
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    stages = draw(MODELS)
    return Program(stages, draw(st.booleans()), tuple(draw(steps_of(len(stages)))), draw(engines()))

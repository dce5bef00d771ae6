"""What mode "auto" chose, and why: `print(handle.explain())`.

One invariant: every figure is of the plan that is followed now, or of one for a larger budget, searched for
from it on; nothing is measured here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from tabulate import tabulate

from offload.policy.actions import ChunkKey
from offload.policy.mixture import MixedPlan, scaled
from offload.sizes import bytes_text

_MORE = 0.1
"""Of the total: how much larger the budget is of which the gain is told."""
_MORE_TRIALS = 100
"""Of it: from the plan on these find as much as all of a search from the start."""
_AS_PLANNED = 1.05
"""Of the planned step: one that takes more waits for what no plan counts, as launches."""
_NOTHING = (
    "No block saves a tensor that may leave: each is smaller than min_numel, a parameter, or has to stay. So "
    "no recompute was considered, whatever they take of the total. A smaller min_numel lets them leave."
)


class BlockShare(NamedTuple):
    """Bytes of one block's saved tensors by what becomes of them, over all chunks of a step, and device
    milliseconds of recompute, in both halves of a split backward. levels: how often each was chosen."""

    name: str
    saved_bytes: int
    kept_bytes: int
    moved_bytes: int
    recomputed_bytes: int
    recompute_ms: float
    levels: Mapping[str, int]

    def with_call(self, call: BlockShare) -> BlockShare:
        """This and one more call of the same block."""
        return self._replace(
            saved_bytes=self.saved_bytes + call.saved_bytes,
            kept_bytes=self.kept_bytes + call.kept_bytes,
            moved_bytes=self.moved_bytes + call.moved_bytes,
            recomputed_bytes=self.recomputed_bytes + call.recomputed_bytes,
            recompute_ms=self.recompute_ms + call.recompute_ms,
            levels=dict(Counter(self.levels) + Counter(call.levels)),
        )


class KindShare(NamedTuple):
    """Bytes of a kind on the device and on the host; None where they are shown elsewhere. next_gb_s: seconds
    of a step that another GB of it on the device would spare; None where that is not known."""

    kind: str
    device_bytes: int | None
    host_bytes: int | None
    next_gb_s: float | None


def folded(rows: Iterable[tuple[str, ...]]) -> list[list[str]]:
    """Rows whose names differ in numbers alone, and whose figures are equal, are one: of each of them."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *figures in rows:
        names.setdefault((re.sub(r"\d+", "#", name), *figures), []).append(name)
    return [
        [own[0] if len(own) == 1 else f"{own[0]} .. {own[-1]} ({len(own)} alike)", *figures]
        for (_, *figures), own in names.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Explanation of what is followed now.

    state        in words; before there is a plan, what is waited for
    is_final     steps like the last ones will do what they did, of blocks and of what stays of them
    names        of the blocks that a chunk calls, in that order
    total_bytes  device_total, None where none was given
    rest_bytes   of it, weights, gradients and working set; None before they were measured
    limit_bytes  of it, what saved tensors and recomputes may take
    plan         None before it was made
    moved_bytes  what the last step moved to the host, whatever was planned; None where that is not known
    step_s       that steps under the plan took; None where that was not measured
    kinds        weights, gradients, optimizer's state and activations under the one total; () where all but
                 activations stays
    mode         that this is of; one that chooses nothing has a state alone
    beside       weights and gradients that wait on the host, in words
    """

    state: str
    mode: str = "auto"
    beside: str = ""
    is_final: bool = False
    names: Mapping[ChunkKey, tuple[str, ...]] = field(default_factory=dict)
    total_bytes: int | None = None
    rest_bytes: int | None = None
    limit_bytes: int | None = None
    plan: MixedPlan | None = None
    moved_bytes: int | None = None
    step_s: float | None = None
    kinds: tuple[KindShare, ...] = ()

    def kinds_text(self) -> str:
        """A row a kind."""

        def text(nbytes: int | None) -> str:
            return "" if nbytes is None else bytes_text(nbytes)

        rows = [
            (kind, text(here), text(away), "" if gain is None else f"{gain * 1e3:.1f} ms")
            for kind, here, away, gain in self.kinds
        ]
        headers = ("kind", "on the device", "on the host", "the next GB spares")
        return tabulate(rows, headers, colalign=("left", "right", "right", "right"), disable_numparse=True)

    @property
    def calls(self) -> list[tuple[ChunkKey, BlockShare]]:
        """By call of a block, with its chunk, in forward order; [] before there is a plan."""
        if self.plan is None:
            return []
        found: list[tuple[ChunkKey, BlockShare]] = []
        for chunk, blocks in self.plan.problem.blocks.items():
            own = zip(
                blocks,
                self.plan.levels[chunk],
                self._kept(chunk, blocks),
                self.plan.recompute_s(chunk),
                strict=True,
            )
            for place, (block, level, kept, again_s) in enumerate(own):
                saved = block.menu[0].saved_bytes
                if not saved:
                    continue  # the head, which is a block for its room alone
                chosen = block.menu[level]
                share = BlockShare(
                    name=self._name(chunk, place),
                    saved_bytes=saved,
                    kept_bytes=kept,
                    moved_bytes=chosen.saved_bytes - kept,
                    recomputed_bytes=saved - chosen.saved_bytes,
                    recompute_ms=again_s * 1e3,
                    levels={chosen.name: 1},
                )
                found.append((chunk, share))
        return found

    @property
    def shares(self) -> list[BlockShare]:
        """By block, in forward order; [] before there is a plan."""
        rows: dict[str, BlockShare] = {}
        for _, share in self.calls:
            before = rows.get(share.name)
            rows[share.name] = share if before is None else before.with_call(share)
        return list(rows.values())

    def _name(self, chunk: ChunkKey, place: int) -> str:
        names = self.names.get(chunk, ())
        return names[place] if place < len(names) else f"call {place}"

    def _kept(self, chunk: ChunkKey, blocks: Any) -> list[int]:
        """Bytes that stay of each block: a plan keeps from the end of a chunk."""
        assert self.plan is not None
        left = int(self.plan.kept_bytes.get(chunk, 0))
        kept: list[int] = []
        for block, level in zip(reversed(blocks), reversed(self.plan.levels[chunk]), strict=True):
            kept.append(min(left, block.menu[level].saved_bytes))
            left -= kept[-1]
        return kept[::-1]

    @cached_property
    def larger_budget(self) -> tuple[int, float] | None:
        """A tenth of the total, in bytes, and how many ms of the step another plan saves with so much more.
        None before there is a plan, and without a total. The first use blocks the host for about 0.1 s."""
        plan = self.plan
        if plan is None or self.total_bytes is None:
            return None
        more = round(self.total_bytes * _MORE)
        problem = replace(plan.problem, limit_bytes=plan.problem.limit_bytes + more)
        then = scaled(replace(plan, problem=problem), {}, _MORE_TRIALS)
        return more, max(0.0, plan.predicted_step_s - then.predicted_step_s) * 1e3

    def table(self) -> tuple[tuple[str, ...], list[list[str]]]:
        """Headers, and a row a block, equal ones folded."""
        rows = []
        for share in self.shares:
            levels = ", ".join(f"{count} {level}" for level, count in share.levels.items())
            rows.append((share.name, *map(bytes_text, share[1:5]), f"{share.recompute_ms:.1f}", levels))
        return ("block", "saves", "kept", "moved", "recomputed", "recompute, ms", "forwards"), folded(rows)

    def __str__(self) -> str:
        kinds = f"\n{self.kinds_text()}" if self.kinds else ""
        return "\n".join(filter(None, [self._of_blocks(), kinds, self.beside]))

    def _of_blocks(self) -> str:
        plan = self.plan
        if plan is None:
            return f"{self.mode}: {self.state}"
        plain_ms, planned_ms = plan.plain_s * 1e3, plan.predicted_step_s * 1e3
        lines = [
            f"auto: {self.state}",
            f"A step of plain blocks computes {plain_ms:.1f} ms. Planned: {planned_ms:.1f} ms, "
            f"{planned_ms / plain_ms:.3f} of it, of which {plan.predicted.recompute_s * 1e3:.1f} ms "
            f"recompute and {plan.predicted.stall_s * 1e3:.1f} ms stall for copies.",
        ]
        if self.step_s is not None:
            is_planned = self.step_s <= _AS_PLANNED * plan.predicted_step_s
            why = "" if is_planned else ", launch-bound: the host takes longer than the device was seen to"
            lines.append(f"Its steps took {self.step_s * 1e3:.1f} ms{why}.")
        if self.total_bytes is not None and self.rest_bytes is not None and self.limit_bytes is not None:
            unseen = "" if self.rest_bytes else " (only a GPU shows them)"
            made = plan.problem.grown_bytes
            rest = "weights and working set" if made else "weights, gradients and working set"
            beside = f", and for {bytes_text(made)} of gradients that its backward makes" if made else ""
            lines.append(
                f"Of {bytes_text(self.total_bytes)} on the device {bytes_text(self.rest_bytes)} are "
                f"{rest}{unseen}, and {bytes_text(self.limit_bytes)} are for saved tensors and recomputes"
                f"{beside}. The plan was made for {bytes_text(plan.problem.limit_bytes)}, and takes "
                f"{bytes_text(plan.predicted_peak_bytes)}."
            )
        headers, rows = self.table()
        if not rows:
            return "\n".join([*lines, _NOTHING])
        planned = sum(share.moved_bytes for share in self.shares)
        if self.moved_bytes is not None and self.moved_bytes != planned:
            lines.append(
                f"The plan moves {bytes_text(planned)} a step. The last step moved "
                f"{bytes_text(self.moved_bytes)}: tensors move whole."
            )
        table = tabulate(rows, headers=headers, colalign=("left", *["right"] * 5, "left"))
        return "\n".join([*lines, "", table, "", *self.margins()])

    def margins(self) -> list[str]:
        """Describe what more memory would change; [] where that is not known."""
        if self.larger_budget is None:
            return []
        nbytes, saved_ms = self.larger_budget
        return [f"A budget larger by {bytes_text(nbytes)} would save {saved_ms:.1f} ms a step."]

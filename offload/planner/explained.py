"""What mode "auto" chose, and why: `print(handle.explain())`.

One invariant: every figure is of the plan that is followed now, or of one for a larger budget, searched for
from it on; nothing is measured here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from tabulate import tabulate

from offload.policy.actions import ChunkKey
from offload.policy.menu import Level
from offload.policy.mixture import MixedPlan, scaled
from offload.sizes import bytes_text
from offload.telemetry.drawing import byte_unit

__all__ = ["BlockShare", "Explanation"]

_MORE = 0.1
"""Of the total: how much larger the budget is of which the gain is told."""
_MORE_TRIALS = 100
"""Of it: from the plan on these find as much as all of a search from the start."""


class BlockShare(NamedTuple):
    """What becomes of one block's saved tensors, over all chunks of a step. Bytes, and device milliseconds of
    recompute, in both halves of a split backward. levels: how often each was chosen."""

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


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What is followed now.

    state        in words; before there is a plan, what is waited for
    is_final     steps like the last ones will do what they did, of blocks and of what stays of them
    names        of the blocks that a chunk calls, in that order
    total_bytes  device_total, None where none was given
    rest_bytes   of it, weights, gradients and working set; None before they were measured
    limit_bytes  of it, what saved tensors and recomputes may take
    plan         None before it was made
    moved_bytes  what the last step moved to the host, whatever was planned; None where that is not known
    """

    state: str
    is_final: bool = False
    names: Mapping[ChunkKey, tuple[str, ...]] = field(default_factory=dict)
    total_bytes: int | None = None
    rest_bytes: int | None = None
    limit_bytes: int | None = None
    plan: MixedPlan | None = None
    moved_bytes: int | None = None

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
        """What stays of each block: a plan keeps from the end of a chunk."""
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

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plan, larger = self.plan, self.larger_budget
        found: dict[str, Any] = {
            "state": self.state,
            "device_total_bytes": self.total_bytes,
            "rest_bytes": self.rest_bytes,
            "limit_bytes": self.limit_bytes,
            "blocks": [share._asdict() for share in self.shares],
        }
        if plan is not None:
            found |= {
                "plain_ms": plan.plain_s * 1e3,
                "predicted_ms": plan.predicted_step_s * 1e3,
                "stall_ms": plan.predicted.stall_s * 1e3,
                "peak_bytes": plan.predicted_peak_bytes,
            }
        if larger is not None:
            found |= {"larger_budget_bytes": larger[0], "larger_budget_saves_ms": larger[1]}
        return found

    def __str__(self) -> str:
        plan = self.plan
        if plan is None:
            return f"auto: {self.state}"
        plain_ms = plan.plain_s * 1e3
        again_ms = plan.predicted.recompute_s * 1e3
        lines = [
            f"auto: {self.state}",
            f"A step of plain blocks computes {plain_ms:.1f} ms. Planned: "
            f"{plan.predicted_step_s * 1e3:.1f} ms, {plan.predicted_step_s * 1e3 / plain_ms:.3f} of it, of "
            f"which {again_ms:.1f} ms recompute and {plan.predicted.stall_s * 1e3:.1f} ms stall for copies.",
        ]
        if self.total_bytes is not None and self.rest_bytes is not None and self.limit_bytes is not None:
            spare_bytes = self.total_bytes - self.rest_bytes - self.limit_bytes
            rest = (
                f"{bytes_text(self.rest_bytes)} are weights, gradients and working set"
                if self.rest_bytes
                else "nothing is counted for weights, gradients and working set, which only a GPU shows"
            )
            lines.append(
                f"Of {bytes_text(self.total_bytes)} on the device, {rest}"
                + (f" and {bytes_text(spare_bytes)} are spare" if spare_bytes > 0 else "")
                + f"; {bytes_text(self.limit_bytes)} are left for saved tensors and what recomputes make "
                f"again, and the plan takes {bytes_text(plan.predicted_peak_bytes)}"
                + (
                    " of them."
                    if plan.predicted_peak_bytes <= self.limit_bytes
                    else f" of the {bytes_text(plan.problem.limit_bytes)} that there were when it was made."
                )
            )
        if not self.shares:
            why = (
                "No block saves a tensor that may leave: each is smaller than min_numel, a parameter, or has "
                "to stay. So nothing was to choose, and no recompute was considered, whatever they take of "
                "the total. A smaller min_numel lets them leave."
            )
            return "\n".join([*lines, why])
        size, unit = byte_unit(max((share.saved_bytes for share in self.shares), default=0))
        table = tabulate(
            [
                (
                    share.name,
                    *(f"{nbytes / size:.2f}" for nbytes in share[1:5]),
                    f"{share.recompute_ms:.1f}",
                    ", ".join(f"{count} {level}" for level, count in share.levels.items()),
                )
                for share in self.shares
            ],
            headers=("block", f"saves {unit}", "kept", "moved", "recomputed", "ms", "forwards"),
            colalign=("left", *["right"] * 5, "left"),
        )
        planned = sum(share.moved_bytes for share in self.shares)
        if self.moved_bytes is not None and self.moved_bytes != planned:
            lines.append(
                f"The plan moves {bytes_text(planned)} a step, counted by the byte. The last step moved "
                f"{bytes_text(self.moved_bytes)}: whole tensors stay, beside room for copies under way."
            )
        return "\n".join([*lines, "", table, "", *self.margins()])

    def margins(self) -> list[str]:
        """What a little more or less memory would change, a sentence each; [] before there is a plan."""
        if self.plan is None:
            return []
        lines = []
        found = self._given_up_next()
        if found is not None:
            chunk, place, now, then = found
            fewer = bytes_text(now.saved_bytes - then.saved_bytes)
            lines.append(
                f"Given up next, if there were less: {self._name(chunk, place)} in microbatch {chunk[1]}, "
                f"from '{now.name}' to '{then.name}', which saves {fewer} less and recomputes for "
                f"{round(self._more_ms(chunk, place), 2) + 0.0:.2f} ms."
            )
        if self.larger_budget is not None:
            nbytes, saved_ms = self.larger_budget
            lines.append(f"A budget larger by {bytes_text(nbytes)} would save {saved_ms:.1f} ms a step.")
        return lines

    def _given_up_next(self) -> tuple[ChunkKey, int, Level, Level] | None:
        """The cheapest step down that is left, by seconds for a byte, with the place of its block."""
        assert self.plan is not None
        best: tuple[float, tuple[ChunkKey, int, Level, Level]] | None = None
        for chunk, blocks in self.plan.problem.blocks.items():
            for place, (block, level) in enumerate(zip(blocks, self.plan.levels[chunk], strict=True)):
                if level + 1 >= len(block.menu):
                    continue
                now, then = block.menu[level], block.menu[level + 1]
                rate = (then.recompute_s - now.recompute_s) / max(now.saved_bytes - then.saved_bytes, 1)
                if best is None or rate < best[0]:
                    best = rate, (chunk, place, now, then)
        return None if best is None else best[1]

    def _more_ms(self, chunk: ChunkKey, place: int) -> float:
        """What this chunk computes again if that block of it is a level further down."""
        assert self.plan is not None
        levels = list(self.plan.levels[chunk])
        levels[place] += 1
        then = replace(self.plan, levels={**self.plan.levels, chunk: tuple(levels)})
        return (sum(then.recompute_s(chunk)) - sum(self.plan.recompute_s(chunk))) * 1e3

"""What is printed beside the table of bench/report.py: tokens a second, what stayed, and what was asked
beside what was found.

One invariant: a line compares rows of one work of one run; where a row is missing, the line is, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offload.sizes import bytes_text

__all__ = ["asked_lines", "facts_line", "note_line"]

MIB = 1 << 20
Rows = Mapping[str, Mapping[str, Any]]
_PLAIN = ("nothing", "nothing_permuted")


def facts_line(nothing: Mapping[str, Any], tokens: int, microbatches: int) -> str:
    """What the row nothing says of its work."""
    saved = nothing["saved_bytes"]
    return (
        f"{nothing['work']}: {nothing['shape']['layers']} layers, {tokens:,} tokens a step; a forward saves "
        f"{bytes_text(saved)}, {bytes_text(saved // nothing['shape']['layers'])} a layer"
        + (f", {microbatches} forwards a step" if microbatches > 1 else "")
    )


def note_line(result: Mapping[str, Any], done: Rows, tokens: int) -> str:
    """Tokens a second; what of nothing's saved bytes a forward leaves on the device; by how much active
    memory fell, beside the bytes that left."""
    parts = [
        f"{tokens / result['step_ms'] * 1e3:,.0f} tokens/s",
        f"saves {bytes_text(result['saved_bytes'])}",
    ]
    for name in ("limit", "total"):
        if result.get(f"{name}_bytes") is not None:
            parts.append(f"{name} {bytes_text(result[f'{name}_bytes'])}")
    nothing = done.get("nothing")
    if nothing is not None and result["row"] not in _PLAIN:
        if (kept := kept_share(result, done)) is not None:
            parts.append(f"after the forward {kept:.3f} of what the row without offload has is on the device")
        if result["active_bytes"] and (plain := _plain_of(result, done)) is not None:
            parts.append(_fell(result, plain))
    parts.append(f"{result['process_s']:.0f} s in all")
    if result.get("explained"):
        parts.append(result["explained"].splitlines()[0])
    if result.get("stderr"):
        parts.append(f"it said: {result['stderr'].strip().splitlines()[-1][:200]}")
    return f"  {result['label']}: " + "; ".join(parts)


def _plain_of(result: Mapping[str, Any], done: Rows) -> Mapping[str, Any] | None:
    """The row without offload that saves as much."""
    alike = [done[row] for row in _PLAIN if row in done]
    return next((one for one in alike if one["saved_bytes"] == result["saved_bytes"]), None)


def kept_share(result: Mapping[str, Any], done: Rows) -> float | None:
    """Bytes that a forward leaves on the device, over those of the row without offload that saves as much,
    else of nothing; None where the device counts none."""
    nothing = _plain_of(result, done) or done["nothing"]
    if not (result.get("forward_active_bytes") and nothing.get("forward_active_bytes")):
        return None
    without = nothing["forward_active_bytes"] - nothing["resident_bytes"]
    return float((result["forward_active_bytes"] - result["resident_bytes"]) / without)


def _fell(result: Mapping[str, Any], nothing: Mapping[str, Any]) -> str:
    """Beside the row without offload that saves as much."""
    fell = nothing["active_bytes"] - result["active_bytes"]
    moved = result["engine"].get("spill_bytes")
    text = f"active fell {bytes_text(fell)}"
    if moved:
        within = fell > 0 and abs(fell - moved) <= 0.3 * moved
        text += f", {fell / moved:.3f} of what left ({'within' if within else 'not within'} 30%"
        text += f"; {abs(fell - moved) / MIB:,.0f} MiB apart)"
    return text


def asked_lines(work: str, rows: Rows) -> Iterator[str]:
    """Each goal of the work, and what this run has found."""
    for goal, found, reached in _GOALS.get(work, lambda rows: ())(rows):
        yield f"  asked: {goal}; found: {found}: {'reached' if reached else 'NOT reached'}"


def _layer(rows: Rows) -> Iterator[tuple[str, str, bool]]:
    nothing = rows["nothing"]
    for name in ("groups", "groups_permuted", "auto", "auto_permuted"):
        if name in rows:
            ratio, kept = _ratio(rows[name], nothing), kept_share(rows[name], rows)
            said = "?" if kept is None else f"{kept:.3f}"
            goal = f"{name} at most 1.07 of nothing, half of its saved bytes kept at most"
            yield goal, f"{ratio:.3f}, {said} kept", ratio <= 1.07 and (kept or 0.0) <= 0.5
    if {"torch_save_on_cpu", "experts_save_on_cpu"} <= rows.keys():
        peer, ours = rows["torch_save_on_cpu"], rows["experts_save_on_cpu"]
        faster = peer["step_ms"] / ours["step_ms"]
        memory = ours["active_bytes"] / max(1, peer["active_bytes"])
        goal = "experts_save_on_cpu in torch's memory within 5%, 4 times its tokens a second"
        yield goal, f"{memory:.3f} of its memory, {faster:.2f} times", memory <= 1.05 and faster >= 4
    if "torch_checkpoint" in rows:
        peer = rows["torch_checkpoint"]
        for name in ("auto_checkpoint", "both_attention", "recompute"):
            if name in rows:
                memory = rows[name]["active_bytes"] / max(1, peer["active_bytes"])
                ratio = _ratio(rows[name], peer)
                goal = f"{name} in torch_checkpoint's memory, 1/1.10 of its step"
                yield (
                    goal,
                    f"{memory:.3f} of its memory, 1/{1 / ratio:.3f}",
                    memory <= 1.0 and ratio <= 1 / 1.1,
                )


def _window(rows: Rows) -> Iterator[tuple[str, str, bool]]:
    for name in ("experts_leave", "experts_leave_permuted"):
        if name in rows:
            ratio = _ratio(rows[name], rows["nothing"])
            yield f"{name} at most 1.05 of nothing", f"{ratio:.3f}", ratio <= 1.05


def _zipf(rows: Rows) -> Iterator[tuple[str, str, bool]]:
    if "groups" not in rows:
        return
    row = rows["groups"]
    grown, held, lent = row["pinned_growth"], row["pinned_held"], row["pinned_lent_peak"]
    yield "nothing pinned after step 20", f"{grown:,} bytes", grown == 0
    over = held / max(1, lent)
    yield "pinned at most 1.10 of lent", f"{over:.3f}", over <= 1.1
    slowest = row["step_ms_max"] / row["step_ms"]
    yield "no step over 1.3 of the median", f"the slowest {slowest:.3f}", slowest <= 1.3


def _ratio(row: Mapping[str, Any], beside: Mapping[str, Any]) -> float:
    return float(row["step_ms"] / beside["step_ms"])


_GOALS = {"layer": _layer, "window": _window, "zipf": _zipf, "lengths": _zipf}

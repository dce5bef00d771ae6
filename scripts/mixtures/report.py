"""Lines that are printed beside the table of bench/report.py: tokens a second, and what stayed.

One invariant: a line compares rows of one work of one run; where a row is missing, the line is, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.sizes import bytes_text

__all__ = ["facts_line", "note_line"]

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
        if result["pinned_growth"] is not None:
            slowest = result["step_ms_max"] / result["step_ms"]
            parts.append(
                f"pinned grew {result['pinned_growth']:,} bytes; slowest step {slowest:.3f} of the median"
            )
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

"""The table, its notes, and the bounds that a row is judged by.

One invariant: a bound is computed from the rates and the baseline of the same run; without them the column is
empty. GB is 1e9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.bound import least_step, single_pass_limit_s
from bench.table import aligned, reason_of
from bench.workload import live_peak_chunks
from offload.policy.actions import Action, GroupSize, Rates

GB = 1e9
_COLUMNS = (
    ("row", -20),
    ("step ms", 8),
    ("x none", 6),
    ("first ms", 8),
    ("active", 6),
    ("reserv", 6),
    ("r/a", 5),
    ("pinned", 6),
    ("h/lent", 6),
    ("host ms", 7),
    ("moved", 6),
    ("stall", 6),
    ("bound", 7),
    ("x bnd", 6),
    ("gradients", 12),
)
RECOMPUTED = ("_inputs", "_hidden_states")
"""How the names of rows end that recompute every block and move its input."""
_ITEM_BYTES = 2  # of bfloat16, in which all that is not tiny runs
HEADER = (
    "active, reserved, pinned, moved in GB of 1e9; h/lent: pinned held over most "
    "lent; x none, x bnd: step over baseline, over bound"
)


def header_line() -> str:
    return aligned([name for name, _ in _COLUMNS], _COLUMNS)


def link_line(link: Mapping[str, Any]) -> str:
    out, back, both_out, both_back = (link[name] / GB for name in ("d2h", "h2d", "duplex_d2h", "duplex_h2d"))
    return (
        f"link GB/s: d2h {out:.1f}, h2d {back:.1f}; both at once {both_out:.1f} + {both_back:.1f} = "
        f"{both_out + both_back:.1f}"
    )


def layer_saved_bytes(result: Mapping[str, Any]) -> int:
    """Distinct bytes that one layer saves."""
    return sum(int(group["nbytes"]) for group in result.get("layer_bytes", {}).values())


def rates_of(link: Mapping[str, Any]) -> Rates:
    """links.py's figures as a plan takes them."""
    return Rates(
        d2h_bytes_per_s=link["d2h"],
        h2d_bytes_per_s=link["h2d"],
        duplex_bytes_per_s=float(link["duplex_d2h"]) + float(link["duplex_h2d"]),
    )


def add_bound(
    result: dict[str, Any],
    baseline: Mapping[str, Any] | None,
    link: Mapping[str, Any] | None,
    selective: Mapping[str, Any] | None = None,
    *,
    slices: int = 4,
) -> None:
    """Put `bound_ms` and what it was computed from into a row's result, where it has a bound.

    selective: torch's selective checkpoint in the same run. A row that keeps and recomputes the same has its
    compute, the recompute counted in each backward, and its own bytes; without that row it has no bound.
    """
    if baseline is None or link is None or result.get("status") != "ok":
        return
    result["over_baseline"] = result["step_ms"] / baseline["step_ms"]
    if result.get("varies"):
        return  # a bound is of one step
    if result.get("own_bound_ms") is not None:
        result["bound_ms"] = result["own_bound_ms"]
        result["over_bound"] = result["step_ms"] / result["bound_ms"]
        result["bound_of"] = "the mixture, with what the row measured"
        return
    chunk_bytes = layer_saved_bytes(baseline) * baseline["shape"]["layers"]
    recomputes = result.get("chunk_bytes") is not None
    if recomputes:
        if selective is None:
            return
        baseline, chunk_bytes = selective, int(result["chunk_bytes"])
    if len(baseline["actions"]) == 2:
        if result["row"].endswith(RECOMPUTED):
            return  # it recomputes: what it has to be compared with is checkpointing, see notes_lines
        moved = result["engine"].get("spill_bytes") or (chunk_bytes if result["moves_all_groups"] else 0)
        if not moved:
            return
        bound_s = single_pass_limit_s(
            baseline["forward_ms"] * 1e-3, baseline["backward_ms"] * 1e-3, moved, link["d2h"], link["h2d"]
        )
        result["bound_of"] = f"moving {moved / GB:.2f} GB in one pass"
    else:
        rates = rates_of(link)
        cap = result.get("bound_cap_bytes", result.get("saved_limit_bytes"))
        if cap is None:
            _add_uncapped_bound(result, baseline, rates, chunk_bytes * len(baseline["actions"]) // 2)
            return
        if not (result["moves_all_groups"] or recomputes):
            return
        actions = [Action(*action) for action in baseline["actions"]]
        sizes = {action.chunk: [GroupSize("chunk", chunk_bytes)] for action in actions}
        passes_s = {"F": baseline["forward_ms"] * 1e-3, "B": baseline["backward_ms"] * 1e-3}
        seconds = [passes_s[action.kind] for action in actions]
        try:
            bound = least_step(actions, sizes, seconds, rates, int(cap), slices=slices)
        except ImportError as error:  # the figures count without it
            result["bound_of"] = str(error)
            return
        bound_s = bound.step_s
        result["bound_of"] = (
            f"saved bytes capped at {cap / GB:.2f} GB; fewest bytes moved {bound.moved_bytes / GB:.1f} GB"
        )
        result["bound_moved_bytes"] = bound.moved_bytes
    if recomputes:
        result["bound_of"] += (
            f"; a forward saves {chunk_bytes / GB:.2f} GB; compute of the row selective, "
            f"{baseline['step_ms']:.0f} ms"
        )
    result["bound_ms"] = bound_s * 1e3
    result["over_bound"] = result["step_ms"] / result["bound_ms"]


def _add_uncapped_bound(
    result: dict[str, Any], baseline: Mapping[str, Any], rates: Rates, saved_bytes: int
) -> None:
    """Without a cap on device bytes: the baseline's step, or what moved, out and in, at the duplex rate."""
    moved = result["engine"].get("spill_bytes") or (saved_bytes if result["moves_all_groups"] else 0)
    if not moved or result.get("chunk_bytes") is not None:
        return
    link_ms = 2e3 * moved / rates.duplex_bytes_per_s
    result["bound_ms"] = max(baseline["step_ms"], link_ms)
    result["over_bound"] = result["step_ms"] / result["bound_ms"]
    result["bound_of"] = f"the baseline, or {moved / GB:.2f} GB each way at the duplex rate: {link_ms:.1f} ms"


def host_lines(result: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> list[str]:
    """The host's time of a step, and what it has more than the baseline by saved tensor and by group."""
    if "issue_ms" not in result:
        return []
    line = (
        f"  {result.get('label', result['row'])}: the host needs {result['issue_ms']:.1f} ms a step, the "
        f"least seen; the collector {result['issue_collector_ms']:.1f} of it"
    )
    engine = result["engine"]
    if baseline is None or result["row"] == "nothing" or "issue_ms" not in baseline:
        return [line]
    line += f"; best step {result['step_ms_min'] / baseline['step_ms_min']:.3f} of the baseline's best"
    more_us = 1e3 * (result["issue_ms"] - baseline["issue_ms"])
    line += f"; {more_us / 1e3:+.1f} ms over the baseline"
    marked = [name for name in result["notes"].get("groups", ()) if name in result["layer_bytes"]]
    if marked:
        chunks = result["shape"]["layers"] * len(result["actions"]) // 2
        saves = chunks * sum(result["layer_bytes"][name]["saves"] for name in marked)
        line += f": {more_us / saves:.1f} us a saved tensor ({saves}, parameters left out)"
        if engine["spilled"]:
            line += f", {more_us / engine['spilled']:.1f} a storage that left ({engine['spilled']:.0f})"
        groups = chunks * len(marked)
        line += f", {more_us / groups:.1f} a group ({groups})"
    return [line]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def row_line(result: Mapping[str, Any]) -> str:
    """One row of the table, or its name and the reason why there is none."""
    label = str(result.get("label", result["row"]))
    if result["status"] != "ok":
        return f"{aligned([label], _COLUMNS[:1])} {reason_of(result)}"[:200]
    active, reserved, held, lent = (
        result[name] / GB for name in ("active_bytes", "reserved_bytes", "pinned_held", "pinned_lent_peak")
    )
    engine = result["engine"]
    cells = [
        label,
        _number(result["step_ms"], 1),
        _number(result.get("over_baseline"), 3),
        _number(result["first_step_ms"], 0),
        _number(active, 2),
        _number(reserved, 2),
        _number(reserved / active if active else None, 3),
        _number(held, 2),
        _number(held / lent if lent else None, 3),
        _number(result.get("issue_ms", result["host_ms"]), 0),
        _number(engine["spill_bytes"] / GB if "spill_bytes" in engine else None, 2),
        _number(engine.get("stall_ms"), 0),
        _number(result.get("bound_ms"), 0),
        _number(result.get("over_bound"), 3),
        str(result.get("gradients", {}).get("verdict", "-")),
    ]
    return aligned(cells, _COLUMNS)


def facts_lines(baseline: Mapping[str, Any], working_set_bytes: int) -> list[str]:
    """What the baseline says of the workload: times, bytes a layer, and what a total limit is made of."""
    shape = baseline["shape"]
    chunk = layer_saved_bytes(baseline) * shape["layers"]
    live = live_peak_chunks(baseline["actions"])
    other = baseline["active_bytes"] - baseline["resident_bytes"] - live * chunk
    groups = " ".join(
        f"{name} {group['nbytes'] / 1e6:.0f}" for name, group in baseline["layer_bytes"].items()
    )
    lines = [
        f"{baseline['workload']}: {shape['layers']} layers, sequence {shape['sequence']}; forward "
        f"{baseline['forward_ms']:.1f} ms, "
        f"backward {baseline['backward_ms']:.1f} ms; a forward saves {chunk / GB:.3f} GB, at most {live} "
        "live",
        f"  a layer saves {layer_saved_bytes(baseline) / 1e6:.1f} MB: {groups}",
    ]
    if baseline["active_bytes"]:
        lines.append(
            f"  active peak {baseline['active_bytes'] / GB:.2f} GB = resident "
            f"{baseline['resident_bytes'] / GB:.2f} (weights, gradients "
            f"that stay, inputs) + saved {live * chunk / GB:.2f} + working set {other / GB:.2f} (a total "
            "limit sets "
            f"{working_set_bytes / GB:.2f} aside for it)"
        )
    return lines


def over_plain(result: Mapping[str, Any]) -> str:
    """A row's step beside those with nothing that its own process has made after it."""
    plain_ms = result["plain_ms"]
    return f"{result['step_ms'] / plain_ms:.3f} of a step with nothing in its own process, {plain_ms:.1f} ms"


def _beside_checkpoint(result: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> str:
    """A row that recomputes as torch's checkpoint does, and holds the inputs elsewhere."""
    active, reserved = ((checkpoint[name] - result[name]) / GB for name in ("active_bytes", "reserved_bytes"))
    ratio = result["step_ms"] / checkpoint["step_ms"]
    text = f"{ratio:.4f} of checkpoint's step, active {active:.2f} GB below it, reserved {reserved:.2f}"
    if not (result.get("forward_active_bytes") and checkpoint.get("forward_active_bytes")):
        return text
    shape = result["shape"]
    fell = checkpoint["forward_active_bytes"] - result["forward_active_bytes"]
    inputs = (shape["layers"] - 2) * shape["sequence"] * shape["hidden"] * _ITEM_BYTES
    return (
        f"{text}; after the forward {result['forward_active_bytes'] / GB:.2f} GB, {fell / GB:.3f} below it: "
        f"{fell / inputs:.3f} of {shape['layers'] - 2} inputs' {inputs / GB:.3f}"
    )


def notes_lines(
    result: Mapping[str, Any], baseline: Mapping[str, Any] | None, checkpoint: Mapping[str, Any] | None = None
) -> list[str]:
    """What does not fit the table: the limit in its two forms, the reservation, what left and what could not,
    the host's time.

    checkpoint: the row that recomputes and moves nothing, for the rows that recompute and move the blocks'
        inputs.
    """
    if result["status"] != "ok":
        return []
    engine, label = result["engine"], result.get("label", result["row"])
    parts = []
    if checkpoint is not None and result["row"].endswith(RECOMPUTED):
        parts.append(_beside_checkpoint(result, checkpoint))
    if result.get("stderr") and result["row"].startswith("ours"):
        parts.append(f"it said: {result['stderr'].strip().splitlines()[-1][:200]}")
    if "plain_ms" in result:
        parts.append(over_plain(result))
    if "tracing" in result:
        found = result["tracing"]
        parts.append(
            f"traced {found['step_ms']:.1f} ms, in turns with {found['untraced_step_ms']:.1f} "
            f"({found['step_ms'] / found['untraced_step_ms']:.4f}); its host {found['host_ms']:.0f} ms and "
            f"{found['untraced_host_ms']:.0f}; {found['spans']:.0f} spans, {found['file_bytes'] / 1e6:.2f} MB"
        )
    if not engine:
        return [f"  {label}: " + "; ".join(parts)] if parts else []
    total, saved = result["options"].get("total_limit_bytes"), result.get("saved_limit_bytes")
    if total is not None and saved is not None:
        over = (result["active_bytes"] - total) / GB
        parts.append(
            f"total limit {total / GB:.1f} = saved {saved / GB:.2f} + resident "
            f"{result['resident_bytes'] / GB:.2f} + working set "
            f"{result['options']['working_set_bytes'] / GB:.2f} GB; active "
            f"{'over by' if over > 0 else 'under by'} {abs(over):.2f}"
        )
    elif saved is not None:
        parts.append(f"saved limit {saved / GB:.2f} GB")
    reserved = result["notes"].get("config", {}).get("host_reserve_bytes", 0)
    parts.append(f"reserved {reserved / GB:.2f} GB pinned in {result['reserve_ms']:.0f} ms before step 1")
    parts.append(
        f"tensors saved {engine.get('saved', 0):.0f} kept {engine.get('kept', 0):.0f} left "
        f"{engine.get('spilled', 0):.0f} refused "
        f"{engine.get('refused', 0):.0f} ({engine.get('refused_bytes', 0) / GB:.2f} GB); saved on device at "
        "most "
        f"{engine.get('device_bytes_peak', 0) / GB:.2f} GB; stalls {engine.get('stall_count', 0):.0f}"
    )
    if baseline is not None and engine.get("saved"):
        fell = (baseline["active_bytes"] - result["active_bytes"]) / GB
        host = ""
        if "issue_ms" not in result:
            host_us = 1e3 * (result["host_ms"] - baseline["host_ms"]) / engine["saved"]
            host = f"host {host_us:+.1f} us a saved tensor over the baseline; "
        parts.append(f"{host}active fell {fell:.2f} GB")
    parts.append(
        f"step {result['step_ms_min']:.1f}..{result['step_ms_max']:.1f}; first step's active "
        f"{result['first_active_bytes'] / GB:.2f} GB"
    )
    if "bound_of" in result:
        parts.append(f"bound: {result['bound_of']}")
    elif result.get("chunk_bytes") is not None:
        parts.append("no bound: it needs the row selective before this one, and a limit")
    return [f"  {label}: " + "; ".join(parts)]

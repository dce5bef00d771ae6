"""What offload did, what it cost, and why when it did nothing: `print(offload.report())`.

One invariant: a report is a plain value of the moment in which it was asked for. It communicates only if it
is asked to gather, and asking never blocks the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from offload.auto.controller import Auto
from offload.groups.manager import GroupsManager
from offload.marks import existing_manager
from offload.modules.memory import device_peak_bytes
from offload.planner.explained import Explanation, folded
from offload.sizes import bytes_text, enough_text
from offload.telemetry.figures import Figures, KindFigures, Ledger, saved_text, stall_text
from offload.telemetry.page import WORTH, Page, Table, write_page
from offload.telemetry.timeline import Trace
from offload.weights.figures import GradientFigures, WeightFigures

_NO_MANAGER = (
    "nothing is offloaded: there is no manager in this process. Call offload.apply(model), or "
    "offload.configure() and marks"
)
_TO_DO = "\nnext: run a step (forward, backward, optimizer.step(), or step_end() after marks), and ask then"
_SIMULATED = "on a simulated link (stalls are its copies', a step's time is the host's)"
_CLOSED = (
    "these figures end where the manager that they are of was closed or reset; offload.report() has those "
    "since"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures since a point in time, and of the last step. `print` it, or take `as_dict()`.

    total: of all steps since then; its fields say what each figure means. last: of the last step that ended
        with offload on, None before there was one.
    ranks: `total` by rank, where it was gathered.
    """

    since: str
    """What the point in time was, such as "configure"."""

    total: Figures = field(default_factory=Figures)
    last: Figures | None = None
    device_limit_bytes: int | None = None
    device_limit_by: str = ""
    """Whose limit that is: "config" for device_limit, "auto" for what device_total leaves."""

    follows_no_plan: bool = False
    """Whether mode="auto" is applied and follows no plan: too few steps were seen, or a plan was refused."""

    link: str = ""
    """"on a simulated link ..." without a GPU: what its times mean."""

    remark: str = ""
    """Why there are no figures, or none of now."""

    device_peak_bytes: int | None = None
    """Active bytes of all kinds on the GPU, at most, since torch's peak was last reset, as mode "auto" does
    while it measures. None without a GPU."""

    peak: str = ""
    """In which phase of a step the device's memory is highest, where `apply` has seen it."""

    recomputes: int = 0
    """Forwards of blocks that backwards ran again, whole or in part, in a report of a handle."""

    kinds: Mapping[str, KindFigures] = field(default_factory=dict)
    """What each kind held and waited for in the last step: activations, weights, gradients, optimizer."""

    weights: WeightFigures | None = None
    """Figures of weights that stream, in a report of a handle with `weights=`."""

    gradients: GradientFigures | None = None
    """Figures of gradients that wait on the host."""

    explained: Explanation | None = None
    """What mode "auto" chose, where it is applied."""

    ranks: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def save(self, path: str | Path, trace: Trace | None = None) -> None:
        """Write the report as one page of HTML that loads nothing: the verdict, the tables, what mode "auto"
        chose for each block and what a GB more would gain.

        trace: of a step, what `offload.tracing()` yields: memory by kind and lanes over time are drawn. The
            page says so where they were not recorded.
        Raises ImportError for a trace without matplotlib (the extra `plot`), ValueError for one in which
        nothing was saved or copied and for a path that is none of a page, TypeError for what is no trace;
        nothing is written then. Blocks the host: while it draws, about a second.
        """
        if Path(path).suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"report().save({str(path)!r}): a report is a page of HTML; name it .html")
        if not isinstance(trace, Trace | None):
            raise TypeError(f"trace is a {type(trace).__name__}, must be what offload.tracing() yields")
        rank = f"rank {dist.get_rank()} of {dist.get_world_size()}, " if _has_ranks() else ""
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        choices: list[str] = []
        if self.explained is not None:
            about = str(self.explained).partition("\n\n")[0]  # a table of the same blocks follows it
            choices = [*about.splitlines(), *self.explained.margins()]
        page = Page(
            figures=self.as_dict(),
            lead=self._lead(),
            simulated=bool(self.link),
            tables=[self._kinds(), self._groups(), self._stayed(), self._ranks(), self._figures()],
            choices=choices,
            choice=None if self.explained is None else Table(*self.explained.table()),
            text="" if self.streamed is None else str(self.streamed),
            footer=f"{rank}{where}, torch {torch.__version__}, {time.strftime('%Y-%m-%d %H:%M:%S')}.",
            timeline=None if trace is None else trace.timeline,
        )
        write_page(path, page)

    def _lead(self) -> list[str]:
        """The first lines of a page."""
        lines = [line.removeprefix("offload: ") for line in self.verdict.splitlines()]
        beside = [self.link, self.remark if self.remark not in self.verdict else "", self.peak]
        return [line[:1].upper() + line[1:] for line in (*lines, *beside) if line]

    @property
    def last_step(self) -> dict[str, Any]:
        """The figures of the last step by name, {} before there was one."""
        return {} if self.last is None else self.last.as_dict()

    def as_dict(self) -> dict[str, Any]:
        """The figures by name, as plain values for JSON: those of `total` at the top, among them
        saved_bytes, moved_bytes, kept_bytes, peak_bytes, host_bytes and stall_ms; `last_step` and `ranks`
        beside. `kinds` are of the last step."""
        return {
            **self.total.as_dict(),
            "device_limit_bytes": self.device_limit_bytes,
            "device_limit_by": self.device_limit_by,
            "since": self.since,
            "verdict": self.verdict,
            "device_peak_bytes": self.device_peak_bytes,
            "peak": self.peak,
            "recomputes": self.recomputes,
            "kinds": {kind: asdict(figures) for kind, figures in self.kinds.items()},
            "weights": None if self.weights is None else self.weights.as_dict(),
            "gradients": None if self.gradients is None else asdict(self.gradients),
            "last_step": self.last_step,
            "ranks": {rank: dict(figures) for rank, figures in self.ranks.items()},
        }

    @property
    def verdict(self) -> str:
        """Say what the device had at most, what left of each kind, and what a step waits for it; in a second
        line, the next change to make. Before a step has ended: why nothing is known, and what to do."""
        last, others, peak_bytes = self.last, self._others(), self.device_peak_bytes
        parts = [f"device memory at most {bytes_text(peak_bytes)} active"] if peak_bytes else []
        if last is None and not others:
            why, is_final = self.remark or "no step with offload has ended yet", bool(self.remark)
            if self.explained is not None and not self.remark:
                why, is_final = str(self.explained).partition("\n")[0], self.explained.is_final
            return f"offload: {'; '.join([*parts, why])}{_TO_DO * (not is_final)}"
        last = last or Figures()
        if self.recomputes and not self.total.saved_bytes:
            did = f"{self.recomputes:,} forwards of blocks recomputed in {self.total.steps:,} steps"
            parts.append(f"{did}, no saved tensor moved")
        elif self._takes_saved or not others:
            parts.append(saved_text(last.peak_bytes, last.would_hold_bytes, last.moved_bytes))
        parts += [*others, stall_text(last.stall_ms, last.step_ms)]
        return f"offload: {'; '.join(parts)}\n{self._next(last)}"

    def _others(self) -> list[str]:
        """Describe what kinds beside saved tensors have on each side, for the verdict."""
        return [
            f"{kind}: {device} on the device, {host} on the host"
            for kind, device, host, *_ in self._moves()
            if kind != "activations"
        ]

    @property
    def _takes_saved(self) -> bool:
        """Predicate: saved tensors were to leave."""
        return bool(self.total.groups or self.total.saved_bytes)

    @property
    def streamed(self) -> WeightFigures | GradientFigures | None:
        """Figures of weights, which have those of gradients in them, or of gradients alone."""
        return self.weights or self.gradients

    def __str__(self) -> str:
        steps = self.total.steps
        title = f"offload report: {steps:,} step{'s' * (steps != 1)} since {self.since}"
        parts = [self.verdict, f"{title}{self.link and ', ' + self.link}"]
        parts += [self.remark] if self.remark and self.remark not in self.verdict else []
        parts += [_text(table) for table in (self._figures(), self._kinds()) if table.rows]
        parts += [str(each) for each in (self.streamed, self.peak) if each]
        parts += [_text(table) for table in (self._groups(), self._stayed(), self._ranks()) if table.rows]
        return "\n\n".join(parts)

    # -- parts of the text -----------------------------------------------------------------------------------
    def _figures(self) -> Table:
        beyond = "" if self.device_limit_bytes is None else f"beyond {self._limit()}"
        last = Figures() if self.last is None else self.last
        rows = [(label, *values) for label, values in _rows(last, self.total, beyond)]
        return Table(("", "last step", "in all"), rows)

    def _kinds(self) -> Table:
        """Has rows where more than saved tensors moves."""
        headers = ("last step, by kind", "on the device", "on the host", "out", "back", "waited for")
        rows = self._moves()
        more = {kind for kind, *_ in rows} - {"activations"}
        return Table(headers, rows if more else [], "Saved tensors alone were to move.")

    def _moves(self) -> list[tuple[str, ...]]:
        return [
            (kind, *map(bytes_text, sizes), f"{one.stall_ms:,.1f} ms")
            for kind, one in self.kinds.items()
            for sizes in [(one.device_bytes, one.host_bytes, one.out_bytes, one.in_bytes)]
            if any((*sizes, one.stall_ms))
        ]

    def _limit(self) -> str:
        leaves = "what mode='auto' planned for" if self._is_free else "what device_total leaves"
        by = self.device_limit_by
        name = {"auto": leaves, "config": "device_limit", "": "device_limit"}.get(by, by)
        return f"{name} ({bytes_text(self.device_limit_bytes or 0)})"

    @property
    def _is_free(self) -> bool:
        """Mode "auto" without a device_total."""
        return self.explained is not None and self.explained.total_bytes is None

    def _next(self, last: Figures) -> str:
        shown = last if self.total.moved_bytes else self.total
        alone = not self._takes_saved and self._others()
        if not (shown.moved_bytes or alone):
            why = self.remark or self._why_nothing(shown)
            return f"Why nothing left{' in the last step' * (shown is last)}: {why}"
        marked = self.total.saved_bytes and not self.total.groups  # by a watermark alone
        limit = "device_total" if self.device_limit_by == "auto" else "high=" if marked else "device_limit"
        more, less = f"raise {limit}", f"a lower {limit}"
        if limit == "device_total" and self._is_free:
            more, less = "give device_total=, for a bound", "a device_total"
        if last.no_host_bytes:
            needed = max(last.host_lent_bytes, last.moved_bytes) + last.no_host_bytes
            change = (
                f"{bytes_text(last.no_host_bytes)} found no host memory; give apply "
                f"host_reserve='{enough_text(needed)}', and no smaller host_limit"
            )
        elif last.over_limit_bytes:
            passed = f"{bytes_text(last.over_limit_bytes)} at once beyond {self._limit()}"
            change = f"{passed}; {more}{', or mark smaller groups' * (limit == 'device_limit')}"
        elif self.follows_no_plan:
            change = "mode='auto' follows no plan: explain() of its handle says why, and what is done instead"
        elif last.stall_ms > WORTH * last.step_ms and not self.link:
            fewer = ", offload fewer groups (modules=...), or recompute (mode='auto', 'hidden_states')"
            fewer = "; explain() has what that saves" if limit == "device_total" else fewer
            change = f"more leaves than can be copied beside compute; {more}{fewer}"
            if alone:
                change = "more is copied than compute hides; compute more tokens a forward, or move less"
        elif last.peak_bytes >= last.would_hold_bytes > 0:
            change = f"as much was on the device as if nothing had left; set {less}"
        elif self.link:
            change = "nothing that shows without a GPU"
        elif alone:
            change = "nothing; saved tensors stay as they are: a mode= beside moves or recomputes them"
        else:
            change = f"nothing; {less} frees more, while stalls stay below {WORTH:.0%}"
        return f"next: {change}"

    def _why_nothing(self, total: Figures) -> str:
        if not total.saved_bytes:
            if not total.groups:
                return "no group was committed; mark the layers, or call offload.apply(model)"
            reasons = sorted(total.stayed.items(), key=lambda found: -found[1].nbytes)
            return (
                f"nothing that was saved may leave; most of it is {reasons[0][0]}"
                if reasons
                else "the groups saved nothing: their forwards ran without gradients, or without hooks "
                "(`with offload_hooks():`)"
            )
        reasons_of_kept = {
            "the plan kept it (activation_offload_fraction, or a limit, total or mark with room for all)": (
                total.by_plan_bytes
            ),
            "the host had no free memory; raise host_reserve_bytes or host_limit_bytes": total.no_host_bytes,
            "admission denied it, as max_spilling_bytes=0 does": total.denied_bytes,
            "it was freed before its piece was sent": total.freed_first_bytes,
        }
        return max(reasons_of_kept, key=lambda reason: reasons_of_kept[reason])

    def _groups(self) -> Table:
        groups = {} if self.last is None else self.last.groups
        rows = []
        for name, one in groups.items():
            sizes = (one.saved_bytes, one.moved_bytes, one.by_plan_bytes, one.no_host_bytes)
            rows.append((name, *map(bytes_text, sizes)))
        headers = ("last step, by group", "saved", "moved", "kept by plan", "no host memory")
        return Table(headers, folded(rows), "No group was committed in it.")

    def _stayed(self) -> Table:
        rows = [
            (reason, f"{stayed.tensors:,}", bytes_text(stayed.nbytes), f"{stayed.largest_elements:,}")
            for reason, stayed in sorted(self.total.stayed.items(), key=lambda found: -found[1].nbytes)
        ]
        headers = ("never leaves (first step)", "tensors", "one count a save", "largest, elements")
        return Table(headers, rows, "Every tensor that a group saved may leave.")

    def _ranks(self) -> Table:
        names = ("saved_bytes", "moved_bytes", "kept_bytes", "peak_bytes", "would_hold_bytes", "host_bytes")
        rows = [
            (f"rank {rank}", *(bytes_text(figures[name]) for name in names), f"{figures['stall_ms']:,.1f}")
            for rank, figures in sorted(self.ranks.items())
        ]
        headers = ("saved", "moved", "kept", "peak", "if nothing left", "pinned", "stall ms")
        return Table(("in all, by rank", *headers), rows, "Not gathered: report(gather=True), on all ranks.")


class ReportStart:
    """A point in time for a report: figures of the steps that end while somebody holds it.

    manager: None for a report of nothing. since: what the report calls it.
    """

    def __init__(self, manager: GroupsManager | None, since: str) -> None:
        self._since = since
        self._ledger = Ledger() if manager is None else manager.new_ledger()

    def report(self, *, gather: bool = False, process_group: dist.ProcessGroup | None = None) -> Report:
        """Report since this point in time, whatever `configure` has changed since. Where the manager was
        closed, it says so: the figures end there. Arguments are those of `offload.report`."""
        manager = existing_manager()
        found = _report(manager, self._ledger, self._since, gather, process_group)
        counts = manager is not None and self._ledger in manager.ledgers
        return found if counts else replace(found, remark=_CLOSED)


def report(*, gather: bool = False, process_group: dist.ProcessGroup | None = None) -> Report:
    """Report what was saved, moved and kept since `configure`, or since the first mark without one.

    gather: with the figures of each rank of `process_group` (None: of the whole job) beside; then all of them
        must call. Without torch.distributed, of this process alone.
    Blocks the host: only to gather, until all have called.
    """
    manager = existing_manager()
    ledger = Ledger() if manager is None else manager.ledger
    return _report(manager, ledger, "configure", gather, process_group)


def _report(
    manager: GroupsManager | None, ledger: Ledger, since: str, gather: bool, group: dist.ProcessGroup | None
) -> Report:
    limits = None if manager is None else manager.engine.limits
    limit_by = "" if limits is None else limits.held_by("device_limit_bytes")
    return Report(
        since=since,
        total=ledger.total,
        last=ledger.last,
        kinds=ledger.kinds,
        device_limit_bytes=None if limits is None else limits.device_limit_bytes,
        device_limit_by=limit_by,
        # until it has one, it bounds what recomputes leave, and not the device
        follows_no_plan=limits is not None and limits.held_by("again_room_bytes") == "auto" != limit_by,
        device_peak_bytes=device_peak_bytes(None if manager is None else manager.engine.device.torch_device),
        link=_SIMULATED if manager is not None and not manager.engine.device.pins else "",
        remark=_NO_MANAGER if manager is None else "",
        explained=_explained(manager),
        ranks=_gathered(ledger.total, group) if gather else {},
    )


def _explained(manager: GroupsManager | None) -> Explanation | None:
    clients = [] if manager is None else manager.engine.clients
    return next((client.explain() for client in clients if isinstance(client, Auto)), None)


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _gathered(mine: Figures, group: dist.ProcessGroup | None) -> dict[int, dict[str, Any]]:
    if not _has_ranks():
        return {0: mine.as_dict()}
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (dist.get_rank(), mine.as_dict()), group=group)
    return dict(found)


def _rows(last: Figures, total: Figures, beyond: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Label, and the text of the last step's figure and of the total's."""

    def row(label: str, name: str, *, always: bool = True) -> Iterator[tuple[str, tuple[str, str]]]:
        values = (getattr(last, name), getattr(total, name))
        if any(values) or (always and total.saved_bytes):
            yield label, (bytes_text(values[0]), bytes_text(values[1]))

    yield from row("saved for the backward, and may leave", "saved_bytes")
    yield from row("  moved to the host", "moved_bytes")
    yield from row("    copied back", "came_back_bytes")
    yield from row("    read before it left the device", "read_here_bytes", always=False)
    yield from row("    not read", "unread_bytes", always=False)
    yield from row("  stayed on the device", "kept_bytes")
    yield from row("    the plan keeps it", "by_plan_bytes", always=False)
    yield from row("    the host had no memory for it", "no_host_bytes", always=False)
    yield from row("    admission denied it", "denied_bytes", always=False)
    yield from row("    freed before it was sent", "freed_first_bytes", always=False)
    yield from row("copied back once more", "again_bytes", always=False)
    yield from row("on the device at once, at most", "peak_bytes")
    yield from row("  if nothing had left", "would_hold_bytes", always=not last.moved_bytes)
    if beyond:
        yield from row(f"  {beyond}", "over_limit_bytes")
    yield from row("pinned host memory", "host_bytes")
    yield from row("  in use at once, at most", "host_lent_bytes")
    yield from row("written to the disk", "disk_out_bytes", always=False)
    yield from row("  read back", "disk_back_bytes", always=False)
    yield from row("  in the file at once, at most", "disk_bytes", always=False)
    if total.disk_blocked_ms:
        yield (
            "  the host was blocked",
            (f"{last.disk_blocked_ms:,.1f} ms", f"{total.disk_blocked_ms:,.1f} ms"),
        )
    if not total.steps:
        return
    stalls = [f"{found.stall_ms:,.1f} ms; {found.stall_count:,} waits" for found in (last, total)]
    yield "stalls: time of the step before; waits of this one", (stalls[0], stalls[1])


def _text(table: Table) -> str:
    """The first column to the left, with its indents; the others to the right."""
    lines = (table.headers, *table.rows)
    widths = [max(len(row[column]) for row in lines) for column in range(len(table.headers))]
    ruler = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (table.headers, ruler, *table.rows)
    )

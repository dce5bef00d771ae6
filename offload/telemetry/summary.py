"""The table of what every rank offloads, printed once after warm-up: the first place to see that a setting
does what it was set for.

One invariant: every rank of the process group makes the same collective calls in the same order, whatever its
own groups are called and however many it has. So ranks that differ cannot hang one another.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO

import torch.distributed as dist
from tabulate import tabulate

TITLE = "Activation Offload Summary (MB)"
MB = 10**6  # bytes, here as wherever this project says MB or GB


def print_offload_summary_table(
    total_offload_bytes: dict[str, int],
    *,
    process_group: dist.ProcessGroup | None = None,
    file: TextIO | None = None,
) -> None:
    """Gather each rank's bytes by group name; the first rank of the process group writes the table, in MB of
    a million bytes.

    total_offload_bytes: this rank's bytes by group name; {} where it offloads nothing. If no rank offloads a
        byte, nothing is written.
    process_group: the ranks that take part, all of which must call. None means every rank of an initialised
        job, or this process alone without one. A rank outside the group returns at once.
    file: where the table goes, standard output by default.
    Raises ValueError for a negative number of bytes, before anything is sent.
    Blocks the host: until all ranks of the process group have arrived, and again until the table is out.
    """
    for name, nbytes in total_offload_bytes.items():
        if nbytes < 0:
            raise ValueError(
                f"group {name!r} reports {nbytes:,} bytes offloaded, the least is 0; pass what was counted, "
                "not a difference"
            )
    rows = {0: total_offload_bytes}
    members = None
    if dist.is_available() and dist.is_initialized():
        members = process_group if process_group is not None else dist.group.WORLD
        rank_in_group = dist.get_rank(members)
        if rank_in_group < 0:
            return
        # Objects of any size, pickled: what a rank sends need not look like what another sends.
        gathered: list[tuple[int, dict[str, int]]] | None = None
        if rank_in_group == 0:
            gathered = [(0, {})] * dist.get_world_size(members)
        dist.gather_object((dist.get_rank(), total_offload_bytes), gathered, group=members, group_dst=0)
        rows = dict(gathered or ())
    if table := format_offload_summary_table(rows):
        out = sys.stdout if file is None else file
        out.write(table + "\n")
        out.flush()
    if members is not None:  # so that no rank's later output, or exit, overtakes the table
        dist.barrier(group=members)


def format_offload_summary_table(rows: Mapping[int, Mapping[str, int]]) -> str:
    """The table as text, without a final newline; the empty string if nothing leaves any rank.

    rows: bytes by group name, by rank. Columns are the union of the names, sorted; a rank without a group
        shows 0.00. Totals are sums of bytes, rounded once, so they may differ in the last digit from the sum
        of the rounded cells.
    """
    names = sorted({name for row in rows.values() for name in row})
    if not any(nbytes for row in rows.values() for nbytes in row.values()):
        return ""
    body = [(f"Rank {rank}", [row.get(name, 0) for name in names]) for rank, row in sorted(rows.items())]
    body.append(("Total", [sum(column) for column in zip(*(cells for _, cells in body), strict=True)]))
    table = tabulate(
        [[label, *(f"{nbytes / MB:.2f}" for nbytes in (*cells, sum(cells)))] for label, cells in body],
        headers=["", *names, "Total"],
        colalign=("left", *["right"] * (len(names) + 1)),
        disable_numparse=True,
        tablefmt="simple",
    )
    return f"{TITLE}\n{table}"

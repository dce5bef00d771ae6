"""Numbers in, plans out: no torch, no lane, no import from the rest of offload.

The least time that any engine could reach (`bound`), the groups that stay (`keeps`), a step played on numbers
(`simulate`) and the plan chosen with it (`search`) share their types (`actions`), so a benchmark, the engine
and a dry run argue about one set of figures.
"""

from __future__ import annotations

from offload.policy.actions import (
    Action,
    ChunkKey,
    ChunkSizes,
    GroupKey,
    GroupSize,
    Keeps,
    Kind,
    Rates,
    Work,
    one_f_one_b,
    parse_action,
    reads_of,
    work_of,
)
from offload.policy.bound import Bound, least_step, single_pass_limit_s
from offload.policy.keeps import (
    fraction_keeps,
    kept_peak_bytes,
    limit_keeps,
    margin_keeps,
    summary_bytes,
    tail_keeps,
)
from offload.policy.search import Plan, choose_keeps
from offload.policy.simulate import Simulation, simulate

__all__ = [
    "Action",
    "Bound",
    "ChunkKey",
    "ChunkSizes",
    "GroupKey",
    "GroupSize",
    "Keeps",
    "Kind",
    "Plan",
    "Rates",
    "Simulation",
    "Work",
    "choose_keeps",
    "fraction_keeps",
    "kept_peak_bytes",
    "least_step",
    "limit_keeps",
    "margin_keeps",
    "one_f_one_b",
    "parse_action",
    "reads_of",
    "simulate",
    "single_pass_limit_s",
    "summary_bytes",
    "tail_keeps",
    "work_of",
]

"""A linear program: rows as they are written down, and the columns' values where one sum of them is least.

One invariant: nothing here knows what a column means. scipy is imported at use: training never needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Ranges", "Rows", "minimise"]

Ranges = list[tuple[float | None, float | None]]
"""The least and the most of each column."""


@dataclass(slots=True)
class Rows:
    """Sparse rows of one matrix and their right sides."""

    limits: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: Iterable[tuple[int, float]], limit: float) -> None:
        for column, value in row:
            self.rows.append(len(self.limits))
            self.columns.append(column)
            self.values.append(value)
        self.limits.append(limit)

    def matrix(self, sparse: Any, num_columns: int) -> Any:
        return sparse.csr_matrix(
            (self.values, (self.rows, self.columns)), shape=(len(self.limits), num_columns)
        )


def minimise(
    costs: Mapping[int, float], ranges: Ranges, at_most: Rows, equal: Rows
) -> Sequence[float] | None:
    """The columns' values where their sum, each times its cost, is least; None if no values keep all rows.

    costs: by column, 0 where it is not named. Raises ImportError without scipy (extra `plan`).
    """
    if not ranges:
        return []
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise ImportError(
            "the bound needs scipy, which is not installed: pip install scipy, or in a checkout "
            "pip install '.[plan]'"
        ) from error
    for presolves in (True, False):  # with it scipy 1.17's HiGHS gave up at a program that it solves without
        result = optimize.linprog(
            [costs.get(column, 0.0) for column in range(len(ranges))],
            A_ub=at_most.matrix(sparse, len(ranges)),
            b_ub=at_most.limits,
            A_eq=equal.matrix(sparse, len(ranges)),
            b_eq=equal.limits,
            bounds=ranges,
            method="highs",
            options={"presolve": presolves},
        )
        if result.status == 2:  # infeasible
            return None
        if result.success:
            break
    assert result.success, f"HiGHS found no solution: {result.message}"
    return list(result.x)

"""The one door to scipy's linear programs."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("scipy", reason="the bound needs scipy, an extra")

from scipy import optimize

from bench.linear import Rows, minimise


def test_a_program_at_which_presolve_gives_up_is_solved_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As scipy 1.17's did once, at 48 columns whose bounds span seven digits."""
    real, tried = optimize.linprog, []

    def gives_up(*arguments: Any, options: dict[str, bool], **keywords: Any) -> Any:
        tried.append(options["presolve"])
        result = real(*arguments, options=options, **keywords)
        if options["presolve"]:
            result.status, result.success = 4, False
        return result

    monkeypatch.setattr(optimize, "linprog", gives_up)
    at_most, equal = Rows(), Rows()
    at_most.add([(0, -1.0), (1, -1.0)], -3.0)
    solution = minimise({0: 1.0, 1: 2.0}, [(0.0, 2.0), (0.0, None)], at_most, equal)
    assert solution == [2.0, 1.0]
    assert tried == [True, False]
    at_most.add([(1, 1.0)], 0.5)
    assert minimise({0: 1.0}, [(0.0, 2.0), (0.0, None)], at_most, equal) is None

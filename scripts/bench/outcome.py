"""What becomes of one row, in this process or in one of its own.

One invariant: whatever happens, the answer is a dictionary with a status and, unless it is "ok", the reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.rows import NotInstalledError, SkippedError

__all__ = ["outcome", "outcome_of_process"]

_STDERR_CHARACTERS = 4000


def outcome(about: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """`about`, and what `measure` returns or why it did not."""
    began = time.perf_counter()
    result: dict[str, Any] = {**about}
    try:
        result |= measure()
        result["status"] = "ok"
    except NotInstalledError as error:
        result |= {"status": "not installed", "reason": str(error)}
    except SkippedError as error:
        result |= {"status": "skipped", "reason": str(error)}
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        result |= {
            "status": "failed",
            "reason": f"{type(error).__name__}: {first_line}",
            "traceback": traceback.format_exc(),
        }
    result["process_s"] = time.perf_counter() - began
    return result


def outcome_of_process(
    script: Path,
    request: str,
    out: Path,
    about: Mapping[str, Any],
    *,
    timeout_s: float,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """What `script --child request --child-out out` leaves in `out`; a process that dies, or takes too long,
    is a failed row."""
    out.unlink(missing_ok=True)
    failed = {**about, "status": "failed"}
    command = [sys.executable, str(script), "--child", request, "--child-out", str(out)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=dict(environment), check=False
        )
    except subprocess.TimeoutExpired:
        return failed | {"reason": f"took longer than --row-timeout-s {timeout_s:.0f}"}
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    died = failed | {"reason": f"process ended with {done.returncode}: {last}"}
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else died
    result["stderr"] = done.stderr[-_STDERR_CHARACTERS:]
    return result

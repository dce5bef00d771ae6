"""Threads of a test."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread


def run_all(threads: Sequence[Thread]) -> None:
    """Start them all, then wait for each to end."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

"""The largest of the last values: a peak that is forgotten when it does not come again.

One invariant: a value counts in the `least` values after it whatever they are, and in none past twice as
many.
"""

from __future__ import annotations

__all__ = ["RecentPeak"]


class RecentPeak:
    """Two maxima that take turns, so its memory does not grow with what it looks back on. least: values that
    a peak lasts at least."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._before = self._current = 0
        self._count = 0  # of the current turn

    @property
    def value(self) -> int:
        """0 before the first value."""
        return max(self._before, self._current)

    def add(self, value: int) -> bool:
        """Count a value. Returns whether the peak has fallen with it, because an old one was forgotten."""
        old = self.value
        if self._count == self._least:
            self._before, self._current, self._count = self._current, 0, 0
        self._current = max(self._current, value)
        self._count += 1
        return self.value < old

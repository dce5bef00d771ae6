"""A long calculation beside the steps, on a thread of its own.

Python runs one thread at a time. A search that never rests takes the host from training as if it were made
at a step's end: operators issued a second fall to two fifths and less. One that rests three times as long as
it worked leaves four fifths, and a host that is ahead of its device by more than that loses nothing.

One invariant: what the calculation raised is raised where its result is taken, and a process that ends waits
no longer than for the part that is under way.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_REST = 3.0
"""Seconds for each that it worked, waiting for the interpreter not counted."""

_STOPS_WITHIN_S = 0.01


class _Stopped(BaseException):
    """Nobody wants the result any more."""


class Beside(Generic[T]):
    """calculate: is given a function that it calls between its parts, and issues nothing to the device.
    waits: it runs here and now, without rests. Blocks the host then, else never but in `result`."""

    def __init__(self, calculate: Callable[[Callable[[], object]], T], *, waits: bool = False) -> None:
        self._calculate = calculate
        self._is_stopped = False
        self._began_s = 0.0  # to work
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if waits:
            self._found.append(calculate(int))
            return
        self._thread = threading.Thread(target=self._run, name="offload-search", daemon=True)
        _running.add(self)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def result(self) -> T:
        """What was calculated. Blocks the host until it is. Raises what the calculation raised."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found[0]

    def stop(self) -> None:
        """There will be no result: it ends at its next rest. Takes no lock."""
        self._is_stopped = True

    def _run(self) -> None:
        self._began_s = time.thread_time()
        try:
            self._found.append(self._calculate(self._rest))
        except _Stopped:
            pass
        except BaseException as error:  # the thread that takes the result raises it
            self._error = error

    def _rest(self) -> None:
        until_s = time.monotonic() + _REST * (time.thread_time() - self._began_s)
        while not self._is_stopped and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _STOPS_WITHIN_S))
        self._began_s = time.thread_time()
        if self._is_stopped:
            raise _Stopped


_running = weakref.WeakSet[Beside[Any]]()


@atexit.register
def _stop_all() -> None:
    """A thread that is inside a library when the interpreter goes would take the process with it."""
    for beside in list(_running):
        beside.stop()
    for beside in list(_running):
        if beside._thread is not None:
            beside._thread.join()

"""Threads that read weights beside the forwards of another one.

Inside a block's forward its weights have torch's own class, so a call that another thread makes then is not
seen, and may go on in C++ when the block's bytes are freed. Such a thread has released the interpreter's lock
inside that call: it stands at one instruction until the call ends.

One invariant: a call that began before its block's forward ended has ended, or has stood for `PATIENCE_S`,
when the block's bytes are freed. Only threads that were seen to read or write a weight are looked at.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import CodeType

import torch

from offload.weights.weight import in_backward

PATIENCE_S = 0.05
"""Longer than the host's part of an operator on a GPU. What stands longer waits for something else, such as
the next entry of a queue, and is not waited for again until it has been seen once more."""

_OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")

_BACKWARD = torch.autograd.graph._engine_run_backward.__name__

Places = dict[int, tuple[int, int]]
"""Where threads stand: by identifier of the thread, the frame and its last instruction."""


class Readers:
    """The threads that read or write weights of one model from outside of its blocks."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._waits: Places = {}
        self.waited_s = 0.0  # of the host, in `await_calls`

    def note(self) -> None:
        """The current thread reads or writes a weight from outside of its block. A backward's does so while
        the one that called it waits."""
        if not in_backward():
            mine = threading.get_ident()
            self._known.add(mine)
            self._waits.pop(mine, None)

    def places(self) -> Places:
        """Where the other threads stand that may be reading a weight unseen. One that stands in this
        package is seen, and one that has called backward() reads none while autograd's thread runs it."""
        mine = threading.get_ident()
        if not self._known - {mine}:
            return {}
        frames = sys._current_frames()
        self._known &= frames.keys()
        frames.pop(mine)  # which would hold itself, and so the others' frames, until a collection
        unseen = [thread for thread in self._known & {*frames} if not _is_seen(frames[thread].f_code)]
        return {thread: (id(frames[thread]), frames[thread].f_lasti) for thread in unseen}

    def await_calls(self, before: Places) -> None:
        """Wait until each thread has left the place where it stood before. Blocks the host, at most
        `PATIENCE_S`."""
        begun = time.monotonic()
        while before:
            now = self.places()
            before = {t: at for t, at in before.items() if now.get(t) == at != self._waits.get(t)}
            if time.monotonic() > begun + PATIENCE_S:
                self._waits |= before
                break
            time.sleep(1e-4)
        self.waited_s += time.monotonic() - begun


def _is_seen(code: CodeType) -> bool:
    return code.co_name == _BACKWARD or code.co_filename.startswith(_OWN)

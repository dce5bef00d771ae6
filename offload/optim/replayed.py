"""Graphs that read weights: no module's hook runs in a replay, so what the hooks asked for at the capture is
asked for before each replay.

One invariant: a captured forward never computes with a weight that is on its way: it is told of every replay,
or `step()` waits for all.

    in a region of the optimizer's engine   the step under way is settled before the capture begins; a replay
                                            waits for the weights that its modules read at the capture, and
                                            `step()` returns as early as without graphs
    in any other capture                    the step must have been waited for before; from then on `step()`
                                            waits for all weights

The edge is arrival.py's "weights back", drawn before each replay, on the lane that replays. Inside a capture
nothing is waited for: an event of before must not be, and what a worker asks the device meanwhile would end
the capture.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

from offload.engine import Client, OffloadEngine
from offload.errors import CaptureError

__all__ = ["ReplayedReads"]

logger = logging.getLogger(__name__)

_Arrive = Callable[[Sequence[int] | None], None]


class ReplayedReads(Client):
    """Of one optimizer, as the engine's client "optim".

    arrive: as Arrivals takes it, outside of captures. settle: ends the step under way, host and device;
        blocks the host. Both are held weakly, as a graph may outlive the optimizer. are_met: whether all
        weights on their way have been waited for.
    """

    name = "optim"

    def __init__(
        self, engine: OffloadEngine, arrive: _Arrive, settle: Callable[[], None], are_met: Callable[[], bool]
    ) -> None:
        self._engine = engine
        self._arrive = weakref.WeakMethod(arrive)
        self._are_met = are_met
        self.unseen = False
        """Whether a graph may be replayed that nobody tells of."""
        self._settle = weakref.WeakMethod(settle)
        engine.attach(self)

    def capture_begins(self) -> None:
        """As Client: nothing in flight may be waited for in the capture."""
        settle = self._settle()
        if settle is not None:
            settle()

    def arrive(self, indices: Sequence[int] | None) -> None:
        """A module whose forward is captured asks for its weights, None for all. Raises CaptureError if that
        cannot be right."""
        capture = self._engine.transfers.capture
        if capture is not None:
            capture.before_replay.append(_later(self._arrive, indices))
            return
        if not self._are_met():
            raise CaptureError(
                "a graph is captured while weights of the last step are on their way: inside it they cannot "
                "be waited for. Call the "
                "optimizer's synchronize_parameters() before the capture, or capture inside `with "
                "optimizer.engine.capturing():`"
            )
        if not self.unseen:
            self.unseen = True
            logger.warning(
                "a forward is captured outside of a region of the optimizer's engine: its replays cannot be "
                "told from other work, so from "
                "now on step() waits for all weights. Capture inside `with optimizer.engine.capturing():` to "
                "have only their readers wait"
            )

    def close(self) -> None:
        self._engine.detach(self)


def _later(arrive: weakref.WeakMethod[_Arrive], indices: Sequence[int] | None) -> Callable[[], None]:
    def wait() -> None:
        alive = arrive()
        if alive is not None:
            alive(indices)

    return wait

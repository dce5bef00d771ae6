"""Every error that this project raises of its own accord.

One invariant: a message names the thing, both numbers and the next step. `ValueError` is for what a user
configured, an `OffloadError` for what a run met, `assert` for what a programmer broke.
"""

from __future__ import annotations


class OffloadError(RuntimeError):
    """Base of everything that a run can meet."""


class RecordStateError(OffloadError):
    """A record was asked for a move that its state does not allow."""


class StaleHandleError(OffloadError):
    """A saved tensor was read after the step that it belongs to had ended."""


class RecomputeDiffersError(OffloadError):
    """A recompute gave other bits than its forward, so gradients of that step are wrong."""


class OffloadOOMError(OffloadError):
    """A block is larger than the pool that it has to pass; nothing has moved."""


class InvalidStateTransitionError(OffloadError):
    """A block of weights was asked for a move that its state, or its users, do not allow."""


class DtypeMismatchError(OffloadError):
    """A block has weights, or an output, of another dtype than it was said to have."""


class HostBudgetError(OffloadError):
    """Pinned bytes were asked for beyond the host budget; nothing has been pinned."""


class PoolError(OffloadError, ValueError):
    """A tensor was given to a pool that did not lend it, or was given back twice."""


class SlabError(OffloadError, ValueError):
    """Files of INT8 weights do not fit the model, or cannot be read; the model is as before."""


class SlabSignatureError(SlabError):
    """A slab is of a model with other linear layers."""


class SlabVersionError(SlabError):
    """A slab is of another format, or of another number of bits."""


class SlabTensorError(SlabError):
    """A slab's tensor is missing, of another dtype or shape, or has scales that cannot be."""


class WeightFileError(OffloadError, ValueError):
    """A file of weights cannot be read, or does not fit the model; no weight has changed."""


class DeviceTotalError(OffloadError):
    """A step takes more than its `device_total` with every block recomputed. It is raised once, between
    steps: a loop that catches it trains on past the total."""


class GroupOrderError(OffloadError):
    """A group was committed that was never started, or left open."""


class CaptureError(OffloadError):
    """Something was asked for that a graph under capture, or one that was captured, cannot do; nothing has
    been captured or replayed."""


class HazardError(OffloadError):
    """The simulated device saw two accesses of the same bytes that no event orders, or a deadlock.

    Only the simulated device raises it: on a GPU the same program would read or write the wrong bytes.
    """

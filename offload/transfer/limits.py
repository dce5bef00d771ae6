"""Limits of one engine: caps in bytes, each the least of the bounds that contributors give.

One invariant: nothing outside this file writes a cap. The config, clients and plans contribute, and `held_by`
says whose bound holds. tests/unit/test_one_owner_of_limits.py finds any other writer.

    share = engine.limits.contributor("weights", client)
    share.bound("device_limit_bytes", nbytes)        # the least of all bounds of a cap holds
    share.bound("max_spilling_bytes", None, replaces=(DEFAULT,))  # none; lifts another one, by its name
    share.end()                                      # or the client is collected: its bounds are gone

    device_limit_bytes   saved bytes on the device in any state
    max_spilling_bytes   bytes in flight to the host
    max_restoring_bytes  bytes of coming reads that are fetched ahead
    inputs_ahead_bytes   the same, in a step that saved nothing but inputs of recomputed calls
    kept_limit_bytes     what stays at once, whatever the plan keeps: a step may be longer than the planned
                         one
    half_room_bytes      what stays of a chunk between the input-gradient and the weight-gradient action of a
                         split backward, of what the first brought back; None: as much as max_restoring_bytes
                         where the second is the next read, else nothing
    again_room_bytes     the same of what the first recomputed; None: as of what it brought back
    kind_ahead_bytes     what one kind (saved tensors, weights, gradients) has fetched ahead of its readers,
                         where several kinds do; one block of weights at least
    weights_ahead_bytes  streamed weights that were fetched ahead, and not used yet
    groups_in_flight     groups of one name on their way to the host at once; beyond it compute waits
    inputs_in_flight     the same of inputs of recomputed calls: two, unless groups_in_flight or
                         max_spilling_bytes is named
    spills_in_flight     of a watermark that sends one tensor after the other: how many at once
    weights_in_flight_bytes  streamed weights that are on their way to the device, when more is fetched ahead
    gradients_behind_bytes  gradients on the device that wait for their step in the backward; beyond it
                         compute waits for steps
    buckets_in_flight    of each optimizer, buckets of state on the device at once, the slots of its ring at
                         most; and buckets of gradients that leave ahead of the CPU's steps. One at least
    weights_window_bytes  of each model, streamed weights on the device at once beside blocks that its plan
                         keeps; a block that computes and one that arrives at least
    gradients_window_bytes  of each model, gradients on the device at once of those that wait on the host; the
                         three largest at least

A client that is not there yet needs nothing else. An arbiter, or one that streams weights, takes a
contributor of its own, changes its bounds between steps, and ends it. What is no number it answers as a
`Watcher`: it is told of each save, asked before each fetch ahead, and asked to release what it can where the
device is full. `saved`, `has_room` and `relieve` ask all of them.

claimed_bytes: of device_limit_bytes, for tensors that no block has, such as those that a recompute makes
again. The next `claim` takes the place of the last one, and a step's end ends it.

A plan's bounds (`is_plan`) hold until the device limit or the config changes, for which they were made.
Methods take no lock, so a finaliser may call `end` on any thread. Caps are plain attributes, which copies
read.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol, get_args

from offload.config import OffloadConfig
from offload.transfer.block import DeviceBlock

DEFAULT_IN_FLIGHT_BYTES = 1 << 30
"""20 ms of a 55 GB/s link, so one burst of a transformer layer leaves without compute waiting."""

_INPUTS_IN_FLIGHT = 2
"""S4-3: with the input of the block that runs, all that is on the device of those that leave."""

Cap = Literal[
    "device_limit_bytes",  # others are derived from it, and from groups_in_flight
    "max_spilling_bytes",
    "max_restoring_bytes",
    "inputs_ahead_bytes",
    "kept_limit_bytes",
    "half_room_bytes",
    "again_room_bytes",
    "kind_ahead_bytes",
    "groups_in_flight",
    "inputs_in_flight",
    "spills_in_flight",
    "weights_ahead_bytes",
    "weights_in_flight_bytes",
    "gradients_behind_bytes",
    "buckets_in_flight",
    "weights_window_bytes",
    "gradients_window_bytes",
]

DEFAULT, CONFIG, PLAN = "default", "config", "plan"
"""Names of contributors: what is derived where nobody says more; the engine's config; plans of the groups."""


class Watcher(Protocol):
    """A client that measures the device. It is held weakly, and called under the engine's lock."""

    def on_save(self, block: DeviceBlock, nbytes: int) -> None:
        """Some client saved so many bytes."""

    def room(self) -> int:
        """Bytes that may be fetched ahead now."""

    def relieve(self) -> None:
        """The device has no memory left: send what could leave, and release it."""


class _Bound(NamedTuple):
    nbytes: int | None
    replaces: tuple[str, ...] = ()
    is_own: bool = False


class Contributor:
    """Bounds of one client or plan. name: what `held_by` answers, and what others replace it by."""

    def __init__(self, limits: Limits, name: str, is_plan: bool) -> None:
        self.limits, self.name, self.is_plan = limits, name, is_plan

    def bound(
        self, cap: Cap, nbytes: int | None, *, replaces: tuple[str, ...] = (), is_own: bool = False
    ) -> None:
        """Contribute this bound in place of the one before. nbytes: None bounds nothing. replaces: names of
        contributors whose bounds of this cap do not hold beside it. is_own: of a cap that is of each model,
        this model's own, which binds no other one (`least`)."""
        self.limits._change(self, {cap: _Bound(nbytes, replaces, is_own)})

    def least(self, cap: Cap) -> int | None:
        """The least bound of a cap that is of each model: without the own ones of other contributors,
        whatever their names."""
        given = self.limits._bounds.copy()
        mine = {key: bound for key, bound in given.items() if key[0] is self or not bound.is_own}
        return self.limits._least(mine, cap)[0]

    def end(self) -> None:
        """Take all bounds back, and be no watcher any more. Called again, it does nothing."""
        self.limits._watchers.pop(self, None)
        self.limits._change(self, {cap: None for who, cap in self.limits._bounds.copy() if who is self})


def _end(reference: weakref.ref[Contributor]) -> None:
    if (found := reference()) is not None:
        found.end()


class Limits:
    """See the module. named: caps that the config or a client bounds; others are derived, or a plan's."""

    device_limit_bytes: int | None
    max_spilling_bytes: int | None
    max_restoring_bytes: int
    inputs_ahead_bytes: int | None
    kept_limit_bytes: int | None
    half_room_bytes: int | None
    again_room_bytes: int | None
    kind_ahead_bytes: int | None
    groups_in_flight: int | None
    inputs_in_flight: int | None
    spills_in_flight: int | None
    weights_ahead_bytes: int | None
    weights_in_flight_bytes: int | None
    gradients_behind_bytes: int | None
    buckets_in_flight: int | None
    weights_window_bytes: int | None
    gradients_window_bytes: int | None

    claimed_bytes: int

    def __init__(self, config: OffloadConfig) -> None:
        self.claimed_bytes = 0
        self._bounds: dict[tuple[Contributor, Cap], _Bound] = {}
        self._watchers: dict[Contributor, weakref.ref[Watcher]] = {}
        self._config = self.contributor(CONFIG)
        self.follow(config)

    def contributor(
        self, name: str, owner: object = None, *, is_plan: bool = False, watcher: Watcher | None = None
    ) -> Contributor:
        """Somebody who contributes from now on. owner: with it, once it is collected, it ends."""
        new = Contributor(self, name, is_plan)
        if owner is not None:
            # by a weak reference: an engine that is dropped with its clients goes in one collection
            weakref.finalize(owner, _end, weakref.ref(new)).atexit = False
        if watcher is not None:
            self._watchers[new] = weakref.ref(watcher)
            self._resolve()
        return new

    def follow(self, config: OffloadConfig) -> None:
        """Take the bounds of another config."""
        spilling, restoring, named = config.max_spilling_bytes, config.max_restoring_bytes, (DEFAULT, PLAN)
        self._change(
            self._config,
            {
                "device_limit_bytes": _Bound(config.device_limit_bytes),
                "max_spilling_bytes": None if spilling is None else _Bound(spilling, named),
                "max_restoring_bytes": None if restoring is None else _Bound(restoring, named),
                "half_room_bytes": None if restoring is None else _Bound(None, named),
            },
        )

    # -- watchers and claims, under the engine's lock --------------------------------------------------------
    def _living(self) -> list[Watcher]:
        return [found for reference in self.watchers if (found := reference()) is not None]

    def saved(self, block: DeviceBlock, nbytes: int) -> None:
        """So many bytes of this block were saved."""
        for watcher in self._living():
            watcher.on_save(block, nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Return True if no watcher refuses that so many bytes are fetched ahead now."""
        return all(watcher.room() >= nbytes for watcher in self._living())

    def relieve(self) -> None:
        """The device has no memory left."""
        for watcher in self._living():
            watcher.relieve()

    def claim(self, nbytes: int) -> None:
        """In place of what was claimed before."""
        self.claimed_bytes = nbytes

    def claim_more(self, nbytes: int) -> None:
        """Beside what is claimed; fewer below 0, and never fewer than none."""
        self.claimed_bytes = max(0, self.claimed_bytes + nbytes)

    # -- bounds ----------------------------------------------------------------------------------------------
    def held_by(self, cap: Cap) -> str:
        """The name of the contributor whose bound of `cap` holds; "" where there is none."""
        return self._least(self._bounds.copy(), cap)[1]

    def _change(self, who: Contributor, changes: Mapping[Cap, _Bound | None]) -> None:
        for cap, bound in changes.items():
            if bound is None:
                self._bounds.pop((who, cap), None)
            else:
                self._bounds[who, cap] = bound
        for key in self._bounds.copy() if "device_limit_bytes" in changes else ():
            if key[0].is_plan:
                self._bounds.pop(key, None)
        self._resolve()

    def _resolve(self) -> None:
        """Write the caps, once more where a finaliser has changed a bound meanwhile."""
        while True:
            bounds = self._bounds.copy()
            self.watchers = tuple(self._watchers.copy().values())
            given = [(who, cap) for (who, cap), bound in bounds.items() if bound.nbytes is not None]
            self.named = frozenset(cap for who, cap in given if not who.is_plan)
            for cap in get_args(Cap):
                setattr(self, cap, self._least(bounds, cap)[0])
            if bounds == self._bounds and len(self.watchers) == len(self._watchers):
                return

    def _least(self, bounds: Mapping[tuple[Contributor, Cap], _Bound], cap: Cap) -> tuple[int | None, str]:
        """The least bound of a cap, and whose it is."""
        given = [(bound, who.name) for (who, what), bound in bounds.items() if what == cap]
        given.append((_Bound(self._derived(cap)), DEFAULT))
        replaced = {name for bound, _ in given for name in bound.replaces}
        held = [(b.nbytes, name) for b, name in given if b.nbytes is not None and name not in replaced]
        return min(held, default=(None, ""))

    def _derived(self, cap: Cap) -> int | None:
        """The bound where nobody says more, under the device limit of now."""
        if cap == "inputs_in_flight":
            named = self.groups_in_flight is not None or "max_spilling_bytes" in self.named
            return self.groups_in_flight if named else _INPUTS_IN_FLIGHT
        limit = None if cap == "device_limit_bytes" else self.device_limit_bytes
        if limit is None:
            return DEFAULT_IN_FLIGHT_BYTES if cap in ("max_spilling_bytes", "max_restoring_bytes") else None
        return {"max_restoring_bytes": limit // 4, "kept_limit_bytes": limit - limit // 4}.get(cap)

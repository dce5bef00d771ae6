"""The manager: what a user of groups talks to, and the parts that do the work.

One invariant: it does nothing in a step itself. Its tracker (tracker.py) knows which chunk is current and
what is read next; its scopes (scopes.py) install hooks and send groups; its follower (follower.py) ends steps
and plans the next. A caller in every step holds the part itself, or calls the part's own method, which a
public name of the manager is bound to.
"""

from __future__ import annotations

from typing import Any

import torch

from offload.compile import import_compiler
from offload.config import OffloadConfig, check_bytes
from offload.engine import OffloadEngine, default_engine
from offload.errors import PoolError
from offload.groups.follower import Follower
from offload.groups.scopes import Scopes
from offload.groups.seen import GroupLedgers
from offload.groups.step_planner import StepPlanner
from offload.groups.tracker import ChunkTracker
from offload.telemetry.records import StepStats
from offload.telemetry.summary import print_offload_summary_table


class GroupsManager:
    """Chunks, plan and prefetch over one engine, whose client "groups" is the follower.

    engine: None takes the default one. process_group: whose ranks the summary is printed for.
    """

    def __init__(
        self, engine: OffloadEngine | None = None, *, print_summary: bool = True, process_group: Any = None
    ) -> None:
        if engine is not None and not isinstance(engine, OffloadEngine):
            raise ValueError(
                f"engine is a {type(engine).__name__}, must be an OffloadEngine, or None for one with the "
                "default config"
            )
        import_compiler()
        self.engine = engine = engine if engine is not None else default_engine()
        self.ledgers = GroupLedgers(engine)
        self.tracker = tracker = ChunkTracker(engine, self.ledgers)
        self._planner = StepPlanner(engine)
        self.scopes = scopes = Scopes(tracker, self._planner)
        self.set_order, self.living_blocks = tracker.set_order, tracker.living_blocks
        self.begin_forward, self.end_forward = tracker.begin_forward, tracker.end_forward
        self.begin_backward, self.end_backward = tracker.begin_backward, tracker.end_backward
        self.active_handler, self.needs_chunk = scopes.active_handler, scopes.needs_chunk
        self.open_scope, self.close_scope = scopes.open_scope, scopes.close_scope
        self.commit, self.flush_delayed_groups = scopes.commit, scopes.flush_delayed_groups
        self.kept_group, self.input_group = scopes.kept_group, scopes.input_group
        self.follower = follower = Follower(scopes, self.ledgers, self._print_summary)
        self.begin_chunk, self.step_end = follower.begin_chunk, follower.step_end
        self.print_summary, self.process_group = print_summary, process_group
        self.new_ledger, self.ledger = self.ledgers.new, self.ledgers.new()  # the latter since now

    def prepare_close(self) -> None:
        """Release what the manager has lent by hand. Called before anything else of it is closed."""

    def close(self) -> None:
        """Drop everything; the engine closes and unpins, unless another client uses it. Blocks the host until
        the copies in flight have passed. The manager must not be used after."""
        self.prepare_close()
        with self.engine.lock:
            self.follower.end_step()
            self.engine.detach(self.follower)
            try:
                self.engine.close_unused()
            except PoolError:
                self.engine.attach(self.follower)
                raise
            self.engine.off_read(self.tracker.on_read)
            self._planner.windows.end()
            self.scopes.leaving.bounds.end()
        self.follower.ended = self.follower.last_step = None
        self.tracker.forget_step()
        self.tracker.handlers.clear()

    # -- properties ------------------------------------------------------------------------------------------
    @property
    def do_offload(self) -> bool:
        """Predicate: what is saved may leave."""
        return self.tracker.do_offload

    @property
    def is_warmup(self) -> bool:
        """Predicate: no step with a backward has ended yet."""
        return self._planner.is_warmup

    @property
    def is_capturing(self) -> bool:
        """Predicate: a graph is being captured in a region: its groups leave at every replay."""
        return self.engine.transfers.capture is not None

    @property
    def settings(self) -> OffloadConfig:
        """Config fields that the plan follows: activation_offload_fraction, pp_rank, max_inflight_offloads
        and delta_offload_bytes_across_pp_ranks. A change takes effect when the step ends."""
        return self._planner.settings

    @settings.setter
    def settings(self, settings: OffloadConfig) -> None:
        before, self._planner.settings = self._planner.settings, settings
        if before.max_inflight_offloads != settings.max_inflight_offloads:
            self.scopes.leaving.bound(settings.max_inflight_offloads)

    @property
    def stats(self) -> StepStats:
        """Figures of the last step that ended."""
        return self.engine.last_stats

    @property
    def offload_summary_bytes(self) -> dict[str, int]:
        """Bytes by group that leave up to the end of the first chunk to run backward, after warm-up; {}
        before. About what a steady step has on the host at once. Without what found no host memory in the
        step that the plan was made from."""
        return dict(self._planner.summary)

    @property
    def step_offload_bytes(self) -> dict[str, int]:
        """Bytes by group that leave in a whole step that follows the plan: together, its
        `StepStats.spill_bytes`. {} before warm-up has ended. Without what found no host memory, as
        `offload_summary_bytes`."""
        return dict(self._planner.leaving)

    # -- set up ----------------------------------------------------------------------------------------------
    def reserve_host(self, nbytes: int, *, measure: bool = True) -> None:
        """Pin before step 1, and unless `measure` is False measure the link. Blocks the host. Raises
        HostBudgetError beyond the budget."""
        check_bytes("reserve_host", nbytes)
        self.engine.reserve_host(nbytes, measure=measure)

    def register_parameters(self, module: torch.nn.Module) -> None:
        """Parameters of `module`, their views and casts never leave, recognised even behind `detach()`."""
        if not isinstance(module, torch.nn.Module):
            raise ValueError(
                f"register_parameters got a {type(module).__name__}, must be a torch.nn.Module; "
                "mark_not_offloadable takes tensors"
            )
        self.engine.register_parameters(module)

    def register_external(self, tensor: torch.Tensor) -> None:
        """A receive buffer: saves of it never share one copy."""
        _check_tensor("register_external", tensor)
        self.engine.register_external(tensor)

    def mark_not_offloadable(self, tensor: torch.Tensor | None) -> None:
        """`tensor` stays on the device for good. None is accepted, for an optional bias."""
        if tensor is not None:
            _check_tensor("mark_not_offloadable", tensor)
            self.engine.mark_not_offloadable(tensor)

    def disable_offload(self) -> None:
        """From now on nothing more leaves; what has left comes back as usual."""
        self.tracker.switch(False)

    def enable_offload(self) -> None:
        self.tracker.switch(True)

    def _print_summary(self) -> None:
        if self.print_summary:
            print_offload_summary_table(self.step_offload_bytes, process_group=self.process_group)


def _check_tensor(function: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{function} got a {type(tensor).__name__}, must be a tensor")

"""Warnings about marks that have no effect, a limit that was passed, host memory that was missing, copies
that save no memory, and an allocator whose cache steps of many shapes have filled.

One invariant: each is given once, with its cause and the way out, and changes nothing; nothing asks a report
whether a tensor may leave.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from offload.groups.chunk import ChunkGroups
from offload.groups.group import HEAD, KEPT, ROUTING, Group
from offload.groups.seen import Survey
from offload.ids import ChunkId
from offload.sizes import bytes_text
from offload.telemetry.records import StepStats
from offload.telemetry.speaker import Once, speaker
from offload.transfer.limits import Limits

logger = speaker(__name__)

FORWARDS_WITHOUT_END = 1024
"""Forwards of one virtual stage after which a step is taken for one that is never ended."""

OPTIMIZER_STEPS_WITHOUT_END = 16
"""Optimizer steps, with forwards between them, after which the same is said of a loop that has once called
`step_end`."""

MANY_SHAPES = 4
"""Plans made, each for another shape of step, after which shapes are said to vary: a first step, a shorter
last batch and the next first step are three."""

RESERVED_OVER_ACTIVE = 1.25
"""Above it the device's cached blocks cost more than what offload saves in many models. Steps of one shape
stay below 1.1 (docs/log.md)."""

_INSIDE = {
    "torch.utils.checkpoint": "groups %s are inside a non-reentrant checkpoint, which recomputes what they "
    "save: nothing of them leaves. Put the marks around the checkpoint, or give the checkpoint "
    "context_fn=selective_contexts(...)",
    "offload.checkpoint.region": "groups %s are inside blocks that offload.apply recomputes: nothing of them "
    "leaves. Choose one: mode='groups', where all that these blocks save leaves, or the recompute without "
    "these marks",
}
"""By the module that recomputes."""

_NAMED = 8  # groups that a message lists at most


class MarkReport:
    """By cause; of a cause that has a group's name, once for each name, and for each model of those that
    `apply` was called for."""

    def __init__(self) -> None:
        self._said = Once()
        self._expected: set[int | None] = set()
        self._recomputed: set[str] = set()
        self._inside: dict[str, str] = {}  # by what
        self._forwards_at_step = 0  # when an optimizer stepped last
        self._unended = 0  # its steps since the last `step_end`

    def not_announced(self, name: str) -> None:
        """Group `name` was started in a forward that no chunk was begun for."""
        if self._said.first("no chunk"):
            logger.warning(
                f"group {name!r} is started while no chunk is current: nothing of this forward leaves. Call "
                "init_chunk_handler() at the start of every forward. In a pipeline, use OffloadPipelineStage "
                "and leave its announcer out: a stage without an announcer begins no chunk"
            )

    def no_group(self, chunk: ChunkId) -> None:
        """Hooks were asked for while no group of `chunk` was open."""
        if self._said.first("no group"):
            logger.warning(
                f"offload_hooks() without an open group in chunk {chunk}: nothing saved in it will leave; "
                "call group_start first"
            )

    def inside_checkpoint(self, name: str, recomputed_by: str) -> None:
        """Hooks were asked for in a non-reentrant checkpoint of that module; "" for one of which there is
        nothing to say."""
        self._inside[name] = recomputed_by

    def recomputed(self, name: str) -> None:
        """Group `name` was started while a backward recomputes."""
        self._recomputed.add(name)

    def not_committed(self, name: str) -> None:
        """Group `name` is open where its step ends, and was read."""
        if self._said.first("open", name):
            logger.warning(
                f"group {name!r} was started and is not committed where its step ends: what it saved stays, "
                f"but for whole pieces (piece_bytes). Call group_commit(output, {name!r}) where its layers "
                "end, once for each start"
            )

    def forwards(self, stage: int, number: int) -> None:
        """So many forwards of a virtual stage have begun since the last step's end."""
        if number >= FORWARDS_WITHOUT_END and self._said.first("no end"):
            logger.warning(
                f"{number:,} forwards of virtual stage {stage} have begun since the last step_end(): they "
                "are not counted, and no plan is made. Call step_end() once a step, when its gradients are "
                "final"
            )

    def optimizer_stepped(self, num_forwards: int) -> None:
        """An optimizer's step ends nothing, since `step_end` was called once. num_forwards: since then."""
        if num_forwards < self._forwards_at_step:
            self._unended = 0  # a step_end() came between
        self._unended += num_forwards > self._forwards_at_step
        self._forwards_at_step = num_forwards
        if self._unended >= OPTIMIZER_STEPS_WITHOUT_END and self._said.first("no step_end"):
            logger.warning(
                f"an optimizer has stepped {self._unended} times since the last step_end(): this process has "
                "called step_end(), so from then on no optimizer's step ends a step, nothing is counted and "
                "no plan is made. Call step_end() once a step, or never; configure() begins anew"
            )

    def expect(self, stage: int) -> None:
        """A model of this virtual stage is new: what its groups do not move is said again, after its first
        step."""
        self._expected.add(stage)
        self._said -= {what for what in self._said if what[1:2] == (stage,)}

    def end_step(
        self,
        models: Mapping[ChunkGroups, int | None],
        survey: Survey | None = None,
        *,
        is_warmup: bool = True,
    ) -> None:
        """Say which names moved nothing, and why: in warm-up, and of a model that was expected.

        models: by chunk that the step has begun, the virtual stage that is a model; None where stages are
            parts of one. survey: of what groups saved, where the step was looked at closely.
        """
        names: set[str] = set()
        for model in dict.fromkeys(models.values()):
            chunks = [chunk for chunk, of in models.items() if of == model]
            groups = [group for chunk in chunks for group in chunk.groups if group.committed]
            names.update(group.name for group in groups)
            if groups and (is_warmup or model in self._expected):
                self._expected.discard(model)
                least = min(chunk.min_offloaded_tensor_size for chunk in chunks)
                self._say_idle(model, groups, least, survey)
        for name in self._recomputed.difference(names):
            if is_warmup and self._said.first("checkpoint", name):
                logger.warning(
                    f"group {name!r} is inside a reentrant checkpoint, which saves nothing in its forward: "
                    "nothing of the group leaves. Put its marks around the checkpoint, or use "
                    "checkpoint(..., use_reentrant=False, context_fn=selective_contexts(...))"
                )
        self._recomputed.clear()
        if self._inside:
            moved = {group.name for chunk in models for group in chunk.groups if _moved(group)}
            for recomputed_by, text in _INSIDE.items():
                idle = [n for n, by in self._inside.items() if by == recomputed_by and n not in moved]
                if idle and self._said.first("inside", recomputed_by):
                    logger.warning(text, _listed(idle))
            self._inside.clear()

    def _say_idle(
        self, model: int | None, groups: Sequence[Group], min_elements: int, survey: Survey | None
    ) -> None:
        moved = {group.name for group in groups if _moved(group)}
        others = {*moved, *self._inside, HEAD, KEPT, ROUTING}
        idle = list(dict.fromkeys(group.name for group in groups if group.name not in others))
        hooked = {group.name for group in groups if group.hooked}
        largest = 0 if survey is None else survey.largest_small(model)
        if idle and not moved and largest and hooked.issuperset(idle) and self._said.first("nothing", model):
            logger.warning(
                f"nothing leaves: all that autograd saved in groups {_listed(idle)} is smaller than "
                f"min_numel (min_offloaded_tensor_size in OffloadConfig), {min_elements:,} elements here, or "
                f"can never leave. The largest tensor that is too small has {largest:,} elements: set "
                "min_numel to that or less"
            )
            self._said.update(("idle", model, name) for name in idle)
        for name in idle:
            if not self._said.first("idle", model, name):
                continue
            if name in hooked:
                largest = 0 if survey is None else survey.largest_small(model, name)
                none_small = survey is not None and not largest
                most = f" (the largest has {largest:,})" if largest else ""
                elements = f"{min_elements:,} elements here{most}"
                small = f"smaller than min_numel (min_offloaded_tensor_size in OffloadConfig), {elements}"
                logger.warning(
                    "group %r moved nothing: what autograd saves in it is %s a parameter, or marked to stay, "
                    "or, of a recomputed block, in an object that is not looked into (a dataclass). %s",
                    name,
                    "only" if none_small else f"{small}, or",
                    "Give tensors as arguments, or mode='groups'" if none_small else "Lower the threshold",
                )
            else:
                logger.warning(
                    f"group {name!r} moved nothing: no hooks were open between its start and its commit. Run "
                    "its layers in `with offload_hooks():`, or start it with hooks=True"
                )


class StepReport:
    """Warnings of one planner."""

    def __init__(self) -> None:
        self._said = Once()
        self._steps = 0
        self._plans = 0

    @property
    def shapes_vary(self) -> bool:
        """Predicate: many steps had to be planned anew."""
        return self._plans >= MANY_SHAPES

    def step(self, *, replanned: bool, allocator: Callable[[], tuple[int, int] | None]) -> None:
        """Look at what any step can say.

        replanned: its shape was new. allocator: the device allocator's reserved bytes, and the most that were
            ever active; asked after a few plans only, since that takes about 0.1 ms.
        """
        self._steps += 1
        self._plans += replanned
        # after 4, 8, 16, ... plans
        if replanned and self.shapes_vary and self._plans & (self._plans - 1) == 0:
            self._look_at_cache(allocator())

    def _look_at_cache(self, found: tuple[int, int] | None) -> None:
        if found is None or "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            return
        reserved, active = found
        if reserved > RESERVED_OVER_ACTIVE * active and self._said.first("cache"):
            logger.warning(
                f"torch's allocator holds {bytes_text(reserved)} of the device, "
                f"{reserved / max(1, active):.2f} times the {bytes_text(active)} that were ever in use at "
                f"once: {self._plans} of {self._steps} steps had a new shape, and cached blocks of one size "
                "do not serve another. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before torch is "
                "imported"
            )

    def look(self, stats: StepStats, limits: Limits, live_peak_bytes: int) -> None:
        """stats: of a step that followed its plan. live_peak_bytes: what its saved tensors would take of the
        device at once if none left."""
        limit, peak = limits.device_limit_bytes, stats.device_bytes_peak
        is_auto = limits.again_room_bytes is not None
        # what found no host memory is said by the engine
        if limit is not None and peak > limit and not stats.lacked_host and self._said.first("passed"):
            whose, way_out = "mode='auto' had planned for", "Where device_total is passed, give a larger one"
            if not is_auto:
                whose = "device_limit (device_limit_bytes in OffloadConfig)"
                way_out = "Raise the limit, or mark smaller groups"
            logger.warning(
                f"saved tensors took up to {bytes_text(peak)} of the device at once in step {stats.step}, "
                f"{bytes_text(peak - limit)} more than {whose}, {bytes_text(limit)}: what is being saved or "
                f"read must fit beside what is on its way. {way_out}"
            )
        # mode "auto" says itself where its total leaves it no choice
        saves_nothing = limit is None and not is_auto and stats.spill_bytes and peak >= live_peak_bytes
        if saves_nothing and self._said.first("nothing saved"):
            logger.warning(
                f"step {stats.step} copied {bytes_text(stats.spill_bytes)} out and "
                f"{bytes_text(stats.restore_bytes)} back, and its saved tensors took as much of the device "
                f"at once, {bytes_text(peak)}, as if none had left: copies in flight have room for all of "
                "them. Results are right, and a step that saves so little needs no offload. Set device_limit "
                "(device_limit_bytes in OffloadConfig) to what they may take"
            )


def _moved(group: Group) -> bool:
    return group.encloses or (group.saved is not None and group.saved.slots > 0)


def _listed(names: Iterable[str]) -> str:
    listed = [repr(name) for name in names]
    return ", ".join(listed[:_NAMED]) + (f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else "")

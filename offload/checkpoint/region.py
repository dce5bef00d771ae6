"""One run of a function whose saved tensors are recomputed when autograd reads the first of them.

    region = Region(again, context_fn)
    region.begin(tensors)     # what autograd saves from here on is only counted
    ...                       # the function runs
    region.end()
    ...
    again(*tensors)           # called in the backward, at the first read in each graph task

One invariant: what a read gives is what the run had saved, recomputed under the random state, autocast and
settings of the run; or an error. That the bits are the same is looked at in some runs (net.py).

torch's own non-reentrant checkpoint does the same. Where operators are small, most of what it adds is host
time for each save, so this is written for few calls a save: a layer of W5's stack at a width of 64 takes the
host 1.05 ms plain, forward and backward, 2.45 under torch's and 1.97 under a region (November 2026, a CPU,
median of three). As in torch's: the recompute stops at the last save, each graph task (or GraphExecGroup) has
a recompute of its own, of a save that nobody can read any more nothing is held, and the tensors are saved by
autograd, through whatever saved-tensor hooks are on around the run. What differs: torch's debug mode has no
effect, and a device that the run is the first to use is no error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointError, _StopRecomputationError

from offload.checkpoint.members import Given
from offload.checkpoint.net import Sample, telling
from offload.checkpoint.surroundings import Surroundings
from offload.client import weakly
from offload.saved.hooks import Pair, as_it_is, pair_without_users, users_pair
from offload.versions import queue_callback

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""What a run is inside, and what each recompute of it is inside."""

_sequence_nr = torch._C._autograd._get_sequence_nr
_graph_task = torch._C._current_graph_task_id
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_exec_group = torch._C._get_graph_exec_group
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks

_NO_TASK = -1

_UNDRAWN = -1, torch.Size()
"""rrelu saves its noise, then its input of that shape, and then draws the noise, which moves no version."""

_UNLIKE = "does not do the same twice. Make it, or name the block in apply(..., no_recompute=[...])"

_Looks = tuple[torch.Size, torch.dtype, torch.device]


@lru_cache(4096)
def _noted(looks: _Looks) -> _Looks:
    """Looks as one object, however many saves have them: Python's collector walks what lives
    long."""
    return looks


class _Save:
    """The object that autograd keeps of one save. looks: shape, dtype and device. made: the tensor, from its
    recompute for `task` to its read. others: the same of tasks that were overtaken by that one."""

    __slots__ = ("__weakref__", "looks", "made", "others", "task")

    def __init__(self, looks: _Looks) -> None:
        self.looks = looks
        self.made: torch.Tensor | None = None
        self.task: object = None
        self.others: dict[object, torch.Tensor] | None = None

    def put(self, task: object, made: torch.Tensor) -> None:
        if self.made is not None and self.task != task:
            self.others = {**(self.others or {}), self.task: self.made}
        self.made, self.task = made, task

    def take(self, task: object, *, leave: bool = False) -> torch.Tensor | None:
        """The tensor that was made for this task; None once it was taken. leave: another read may come."""
        if self.task == task:
            made = self.made
            if not leave:
                self.made = None
            return made
        return None if self.others is None else self.others.pop(task, None)


class _Inputs(torch.autograd.Function):
    """A node that nothing leads to, whose saved tensors are the inputs. They live as long as its output."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        raise AssertionError("nothing leads here")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        return torch.empty(0)


class Region:
    """One run. again: computes what it saved once more, from the tensors given to `begin` (members.py).

    context_fn: of what the run and each recompute are inside, asked at `begin`; None for nothing.
    sample: compares this run with its recomputes; None where nobody does. unlike: called with the error
        where a recompute raises, or saves other tensors, in number or in shape.
    `begin` and `end` are called in one thread, and hooks that are put on in between are taken off in between.
    """

    def __init__(
        self,
        again: Callable[..., object],
        context_fn: Callable[[], Contexts] | None = None,
        sample: Sample | None = None,
        unlike: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._again = again
        self._sample = sample
        self._unlike = unlike
        self._context_fn = context_fn
        self._context: Contexts | None = None
        self._saves: list[weakref.ref[_Save]] = []
        self._stops = True
        self._noise: tuple[int, torch.Size] | None = None  # a save that may be one
        self._has_ended = False
        self._tasks: set[object] = set()  # that had their recompute
        self._users: Pair | None = None  # the user's own hooks around the run

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """The function begins, with gradients enabled. tensors: what it computes from. Blocks the host:
        never."""
        self._surroundings = Surroundings(tensors)
        self._stops = torch_checkpoint._enable_checkpoint_early_stop is not False
        context = None if self._context_fn is None else self._context_fn()
        self._given = Given(tensors)
        anchor = torch.empty(0, requires_grad=True)
        self._users = users_pair()
        if self._users is not None:  # it would be shown the inputs, which the recompute needs as they are
            _push_hooks(*pair_without_users())
        try:
            self._inputs: torch.Tensor = _Inputs.apply(anchor, *tensors)  # type: ignore[no-untyped-call]
        finally:
            if self._users is not None:
                _pop_hooks()
        pack = self._pack
        _push_hooks(pack if self._sample is None else telling(self._sample.add, pack), self._unpack)
        if context is not None:
            try:
                context[0].__enter__()
            except BaseException:
                _pop_hooks()
                raise
            self._context = context

    def end(self, *exception: Any) -> None:
        """It has returned, or raised. exception: as of a context's end."""
        self._has_ended = True
        self._stops &= self._noise is not _UNDRAWN  # else a recompute has to come past its drawing
        try:
            if self._context is not None:
                self._context[0].__exit__(*(exception or (None, None, None)))
        finally:
            _pop_hooks()
        self._surroundings.learn()
        if self._sample is not None:
            self._sample.ends()
            self._surroundings.generators += self._sample.generators

    # -- the pair --------------------------------------------------------------------------------------------
    def _pack(self, tensor: torch.Tensor) -> _Save:
        if not tensor.requires_grad:
            self._noise = _sequence_nr(), tensor.shape
        elif self._noise is not None:
            self._noise = _UNDRAWN if self._noise == (_sequence_nr(), tensor.shape) else None
        looks = (tensor.shape, tensor.dtype, tensor.device)
        try:
            save = _Save(_noted(looks))
        except TypeError:  # a size that is a symbol, where somebody traces this
            save = _Save(looks)
        self._saves.append(weakref.ref(save))
        return save

    def _unpack(self, save: _Save) -> torch.Tensor:
        task: object = _exec_group()
        is_backward = task is None and _graph_task() != _NO_TASK
        if task is None:
            task = _graph_task()
        # of a graph that is not retained autograd drops the save as soon as its node has run
        leave = is_backward and not _keeps_graph()
        made = save.take(task, leave=leave) if task in self._tasks else None
        if made is None:  # also where a node of a graph that is retained reads it once more
            self._compute_again(task)
            if is_backward and task not in self._tasks:  # of some saves nothing may be read in this backward
                queue_callback(partial(weakly(self._let_go), task))
            self._tasks.add(task)
            made = save.take(task, leave=leave)
        if task == _NO_TASK:  # the next read outside of a backward is one by itself
            self._let_go(task)
        assert made is not None  # else the recompute had raised
        if self._users is None:
            return made
        with torch.no_grad():  # as autograd packs
            packed = self._users[0](made)
        theirs: torch.Tensor = self._users[1](packed)
        return theirs

    def _compute_again(self, task: object) -> None:
        # `pack` lives as long as any node of the recompute, and what the region keeps may hold one: so it
        # holds no region and no save
        saves, num_saves = self._saves, len(self._saves)
        stops, has_ended = self._stops, self._has_ended
        detaches = self._users is None  # theirs may look for parameters
        came = 0
        compared = None if self._sample is None else self._sample.again()
        differing: list[str] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal came
            number = came
            came += 1
            # an alias of a parameter whose bytes come and go shows its owner that somebody will read them
            if detaches and (tensor.requires_grad or type(tensor) is torch.nn.Parameter):
                tensor = tensor.detach()
            if number >= num_saves:
                if has_ended:
                    raise CheckpointError(
                        f"a recompute saves more tensors than its forward, which saved {num_saves}: the "
                        f"function {_UNLIKE}"
                    )
                return tensor  # the run itself reads what it had saved so far
            save = saves[number]()
            if save is not None:
                looks = (tensor.shape, tensor.dtype, tensor.device)
                if save.looks != looks:
                    differing.append(f"save {number}: {save.looks} in the forward, {looks} in the recompute")
                save.put(task, tensor)
            if stops and came == num_saves:
                raise _StopRecomputationError
            return tensor

        node: Any = self._inputs.grad_fn
        context = None if self._context is None else self._context[1]
        try:
            inputs = node.saved_tensors
            _push_hooks(pack if compared is None else telling(compared.add, pack), as_it_is)
            try:
                given = self._given.again(inputs)
                with self._surroundings.in_place(context), torch.enable_grad(), given as tensors:
                    self._again(*tensors)
            except _StopRecomputationError:
                pass
            finally:
                _pop_hooks()
            self._check(num_saves, came, differing)
            if compared is not None:
                compared.ends()
        except BaseException as error:
            if not isinstance(error, (KeyboardInterrupt, torch.OutOfMemoryError)):
                self._unlike(error)
            self._let_go(task)
            raise

    @staticmethod
    def _check(num_saves: int, came: int, differing: Sequence[str]) -> None:
        if came < num_saves:
            raise CheckpointError(
                f"a different number of tensors was saved in a forward, {num_saves}, and in its recompute, "
                f"{came}: the function {_UNLIKE}"
            )
        if differing:
            more = "; ..." if len(differing) > 4 else ""
            raise CheckpointError(
                "tensors with different metadata were saved in a forward and in its recompute: "
                f"{'; '.join(differing[:4])}{more}. The function {_UNLIKE}"
            )

    def _let_go(self, task: object) -> None:
        """Tensors that were made for this task go."""
        self._tasks.discard(task)
        for reference in self._saves:
            save = reference()
            if save is not None:
                save.take(task)

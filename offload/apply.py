"""One line for any model: what its blocks save for the backward leaves for the host and comes back.

    handle = offload.apply(model)               # blocks are found; the model is not edited
    ...                                         # any training loop
    print(handle)                               # what matched
    handle.remove()

One invariant: the model computes what it computed before, bit for bit. Forward hooks open and close groups
around its blocks (offload/modules); they put no node into autograd's graph and replace no tensor. The modes
`hidden_states` and `selective` recompute, as torch's own checkpoint does.

Nobody has to say where a forward begins or a step ends (offload/modules/steps.py).
"""

from __future__ import annotations

import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, ParamSpec, Protocol, Self

import torch
from torch import nn

from offload import marks
from offload.auto.controller import Auto
from offload.auto.kinds import Kinds, Streams, place
from offload.auto.mixed import MixedCalls
from offload.checkpoint.net import Watch
from offload.conductor.arbiter import Conductor
from offload.config import Mode, OffloadConfig, check_min_elements, check_mode, naming_near
from offload.device import device_bytes, device_name, usable_bytes
from offload.groups.manager import GroupsManager
from offload.modules.blocks import Blocks, Modules, beside_blocks, blocks_of, flat, groups_of, names_of
from offload.modules.hooks import HookPair
from offload.modules.memory import parts_of, refuse_beyond_host, refuse_parts_beyond_device
from offload.modules.recomputed import RecomputedCalls
from offload.modules.root import GroupCalls, HeadCalls, ModelRoot
from offload.modules.settings import (
    ALL_TENSORS,
    RECOMPUTING,
    WHAT,
    WITHOUT_BLOCKS,
    check_arguments,
    checkpoints_off,
    forget_compiled,
    heads_of,
    is_adapter,
    is_checkpointing,
    mind_adapters,
    refuse_shared_caches,
    switch_caches_off,
)
from offload.modules.shared import Conducted, WatermarkRoot, conduct, conductor_config, marks_of
from offload.modules.steps import Root, Steps
from offload.modules.weights import (
    WeightsRoot,
    check_gradients,
    chosen_weights,
    device_of,
    waiting_gradients,
    weights_limit,
)
from offload.optim.convert import MoveBack, check_optimizer, check_stepped, move_state_to_host
from offload.planner.explained import Explanation
from offload.policies import Policy, arguments_of
from offload.report import Report, ReportStart
from offload.sizes import argument_bytes, bytes_text
from offload.weights.figures import GradientFigures, WeightFigures
from offload.weights.files import signature, write_slab
from offload.weights.gradients import GradientStream
from offload.weights.hooks import BlockCalls
from offload.weights.stream import WeightStream

_P = ParamSpec("_P")

_LEAST_OF_ALL = 512
"""Elements that leave at least where all tensors do: 1,024 bytes of two each, as TRL's offloading has it."""

_OF_DEVICE = 0.95
"""Where mode "auto" gets no total: of what the process has of the device, or may have."""

_LEAST_HOST_BYTES = 4096
"""A page: less of host memory cannot be pinned."""

_steps = Steps(marks.default_manager)
_applied: weakref.WeakKeyDictionary[nn.Module, Applied] = weakref.WeakKeyDictionary()
"""By module that has hooks of a handle: the handle."""
_watermarked: weakref.WeakKeyDictionary[nn.Module, Applied] = weakref.WeakKeyDictionary()
"""Handles of mode "watermark" by module: it goes around other modes, and takes what they leave."""
_declined: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models of which somebody said that nothing is to leave."""


class Calls(Protocol):
    """Calls that a module's hooks make."""

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def leave(self, state: Any, output: Any, failed: bool) -> None: ...


class Applied:
    """Result of `apply` on a model.

    mode: as it was asked for. groups: names of the modules, by group; a group is offloaded together. weights:
    what streams of the blocks' weights, None where none does. gradients: the same of those on the host.
    conductor: who arbitrates, None without one. In a `with`, the handle is removed at its end.
    """

    def __init__(
        self, model: nn.Module, mode: Mode, groups: Blocks, root: ModelRoot | WeightsRoot | None
    ) -> None:
        self.mode = mode
        self.groups = MappingProxyType({group: tuple(modules) for group, modules in groups.items()})
        self._model = weakref.ref(model)
        self._name = type(model).__name__
        self._root = root
        self._start = ReportStart(None if root is None else marks.default_manager(), "apply")
        self._device_limit: int | None = None  # bytes
        self.conductor: Conductor | None = None
        self._auto: Auto | None = None
        self._streams = Streams()
        self._caching: list[Any] = []  # configs of transformers whose use_cache was switched off
        self._undo = ExitStack()  # all else that it has changed
        self._beside: list[str] = []  # of lists that hold blocks which were found: what is none

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of all modules that matched."""
        return tuple(name for names in self.groups.values() for name in names)

    @property
    def recomputes(self) -> int:
        """Forwards of blocks that backwards ran again, whole or in part, since `apply`."""
        return self._root.watch.recomputes if isinstance(self._root, ModelRoot) else 0

    @property
    def is_off(self) -> bool:
        """Predicate: nothing was to leave: mode False, without weights, gradients or optimizer's state."""
        return self.mode is False and self._streams.are_none

    @property
    def weights(self) -> WeightFigures | None:
        """Which weights stream, and what that did in the last step; None without `weights=`."""
        return None if self._streams.weights is None else self._streams.weights.figures

    @property
    def gradients(self) -> GradientFigures | None:
        """Which gradients wait on the host, and what that did in the last step; None where none does."""
        figures = None if self._streams.gradients is None else self._streams.gradients.figures
        return figures if figures is not None and figures.count else None

    def report(self, *, gather: bool = False) -> Report:
        """Report what was saved, moved and kept since `apply`, by all that is offloaded in this process, and
        in which phase of a step the device's memory is highest. gather: with every rank's figures; then all
        ranks must call. Blocks the host: only to gather."""
        nothing = f"mode={self.mode!r}, as it was asked: no saved tensor of {self._name} leaves"
        peak = self._root.peak.text() if isinstance(self._root, ModelRoot) else ""
        found = replace(self._start.report(gather=gather), peak=peak, recomputes=self.recomputes)
        found = replace(found, weights=self.weights and replace(self.weights))
        found = replace(found, gradients=self.gradients and replace(self.gradients))
        if self.is_off:
            return replace(found, remark=f"{nothing}; where a step does not fit, give another mode=")
        if found.last and self.mode in (False, "checkpoint") and not found.streamed:
            found = replace(found, remark=found.remark or nothing)
        return found

    def explain(self) -> Explanation:
        """Explain what mode "auto" chose for each block, what it costs, and what a larger budget would save;
        of other modes what they do, and the report's verdict. Beside each, which weights stream, what a GB
        more of them would gain, and which gradients wait. Blocks the host: in "auto" for about 0.1 s, to
        solve for that budget."""
        report = self.report()
        beside = "" if report.streamed is None else str(report.streamed)
        if self._auto is not None:
            return replace(self._auto.explain(), beside=beside)
        state = f"{WHAT[self.mode]}\n{report.verdict}"
        return Explanation(state=state, is_final=True, mode=str(self.mode or "off"), beside=beside)

    def remove(self, device: torch.device | int | str | None = None) -> None:
        """Take every hook off: the model is as it was, with its weights where `apply` found them, on the CPU
        for a model that was on meta; or all of it on `device`, with weights=: "cpu", or where it trains. An
        `optimizer=` is of its class again, with its state beside the weights where the model trains. A
        backward that is still to come finds its tensors. Called again, it does nothing. Raises ValueError
        inside a forward of the model, and where the weights do not fit into what is free on the device, or
        torch.OutOfMemoryError where that is in pieces; all goes on then, as where an
        optimizer's state does not fit. Blocks the host for streamed weights and gradients, and for such a
        state; else never."""
        root = self._root
        if root is None:
            return
        if device is not None and self._streams.weights is None:
            raise ValueError(f"remove(device={device!r}) of {self!r}, which moved no weights; use model.to()")
        where = None if device is None else device_of(device)
        root.calls.end_interrupted(sys._getframe())
        if root.calls:
            raise ValueError(
                f"remove() of {self!r} inside a forward of its modules, which has hooks open; call it when "
                "the forward has returned"
            )
        streams = self._streams
        finish_state = None if streams.move_back is None else streams.move_back()
        if streams.gradients is not None:
            streams.gradients.remove()
        if streams.weights is not None:
            streams.weights.remove(where)
        if where is not None and (model := self._model()) is not None:
            model.to(where)  # and what did not stream
        if finish_state is not None:
            finish_state()
        if (manager := marks.existing_manager()) is not None:
            with manager.engine.lock:  # else what a backward has freed is lent until the step's end
                manager.engine.transfers.reclaim_freed()
        self._root = None
        self._undo.close()
        taken = self._taken
        for module in [module for module, handle in taken.items() if handle is self]:
            del taken[module]
        model = self._model()
        if model is not None:
            forget_compiled(model)
            others = [held for handle in taken.values() for held in handle._caching]
            for config in self._caching:
                if not any(config is held for held in others):
                    config.use_cache = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()

    def dequantize(self, block: str = "*") -> None:
        """Make the INT8 weights of a block plain: from here on they wait as the elements that they are
        expanded to, and may be written and trained. block: its name, or a pattern (fnmatch) of several.
        Raises ValueError where none has such weights, HostBudgetError where the elements do not fit into
        host memory, and OffloadError inside a forward of the block. Blocks the host."""
        if self._streams.weights is None:
            raise ValueError(f"dequantize() of {self!r}, of which no weights stream")
        self._streams.weights.parameters.dequantize(block)

    def write_slab(self, path: str | PathLike[str], architecture_id: str = "") -> Path:
        """Write the INT8 weights and the biases beside them to path.safetensors, and to path.manifest.json
        what they are; `apply(quantize=...)` takes the latter's path, which is returned. Raises ValueError
        where nothing is INT8. Blocks the host."""
        model = self._model()
        weights = [] if self._streams.weights is None else self._streams.weights.int8_weights()
        if model is None or not weights or any(weight.without_values for weight in weights):
            raise ValueError(f"write_slab() of {self!r}, of which no weights, or none with values, are INT8")
        return write_slab(path, weights, signature(model, is_adapter), architecture_id)

    def _add_parts(
        self,
        conductor: Conductor | None,
        end_conductor: Callable[[], None] | None,
        move_state_back: MoveBack | None,
        device_limit_bytes: int | None,
    ) -> None:
        self.conductor, self._streams.move_back = conductor, move_state_back
        self._device_limit = device_limit_bytes
        if end_conductor is not None:
            self._undo.callback(end_conductor)

    def _hook(self, module: nn.Module, calls: Calls) -> HookPair:
        assert self._root is not None
        pair = HookPair(module, calls.enter, calls.leave, self._root.calls)
        self._undo.callback(pair.remove)
        self._taken[module] = self
        return pair

    def _hook_weights(
        self, stream: WeightStream | None, gradients: GradientStream | None, model: nn.Module
    ) -> None:
        if gradients is not None:
            self._streams.gradients = gradients
            self._streams.unhook_gradients = self._hook(model, gradients).remove
        if stream is None:
            return
        self._streams.weights = stream
        for block in stream.blocks:
            self._hook(model.get_submodule(block.name), BlockCalls(stream, block))

    def _hook_gradients(self, model: nn.Module) -> Callable[[GradientStream], Callable[[], None]]:
        handle, module = weakref.ref(self), weakref.ref(model)

        def hook(gradients: GradientStream) -> Callable[[], None]:
            mine, found = handle(), module()
            assert mine is not None  # it has the streams that move
            assert found is not None
            return mine._hook(found, gradients).remove

        return hook

    @property
    def _taken(self) -> weakref.WeakKeyDictionary[nn.Module, Applied]:
        return _watermarked if self.mode == "watermark" else _applied

    def __getstate__(self) -> object:
        raise TypeError(
            f"{self!r} cannot be pickled or copied: it holds the hooks of a model of this process; save the "
            "model's state_dict(), and call apply() on the model that is built where it is needed"
        )

    def __repr__(self) -> str:
        state = "" if self._root is not None or self.is_off else ", removed"
        found = "; ".join(
            f"{group}: {len(names)} module{'s' * (len(names) != 1)}, {names[0]}"
            + (f" to {names[-1]}" if len(names) > 1 else "")
            for group, names in self.groups.items()
        )
        what = found or ("nothing" if self.mode is False else "every saved tensor")
        if self.weights is not None:
            what = f"{'no activations' if self.mode is False else what}; {self.weights.line()}"
        if self.gradients is not None:
            what = f"{'no activations' if self.mode is False and not self.weights else what}; "
            what += self.gradients.line()
        if self._streams.move_back is not None:
            what = f"{what}; the optimizer's state waits on the host"
        if self._device_limit is not None:
            what = f"{what}; device_limit {bytes_text(self._device_limit)}"
        if self._beside:
            what = f"{what}; no block: {', '.join(self._beside)}"
        return f"<offload.apply({self._name}, mode={self.mode!r}{state}): {what}>"


@naming_near
def apply(
    model: nn.Module,
    mode: Mode | None = None,
    blocks: Modules | None = None,
    modules: Modules | None = None,
    device_limit: float | str | None = None,
    host_limit: float | str | None = None,
    min_numel: int | None = None,
    device_total: float | str | None = None,
    high: float | str | None = None,
    low: float | str | None = None,
    no_recompute: str | Sequence[str] | None = None,
    recompute_differs: Literal["raise", "warn"] = "raise",
    host_reserve: float | str | None = None,
    weights: float | str | None = None,
    quantize: str | PathLike[str] | None = None,
    conductor: Conducted = None,
    device: torch.device | int | str | None = None,
    gradients: Literal["host", "device"] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    policy: Policy | None = None,
) -> Applied:
    """Offload what `model` saves for its backward, from its next forward on; with `weights`, also the weights
    of its blocks, with `gradients` its gradients, and with `optimizer` that one's state, or these alone.

    mode: None takes the config's `activation_offloading`, "groups" by default; with `weights`, `optimizer` or
        gradients="host", "off".
        "groups": what blocks save, as far as the plan and the limit want it.
        "checkpoint": blocks are recomputed in the backward, and nothing is offloaded.
        "hidden_states": blocks are recomputed in the backward; their input waits on the host.
        "selective": outputs of matrix products and attention wait there as well, and are not recomputed;
            as in "groups", a plan may keep some.
        "auto": each block of each forward is kept, moved or recomputed, in whole or in part, whichever makes
            the step shortest within `device_total`; with `optimizer`, its state, gradients and weights have
            their share of that, too. The first steps measure; `handle.explain()` says what was chosen.
            These four set `use_cache` of a transformers config to False, as its own checkpoints do.
        True: every saved tensor, but for the output head's. "legacy": the same, each copy waited for.
        "disk": as True, and on from host memory to a file in the config's `disk_directory`; without one, in
        the directory for temporary files.
        "watermark": what has to, once the device's memory reaches `high`, or is seen to come to it; the
        oldest first. It goes around other modes, and takes what they leave.
        "off", or False: nothing.
    blocks: patterns of module names (fnmatch), such as "model.layers.*". None finds them: layers of a
        ModuleList, or two or more alike in a Sequential. By the name of a group, as `modules`.
    modules: patterns of modules inside blocks, such as ["*.self_attn", "*.mlp.act_fn"]: each is a group of
        its own, and the rest of its block stays; or by the group's name, as {"experts": "*.mlp.experts"}. For
        mode "groups". With `blocks`, only those inside these.
    device_limit, host_limit: bytes, or text such as "8GB" or "500 MiB"; device_limit also "60%" of the GPU.
        As device_limit_bytes and host_limit_bytes of OffloadConfig: they hold for all that the process saves
        and pins. A device_limit goes with its handle: from the first `apply` after its remove() at which no
        backward is to come, that of the handles that there are holds, or the config's own. A host_limit
        stays. Only "groups" and "selective" keep tensors on the device because a limit leaves room for them.
    min_numel: elements; a smaller saved tensor, weight or gradient stays. None takes
        min_offloaded_tensor_size of the config, 1 Mi by default; where every tensor may leave (True,
        "legacy", "disk", "watermark") it is 512; for weights and gradients it is 1 Mi.
    device_total: for mode "auto": all active bytes on the GPU, weights, gradients and working set included;
        bytes, text or a share of it. None: 95% of what the process has of the GPU's memory, or may have.
        "least": what makes a step at most a hundredth longer and frees most; the simulated device, which has
        no memory of its own, takes that for None. What the optimizer's step makes is not lowered by it.
        Memory peaks of torch.cuda are reset at the begin of the steps that are still planned for.
    high, low: marks of mode "watermark": allocated device memory, of whatever it is, as bytes, text or a
        share of the GPU. None for high: "90%"; for low, below which spilling that has started stops: 15/16 of
        high. They hold for the process.
    no_recompute: patterns of names of blocks that the modes which recompute keep or move instead, such as
        ["*.router"].
    recompute_differs: what becomes of a recompute that gave other bits than its forward: "raise" is a
        RecomputeDiffersError before the optimizer's step or by the next step's end, "warn" a warning once a
        block. Compared are the first three calls of each block, then one in 61 of its class.
    host_reserve: as host_reserve_bytes of OffloadConfig: bytes of host memory that are pinned now. Without
        it the first steps pin, and what finds no host memory meanwhile stays on the device.
    weights: "host": the weights of all blocks wait in pinned memory, and each block's come before it
        computes, in the forward and in the backward; two blocks are on the device at once. Bytes or text such
        as "6GB": so much of them stays, or passes, on the device, with which the step is shortest. Resident
        are parameters outside of the blocks, of adapters, below min_numel, and tied ones. The model may
        be on the CPU: what does not stream moves to the device; or on meta, for `load_weights` to fill.
        Weights are frozen, or an optimizer of torch's steps them on the device. docs/weights.md has what goes
        with what.
    quantize: "int8", with `weights`: frozen weights of two dimensions, and experts' of three, wait and cross
        the link as INT8 values with a float32 scale a row, and are expanded on the device. What the model
        computes is what it computes on the expanded weights, bit for bit. What is trained streams as it is.
        Or the path of a slab's ".manifest.json", as `write_slab` gives it: the INT8 values, and biases, are
        read from there, whatever the model has; SlabError where they do not fit it. "auto", in mode "auto"
        without `weights`: frozen weights are INT8 if they have to leave the device.
    device: where a model with `weights` trains, such as "cuda:1". None: where the engine of this process is,
        the current GPU by default. "cpu" is the simulated device.
    gradients: "host": the gradients of all parameters of min_numel elements and more wait in pinned memory
        from where a backward has made them on. The next backward adds to them on the device, as torch does,
        and clipping, scaling, optimizers and the loop find them there when they ask. "device": they stay.
        None: those of weights that stream wait on the host, others stay.
    optimizer: of torch.optim, stepping parameters of the model: its state goes to the host, as that of a
        HybridDeviceOptimizer with offload_fraction=1, which it is from now on. It stays the same object, with
        its groups, state and hooks, and what a scheduler has put on it. One that is a HybridDeviceOptimizer
        already stays as it is. In mode "auto", unless device_total is "least", so much of the state as the
        total has room for stays, where the optimizer is Adam or AdamW with fused=True; that of others stays,
        since it would be stepped by another kernel.
    conductor: True: one arbiter for all that moves on this device, activations, weights and optimizer state
        (docs/conductor.md). A ConductorConfig, or a JSON file of the source system, for caps, slots and
        telemetry of your own. It is the process's: it ends with the last handle that has it.
    policy: an `offload.Auto`, `Fixed` or `Watermark`, instead of the arguments that it has fields for.

    Raises ValueError for anything that cannot be: no blocks, a pattern that matches nothing, an argument that
    the mode has no use for, modules that are applied already, a mode beside another that it excludes, a
    directory that cannot be written; or parts that the conductor's vram_hard_cap_mb, or the total of mode
    "auto", cannot have together; HostBudgetError, where the host cannot. Nothing has changed then. Blocks the
    host while memory is pinned, if limits, weights, gradients or an optimizer are given; else never.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"apply got a {type(model).__name__}, must be a torch.nn.Module")
    if policy is not None:
        its: list[object] = [mode, blocks, modules, device_limit, min_numel, device_total, high, low]
        its += [no_recompute, recompute_differs != "raise" or None, weights, quantize, device, gradients]
        if any(each is not None for each in its):
            raise ValueError(
                f"policy={policy!r} beside arguments that it stands for: give optimizer, conductor, "
                "host_limit and host_reserve beside a policy, and what else there is as its fields"
            )
        return apply(
            model,
            host_limit=host_limit,
            host_reserve=host_reserve,
            conductor=conductor,
            optimizer=optimizer,
            **arguments_of(policy),
        )
    before = marks.existing_manager()
    config = OffloadConfig() if before is None else before.engine.config
    by_hand = weights is not None or gradients == "host" or optimizer is not None
    if mode is None:
        mode = False if by_hand else config.activation_offloading
    mode = check_mode("mode", mode)
    limit_bytes = weights_limit(weights)
    if quantize == "auto" and (mode != "auto" or weights is not None):
        raise ValueError(
            'quantize="auto" is of weights that mode="auto" places; with weights= give "int8", or none'
        )
    if quantize not in (None, "auto") and weights is None:
        raise ValueError(
            f'quantize={quantize!r} is of streamed weights; give weights="host" or a size as well'
        )
    if quantize not in (None, "auto", "int8") and not str(quantize).endswith(".manifest.json"):
        raise ValueError(f'quantize is {quantize!r}, must be "int8" or the path of a slab\'s .manifest.json')
    if device is not None and weights is None:
        raise ValueError(f"device={device!r} without weights=: a model trains where it is; use model.to()")
    check_gradients(gradients)
    if optimizer is not None:
        check_stepped(optimizer, model)
    if mode is False:
        if not by_hand and conductor:
            raise ValueError(
                f"mode=False with conductor={conductor!r}: nothing of {type(model).__name__} moves, so there "
                "is nothing to arbitrate; leave it out, or build an offload.Conductor for what else moves"
            )
        _declined.add(model)
        if not by_hand:
            return Applied(model, mode, {}, None)
    if min_numel is not None:
        check_min_elements(min_numel, "min_numel")
    if recompute_differs not in ("raise", "warn"):
        raise ValueError(f"recompute_differs is {recompute_differs!r}, must be 'raise' or 'warn'")
    check_arguments(
        mode,
        {
            "blocks": blocks,
            "modules": modules,
            "device_limit": device_limit,
            "device_total": device_total,
            "high": high,
            "low": low,
            "no_recompute": no_recompute,
            "recompute_differs": None if recompute_differs == "raise" else recompute_differs,
        },
    )
    marks_given = marks_of(high, low) if mode == "watermark" else None
    groups = {} if mode is False or mode in WITHOUT_BLOCKS else groups_of(model, blocks, modules)
    never = names_of(groups, no_recompute, "no_recompute")
    whole = {} if mode in WITHOUT_BLOCKS or modules is None else blocks_of(model, blocks)
    streamed = {} if weights is None else flat(blocks_of(model, blocks))
    _check_free(model, mode, [*flat(groups).values(), *flat(whole).values(), *streamed.values()])
    if mode == "auto" and any(is_checkpointing(module) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} checkpoints its layers itself, and mode='auto' chooses what to "
            f"recompute; write {checkpoints_off(model)}"
        )
    if mode in RECOMPUTING:
        refuse_shared_caches(model)
    total_bytes = _total_of(before, device_total) if mode == "auto" else None
    auto = _planner_here(before, device_total, total_bytes) if mode == "auto" else None
    limited = _config_for(before, config, mode, device_limit, host_limit, host_reserve)
    own_limit = None if device_limit is None else limited.device_limit_bytes
    here = device_of(device_name()) if before is None else before.engine.device.torch_device
    where = here if device is None else device_of(device)
    engine = None if before is None or where != here else before.engine
    conducted = conductor_config(conductor, engine, where)
    choice, slab = None, None
    if weights is not None:
        choice, slab = chosen_weights(model, streamed, where, quantize, least=min_numel)
    wait = waiting_gradients(model, gradients, choice, min_numel)
    placed = None
    if total_bytes is not None and auto is None:
        all_blocks = streamed or flat(blocks_of(model, blocks))
        by_hand_too = choice, slab, limit_bytes, wait
        placed = place(
            model,
            all_blocks,
            where,
            total_bytes,
            optimizer,
            by_hand_too,
            gradients=gradients,
            quantize=quantize if quantize is None else str(quantize),
            least=min_numel,
            measures=where.type == "cuda"
            or (engine is not None and engine.device.allocator_bytes() is not None),
        )
        if placed is not None:
            choice, slab, limit_bytes, wait = *placed[:3], [*placed.waiting]
    moves_state = optimizer is not None and (total_bytes is None if placed is None else placed.moves_state)
    moved = optimizer if moves_state else None
    if moved is not None:
        check_optimizer(moved)
    parts = parts_of(model, where, choice, limit_bytes, wait, moved, limited.device_limit_bytes)
    refuse_beyond_host(parts, engine, limited.host_limit_bytes)
    if conducted is not None and (where.type == "cuda" or conductor is not True):  # else nobody gave the cap
        refuse_parts_beyond_device(parts, conducted.hard_bytes, "the conductor's vram_hard_cap_mb")
    if total_bytes is not None and (weights is not None or gradients == "host"):
        refuse_parts_beyond_device(parts, total_bytes, "device_total")
    if where != here:
        _check_unused(where)
        _check_nothing_waits(before, config, limited)
        marks.configure(limited, device=str(where).replace("cpu", "sim"))
    elif limited != config:
        _check_nothing_waits(before, config, limited)
        marks.change_limits(limited)
    engine = marks.default_manager().engine
    with ExitStack() as undo:
        arbiter, end_arbiter = (None, None) if conducted is None else conduct(engine, conducted)
        if end_arbiter is not None:
            undo.callback(end_arbiter)
        stream = None
        if choice is not None:
            stream = WeightStream(engine, model, choice, limit_bytes)
            undo.callback(stream.remove)
            if slab is not None:
                slab.load_rest(stream.parameters.fill)
        gradient_stream = None
        if wait:
            gradient_stream = GradientStream(engine, model, wait)
            undo.callback(gradient_stream.remove)
            if stream is not None:
                stream.figures.gradients = gradient_stream.figures
        move_back = None if moved is None else move_state_to_host(moved, engine)
        undo.pop_all()

    forget_compiled(model)
    everything = "all tensors" if mode in ALL_TENSORS else None
    if min_numel is None and everything:
        min_numel = _LEAST_OF_ALL
    if mode is False:
        alone = weights_root(model)
        handle = Applied(model, mode, {}, alone)
        handle._undo.callback(_steps.discard, alone)
        handle._hook(model, alone)
        handle._hook_weights(stream, gradient_stream, model)
        handle._add_parts(arbiter, end_arbiter, move_back, own_limit)
        return handle
    root = (
        WatermarkRoot(model, _steps, marks.default_manager, marks_given, min_numel)
        if marks_given is not None
        else ModelRoot(
            model,
            whole or groups,
            _steps,
            marks.default_manager,
            min_elements=min_numel,
            everything=everything,
        )
    )
    handle = Applied(model, mode, groups, root)
    handle._beside = beside_blocks(model, groups) if blocks is modules is None else []
    handle._add_parts(arbiter, end_arbiter, move_back, own_limit)
    _steps.add(root)
    handle._undo.callback(_steps.discard, root)
    # first, so that they are inside of the blocks' other hooks
    handle._hook_weights(stream, gradient_stream, model)
    own = handle._hook(model, root)
    root.watch = Watch(warns=recompute_differs == "warn", moves=mode == "auto", never=never)
    if mode == "auto" and auto is None:
        auto = Auto(marks.default_manager, total_bytes)
    handle._auto = auto
    if placed is not None and auto is not None:
        hook = handle._hook_gradients(model)
        auto.kinds = Kinds(engine, model, optimizer, handle._streams, placed, hook)
        if moved is not None:
            moved.keep_on_device(placed.split.state)  # type: ignore[attr-defined]
    if auto is not None:
        auto.models += 1
        ends = weakref.finalize(model, auto.end, root)
        ends.atexit = False
        handle._undo.callback(ends)
    for name, module in flat(whole).items():
        handle._hook(module, GroupCalls(root, name, None, block=True))
    pairs: dict[str, HookPair] = {}
    if auto is not None:
        auto.rests.add(root, own, pairs, _steps)
    for group, named in groups.items():
        for name, module in named.items():
            if auto is not None:
                pairs[name] = handle._hook(module, MixedCalls(root, name, auto))
            elif mode in RECOMPUTING:
                handle._hook(module, RecomputedCalls(root, name, mode))
            else:
                handle._hook(module, GroupCalls(root, name, group, block=not whole))
    if mode in RECOMPUTING:
        others = [held for other in _applied.values() for held in other._caching]
        handle._caching = switch_caches_off(model, others)
    if everything:
        for head in heads_of(model):
            handle._hook(head, HeadCalls(root))
    if mode == "legacy":  # one copy out at a time, and nothing back before it is read
        share = marks.default_manager().engine.limits.contributor("legacy", model)
        share.bound("max_spilling_bytes", 1)
        share.bound("max_restoring_bytes", 0)
        share.bound("half_room_bytes", 0)
        handle._undo.callback(share.end)
    for module in mind_adapters(model, mode):
        handle._undo.callback(setattr, module, "gradient_checkpointing", True)
    return handle


def remove(model: nn.Module) -> None:
    """`remove()` of every handle on `model` and on modules inside it, whoever has them; as that, it does
    nothing where there is none. Raises ValueError for a handle on a model around this one, of which nothing
    has changed then; else as `Applied.remove`."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"remove got a {type(model).__name__}, must be a torch.nn.Module")
    inside = set(model.modules())
    handles = dict.fromkeys(h for m, h in (*_watermarked.items(), *_applied.items()) if m in inside)
    if around := [handle for handle in handles if handle._model() not in inside]:
        raise ValueError(f"remove() of a {type(model).__name__} inside what {around[0]!r} is of; give that")
    for handle in handles:
        handle.remove()
    _declined.difference_update(inside)


def _check_unused(where: torch.device) -> None:
    """ValueError if a handle uses the engine, which is not of the device `where`."""
    if handles := [*_applied.values(), *_watermarked.values()]:
        raise ValueError(
            f"device={str(where)!r} beside {handles[0]!r}, which is on another device: one engine copies for "
            "all models of a process; call remove() on that handle first, or use a process for each device"
        )


def is_declined(model: nn.Module) -> bool:
    """Return True if `apply` was called for this model with mode False, or with a config that says so."""
    return model in _declined


def is_applied(model: nn.Module) -> bool:
    """Return True if a handle has hooks on this model, or on a module of it."""
    return any(module in taken for module in model.modules() for taken in (_applied, _watermarked))


def weights_root(model: nn.Module) -> WeightsRoot:
    """A model whose weights leave; from now on its steps are inferred, for as long as the caller holds it."""
    root = WeightsRoot(model, _steps, marks.default_manager)
    _steps.add(root)
    return root


def infer_steps(root: Root) -> None:
    """From now on an optimizer of this root ends steps, for as long as the caller holds it."""
    _steps.add(root)


def _context_of(applies: Callable[_P, Applied]) -> Callable[_P, AbstractContextManager[Applied]]:
    @contextmanager
    def activations(*arguments: _P.args, **named: _P.kwargs) -> Iterator[Applied]:
        """`apply` for the forwards inside; `remove` at the end. A backward may come after it."""
        with applies(*arguments, **named) as handle:
            yield handle

    return activations


activations = _context_of(apply)
"""`apply` for the forwards inside, with its arguments; `remove` at the end. A backward may come after it."""


def _check_free(model: nn.Module, mode: Mode, hooked: Sequence[nn.Module]) -> None:
    """ValueError if a module has hooks of another handle, or a mode lies inside another that excludes it."""
    taken = _watermarked if mode == "watermark" else _applied
    for module in [model, *hooked]:
        if module in taken:
            raise ValueError(
                f"a {type(module).__name__} of this {type(model).__name__} is offloaded already, by "
                f"{taken[module]!r}; call remove() on that handle first"
            )
    inside = set(model.modules())
    for module, handle in [*_applied.items(), *_watermarked.items()]:
        if (mode in ALL_TENSORS and module in inside) or (
            handle.mode in ALL_TENSORS and model in set(module.modules())
        ):
            raise ValueError(
                f"mode={mode!r} for {type(model).__name__} beside {handle!r}: a mode that takes every saved "
                "tensor goes with no other one on the same modules; call remove() on that handle first, or "
                "use one mode for all"
            )
        around = module in inside or model in set(module.modules())
        if around and {mode, handle.mode} == {"auto", "watermark"}:
            raise ValueError(
                f"mode={mode!r} for {type(model).__name__} beside {handle!r}: 'auto' plans with all the "
                "memory that device_total leaves, and a watermark would take of it; use one of the two"
            )


class _LimitOfHandle(int):
    """A device_limit_bytes that a handle gave, with which it goes. own: the config's, without handles."""

    own: int | None


class _UnaskedDirectory(str):
    """For "disk" where the config names no directory: it goes with the last handle that writes there."""


def _uses_disk(mode: Mode) -> bool:
    return mode == "disk" or any(handle.mode == "disk" for handle in _applied.values())


def _check_nothing_waits(
    manager: GroupsManager | None, config: OffloadConfig, limited: OffloadConfig
) -> None:
    """ValueError if a new engine or new limits would drop tensors that a backward is still to read."""
    if waiting := _waiting_bytes(manager):
        old, new = asdict(config), asdict(limited)
        changes = [f"{name} from {old[name]!r} to {new[name]!r}" for name in old if old[name] != new[name]]
        raise ValueError(
            f"apply() changes {', '.join(changes) or 'the device'}, and {waiting:,} saved bytes of an "
            "earlier forward wait for their backward, which would not find them; call apply() before the "
            "forward, or after its backward. offload.step_end() drops what no backward will read"
        )


def _waiting_bytes(manager: GroupsManager | None) -> int:
    """Saved bytes that a backward is still to read."""
    if manager is None:
        return 0
    with torch.inference_mode(False), torch.enable_grad():
        # torch's queue of this thread holds the rest of a backward that has failed, until another one runs
        one = torch.ones((), device="cpu", requires_grad=True)
        torch.autograd.grad(one + one, one)
    return sum(block.nbytes for block in manager.tracker.living_blocks())


def _total_of(manager: GroupsManager | None, device_total: float | str | None) -> int | None:
    """Device total of mode "auto", in bytes; None for "least", and on a device without memory of its own."""
    if device_total == "least":
        return None
    if device_total is not None:
        return argument_bytes(device_total, name="device_total", of_bytes=device_bytes())
    if manager is None:
        usable = usable_bytes()
    else:
        device = manager.engine.device
        free = device.free_bytes()
        usable = None if free is None else free + device.active_bytes()
    return None if usable is None else round(_OF_DEVICE * usable)


def _planner_here(
    manager: GroupsManager | None, device_total: float | str | None, total_bytes: int | None
) -> Auto | None:
    """The planner of the models in mode "auto": a device has one total, so there is one for all of them.
    Raises ValueError for another total."""
    for handle in _applied.values():
        auto = handle._auto
        if auto is None or manager is None or not auto.is_of(manager.engine):
            continue
        if device_total is not None and auto.total_bytes != total_bytes:
            totals = [
                "no device_total" if nbytes is None else f"device_total={nbytes:,} bytes"
                for nbytes in (total_bytes, auto.total_bytes)
            ]
            raise ValueError(
                f"apply(mode='auto') with {totals[0]} beside {handle!r} with {totals[1]}: the total is of "
                "the device, and one plan is made for all models on it; give each the same, or call remove() "
                "on that handle first"
            )
        return auto
    return None


def _config_for(
    manager: GroupsManager | None,
    config: OffloadConfig,
    mode: Mode,
    device_limit: float | str | None,
    host_limit: float | str | None,
    host_reserve: float | str | None,
) -> OffloadConfig:
    total = device_bytes()
    given = {
        "device_limit_bytes": argument_bytes(device_limit, name="device_limit", of_bytes=total, least=0),
        "host_limit_bytes": argument_bytes(host_limit, name="host_limit", least=_LEAST_HOST_BYTES),
        "host_reserve_bytes": argument_bytes(host_reserve, name="host_reserve", least=0),
    }
    changes: dict[str, Any] = {name: nbytes for name, nbytes in given.items() if nbytes is not None}
    limit = config.device_limit_bytes
    new = own = limit.own if isinstance(limit, _LimitOfHandle) else limit
    wanted = [handle._device_limit for handle in _applied.values()] + [changes.get("device_limit_bytes")]
    for nbytes in (each for each in wanted if each is not None):
        new = _LimitOfHandle(nbytes)
        new.own = own
    if device_limit is not None or new == limit or not _waiting_bytes(manager):
        changes["device_limit_bytes"] = new
    if mode == "disk" and config.disk_directory is None:
        changes["disk_directory"] = _UnaskedDirectory(tempfile.gettempdir())
    elif isinstance(config.disk_directory, _UnaskedDirectory) and not _uses_disk(mode):
        changes["disk_directory"] = None  # it was for handles that are removed
    return replace(config, **changes)

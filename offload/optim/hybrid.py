"""HybridDeviceOptimizer: a torch optimizer whose state lies on the host, and whose copies and steps run
beside each other, beside the next forward, or beside the backward.

    optimizer = HybridDeviceOptimizer(model.parameters(), lr=1e-4, overlap="forward", model=model)

    loss_of(batch).backward()
    optimizer.step()                         # returns early; the first touch of a weight waits for it
    optimizer.zero_grad()

A parameter's state is in one of four places, see placing.py. Parameters, moments and masters are the same
bits with every overlap, for one layout.

With several ranks each steps what it has. DistributedDataParallel or FSDP2 reduces the gradients. A DTensor's
gradient that still has to be summed over ranks is summed here, and the norm of DTensors is taken over the
mesh, as torch does. Ranks agree on nothing else in a step: if only one rank has nan or inf in gradients that
were not reduced, only that rank steps, or skips, differently.

One invariant: between two calls of this class every parameter and its state belong to the same step, or an
error has said why not.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from abc import ABCMeta
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from offload.compile import untraced
from offload.config import check_fraction
from offload.engine import OffloadEngine, default_engine
from offload.optim.classes import (
    checked_class,
    defaults_of,
    may_fail_half_way,
    steps_each_alone,
)
from offload.optim.in_place import in_place
from offload.optim.parts import MASTER, HostOptions, copied
from offload.optim.placing import Place, Placement, PlacingOptions
from offload.optim.state import copy_to_host, fill_state, matched, paired, with_class_rules, without_hooks
from offload.optim.step import Overlap, StepRunner, checked_overlap
from offload.params.view import ParamView, local_of
from offload.telemetry.speaker import speaker

logger = speaker(__name__)

_OWN = ("zero_grad", "state_dict", "load_state_dict")
"""Methods of a class that only an optimizer of all parameters can be asked for."""
_NOTHING = object()


class _MadeInPlace(ABCMeta):
    """A call of the class gives what its constructor has put in the place of the object, if anything."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        return vars(made).get("_in_place", made)

    @property
    def __signature__(cls) -> inspect.Signature:
        return inspect.signature(functools.partial(cls.__init__, None))  # type: ignore[misc]


class HybridDeviceOptimizer(Optimizer, metaclass=_MadeInPlace):
    """See the module. The positional arguments, and what they mean, are those of Megatron-core's class of
    this name."""

    _built = False

    def __init__(
        self,
        params: Any,
        offload_fraction: float = 0.5,
        cpu_optimizer_cls: type[Optimizer] | None = None,
        gpu_optimizer_cls: type[Optimizer] | None = None,
        param_update_in_fp32: bool = False,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        *,
        overlap: Overlap = "step",
        model: nn.Module | None = None,
        engine: OffloadEngine | None = None,
        cpu_share: float | None = None,
        bucket_bytes: int = 64 << 20,
        atomic_step: bool | None = None,
        max_grad_norm: float | None = None,
        cpu_threads: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Build the host side: pins its memory, which blocks the host. Raises ValueError or HostBudgetError
        before anything has moved.

        offload_fraction: share of the elements that train whose state leaves the device, in order. 0, with
            one class, no masters and no max_grad_norm: the object is one of the class itself, by multiple
            inheritance (in_place.py), and other arguments do nothing; `decoupled_grad` is not read. Objects
            of a subclass of this class are not.
        cpu_optimizer_cls, gpu_optimizer_cls: None is the other one, or torch.optim.AdamW. kwargs go to both.
            Above offload_fraction=0 all parts of a class of torch.optim have one kernel: that of `fused=` or
            `foreach=`, else the fused one. A class that is not of torch.optim may look at all parameters at
            once: it is one optimizer, without overlap, and where only a part would leave all state does. It
            is made and called as it is alone, but for two classes, each of which only steps its share.
        param_update_in_fp32: float32 masters of bf16 and fp16 parameters, in every place. Where rounding a
            master does not give the weight's bits, the weight counts.
        pin_cpu_grads, pin_cpu_params: False takes pageable memory: its copies block the thread that issues
            them.
        overlap_cpu_optimizer_d2h_h2d: False has step() return when everything is done.
        overlap: what runs beside what.
            "step": copies and steps beside each other, inside step(), which blocks the host until the last is
                issued. Right in any loop that is right with torch's optimizer.
            "forward": also the weights' return, beside the next forward; needs `model`. Right in the same
                loops: whoever touches a weight that has not returned waits for it. Not seen: a view taken
                before step() and read after it, a functional transform (torch.func) over a weight itself, C++
                that reads a weight past torch's functions, a second lane that reads beside the step's without
                synchronize_parameters(). A compiled forward, a graph captured outside of the engine's region,
                and DTensors have step() wait.
            "backward": also gradients' copies out, and steps, beside the backward. The loop promises that
                gradients are final when their last backward has made them, that step() follows, and that
                param groups, weights, gradients and state are left alone between. A broken promise that can
                be seen is an error: a gradient written or made again, clipping, a GradScaler, a collective,
                zero_grad() without step(), changed groups, a weight touched. docs/limits.md names what is not
                seen.
        model: names weights in messages; with "forward" and "backward" its modules wait for their own
            weights. "backward" without it: step() waits for all weights.
        engine: whose lanes and host memory are used; None takes the process's own of the parameters' device
            (simulated for CPU parameters).
        cpu_share: of the offloaded elements, what the host steps; the rest is streamed through the device.
            None is 0 where both classes are torch's Adam or AdamW, and 1 elsewhere, where nothing can be
            streamed.
        bucket_bytes: master weights of one bucket.
        atomic_step: keep a copy of what the CPU steps until all of it is stepped, so that an error leaves the
            last whole step; without overlap, and for 2 to 3 times the memory traffic. None: for
            classes other than torch's Adam, AdamW, SGD and Adagrad, whose fused kernels
            check everything before they write.
        max_grad_norm: clip by the global norm in every step; the norm is `last_grad_norm`.
        cpu_threads: of the CPU optimizer. None: as many as torch would use on the cores near the device, less
            two.
        """
        cpu_cls = cpu_optimizer_cls or gpu_optimizer_cls or AdamW
        gpu_cls = gpu_optimizer_cls or cpu_optimizer_cls or AdamW
        check_fraction("offload_fraction", offload_fraction)
        keeps_all = not offload_fraction and cpu_cls is gpu_cls and not param_update_in_fp32
        if isinstance(params, nn.Module) and (offload_fraction or steps_each_alone(cpu_cls)):
            raise ValueError(
                f"params is a {type(params).__name__}; give what its .parameters() returns, or, to a class "
                "that takes a module, offload_fraction=0"
            )
        if keeps_all and max_grad_norm is None and type(self) is HybridDeviceOptimizer:
            checked = checked_overlap(overlap, model, has_workers=True, clips=False)
            cls = checked_class("cpu_optimizer_cls", cpu_cls, kwargs)
            self._in_place = made = in_place(cls)(params, **kwargs)  # type: ignore[arg-type]
            vars(made).update(overlap=checked, _given_engine=engine)
            vars(made).update(pin_cpu_grads=pin_cpu_grads, pin_cpu_params=pin_cpu_params)
            vars(made).update(overlap_cpu_optimizer_d2h_h2d=overlap_cpu_optimizer_d2h_h2d)
            HybridDeviceOptimizer.register(type(made))
            return
        defaults: dict[str, Any] = {}
        for argument, cls in (("cpu_optimizer_cls", cpu_cls), ("gpu_optimizer_cls", gpu_cls)):
            defaults |= defaults_of(checked_class(argument, cls, kwargs), kwargs)
            own = [name for name in _OWN if getattr(cls, name) is not getattr(Optimizer, name)]
            if own and cpu_cls is not gpu_cls:
                logger.warning(
                    "%s steps a share of the parameters, and %s of its own is not called",
                    cls.__name__,
                    " and ".join(f"{name}()" for name in own),
                )
        atomic = may_fail_half_way(cpu_cls, kwargs) if atomic_step is None else atomic_step
        alone = steps_each_alone(cpu_cls)
        in_buckets = not atomic and alone
        workers = overlap_cpu_optimizer_d2h_h2d and in_buckets
        if 0 < offload_fraction < 1 and not alone:
            if cpu_cls is gpu_cls:
                logger.warning(
                    f"{cpu_cls.__name__} may look at all parameters at once, so one optimizer steps them "
                    f"all, on the host: offload_fraction is 1, not {offload_fraction}; 0 keeps all on the "
                    "device"
                )
                offload_fraction = 1.0
            elif not steps_each_alone(gpu_cls):
                raise ValueError(
                    f"{cpu_cls.__name__} and {gpu_cls.__name__} may both write into one param group; give a "
                    "class of torch.optim for one of them, or offload_fraction=1 or 0"
                )
        given = params if isinstance(params, Tensor) else list(params)  # which torch refuses by name
        has_groups = len(given) and isinstance(given[0], dict)
        options = PlacingOptions(
            offload_fraction=offload_fraction,
            cpu_share=cpu_share,
            cpu_cls=cpu_cls,
            gpu_cls=gpu_cls,
            kwargs=dict(kwargs),
            cpu_threads=cpu_threads,
            host=HostOptions(
                bucket_bytes=bucket_bytes,
                pin_grads=pin_cpu_grads,
                pin_params=pin_cpu_params,
                masters_in_fp32=param_update_in_fp32,
                in_buckets=in_buckets,
                flat=None if alone or cpu_cls is not gpu_cls else not has_groups,
            ),
        )
        if not workers and overlap_cpu_optimizer_d2h_h2d and offload_fraction > 0:
            logger.warning(
                "%s is stepped whole before any weight returns, not overlapped%s",
                cpu_cls.__name__,
                ", so that an error leaves the last whole step; atomic_step=False overlaps it"
                if alone
                else "",
            )
        self.overlap = checked_overlap(
            overlap, model, has_workers=workers or not offload_fraction, clips=max_grad_norm is not None
        )
        self.offload_fraction = float(offload_fraction)
        self.param_update_in_fp32 = param_update_in_fp32
        self.pin_cpu_grads, self.pin_cpu_params = pin_cpu_grads, pin_cpu_params
        self.overlap_cpu_optimizer_d2h_h2d = overlap_cpu_optimizer_d2h_h2d
        self.max_grad_norm = max_grad_norm
        self.sub_optimizer_kwargs = dict(kwargs)
        self._options = options
        super().__init__(given, defaults)
        on_gpu = (p.device for group in self.param_groups for p in group["params"] if p.device.type == "cuda")
        self._closes_engine = engine is None
        self.engine = engine if engine is not None else default_engine(str(next(on_gpu, "sim")))
        reference = weakref.ref(self)
        self._runner = StepRunner(
            self.engine,
            options,
            lambda: getattr(reference(), "param_groups", []),
            overlap=self.overlap,
            model=model,
            atomic=atomic,
            waits=not overlap_cpu_optimizer_d2h_h2d,
        )
        self.placed: Placement = self._runner.placed
        if self.placed.sole is not None:
            self.defaults |= self.placed.sole.defaults
        self._steps = self._runner.steps
        self._end = weakref.finalize(self, self._runner.end)
        self._built = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Its parameters are placed after those there are, by the same fraction. Blocks the host
        for pinning. Raises ValueError for one that names another kernel."""
        self._options.refuse_kernel(param_group)
        super().add_param_group(param_group)
        if not self._built:
            return
        try:
            self._runner.rest()
            self._runner.regroup()
        except BaseException:
            self.param_groups[:] = [group for group in self.param_groups if group is not param_group]
            raise

    def __getattr__(self, name: str) -> Any:
        """Look up what only the wrapped class has, where one optimizer steps all, as schedule-free's train()
        and eval(): its methods and properties find the weights of now, and what they write is in the model
        after."""
        placed = vars(self).get("placed")
        whole = placed.whole if placed and not name.startswith("_") else None
        sole = whole.optimizer if whole else None
        on_class = inspect.getattr_static(type(sole), name, None)
        if sole is not None and isinstance(on_class, (property, functools.cached_property)):
            return self._runner.called(getattr, sole, name)
        if (found := getattr(sole, name, _NOTHING)) is _NOTHING:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(self._runner.called, found) if callable(found) else found

    def __setattr__(self, name: str, value: Any) -> None:
        """Set on the wrapped optimizer what only its class has."""
        whole = self.placed.whole if self._built else None
        sole = whole.optimizer if whole else None
        theirs = not (name.startswith("_") or name in vars(self) or hasattr(type(self), name))
        if theirs and inspect.getattr_static(sole, name, _NOTHING) is not _NOTHING:
            self._runner.called(setattr, sole, name, value)
        else:
            super().__setattr__(name, value)

    # -- Megatron's attributes -------------------------------------------------------------------------------
    @property
    def cpu_optimizers(self) -> list[Optimizer]:
        """The optimizers that step on the host: one a bucket, and one for what is stepped whole."""
        whole = [part.optimizer for part in self.placed.resident if part is not self.placed.on_gpu]
        return [*self.placed.cpu.optimizers, *filter(None, whole)]

    @property
    def gpu_optimizer(self) -> Optimizer | None:
        """The optimizer of the parameters that stay; None if there are none."""
        return self.placed.on_gpu.optimizer

    @property
    def sub_optimizers(self) -> list[Optimizer]:
        """CPU optimizers, then the GPU's. Streamed parameters have none of their own."""
        return self.cpu_optimizers + ([self.gpu_optimizer] if self.gpu_optimizer is not None else [])

    @property
    def cpu_share(self) -> float:
        """Share of the offloaded elements that the host steps."""
        return self.placed.cpu_share

    @property
    def host_bytes(self) -> int:
        """Host memory of state, masters and gradients."""
        return self.placed.host_bytes

    @property
    def ring_bytes(self) -> int:
        """Device memory of the streamed buckets."""
        return self.placed.streamed.ring_bytes

    def drop_ring(self) -> None:
        """Between steps: no device memory for steps, until `make_ring`. Blocks the host for a step under
        way."""
        self._runner.rest()
        self.placed.streamed.drop_ring()

    def make_ring(self) -> None:
        self.placed.streamed.make_ring()

    @property
    def members(self) -> Sequence[ParamView]:
        return self.placed.members

    def place_of(self, parameter: Tensor) -> Place:
        if (member := self.placed.of.get(id(parameter))) is not None:
            return self.placed[member]
        if any(p is parameter for group in self.param_groups for p in group["params"]):
            return Place.FROZEN
        raise ValueError("the tensor is not one of the optimizer's parameters")

    # -- the step --------------------------------------------------------------------------------------------
    @property
    def last_microbatch(self) -> bool | None:
        """Predicate: the backward to come is its step's last: for a schedule to set. None: as many as in the
        step before are expected. Counts with overlap="backward" alone."""
        return self._runner.backward.last_microbatch

    @last_microbatch.setter
    def last_microbatch(self, last: bool | None) -> None:
        self._runner.backward.last_microbatch = last

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside only accumulate; the first one after it is the step's last. Counts with
        overlap="backward" alone."""
        return self._runner.backward.no_sync()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Answer what a GradScaler's step() asks first: no. It has unscaled the gradients, or is about to."""
        self._runner.backward.raise_if_stepped("a GradScaler changed the gradients")
        return False

    @property
    def last_grad_norm(self) -> Tensor | None:
        """The norm by which gradients were clipped last, before that; None before the first time."""
        return self._runner.last_grad_norm

    @untraced
    def step(self, closure: Callable[[], Any] | None = None, *given: Any, **named: Any) -> Any:
        """One step of every parameter that has a gradient. closure: evaluated once, before; a class that is
        not of torch.optim evaluates it itself. given, named: more arguments, for such a class's step. Blocks
        the host while the last step is not yet issued, and with overlap="step" until this one is. Raises
        TypeError for arguments without such a class, OffloadError if a worker failed, or if a gradient cannot
        be used, before anything is stepped; CaptureError in a graph under capture, unless nothing is
        offloaded."""
        self._runner.refuse_in_capture("step()")
        first = [closure] if closure is not None or given else []
        return self._runner.step(self.max_grad_norm, *first, *given, **named)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, total: Tensor | None = None
    ) -> Tensor:
        """Clip the gradients, in place as torch.nn.utils.clip_grad_norm_ does, by their global norm, which is
        returned. Blocks the host: never.

        total: the norm, where it is known better, as over the stages of a pipeline. The norm of DTensors is
            over all ranks of their mesh, each of which must call.
        """
        self._runner.refuse_in_capture("clip_grad_norm_()")
        self._runner.backward.raise_if_stepped("clip_grad_norm_ was called")
        with torch.no_grad():
            return self._runner.clip(max_norm, norm_type, total)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears `decoupled_grad` too. Zeroing in place waits for what still reads the gradients."""
        self._runner.drop_gradients(set_to_none)
        if (own := self._own("zero_grad")) is not None:
            self._runner.called(own, set_to_none)
        else:
            super().zero_grad(set_to_none)

    def _own(self, name: str) -> Callable[..., Any] | None:
        """The method of the one class that is called as it is alone, where it overrides torch's."""
        whole = self.placed.whole
        overrides = whole is not None and getattr(self._options.cpu_cls, name) is not getattr(Optimizer, name)
        return getattr(whole.optimizer, name) if whole is not None and overrides else None

    def keep_on_device(self, nbytes: int) -> int:
        """From the next step on so many bytes of streamed state stay on the device between steps, by whole
        buckets, the first ones; 0: none, as at first. Returns how many do. No bit changes. Blocks the host.
        Raises torch.OutOfMemoryError where the device has no room; less stays then."""
        self._runner.refuse_in_capture("keep_on_device()")
        with self._steps.stepping:
            return self._runner.keep(nbytes)

    def synchronize_parameters(self) -> None:
        """Let the current lane's work from here on see the new weights. Blocks the host until the step under
        way has been issued. Raises OffloadError if it failed."""
        self._steps.raise_failure()
        self._steps.await_weights()

    def update_fp32_param_by_new_param(self) -> None:
        """New weights were written into the parameters: masters of parameters that differ are those, whole.
        Each step by itself takes over the elements that differ."""
        self._runner.take_changes()
        with torch.no_grad():
            for member in self.members:
                self.placed.reload_master(member)

    # -- state -----------------------------------------------------------------------------------------------
    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """A dictionary by parameter, as torch's: what its optimizer keeps, and "master_param" with
        param_update_in_fp32. It may be held, and what is written counts in the next step. Tensors of
        offloaded parameters are those that steps read and write, on the host; one that is put there is copied
        by the next step. A look blocks the host for the step under way; while somebody holds the dictionary,
        an entry or a tensor of it, step() ends when all state is there."""
        with self._steps.stepping:
            self._runner.rest()
            return self._runner.state.look()  # type: ignore[return-value]

    @state.setter
    def state(self, value: Any) -> None:
        if self._built:  # torch's own constructor sets it, too
            with self._steps.stepping:
                self._runner.rest()
                self._runner.state.replace(value)

    def dummy_step(self) -> None:
        """Fill `state` as a first step would, without changing a weight: so that a checkpoint can be loaded
        in place."""
        self._runner.take_changes()
        self.placed.refresh()
        for member in self.members:
            self.placed.master_of(member)
        fill_state(self.sub_optimizers)
        self.placed.note_stepped(self.placed.places)
        self._runner.state.note_step()

    def state_dict(self) -> dict[str, Any]:
        """torch's form, with a copy of what is on the host, and "hybrid": places, share and layout. Numbers,
        strings and tensors only. All state is on the host once some of it is: torch.distributed.checkpoint
        takes one device only."""
        with self._steps.stepping:
            if (own := self._own("state_dict")) is not None:
                return dict(self._runner.called(own))
            with without_hooks(self, "_state_dict_post_hooks"):  # which are called with all of it
                packed = super().state_dict()
            copy_to_host(self.placed, self.param_groups, packed["state"])
            packed["hybrid"] = self.placed.describe()
        for hook in self._optimizer_state_dict_post_hooks.values():
            packed = hook(self, packed) or packed
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """State of the same parameters, from any split and any fraction, or from a plain torch optimizer; the
        rules of the wrapped classes for what they load (`__setstate__`) hold. Everything is checked before
        anything is changed; ValueError names the parameter. Blocks the host."""
        loaded = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = hook(self, loaded) or loaded
        with self._steps.stepping:
            pairs = paired(self.param_groups, loaded) if self._own("load_state_dict") is None else []
            self.placed.loaded |= {id(parameter) for key, parameter in pairs if loaded["state"].get(key)}
            if not self.placed.is_grouped_as(self.param_groups):
                self._steps.settle()
                self._runner.regroup()
            whole, order = self.placed.whole, matched(self.placed, pairs, loaded)
            self._runner.forget_step()
            if whole is not None and whole.optimizer is not None:
                self._load_by_class(whole.optimizer, order, loaded)
            else:
                self._load(order, loaded)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_by_class(
        self, optimizer: Optimizer, order: Mapping[Any, ParamView], loaded: Mapping[str, Any]
    ) -> None:
        """The class loads a copy itself, where one optimizer steps all."""
        given = copied({key: value for key, value in loaded.items() if key != "hybrid"})
        state = given.get("state", {})
        for key in order.keys() & state.keys():
            state[key] = {
                name: local_of(value)
                for name, value in state[key].items()
                if name != MASTER or self.param_update_in_fp32
            }
        self._runner.called(optimizer.load_state_dict, given)
        self._runner.state.forget()
        self._runner.regroup()

    def _load(self, order: Mapping[Any, ParamView], loaded: Mapping[str, Any]) -> None:
        groups = deepcopy(loaded["param_groups"])
        for group, saved in zip(self.param_groups, groups, strict=True):
            kept: dict[str, Any] = {key: group[key] for key in ("params", "param_names") if key in group}
            group.clear()
            group.update({**kept, **saved, "params": kept["params"]})
        state = {order[key].parameter: dict(entry) for key, entry in loaded["state"].items() if key in order}
        classes = self._options.cpu_cls, self._options.gpu_cls
        with_class_rules(classes, self.param_groups, state, self.defaults)
        self._runner.regroup()
        entries = {self.placed.of[id(parameter)]: entry for parameter, entry in state.items()}
        others = {key: entry for key, entry in loaded["state"].items() if entry and key not in order}
        self._runner.state.load(entries, deepcopy(others))

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: its state lies in host memory of this "
            "process; save its state_dict(), and load it into one that is built where it is needed"
        )

    def close(self) -> None:
        """End the workers and give the host memory back; the default engine closes if nobody else uses it.
        Blocks the host. An optimizer that is dropped does the same, but closes no engine."""
        self._end()
        self.engine.detach(self._runner)
        if self._closes_engine:
            self.engine.close_unused()

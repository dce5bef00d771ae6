"""What stands in place of Megatron-core's hybrid optimizer: its name, its arguments and its methods, over
`offload.HybridDeviceOptimizer`.

Megatron makes one over the whole model and then throws it away for one over this rank's shards, made of
`defaults`; or it puts float32 copies into the param groups where the parameters were. So all that is given is
only written down at first.

One invariant: nothing is pinned, fetched or moved before the first call that needs it; from then on the
parameters are fixed, and param groups that hold others are refused. What somebody wrote into `state` by then
counts in every call after it, except for counts of steps written between a load and the next step.
"""

from __future__ import annotations

import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import offload
import offload.fine_grained_activation_offload as engine_page
from offload import OffloadError

OPTIMIZER_PAGE = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"

MASTER = "master_param"

MAPS_OF_MEGATRON = frozenset(
    {
        "cpu_copy_map_grad",
        "cpu_copys_map_gpu_param",
        "cpu_param_groups",
        "fp32_param_to_orig_param",
        "gpu_param_groups",
        "gpu_params_map_cpu_copy",
        "inner_param_to_orig_param",
        "param_to_fp32_param",
        "param_to_inner_param",
    }
)
"""Attributes that no module of core 0.16 to 0.19 reads but the one that is replaced."""


def kwargs_of_both(kwargs: Mapping[str, Any], classes: Sequence[type[Optimizer]]) -> dict[str, Any]:
    """What every class takes. Megatron says `bias_correction` and `fused` to classes of which one knows the
    first and one the second.

    Raises ValueError for any other argument that a class does not take, and for bias_correction=False, which
    torch's cannot do.
    """
    chosen = dict(kwargs)
    for cls in classes:
        known = inspect.signature(cls).parameters
        for key, value in kwargs.items():
            if key in known or any(
                parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()
            ):
                continue
            if key != "fused" and not (key == "bias_correction" and value is True):
                raise ValueError(
                    f"{key}={value!r} is given, and {cls.__name__} takes no {key}; both optimizer classes "
                    "get all arguments"
                )
            chosen.pop(key, None)  # on the host the fused kernel is asked for anyway, where there is one
    return chosen


class _Hybrid(offload.HybridDeviceOptimizer):
    """The engine's optimizer, which reads `decoupled_grad` at a fraction of 0, too: a subclass does."""


class HybridDeviceOptimizer(Optimizer):
    """Megatron's class of this name. Offloaded parameters are stepped by the host, all of them, so that every
    replica has the same bits.

    Gradients leave at step(): Megatron's are final only once they are reduced. step() returns when compute
    has been made to wait for the weights, so whatever reads them next may be issued at once.
    """

    defaults: dict[str, Any]

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
        **kwargs: Any,
    ) -> None:
        """Takes Megatron's arguments, which are `defaults`. The fraction and the classes are checked when the
        first call builds the rest.

        Raises ValueError for an argument that one of the classes does not take. Blocks the host: never.
        """
        self._arguments: dict[str, Any] = {
            "offload_fraction": offload_fraction,
            "cpu_optimizer_cls": cpu_optimizer_cls,
            "gpu_optimizer_cls": gpu_optimizer_cls,
            "param_update_in_fp32": param_update_in_fp32,
            "pin_cpu_grads": pin_cpu_grads,
            "pin_cpu_params": pin_cpu_params,
            "overlap_cpu_optimizer_d2h_h2d": overlap_cpu_optimizer_d2h_h2d,
        }
        self._kwargs = kwargs_of_both(
            kwargs, [cls for cls in (cpu_optimizer_cls, gpu_optimizer_cls) if cls is not None]
        )
        self._built: offload.HybridDeviceOptimizer | None = None
        self._early: Any = None  # `state` before that
        self._loaded_counts: dict[Tensor, Tensor] = {}  # until the next step, or until told to sync
        self._of_groups = dict(kwargs)
        super().__init__(params, dict(kwargs))
        self.defaults = {**self._arguments, **kwargs}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch's does. The group gets the values of the step, and none of the arguments
        that are no numbers.

        A view of a parameter, as the shards of a float32 model are, is made one that may have a gradient.
        """
        if self._built is not None:
            self._checked()
        shown, self.defaults = self.defaults, self._of_groups
        given = param_group["params"]
        param_group["params"] = [given] if isinstance(given, Tensor) else list(given)
        for parameter in param_group["params"]:
            if isinstance(parameter, Tensor) and not parameter.is_leaf:
                parameter.retain_grad()
        try:
            super().add_param_group(param_group)
            if self._built is not None:
                try:
                    self._built.add_param_group(param_group)
                except BaseException:
                    self.param_groups.pop()
                    raise
        finally:
            self.defaults = shown

    @property
    def hybrid(self) -> offload.HybridDeviceOptimizer:
        """The engine's optimizer. Blocks the host when it is built, as its constructor does, and raises what
        that raises."""
        if self._built is None:
            self._built = _Hybrid(
                self.param_groups, **self._arguments, cpu_share=1.0, **self._kwargs
            )  # its groups are the very dicts of these
            if self._early:
                self._built.state = self._early
        return self._built

    def _checked(self) -> offload.HybridDeviceOptimizer:
        """Built, over the parameters that are in the groups now."""
        hybrid = self.hybrid
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        same = len(self.param_groups) == len(hybrid.param_groups) and len(parameters) == len(hybrid.members)
        same = same and all(map(operator.is_, self.param_groups, hybrid.param_groups))
        if not same or not all(
            map(operator.is_, parameters, (member.parameter for member in hybrid.members))
        ):
            raise OffloadError(
                f"the param groups hold {len(parameters):,} parameters in {len(self.param_groups)} groups, "
                "which are not the very "
                f"{len(hybrid.members):,} in {len(hybrid.param_groups)} that their state was made for; make "
                "a new optimizer for others"
            )
        return hybrid

    # -- the step --------------------------------------------------------------------------------------------
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See offload.HybridDeviceOptimizer. Raises OffloadError in a capture: half of the step is the
        host's."""
        if engine_page.is_graph_capturing():
            raise OffloadError(
                "step() is captured into a CUDA graph, and the host's part of it would not be replayed; set "
                "optimizer_cuda_graph=False"
            )
        hybrid = self._checked()
        if self._loaded_counts:
            # Megatron puts counts of before a load back into `state`, where its own class never reads them
            for parameter, count in self._loaded_counts.items():
                hybrid.state[parameter]["step"] = count
            self._loaded_counts = {}
        return hybrid.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops or zeroes gradients, as torch's does, `decoupled_grad` too."""
        if self._built is not None:
            self._built.zero_grad(set_to_none)
            return
        super().zero_grad(set_to_none)
        for parameter in chain.from_iterable(group["params"] for group in self.param_groups):
            decoupled = getattr(parameter, "decoupled_grad", None)
            if decoupled is not None and set_to_none:
                parameter.decoupled_grad = None
            elif decoupled is not None:
                decoupled.zero_()

    def dummy_step(self) -> None:
        """Fill `state` with zeros, to load into. Megatron's own steps by random gradients; this leaves the
        weights as they are."""
        self._checked().dummy_step()

    def update_fp32_param_by_new_param(self) -> None:
        """Masters follow the weights. Raises OffloadError if the parameters are masters themselves, whose
        weights only Megatron knows."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        mine = [
            isinstance(parameter, nn.Parameter) or parameter._is_view() or parameter.dtype != torch.float32
            for parameter in parameters
        ]
        if parameters and not any(mine):
            raise OffloadError(
                f"update_fp32_param_by_new_param: the {len(parameters):,} parameters are float32 masters of "
                "Megatron's; the model's new "
                "weights are not among them, so training would go on from the old ones; set "
                "use_precision_aware_optimizer=True"
            )
        if self._built is not None:  # else they are fetched when it is
            self._checked().update_fp32_param_by_new_param()

    # -- the optimizers inside -------------------------------------------------------------------------------
    @property
    def cpu_optimizers(self) -> list[Optimizer]:
        return self.hybrid.cpu_optimizers

    @property
    def gpu_optimizer(self) -> Optimizer | None:
        return self.hybrid.gpu_optimizer

    @property
    def sub_optimizers(self) -> list[Optimizer]:
        return self.hybrid.sub_optimizers

    def __getattr__(self, name: str) -> Any:
        """The constructor's arguments, as Megatron's class has them."""
        arguments = vars(self).get("_arguments", {})
        if name in arguments:
            return arguments[name]
        if name in MAPS_OF_MEGATRON:
            raise AttributeError(
                f"this HybridDeviceOptimizer has no {name}: masters and moments are ranges of pinned "
                "buckets, not tensors of their own; "
                f"state[parameter] has a parameter's, {MASTER!r} among them, and hybrid.place_of(parameter) "
                "says where they are"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- state -----------------------------------------------------------------------------------------------
    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """By parameter: empty before the first step, dummy step or load; see offload.HybridDeviceOptimizer.
        Blocks the host for the step under way.
        """
        return self._early if self._built is None else self._built.state

    @state.setter
    def state(self, value: Any) -> None:
        if vars(self).get("_built") is None:
            self._early = value
        else:
            self._built.state = value  # type: ignore[union-attr]

    def _sync_hdo_state_to_sub_optimizers(self) -> None:
        """Megatron's word for: what was written into `state` counts from now on. But for counts of steps it
        does so anyway."""
        self._checked()
        self._loaded_counts = {}

    def state_dict(self) -> dict[str, Any]:
        """Refers to the tensors of `state`, as torch's does. Places are not in it: they follow from the
        arguments alone."""
        if self._built is not None:
            self._checked()
        packed = super().state_dict()
        for group, own, _ in self._counts():
            if "step" in own:
                packed["param_groups"][group]["step"] = own["step"]
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """A state dict of this class, of Megatron's own or of a torch optimizer of the class. Checked before
        anything changes."""
        loaded = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = hook(self, loaded) or loaded
        hybrid = self._checked()
        self._load(hybrid, loaded)
        counts = ((parameter, entry.get("step")) for parameter, entry in hybrid.state.items())
        self._loaded_counts = {
            parameter: count.clone() for parameter, count in counts if isinstance(count, Tensor)
        }
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load(self, hybrid: offload.HybridDeviceOptimizer, given: Mapping[str, Any]) -> None:
        """Counts of groups go to the groups that keep one, and to their parameters."""
        loaded = dict(given)
        counts = self._counts()
        groups: list[dict[str, Any]] = [dict(group) for group in loaded.get("param_groups", ())]
        if "state" in loaded and len(groups) == len(self.param_groups):
            state = loaded["state"] = {key: dict(entry) for key, entry in loaded["state"].items()}
            for group, own, places in counts:
                count = groups[group].get("step", own.get("step"))
                for key in (
                    groups[group]["params"][place] for place in places if place < len(groups[group]["params"])
                ):
                    if count is not None and state.get(key):
                        state[key].setdefault("step", torch.tensor(float(count)))
        steps = [group.pop("step", None) for group in groups]
        if groups:
            loaded["param_groups"] = [
                {key: value for key, value in group.items() if key not in self._arguments} for group in groups
            ]
        hybrid.load_state_dict(loaded)
        for group, own, _ in counts:
            if steps[group] is not None:
                own["step"] = int(steps[group])

    def _counts(self) -> list[tuple[int, dict[str, Any], list[int]]]:
        """Where the device's optimizer counts steps in its groups, as those of Transformer Engine and Apex
        do, and not by parameter, as torch's: the index of a group here, the optimizer's own group, and the
        places of its parameters in the one here.
        """
        hybrid = self._built
        optimizer = hybrid.gpu_optimizer if hybrid is not None else None
        if (
            hybrid is None
            or optimizer is None
            or isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
        ):
            return []
        own_of = {id(tensor): own for own in optimizer.param_groups for tensor in own["params"]}
        stepped = {id(member.parameter): id(hybrid.placed.master_of(member)) for member in hybrid.members}
        found = []
        for index, group in enumerate(self.param_groups):
            places = [
                place for place, parameter in enumerate(group["params"]) if stepped[id(parameter)] in own_of
            ]
            if places:
                found.append((index, own_of[stepped[id(group["params"][places[0]])]], places))
        return found

    def close(self) -> None:
        """End the workers and give the host memory back. Blocks the host."""
        if self._built is not None:
            self._built.close()


def names_of_optimizer_page(page: ModuleType) -> dict[str, Any]:
    """What OPTIMIZER_PAGE offers. page: the module that will hold the names; none depends on it."""
    return {"HybridDeviceOptimizer": HybridDeviceOptimizer}

"""verl: an engine whose `to(device, model, optimizer, grad)` parks and wakes.

    from offload.integrations.verl import register
    register()                                  # before the workers build their engines
    # actor.strategy=fsdp2_parked, with param_offload and optimizer_offload as for fsdp2

What verl moves by `p.data = p.data.to("cpu")` goes through pinned memory at the link's rate, and stays the
tensor that it is. One invariant: verl's own moves do not run beside ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verl.workers.engine.base import EngineRegistry

from offload.park import Parked, park
from offload.park.report import Kind


def register(
    backend: str = "fsdp2_parked",
    of: str = "fsdp2",
    model_types: Sequence[str] = ("language_model", "value_model"),
    device: str = "cuda",
) -> None:
    """Register the engines of backend `of` anew under the name `backend`, with moves by park and wake."""
    for model_type in model_types:
        engine = EngineRegistry._engines[model_type][of][device]
        EngineRegistry.register(model_type=model_type, backend=backend, device=device)(parking(engine))


def parking(engine: Any) -> Any:
    """A class like verl's engine for FSDP2, that moves its `module` and `optimizer` by park and wake."""

    class Parking(engine):  # type: ignore[misc]
        _parked: Parked | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            own = self.__dict__
            self._offloads: tuple[bool, bool] = own["_is_offload_param"], own["_is_offload_optimizer"]
            own.update(_is_offload_param=False, _is_offload_optimizer=False)  # which are verl's own moves

        @property
        def is_param_offload_enabled(self) -> bool:
            return self._offloads[0]

        @property
        def is_optimizer_offload_enabled(self) -> bool:
            return self._offloads[1]

        def initialize(self) -> None:
            super().initialize()
            self.to("cpu", self._offloads[0], self._offloads[1], self._offloads[0])

        def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
            chosen: dict[Kind, bool] = {"weights": model, "gradients": grad, "optimizer": optimizer}
            kinds = [kind for kind, moves in chosen.items() if moves]
            if device == "cpu" and kinds:  # CUDA graphs of a generator beside it read memory of its own
                self._parked = park(self.module, self.optimizer, kinds=kinds, ignore_graphs=True)
            elif self._parked is not None and (away := [k for k in kinds if k in self._parked.parked]):
                self._parked.wake(*away)

        def _awake(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            away = () if self._parked is None else self._parked.parked
            self.to("")
            try:
                return call(*args, **kwargs)
            finally:
                self.to("cpu", *(kind in away for kind in ("weights", "optimizer", "gradients")))

        def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            return self._awake(super().save_checkpoint, *args, **kwargs)

        def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            return self._awake(super().load_checkpoint, *args, **kwargs)

        def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
            """Return what verl reads later: the weights stay awake until verl moves them."""
            self.to("", optimizer=False, grad=False)
            return super().get_per_tensor_param(*args, **kwargs)

    return Parking

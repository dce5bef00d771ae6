"""Lightning, as `lightning` or as `pytorch_lightning`: a callback.

    trainer = Trainer(callbacks=[OffloadCallback(module="model", mode="groups", device_limit="20GB")])

One invariant: hooks are on from the begin of each fit's training to its end, also where an exception ends it.
Figures go to the module's own `log_dict`, so into every logger of the Trainer.
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from offload.apply import Applied, apply
from offload.integrations import step_figures, with_optimizer
from offload.modules.settings import WITHOUT_BLOCKS
from offload.policies import without_policy


class OffloadCallback(Callback):  # type: ignore[misc]
    """Offloads the LightningModule, or a module of it, while it is fitted.

    module: name of the submodule that `training_step` calls, such as "model". "": the LightningModule itself,
        whose blocks are found; a mode that takes all saved tensors needs the name, as Lightning calls
        `training_step` and not the module.
    arguments: those of `offload.apply`; `optimizer=True` is the one of `configure_optimizers`.

    Raises ValueError when training starts, for what `apply` refuses; nothing has moved then.
    """

    def __init__(self, module: str = "", **arguments: Any) -> None:
        arguments = without_policy(arguments)
        if not module and arguments.get("mode", False) in WITHOUT_BLOCKS:
            raise ValueError(
                f"mode={arguments['mode']!r} takes what the forward of a module saves, and Lightning calls "
                "training_step() of the LightningModule, not its forward: name the module that it calls, as "
                "in OffloadCallback(module='model', ...)"
            )
        self.handle: Applied | None = None
        self._module = module
        self._arguments = arguments

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The strategy has wrapped and moved the module; checkpoints are loaded."""
        self.remove()
        found = dict(pl_module.named_modules()).get(self._module)
        if found is None:
            children = ", ".join(name for name, _ in pl_module.named_children())
            raise ValueError(
                f"module={self._module!r} names no module of {type(pl_module).__name__}; it has {children}"
            )
        self.handle = apply(found, **with_optimizer(self._arguments, trainer.optimizers))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.log_dict(step_figures(self.handle))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the hooks off. `handle.report()` stays."""
        if self.handle is not None:
            self.handle.remove()

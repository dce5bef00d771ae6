"""transformers' Trainer, and TRL's trainers, which are Trainers too: a callback.

    callback = OffloadCallback(mode="groups", device_limit="20GB").add_to(trainer)
    trainer.train()
    print(callback.handle.report())

`apply` is called when training begins: after the Trainer has built the model (`model_init`), set its gradient
checkpointing, loaded a checkpoint and wrapped it in DDP, which streamed weights ask for. One invariant: no
hook of an earlier training is left then, also where that ended by an exception.
"""

from __future__ import annotations

import functools
from typing import Any, Self

from transformers import TrainerCallback

from offload.apply import Applied, apply, is_applied
from offload.integrations import step_figures, with_optimizer
from offload.park import parked
from offload.policies import without_policy
from offload.telemetry.speaker import Once, speaker

logger = speaker(__name__)


class OffloadCallback(TrainerCallback):  # type: ignore[misc]
    """Offloads the Trainer's model from the begin of each training to its end.

    handle: of an `apply` that was called before, for a model that does not fit on the device as it is; the
        callback logs its figures, and does not remove it.
    park_while_generating: gradients and optimizer state wait on the host while the model, or vLLM beside it,
        generates (TRL's GRPOTrainer and others). No callback of TRL's surrounds that: what is wrapped, from
        the begin of a training to its end, is the public `generate` and `generate_batch` of the model and,
        after `add_to`, of `trainer.vllm_generation`. CUDA graphs of the generator are taken to read neither.
        Without other arguments nothing else is offloaded.
    arguments: those of `offload.apply`, instead of a handle; `optimizer=True` is the Trainer's.

    Use `add_to`: callbacks that a Trainer is given stand behind its reporters, which have written a log
    before a later one can add to it. Raises ValueError, when training begins, for settings of the Trainer
    that move or recompute the same tensors, and for what `apply` refuses; nothing has moved then.
    """

    def __init__(
        self, handle: Applied | None = None, *, park_while_generating: bool = False, **arguments: Any
    ) -> None:
        if handle is not None and arguments:
            raise ValueError(f"OffloadCallback got a handle and {', '.join(arguments)}: give one of the two")
        self.handle = handle
        self._arguments = None if handle is not None else without_policy(arguments)
        self._parks, self._applies = park_while_generating, bool(arguments) or not park_while_generating
        self._trainer: Any = None
        self._wrapped: list[tuple[Any, str]] = []
        self._is_first = False  # of the Trainer's callbacks
        self._said = Once()

    def add_to(self, trainer: Any) -> Self:
        """Add this callback to the Trainer before its reporters."""
        trainer.callback_handler.callbacks.insert(0, self)
        self._is_first, self._trainer = True, trainer
        return self

    def remove(self) -> None:
        """Take the hooks off that this callback has put on: after an exception. `handle.report()` stays."""
        if self.handle is not None and self._arguments is not None:
            self.handle.remove()
        while self._wrapped:
            owner, name = self._wrapped.pop()
            delattr(owner, name)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **others: Any
    ) -> None:
        self.remove()
        if self._parks:
            for owner in (model, getattr(self._trainer, "vllm_generation", None)):
                for name in ("generate", "generate_batch"):
                    if hasattr(owner, name) and name not in vars(owner):
                        self._wrap(owner, name, model, optimizer)
        if self._arguments is None:
            if not is_applied(model):
                raise ValueError(
                    f"OffloadCallback({self.handle!r}): the Trainer trains another {type(model).__name__}; "
                    "with model_init=, give the callback the arguments of apply instead of a handle"
                )
            return
        if not self._applies:
            return
        _check(args, self._arguments.get("mode"))
        self.handle = apply(model, **with_optimizer(self._arguments, [optimizer]))

    def _wrap(self, owner: Any, name: str, model: Any, optimizer: Any) -> None:
        generate = getattr(owner, name)

        @functools.wraps(generate)
        def while_parked(*args: Any, **kwargs: Any) -> Any:
            with parked(model, optimizer, kinds=("gradients", "optimizer"), ignore_graphs=True):
                return generate(*args, **kwargs)

        setattr(owner, name, while_parked)
        self._wrapped.append((owner, name))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if "loss" not in logs:  # of an evaluation, or of the whole training
            return
        figures = step_figures(self.handle)
        logs.update(figures)
        state.log_history[-1].update(figures)
        if figures and not self._is_first and args.report_to and self._said.first("behind"):
            logger.warning(
                f"figures do not reach {', '.join(args.report_to)}, which stand before this callback: use "
                "OffloadCallback(...).add_to(trainer) instead of callbacks=; log_history has them"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.remove()


def _check(args: Any, mode: object) -> None:
    """ValueError for what the Trainer itself would do to the same tensors."""
    # Transformers 6 has the first name alone. Where there are both, the older mirrors it.
    renamed = hasattr(args, "activation_checkpointing")
    name = "activation_checkpointing" if renamed else "gradient_checkpointing"
    checkpoints = dict(getattr(args, f"{name}_kwargs") or {})
    if getattr(args, "activation_offloading", False) or checkpoints.get("offload"):
        raise ValueError(
            f"{type(args).__name__} offloads activations itself, by activation_offloading=True or by "
            f"'offload' in {name}_kwargs, and so does OffloadCallback: use one of the two"
        )
    if getattr(args, name) and mode in ("auto", "selective"):
        raise ValueError(
            f"{name}=True of {type(args).__name__}, which is TRL's default, recomputes all layers, and "
            f"mode={mode!r} chooses what to recompute: set {name}=False"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"the Trainer would copy the model to {args.n_gpu} GPUs of one process (nn.DataParallel), and "
            "hooks are of one of them: start it with torchrun, or let it see one GPU (CUDA_VISIBLE_DEVICES)"
        )

"""The drop-in for torch's checkpoints, under the names that axolotl's users know."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from offload import marks
from offload.checkpoint import drop_in


def patch_hidden_states_offload(model: nn.Module | None = None) -> None:
    """From now on every `torch.utils.checkpoint.checkpoint` of this process, reentrant or not, leaves its
    input on the host: the first tensor on the device among its arguments by position, in a group called
    `hidden_states` of the process's manager. What it computes is torch's own.

    It is for code that checkpoints and cannot be changed; `offload.apply(model, mode="hidden_states")` is for
    one model and needs no checkpoints, and `hidden_states_offload()` is for a stretch of code. Buffers are as
    torch's checkpoints leave them: what a block writes in its forward, such as a batch norm's statistics, is
    written again in its recompute. Called again, it does nothing.

    model: looked at only. Raises ValueError if a part of its weights is frozen; warns if it has an adapter.
    Raises OffloadError where this torch saves the input of its checkpoints elsewhere than those tested.
    """
    if model is not None:
        drop_in.check_model(model)
    drop_in.patch(marks.default_manager)


def unpatch_hidden_states_offload() -> None:
    """Undo `patch_hidden_states_offload`: torch's own functions are there again. A backward that is still to
    come finds its tensors. Called again, it does nothing."""
    drop_in.unpatch()


def hidden_states_offload() -> AbstractContextManager[None]:
    """`patch_hidden_states_offload` for the forwards inside a `with`; their backward may come after it."""
    return drop_in.patched(marks.default_manager)

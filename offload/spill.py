"""Former name of `offload.compat.stagehand.activations`."""

from offload.compat.stagehand.activations import *  # noqa: F403
from offload.compat.stagehand.activations import __all__ as __all__

"""The drop-in for Megatron-core: its models and schedules as they are, with this engine under their offload
marks.

    from offload.parallel import megatron
    megatron.install()                              # before the first import of megatron.core
    from megatron.core.models.gpt import GPTModel   # fine_grained_activation_offloading=True now means this
                                                    engine
    from megatron.core.optimizer import get_megatron_optimizer  # and optimizer_cpu_offload=True its hybrid
    optimizer

Megatron keeps its marks in one module, `PAGE`, and its hybrid optimizer in another, `OPTIMIZER_PAGE`.
`install` sees to it that an import of them finds the names of `megatron_page` and of `megatron_optimizer`
beside this file.

One invariant: nothing is asked of Megatron. It is not imported here and no file of it is read, so it may be
absent, or there in part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from offload import OffloadError

from .megatron_optimizer import OPTIMIZER_PAGE, HybridDeviceOptimizer, names_of_optimizer_page
from .megatron_page import PAGE, GraphCaptureError, names_of

__all__ = ["OPTIMIZER_PAGE", "PAGE", "GraphCaptureError", "HybridDeviceOptimizer", "install", "uninstall"]

PAGES: dict[str, Callable[[ModuleType], dict[str, Any]]] = {
    PAGE: names_of,
    OPTIMIZER_PAGE: names_of_optimizer_page,
}


class _PageFinder(MetaPathFinder, Loader):
    """Answers for PAGES alone. The import system does the rest, so that the parent packages get their
    attributes as usual."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, origin=__name__) if fullname in PAGES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name, "Megatron's names, this project's engine.")

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(PAGES[module.__name__](module))


def _installed() -> _PageFinder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, _PageFinder)), None)


def _is_ours(module: ModuleType | None) -> bool:
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _PageFinder)


def install() -> None:
    """From now on an import of PAGES finds this engine. Megatron need not be installed, nor whole; a second
    call changes nothing.

    Raises OffloadError if one of Megatron's own pages is already loaded: its modules hold names of it, so
    this one would be asked by some of them only. Blocks the host: never.
    """
    for page in PAGES:
        loaded = sys.modules.get(page)
        if loaded is not None and not _is_ours(loaded):
            raise OffloadError(
                f"{page} is already loaded from {getattr(loaded, '__file__', None) or 'an unknown place'}, "
                "and Megatron's modules hold its "
                "names; call parallel.megatron.install() before the first import of megatron.core"
            )
    if _installed() is None:
        sys.meta_path.insert(0, _PageFinder())


def uninstall() -> None:
    """Undo `install`: the next import of PAGES finds Megatron's own. Modules that were loaded in between keep
    the names they took."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _PageFinder)]
    for page in PAGES:
        loaded = sys.modules.get(page)
        if loaded is None or not _is_ours(loaded):
            continue
        del sys.modules[page]
        package, _, name = page.rpartition(".")
        parent = sys.modules.get(package)
        if parent is not None and vars(parent).get(name) is loaded:
            delattr(parent, name)

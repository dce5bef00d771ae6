"""The drop-in for Megatron-core: its models and schedules as they are, with this engine under their offload marks.

    from parallel import megatron
    megatron.install()                              # before the first import of megatron.core
    from megatron.core.models.gpt import GPTModel   # fine_grained_activation_offloading=True now means this engine

Megatron keeps its marks in one module, `PAGE`. `install` sees to it that an import of PAGE finds the names of `parallel.megatron_page`.

One invariant: nothing is asked of Megatron. It is not imported here and no file of it is read, so it may be absent, or there in part.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from offload import OffloadError
from parallel.megatron_page import PAGE, GraphCaptureError, names_of

__all__ = ["PAGE", "GraphCaptureError", "install", "uninstall"]


class _PageFinder(MetaPathFinder, Loader):
    """Answers for PAGE alone. The import system does the rest, so that the parent package gets its attribute as usual."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, origin=__name__) if fullname == PAGE else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name, "Fine-grained activation offloading: Megatron's names, this project's engine.")

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(names_of(module))


def _installed() -> _PageFinder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, _PageFinder)), None)


def _is_ours(module: ModuleType | None) -> bool:
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _PageFinder)


def install() -> None:
    """From now on an import of PAGE finds this engine. Megatron need not be installed, nor whole; a second call changes nothing.

    Raises OffloadError if Megatron's own page is already loaded: its models hold names of it, so this one would be asked by some of them
    only. Blocks the host: never.
    """
    loaded = sys.modules.get(PAGE)
    if loaded is not None and not _is_ours(loaded):
        raise OffloadError(
            f"{PAGE} is already loaded from {getattr(loaded, '__file__', None) or 'an unknown place'}, and Megatron's modules hold its "
            "names; call parallel.megatron.install() before the first import of megatron.core"
        )
    if _installed() is None:
        sys.meta_path.insert(0, _PageFinder())


def uninstall() -> None:
    """Undo `install`: the next import of PAGE finds Megatron's own. Modules that were loaded in between keep the names they took."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _PageFinder)]
    loaded = sys.modules.get(PAGE)
    if loaded is None or not _is_ours(loaded):
        return
    del sys.modules[PAGE]
    package, _, name = PAGE.rpartition(".")
    parent = sys.modules.get(package)
    if parent is not None and vars(parent).get(name) is loaded:
        delattr(parent, name)

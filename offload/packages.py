"""`offload.parallel` and `offload.moe`: their folders lie beside `offload` in a checkout, and in it in a
wheel.

So a wheel installs `offload` alone at top level, and a user's own `parallel` or `moe` works beside it. The
packages' former top-level names are the same modules: in a checkout, and, once `offload` is imported, where
it is installed, with a DeprecationWarning; a package of the user's that has the name comes first.

One invariant: a file of these folders is loaded once, as a module of `offload`, whatever name it is imported
by.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent
_BESIDE = {name: _HERE.parent / name for name in ("parallel", "moe") if not (_HERE / name).is_dir()}
"""Folders of a checkout, by name; none where a wheel is installed."""
_NAMES = ("parallel", "moe")


class PackageFinder(MetaPathFinder, Loader):
    """Finds the folders of a checkout, and loads a former name as the module that has it now."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        top, _, below = fullname.partition(".")
        if top == "offload" and below in _BESIDE:
            folder = str(_BESIDE[below])
            return spec_from_file_location(
                fullname, f"{folder}/__init__.py", submodule_search_locations=[folder]
            )
        return ModuleSpec(fullname, self) if top in _NAMES and self._is_ours(top, below) else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if not _BESIDE:
            warnings.warn(
                f"{name} is offload.{name} now; its former name goes with the next minor version",
                DeprecationWarning,
                stacklevel=2,
            )
        sys.modules[name] = import_module(f"offload.{name}")

    def _is_ours(self, top: str, below: str) -> bool:
        if below:  # the package itself is imported before
            return sys.modules[top] is sys.modules.get(f"offload.{top}")
        return not any(finder.find_spec(top, None) for finder in sys.meta_path if finder is not self)


def install() -> None:
    """Import of these names works from here on. Does nothing the second time."""
    if not any(isinstance(finder, PackageFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, PackageFinder())

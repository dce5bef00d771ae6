"""Tokens and experts: routing, dispatch, and where an expert's activations and weights may leave the device.

The package is `offload.moe`. Its modules import each other relatively, as the folder lies beside `offload` in
a checkout (offload/packages.py).

One invariant: nothing here touches a stream, an event or pinned memory; it marks groups and the engine moves
them. The modules arrive with the issue that needs them.
"""

import sys
from importlib import import_module

if __name__ == "moe":  # found at the top of a checkout: one module for both names
    sys.modules[__name__] = import_module("offload.moe")

"""Tokens and experts: a router, its dispatch, grouped experts, and a small GPT of them whose activations may
leave the device.

    model = offload.moe.MixtureGPT(config, offload_modules={"expert_fc1", "moe_act"})

The package is `offload.moe`. Its modules import each other relatively, as the folder lies beside `offload` in
a checkout (offload/packages.py).

One invariant: nothing here touches a stream, an event or pinned memory; it marks groups and the engine moves
them. `config` is the shape, `router` decides, `dispatch` brings rows to their experts and back, `products`
multiplies groups of rows, `experts` and `layer` are the modules, `model` cuts them into pipeline stages,
`sizes` counts what they save.
Shapes are in names: x_TD is (tokens, width); each file has a legend.
"""

import sys
from importlib import import_module

if __name__ == "moe":  # found at the top of a checkout: one module for both names
    sys.modules[__name__] = import_module("offload.moe")
else:
    from .config import GROUP_NAMES, MixtureConfig, Placement
    from .experts import GroupedExperts
    from .layer import DecoderLayer, Mixture, replaying_contexts
    from .model import MixtureGPT, build_stage_module, layers_of_stage, stage_examples
    from .ranks import expert_parameters, names_of_this_rank
    from .router import Routing, TopKRouter
    from .sizes import saved_bytes_of_layer

__all__ = [
    "GROUP_NAMES",
    "DecoderLayer",
    "GroupedExperts",
    "Mixture",
    "MixtureConfig",
    "MixtureGPT",
    "Placement",
    "Routing",
    "TopKRouter",
    "build_stage_module",
    "expert_parameters",
    "layers_of_stage",
    "names_of_this_rank",
    "replaying_contexts",
    "saved_bytes_of_layer",
    "stage_examples",
]

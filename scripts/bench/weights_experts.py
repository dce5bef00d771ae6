"""Work `experts` of bench_weights.py: frozen mixtures of experts with adapters on their attention, and
tokens that are routed by Zipf's law. Rows are `nothing`, how many experts a layer there is room for, `host`,
`activations` (mode hidden_states), and `both` (it, and room for 16).

One invariant: which expert is how popular depends on the layer, and each token's noise on the step and the
layer, so that all rows, and recomputes, route alike.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import moe
import offload
from bench import gradients
from bench.table import Columns
from bench.weights import GB, LoraLinear, link_gb_s, run_steps, where_of
from moe.attention import rotation_tables

ROWS = "nothing,16,32,host,activations,both"
LAYERS, EXPERTS = 8, 64
_LEARNED = 3
_ROOM = 16
"""Experts a layer, of the row `both`."""

COLUMNS = Columns(
    "row = row | ms = step_ms:.1f | / nothing = over:.3f | law ms = law_ms:.1f | / law = over_law:.3f "
    "| copies ms = copies_ms:.1f | active GB = active_bytes:GB | / nothing = active_over:.3f "
    "| in GB = in_bytes:GB | stall ms = stall_ms:.1f | counts ms = counts_ms:.1f | found = expert_hits "
    "| missing = expert_misses | bits = compared"
)


class ZipfGate(nn.Module):
    """Gate that draws top_k experts for each token, without replacement in proportion to 1 / rank. drawn: the
    step."""

    def __init__(self, layer: int, experts: int, device: torch.device) -> None:
        super().__init__()
        self.layer, self.drawn = layer, 0
        ranks = (
            torch.randperm(experts, generator=torch.Generator(device).manual_seed(layer), device=device) + 1
        )
        self.logits = -ranks.log()

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(self.drawn * 1_009 + self.layer)
        shape = x.shape[0], self.logits.numel()
        uniform = torch.rand(shape, generator=generator, device=x.device)
        return self.logits - (-uniform.clamp_(1e-20, 1 - 2**-24).log()).log()


class Model(nn.Module):
    def __init__(self, config: moe.MixtureConfig, layers: int, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(moe.DecoderLayer(config) for _ in range(layers)).requires_grad_(False)
        for index, layer in enumerate(self.layers):
            layer.mixture.router.gate = ZipfGate(index, config.experts, device)
            for name, module in [*layer.attn.named_children()]:
                if isinstance(module, nn.Linear):
                    adapted = LoraLinear(module.in_features, module.out_features, 16)
                    adapted.base = module
                    setattr(layer.attn, name, adapted)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = (table.to(x) for table in rotation_tables(self.config))
        for layer in self.layers:
            x = layer(x, (cos, sin))
        return x


def run_row(options: argparse.Namespace) -> dict[str, Any]:
    """The row of this process."""
    device, dtype = where_of(options.tiny)
    experts, dim, hidden = (8, 512, 512) if options.tiny else (EXPERTS, 2048, 1024)
    batch, sequence = (1, 4) if options.tiny else (2, 2048)
    config = moe.MixtureConfig(
        dim=dim, heads=16, expert_hidden=hidden, experts=experts, top_k=2, sequence=sequence
    )
    torch.manual_seed(0)
    rate = link_gb_s(device)
    with torch.device(device):  # 3.2 G elements are drawn there; a CPU takes half a minute for them
        model = Model(config, LAYERS, device).to(dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    handle = _offloaded(model, options.row)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    x = torch.randn(batch, sequence, dim, device=device, dtype=dtype)

    def backward() -> None:
        for layer in model.layers:
            layer.mixture.router.gate.drawn += 1
        model(x).float().square().mean().backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(_LEARNED):  # the first ones bring weights whole, and have the bits of any other
        with gradients.deterministic():
            backward()
        step()
    found = run_steps(model, backward, step, options, device)
    figures = None if handle is None else handle.weights
    return found | {
        "link_gb_s": rate,
        "weights": None if figures is None else figures.as_dict(),
        "text": "" if handle is None else str(handle.report()),
    }


def _offloaded(model: Model, row: str) -> Any:
    if row == "nothing":
        return None
    mode = "hidden_states" if row in ("activations", "both") else None
    if row == "activations":
        return offload.apply(model, mode, blocks="layers.*")
    nbytes = {
        dim: sum(p.numel() * p.element_size() for p in model.layers.parameters() if p.dim() == dim)
        for dim in (2, 3)
    }
    number = _ROOM if row == "both" else row
    room = "host" if row == "host" else nbytes[3] * int(number) // EXPERTS + 2 * nbytes[2] // LAYERS
    return offload.apply(model, mode, weights=room, blocks="layers.*")


def derived(row: dict[str, Any], nothing: dict[str, Any] | None) -> dict[str, Any]:
    """The law: what is longer, `nothing`, or the link with what does not fit, once a pass. copies: the link
    with what was moved. Where experts are not used it may be less than the law."""
    whole = (nothing or row)["active_bytes"]
    found = {"active_over": row["active_bytes"] / whole} if whole else {}
    if row["weights"] is None or not row["link_gb_s"]:
        return found
    ms_per_byte = 1e3 / GB / row["link_gb_s"]
    lacking = 2 * max(0, row["streamed_bytes"] - row["limit_bytes"])
    law = max(row.get("nothing_ms", row["step_ms"]), lacking * ms_per_byte)
    copies_ms = row["in_bytes"] * ms_per_byte
    return found | {"law_ms": law, "over_law": row["step_ms"] / law, "copies_ms": copies_ms}

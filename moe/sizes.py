"""Bytes that one layer saves for its backward, by group.

One invariant: of what the experts and the router save it is exact; the rest is about what it is, since norms
and attention save what their kernels need.
"""

from __future__ import annotations

import torch

from .config import EXPERTS, MixtureConfig, Placement


def saved_bytes_of_layer(
    config: MixtureConfig,
    placement: Placement | None = None,
    *,
    tokens: int,
    dtype: torch.dtype,
    ranks: int = 1,
    rows: int | None = None,
) -> dict[str, int]:
    """Bytes by group that a layer saves in one forward: of each mark, set or not; with a mode of the experts,
    of "experts" in place of their marks.

    tokens: of the microbatch, sequences times their length. ranks: that share the experts. rows: those that
    reach this rank's; None: top_k for each token, on several ranks their mean. A tensor that two groups save
    is counted in the first.

        router       x (tokens * dim); probabilities (float32, tokens * experts); choice (int64) and its
                     probabilities before they are divided by their sum (float32), tokens * top_k each
        expert_fc1   the router's, and its own input (rows * dim) unless it is kept as x
        moe_act      h (rows * 2 expert_hidden), and of each row its probability
    """
    placement = Placement() if placement is None else placement
    size, width, chosen = dtype.itemsize, config.dim, tokens * config.top_k
    rows = chosen if rows is None else rows
    query, key = config.heads * config.channels, config.key_heads * config.channels
    router = size * tokens * width + 4 * tokens * config.experts + 8 * chosen
    router += 4 * (chosen + tokens) if config.normalize else 0
    router += 4 * config.experts if config.balance == "loss" else 0
    inputs = router + (size * rows * width if placement.input_on(ranks) == "permuted" else 0)
    act = (
        0
        if placement.recomputes
        else 2 * size * (rows * config.expert_hidden + tokens * config.shared_hidden)
    )
    act += size * rows if config.probabilities == "activation" else size * chosen * (width + 1)
    experts = {"expert_fc1": inputs, "moe_act": act}
    return {
        "attn_norm": 2 * size * tokens * width,
        "qkv_linear": size * tokens * width,
        "core_attn": size * tokens * (2 * query + 2 * key) + 4 * tokens * config.heads,
        "attn_proj": size * tokens * query,
        "mlp_norm": 2 * size * tokens * width,
        **(experts if placement.experts_mode is None else {EXPERTS: sum(experts.values())}),
    }

"""On the simulated device's clock: what an expert saves leaves while the attention after it computes."""

from __future__ import annotations

from typing import Any

import pytest

from moe import MixtureGPT
from offload import init_chunk_handler, step_end
from offload.device.sim import SimDevice
from tests.unit.groups.stack import build_manager, installed
from tests.unit.moe.mixtures import SMALL, assert_same, grads_of, loss_of, step, text

ATTENTION_S = 1e-3


@pytest.mark.req("S3-59")
@pytest.mark.parametrize("kept", ["permuted", "unpermuted"])
def test_an_experts_input_leaves_while_the_attention_after_it_computes(kept: Any) -> None:
    """Layer after layer: the input is sent when the experts have run, is under way when the next attention
    begins, and has left before it ends. Nobody waits, and no h was saved."""
    tokens, rows = text().numel(), text().numel() * SMALL.top_k
    config = SMALL.with_(shared_hidden=0)
    expected = step(MixtureGPT(config), (0,))
    device = SimDevice(executor="clock", d2h_gb_s=2e-2)  # an input takes a part of the attention's time
    seen: list[tuple[int, bool, bool]] = []
    with installed(build_manager(device=device, min_offloaded_tensor_size=512)):
        model = MixtureGPT(config, experts_mode="both", input_kept=kept)

        def attends(*_arguments: Any) -> None:
            begun = device.d2h.time_s > device.compute.time_s
            device.compute_for(ATTENTION_S)
            seen.append((device.d2h.copied_bytes, begun, device.d2h.time_s <= device.compute.time_s))

        for block in model.blocks.values():
            block.attn.register_forward_pre_hook(attends)
        init_chunk_handler()
        logits = model(text())
        forward_s = device.compute.time_s
        loss_of(logits, text()).backward()
        assert_same(([logits.detach()], grads_of(model)), expected)
        stats = step_end()
    # of each layer: what the router and the experts save of x, and the rows' layout is not among it
    inputs = 4 * SMALL.dim * (tokens if kept == "unpermuted" else tokens + rows)
    assert [sent for sent, _, _ in seen] == [0, inputs, 2 * inputs]
    assert [(begun, ended) for _, begun, ended in seen[1:]] == [(True, True)] * 2
    assert forward_s == pytest.approx(3 * ATTENTION_S)
    assert stats.saved_bytes == 3 * inputs

"""What a GPU computes, copies and sends, in figures with their sources.

One invariant: a figure that nobody measured says so in `assumed`, and every answer that uses it repeats that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from offload.policy.actions import Rates

_TERA = 1e12
_GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Rates of one GPU in bfloat16. Rates are in flops or bytes per second, times in seconds."""

    name: str
    memory_bytes: int
    """What one process can use."""
    matmul_flops: float
    attention_flops: float
    """Flops a second of fused causal attention's forward; those above the diagonal not counted."""
    attention_backward_flops: float
    memory_rate: float
    """Bytes that a kernel without arithmetic reads and writes."""
    call_s: float
    """Host time of one operator call of eager autograd; a step takes at least that of all its calls."""
    links: Mapping[int, Rates]
    """The link to host memory of each GPU, by the number of GPUs of a host that copy at once; 1 among
    them."""
    peer_rate: float
    """To a GPU of the same host, each way: a collective of a layer."""
    send_rate: float
    """To a GPU of the same host: hidden states from stage to stage, between computing kernels."""
    network_rate: float
    """To a GPU of another host, each way."""
    optimizer_rate: float
    """Parameters that fused AdamW steps in a second, state on the device."""
    assumed: tuple[str, ...] = ()
    """Which of these were not measured."""
    sources: Mapping[str, str] = field(default_factory=dict)

    def link(self, gpus: float) -> tuple[Rates, str]:
        """(rates of one GPU while so many of its host copy, what to say of them).

        Between two measured counts the host carries what it does for the larger one, shared by those that
        copy, and no GPU gets more than it does with the smaller one. Beyond the largest count its rates are
        taken.
        """
        below = max(count for count in self.links if count <= max(1.0, gpus))
        above = min((count for count in self.links if count >= gpus), default=None)
        fewer = self.links[below]
        if above is None:
            return fewer, f"the link was measured with {below} GPUs copying, not with {gpus:g}"
        more, part = self.links[above], above / max(1.0, gpus)
        shared = Rates(
            d2h_bytes_per_s=min(fewer.d2h_bytes_per_s, more.d2h_bytes_per_s * part),
            h2d_bytes_per_s=min(fewer.h2d_bytes_per_s, more.h2d_bytes_per_s * part),
            duplex_bytes_per_s=min(fewer.together_bytes_per_s, more.together_bytes_per_s * part),
        )
        return shared, ""

    def scaled(self, *, memory_bytes: int | None, matmul_flops: float | None, link_rate: float | None) -> Gpu:
        """A GPU of a user's figures: attention as this one's in proportion to `matmul_flops`, links to
        `link_rate`, bytes a second out of one GPU alone; the rest is this one's, and `assumed` says so. None:
        as this one has it."""
        if memory_bytes is matmul_flops is link_rate is None:
            return self
        faster = 1.0 if matmul_flops is None else matmul_flops / self.matmul_flops
        wider = 1.0 if link_rate is None else link_rate / self.links[1].d2h_bytes_per_s
        return replace(
            self,
            name="GPU of your figures",
            memory_bytes=self.memory_bytes if memory_bytes is None else memory_bytes,
            matmul_flops=self.matmul_flops * faster,
            attention_flops=self.attention_flops * faster,
            attention_backward_flops=self.attention_backward_flops * faster,
            links={
                count: Rates(
                    d2h_bytes_per_s=rates.d2h_bytes_per_s * wider,
                    h2d_bytes_per_s=rates.h2d_bytes_per_s * wider,
                    duplex_bytes_per_s=rates.together_bytes_per_s * wider,
                )
                for count, rates in self.links.items()
            },
            assumed=(
                *self.assumed,
                f"attention and links are those of {self.name} in proportion to --gpu-tflops and --link-gbs; "
                f"memory's rate, host calls, wires and what is not given are those of {self.name}",
            ),
        )


def _link(d2h: float, h2d: float, both: float) -> Rates:
    return Rates(d2h_bytes_per_s=d2h * _GIGA, h2d_bytes_per_s=h2d * _GIGA, duplex_bytes_per_s=both * _GIGA)


_SOURCES = {
    "matmul_flops": "8192 cubed in bfloat16, one H200, November 2026",
    "attention_flops": "solved from W2 and W3 of docs/benchmarks.md, which both are met within 3%",
    "memory_rate": "0.96 of the nominal rate: what W2's norms, sums and products take",
    "call_s": "host time of W5 without offload: 434 to 480 ms over 256 blocks of 48 kernels",
    "links": "one GPU; two: both directions with two copying; four: four H100 of one host at once",
    "optimizer_rate": "fused AdamW in float32, one H200",
    "send_rate": "solved from 1F1B on two H200s, 6 layers a rank; four H100s are met within 1% with it",
}
_ASSUMED = ("rates between GPUs: 0.8 of NVLink's nominal 450 GB/s in a host, 0.8 of 400 Gb/s between hosts",)
_FOUR = _link(31, 38, 43)

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="h200",
            memory_bytes=139 * (1 << 30),
            matmul_flops=697 * _TERA,
            attention_flops=540 * _TERA,
            attention_backward_flops=480 * _TERA,
            memory_rate=0.96 * 4.8 * _TERA,
            call_s=37e-6,
            links={1: _link(55.3, 55.4, 102.5), 2: _link(55.3, 55.4, 91.5), 4: _FOUR},
            peer_rate=360 * _GIGA,
            send_rate=30 * _GIGA,
            network_rate=40 * _GIGA,
            optimizer_rate=117 * _GIGA,
            assumed=(*_ASSUMED, "four H200 of one host share their link as four H100 do"),
            sources=_SOURCES,
        ),
        Gpu(
            name="h100",
            memory_bytes=79 * (1 << 30),
            matmul_flops=697 * _TERA,
            attention_flops=540 * _TERA,
            attention_backward_flops=480 * _TERA,
            memory_rate=0.96 * 3.35 * _TERA,
            call_s=37e-6,
            links={1: _link(55, 54.7, 89), 4: _FOUR},
            peer_rate=360 * _GIGA,
            send_rate=30 * _GIGA,
            network_rate=40 * _GIGA,
            optimizer_rate=82 * _GIGA,
            assumed=(*_ASSUMED, "an H100 multiplies as fast as an H200, and its memory is 3.35 TB/s"),
            sources=_SOURCES,
        ),
    )
}


def _published(
    name: str, memory_gb: float, tflops: float, memory_tb_s: float, link_gb_s: float, peer_gb_s: float
) -> Gpu:
    """A card that nobody measured here, from its data sheet: memory, dense bfloat16 products, the memory's
    rate, and one way of its link to the host and to a GPU beside it. It has an H100's share of these."""
    like, faster = GPUS["h100"], tflops / 989
    one_way = 0.87 * link_gb_s
    return replace(
        like,
        name=name,
        memory_bytes=int(0.985 * memory_gb * _GIGA),
        matmul_flops=like.matmul_flops * faster,
        attention_flops=like.attention_flops * faster,
        attention_backward_flops=like.attention_backward_flops * faster,
        memory_rate=like.memory_rate * memory_tb_s / 3.35,
        links={1: _link(one_way, one_way, 1.62 * one_way)},
        peer_rate=0.8 * peer_gb_s * _GIGA,
        send_rate=min(like.send_rate, 0.8 * peer_gb_s * _GIGA),
        optimizer_rate=like.optimizer_rate * memory_tb_s / 3.35,
        assumed=(
            f"all rates of the {name}: {tflops:g} TFLOP/s, {memory_tb_s:g} TB/s, {link_gb_s:g} GB/s to the "
            f"host and {peer_gb_s:g} to its neighbour are published, and the shares of them that an H100 "
            "reaches; none was measured",
        ),
        sources=dict.fromkeys(like.sources, "its data sheet, times what an H100 reaches of its own"),
    )


GPUS |= {
    gpu.name: gpu
    for gpu in (
        # a card without NVLink has its PCIe link to the GPU beside it
        _published("4090", 24, 165, 1.008, 31.5, 31.5),
        _published("5090", 32, 210, 1.792, 63, 63),
        _published("a100", 80, 312, 2.039, 31.5, 300),
        _published("l40s", 48, 362, 0.864, 31.5, 31.5),
        _published("b200", 180, 2250, 8.0, 63, 900),
        # two of its GPUs share the 450 GB/s of one Grace
        _published("gb200", 186, 2500, 8.0, 225, 900),
    )
}


def gpu_of_doctor(answer: Any, path: str) -> Gpu:
    """The card that `offload doctor --json` has seen first, with the memory and links that it measured; what
    it computes is as the table has that card. Raises ValueError where it has no link, or the table no such
    card."""
    lines = answer.get("lines", ()) if isinstance(answer, dict) else ()
    seen: dict[str, Any] = next((line["values"] for line in lines if "d2h_bytes_per_s" in line["values"]), {})
    model = str(seen.get("model", ""))
    # the longest: GB200 has B200 in it
    name = max((name for name in GPUS if name in model.lower().replace(" ", "")), key=len, default="")
    if not name:
        raise ValueError(
            f"{path}: {f'the table has no {model}' if model else 'no link was measured'}; known are "
            f"{', '.join(GPUS)}, and --gpu-gb, --gpu-tflops and --link-gbs describe another one"
        )
    ways = (seen[way] / _GIGA for way in ("d2h_bytes_per_s", "h2d_bytes_per_s", "both_bytes_per_s"))
    return replace(
        GPUS[name],
        memory_bytes=int(seen["memory_bytes"]),
        links={1: _link(*ways)},
        assumed=(*GPUS[name].assumed, f"but for its memory and link to the host, which {path} has"),
    )


def gpu_named(name: str) -> Gpu:
    found = GPUS.get(name.lower())
    if found is None:
        raise ValueError(
            f"no GPU is called {name!r}; known are {', '.join(GPUS)}. On the machine itself --measure takes "
            "its own rates"
        )
    return found

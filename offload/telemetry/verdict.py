"""What offload achieved in a step, in words: of a report's first line, and the title of a trace's picture.

One invariant: both say the same of the same figures.
"""

from __future__ import annotations

from offload.sizes import bytes_text


def saved_text(held_bytes: int, without_bytes: int, moved_bytes: int) -> str:
    """held_bytes, without_bytes: saved tensors on the device at once, at most, and what they would be if none
    had left; 0 where that is not known. moved_bytes: copied to the host in the step."""
    share = f"{held_bytes / without_bytes:.0%}" if without_bytes else ""
    instead = share and f" instead of {bytes_text(without_bytes)} ({share})"
    return f"saved tensors at most {bytes_text(held_bytes)} at once{instead}, {bytes_text(moved_bytes)} moved"


def stall_text(stall_ms: float, step_ms: float) -> str:
    """Times that compute waited for copies, and the step's; 0 where that is not known."""
    share = f"{stall_ms / step_ms:.1%} of a step of {step_ms:,.1f} ms" if step_ms else "known a step later"
    return f"stalls {share}"

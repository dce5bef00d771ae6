"""The text that is learned, as tokens: bytes, with an end between files.

One invariant: a batch is a function of the seed and the step alone, so every rank draws the same one and no
text is sent between them.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from parallel.transformer import END_OF_TEXT

__all__ = ["Text", "read_text"]

_MIB = 1 << 20
_MOST_BYTES = 4 * _MIB  # enough that a short run sees nothing twice


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens to learn from."""

    learned: Tensor
    """int16, one dimension."""
    source: str
    fingerprint: str
    """Differs if two ranks read different text."""

    def batch(self, sequences: int, tokens: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [sequences, tokens] each, drawn anew for each step."""
        return _windows(self.learned, sequences, tokens, seed=(seed << 32) + step)


def read_text(files: Iterable[Path], *, tokens: int) -> Text:
    """Read the given files, or Python's own standard library; at most 4 MiB of it.

    tokens: the length of a sequence, of which the text must hold more than one.
    """
    chosen = list(files)
    source = f"{len(chosen)} file{'s' * (len(chosen) > 1)}" if chosen else "Python's standard library"
    parts: list[np.ndarray] = []
    nbytes = 0
    for path in chosen or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        with path.open("rb") as file:
            content = np.frombuffer(file.read(_MOST_BYTES - nbytes), dtype=np.uint8)
        parts += [content.astype(np.int16), np.array([END_OF_TEXT], dtype=np.int16)]
        nbytes += content.size
        if nbytes >= _MOST_BYTES:
            source = f"the first {nbytes / _MIB:.1f} MiB of {source}"
            break
    else:
        source = f"{source}, {nbytes / _MIB:.1f} MiB"
    joined = np.concatenate(parts) if parts else np.empty(0, dtype=np.int16)
    if joined.size < tokens + 2:
        raise ValueError(
            f"{nbytes:,} bytes of text are too few for sequences of {tokens:,} tokens; give more, or a "
            "smaller --sequence"
        )
    return Text(torch.from_numpy(joined), source, hashlib.sha256(joined.tobytes()).hexdigest()[:16])


def _windows(text: Tensor, sequences: int, tokens: int, *, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, text.numel() - tokens, (sequences,), generator=generator)
    windows = torch.stack([text[start : start + tokens + 1] for start in starts.tolist()]).to(torch.int64)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

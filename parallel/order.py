"""The names of `offload.pipelining`'s orders in this package."""

from offload.pipelining import actions_of, peak_chunks

__all__ = ["actions_of", "peak_chunks"]

"""The watermark runtime: saved tensors leave only when device memory is short. See runtime.py."""

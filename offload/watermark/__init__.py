"""The watermark: what leaves once the device's memory comes to a mark, the oldest saved tensors first."""

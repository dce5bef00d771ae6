"""The tier below host memory: a file in which saved tensors lie between their spill and their restore."""

"""What autograd saves: which tensors may leave, one record a storage, and the hook pair that sees them."""

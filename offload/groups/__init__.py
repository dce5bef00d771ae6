"""Named groups of saved activations, chunk by chunk, under any pipeline schedule."""

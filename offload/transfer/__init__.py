"""Moving bytes: where a tensor's bytes lie, in which state they are, and the one file that issues copies."""

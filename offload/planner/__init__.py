"""What the blocks of a model cost and save, measured while they run."""

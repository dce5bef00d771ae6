"""What torch.compile must not see of the engine, and what a compiled function keeps where no hook sees it."""

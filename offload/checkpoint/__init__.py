"""Checkpointed regions that keep a part of what they compute, and what of it leaves for the host."""

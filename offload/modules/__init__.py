"""Blocks of a user's model and the hooks that they get: which are its blocks, and the hooks that they get."""

"""What is attached to the modules of a user's model: which are its blocks, and the hooks that they get."""

"""The parts of scripts/train.py: what was asked for, the text, the job, and what is said about it. One
invariant: only rank 0 prints."""

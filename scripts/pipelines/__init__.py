"""What `scripts/bench_pipeline.py` adds to `bench`: a block stack cut into stages, its ranks, what is
measured of them, and the table.

Reading order: requests, memory, job, rows, machine, child, report. One invariant: every rank of a
launch makes the same calls in the same order; a rank that cannot go on ends its process, and torchrun ends
the others.
"""

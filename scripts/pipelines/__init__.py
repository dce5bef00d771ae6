"""The pieces of `scripts/bench_pipeline.py`: a block stack cut into stages, what is measured of it, and the
table.

Reading order: requests, memory, job, rows, worker, launches, bounds, report. One invariant: every rank of a
run makes the same calls in the same order; a rank that cannot go on ends its process, and its launcher ends
the others.
"""

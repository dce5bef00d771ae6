"""What `bench_moe.py` measures: the model and its rows (work, rows), one row in a process (child),
configurations of ON and OFF files (configs), and the lines that are printed (report).

One invariant: every row of a work computes the same gradients from the same weights as its row `nothing`.
"""

"""The pieces of `scripts/bench_stage.py`: a block stack, the ways to run it, what is measured, and the table.

Reading order: workload, rows, ours, peers, measure, gradients, links, lanes, report, micro. One invariant: a
row that could not be measured is printed with its reason; no figure is ever taken from another run.
"""

"""The one measuring core of the benchmarks: a run and its processes, the link's rates, what a step cost, the
tables; and the rows of `bench_stage.py` and `bench_optimizer.py`. `pipelines` has what a pipeline adds.

Reading order: run, table, workload, rows, ours, peers, measure, gradients, links, child, report; micro;
optim_work, optim_child. One invariant: a row that could not be measured is printed with its
reason; no figure is ever taken from another run.

A script that imports `offload` imports this package first, which puts the repository on the path: a benchmark
is of the tree that it lies in, installed or not.
"""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parent.parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

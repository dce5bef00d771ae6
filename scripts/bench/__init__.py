"""The one measuring core of the benchmarks: a run and its processes, the link's rates, what a step cost, the
tables; and the rows of `bench_stage.py` and `bench_optimizer.py`. `pipelines` has what a pipeline adds.

Reading order: run, workload, rows, ours, peers, measure, gradients, links, child, report; profiling, lanes,
micro; optim_work, optim_child. One invariant: a row that could not be measured is printed with its reason; no
figure is ever taken from another run.
"""

"""Stages and microbatches: who runs which piece of the model when, and what the engine is told about it.

One invariant: torch.distributed.pipelining runs the pipeline and `offload` moves the bytes; this package only
introduces them to each other, and imports nothing of `offload` but its public names. `launch` starts the
ranks, `host` pins and measures the link on all at once, `schedules` names what torch can run, `stage`
announces each chunk, `order` says in which order the chunks will be read, `transformer` is the model whose
layers carry the marks.
"""

"""The dry run: what a training job would need and take on GPUs that nobody has rented yet.

`offload plan` (parallel/plan.py) is its command. One invariant: it plans with the engine's own plans and
simulation (`offload.policy`), so what it says of a mode is what that mode would do with the same numbers.

    models, rates        a model and a GPU in figures
    reference, trace     a layer of that model, run on the meta device: its calls, its bytes
    costs, job           seconds and levels of a traced module; which rank runs which layers
    rank_step, rank_plan one rank's step, and what a mode does with what it saves
    simulate, together   all ranks on one clock
    answer               the job's answer
    measure              the rates of the GPU that is here
    report, picture      the answer in words, as JSON, drawn
"""

"""Numbers in, plans out: no torch, no lane, no import from the rest of offload.

The least time that any engine could reach (`bound`), the groups that stay (`keeps`), a step played on numbers
(`simulate`) and the plan chosen with it (`search`) share their types (`actions`), so a benchmark, the engine
and a dry run argue about one set of figures.
"""

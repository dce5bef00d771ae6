"""Numbers in, plans out: no torch, no lane, no import from the rest of offload.

The groups that stay (`keeps`), a step played on numbers (`simulate`), and the plans chosen with it
(`mixture`) share their types (`actions`, `menu`). So a benchmark, the engine and a dry run argue
about one set of figures.
"""

"""What a run reports about itself: figures of a step, the rank table, timelines.

One invariant: measuring changes no decision and no byte; every other module may report here, and nothing here
reaches back into one.
"""

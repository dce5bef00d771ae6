"""Host memory: who may have how much (budget), where it is (arena), and who has it on loan (loans).

One invariant: every pinned byte belongs to a `HostArena`, and every arena asks a `HostBudget` first.
"""

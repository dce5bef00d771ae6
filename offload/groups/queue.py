"""The virtual-pipeline queue: from the order in which chunks were announced, the order in which their
backwards should come.

One invariant: it is a hint for the first step, when no schedule was given and no step has been seen.
Correctness never asks it. A chunk is staged under its virtual stage; when the first and the last stage have
equally many, the staged ones join the queue, last stage first (S2-35, S2-49).
"""

from __future__ import annotations

from offload.groups.chunk import ChunkGroups


class VirtualPipelineQueue:
    def __init__(self) -> None:
        self.stages: list[list[ChunkGroups]] = [[]]
        self.chunks: list[ChunkGroups] = []

    def resize(self, num_stages: int) -> None:
        """Have at least `num_stages` virtual stages."""
        self.stages.extend([] for _ in range(num_stages - len(self.stages)))

    def stage(self, chunk: ChunkGroups, stage: int) -> None:
        """Take a chunk in. Reaching the last stage flushes, queues the chunk at once, and flushes again."""
        last = stage == len(self.stages) - 1
        if last:
            self._flush_if_even()
        self.stages[stage].append(chunk)
        if last:
            self.chunks.append(chunk)
            self._flush_if_even()

    def _flush_if_even(self) -> None:
        if len({len(staged) for staged in self.stages}) == 1:
            self._move()

    def flush(self) -> None:
        """Move the staged chunks to the queue, last stage first, once the first and the last stage have
        equally many.

        Raises AssertionError if the stages between them do not: callers that stage by hand have lost a chunk.
        """
        if len(self.stages[0]) == len(self.stages[-1]):
            counts = [len(staged) for staged in self.stages]
            assert len(set(counts)) == 1, f"All stages must have same chunk count, got {counts}"
            self._move()

    def _move(self) -> None:
        self.stages[-1].clear()  # these are in the queue already
        for staged in reversed(self.stages):
            self.chunks.extend(staged)
            staged.clear()

    def front(self, name: str | None = None) -> ChunkGroups | None:
        """The next chunk that has a group (of that name), not consumed; None if there is none."""
        return next((chunk for chunk in self.chunks if not chunk.is_empty_chunk(name)), None)

    def pop(self, name: str | None = None) -> ChunkGroups:
        """Drop chunks up to and including the next one that has a group (of that name), and return that one.

        Raises AssertionError "No non-empty chunk found" if there is none; nothing is dropped then.
        """
        chunk = self.front(name)
        assert chunk is not None, (
            f"No non-empty chunk found among {len(self.chunks)} queued chunks for group {name!r}"
        )
        del self.chunks[: self.chunks.index(chunk) + 1]
        return chunk

    def discard(self, chunk: ChunkGroups) -> None:
        """Its backward has begun, wherever it stands."""
        if chunk in self.chunks:
            self.chunks.remove(chunk)

    def clear(self) -> None:
        self.chunks.clear()
        for staged in self.stages:
            staged.clear()

"""One rank's step at chosen levels: what each action computes, what lies on the device during it, and what
moves.

One invariant: every mode is played by the same simulation (policy/simulate.py); modes differ in the levels of
the blocks, in what stays, and in nothing else.

    fixed      what never leaves: saved bytes of the embedding and the head, and the outputs that torch's
               stages keep for their backward
    received   messages of other ranks before they are read, and until the allocator gives their bytes again
    working    what an action has on the device beyond saved bytes and what it makes again: gradients on their
               way, products that autograd does not save
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from offload.policy.actions import Action, ChunkKey, GroupSize, Keeps, Rates, lives_of
from offload.policy.keeps import all_of
from offload.policy.menu import Block, Level, Levels, groups_at, num_leaving, units_a_chunk
from offload.policy.simulate import Simulation, simulate

from .costs import Piece
from .job import Stage

Mode = Literal["off", "checkpoint", "selective", "groups", "auto"]
MODES: dict[Mode, str] = {
    "off": "every saved tensor stays",
    "checkpoint": "each layer is computed again from its input, which stays",
    "selective": "outputs of products and attention leave as the limit asks, the rest is computed again",
    "groups": "saved tensors leave as the limit asks, nothing is computed again",
    "auto": "each layer keeps, moves or computes again what costs least",
}

_AHEAD = 8
"""Microbatches whose messages are counted, at most: the most that a measured step had. What longer ones hold
was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank does with what it saves."""

    levels: Mapping[ChunkKey, Levels]
    """For each layer the place of its level in the mode's menu."""
    keeps: Keeps
    saved_limit_bytes: int
    restoring_room_bytes: int
    half_room_bytes: int = 0
    again_room_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlay:
    """A played step of one rank, waits for other ranks included."""

    result: Simulation
    peaks_bytes: tuple[int, ...]
    """The most on the device during each action, without what is held from step to step."""


class RankStep:
    """The actions of one rank with their bytes and seconds, ready to be played under any plan of one mode.

    receives: stages that are next to one another are on different ranks unless both are in `order`; False for
    a rank by itself.
    """

    def __init__(
        self,
        order: Sequence[Action],
        stages: Mapping[int, Stage],
        rates: Rates,
        mode: Mode,
        *,
        receives: bool = True,
    ) -> None:
        self.order = tuple(order)
        self.rates = rates
        self._halved = {action.chunk for action in order if action.kind == "I"}
        self._stages = stages
        self._blocks = {
            index: [_block(piece, mode) for piece in _layers(stage)] for index, stage in stages.items()
        }
        self.blocks: dict[ChunkKey, Sequence[Block]] = {
            action.chunk: self._blocks[action.stage] for action in order if action.kind == "F"
        }
        self.rest_s = {action: self._rest_s(action) for action in order}
        self.fixed_bytes = self._fixed_bytes()
        self._received_bytes = self._buffers_bytes() if receives else [0] * len(self.order)

    def uniform(self, level: int) -> dict[ChunkKey, Levels]:
        """Every layer at this place of its menu, or at the last one."""
        return {
            chunk: tuple(min(level, len(block.menu) - 1) for block in blocks)
            for chunk, blocks in self.blocks.items()
        }

    def sizes(
        self, levels: Mapping[ChunkKey, Levels], again_room_bytes: int = 0
    ) -> dict[ChunkKey, list[GroupSize]]:
        """again_room_bytes: of a chunk with a split backward, what its I leaves of what it computed again."""
        units = units_a_chunk(len(self.blocks))
        return {
            chunk: groups_at(
                blocks,
                levels[chunk],
                units,
                num_leaving(blocks, levels[chunk], again_room_bytes) if chunk in self._halved else 0,
            )
            for chunk, blocks in self.blocks.items()
        }

    def compute_s(self, levels: Mapping[ChunkKey, Levels]) -> list[float]:
        """Seconds of each action, without what is computed again: the device's, or more where the host is
        slower."""
        found = []
        for action in self.order:
            blocks = self.blocks[action.chunk]
            chosen = [block.menu[at] for block, at in zip(blocks, levels[action.chunk], strict=True)]
            device_s = self._device_s(action)
            again_s = sum(level.recompute_s for level in chosen) if action.kind != "F" else 0.0
            host_s = self._host_s(action, chosen)
            found.append(max(device_s, host_s - again_s))
        return found

    def plain_s(self) -> float:
        """Compute of a step that keeps everything."""
        return sum(self.compute_s(self.uniform(0)))

    def room_bytes(self, limit_bytes: int, level: int) -> int:
        """What a limit on the device leaves for saved bytes that may leave, and what is made again, with
        every layer at this level."""
        levels = self.uniform(level)
        working = (self._working_bytes(action, levels[action.chunk], moves=True) for action in self.order)
        taken = map(sum, zip(self.fixed_bytes, self._received_bytes, working, strict=True))
        return limit_bytes - max(taken, default=0)

    def play(self, plan: RankPlan, waits_s: Sequence[float] = ()) -> StepPlay:
        """waits_s: before each action, for other ranks."""
        result = simulate(
            self.order,
            self.sizes(plan.levels, plan.again_room_bytes),
            self.compute_s(plan.levels),
            self.rates,
            limit_bytes=plan.saved_limit_bytes,
            keeps=plan.keeps,
            restoring_room_bytes=plan.restoring_room_bytes,
            half_room_bytes=plan.half_room_bytes,
            waits_s=waits_s,
        )
        assert result is not None  # it may take any time
        working = [
            self._working_bytes(action, plan.levels[action.chunk], moves=result.moved_bytes > 0)
            for action in self.order
        ]
        peaks = zip(result.peaks_bytes, self.fixed_bytes, self._received_bytes, working, strict=True)
        return StepPlay(result=result, peaks_bytes=tuple(map(sum, peaks)))

    def keep_all(self, level: int) -> RankPlan:
        """Every layer at one level, and nothing leaves."""
        levels = self.uniform(level)
        return RankPlan(
            levels=levels, keeps=all_of(self.sizes(levels)), saved_limit_bytes=1 << 62, restoring_room_bytes=0
        )

    def move_all(self, level: int) -> RankPlan:
        """Every layer at one level, and all leaves as fast as it can: the least that the device needs."""
        return RankPlan(
            levels=self.uniform(level), keeps=frozenset(), saved_limit_bytes=0, restoring_room_bytes=0
        )

    def _device_s(self, action: Action) -> float:
        pieces = self._stages[action.stage].pieces
        if action.kind == "F":
            return sum(piece.forward_s for piece in pieces)
        backward_s = sum(piece.backward_s for piece in pieces)
        if action.chunk not in self._halved:
            return backward_s
        return sum(piece.weight_s if action.kind == "W" else piece.input_s for piece in pieces)

    def _host_s(self, action: Action, levels: Sequence[Level]) -> float:
        pieces = self._stages[action.stage].pieces
        if action.kind == "F":
            return sum(piece.forward_host_s for piece in pieces)
        whole_s = sum(piece.backward_host_s for piece in pieces)
        whole_s += sum(map(Piece.more_host_s, _layers(self._stages[action.stage]), levels))
        return whole_s / 2 if action.chunk in self._halved else whole_s

    def _rest_s(self, action: Action) -> float:
        """Plain seconds of an action outside the blocks; and where the host is slower, what it takes more."""
        blocks = self.blocks[action.chunk]
        if action.kind == "F":
            inside = sum(block.forward_s for block in blocks)
        elif action.chunk not in self._halved:
            inside = sum(block.backward_s for block in blocks)
        else:
            inside = sum(
                block.backward_s * (block.weight_part if action.kind == "W" else 1 - block.weight_part)
                for block in blocks
            )
        return max(0.0, self._device_s(action) - inside, self._host_s(action, ()) - inside)

    def _fixed_bytes(self) -> list[int]:
        level = [0] * len(self.order)
        for chunk, life in lives_of(self.order).items():
            stage = self._stages[chunk[0]]
            if life.half_read is not None:
                for at in range(life.half_read + 1, life.last_read + 1):
                    level[at] += sum(piece.held_bytes for piece in stage.pieces)
            nbytes = stage.output_bytes + sum(
                piece.saved_bytes for piece in stage.pieces if not _is_layer(piece)
            )
            for at in range(life.forward, life.last_read + 1):
                level[at] += nbytes
        return level

    def _buffers_bytes(self) -> list[int]:
        """At each action, the inputs and output gradients that came from other ranks, without those that are
        counted with what is saved and what is worked with.

        The allocator gives the bytes of a message again only when the stream of the messages is past it, and
        the host is ahead of that. With these, peaks of four H100s with 8 microbatches are within 1% under
        1F1B, Interleaved1F1B and DualPipeV, and were up to 5% too low (November 2026).
        """
        here = {action.stage for action in self.order}
        level, live = [0] * len(self.order), [Counter[int]() for _ in self.order]
        for (index, _), life in lives_of(self.order).items():
            for at in range(life.forward, life.last_read + 1):
                live[at][index] += 1
        microbatches = Counter(action.stage for action in self.order if action.kind == "F")
        for index, number in microbatches.items():
            stage, ahead = self._stages[index], min(number, _AHEAD)
            inputs = stage.pieces[0].input_bytes if index and index - 1 not in here else 0
            gradients = stage.output_bytes if index + 1 not in here else 0  # 0 for the last stage
            for at, action in enumerate(self.order):
                is_read = action.stage == index and action.kind != "F"
                level[at] += max(0, ahead - live[at][index]) * inputs + (ahead - is_read) * gradients
        return level

    def _working_bytes(self, action: Action, levels: Levels, *, moves: bool) -> int:
        """The most that any module of the action adds to what is saved when the action begins.

        Where nothing moves, what a module saved is gone when the one before it runs its backward; else that
        room is filled by what comes back. And what comes back is counted as gone when a plain layer reads
        it.
        """
        stage = self._stages[action.stage]
        if action.kind == "F":
            return self._forward_working_bytes(action, levels)
        gone_bytes, most_bytes = 0, 0
        places = list(levels)
        for piece in reversed(stage.pieces):
            most_bytes = max(most_bytes, piece.backward_working_bytes - gone_bytes)
            if not _is_layer(piece):
                gone_bytes += piece.saved_bytes
                continue
            block, at = self.blocks[action.chunk][len(places) - 1], places.pop()
            if moves and at == 0:
                most_bytes = max(most_bytes, piece.moving_working_bytes - gone_bytes)
            elif not moves:
                # what the first layer makes again is counted at the action's peak, and gone after it
                again_bytes = 0 if places else block.menu[at].made_again_bytes
                gone_bytes += block.menu[at].saved_bytes + again_bytes
        return most_bytes

    def _forward_working_bytes(self, action: Action, levels: Levels) -> int:
        stage = self._stages[action.stage]
        saved_bytes, most_bytes, place = 0, 0, 0
        for piece in stage.pieces:
            level = piece.menu[0]
            if _is_layer(piece):
                level = self.blocks[action.chunk][place].menu[levels[place]]
                place += 1
            most_bytes = max(most_bytes, saved_bytes + piece.forward_bytes(level))
            saved_bytes += level.saved_bytes
        # the last output is counted with what the stage keeps
        return max(0, most_bytes - saved_bytes - stage.output_bytes)


def _is_layer(piece: Piece) -> bool:
    return piece.selective is not None


def _layers(stage: Stage) -> list[Piece]:
    return [piece for piece in stage.pieces if _is_layer(piece)]


def _block(piece: Piece, mode: Mode) -> Block:
    """A layer with the levels that this mode may choose from."""
    menu = piece.menu
    if mode in ("off", "groups"):
        menu = menu[:1]
    elif mode == "checkpoint":
        menu = (menu[0], menu[-1])
    elif mode == "selective" and piece.selective is not None:
        menu = (menu[0], piece.selective)
    return Block(
        menu=menu,
        forward_s=piece.forward_s,
        backward_s=piece.backward_s,
        weight_part=piece.weight_s / (piece.input_s + piece.weight_s) if piece.weight_s else 0.5,
        w_reads=min(1.0, piece.weight_bytes / piece.saved_bytes) if piece.weight_bytes else 1.0,
        i_passes=piece.passed_bytes / piece.saved_bytes if piece.passed_bytes else 0.0,
    )

"""Weights of experts, (experts, out, in) in one parameter: they stream by the expert, not by the block.

    learned      in a forward the weight comes with its block and its class watches; where its uses were
                 grouped_mm and [] alone, it is answered by the expert from the next step on
    a use        a product of rows by expert is made in chunks: the experts of the next chunks are copied to
                 the device beside the product of the one before
    which stay   those with the most tokens, by an exponential mean; they are fetched ahead as well
    all else     a use of another kind, or of a weight that trains, loads the whole weight, as elsewhere

A weight has a share of the limit, its room: three quarters for experts that stay, one eighth for those that
come and go, and one for the chunk that a product reads.

One invariant: each row meets its expert's bytes as the whole weight has them, whatever is on the device.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.params.watched import untouched
from offload.transfer.admission import Priority
from offload.weights.forms import form_of
from offload.weights.residency import Residency
from offload.weights.saves import pack
from offload.weights.watched import watch
from offload.weights.weight import BlockWeights, Weight, in_backward

__all__ = ["ExpertWeight", "Experts"]

_KEPT = 0.9
"""Of an expert's mean number of tokens, at each use in a forward."""

_LEAST_TOKENS = 0.5
"""Mean below which an expert is not fetched ahead."""

_plainly = torch._C.DisableTorchFunctionSubclass


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


class _Part(Weight):
    """One expert's matrix: a range of the weight's master, and on the device memory of its own."""

    def __init__(self, whole: Weight, expert: int) -> None:
        like, module = whole.parameter, whole.module()
        assert module is not None  # it is in use
        with torch.inference_mode(False):
            own = torch.empty_strided(like.shape[1:], like.stride()[1:], dtype=like.dtype, device=like.device)
        super().__init__(nn.Parameter(own, False), f"{whole.name}[{expert}]", module, whole.attribute)
        self.master = whole.master[expert * self.nbytes : (expert + 1) * self.nbytes]
        self.rest()

    @property
    def dirty(self) -> bool:
        """Whether somebody has written what [] gave."""
        return self.parameter._version != self.version

    @dirty.setter
    def dirty(self, value: bool) -> None:
        self.version = self.parameter._version


class ExpertWeight:
    """A weight that streams by the expert.

    | name | |
    |---|---|
    | weight, parent | of which the block does not bring it any more |
    | whole | it alone, as a block of its own, for uses of other kinds |
    | parts, room | its experts, and the device's share of them |
    | tokens | an exponential mean of what each gets |
    | views | aliases of the weight and of its transpose, which have no bytes |
    """

    def __init__(self, experts: Experts, weight: Weight) -> None:
        self._all, self.weight, self.parent = experts, weight, weight.block
        device = experts.engine.device
        self.parent.weights.remove(weight)
        self.whole = BlockWeights(-1, f"{weight.name}, whole", device, [weight], left=self.parent.left)
        device.refill(weight.storage, weight.nbytes)  # torch refuses a view of what has no bytes
        with torch.inference_mode(False), torch.no_grad(), _plainly():
            straight = weight.parameter.detach()
            self.views = straight, straight.transpose(1, 2)
        device.free(weight.storage)
        self.parts = [self._part(expert) for expert in range(straight.shape[0])]
        for view in self.views:
            watch(view, weight)
            weight.watch_alias(view)
        self.room = Residency(experts.engine, "weights", self.parts, 0)
        self.tokens = [0.0] * len(self.parts)
        self.chunk = self._stay = 1
        weight.experts = self

    def _part(self, expert: int) -> BlockWeights:
        part, engine = _Part(self.weight, expert), self._all.engine
        engine.device.free(part.storage)
        save = partial(pack, weight=self.weight, use=self._all.use_saved, expert=expert)
        engine.hooks.streamed[part.storage._cdata] = save
        return BlockWeights(expert, part.name, engine.device, [part])

    def give_room(self, nbytes: int) -> None:
        """nbytes: of its experts on the device at once."""
        slots = min(len(self.parts), nbytes // self.parts[0].nbytes)
        self.chunk = max(1, slots // 8)
        self._stay = max(0, slots - 2 * self.chunk)
        self.room.window_bytes = self.chunk * self.parts[0].nbytes
        self._choose()

    # -- uses ------------------------------------------------------------------------------------------------
    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """As ByExpert: in a forward of its block, and in a backward."""
        with _plainly():
            form = form_of(func, args, kwargs)
            usual = form is not None and (self.parent.entered or in_backward()) and not self.whole.present
            if not usual or self.weight.parameter.requires_grad:
                return NotImplemented
            given = args[form == "product"]
            layouts = [_layout(view) for view in self.views]
        if torch._C._functorch.peek_interpreter_stack() is not None or _layout(given) not in layouts:
            return NotImplemented
        transposed = layouts.index(_layout(given)) == 1
        if form in ("same", "transpose"):
            return given if form == "same" else self._view(not transposed)
        if form == "product":
            return self._product(args[0], given, kwargs["offs"], transposed)
        index: Any = args[1].tolist() if isinstance(args[1], Tensor) else args[1]
        number = len(self.parts)
        experts: list[int] = [index] if form == "expert" else index
        fits = all(-number <= expert < number for expert in experts)
        if transposed or not experts or not fits or not given.is_contiguous():
            return NotImplemented
        experts = [expert % number for expert in experts]
        self._note([experts.count(expert) for expert in range(number)])
        return self.read(experts[0]) if form == "expert" else self._rows(experts)

    def _view(self, transposed: bool) -> Tensor:
        found: Tensor = untouched(Tensor.detach, (self.views[transposed],), {})
        watch(found, self.weight)
        self.weight.watch_alias(found)
        return found

    def view_like(self, layout: tuple[Any, ...]) -> Tensor | None:
        """As ByExpert."""
        layouts = [_layout(view) for view in self.views]
        return self._view(layouts.index(layout) == 1) if layout in layouts else None

    def _product(self, x: Tensor, given: Tensor, ends: Tensor, transposed: bool) -> Any:
        numbers = self._all.numbers(ends)
        counts = [end - start for start, end in pairwise([0, *numbers])]
        if len(counts) != len(self.parts) or min(counts) < 0 or numbers[-1] != x.shape[0]:
            return NotImplemented
        self._note(counts)
        return _Product.apply(x, given, ends, (self, counts, transposed))  # type: ignore[no-untyped-call]

    def product(self, x: Tensor, ends: Tensor, counts: Sequence[int], transposed: bool) -> Tensor:
        """x: (R, X), its rows sorted by expert. counts: of rows, by expert. The product of each row with its
        expert's matrix: (R, Y). Blocks the host: never."""
        rows, lengths = x.split(list(counts)), ends.diff(prepend=ends.new_zeros(1)).unbind()
        found: dict[int, Tensor] = {}
        used = [expert for expert, count in enumerate(counts) if count]
        with self._all.lock:
            self._begin(used)
            rest = sorted(
                used, key=lambda expert: not self.parts[expert].present
            )  # the others come meanwhile
            self._fetch(rest, Priority.REQUIRED)
        while rest:
            chunk, rest = rest[: self.chunk], rest[self.chunk :]
            with self._all.lock:
                w = self._together(chunk)
                self._fetch(rest, Priority.REQUIRED)
                if not rest:
                    self._all.fetch_next(self)
            x_chunk = x if chunk == used else torch.cat([rows[expert] for expert in chunk])
            # where the rows of each expert of the chunk end, without numbers of the host's
            offs = torch.stack([lengths[expert] for expert in chunk]).cumsum(0, dtype=ends.dtype)
            y = torch._grouped_mm(x_chunk, w.transpose(1, 2) if transposed else w, offs=offs)
            found |= zip(chunk, y.split([counts[expert] for expert in chunk]), strict=True)
        return y if len(found) == len(chunk) else torch.cat([found[expert] for expert in used])

    def _together(self, chunk: Sequence[int]) -> Tensor:
        """A copy of the matrices of a chunk: (chunk, out, in), in the weight's order of memory."""
        like, blocks = self.views[0], [self.parts[expert] for expert in chunk]
        for block in blocks:
            block.entered += 1
        try:
            for block in blocks:
                self._use(block)
            with torch.inference_mode(False), torch.no_grad(), _plainly():
                shape = len(chunk), *like.shape[1:]
                compact = torch.empty_strided(shape, like.stride(), dtype=like.dtype, device=like.device)
                return torch.stack([block.weights[0].parameter for block in blocks], out=compact)
        finally:
            for block in blocks:
                block.entered -= 1

    def _rows(self, experts: list[int]) -> Tensor:
        """A copy of these matrices, as indexing makes it."""
        with self._all.lock:
            self._begin(set(experts))
            found = {expert: self._together([expert]) for expert in set(experts)}
            return torch.cat([found[expert] for expert in experts])

    def read(self, expert: int) -> Tensor:
        """As ByExpert."""
        with self._all.lock:
            self._begin((expert,))
            parameter = self.parts[expert].weights[0].parameter.detach()  # nobody takes its bytes meanwhile
            self._use(self.parts[expert])
            return parameter

    def _begin(self, used: Collection[int]) -> None:
        self._all.begin(self.whole)
        there = sum(self.parts[expert].present for expert in used)
        self._all.hits, self._all.misses = self._all.hits + there, self._all.misses + len(used) - there

    # -- copies ----------------------------------------------------------------------------------------------
    def _use(self, block: BlockWeights) -> None:
        self.flush()
        block.left = self.whole.left
        self.room.use(block, self._ranked())

    def _fetch(self, experts: Collection[int], priority: Priority) -> None:
        """As many as there is room for."""
        self.flush()
        for block in (self.parts[expert] for expert in experts):
            if not block.present:
                block.left = self.whole.left
                if not self.room.make_room(block, experts, self._ranked()):
                    return
                if not self.room.load(block, priority):
                    return

    def fetch_ahead(self) -> None:
        """Those that stay, and those that are used often."""
        likely = [each for each in self._ranked() if self.tokens[each] >= _LEAST_TOKENS]
        self._fetch(likely[: self._stay + self.chunk], Priority.SPECULATIVE)

    def _ranked(self) -> list[int]:
        return sorted(range(len(self.parts)), key=self.tokens.__getitem__, reverse=True)

    def _note(self, tokens: Sequence[int]) -> None:
        """What each expert gets in a use. What a backward uses was used in its forward."""
        if not in_backward():
            pairs = zip(self.tokens, tokens, strict=True)
            self.tokens = [_KEPT * mean + (1 - _KEPT) * now for mean, now in pairs]
            with self._all.lock:
                self._choose()

    def _choose(self) -> None:
        self.flush()
        stay = set(self._ranked()[: self._stay])
        for block in self.parts:
            block.keep = block.index in stay
        self.room.trim()

    # -- the whole weight ------------------------------------------------------------------------------------
    def flush(self) -> None:
        """As ByExpert, behind whole.left: the last way out of the weight or of any part."""
        for block in self.parts:
            if block.present and block.weights[0].dirty:
                self.room.write_back(block)
                self.whole.left = block.left
                torch.autograd.graph.increment_version(self.weight.parameter)
                self.weight.version = self.weight.parameter._version

    def forget(self) -> None:
        """As ByExpert. What somebody has of them keeps its memory."""
        for expert, block in enumerate(self.parts):
            if block.present and block.may_leave:
                self.room.drop(block)
            elif block.present:
                self.room.present_bytes -= block.held_bytes
                self._all.engine.hooks.streamed.pop(block.weights[0].storage._cdata, None)
                self.parts[expert] = self._part(expert)

    def end(self) -> None:
        """As ByExpert."""
        weight, parent, hooks = self.weight, self.parent, self._all.engine.hooks
        if parent.entered or self.whole.entered:
            raise OffloadError(
                f"{weight.name} is given other bytes inside a forward of {parent.name}, which uses it; do it "
                "outside"
            )
        self.flush()
        self.forget()
        for block in self.parts:
            hooks.streamed.pop(block.weights[0].storage._cdata, None)
        for block in (self.whole, parent):
            if block.present:
                self._all.residency.drop(block)
        parent.left = self.whole.left or parent.left
        weight.experts, weight.uses, weight.block = None, set(), parent
        parent.weights.append(weight)
        parent.count()
        self._all.weights.remove(self)


class _Product(torch.autograd.Function):
    """grouped_mm with a frozen weight that is watched. Saves what torch's own node saves, so that a recompute
    does, too: the weight, of which nothing is kept, and where each expert's rows end."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, ends: Tensor, how: tuple[ExpertWeight, list[int], bool]
    ) -> Tensor:
        ctx.save_for_backward(w, ends)
        ctx.ends = ends  # whose numbers are known, as those of the same tensor
        weight, counts, transposed = how
        return weight.product(x, ends, counts, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w, _ = ctx.saved_tensors
        return torch._grouped_mm(grad.contiguous(), w.transpose(1, 2), offs=ctx.ends), None, None, None


class Experts:
    """All weights of one model that stream by the expert. begin: called before each use. use_saved: as for
    `pack`. hits, misses: experts that a use found there or on their way, and that it did not. waited_s: of
    the host, for numbers of rows. room_bytes: of the limit."""

    def __init__(
        self,
        residency: Residency,
        engine: OffloadEngine,
        begin: Callable[[BlockWeights], None],
        use_saved: Callable[[Weight], None],
    ) -> None:
        self.residency, self.engine, self.lock = residency, engine, engine.lock
        self.begin, self.use_saved = begin, use_saved
        self.weights: list[ExpertWeight] = []
        self.hits = self.misses = self.room_bytes = 0
        self.waited_s = 0.0
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int, list[int]]] = {}

    @property
    def nbytes(self) -> int:
        return sum(each.weight.nbytes for each in self.weights)

    def learn(self, blocks: Collection[BlockWeights]) -> bool:
        """Outside of the blocks' forwards: weights whose uses allow it stream by the expert from here on,
        those that train do not any more. Whether there were any."""
        known = [*self.weights]
        self.weights = [each for each in known if each.whole.weights]  # the module of others is gone
        for each in [*self.weights]:
            if each.weight.parameter.requires_grad and not each.parent.entered:
                each.end()
        for block in blocks:
            for weight in [*block.weights]:
                if weight.uses and None in weight.uses:
                    weight.uses = None
                idle = not block.present or block.may_leave
                if (
                    idle
                    and not weight.parameter.requires_grad
                    and {"product", "expert", "rows"} & (weight.uses or set())
                ):
                    if block.present:
                        self.residency.drop(block)
                    self.weights.append(ExpertWeight(self, weight))
                    block.count()
        return known != self.weights

    def share(self, nbytes: int) -> None:
        """Give each weight its share of what may be on the device."""
        self.room_bytes = min(nbytes, self.nbytes)
        for each in self.weights:
            each.give_room(self.room_bytes * each.weight.nbytes // self.nbytes)

    def use_whole(self, block: BlockWeights) -> None:
        """A use of a weight alone, as a block: one is on the device at once, unless somebody has it."""
        for each in self.weights:
            if each.whole is block:
                each.flush()
            elif each.whole.present and each.whole.may_leave:
                self.residency.drop(each.whole)
        self.residency.use(block, ())

    def fetch_next(self, weight: ExpertWeight) -> None:
        """What is used after it: the one after it in the model, or before it in a backward."""
        at = self.weights.index(weight) + (-1 if in_backward() else 1)
        if at in range(len(self.weights)):
            self.weights[at].fetch_ahead()

    def numbers(self, ends: Tensor) -> list[int]:
        """The numbers in `ends`. Blocks the host until they are computed, once for a tensor."""
        version = -1 if ends.is_inference() else ends._version
        known = self._numbers.get(id(ends))
        if known is not None and known[0]() is ends and known[1] == version:
            return known[2]
        began = time.perf_counter()
        numbers: list[int] = ends.tolist()
        self.waited_s += time.perf_counter() - began
        self._numbers = {key: each for key, each in self._numbers.items() if each[0]() is not None}
        self._numbers[id(ends)] = weakref.ref(ends), version, numbers
        return numbers

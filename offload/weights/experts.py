"""Weights of experts, (experts, out, in) in one parameter: they stream by the expert, not by the block.

    learned      in a forward the weight comes with its block and its class watches; where its uses were
                 grouped_mm and [] alone, it is answered by the expert from the next step on
    a use        a product of rows by expert is made in pieces: of the experts that stay, and of one slot of
                 the window (window.py) after another, while the next ones are filled
    which stay   those with the most tokens, by an exponential mean
    all else     a use of another kind, or of a weight that trains, loads the whole weight, as elsewhere

One invariant: each row meets its expert's bytes as the whole weight has them, whatever is on the device.

What [] gives of one expert is a copy with memory of its own, so that slots are read by nobody else. A write
to it is the weight's, and goes to the master before the next use of the weight.

# [Order: experts out]
# hazard  RAW, WAR: `d2h` returns a matrix that a lane still writes, to a master that `h2d` still reads.
# edge    the lane waits for `h2d`, and `d2h` for the lane.
# alive   the matrix; its lane waits for the copy before it may have its memory back.
# proof   tests/property/test_expert_edges.py, edge "experts out"
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from offload.device import Lane
from offload.device._cuda_memory import read_numbers
from offload.ids import Owner
from offload.params.watched import is_alone, untouched
from offload.transfer.block import bytes_of
from offload.weights.hooks import pack
from offload.weights.order import Pass
from offload.weights.residency import Residency
from offload.weights.watched import watch
from offload.weights.weight import BlockWeights, Weight, in_backward
from offload.weights.window import Streamed, Window, form_of

_plainly = torch._C.DisableTorchFunctionSubclass


def _during() -> Pass:
    return Pass.BACKWARD if in_backward() else Pass.FORWARD if torch.is_grad_enabled() else Pass.INFERENCE


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


class _Given(NamedTuple):
    """A matrix that [] gave. version: when the master had its bytes. home: the lane it was allocated on."""

    matrix: Tensor
    version: int
    home: Lane


class ExpertWeight(Streamed):
    """A weight that streams by the expert.

    | name | |
    |---|---|
    | weight, parent | of which the block does not bring it any more |
    | whole | it alone, as a block of its own, for uses of other kinds |
    | views | aliases of the weight and of its transpose, which have no bytes |
    | given | matrices that [] gave, by expert, as long as somebody has them |
    """

    def __init__(self, experts: Experts, weight: Weight) -> None:
        self._all, self.parent = experts, weight.block
        device = experts.engine.device
        self.parent.weights.remove(weight)
        whole = BlockWeights(-1, f"{weight.name}, whole", device, [weight], left=self.parent.left)
        device.refill(weight.storage, weight.nbytes)  # torch refuses a view of what has no bytes
        with torch.inference_mode(False), torch.no_grad(), _plainly():
            straight = weight.parameter.detach()
            self.views = straight, straight.transpose(1, 2)
        device.free(weight.storage)
        super().__init__(whole, straight, not {"product"} & (weight.uses or set()))
        for view in self.views:
            watch(view, weight)
            weight.watch_alias(view)
        self.given: dict[int, _Given] = {}
        weight.experts = self

    # -- uses ------------------------------------------------------------------------------------------------
    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call with the weight, in a forward of its block or in a backward; NotImplemented
        for one that needs it whole."""
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
        experts: Any = args[1].tolist() if isinstance(args[1], Tensor) else args[1]
        experts = [experts] if form == "expert" else experts
        fits = all(-self.number <= expert < self.number for expert in experts)
        if transposed or not experts or not fits or not given.is_contiguous():
            return NotImplemented
        experts = [expert % self.number for expert in experts]
        return self.read(experts[0]) if form == "expert" else self._rows(experts)

    def _view(self, transposed: bool) -> Tensor:
        found: Tensor = untouched(Tensor.detach, (self.views[transposed],), {})
        watch(found, self.weight)
        self.weight.watch_alias(found)
        return found

    def view_like(self, layout: tuple[Any, ...]) -> Tensor | None:
        """The weight as it was saved, watched; None for a part of it."""
        layouts = [_layout(view) for view in self.views]
        return self._view(layouts.index(layout) == 1) if layout in layouts else None

    def _product(self, x: Tensor, given: Tensor, ends: Tensor, transposed: bool) -> Any:
        numbers = self._all.numbers(ends)
        counts = [end - start for start, end in pairwise([0, *numbers])]
        if len(counts) != self.number or min(counts) < 0 or numbers[-1] != x.shape[0]:
            return NotImplemented
        how = self, counts, transposed, _during()
        return _Product.apply(x, given, ends, how)  # type: ignore[no-untyped-call]

    def product(
        self, x: Tensor, ends: Tensor, counts: Sequence[int], transposed: bool, during: Pass
    ) -> Tensor:
        """x: (R, X), its rows sorted by expert. counts: of rows, by expert. The product of each row with its
        expert's matrix: (R, Y). Blocks the host: never."""
        rows, lengths = x.split(list(counts)), ends.diff(prepend=ends.new_zeros(1)).unbind()
        used = [expert for expert, count in enumerate(counts) if count]
        found: dict[int, Tensor] = {}
        with self._all.lock:
            for experts, w in self._begin(counts, during):
                x_piece = x if experts == used else torch.cat([rows[expert] for expert in experts])
                # where the rows of each expert end, without numbers of the host's, which would wait on `h2d`
                offs = torch.stack([lengths[expert] for expert in experts]).cumsum(0, dtype=ends.dtype)
                y = torch._grouped_mm(x_piece, w.transpose(1, 2) if transposed else w, offs=offs)
                found |= zip(experts, y.split([counts[expert] for expert in experts]), strict=True)
        return y if experts == used else torch.cat([found[expert] for expert in used])

    def _rows(self, experts: list[int]) -> Tensor:
        """A copy of these matrices, as indexing makes it."""
        counts = [0] * self.number
        for expert in experts:
            counts[expert] += 1
        with self._all.lock, torch.inference_mode(False), torch.no_grad():
            out = self.empty(len(experts))
            for piece, w in self._begin(counts, _during()):
                at = dict(zip(piece, w.unbind(), strict=True))
                pairs = [(out[row], at[expert]) for row, expert in enumerate(experts) if expert in at]
                torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])
            device = self._all.engine.device
            device.note_write(device.compute, out)
            return out

    def read(self, expert: int) -> Tensor:
        """The matrix of one, on the device."""
        device, hooks = self._all.engine.device, self._all.engine.hooks
        with self._all.lock:
            self._all.begin(self.whole)
            self.flush(but=expert)
            if expert not in self.given:
                matrices = self._rows([expert])
                storage, like = matrices.untyped_storage(), matrices[0]
                with torch.inference_mode(False):  # no view of what `_rows` made, which would hold it too
                    own = torch.empty(0, dtype=like.dtype, device=like.device)
                    own.set_(storage, 0, like.shape, like.stride())
                self.given[expert] = _Given(own, own._version, device.compute)
                hooks.streamed[storage._cdata] = partial(pack, weight=self.weight, expert=expert)
            return self.given[expert].matrix.detach()

    def _begin(self, counts: Sequence[int], during: Pass) -> Iterator[tuple[list[int], Tensor]]:
        self._all.begin(self.whole)
        self.flush()
        return self._all.window.pieces(self, counts, during)

    # -- what [] gave ----------------------------------------------------------------------------------------
    def flush(self, but: int | None = None) -> None:
        """The master has what was written to matrices that [] gave, behind whole.left. Those that nobody has
        go, except for `but`. Order: [Order: experts out]."""
        device, whole = self._all.engine.device, self.whole
        for expert, (matrix, version, home) in [*self.given.items()]:
            if matrix._version != version:
                self._all.window.forget(self)
                device.note_write(device.compute, matrix)
                device.wait(device.d2h, device.record(device.compute), "experts out")
                master = self.weight.master[expert * self.each : (expert + 1) * self.each]
                flat = bytes_of(matrix.untyped_storage(), 0, self.each)
                whole.left = self._all.engine.copier.of(Owner("weights", whole.name)).send([(master, flat)])
                device.wait(home, whole.left, "experts gone")
                del flat
                self._all.residency.out_bytes += self.each
                self.given[expert] = _Given(matrix, matrix._version, home)
                torch.autograd.graph.increment_version(self.weight.parameter)
                self.weight.version = self.weight.parameter._version
            if expert != but and is_alone(matrix):
                self._let_go(expert)

    def _let_go(self, expert: int) -> None:
        """Order: [Order: experts gone]."""
        device, (matrix, _, home) = self._all.engine.device, self.given.pop(expert)
        self._all.engine.hooks.streamed.pop(matrix.untyped_storage()._cdata, None)
        lane = self._all.window.enter()
        if home is not lane:
            device.wait(home, device.record(lane), "experts gone")

    def forget(self) -> None:
        """Matrices on the device are old. What somebody has of them keeps its memory."""
        self._all.window.forget(self)
        for expert in [*self.given]:
            self._let_go(expert)

    def homes(self) -> Collection[Lane]:
        """The lanes that its memory on the device goes back to."""
        return [*self._all.window.homes.values(), *(each.home for each in self.given.values())]

    def end(self) -> None:
        """It comes with its block again. Raises OffloadError in a forward of that."""
        weight, parent = self.weight, self.parent
        for block in (parent, self.whole):
            block.refuse_inside(f"{weight.name} is given other bytes")
        self.flush()
        self.forget()
        for block in (self.whole, parent):
            if block.present:
                self._all.residency.drop(block)
        parent.left = self.whole.left or parent.left
        weight.experts, weight.uses, weight.block = None, set(), parent
        parent.weights.append(weight)
        parent.count()
        self._all.weights.remove(self)
        self._all.window.take(self._all.weights)


class _Product(torch.autograd.Function):
    """grouped_mm with a frozen weight that is watched. Saves what torch's own node saves, so that a recompute
    does, too: the weight, of which nothing is kept, and where each expert's rows end."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, ends: Tensor, how: tuple[ExpertWeight, list[int], bool, Pass]
    ) -> Tensor:
        ctx.save_for_backward(w, ends)
        ctx.ends = ends  # whose numbers are known, as those of the same tensor
        weight, counts, transposed, during = how
        return weight.product(x, ends, counts, transposed, during)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w, _ = ctx.saved_tensors
        return torch._grouped_mm(grad.contiguous(), w.transpose(1, 2), offs=ctx.ends), None, None, None


class Experts:
    """All weights of one model that stream by the expert. begin: called before each use. window: their memory
    on the device. waited_s: of the host, for numbers of rows."""

    def __init__(self, residency: Residency, begin: Callable[[BlockWeights], None]) -> None:
        self.residency, self.engine, self.begin = residency, residency.engine, begin
        self.lock, self.window = residency.engine.lock, Window(residency)
        self.weights: list[ExpertWeight] = []
        self.waited_s = 0.0
        self._numbers: Any = WeakTensorKeyDictionary()  # of a tensor: its version, and its elements

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
                known_uses = {"product", "expert", "rows"} & (weight.uses or set())
                if idle and known_uses and not weight.parameter.requires_grad:
                    if block.present:
                        self.residency.drop(block)
                    self.weights.append(ExpertWeight(self, weight))
                    block.count()
        if known == self.weights:
            return False
        self.window.take(self.weights)
        return True

    def use_whole(self, block: BlockWeights) -> None:
        """A use of a weight alone, as a block: one is on the device at once, unless somebody has it."""
        for each in self.weights:
            if each.whole is block:
                each.flush()
            elif each.whole.present and each.whole.may_leave:
                self.residency.drop(each.whole)
        self.residency.use(block, ())

    def numbers(self, ends: Tensor) -> list[int]:
        """The numbers in `ends`. Blocks the host until they are computed, once for a tensor; each time for an
        inference tensor, whose writes are not counted."""
        version = None if ends.is_inference() else ends._version
        known: tuple[int | None, list[int]] = self._numbers.get(ends, (None, []))
        if version is None or known[0] != version:
            began = time.perf_counter()
            known = self._numbers[ends] = version, read_numbers(ends)
            self.waited_s += time.perf_counter() - began
        return known[1]

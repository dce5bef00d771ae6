"""The class that streamed weights have while no forward of their block runs: whoever reads or writes one gets
the bytes, wherever they are, and who writes is seen.

One invariant: between two forwards nothing in Python reaches the bytes of a streamed weight, or of an alias
of it, unless its block is on the device and pinned for that call. What would hand out the address itself is
refused: it would outlive the bytes.

# Note: [Lists of weights]
# An optimizer with foreach or fused hands all weights to one call. Such calls compute each tensor by itself,
# so they are made block by block, and no more blocks are on the device than otherwise.
"""

from __future__ import annotations

import functools
import re
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import get_gradient_edge

from offload.errors import OffloadError
from offload.params.view import inner_parts
from offload.params.watched import HOME, READ_NO_BYTES, Watched, accessors, methods, untouched, watched_in
from offload.weights.gradient import GradientHolder
from offload.weights.weight import Holder, Weight, in_backward, nobody, written
from offload.weights.window import form_of

_SET_DATA = accessors("data", "__set__")
_MAKE_ALIAS = accessors("data", "__get__") | methods("detach view_as")
_AS_ARRAY = methods("numpy __array__")
_NO_BYTES = (
    READ_NO_BYTES
    | accessors("is_cuda is_meta is_sparse is_quantized is_nested nbytes itemsize output_nr", "__get__")
    | accessors("_base", "__get__")
    | accessors("requires_grad", "__set__")
    | accessors("_backward_hooks _post_accumulate_grad_hooks", "__get__", "__set__")
    | methods("requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad get_device")
    | methods("is_complex is_conj is_neg is_inference is_pinned _is_view storage_offset __len__ nelement")
    | methods("ndimension new_empty new_zeros")
    | methods("is_complex is_floating_point numel empty_like zeros_like ones_like", torch)
    | methods("_has_compatible_shallow_copy_type", torch)
)
"""What reads and writes no element."""
_TRAIN = accessors("requires_grad", "__set__") | methods("requires_grad_")
_ADDRESS = methods(
    "data_ptr const_data_ptr untyped_storage storage _typed_storage __dlpack__ share_memory_ set_ resize_ "
    "resize_as_"
) | {Tensor.__cuda_array_interface__.fget}  # type: ignore[attr-defined]
"""What hands out an address, or changes it."""

_BACKWARDS = {torch.autograd.grad, torch.autograd.backward}

_LISTS = re.compile("_foreach_|_fused_|_amp_foreach_")
"""Names of calls that compute each tensor of their lists by itself."""


class StreamedWeight(Watched):
    """A streamed weight, or an alias of one."""

    comes_and_goes = True

    @classmethod
    def touch(cls, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        away = next((w for t in watched_in((args, kwargs), StreamedWeight) if (w := away_of(t))), None)
        if away is not None and (func not in _NO_BYTES or cls.of_collectives(func)):
            return _while_away(away, func, args, kwargs)
        if cls.of_collectives(func) and (func in cls.asked_by_collectives or kwargs.get("async_op")):
            name = owner_of(next(watched_in((args, kwargs), cls))).name
            why = "this version of torch hands to C++, where the weight's bytes may be away:"
            if kwargs.get("async_op"):
                why = "goes on when the weight's bytes have left the device: call it without async_op, or"
            raise OffloadError(
                f"a collective of torch.distributed on {name}, a streamed weight, {why} give it "
                "weight.detach().clone(), and copy the result back"
            )
        if func in _NO_BYTES:
            trains = func in _TRAIN and {*args[1:], *kwargs.values()} != {False} and isinstance(args[0], cls)
            if trains and isinstance(args[0], nn.Parameter) and owner_of(args[0]).int8:
                raise written(owner_of(args[0]))
            return untouched(func, args, kwargs)
        found = list(watched_in((args, kwargs), StreamedWeight))
        owners = [owner_of(tensor) for tensor in found]
        if not found:
            return _beside_a_forward(func, args, kwargs)
        if func in _SET_DATA:
            return _set_data(args[0], args[1])
        if len(found) == 1 and (owners[0].experts is not None or owners[0].uses is not None):
            answer = _by_expert(owners[0], found[0], func, args, kwargs)
            if answer is not NotImplemented:
                return answer
        if func in _ADDRESS:
            of, asked = ("the gradient of ", "gradients") if owners[0].is_gradient else ("", "weights")
            raise OffloadError(
                f"{getattr(func, '__name__', func)}() of {of}{owners[0].name}, whose bytes "
                f"apply({asked}=...) brings to the device and takes away again: an address would outlive "
                "them. Use clone(), or state_dict(), or call remove() on apply's handle first. A compiled "
                "function asks for it of weights outside of their block and of gradients: do not compile it, "
                "nor an optimizer's step"
            )
        if func is torch.chunk:
            _refuse_wrapper(owners[0])
        if func in _MAKE_ALIAS:
            _refuse_wrapper(owners[0])
            return _aliases_in(untouched(func, args, kwargs), owners)
        if func in _BACKWARDS and (inputs := args[1] if func is torch.autograd.grad else kwargs["inputs"]):
            return _differentiate(func, args[0], inputs, kwargs)
        for other in {type(each) for each in watched_in((args, kwargs), Watched)}:
            if not issubclass(other, StreamedWeight):
                other.make_ready((args, kwargs))
        pieces = _pieces(args, kwargs) if _LISTS.match(getattr(func, "__name__", "")) else ()
        if len(pieces) < 2:
            return _run(func, args, kwargs)
        results = [_run(func, *_part(args, kwargs, piece, pieces[-1].stop)) for piece in pieces]
        return None if results[0] is None else [each for result in results for each in result]

    @classmethod
    def make_ready(cls, found: Any) -> None:
        for tensor in watched_in(found, StreamedWeight):
            with _held((owner_of(tensor),)):
                pass

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Torch asks no class about it. A tensor's elements are copied, as by `.data = `."""
        source = next(iter((*args, *kwargs.values())), None)
        if not isinstance(source, Tensor) or len(args) + len(kwargs) > 1:
            return self.touch(Tensor.set_, (self, *args), kwargs)
        self.data = source
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """On the CPU: a copy of the model costs no device memory."""
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("only leaves of autograd's graph can be copied by deepcopy; detach first")
            copied = on_host(self).clone(memory_format=torch.preserve_format)
            is_parameter, trains = isinstance(self, nn.Parameter), self.requires_grad
            memo[id(self)] = nn.Parameter(copied, trains) if is_parameter else copied.requires_grad_(trains)
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with _held((owner_of(self),)):
            plain = untouched(Tensor.detach, (self,), {})
            return repr(nn.Parameter(plain, self.requires_grad) if isinstance(self, nn.Parameter) else plain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        found = on_host(self)
        if isinstance(self, nn.Parameter):
            return torch._utils._rebuild_parameter, (found, self.requires_grad, OrderedDict())
        return found.requires_grad_(self.requires_grad).__reduce_ex__(protocol)


class StreamedGradient(StreamedWeight):
    """A gradient on the host, or an alias of one."""

    @classmethod
    def touch(cls, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if cls.of_collectives(func):
            for tensor in watched_in((args, kwargs), cls):
                cls.stay(tensor)
            return func(*args, **kwargs)
        if func is torch._foreach_norm and (known := _known_norms(args, kwargs)):
            rest = [each for at, each in enumerate(args[0]) if at not in known]
            others = iter(func(rest, *args[1:], **kwargs) if rest else ())
            return [known[at] if at in known else next(others) for at in range(len(args[0]))]
        return super().touch(func, args, kwargs)

    @classmethod
    def stay(cls, tensor: Any) -> None:
        """Keep the gradient on the device until the next backward has added to it (`Watched.stay`)."""
        gradient: Any = owner_of(tensor)
        cast(GradientHolder, holder_of(gradient)).let_go(gradient)

    @classmethod
    def lend(cls, tensor: Any, returned: Callable[[], None]) -> Tensor | None:
        gradient: Any = owner_of(tensor)
        return cast(GradientHolder, holder_of(gradient)).lend(gradient, returned)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone(memory_format=torch.preserve_format)
        return memo[id(self)]


# -- putting the class in place ------------------------------------------------------------------------------
def watch(tensor: Tensor, weight: Weight) -> None:
    """From now on whoever touches the tensor is seen. tensor: the parameter, or a plain alias of it."""
    said = vars(tensor)
    if HOME not in said:
        said[HOME] = weakref.ref(weight)
    if type(tensor) is nn.Parameter:
        said["_is_param"] = True
    kind, watching = type(tensor), StreamedGradient if weight.is_gradient else StreamedWeight
    if kind not in (Tensor, nn.Parameter) and not issubclass(kind, Watched):
        tensor.__class__ = _watching(watching, kind)
    elif not (issubclass(kind, StreamedWeight) and kind.__bases__[1:]):  # else it is one of those
        tensor.__class__ = watching


@functools.cache
def _watching(watching: Any, kind: Any) -> Any:
    """The class of a watched tensor of another class, such as a DTensor."""
    return type(f"Watched{kind.__name__}", (watching, kind), {})


def make_plain(tensor: Tensor, *, for_good: bool = False) -> None:
    """The class that it had again. for_good: nobody owns it any more."""
    said, others = vars(tensor), type(tensor).__bases__[1:]
    if isinstance(tensor, StreamedWeight):
        plain: Any = others[0] if others else nn.Parameter if said.pop("_is_param", False) else Tensor
        tensor.__class__ = plain
    if for_good:
        said.pop(HOME, None)


def orphan(tensor: Tensor) -> None:
    """Its bytes are gone: who touches it gets an error."""
    vars(tensor)[HOME] = nobody


def owner_of(tensor: Tensor) -> Weight:
    """Raises OffloadError where the weight is streamed no more: its module has another one by now."""
    weight: Weight | None = vars(tensor)[HOME]()
    if weight is None or weight.holder() is None:
        kind = "gradient" if isinstance(tensor, StreamedGradient) else "weight"
        raise OffloadError(
            f"a {kind} of shape {tuple(tensor.shape)} was streamed or parked, and its module has another "
            "parameter in its place since, or the model is gone: its bytes are gone with it. Read it before"
        )
    return weight


def holder_of(weight: Weight) -> Holder:
    found: Holder | None = weight.holder()
    assert found is not None  # owner_of has looked
    return found


# -- whose bytes are away for good ---------------------------------------------------------------------------
def away_of(tensor: Tensor) -> Weight | None:
    """Its owner, if its bytes are parked."""
    weight = vars(tensor)[HOME]()
    return weight if weight is not None and weight.away else None


def _while_away(weight: Weight, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Aliases are made, copies to the CPU are of the host's bytes, and one that gets other memory has that;
    all else raises OffloadError."""
    tensor: Any = args[0] if args else None
    if func in _MAKE_ALIAS:
        made = untouched(func, args, kwargs)  # view_as() needs of the other tensor its shape alone
        return _aliases_in(made, [owner_of(tensor)]) if isinstance(tensor, StreamedWeight) else made
    if isinstance(tensor, StreamedWeight):
        if func is Tensor.copy_ and any(
            each is tensor for each in args[1:]
        ):  # its module's load_state_dict() has loaded it
            return tensor
        if func in _SET_DATA and not isinstance(args[1], StreamedWeight):
            make_plain(tensor, for_good=True)
            tensor.data = args[1]
            return None
        if func is Tensor.to and kwargs == {"dtype": tensor.dtype, "device": tensor.device}:
            return tensor  # its optimizer's load_state_dict() has loaded it
        named = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, (str, torch.device))]
        goes = func is Tensor.to and any(torch.device(each).type == "cpu" for each in named)
        if (goes or func is Tensor.cpu) and not inner_parts(tensor):
            return func(on_host(tensor), *args[1:], **kwargs)
    raise OffloadError(f"{getattr(func, '__name__', func)}() of {weight.name}, {weight.away}")


# -- doing what was asked ------------------------------------------------------------------------------------
def _held(owners: Sequence[Weight]) -> ExitStack:
    """Inside, they are on the device, whoever holds them."""
    with ExitStack() as held:
        for holder in dict.fromkeys(holder_of(weight) for weight in owners):
            held.enter_context(holder.hold([each for each in owners if holder_of(each) is holder]))
        return held.pop_all()


def _run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    found = list(watched_in((args, kwargs), StreamedWeight))
    owners = [owner_of(tensor) for tensor in found]
    if not owners:
        return _beside_a_forward(func, args, kwargs)
    with _held(owners):
        if func in _AS_ARRAY:  # of a copy: an array would outlive the bytes, and what is written be lost
            with torch.no_grad() if kwargs.get("force") else nullcontext():
                result = untouched(func, (untouched(Tensor.clone, args[:1], {}), *args[1:]), kwargs)
            result.setflags(write=False)
            return result
        versions = [_version(tensor) for tensor in found]
        if in_backward() and any(weight.experts is not None for weight in owners):
            args, kwargs = _as_plain(args), _as_plain(kwargs)  # what a recompute saves shows that it is read
        result = untouched(func, args, kwargs)
        name = str(getattr(func, "__name__", ""))
        targets = [kwargs.get("out"), *_written_by(func, args, kwargs)]
        if name.startswith("_foreach_") and name.endswith("_"):
            targets.append(args[:1])  # under a dispatch mode these move no version
        out = [*watched_in(targets, StreamedWeight)]
        only_weights = "fused" in name and kwargs.get("grad_scale") is None
        for tensor, weight, version in zip(found, owners, versions, strict=True):
            silent = ("fused" in name and not (only_weights and weight.is_gradient)) or "_amp_" in name
            silent |= Watched.of_collectives(func)  # from C++, which moves no version
            if silent or any(tensor is each for each in out) or _version(tensor) != version:
                holder_of(weight).wrote(weight)
        return _aliases_in(result, owners)


def _written_by(func: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[Any]:
    """Arguments that an operator writes, as its schema says: one of torch.library moves no version."""
    if isinstance(func, OpOverloadPacket):
        for name in func.overloads():
            yield from _written_by(getattr(func, name), args, kwargs)
    elif isinstance(func, OpOverload):
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield args[at] if at < len(args) else kwargs.get(argument.name)


def _known_norms(args: Any, kwargs: Any) -> dict[int, Tensor]:
    """The norms that were taken as gradients left, by place in the list that is asked about."""
    asked, found = (tuple(args[1:]), tuple(sorted(kwargs.items()))), {}
    for at, tensor in enumerate(args[0]):
        if isinstance(tensor, StreamedGradient):
            gradient: Any = owner_of(tensor)
            norm = cast(GradientHolder, holder_of(gradient)).take_norm(gradient, tensor, asked)
            if norm is not None:
                found[at] = norm
    return found


def _beside_a_forward(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The answer of a call whose weights another thread's forward has given torch's own class since the call
    was seen: their blocks stay until it ends."""
    homes = [vars(tensor)[HOME]() for tensor in watched_in((args, kwargs), Tensor) if HOME in vars(tensor)]
    with _held([weight for weight in homes if isinstance(weight, Weight)]):
        return func(*args, **kwargs)


def _by_expert(weight: Weight, tensor: Tensor, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The answer of a weight of experts, or of one of which that is still learned; NotImplemented where the
    call needs the whole weight."""
    if weight.experts is not None:
        return weight.experts.answer(func, args, kwargs)
    if weight.uses is None or not weight.block.entered:
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        form = form_of(func, args, kwargs)
    if tensor.dim() == 3:  # else it is what an index gave, or of a use that has been noted
        weight.uses.add(form if form is None or args[form == "product"] is tensor else None)
    if func in _ADDRESS:  # it is there, and stays until the forward's end
        return untouched(func, args, kwargs)
    return NotImplemented


def _differentiate(func: Callable[..., Any], outputs: Any, inputs: Sequence[Any], kwargs: Any) -> Any:
    """A backward that names weights reads none of them for that, and what it computes again, or reads, must
    meet this class. So it gets their places in the graph instead."""
    if not all(each.requires_grad for each in inputs if isinstance(each, StreamedWeight)):
        return untouched(func, (outputs,), {**kwargs, "inputs": inputs})  # which raises
    edges = [untouched(get_gradient_edge, (t,), {}) if isinstance(t, StreamedWeight) else t for t in inputs]
    options = {**kwargs, "inputs": edges}
    if not kwargs.get("materialize_grads", False):
        return func(outputs, **options)
    found = func(outputs, **options | {"materialize_grads": False, "allow_unused": True})
    zeros = partial(torch.zeros_like, requires_grad=bool(kwargs.get("create_graph")))
    return tuple(zeros(each) if got is None else got for each, got in zip(inputs, found, strict=True))


def _version(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return -1 if tensor.is_inference() else tensor._version


def _aliases_in(result: Any, owners: Sequence[Weight]) -> Any:
    """The result, of which the tensors that share memory with a weight are watched."""
    storages = {weight.storage._cdata: weight for weight in owners}
    if inner := inner_parts(result):
        _aliases_in([*inner.values()], owners)
        watched = [owner_of(part) for part in inner.values() if isinstance(part, StreamedWeight)]
        for weight in watched[:1]:
            watch(result, weight)
            weight.watch_alias(result)
    for tensor in _plain_in(result):
        try:
            found = storages.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # a wrapper has none
            continue
        if found is not None:
            watch(tensor, found)
            found.watch_alias(tensor)
    return result


def _as_plain(given: Any) -> Any:
    if isinstance(given, StreamedWeight):
        return untouched(Tensor.view_as, (given, given), {})
    if type(given) in (tuple, list):
        return type(given)(map(_as_plain, given))
    return {key: _as_plain(each) for key, each in given.items()} if type(given) is dict else given


def _plain_in(result: Any) -> Iterator[Tensor]:
    if type(result) is Tensor:
        yield result
    elif isinstance(result, (tuple, list)):
        for each in result:
            yield from _plain_in(each)


def on_host(tensor: Tensor) -> Tensor:
    """The tensor's elements on the CPU, in the master."""
    weight = owner_of(tensor)
    if inner_parts(tensor):
        raise OffloadError(f"a copy of {weight.name}, {weight.away}")
    found = holder_of(weight).host_copy(weight)
    return found.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _set_data(tensor: Tensor, value: Tensor) -> None:
    if not isinstance(tensor, StreamedWeight):  # the value is one: the other tensor shares its memory
        with torch._C.DisableTorchFunctionSubclass():
            tensor.data = value
        _aliases_in(tensor, [owner_of(value)])
        return
    weight = owner_of(tensor)
    if tensor is not weight.parameter:  # an alias goes its own way from here on
        make_plain(tensor, for_good=True)
        tensor.data = value
        return
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.device == value.device and tensor.is_set_to(value):
            return
    read = (weight, owner_of(value)) if isinstance(value, StreamedWeight) else (weight,)
    with _held(read), torch.no_grad():
        own = untouched(Tensor.clone, (value,), {"memory_format": torch.preserve_format})
    holder_of(weight).set_data(weight, own)


def _refuse_wrapper(weight: Weight) -> None:
    """DDP's constructor, and its join(), hand the result to C++, which would read bytes that are not there;
    FSDP puts other parameters in the place of its shards."""
    frame: FrameType | None = sys._getframe(3)
    for _ in range(4):
        if frame is None:
            return
        name = frame.f_code.co_name if "distributed" in frame.f_code.co_filename else ""
        if name == "_init_sharded_param":
            raise OffloadError(
                f"fully_shard() of a model whose weights are on the host ({weight.name}): FSDP frees and "
                "refills parameters itself. Call remove() on apply's handle first; CPUOffloadPolicy() keeps "
                "its shards on the host, and FSDPGPUOptimizerWrapper steps them"
            )
        if name == "_sync_module_states":
            caller, what = frame.f_back, f"({weight.name}, {weight.nbytes:,} bytes)"
            if caller is not None and caller.f_code.co_name == "_sync_final_model":
                raise OffloadError(
                    f"DistributedDataParallel.join() of a model whose weights are on the host {what}: its "
                    "end sends them from C++, which sees no bytes. Call remove() on apply's handle as the "
                    "last inside of it, or give all ranks as many batches and leave it out"
                )
            raise OffloadError(
                f"DistributedDataParallel(model) of a model whose weights are on the host {what}: its "
                "constructor sends them from C++, which sees no bytes. Build it first, then call "
                "apply(weights=...) on the model inside; or give it init_sync=False where all ranks have the "
                "same weights"
            )
        frame = frame.f_back


# -- Note: [Lists of weights] --------------------------------------------------------------------------------
def _pieces(args: Any, kwargs: Any) -> list[range]:
    """The ranges of a call's lists that each need one block; one, or none, where it has no such lists."""
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, (list, tuple))]
    lists = [each for each in given if any(isinstance(tensor, StreamedWeight) for tensor in each)]
    if not lists or any(len(given) != len(lists[0]) for given in lists):
        return []
    starts, last = [0], None
    for at, row in enumerate(zip(*lists, strict=True)):
        block = next((owner_of(t).block for t in row if isinstance(t, StreamedWeight)), last)
        if block is not last and last is not None:
            starts.append(at)
        last = block
    ends = [*starts[1:], len(lists[0])]
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]


def _part(args: Any, kwargs: Any, piece: range, length: int) -> tuple[Any, Any]:
    def of(given: Any) -> Any:
        is_list = isinstance(given, (list, tuple)) and len(given) == length
        is_list |= isinstance(given, Tensor) and given.shape == (length,)  # one number a tensor
        return given[piece.start : piece.stop] if is_list else given

    return [of(each) for each in args], {key: of(each) for key, each in kwargs.items()}

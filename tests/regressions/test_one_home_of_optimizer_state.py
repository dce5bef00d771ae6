"""A second copy of an optimizer's state guessed which one was true.

`optimizer.state` was a dictionary that each look filled anew and each step compared with what it had last
shown; a param group was copied into each optimizer inside before every step. So a look could reset moments,
what a class wrote into its group was overwritten, and what the user held or added was lost. Now an entry of
state and a param group have one home. Each test is a loop that is right with torch, run beside it.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from offload.device.sim import SimDevice
from offload.errors import OffloadError
from offload.optim import HybridDeviceOptimizer
from tests.optim_pair import OVERLAPS, Overlap, assert_same, backward, copies, hybrid, net, settled

FRACTIONS = [0.0, 0.5, 1.0]


def loop_with(
    change: Callable[[nn.Sequential, Optimizer, int], Any], steps: int = 6
) -> Callable[[Any], list[Tensor]]:
    """change: called with the number of the step to come, and once at the end. Tensors that it returns are
    compared too."""

    def loop(make: Any) -> list[Tensor]:
        model = net()
        optimizer = make(model)
        seen = []
        for number in range(steps + 1):
            found = change(model, optimizer, number)
            seen += [each.clone() for each in found or ()]
            if number < steps:
                backward(model, number)
                optimizer.step()
                optimizer.zero_grad()
        settled(optimizer)
        return [*seen, *copies(model)]

    return loop


# -- entries -------------------------------------------------------------------------------------------------
def reads_before_the_first_step(model: nn.Sequential, optimizer: Optimizer, number: int) -> None:
    if number == 0:
        assert not optimizer.state[model[0].weight]


def clears_an_entry(model: nn.Sequential, optimizer: Optimizer, number: int) -> None:
    if number == 2:
        optimizer.state[model[0].weight].clear()


def replaces_an_entry_by_nothing(model: nn.Sequential, optimizer: Optimizer, number: int) -> None:
    if number == 2:
        optimizer.state[model[0].weight] = {}


def pops_an_entry(model: nn.Sequential, optimizer: Optimizer, number: int) -> None:
    if number == 2:
        optimizer.state.pop(model[0].weight)


def looks_ahead(model: nn.Sequential, optimizer: Optimizer, number: int) -> None:
    """As timm's Lookahead keeps its slow weights: with the state of another's optimizer."""
    if number and number % 2 == 0:
        with torch.no_grad():
            for parameter in model.parameters():
                state = optimizer.state[parameter]
                if "slow" not in state:
                    state["slow"] = parameter.detach().clone()
                state["slow"].add_(parameter - state["slow"], alpha=0.5)
                parameter.copy_(state["slow"])


CHANGES = [
    reads_before_the_first_step,
    clears_an_entry,
    replaces_an_entry_by_nothing,
    pops_an_entry,
    looks_ahead,
]


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_entry_may_be_looked_at_cleared_and_added_to(
    change: Callable[..., Any], fraction: float, overlap: Overlap
) -> None:
    """A look before the first step, or one clear(), reset the moments in every later step; a user's own keys
    were dropped."""
    assert_same(loop_with(change), overlap=overlap, fraction=fraction, executors=("late",))


def holds_entries(what: str) -> Callable[..., Any]:
    held: dict[int, Any] = {}

    def change(model: nn.Sequential, optimizer: Optimizer, number: int) -> Any:
        parameters = [*model.parameters()]
        if number == 2:
            entries = [optimizer.state[parameter] for parameter in parameters]
            held[id(optimizer)] = entries, [entry["exp_avg"] for entry in entries]
            held[id(optimizer), "counts"] = [entry["step"] for entry in entries]
            assert all(optimizer.state[p] is entry for p, entry in zip(parameters, entries, strict=True))
        if number < 4:
            return None
        entries, moments = held[id(optimizer)]
        if number == 4 and what == "entries written":
            for entry, parameter in zip(entries, parameters, strict=True):
                entry.update(exp_avg=torch.zeros_like(parameter))
        elif number == 4 and what == "moments written":
            for moment in moments:
                moment.zero_()
        elif number == 4 and what == "counts written":
            for count in held[id(optimizer), "counts"]:
                count.fill_(0)
        elif what == "entries read":
            return [entry["exp_avg"] for entry in entries]
        elif what == "moments read":
            return moments
        return None

    return change


@pytest.mark.parametrize("overlap", ["step", "forward"])
@pytest.mark.parametrize(
    "what", ["entries written", "moments written", "counts written", "entries read", "moments read"]
)
def test_an_entry_that_is_held_stays_true(what: str, overlap: Overlap) -> None:
    """It was dead once another was looked at: writes were lost, and moments were those of an earlier step."""
    assert_same(loop_with(holds_entries(what)), overlap=overlap)


def test_nobody_who_holds_no_tensor_of_state_makes_steps_wait() -> None:
    model = net()
    optimizer = hybrid(model, overlap="forward")
    for number in range(2):
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
        kept = optimizer.state[model[0].weight]["exp_avg"]
    backward(model, 3)
    optimizer.step()
    assert optimizer._runner.state.is_held
    del kept
    backward(model, 4)
    optimizer.step()
    assert not optimizer._runner.state.is_held
    optimizer.close()


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_users_own_keys_are_in_the_state_dict_and_loaded(fraction: float) -> None:
    def resumes(model: nn.Sequential, optimizer: Optimizer, number: int) -> None:
        looks_ahead(model, optimizer, number)
        if number == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            assert all("slow" in entry for entry in saved["state"].values())
            optimizer.state.clear()
            optimizer.load_state_dict(saved)

    assert_same(loop_with(resumes), fraction=fraction, executors=("late",))


def test_an_entry_is_a_dictionary_to_all_who_ask() -> None:
    model = net()
    optimizer = hybrid(model)
    backward(model, 0)
    optimizer.step()
    entry = optimizer.state[model[0].weight]
    assert isinstance(entry, dict)
    assert {**entry}.keys() == dict(entry).keys() == entry.copy().keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert type(copy.deepcopy(entry)) is dict
    rebuilt = type(entry)({key: value + 1 for key, value in entry.items()})  # as Lightning moves state
    assert type(rebuilt) is dict
    optimizer.state[model[0].weight] = rebuilt
    assert float(optimizer.state[model[0].weight]["step"]) == 2
    assert float(entry["step"]) == 1, "what was replaced is whoever's that holds it, as with torch"
    assert not optimizer.state[torch.zeros(3)], "as torch's, of a tensor in no group"
    del optimizer.state[model[0].weight]["exp_avg"]
    backward(model, 1)
    with pytest.raises(ValueError, match="has no exp_avg in its state"):
        optimizer.step()
    optimizer.close()


# -- groups --------------------------------------------------------------------------------------------------
class Decaying(Optimizer):
    """Counts in its group, as schedule-free and Prodigy do, or in state under a name."""

    def __init__(self, params: Any, lr: float = 0.1, named: bool = False) -> None:
        super().__init__(params, {"lr": lr, "named": named, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            home = self.state["all"] if group["named"] else group
            home["k"] = home.get("k", 0) + 1
            group["added"] = home["k"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / home["k"])


class Clipped(Optimizer):
    """Looks at all parameters, as Lamb does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        mine = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if mine:
            norm = torch.stack([p.grad.norm() for p in mine]).norm()  # type: ignore[union-attr]
            for parameter in mine:
                parameter.add_(parameter.grad / norm, alpha=-self.param_groups[0]["lr"])  # type: ignore[operator]


def of_two_groups(loop: Callable[..., Any]) -> Callable[[Any], list[Tensor]]:
    def run(make: Any) -> list[Tensor]:
        model = net()
        first, *rest = model.parameters()
        return list(loop(lambda: make([{"params": rest, "lr": 0.05}, {"params": [first]}]), model))

    return run


def resumes_and_is_scheduled(make: Callable[[], Any], model: nn.Module) -> list[Tensor]:
    optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for number in range(6):
        if number == 3:
            saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
            optimizer = make()
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            optimizer.load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
        backward(model, number)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    counts = [group.get(key, -1) for group in optimizer.param_groups for key in ("k", "added")]
    return [torch.tensor(counts), *copies(model)]


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize(
    ("cls", "options"),
    [(Decaying, {}), (Decaying, {"named": True}), (Clipped, {})],
    ids=["group", "name", "all"],
)
def test_what_a_class_keeps_in_groups_or_asks_of_all_is_as_in_torch(
    cls: type[Optimizer], options: dict[str, Any], fraction: float
) -> None:
    """A count in a group was reset before every step and in no state dict, and a class that takes a norm over
    all parameters was split in two at the default fraction, silently."""
    assert_same(
        of_two_groups(resumes_and_is_scheduled),
        cls,
        options,
        fraction=fraction,
        shares=(1.0,),
        executors=("late",),
    )


@pytest.mark.parametrize("options", [{}, {"named": True}], ids=["group", "name"])
def test_so_it_is_for_parameters_that_live_on_the_host(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the parameters are elsewhere than the device, and are stepped where they are."""
    monkeypatch.setattr(SimDevice, "owns", lambda *_: False)
    assert_same(
        of_two_groups(resumes_and_is_scheduled), Decaying, options, shares=(1.0,), executors=("late",)
    )


def test_one_optimizer_has_parameters_of_the_device_and_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were refused together."""
    monkeypatch.setattr(SimDevice, "owns", lambda _, tensor: tensor.numel() != 24)
    assert_same(of_two_groups(resumes_and_is_scheduled), Clipped, {}, shares=(1.0,), executors=("late",))


@pytest.mark.parametrize("atomic", [None, False])
def test_a_class_that_is_not_torchs_is_one_optimizer_and_says_so(
    atomic: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        optimizer = HybridDeviceOptimizer(
            net().parameters(), cpu_optimizer_cls=Clipped, lr=0.1, atomic_step=atomic, bucket_bytes=1024
        )
    assert "Clipped may look at all parameters at once, so one optimizer steps them all" in caplog.text
    assert "offload_fraction is 1, not 0.5" in caplog.text
    assert len(optimizer.sub_optimizers) == 1
    optimizer.close()
    with pytest.raises(ValueError, match=r"a class that is not of torch\.optim have none"):
        hybrid(net(), Clipped, overlap="forward")
    with pytest.raises(ValueError, match="may both write into one param group"):
        HybridDeviceOptimizer(
            net().parameters(), cpu_optimizer_cls=Clipped, gpu_optimizer_cls=Decaying, lr=0.1
        )


class Fails(Decaying):
    """Fails once, after it has counted."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        if Fails.fails:
            Fails.fails = False
            raise MemoryError("no more")


@pytest.mark.parametrize("named", [False, True])
def test_counts_of_a_step_that_failed_are_taken_back(named: bool) -> None:
    model, reference = net(), net()
    plain, optimizer = (
        Decaying(reference.parameters(), named=named),
        hybrid(model, Fails, lr=0.1, named=named),
    )
    for number in range(4):
        for each in (model, reference):
            backward(each, number)
        Fails.fails = number in (0, 2)
        if Fails.fails:
            with pytest.raises(OffloadError, match="weights and state are those of the last whole step"):
                optimizer.step()
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    assert all(map(torch.equal, copies(model), copies(reference)))
    optimizer.close()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_amsgrad_may_be_switched_on_in_a_group_before_the_first_step(share: float) -> None:
    """A worker died of a KeyError."""

    def switches(_: nn.Sequential, optimizer: Optimizer, number: int) -> None:
        optimizer.param_groups[0]["amsgrad"] = True

    assert_same(loop_with(switches), shares=(share,), executors=("late",))


# -- hooks ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"fraction": 0.5}, {"fraction": 0.0}], ids=str)
def test_hooks_for_all_optimizers_run_once_a_step_and_in_the_training_thread(options: dict[str, Any]) -> None:
    """They ran again for each optimizer inside, on its thread: gradients were scaled twice."""
    threads: set[str] = set()

    def halves(optimizer: Optimizer, *_: Any) -> None:
        threads.add(threading.current_thread().name)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    calls: list[Optimizer] = []
    handles = [
        register_optimizer_step_pre_hook(halves),
        register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(optimizer)),
    ]
    try:
        assert_same(loop_with(lambda *_: None), executors=("late",), **options)
    finally:
        for handle in handles:
            handle.remove()
    assert threads == {threading.main_thread().name}
    assert all(isinstance(each, (AdamW, HybridDeviceOptimizer)) for each in calls)
    assert len(calls) == 6 * 3


# -- offload_fraction=0 --------------------------------------------------------------------------------------
def sparse(make: Any, cls: type[Optimizer]) -> Tensor:
    torch.manual_seed(0)
    layer = nn.Embedding(10, 4, sparse=True)
    optimizer = make(layer.parameters(), cls)
    for _ in range(3):
        layer(torch.tensor([1, 2])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer.weight.detach()


@pytest.mark.parametrize("cls", [torch.optim.SparseAdam, SGD], ids=lambda cls: cls.__name__)
def test_nothing_offloaded_steps_sparse_gradients_as_torch_does(cls: type[Optimizer]) -> None:
    """The error of an offloaded one advised offload_fraction=0, which raised as well."""
    expected = sparse(lambda p, cls: cls(p, lr=0.1), cls)
    assert torch.equal(sparse(lambda p, cls: HybridDeviceOptimizer(p, 0.0, cls, lr=0.1), cls), expected)


def test_nothing_offloaded_steps_complex_and_oddly_laid_out_parameters() -> None:
    def run(make: Any) -> list[Tensor]:
        parameters = [
            nn.Parameter(torch.ones(3, dtype=torch.complex64)),
            nn.Parameter(torch.arange(8.0).reshape(2, 4)[:, ::2]),
        ]
        optimizer = make(parameters)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return [torch.view_as_real(parameters[0].detach()), parameters[1].detach()]

    expected = run(lambda p: AdamW(p, lr=0.1))
    assert all(map(torch.equal, run(lambda p: HybridDeviceOptimizer(p, 0.0, lr=0.1)), expected))


def derivatives(make: Any) -> list[Any]:
    lr = torch.tensor(0.1, requires_grad=True)
    weight = torch.ones(3, requires_grad=True)
    parameter = weight.clone()
    parameter.retain_grad()
    optimizer = make([parameter], lr)
    parameter.grad = weight * 2
    optimizer.step()
    parameter.sum().backward()
    return [lr.grad, weight.grad]


def test_a_differentiable_step_keeps_its_graph_or_is_refused() -> None:
    """It was taken, and its graph was lost without a word."""
    expected = derivatives(lambda p, lr: SGD(p, lr=lr, differentiable=True))
    found = derivatives(lambda p, lr: HybridDeviceOptimizer(p, 0.0, SGD, lr=lr, differentiable=True))
    assert all(map(torch.equal, found, expected))
    with pytest.raises(ValueError, match="differentiable=True keeps the step in autograd's graph"):
        HybridDeviceOptimizer(net().parameters(), 1.0, SGD, lr=0.1, differentiable=True)


# -- ends ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_replaced_parameters_are_let_go_with_their_memory(fraction: float) -> None:
    """They were held for ever, and host memory grew 16 times in 30 replacements."""
    model = net()
    optimizer = hybrid(model, fraction=fraction, overlap="backward")
    replaced: list[weakref.ref[Tensor]] = []
    most = 2 * optimizer.host_bytes
    for number in range(8):
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model[2].parameters():
            replaced.append(weakref.ref(parameter))
            if number % 2:
                optimizer.state.pop(parameter, None)
        gone = [*model[2].parameters()]
        model[2] = nn.Linear(32, 24)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        if number % 2 == 0:  # torch, too, holds a parameter while it has state
            for parameter in gone:
                optimizer.state.pop(parameter, None)
        del parameter, gone
    backward(model, 99)
    optimizer.step()
    gc.collect()
    assert [reference() for reference in replaced if reference() is not None] == []
    assert optimizer.host_bytes <= most
    optimizer.close()


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("fraction", FRACTIONS[1:])
def test_a_closed_optimizer_says_so(fraction: float, share: float) -> None:
    """Its state dict had the bytes of whoever had the memory by then."""
    model = net()
    optimizer = hybrid(model, fraction=fraction, cpu_share=share)
    backward(model, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.close()
    for call in (
        optimizer.state_dict,
        optimizer.step,
        lambda: optimizer.state,
        lambda: optimizer.load_state_dict(saved),
        optimizer.dummy_step,
    ):
        with pytest.raises(OffloadError, match="the optimizer was closed"):
            call()
    optimizer.close()


# -- clipping, devices, graphs -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "norm_type"), [(torch.float64, 2.0), (torch.float32, "inf"), (torch.float32, 1)], ids=str
)
def test_clipping_takes_what_torchs_does(dtype: torch.dtype, norm_type: Any) -> None:
    model, reference = net().to(dtype), net().to(dtype)
    for each in (model, reference):
        each(torch.ones(2, 24, dtype=dtype)).square().mean().backward()
    optimizer = hybrid(model)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 1e-3, norm_type)
    assert torch.equal(optimizer.clip_grad_norm_(1e-3, norm_type), expected)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]
    optimizer.close()


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_default_device_makes_nothing_of_the_hosts(share: float, dtype: torch.dtype) -> None:
    """A count of the host's optimizer was made on it ("meta" stands for "cuda")."""
    model = net().to(dtype)
    x = torch.ones(2, 24, dtype=dtype)
    torch.set_default_device("meta")
    try:
        optimizer = hybrid(model, cpu_share=share, param_update_in_fp32=True)
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            assert all(value.device.type == "cpu" for value in optimizer.state[model[0].weight].values())
        optimizer.close()
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("overlap", ["step", "forward"])
def test_a_compiled_function_may_step(overlap: Overlap) -> None:
    """An internal error of the compiler under "forward"."""

    def loop(make: Any) -> list[Tensor]:
        torch._dynamo.reset()
        model = net()
        optimizer = make(model)
        step = torch.compile(lambda: optimizer.step(), backend="eager")
        for number in range(2):
            backward(model, number)
            step()
            optimizer.zero_grad()
        settled(optimizer)
        return copies(model)

    assert_same(loop, overlap=overlap, shares=(0.0,), executors=("late",))


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_models_of_torch_jit_are_refused_where_their_reads_are_not_seen(overlap: Overlap) -> None:
    """A traced one read weights on their way, and a scripted one raised a bare RuntimeError."""
    model = torch.jit.trace(net(), torch.ones(6, 24))
    with pytest.raises(ValueError, match=r"is a module of torch\.jit, whose code reads weights unseen"):
        hybrid(model, overlap=overlap)
    hybrid(model).close()


# -- state that is loaded between the backward and step() ----------------------------------------------------
def test_state_that_is_loaded_after_the_backward_has_stepped_is_an_error_or_a_fresh_start() -> None:
    """The gradients were stepped a second time with the loaded state, silently: 0.02 off."""
    model = net()
    optimizer = hybrid(model, overlap="backward")
    for number in range(3):
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    backward(model, 3)
    optimizer.load_state_dict(saved[1])
    with pytest.raises(
        OffloadError, match="had been stepped in the backward, and step\\(\\) would step it again"
    ):
        optimizer.step()
    optimizer.load_state_dict(saved[1])
    model.load_state_dict(saved[0])
    optimizer.zero_grad()
    backward(model, 3)  # thrown away with a load, as after an exception in it
    optimizer.load_state_dict(saved[1])
    model.load_state_dict(saved[0])
    optimizer.zero_grad()
    backward(model, 3)
    optimizer.step()
    found = copies(model)
    optimizer.close()
    reference = net()
    plain = AdamW(reference.parameters(), lr=1e-2, fused=True)
    for number in range(4):
        backward(reference, number)
        plain.step()
        plain.zero_grad()
    assert all(map(torch.equal, found, copies(reference)))


# -- processes -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_a_forked_child_does_not_wait_for_threads_that_only_its_parent_has(fraction: float) -> None:
    """`step()` waited for ever there, as in a worker of torch.multiprocessing."""
    model = net()
    optimizer = hybrid(model, fraction=fraction)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if (child := os.fork()) == 0:
        signal.alarm(20)
        try:
            optimizer.step()
            os._exit(0)
        except OffloadError as error:
            says = "forked from it; build the optimizer in the process that steps it" in str(error)
            os._exit(7 if says else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (7 if fraction else 0)
    optimizer.step()
    optimizer.close()

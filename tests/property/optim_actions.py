"""The vocabulary of random training programs: what a user does between, around and inside of steps.

One invariant: an action does not know whose optimizer it was given. Each has a kind, which says where
`overlap="forward"` and `"backward"` promise the same bits; see `Kind`.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tests.property.optim_world import MASTER, WIDTH, World, batch

Kind = Literal["backward", "again", "gradients", "hidden", "step", "zero", "between", "view", "tied"]
"""backward: makes final gradients. again: several backwards, or hooks. gradients: written so that a version
counter moves. hidden: so that none does. step, zero. between: weights, state, groups. view: of a weight,
taken before step() and read after it, which "forward" cannot see. tied: two parameters of one memory."""


@dataclass(frozen=True)
class Action:
    kind: Kind
    run: Callable[[World, int], object]


ACTIONS: dict[str, Action] = {}


def action(kind: Kind) -> Callable[[Callable[[World, int], object]], Callable[[World, int], object]]:
    def add(run: Callable[[World, int], object]) -> Callable[[World, int], object]:
        ACTIONS[run.__name__] = Action(kind, run)
        return run

    return add


def of_kind(*kinds: Kind) -> list[str]:
    return [name for name, each in ACTIONS.items() if each.kind in kinds]


def play(program: list[tuple[str, int]], world: World) -> list[tuple[str, Tensor]]:
    """Everything that was seen, and the weights at the end, read as anybody would."""
    for number, (name, argument) in enumerate(program):
        world.number = number
        ACTIONS[name].run(world, argument)
    world.see_weights("at the end")
    return world.seen


# -- backward ------------------------------------------------------------------------------------------------
@action("backward")
def train(w: World, n: int) -> None:
    loss = w.loss(n, how=n % 5)
    w.see("loss", loss)
    loss.backward()


@action("backward")
def train_part(w: World, n: int) -> None:
    """Some parameters have no gradient."""
    w.model.middle(w.model.first(batch(n, w.dtype))).float().square().mean().backward()


@action("backward")
def train_with_penalty(w: World, n: int) -> None:
    penalty = torch.stack([each.float().square().sum() for each in w.model.parameters()]).sum()
    (w.loss(n) + 0.1 * penalty).backward()


@action("backward")
def train_checkpointed(w: World, n: int) -> None:
    x = batch(n, w.dtype).requires_grad_()
    checkpoint(w.model, x, use_reentrant=bool(n % 2)).float().square().mean().backward()


@action("backward")
def train_functionally(w: World, n: int) -> None:
    weights = dict(w.model.named_parameters())
    functional_call(w.model, weights, (batch(n, w.dtype),)).float().square().mean().backward()


def in_a_thread(call: Callable[[], Any]) -> Any:
    """What the call returns or raises on a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


@action("backward")
def train_in_a_thread(w: World, n: int) -> None:
    in_a_thread(lambda: w.loss(n).backward())


@action("backward")
def train_scaled(w: World, n: int) -> None:
    w.scaler.scale(w.loss(n)).backward()


@action("again")
def train_overflowing(w: World, n: int) -> None:
    """A scaler skips this step; nothing else is left of it."""
    w.scaler.scale(w.loss(n) * float("inf")).backward()
    scaler_step(w, n)
    for optimizer in w.optimizers:
        optimizer.zero_grad()


@action("again")
def train_twice_over_one_graph(w: World, n: int) -> None:
    loss = w.loss(n)
    loss.backward(retain_graph=True)
    loss.backward()


@action("again")
def forwards_first(w: World, n: int) -> None:
    losses = w.loss(n), w.loss(n + 1, how=3)
    for loss in losses:
        loss.backward()


@action("again")
def train_for_some(w: World, n: int) -> None:
    w.loss(n, how=4).backward(inputs=w.trained()[n % 3 :: 2])


@action("again")
def gradient_penalty(w: World, n: int) -> None:
    found = torch.autograd.grad(w.loss(n), [w.model.head.weight], create_graph=True)
    found[0].float().square().sum().backward()


@action("again")
def assign_gradients(w: World, n: int) -> None:
    """By hand, without `.backward()`."""
    some = [w.model.middle[0].weight, w.model.head.weight, w.model.scale]
    for parameter, gradient in zip(some, torch.autograd.grad(w.loss(n), some), strict=True):
        parameter.grad = gradient


@action("again")
def train_with_graph(w: World, n: int) -> None:
    """Gradients have a graph of their own."""
    w.loss(n).backward(create_graph=True)


@action("gradients")
def expanded_gradients(w: World, _: int) -> None:
    for parameter in w.model.pair:
        parameter.grad = torch.full((1, 1), 0.5, dtype=parameter.dtype).expand(2, 3)


@action("gradients")
def one_gradient_for_two(w: World, _: int) -> None:
    first, second = w.model.pair
    second.grad = first.grad


@action("again")
def keep_a_loss(w: World, n: int) -> None:
    """Of weights that its backward does not read, so that it may run after a step, and adds to gradients."""
    biases = [w.model.first.bias, w.model.head.bias, w.model.scale]
    w.kept["loss"] = torch.stack([(each.float() * (n + 1)).sum() for each in biases]).sum()


@action("again")
def backward_of_the_kept_loss(w: World, _: int) -> None:
    loss = w.kept.pop("loss", None)
    if loss is not None and loss.requires_grad:
        loss.backward()


@action("again")
def hook_scales_its_own(w: World, n: int) -> None:
    def scale(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)

    one = w.trained()[n % 4]
    w.kept.setdefault("hooks", []).append(one.register_post_accumulate_grad_hook(scale))


@action("again")
def hook_scales_others(w: World, n: int) -> None:
    """Between their landings, and past the version counter with an odd number."""

    def scale(_: Tensor) -> None:
        for _parameter, gradient in w.with_gradient():
            (gradient.data if n % 2 else gradient).mul_(0.5)

    one = w.trained()[n % 4]
    w.kept.setdefault("hooks", []).append(one.register_post_accumulate_grad_hook(scale))


@action("backward")
def hook_on_a_gradient(w: World, n: int) -> None:
    one = w.trained()[n % 4]
    w.kept.setdefault("hooks", []).append(one.register_hook(lambda gradient: gradient * 0.5))
    w.loss(n).backward()


@action("between")
def unhook(w: World, _: int) -> None:
    for handle in w.kept.pop("hooks", []):
        handle.remove()


# -- gradients -----------------------------------------------------------------------------------------------
@action("gradients")
def scale_gradients(w: World, _: int) -> None:
    for _parameter, gradient in w.with_gradient():
        gradient.mul_(0.5)


@action("gradients")
def replace_gradients(w: World, n: int) -> None:
    for parameter, gradient in list(w.with_gradient())[n % 2 :: 2]:
        parameter.grad = gradient * 0.25


@action("gradients")
def gradients_of_another_layout(w: World, _: int) -> None:
    for parameter, gradient in w.with_gradient():
        if gradient.dim() == 2:
            parameter.grad = gradient.t().contiguous().t()


@action("gradients")
def lose_a_gradient(w: World, n: int) -> None:
    list(w.model.parameters())[n % 8].grad = None


@action("gradients")
def clip_by_torch(w: World, n: int) -> None:
    w.see("norm", nn.utils.clip_grad_norm_(w.model.parameters(), (1e-3, 0.1, 1e9)[n % 3]))


@action("gradients")
def clip_values(w: World, _: int) -> None:
    if any(True for _ in w.with_gradient()):
        nn.utils.clip_grad_value_(w.model.parameters(), 1e-2)


@action("gradients")
def unscale(w: World, n: int) -> None:
    w.attempt("unscale", lambda: w.scaler.unscale_(w.optimizer(n)))


@action("gradients")
def noise(w: World, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    for _parameter, gradient in w.with_gradient():
        gradient.add_(torch.randn(gradient.shape, generator=generator).to(gradient.dtype), alpha=0.01)


@action("again")
def gradients_in_one_buffer(w: World, n: int) -> None:
    """As flat gradient buffers do: each gradient is a view, and the buffer is written as one."""
    some = [parameter for parameter, _ in w.with_gradient() if parameter.is_contiguous()]
    if some:
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in some])
        pieces = flat.split([parameter.numel() for parameter in some])
        for parameter, piece in zip(some, pieces, strict=True):
            parameter.grad = piece.view(parameter.shape)
        w.kept["flat gradients"] = flat.mul_(0.5)


@action("gradients")
def write_the_buffer(w: World, n: int) -> None:
    if "flat gradients" in w.kept:
        w.kept["flat gradients"].mul_(0.25) if n % 2 else w.kept["flat gradients"].zero_()


@action("hidden")
def write_gradients_data(w: World, _: int) -> None:
    for _parameter, gradient in w.with_gradient():
        gradient.data.mul_(0.5)


@action("hidden")
def write_gradients_by_numpy(w: World, _: int) -> None:
    for _parameter, gradient in w.with_gradient():
        if gradient.dtype is torch.float32 and gradient.is_contiguous():
            gradient.numpy()[...] *= 0.5


@action("hidden")
def write_gradients_in_a_thread(w: World, _: int) -> None:
    in_a_thread(lambda: [gradient.data.add_(0.01) for _, gradient in w.with_gradient()])


@action("between")
def read_gradients(w: World, _: int) -> None:
    for _parameter, gradient in w.with_gradient():
        w.see("gradient", gradient)


# -- step ----------------------------------------------------------------------------------------------------
@action("step")
def step(w: World, n: int) -> None:
    w.optimizer(n).step()


@action("step")
def step_all(w: World, _: int) -> None:
    for optimizer in w.optimizers:
        optimizer.step()


@action("step")
def step_and_zero(w: World, _: int) -> None:
    for optimizer in w.optimizers:
        optimizer.step()
        optimizer.zero_grad()


@action("step")
def scaler_step(w: World, n: int) -> None:
    w.attempt("scaler's step", lambda: w.scaler.step(w.optimizer(n)))
    w.attempt("scaler's update", w.scaler.update)
    w.see("scale", w.scaler.get_scale())


@action("again")
def step_with_closure(w: World, n: int) -> None:
    optimizer = w.optimizer(n)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = w.loss(n)
        loss.backward()
        return loss

    loss: Any = optimizer.step(closure)
    w.see("loss", loss)


@action("zero")
def zero(w: World, n: int) -> None:
    w.optimizer(n).zero_grad()


@action("zero")
def zero_in_place(w: World, n: int) -> None:
    w.optimizer(n).zero_grad(set_to_none=False)


@action("zero")
def zero_by_the_model(w: World, n: int) -> None:
    w.model.zero_grad(set_to_none=bool(n % 2))


@action("step")
def step_under(w: World, n: int) -> None:
    """Inside of a context that changes what tensors are made."""
    contexts = [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        torch.inference_mode,
        torch.enable_grad,
        torch.autograd.detect_anomaly,
    ]
    if n % 5 == 4:
        torch.set_default_dtype(torch.float64)
    try:
        with contexts[n % 4](), warnings.catch_warnings():
            w.optimizer(n).step()
    finally:
        torch.set_default_dtype(torch.float32)


@action("step")
def step_by_torchs_own(w: World, n: int) -> None:
    """A second optimizer, of torch, over some of the weights."""
    some = [parameter for parameter, _ in w.with_gradient()][n % 3 :: 2]
    if some:
        torch.optim.SGD(some, lr=1e-3, foreach=bool(n % 2)).step()


# -- weights -------------------------------------------------------------------------------------------------
@action("between")
def average(w: World, _: int) -> None:
    if "average" not in w.kept:
        w.kept["average"] = AveragedModel(w.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    w.kept["average"].update_parameters(w.model)
    for parameter in w.kept["average"].parameters():
        w.see("average", parameter)


@action("between")
def load_by_assignment(w: World, _: int) -> None:
    """New parameters take the old ones' place in the module; the optimizer keeps the old ones."""
    saved = {key: value.clone() for key, value in w.model.head.state_dict().items()}
    w.model.head.load_state_dict(saved, assign=True)


@action("tied")
def tie_by_data(w: World, _: int) -> None:
    """Two parameters of one memory, each with its own gradient."""
    first, second = w.model.pair
    second.data = first.data


@action("between")
def average_by_lerp(w: World, _: int) -> None:
    some = [each for each in w.model.parameters() if each is not w.model.nothing][:5]
    averages = w.kept.setdefault("lerp", [each.detach().clone() for each in some])
    torch._foreach_lerp_(averages, [each.detach() for each in some], 0.5)
    for each in averages:
        w.see("average", each)


@action("between")
def log_norms(w: World, _: int) -> None:
    for parameter in w.model.parameters():
        w.see("norm", parameter.detach().float().norm())
        w.see("norm of data", parameter.data.float().norm())


@action("between")
def evaluate(w: World, n: int) -> None:
    w.model.eval()
    with torch.inference_mode() if n % 2 else torch.no_grad():
        w.see("output", w.model(batch(n, w.dtype), n % 5).clone())
    w.model.train()


@action("between")
def save_the_model(w: World, n: int) -> None:
    part = (w.model, w.model.middle, w.model.head)[n % 3]
    saved = io.BytesIO()
    torch.save(part.state_dict(), saved)
    saved.seek(0)
    w.kept["saved model"] = part, torch.load(saved)
    for key, value in w.kept["saved model"][1].items():
        w.see(key, value)


@action("between")
def load_the_model(w: World, n: int) -> None:
    if "saved model" in w.kept:
        part, saved = w.kept["saved model"]
        part.load_state_dict(saved, assign=False)


@action("between")
def write_weights(w: World, n: int) -> None:
    with torch.no_grad():
        for parameter in list(w.model.parameters())[n % 3 :: 3]:
            parameter.clamp_(-0.2, 0.2).mul_(0.9)


@action("between")
def write_weights_data(w: World, n: int) -> None:
    for parameter in list(w.model.parameters())[n % 3 :: 3]:
        parameter.data.clamp_(-0.2, 0.2)


@action("between")
def write_weights_by_numpy(w: World, n: int) -> None:
    for parameter in list(w.model.parameters())[n % 3 :: 3]:
        if parameter.dtype is torch.float32:
            parameter.detach().numpy()[...] *= 0.5


@action("between")
def write_one_element(w: World, n: int) -> None:
    with torch.no_grad():
        w.model.middle[0].weight[n % 33, n % 20] = 0.125


@action("between")
def replace_data(w: World, n: int) -> None:
    parameter = [each for each in w.model.parameters() if each.numel()][n % 8]
    parameter.data = parameter.data * 0.5


@action("between")
def weights_through_a_vector(w: World, _: int) -> None:
    """`.data` of every parameter becomes a view of one vector."""
    some = [each for each in w.model.parameters() if each.numel() and each.is_contiguous()]
    with torch.no_grad():
        vector = parameters_to_vector(some)
        w.see("vector", vector)
        vector_to_parameters(vector * 0.75, some)


@action("between")
def evaluate_with_averages(w: World, n: int) -> None:
    """Swaps `.data` for the time of an evaluation."""
    before = [parameter.data for parameter in w.model.parameters()]
    for parameter in w.model.parameters():
        parameter.data = parameter.data * 0.5
    with torch.no_grad():
        w.see("output", w.model(batch(n, w.dtype)))
    for parameter, data in zip(w.model.parameters(), before, strict=True):
        parameter.data = data


@action("between")
def read_in_a_thread(w: World, _: int) -> None:
    for weight in in_a_thread(lambda: [each.data.clone() for each in w.model.parameters()]):
        w.see("weight", weight)


@action("between")
def copy_the_model(w: World, n: int) -> None:
    other = copy.deepcopy(w.model)
    with torch.no_grad():
        w.see("output", other(batch(n, w.dtype)))
        for parameter in other.parameters():
            parameter.zero_()


@action("between")
def keep_a_copy(w: World, _: int) -> None:
    """To be trained against, as a target network is."""
    w.kept["copy"] = copy.deepcopy(w.model)


@action("between")
def load_the_copy(w: World, _: int) -> None:
    if "copy" in w.kept:
        w.model.load_state_dict(w.kept["copy"].state_dict(), strict=False)


@action("between")
def channels_last(w: World, n: int) -> None:
    w.model.to(memory_format=torch.channels_last if n % 2 else torch.contiguous_format)


@action("between")
def pre_hook_reads(w: World, n: int) -> None:
    layer = (w.model.first, w.model.middle[0], w.model.head)[n % 3]

    def look(module: Any, _: object) -> None:
        w.see("before the call", module.weight.float().sum())

    w.kept.setdefault("hooks", []).append(layer.register_forward_pre_hook(look, prepend=True))


@action("between")
def freeze_or_thaw(w: World, n: int) -> None:
    parameter = (w.model.first.weight, w.model.head.bias)[n % 2]
    parameter.requires_grad_(not parameter.requires_grad)


@action("view")
def take_views(w: World, _: int) -> None:
    w.kept["views"] = [parameter.detach() for parameter in w.model.parameters()]


@action("view")
def read_views(w: World, _: int) -> None:
    for view in w.kept.get("views", []):
        w.see("view", view)


@action("view")
def write_views(w: World, _: int) -> None:
    for view in w.kept.get("views", []):
        view.mul_(0.5)


# -- the optimizer's own -------------------------------------------------------------------------------------
@action("between")
def change_rates(w: World, n: int) -> None:
    group = w.optimizer(n).param_groups[n % 2 - 1]
    group["lr"] = 0.001 * (1 + n % 7)
    if "betas" in group and n % 3 == 0:
        group["betas"] = (0.8, 0.9)
    group["weight_decay"] = 0.01 * (n % 4)
    group["maximize"] = n % 5 == 0


@action("between")
def rate_as_a_tensor(w: World, n: int) -> None:
    group = w.optimizer(n).param_groups[-1]
    if isinstance(group["lr"], Tensor):
        group["lr"].mul_(0.5)
    elif "betas" in group:
        group["lr"] = torch.tensor(0.004 * (1 + n % 3))


@action("between")
def schedule(w: World, n: int) -> None:
    key = f"schedule {n % len(w.optimizers)}"
    if key not in w.kept:
        w.kept[key] = LambdaLR(w.optimizer(n), lambda epoch: 0.5**epoch)
    w.attempt("schedule", w.kept[key].step)
    w.see("rate", w.kept[key].get_last_lr()[0])


@action("between")
def add_a_group(w: World, n: int) -> None:
    if w.model.late is None:
        torch.manual_seed(n)
        w.model.late = nn.Linear(WIDTH, WIDTH).to(w.dtype)
        w.optimizer(n).add_param_group({"params": list(w.model.late.parameters()), "lr": 0.003})


@action("between")
def keep_some_state_on_the_device(w: World, n: int) -> None:
    getattr(w.optimizer(n), "keep_on_device", int)(n << 10)  # torch's own has all of it there


@action("between")
def take_out_of_a_group(w: World, n: int) -> None:
    group = w.optimizer(n).param_groups[0]
    if len(group["params"]) > 2:
        taken = group["params"][n % len(group["params"])]
        group["params"] = [each for each in group["params"] if each is not taken]
        w.kept.setdefault("taken", []).append((n, taken))


@action("between")
def put_back_into_a_group(w: World, _: int) -> None:
    for n, taken in w.kept.pop("taken", []):
        w.optimizer(n).param_groups[-1]["params"].append(taken)


@action("between")
def replace_the_head(w: World, n: int) -> None:
    torch.manual_seed(n)
    gone = list(w.model.head.parameters())
    for optimizer in w.optimizers:
        for parameter in gone:
            optimizer.state.pop(parameter, None)
    w.model.head = nn.Linear(33, WIDTH).to(w.dtype)
    fresh = dict(zip(gone, w.model.head.parameters(), strict=True))
    for optimizer in w.optimizers:
        for group in optimizer.param_groups:
            group["params"] = [fresh.get(each, each) for each in group["params"]]


@action("between")
def see_state(w: World, n: int) -> None:
    optimizer = w.optimizer(n)
    for place, parameter in enumerate(w.model.parameters()):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if key != MASTER:  # may follow a weight at once or in the next step
                w.see(f"{key} of parameter {place}", value)


@action("between")
def save_state(w: World, n: int) -> None:
    key = n % len(w.optimizers)
    if "taken" in w.kept:  # torch's state_dict() is a KeyError then
        return
    w.kept[f"state {key}"] = copy.deepcopy(w.optimizer(n).state_dict()), w.model.late is None


@action("between")
def load_state(w: World, n: int) -> None:
    saved, fits = w.kept.get(f"state {n % len(w.optimizers)}", (None, True))
    if saved is not None and fits == (w.model.late is None):
        # a copy: torch goes on to step the tensors that it was given
        w.attempt("load", lambda: w.optimizer(n).load_state_dict(copy.deepcopy(saved)))


@action("between")
def load_own_state(w: World, n: int) -> None:
    optimizer = w.optimizer(n)
    if "taken" not in w.kept:
        optimizer.load_state_dict(optimizer.state_dict())


@action("between")
def clear_state(w: World, n: int) -> None:
    w.optimizer(n).state.clear()


@action("between")
def replace_state(w: World, n: int) -> None:
    w.optimizer(n).state = defaultdict(dict)


@action("between")
def forget_one(w: World, n: int) -> None:
    w.optimizer(n).state.pop(list(w.model.parameters())[n % 8], None)


@action("between")
def write_state(w: World, n: int) -> None:
    optimizer = w.optimizer(n)
    for parameter in list(w.model.parameters())[n % 2 :: 2]:
        for key, value in optimizer.state.get(parameter, {}).items():
            if key in ("exp_avg", "momentum_buffer") and value is not None:
                if n % 3:
                    optimizer.state[parameter][key] = torch.full_like(value, 0.01)
                else:
                    value.mul_(0.5)


@action("between")
def another_optimizer(w: World, n: int) -> None:
    """Continues from the state of the one before, which is closed or dropped."""
    if "taken" in w.kept:
        return
    place = n % len(w.optimizers)
    before = w.optimizers[place]
    groups = [{**group, "params": list(group["params"])} for group in before.param_groups]
    saved = before.state_dict()
    if n % 2 and hasattr(before, "close"):
        before.close()
    for key in (f"schedule {place}", f"state {place}"):
        w.kept.pop(key, None)
    del w.optimizers[place], before
    w.optimizers.insert(place, w.make(w.model, groups))
    w.optimizers[place].load_state_dict(saved)


@action("again")
def hook_on_steps(w: World, n: int) -> None:
    def look(*_: object) -> None:
        w.see("weights at a step's hook", w.model.first.weight)

    optimizer = w.optimizer(n)
    optimizer.register_step_post_hook(look)
    optimizer.register_step_pre_hook(look)

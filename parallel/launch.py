"""How a rank starts and how it ends.

One invariant: a rank never waits for one that is gone. It starts with a time limit on every message, it
leaves at once when it fails (without the orderly teardown, which would wait for the others), and a rank whose
launcher has died is ended by the kernel.

`torchrun` tells a process its rank in the environment; without torchrun there is one rank, which gets a
process group of its own, so that the pipeline runs the same code.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

from offload import OffloadError

USAGE, FAILED, INTERRUPTED = 2, 1, 130
_SIGNS_OF_LOSS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out",
    "remote process exited",
)
_GRACE = 3.0  # seconds: what a bystander leaves to the rank that can say more


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which process this is, of how many: here and on this host."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @property
    def under_torchrun(self) -> bool:
        """Whether somebody started this process as one of several."""
        return "RANK" in os.environ


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank that is up: its place, its device, and its groups."""

    ranks: Ranks
    device: torch.device
    mesh: DeviceMesh
    """One dimension, "pp", and a second one, "ep", where ranks share experts."""
    group: dist.ProcessGroup
    """The ranks of this rank's pipeline."""
    store: Store
    """Shared by all ranks; the engine counts a host's pinned bytes in it."""
    experts: dist.ProcessGroup | None = None
    """The ranks that have the same stages as this one and share their experts; None: each rank has all."""

    @property
    def everyone(self) -> dist.ProcessGroup:
        """The ranks of all pipelines."""
        group = dist.group.WORLD
        assert group is not None  # it is up
        return group


def ranks_from_environment() -> Ranks:
    """Read what torchrun says; a process alone is rank 0 of 1."""
    if "RANK" not in os.environ:
        return Ranks(0, 1, 0, 1)
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return Ranks(
            rank,
            world,
            int(os.environ.get("LOCAL_RANK", rank)),
            int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        )
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"RANK is set, but not all that torchrun sets beside it ({error}); start with torchrun, or unset "
            "RANK"
        ) from error


def choose_device(wanted: str, ranks: Ranks) -> torch.device:
    """The device of this rank: `cpu`, `cuda`, or `auto`, which is cuda where there is any."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"no device is called {wanted!r}; take auto, cuda or cpu")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus < ranks.local_world:
        remedy = f"start {gpus} ranks or take --device cpu" if gpus else "take --device cpu"
        raise ValueError(
            f"{ranks.local_world} ranks on this host want a GPU each, and torch sees {gpus}; {remedy}"
        )
    return torch.device("cuda", ranks.local_rank)


@contextmanager
def launched(
    ranks: Ranks,
    device: torch.device,
    *,
    timeout: float = 300.0,
    store: Store | None = None,
    expert_parallel: int = 1,
) -> Iterator[Rank]:
    """Bring this rank up, and down again after an orderly end.

    timeout: seconds that a message may take. store: where the ranks meet; None takes what torchrun says.
    expert_parallel: so many ranks, one after the other, have the same stages and share their experts; it
    divides all of them.
    After an exception nothing is torn down: whoever catches it has to end the process (`run_rank` does),
    since a group whose other ranks may be gone can only be waited for.
    """
    _end_with_launcher(ranks)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # torch says so once, when autograd's own thread meets the GPU first in a matrix product; it sets the
        # context, and all is well.
        warnings.filterwarnings(
            "ignore", message="Attempting to run cuBLAS, but there was no current CUDA context"
        )
    limit = timedelta(seconds=timeout)
    if store is None and not ranks.under_torchrun:
        store = HashStore()
    if store is None:
        dist.init_process_group(backend, timeout=limit)
    else:
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world, timeout=limit)
    shared = (expert_parallel,) if expert_parallel > 1 else ()
    names = ("pp", "ep")[: 1 + len(shared)]
    mesh = init_device_mesh(device.type, (ranks.world // expert_parallel, *shared), mesh_dim_names=names)
    group = mesh.get_group("pp")
    experts = mesh.get_group("ep") if shared else None
    if device.type == "cuda":
        # NCCL makes a group's communicator at its first use, with all ranks; a schedule's first use may be by
        # two neighbours alone
        for one in (group, experts):
            if one is not None:
                dist.all_reduce(torch.zeros(1, device=device), group=one)
    yield Rank(ranks, device, mesh, group, _get_default_store(), experts)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()
    dist.destroy_process_group()


def run_rank(main: Callable[[], int], ranks: Ranks) -> NoReturn:
    """Run a rank to its exit code, and say in one line why it failed; never returns.

    A failure leaves by `os._exit`: Python's own exit would join threads that wait for ranks that are gone.
    Set OFFLOAD_TRACEBACK=1 to see where it came from.
    """
    leaving = threading.Event()
    _watch_interrupts(ranks, leaving)
    try:
        try:
            code = main()
        except Exception as error:
            # may wait, and then hear that the other ranks were interrupted as this one is
            code = _explained(error, ranks)
        leaving.set()
    except KeyboardInterrupt as interrupt:
        leaving.set()
        if ranks.rank == 0:
            _say(f"interrupted {interrupt}".rstrip())
        code = INTERRUPTED
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _explained(error: Exception, ranks: Ranks) -> int:
    """Print why; a rank that only noticed that another is gone lets that one speak first."""
    if os.environ.get("OFFLOAD_TRACEBACK"):
        traceback.print_exception(error)
    cause = _root_cause(error)
    text = " ".join(str(cause).split())
    usage = isinstance(cause, (ValueError, OSError)) and not dist.is_initialized()
    bystander = any(sign in text.lower() for sign in _SIGNS_OF_LOSS)
    if bystander or (usage and ranks.rank != 0):
        time.sleep(_GRACE)  # torchrun ends this rank meanwhile, if another has failed
    who = f"rank {ranks.rank}: " if ranks.world > 1 and not usage else ""
    what = "" if usage else f"{type(cause).__name__}: "
    _say(f"{who}lost another rank ({text})" if bystander else f"{who}{what}{text}")
    return USAGE if usage else FAILED


def _root_cause(error: BaseException) -> BaseException:
    """torch wraps what a stage raised into a message over several lines; the first cause says it best, unless
    an OffloadError on the way says what to do."""
    while error.__cause__ is not None and not isinstance(error, OffloadError):
        error = error.__cause__
    return error


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"\n{text}\n")
    sys.stderr.flush()


def _watch_interrupts(ranks: Ranks, leaving: threading.Event) -> None:
    """Make Ctrl-C work wherever the main thread is.

    Python raises KeyboardInterrupt only between its own instructions, so a rank that waits in gloo or NCCL
    would not hear it; and one that is raised in a finaliser is lost. The signal is also written to a socket;
    a thread reads it, repeats it, and at last ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may ask for signals

    def interrupt(_number: int, _frame: object) -> None:
        if not leaving.is_set():
            raise KeyboardInterrupt

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, KeyboardInterrupt):  # that one is raised again
            sys.__unraisablehook__(lost)

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = unraisable
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    main_thread = threading.get_ident()

    def watch() -> None:
        with writer:  # kept open as long as it is listened to
            while number := reader.recv(1):
                if number[0] == signal.SIGINT:
                    for _ in range(3):
                        time.sleep(_GRACE / 3)
                        signal.pthread_kill(main_thread, signal.SIGINT)
                    if ranks.rank == 0:
                        _say("interrupted while waiting")
                    os._exit(INTERRUPTED)

    threading.Thread(target=watch, name="interrupt-watch", daemon=True).start()


def _end_with_launcher(ranks: Ranks) -> None:
    """Ask Linux to end this process when torchrun dies, so that no rank stays behind as an orphan."""
    if not ranks.under_torchrun or not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)

"""The copier: one event a piece, counts by client, and no copy past it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from offload.config import OffloadConfig
from offload.device.sim import SimDevice
from offload.ids import Owner
from offload.transfer.copier import UNCOUNTED, CapsAdmission, Copier, Direction
from offload.transfer.limits import Limits
from tests.unit.transfer.test_admission import Arbiter

ROOT = Path(__file__).resolve().parents[3]
LIMITS = Limits(OffloadConfig())
BUCKET = Owner("optim", "bucket 12")


def a_copy(device: SimDevice, nbytes: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """(host, device) bytes."""
    memory = device.host_memory(nbytes, nbytes)
    source = device.empty(nbytes).fill_(7)
    device.note_write(device.compute, source)
    device.wait(device.d2h, device.record(device.compute), "spill")
    return memory.pieces[0], source


def test_the_event_of_a_piece_passes_after_all_its_copies() -> None:
    device = SimDevice(executor="late")
    copies = Copier(device, CapsAdmission(LIMITS)).of(BUCKET)
    first, second = a_copy(device), a_copy(device)
    event = copies.send([first, second])
    device.synchronize(event)
    assert first[0].tolist() == second[0].tolist() == [7] * 64


def test_bytes_are_counted_by_client_and_direction_until_they_are_taken() -> None:
    device = SimDevice(executor="early")
    copier = Copier(device, CapsAdmission(LIMITS))
    host, there = a_copy(device)
    event = copier.of(BUCKET).send([(host, there)])
    device.wait(device.h2d, event, "restore")
    copier.of(Owner("weights", "layer 3")).fetch([(there, host)])
    counts = copier.take_counts()
    assert {client: (moved.out_bytes, moved.in_bytes) for client, moved in counts.items()} == {
        "optim": (64, 0),
        "weights": (0, 64),
    }
    assert copier.take_counts() == {}


@pytest.mark.parametrize(("at_s", "waits"), [(0.5, 0), (1.5, 1), (3.5, 0)])
def test_a_lane_of_its_own_lets_pass_what_nothing_holds_up(at_s: float, waits: int) -> None:
    """A copy on h2d is held up for a second, and takes two."""
    device = SimDevice(executor="clock", d2h_gb_s=64e-9, h2d_gb_s=32e-9)
    copier = Copier(device, CapsAdmission(LIMITS))
    (host, there), inward, other = a_copy(device), device.new_copy_lane("state in"), device.empty(64)
    device.wait(inward, device.record(device.compute), "state in")
    sent = copier.of(BUCKET).send([(host, there)])
    device.wait(device.h2d, sent, "restore")
    copier.copy(UNCOUNTED, Direction.H2D, BUCKET, [(there, host)], 64, behind=[sent])
    device.compute_for(at_s)
    device.wait(inward, sent, "state in")
    copier.of(BUCKET).fetch([(other, host)], inward)
    assert device.waits["let pass"] == waits


@pytest.mark.parametrize("direction", Direction)
def test_a_copy_that_cannot_be_left_out_goes_ahead_although_it_is_denied(direction: Direction) -> None:
    device = SimDevice(executor="early")
    copier = Copier(device, Arbiter(direction))
    host, there = a_copy(device)
    copies = copier.of(BUCKET)
    sent = copies.send([(host, there)])
    device.wait(device.h2d, sent, "restore")
    device.synchronize(copies.fetch([(there, host)]))
    assert host.tolist() == [7] * 64
    counts = copier.take_counts()["optim"]
    assert (counts.denied, counts.denied_bytes, counts.out_bytes, counts.in_bytes) == (1, 64, 64, 64)


def test_a_lease_ends_where_a_copy_that_cannot_be_left_out_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimDevice()
    arbiter = Arbiter()
    pair = a_copy(device)

    def broken(self: SimDevice, lane: object, pairs: object) -> None:
        raise OSError("the copy cannot be issued")

    monkeypatch.setattr(SimDevice, "copy", broken)
    with pytest.raises(OSError, match="cannot be issued"):
        Copier(device, arbiter).of(BUCKET).send([pair])
    assert [lease.ends for lease in arbiter.leases] == [[None]]


def test_copies_by_hand_go_where_their_lane_is_and_belong_to_their_own_client() -> None:
    from offload import ChunkOffloadHandler, OffloadConfig, OffloadEngine

    engine = OffloadEngine(OffloadConfig(), device=SimDevice())
    handler = ChunkOffloadHandler(0, engine=engine)
    source = torch.arange(16.0)
    assert handler.reload(handler.offload(source)).tolist() == source.tolist()
    counts = engine.copier.take_counts()["by hand"]
    assert (counts.out_bytes, counts.in_bytes) == (64, 64)


def test_nothing_is_copied_past_the_copier() -> None:
    issues = re.compile(r"\bdevice\.copy\(")
    files = [file for package in ("offload", "parallel", "moe") for file in (ROOT / package).rglob("*.py")]
    found = {file.relative_to(ROOT).as_posix() for file in files if issues.search(file.read_text())}
    assert found == {"offload/transfer/copier.py"}

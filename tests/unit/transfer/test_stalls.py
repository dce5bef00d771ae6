"""Stalls: what compute waited is read late, without blocking, at one question a lane."""

from __future__ import annotations

from offload.device.sim import SimDevice, SimLane
from offload.transfer.copier import Stall, Stalls, all_passed, total_ms


class CountingDevice(SimDevice):
    """Counts what it is asked, and says of the named events that they have not passed."""

    def __init__(self) -> None:
        super().__init__(executor="clock")
        self.polls = self.elapsed = 0
        self.ahead: list[object] = []

    def poll(self, event: object) -> bool:
        self.polls += 1
        return event not in self.ahead and super().poll(event)

    def elapsed_ms(self, start: object, end: object) -> float:
        self.elapsed += 1
        return super().elapsed_ms(start, end)


def stalled(device: SimDevice, lane: SimLane, seconds: float) -> Stall:
    with device.use_lane(lane):
        before = device.record(lane, timed=True)
        device.compute_for(seconds)  # stands for a wait
        return Stall(lane, before, device.record(lane, timed=True))


def test_ended_stalls_are_added_up_at_one_question_a_lane() -> None:
    device = CountingDevice()
    side = device.new_compute_lane("side")
    stalls = [stalled(device, lane, 1.0) for lane in (device.compute, side) for _ in range(5)]
    assert all_passed(device, stalls)
    assert device.polls == 2
    assert total_ms(device, stalls) == 10_000.0
    assert device.polls == 4
    assert total_ms(device, stalls) == 10_000.0
    assert device.elapsed == 10, "a stall's time is asked for once"


def test_lane_that_has_not_got_to_its_last_stall_counts_those_that_it_has() -> None:
    device = CountingDevice()
    side = device.new_compute_lane("side")
    mine, theirs = ([stalled(device, lane, 1.0) for _ in range(3)] for lane in (device.compute, side))
    device.ahead = [stall.after for stall in theirs[1:]]
    assert not all_passed(device, [*mine, *theirs])
    assert total_ms(device, [*mine, *theirs]) == 4_000.0
    assert all_passed(device, [])
    assert total_ms(device, []) == 0.0


def test_a_step_has_the_number_of_its_stalls_and_the_time_of_those_before_it() -> None:
    device = SimDevice(executor="clock")
    first = Stalls(device)
    first.wait(device.compute, device.record(device.h2d), "read")  # for what has passed: none
    first += [stalled(device, device.compute, 1.0) for _ in range(2)]
    second, *found = first.end_step()
    assert found == [2, 0.0]
    second.append(stalled(device, device.compute, 3.0))
    third, *found = second.end_step()
    assert found == [1, 2_000.0]
    assert third.end_step()[1:] == (0, 3_000.0)

"""The group of a recomputed call's input (groups/scopes.py)."""

from __future__ import annotations

import threading

import torch

from offload import init_chunk_handler, step_end
from tests.unit.groups.stack import build_manager, installed


def test_inputs_of_calls_in_two_threads_leave_each_under_its_own_group() -> None:
    """The second thread opens its group, of the same name, before the first one's input is sent: the first
    took the second's start out of the open ones, and the second found none."""
    given = [torch.randn(64, requires_grad=True) for _ in range(2)]
    made: dict[int, torch.Tensor] = {}
    opened, sent = threading.Event(), threading.Event()
    failed: list[Exception] = []

    with installed(build_manager()) as manager:
        init_chunk_handler()
        groups = [manager.input_group("hidden_states") for _ in range(2)]

        def call(number: int) -> None:
            try:
                groups[number].open([given[number]])
                if number == 0:
                    second.start()
                    opened.wait(20)
                else:
                    opened.set()
                made[number] = given[number].square()
                if number == 1:
                    sent.wait(20)
                groups[number].send()
                sent.set()
                groups[number].close(made[number])
            except Exception as error:  # pytest sees none of another thread
                failed.append(error)

        first, second = (threading.Thread(target=call, args=(number,)) for number in range(2))
        first.start()
        first.join()
        second.join()
        assert not failed
        assert all(group.sent for group in manager.active_handler().groups)  # type: ignore[union-attr]
        (made[0] + made[1]).sum().backward()
        step_end()
        assert manager.engine.last_stats.spill_bytes == 2 * given[0].nbytes
    for x in given:
        wanted = x.detach().clone().requires_grad_()
        wanted.square().sum().backward()
        assert torch.equal(x.grad, wanted.grad)  # type: ignore[arg-type]

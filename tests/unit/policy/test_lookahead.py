"""The cursor in the step's actions: what backwards are still to come, for any step, and never more than a
hint."""

from __future__ import annotations

import random

import pytest

from offload.policy.actions import Action, Kind, Lookahead
from tests.parsed import parse_action


def parsed(text: str) -> list[Action]:
    return [parse_action(action) for action in text.split()]


KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
ONE_F_ONE_B = "0F0 0F1 0B0 0F2 0B1 0B2"
STEP = parsed(ONE_F_ONE_B)


@pytest.fixture
def lookahead() -> Lookahead:
    return Lookahead()


def run(lookahead: Lookahead, actions: list[Action]) -> None:
    for action in actions:
        lookahead.advance(action)


def coming(lookahead: Lookahead) -> str:
    return " ".join(map(str, lookahead.coming()))


def test_first_step_without_a_schedule_foretells_nothing(lookahead: Lookahead) -> None:
    run(lookahead, STEP)
    assert coming(lookahead) == ""
    assert lookahead.seen == tuple(STEP)


def test_given_schedule_is_followed_from_its_first_action(lookahead: Lookahead) -> None:
    lookahead.give(STEP)
    assert coming(lookahead) == ""
    run(lookahead, STEP[:2])
    assert coming(lookahead) == "0B0 0B1"
    run(lookahead, STEP[2:4])
    assert coming(lookahead) == "0B1 0B2"
    run(lookahead, STEP[4:])
    assert coming(lookahead) == ""
    lookahead.end_step()
    run(lookahead, STEP[:4])
    assert coming(lookahead) == "0B1 0B2"
    assert lookahead.seen == tuple(STEP[:4])


@pytest.mark.parametrize(
    ("listed", "ran"),
    [
        # a forward that will not come again stops no hint
        ("0F0 0B0 5B5 0F1 0B2 0B1", {"0F0": "0B0 5B5 0B2"}),
        # nothing is foretold after a backward whose forward is still to come: else what is read after it was
        # taken for what is read next, and under ZBV a whole window of the first stage was held back on
        # the device while the forward ran that is read before it
        ("1F0 2F0 2I0 2W0 1I0 1W0", {"1F0": "", "2F0": "2I0 2W0 1I0 1W0"}),
        # a step that leaves the list gets no hint until it is back
        (ONE_F_ONE_B, {"0F0 0F1 0B0 0F7": "", "0F2": "0B1 0B2"}),
        # an action that comes early skips what lies before it
        (ONE_F_ONE_B, {"0F2": "0B1 0B2"}),
        # the same action twice is found in order
        ("0F0 0B0 0F0 0B0", {"0F0 0B0 0F0": "0B0", "0B0": ""}),
        # a schedule that runs again, into the same gradients, is followed from its begin
        (ONE_F_ONE_B, {f"{ONE_F_ONE_B} 0F0 0F1": "0B0 0B1"}),
    ],
)
def test_what_is_foretold_follows_the_list_from_what_has_run(
    lookahead: Lookahead, listed: str, ran: dict[str, str]
) -> None:
    lookahead.give(parsed(listed))
    for actions, hint in ran.items():
        run(lookahead, parsed(actions))
        assert coming(lookahead) == hint


def test_given_schedule_wins_over_the_last_step_until_it_is_taken_back(lookahead: Lookahead) -> None:
    run(lookahead, STEP)
    lookahead.end_step()
    lookahead.give(parsed("1F0 1B0"))
    lookahead.advance(parse_action("1F0"))
    assert coming(lookahead) == "1B0"
    lookahead.give(None)
    run(lookahead, STEP[:2])
    assert coming(lookahead) == "0B0 0B1"


def test_evaluation_between_steps_does_not_become_the_hint(lookahead: Lookahead) -> None:
    run(lookahead, STEP)
    lookahead.end_step()
    run(lookahead, parsed("0F0 0F1"))
    lookahead.end_step()
    assert lookahead.actions == tuple(STEP)
    run(lookahead, STEP[:4])
    assert coming(lookahead) == "0B1 0B2"


def test_any_step_at_all_gives_a_hint_out_of_the_list_and_no_error() -> None:
    dice = random.Random(0)
    for _ in range(200):
        lookahead = Lookahead()
        listed = [
            Action(dice.choice(KINDS), dice.randrange(2), dice.randrange(3)) for _ in range(dice.randrange(8))
        ]
        if dice.random() < 0.5:
            lookahead.give(listed)
        for _ in range(3):
            for _ in range(dice.randrange(10)):
                lookahead.advance(Action(dice.choice(KINDS), dice.randrange(3), dice.randrange(4)))
                assert set(lookahead.coming()) <= {
                    action for action in lookahead.actions if action.kind != "F"
                }
            lookahead.end_step()


@pytest.mark.parametrize(
    "action",
    [
        ("X", 0, 0),
        ("F", -1, 0),
        ("F", 0, -1),
        ("F", 0),
        ("F", 0, 0, 0),
        ("F", "0", 0),
        "F00",
        None,
        ("F", 0.5, 0),
        ["F", 0, 0],
    ],
)
def test_what_is_not_an_action_is_refused_by_name_and_changes_nothing(action: object) -> None:
    lookahead = Lookahead()
    lookahead.give(STEP)
    with pytest.raises(ValueError, match=r"is not \(F, B, I or W; stage >= 0; microbatch >= 0\)") as raised:
        lookahead.give([("F", 0, 0), action])  # type: ignore[list-item]
    assert repr(action) in str(raised.value)
    assert lookahead.actions == tuple(STEP)


@pytest.mark.parametrize("actions", ["F00", 5, {("F", 0, 0)}])
def test_what_is_no_list_of_actions_is_refused(actions: object) -> None:
    with pytest.raises(
        ValueError, match="must be a list of \\(kind, stage, microbatch\\), or None if not known"
    ):
        Lookahead().give(actions)  # type: ignore[arg-type]

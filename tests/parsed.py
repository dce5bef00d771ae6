"""Actions as tests write them."""

from __future__ import annotations

from typing import cast

from offload.policy.actions import Action, Kind


def parse_action(text: str) -> Action:
    """`3F1` -> Action("F", 3, 1), the inverse of str(action)."""
    kind = next(letter for letter in text if letter in "FBIW")
    stage, microbatch = text.split(kind)
    return Action(cast(Kind, kind), int(stage), int(microbatch))

"""Nothing of a test's loop is left to the next one's: a step that somebody ends by hand is believed from then
on, in the whole process."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_manager_of_another_test(no_manager: None) -> None: ...

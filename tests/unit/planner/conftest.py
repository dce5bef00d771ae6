"""The fixtures of groups: a manager over the simulated device, and none left behind."""

from tests.unit.groups.conftest import no_manager_left_behind, one_thread

__all__ = ["no_manager_left_behind", "one_thread"]

"""The fixtures of groups: a manager over the simulated device, and none left behind."""

from tests.unit.groups.conftest import manager, no_manager_left_behind, one_thread

__all__ = ["manager", "no_manager_left_behind", "one_thread"]

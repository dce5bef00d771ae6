"""The fixtures of groups, a manager over the simulated device and none left behind, and those of memory."""

from tests.unit.groups.conftest import manager, no_manager_left_behind, one_thread
from tests.unit.memory.conftest import arena, device

__all__ = ["arena", "device", "manager", "no_manager_left_behind", "one_thread"]

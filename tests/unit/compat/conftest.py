"""The fixtures of groups, no manager left behind, and those of memory."""

from tests.unit.groups.conftest import no_manager_left_behind, one_thread
from tests.unit.memory.conftest import arena, device

__all__ = ["arena", "device", "no_manager_left_behind", "one_thread"]

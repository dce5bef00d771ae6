"""The fixtures of groups: the dry run is compared with an engine's steps, and leaves no manager behind."""

from tests.unit.groups.conftest import no_manager_left_behind, one_thread

__all__ = ["no_manager_left_behind", "one_thread"]

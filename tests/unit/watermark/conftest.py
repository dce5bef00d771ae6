"""One thread for operations this small."""

from tests.unit.groups.conftest import one_thread

__all__ = ["one_thread"]

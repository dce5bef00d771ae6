"""Park and wake: the training state of a model leaves the device between phases, and comes back."""

from offload.park.parked import Parked, park, parked
from offload.park.report import KindReport, ParkReport

__all__ = ["KindReport", "ParkReport", "Parked", "park", "parked"]

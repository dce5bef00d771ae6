"""The conductor: one arbiter over the link, the device and the host. It asks nobody for an order, and gives
none: clients decide what moves and when, and it says whether now is the time.

Names that users of runtimes of their own need are here, and the parts by the source system's names; each
part has a file of its own (runtime.py).
"""

from __future__ import annotations

from offload.conductor.adapters import ActStagehandConductorAdapter as ActStagehandConductorAdapter
from offload.conductor.adapters import ConductorAdapter as ConductorAdapter
from offload.conductor.adapters import SquareQConductorAdapter as SquareQConductorAdapter
from offload.conductor.adapters import StagehandConductorAdapter as StagehandConductorAdapter
from offload.conductor.arbiter import Conductor as Conductor
from offload.conductor.budget import BudgetManager as BudgetManager
from offload.conductor.budget import Pool as Pool
from offload.conductor.budget import Reservation as Reservation
from offload.conductor.budget import ReservationKind as ReservationKind
from offload.conductor.budget import TransferManager as TransferManager
from offload.conductor.budget import TransferToken as TransferToken
from offload.conductor.config import ConductorConfig as ConductorConfig
from offload.conductor.phases import HeuristicPolicyBridgeV0 as HeuristicPolicyBridgeV0
from offload.conductor.phases import PhaseCoordinator as PhaseCoordinator
from offload.conductor.phases import PhaseOrderError as PhaseOrderError
from offload.conductor.phases import PolicyBridge as PolicyBridge
from offload.conductor.phases import RuntimeLimitHints as RuntimeLimitHints
from offload.conductor.runtime import ConductorRuntime as ConductorRuntime
from offload.conductor.runtime import TelemetryHub as TelemetryHub
from offload.transfer.copier import DenialReason as DenialReason
from offload.transfer.copier import Direction as Direction
from offload.transfer.copier import Priority as Priority

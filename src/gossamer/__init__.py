"""Train one model on machines that are joined by thin links.

import gossamer as gm
result = gm.simulate(method=gm.FactoredGossip(inner_steps=20), task=gm.TextTask(), workers=8)
"""

from __future__ import annotations

from gossamer.comm.context import Context, MethodState
from gossamer.comm.ledger import Ledger
from gossamer.errors import ConfigError, GossamerError
from gossamer.measure.settings import Measure
from gossamer.methods import DataParallel, DiLoCo, FactoredGossip, LocalSGD, Method, build_method
from gossamer.sim.compute import Timing
from gossamer.sim.faults import Faults
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.settings import Training
from gossamer.training.task import Task
from gossamer.training.text import TextTask

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Context",
    "DataParallel",
    "DiLoCo",
    "FactoredGossip",
    "Faults",
    "GossamerError",
    "Ledger",
    "LocalSGD",
    "Measure",
    "Method",
    "MethodState",
    "Network",
    "SimulationResult",
    "Task",
    "TextTask",
    "Timing",
    "Training",
    "__version__",
    "build_method",
    "simulate",
]

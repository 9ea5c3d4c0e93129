"""Train one model on machines that are joined by thin links.

import gossamer as gm
result = gm.simulate(method=gm.FactoredGossip(inner_steps=20), task=gm.TextTask(), workers=8)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.cluster.join import join
    from gossamer.comm.context import Context, MethodState
    from gossamer.comm.ledger import Ledger
    from gossamer.errors import ConfigError, GossamerError
    from gossamer.measure.settings import Measure
    from gossamer.methods import (
        DataParallel,
        DiLoCo,
        FactoredGossip,
        LocalSGD,
        Method,
        build_method,
    )
    from gossamer.sim.compute import Timing
    from gossamer.sim.faults import Faults
    from gossamer.sim.network import Network
    from gossamer.sim.simulate import SimulationResult, simulate
    from gossamer.training.images import ImageTask
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
    "ImageTask",
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
    "join",
    "simulate",
]

# Where each public name lives. They are imported when first used: `gossamer --help` and a mistyped
# command need not wait for torch.
_HOMES = {
    "ConfigError": "gossamer.errors",
    "Context": "gossamer.comm.context",
    "DataParallel": "gossamer.methods",
    "DiLoCo": "gossamer.methods",
    "FactoredGossip": "gossamer.methods",
    "Faults": "gossamer.sim.faults",
    "GossamerError": "gossamer.errors",
    "ImageTask": "gossamer.training.images",
    "Ledger": "gossamer.comm.ledger",
    "LocalSGD": "gossamer.methods",
    "Measure": "gossamer.measure.settings",
    "Method": "gossamer.methods",
    "MethodState": "gossamer.comm.context",
    "Network": "gossamer.sim.network",
    "SimulationResult": "gossamer.sim.simulate",
    "Task": "gossamer.training.task",
    "TextTask": "gossamer.training.text",
    "Timing": "gossamer.sim.compute",
    "Training": "gossamer.training.settings",
    "build_method": "gossamer.methods",
    "join": "gossamer.cluster.join",
    "simulate": "gossamer.sim.simulate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gossamer' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

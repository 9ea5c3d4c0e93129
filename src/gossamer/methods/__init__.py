"""The methods, by the names that recipes use, and the papers' named variants."""

from __future__ import annotations

from typing import Any

from gossamer.errors import ConfigError, nearest
from gossamer.methods.a2cid2 import A2CiD2
from gossamer.methods.ad_psgd import ADPSGD
from gossamer.methods.anytime_sgd import AnytimeSGD
from gossamer.methods.async_diloco import AsyncDiLoCo
from gossamer.methods.base import Method
from gossamer.methods.data_parallel import DataParallel
from gossamer.methods.decoupled_diloco import DecoupledDiLoCo
from gossamer.methods.diloco import DiLoCo
from gossamer.methods.dsgd import DSGD
from gossamer.methods.eager_diloco import EagerDiLoCo
from gossamer.methods.factored_gossip import FactoredGossip
from gossamer.methods.fedac import FedAC
from gossamer.methods.gasloc import GASLoC
from gossamer.methods.local_mixvr import LocalMixVR
from gossamer.methods.local_momentum import LocalMomentum
from gossamer.methods.local_sgd import LocalSGD
from gossamer.methods.minibatch_asgd import MinibatchASGD
from gossamer.methods.minibatch_sgd import MinibatchSGD
from gossamer.methods.mu2_sgd import Mu2SGD
from gossamer.methods.noloco import NoLoCo
from gossamer.methods.sgp import SGP
from gossamer.methods.slowcal_sgd import SlowcalSGD
from gossamer.methods.slowmo import SlowMo
from gossamer.methods.storm import Storm
from gossamer.methods.streaming_diloco import StreamingDiLoCo

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        DataParallel,
        LocalSGD,
        DiLoCo,
        FactoredGossip,
        GASLoC,
        NoLoCo,
        LocalMixVR,
        MinibatchSGD,
        MinibatchASGD,
        LocalMomentum,
        SlowcalSGD,
        FedAC,
        Mu2SGD,
        AnytimeSGD,
        Storm,
        ADPSGD,
        A2CiD2,
        DSGD,
        SGP,
        SlowMo,
        StreamingDiLoCo,
        EagerDiLoCo,
        AsyncDiLoCo,
        DecoupledDiLoCo,
    )
}

# The subset of the paper: embedding, head and the first two layers, 43 % of its 1.5B model.
PAPER_SUBSET = ["embedding", "head", "layers.0", "layers.1"]

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "GlobalM1": ("factored_gossip", {"mix1": "global", "mix2": "none"}),
    "GlobalM1S": ("factored_gossip", {"mix1": "global", "mix2": "none", "mix_momentum": True}),
    "GlobalM1LocalM2": ("factored_gossip", {"mix1": "global", "mix2": "pair"}),
    "GlobalM1LocalM2-subset": (
        "factored_gossip",
        {"mix1": "global", "mix2": "pair", "mix2_subset": PAPER_SUBSET},
    ),
    "LocalM1M2": ("factored_gossip", {"mix1": "pair", "mix2": "pair"}),
}


def build_method(name: str, values: dict[str, Any]) -> Method:
    """The method or preset called `name` with hyperparameters `values`.

    Raises `ConfigError` naming the nearest known name, or the faulty hyperparameter.
    """
    if name in PRESETS:
        method_name, preset = PRESETS[name]
        return METHODS[method_name](**{**preset, **values})
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}; {nearest(name, [*METHODS, *PRESETS])}")
    return METHODS[name](**values)


__all__ = [
    "ADPSGD",
    "DSGD",
    "METHODS",
    "PAPER_SUBSET",
    "PRESETS",
    "SGP",
    "A2CiD2",
    "AnytimeSGD",
    "AsyncDiLoCo",
    "DataParallel",
    "DecoupledDiLoCo",
    "DiLoCo",
    "EagerDiLoCo",
    "FactoredGossip",
    "FedAC",
    "GASLoC",
    "LocalMixVR",
    "LocalMomentum",
    "LocalSGD",
    "Method",
    "MinibatchASGD",
    "MinibatchSGD",
    "Mu2SGD",
    "NoLoCo",
    "SlowMo",
    "SlowcalSGD",
    "Storm",
    "StreamingDiLoCo",
    "build_method",
]

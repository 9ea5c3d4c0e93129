"""Streaming DiLoCo: what it reduces to, its schedule against a loop of modules, what it hides."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import ConfigError
from gossamer.measure.settings import Measure
from gossamer.methods import DecoupledDiLoCo, DiLoCo, Method, StreamingDiLoCo
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.engine import Engine
from gossamer.training.problems import PureNoise, TinyMLP
from gossamer.training.settings import Training

ADAMW = Training(learning_rate=0.02, clip_norm=0)
SGD = Training(optimizer="sgd", learning_rate=0.1, schedule="constant", clip_norm=0, weight_decay=0)
MLP = TinyMLP(dtype=torch.float64)


def run(method: Method, *, workers: int = 4, rounds: int = 5, **more: Any) -> SimulationResult:
    more.setdefault("task", MLP)
    more.setdefault("training", ADAMW)
    return simulate(method=method, workers=workers, rounds=rounds, measure=Measure(every=0), **more)


def plain(**more: Any) -> StreamingDiLoCo:
    """In one piece, at once, and all the way."""
    return StreamingDiLoCo(**{"fragments": 1, "due_steps": 0, "blend": 0.0, **more})


def test_in_one_fragment_without_delay_or_blend_it_is_diloco() -> None:
    outer = {"inner_steps": 3, "outer_learning_rate": 0.7}
    streaming, diloco = run(plain(**outer)), run(DiLoCo(**outer))
    assert torch.equal(streaming.parameters, diloco.parameters)
    assert float(diloco.parameters.std()) > 0.1


@pytest.mark.parametrize(("fragments", "scheme"), [(1, "balanced"), (3, "balanced"), (2, "layer")])
def test_i12_decoupled_with_all_learners_and_no_delay_is_streaming(
    fragments: int, scheme: str
) -> None:
    shared = {"inner_steps": 6, "fragments": fragments, "fragmentation": scheme, "due_steps": 0}
    shared |= {"outer_learning_rate": 0.4}
    streaming = run(StreamingDiLoCo(blend=0.0, **shared))
    decoupled = run(DecoupledDiLoCo(quorum=4, merge="average", **shared))
    assert torch.equal(streaming.parameters, decoupled.parameters)
    assert fragments == 1 or not torch.equal(streaming.parameters[0], streaming.parameters[1])


def textbook(
    model: nn.Module, parts: list[tuple[int, tuple[str, ...]]], *, tau: int, blend: float,
    workers: int, rounds: int, inner_steps: int,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """Streaming DiLoCo step by step, by tensor names; `parts` are (t_p, names)."""
    models = [copy.deepcopy(model) for _ in range(workers)]
    inners = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    tensors = [{k: p.data for k, p in m.named_parameters()} for m in models]
    anchor = {k: t.clone() for k, t in tensors[0].items()}
    velocity = {k: torch.zeros_like(t) for k, t in anchor.items()}
    on_the_way: dict[str, Tensor] = {}
    for t in range(1, rounds * inner_steps + 1):
        for worker, inner in enumerate(inners):
            inner.zero_grad()
            MLP.loss(models[worker], MLP.train_batch(worker, t - 1)).backward()
            inner.step()
        for arrive in (True, False) if tau else (False, True):
            for place, names in parts:
                due = t if arrive else t + tau
                if due % inner_steps != place % inner_steps:
                    continue
                for name in names:
                    if not arrive:
                        ends = torch.stack([mine[name] for mine in tensors])
                        on_the_way[name] = anchor[name] - ends.mean(0)
                    elif name in on_the_way:
                        delta = on_the_way.pop(name)
                        velocity[name] = 0.9 * velocity[name] + delta
                        anchor[name] = anchor[name] - 0.4 * (delta + 0.9 * velocity[name])
                        for mine in tensors:
                            mine[name].copy_(blend * mine[name] + (1 - blend) * anchor[name])
    return tensors


@pytest.mark.parametrize(
    ("fragments", "tau", "blend"), [(2, 0, 0.5), (2, 1, 0.5), (3, 2, 0.3), (1, 4, 0.0), (1, 6, 0.5)]
)
def test_it_is_the_textbook_loop(fragments: int, tau: int, blend: float) -> None:
    method = StreamingDiLoCo(
        inner_steps=6, fragments=fragments, fragmentation="balanced", due_steps=tau, blend=blend
    )
    result = run(method, training=SGD, rounds=3)
    engine = Engine(MLP, SGD, seed=0, total_steps=1, real=True)
    parts = [(place, part.names) for place, part in method.arrivals(engine.layout)]
    assert [place for place, _ in parts] == [6 * k // fragments for k in range(1, fragments + 1)]
    expected = textbook(
        engine.model, parts, tau=tau, blend=blend, workers=4, rounds=3, inner_steps=6
    )
    for worker, tensors in enumerate(expected):
        mine = engine.layout.views(result.parameters[worker])
        for name, tensor in tensors.items():
            assert torch.allclose(mine[name], tensor, rtol=0, atol=1e-13), (worker, name)


@pytest.mark.parametrize(("megabits", "tau"), [(100, 4), (50, 4), (400, 1)])
def test_it_hides_tau_steps_of_each_fragment(megabits: int, tau: int) -> None:
    """A round takes H steps, and for each of P fragments what C / P is longer than tau steps."""
    timing = Timing(step_time=1.0, parameters=1e8, payload_dtype="bf16")
    method = StreamingDiLoCo(inner_steps=20, fragments=4, fragmentation="balanced", due_steps=tau)
    task = TinyMLP(num_inputs=256, num_hidden=256, num_outputs=256)
    result = run(method, task=task, workers=8, rounds=3, timing=timing, numerics="none",
                 network=Network(bandwidth=f"{megabits}Mbit/s", deadline="1000s"))  # fmt: skip
    part = [0.0] * 4
    layout = Engine(task, SGD, seed=0, total_steps=1, real=False).layout
    for k, (_, fragment) in enumerate(method.arrivals(layout)):
        part[k] = 2 * 7 / 8 * 1e8 * fragment.numel / layout.numel * 16 / (megabits * 1e6)
    expected = 3 * (20 + sum(max(0.0, seconds - tau) for seconds in part))
    assert result.summary["time_s"] == pytest.approx(expected, rel=0.01)
    sent = result.ledger.by_kind()["outer"] / (8 * 3 * 1e8 * 2)
    assert sent == pytest.approx(2 * 7 / 8, rel=1e-3)


def test_workers_hold_the_same_anchor_whatever_fails() -> None:
    """Without a blend each fragment is the same everywhere when it arrives: fragment 0 at last."""
    faults = Faults(crashes=(CrashAt(worker=2, start=9.0, return_after=7.0),))
    method = StreamingDiLoCo(inner_steps=6, fragments=2, fragmentation="layer", blend=0.0)
    result = run(method, rounds=12, faults=faults, timing=Timing(step_time=1.0),
                 network=Network(failure_probability=0.05))  # fmt: skip
    assert result.workers == (0, 1, 2, 3)
    assert result.summary["retries"] > 0
    layout = Engine(MLP, SGD, seed=0, total_steps=1, real=True).layout
    *_, (place, last) = method.arrivals(layout)
    assert place == 6
    for row in result.parameters:
        for piece in last.slices:
            assert torch.equal(row[piece], result.parameters[0][piece])


def test_the_papers_fragments_are_three_layers_each() -> None:
    from gossamer.training.text import TextTask

    layout = Engine(TextTask(model="llama-1.5b"), SGD, seed=0, total_steps=1, real=False).layout
    method = StreamingDiLoCo()
    method.validate_for(layout, 8)
    parts = method.cut(layout)
    layers = {n.split(".")[1] for part in parts[1:2] for n in part.names if n.startswith("layers")}
    assert len(parts) == 6 and len(layers) == 3
    assert len(StreamingDiLoCo(inner_steps=8, due_steps=4).cut(layout)) == 2


def test_settings_that_do_not_fit_are_refused() -> None:
    for wrong, words in (
        ({"due_steps": 4, "fragments": 2}, "due_steps: at most 3, the 6 inner steps over 2"),
        ({"due_steps": 7}, "due_steps: at most 6"),
        ({"fragments": 9, "due_steps": 0}, "fragments"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(StreamingDiLoCo(inner_steps=6, **wrong))


def test_pure_noise_in_one_tensor_has_one_fragment() -> None:
    result = run(StreamingDiLoCo(inner_steps=4), task=PureNoise(50), training=SGD)
    assert bool(torch.isfinite(result.parameters).all())

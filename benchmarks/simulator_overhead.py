"""What simulation costs beside a bare PyTorch loop that trains the same M replicas.

Both do the same forward and backward passes, clipping and fused AdamW on the same batches; the bare
loop has M modules and M optimizers, and averages their parameters every H steps. Runs alternate;
the median of the paired ratios is the figure.

    python benchmarks/simulator_overhead.py --pairs 5
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable

import torch

from gossamer import DiLoCo, FactoredGossip, LocalSGD, Measure, TextTask, Training, simulate
from gossamer.training.engine import Engine
from gossamer.training.optimizers import learning_rate_at


def bare_loop(task: TextTask, training: Training, *, inner_steps: int) -> Callable[[], None]:
    """M modules, M optimizers, local SGD."""
    total = training.rounds * inner_steps
    task.prepare(num_workers=training.workers, seed=0, num_steps=total)
    template = Engine(task, training, seed=0, total_steps=total, real=True).model
    for parameter in template.parameters():
        parameter.grad = None
    models = [copy.deepcopy(template) for _ in range(training.workers)]
    optimizers = [
        torch.optim.AdamW(
            [
                {"params": [p for p in m.parameters() if p.ndim >= 2], "weight_decay": 0.1},
                {"params": [p for p in m.parameters() if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=training.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        for m in models
    ]

    def run() -> None:
        for round_index in range(training.rounds):
            for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                for step in range(round_index * inner_steps, (round_index + 1) * inner_steps):
                    optimizer.zero_grad()
                    loss = task.loss(model, task.train_batch(worker, step))
                    loss.backward()
                    float(loss.detach())
                    torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
                    for group in optimizer.param_groups:
                        group["lr"] = learning_rate_at(step, training, total)
                    optimizer.step()
            with torch.no_grad():
                for parameters in zip(*(m.parameters() for m in models), strict=True):
                    mean = torch.stack(parameters).mean(0)
                    for parameter in parameters:
                        parameter.copy_(mean)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-tiny")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--inner-steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    steps = arguments.inner_steps
    training = Training(
        workers=arguments.workers, rounds=arguments.rounds, batch_size=arguments.batch_size,
        sequence_length=arguments.sequence_length,
    )  # fmt: skip
    methods = {
        "local_sgd": LocalSGD(inner_steps=steps),
        "diloco": DiLoCo(inner_steps=steps),
        "GlobalM1LocalM2": FactoredGossip(inner_steps=steps, mix1="global", mix2="pair"),
    }

    def task() -> TextTask:
        return TextTask(
            model=arguments.model, batch_size=arguments.batch_size,
            sequence_length=arguments.sequence_length, eval_sequences=1, probe_sequences=1,
        )  # fmt: skip

    results: dict[str, dict[str, float]] = {}
    for name, method in methods.items():
        wall: list[float] = []
        cpu: list[float] = []
        for pair in range(arguments.pairs + 1):
            bare = bare_loop(task(), training, inner_steps=steps)
            gc.collect()
            wall_0, cpu_0 = time.perf_counter(), time.process_time()
            bare()
            wall_1, cpu_1 = time.perf_counter(), time.process_time()
            simulate(method=method, task=task(), training=training, measure=Measure(every=0))
            wall_2, cpu_2 = time.perf_counter(), time.process_time()
            if pair:  # the first warms up
                wall.append((wall_2 - wall_1) / (wall_1 - wall_0))
                cpu.append((cpu_2 - cpu_1) / (cpu_1 - cpu_0))
        results[name] = {
            "wall_ratio": statistics.median(wall),
            "cpu_ratio": statistics.median(cpu),
            "cpu_ratio_min": min(cpu),
            "cpu_ratio_max": max(cpu),
        }
        if not arguments.json:
            print(name, {k: round(v, 3) for k, v in results[name].items()}, flush=True)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()

"""What a local step of Local MixVR costs beside one of SGD; it has two gradients on one batch.

Both train one replica in the simulator on the same batches. Runs alternate, CPU time is counted,
and the median of the paired ratios is the figure.

    python benchmarks/mixvr_step.py --pairs 7
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time

import torch

from gossamer import Measure, TextTask, Training, simulate
from gossamer.methods import LocalMixVR, LocalSGD, Method
from gossamer.training.problems import TinyMLP
from gossamer.training.task import Task

QUIET = Measure(every=0)
STEPS = 40


def tasks() -> dict[str, Task]:
    """A decoder of 459k parameters, and a small network with a batch of 256."""
    return {
        "llama-tiny": TextTask(batch_size=8, sequence_length=64),
        "mlp-256": TinyMLP(64, 256, 10, batch_size=256),
    }


def cpu_seconds(task: Task, method: Method, training: Training) -> float:
    """Of one run."""
    gc.collect()
    began = time.process_time()
    simulate(method=method, task=task, workers=1, rounds=1, training=training, measure=QUIET)
    return time.process_time() - began


def step_seconds(task: Task, method: type[Method], training: Training, **options: float) -> float:
    """Of one step: the difference between two runs, so that building and measuring cancel."""
    long, short = (
        cpu_seconds(task, method(inner_steps=steps, **options), training)
        for steps in (5 * STEPS, STEPS)
    )
    return (long - short) / (4 * STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    own = Training(learning_rate=0.01, schedule="constant")
    sgd = Training(
        optimizer="sgd", learning_rate=0.01, schedule="constant", clip_norm=0, weight_decay=0
    )
    for name, task in tasks().items():
        pairs = []
        for _ in range(arguments.pairs):
            plain = step_seconds(task, LocalSGD, sgd)
            mixvr = step_seconds(task, LocalMixVR, own, alpha=0.001)
            pairs.append((plain, mixvr))
        ratios = [mixvr / plain for plain, mixvr in pairs]
        result = {
            "task": name,
            "sgd_step_s": round(statistics.median(p for p, _ in pairs), 6),
            "mixvr_step_s": round(statistics.median(m for _, m in pairs), 6),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

"""A training loop of one's own, on as many machines as there are.

Start the coordinator, then this program once for each worker:

    gossamer coordinator --method diloco:inner_steps=50 --workers 2 --rounds 20
    python examples/own_loop.py 127.0.0.1:7700     # twice, with the address that it prints

A worker that is started later, or again, takes the state of another. Between machines each side
has a certificate: see docs/how-to/cluster.md.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import gossamer as gm

WEIGHTS = torch.linspace(-1, 1, 16)


def batch_of(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each worker sees its own part of the data."""
    generator = torch.Generator().manual_seed(1_000_000 * worker + step)
    inputs = torch.randn(32, 16, generator=generator)
    return inputs, torch.tanh(inputs @ WEIGHTS)


def main(address: str) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    method = gm.DiLoCo(inner_steps=50)
    with gm.join(address, method=method, model=model, optimizer=optimizer) as run:
        while not run.over:
            inputs, targets = batch_of(run.worker, run.steps_completed)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs).squeeze(1), targets)
            loss.backward()
            optimizer.step()
            run.step(loss, num_samples=len(inputs))  # at the end of a round the workers agree
    checksum = sum(float(parameter.sum()) for parameter in model.parameters())
    print(f"loss {run.summary['train_loss']:.4f}, checksum {checksum:.6f}")


if __name__ == "__main__":
    main(sys.argv[1])

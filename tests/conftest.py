"""One thread per test process: tiny tensors gain nothing from more, and CI machines are shared."""

from __future__ import annotations

import torch

torch.set_num_threads(1)

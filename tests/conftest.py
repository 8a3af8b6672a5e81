"""What all tests share."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # tiny tensors: threads only cost

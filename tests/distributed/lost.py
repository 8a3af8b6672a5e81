"""`examples/elastic.py`, whose rank 1 is killed in its first life, in a step after a save."""

from __future__ import annotations

import os
import signal
from unittest.mock import patch

from torch import Tensor

from examples import elastic

LAST = elastic.EVERY * 3 + 2
_batch = elastic.batch


def batch(step: int) -> Tensor:
    is_first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_first_life and step == LAST and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return _batch(step)


if __name__ == "__main__":
    with patch.object(elastic, "batch", batch):
        elastic.main()

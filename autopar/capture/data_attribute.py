"""The attribute `.data`: a tensor on the same memory, without its history.

What is read of it is followed as detach(); what it is set to, as a write in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autopar._torch.export_graph import traced_node
from autopar.capture.fake import FakeTensor
from autopar.capture.hooks import replaced
from autopar.errors import InvalidInput
from autopar.text.source_lines import caller


@contextmanager
def data_is_detached() -> Iterator[None]:
    """While forward runs, what is reached by `.data` is followed like the rest."""
    plain: Any = vars(Tensor.__base__)["data"]

    def read(self: Tensor) -> Tensor:
        return self.detach() if _is_followed(self) else plain.__get__(self)

    def write(self: Tensor, value: Tensor) -> None:
        if not _is_followed(self):
            plain.__set__(self, value)
            return
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            raise InvalidInput(
                "what .data is set to in forward has the shape, dtype and device of what was there",
                got=f"{tuple(value.shape)} {value.dtype} in place of {tuple(self.shape)} "
                f"{self.dtype}",
                remedy="compute a new tensor",
                source=caller(),
            )
        with torch.no_grad():
            self.detach().copy_(value)

    with replaced(Tensor, "data", property(read, write)):
        yield


def _is_followed(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and traced_node(tensor)[0] is not None

"""Leaves: the local tensors of a rank's parameters, on which autograd works."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autopar._torch import local_of


class Leaves:
    """One leaf for each parameter that lies here, in the memory of its local tensor.

    A leaf stays the same as long as its parameter does: a backward that is under way reaches it.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.version = 0  # grows when parameters are replaced, frozen or unfrozen
        self.by_name: dict[str, Tensor] = {}

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what the module holds now."""
        self.version += 1
        for name, parameter in tensors.items():
            if not isinstance(parameter, nn.Parameter):
                continue
            local = local_of(parameter)
            with torch.no_grad():
                if self.parameters.get(name) is parameter:
                    self.by_name[name].data = local
                else:
                    self.by_name[name] = local.detach()
            self.by_name[name].requires_grad_(parameter.requires_grad)
            self.parameters[name] = parameter

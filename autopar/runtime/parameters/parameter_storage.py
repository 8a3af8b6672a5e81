"""KeptTensors: where a rank's parameters are from step to step, on its device or on the host."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._torch.tensors import local_of
from autopar.plan.runtime_program import Program
from autopar.runtime.backends.host_copies import HOST
from autopar.runtime.backends.process_groups import require_host_moves
from autopar.runtime.backends.world import world


class ParameterStorage:
    """Brings there what was placed on the device."""

    def __init__(self, program: Program, device: torch.device) -> None:
        """All ranks together: those on the host have a mesh of their own."""
        self._names, self._device, self._mesh = program.on_host, device, None
        if self._names and device.type != HOST.type:
            require_host_moves(dist.group.WORLD)
            whole = world().mesh_of(program.whole_mesh, HOST.type)
            self._mesh = whole[program.mesh.names] if program.pipelining else whole

    def __call__(self, name: str, placed: Tensor) -> Tensor:
        """A parameter or buffer where it is kept; on the host in memory that the device reads."""
        if name not in self._names or self._mesh is None:
            return placed
        assert isinstance(placed, DTensor)
        local = local_of(placed).to(HOST).pin_memory()
        about: dict[str, Any] = {"shape": placed.shape, "stride": placed.stride()}
        return DTensor.from_local(local, self._mesh, placed.placements, run_check=False, **about)

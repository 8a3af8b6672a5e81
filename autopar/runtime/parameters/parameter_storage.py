"""Store a rank's parameters from step to step, on its device or on the host."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._torch.tensors import local_of
from autopar.plans.runtime_program import RuntimeProgram
from autopar.runtime.backends.host_copies import HOST
from autopar.runtime.backends.process_groups import require_host_moves
from autopar.runtime.backends.world import world


class ParameterStorage:
    """Moves the parameters that a program keeps on the host from the device to there."""

    def __init__(self, program: RuntimeProgram, device: torch.device) -> None:
        """Make the host's mesh where it is needed; all ranks do so together."""
        self._names, self._device, self._mesh = program.on_host, device, None
        if self._names and device.type != HOST.type:
            require_host_moves(dist.group.WORLD)
            full_mesh = world().mesh_of(program.whole_mesh, HOST.type)
            self._mesh = full_mesh[program.mesh.names] if program.pipelining else full_mesh

    def __call__(self, name: str, placed: Tensor) -> Tensor:
        """Return a parameter or buffer where it is stored, on the host in pinned memory."""
        if name not in self._names or self._mesh is None:
            return placed
        assert isinstance(placed, DTensor)
        local = local_of(placed).to(HOST).pin_memory()
        shape, stride = placed.shape, placed.stride()
        return DTensor.from_local(
            local, self._mesh, placed.placements, run_check=False, shape=shape, stride=stride
        )

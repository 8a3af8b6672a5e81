"""Refused wrappers: DistributedDataParallel, FSDP, torch.compile and others around a module.

A parallel module is parallel and compiled already, so it refuses them when they are applied.
Accelerate leaves a module alone that is marked as prepared.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from autopar._torch.compiler import COMPILED_MARK
from autopar._torch.modules import COMPOSABLE_REGISTRY, is_collecting_wrappers
from autopar.errors import InvalidInput


class RefusesWrappers(nn.Module):
    """A module that refuses all wrappers."""

    def __init__(self) -> None:
        super().__init__()
        vars(self)["_is_accelerate_prepared"] = True
        vars(self)[COMPOSABLE_REGISTRY] = _RefusingRegistry()  # read by fully_shard and replicate

    def __getattr__(self, name: str) -> Any:
        if name == "_ddp_params_and_buffers_to_ignore":  # read by DistributedDataParallel
            _refuse("DistributedDataParallel")
        if name == COMPILED_MARK:
            self.compile()
        return super().__getattr__(name)

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse torch.compile, which `parallelize(compile=True)` replaces."""
        raise InvalidInput(
            "a parallel module is compiled where it is made: the program of each rank, collectives "
            "inside",
            got="torch.compile() of a ParallelModule",
            remedy="parallelize(..., compile=True), or a mapping of the options for torch.compile",
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        _refuse("DataParallel")


class _RefusingRegistry(dict[str, Any]):
    """The registry of torch's in-place wrappers of a module, which refuses every lookup."""

    def __contains__(self, name: object) -> bool:
        if is_collecting_wrappers():  # there is none
            return False
        _refuse("fully_shard, replicate or FullyShardedDataParallel")


def _refuse(wrapper: str) -> NoReturn:
    raise InvalidInput(
        "a parallel module sums its own gradients and keeps its own parameters: nothing is put "
        "around it",
        got=f"{wrapper} of a ParallelModule",
        remedy="use it as it is, with mesh=ap.Mesh(dp=...) for data parallelism, and "
        'states="zero3" for what FSDP does',
    )

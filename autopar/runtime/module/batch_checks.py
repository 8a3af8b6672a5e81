"""Batch checks: whether ranks were given what belongs together.

The first calls of a module are compared, with the calls that other ranks make. After that ranks
compare one number in every tenth call: a loop may lose its order later, as where samplers of ranks
have drawn a different number of times. The number is of all batches since the last time, but for
those on a GPU, of which only each tenth is read: each read waits for the GPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import InvalidInput
from autopar.plan.plan import Plan
from autopar.runtime.backends.world import World
from autopar.runtime.module.local_inputs import flatten_call, planned_inputs
from autopar.runtime.module.plan_broadcast import require_same_call

COMPARED_FIRST = 3  # calls that are compared
COMPARED_EVERY = 10  # of later calls one in so many is
_SAME_BATCH = (
    "load the same batch on every rank, or parallelize with local_inputs=True, where each brings "
    "its own slice"
)
SAMPLED_ELEMENTS = 1 << 20  # elements of a tensor that are looked at, about


class BatchCheck:
    """Compares global batches, which are the same on every rank."""

    def __init__(self, world: World, remedy: str = _SAME_BATCH) -> None:
        self._world, self._remedy = world, remedy
        self._first, self._later = 0, 0  # calls that all ranks have made
        self._digest = 0  # of batches since the last comparison

    def is_due(self, *given: Any) -> bool:
        """Return whether a call is compared, which all ranks make after the first ones."""
        if self._first < COMPARED_FIRST:
            return True
        self._later += 1
        is_due = self._later % COMPARED_EVERY == 0
        if not is_due:
            self._digest = _digest(given, self._digest, on_host=True)
        return is_due

    def compare(self, call: str, *given: Any) -> None:
        """Refuse, on all ranks, global batches that are not the same on all of them, and at first
        a `call` that others do not make."""
        if self._first < COMPARED_FIRST:
            require_same_call(lambda: None, call=call)
            self._first += 1
        digest, self._digest = _digest(given, self._digest), 0
        since = f", now or in the {COMPARED_EVERY - 1} calls before" if self._later else ""
        require_same_batch(self._world.numbers(digest), self._remedy, since)


def _digest(given: Any, digest: int = 0, *, on_host: bool = False) -> int:
    """Return a number that some of the elements of these tensors make; of those `on_host` alone."""
    for leaf in pytree.tree_leaves(given):
        if isinstance(leaf, Tensor) and leaf.numel() and not (on_host and leaf.is_cuda):
            data = leaf.detach().reshape(-1)
            data = data[:: -(-data.numel() // SAMPLED_ELEMENTS)].cpu().contiguous()
            digest = zlib.crc32(data.view(torch.uint8).numpy().tobytes(), digest)
    return digest


class SliceCheck(BatchCheck):
    """Compares slices: ranks to which a plan gives the same piece bring the same."""

    def __init__(self, world: World, plan: Plan) -> None:
        super().__init__(world)
        self._plan, self._planned = plan, planned_inputs(plan)
        self._cuts: dict[tuple[str, ...], list[str]] = {}  # what is cut over some axes
        for name in filter(None, self._planned.values()):
            axes = plan.decisions.placeholders[name].axes
            self._cuts.setdefault(axes, []).append(name)

    def is_due(self, *given: Any) -> bool:
        return super().is_due()  # what is compared is told by name, so not added up

    def compare(self, call: str, *given: Any) -> None:
        self._first += self._first < COMPARED_FIRST
        mesh = self._plan.whole_mesh
        leaves = {self._planned.get(path): leaf for path, leaf in flatten_call(*given)[0]}
        for axes, names in self._cuts.items():
            digests = self._world.numbers(_digest([leaves.get(name) for name in names]))
            first: dict[int, int] = {}
            for rank, digest in enumerate(digests):
                one = first.setdefault(mesh.position(rank, axes), rank)
                if digest != digests[one]:
                    raise InvalidInput(
                        "with local inputs ranks bring the pieces that the plan cuts, and what it "
                        "does not cut over their axis is the same on them",
                        got=f"{', '.join(names)}, cut over {', '.join(axes) or 'nothing'}: rank "
                        f"{rank} has others than rank {one}",
                        remedy='mode="data", or ap.shard() of the inputs, cuts the batch; '
                        "ap.shard_loader(loader, module) gives what a plan wants",
                    )


def require_same_batch(
    digests: Sequence[object], remedy: str = _SAME_BATCH, since: str = ""
) -> None:
    """Refuse a step for which ranks were given different global batches; `since` says when."""
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise InvalidInput(
            "every rank is given the same global batch",
            got=f"another batch than rank 0 has on rank {', '.join(map(str, others))}{since}",
            remedy=remedy,
        )

"""Batch checks: ranks compare their batches, which must belong to one step.

The first calls of a module are compared, with the calls that other ranks make. Afterwards ranks
compare one number in every tenth call, since a loop may lose its order later, for example if
samplers of ranks draw a different number of times. The number digests all batches since the last
comparison. Of batches on a GPU it has every tenth alone, because each read waits for the GPU.
Of a large tensor each digest reads blocks that are spread over it, other ones from call to call.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import InvalidInput
from autopar.plans.plan import Plan
from autopar.runtime.backends.world import World
from autopar.runtime.batches.local_inputs import flatten_call, planned_inputs
from autopar.runtime.module.plan_broadcast import require_same_call

COMPARED_FIRST = 3  # calls that are compared at the start
COMPARED_EVERY = 10  # later calls per compared one
_SAME_BATCH = (
    "load the same batch on every rank, or parallelize with local_inputs=True, where each brings "
    "its own slice"
)
SAMPLED_ELEMENTS = 1 << 17  # elements of a tensor that a digest reads, about
BLOCK = 1 << 12  # adjoining elements, so that all features of a sample are among them
_GOLDEN_RATIO = (5**0.5 - 1) / 2  # its multiples spread evenly, and so do those of each tenth call


class BatchCheck:
    """Compares global batches, which are the same on every rank."""

    _is_summed = True  # whether a comparison covers the batches of the calls before it

    def __init__(self, world: World, remedy: str = _SAME_BATCH) -> None:
        self._world, self._remedy = world, remedy
        self._first, self._later = 0, 0  # compared calls of the start, and later calls
        self._digest = 0  # of the batches since the last comparison

    @property
    def _call(self) -> int:
        return self._first + self._later

    def is_due(self, *batch: Any) -> bool:
        """Count a call, and return whether ranks compare its batch."""
        if self._first < COMPARED_FIRST:
            return True
        self._later += 1
        is_due = self._later % COMPARED_EVERY == 0
        if not is_due and self._is_summed:
            self._digest = _digest(batch, self._call, self._digest, on_host=True)
        return is_due

    def compare(self, call: str, *batch: Any) -> None:
        """Refuse, on all ranks, batches that differ between ranks, and at first differing calls."""
        if self._first < COMPARED_FIRST:
            require_same_call(lambda: None, call=call)
            self._first += 1
        digest, self._digest = _digest(batch, self._call, self._digest), 0
        since = f", now or in the {COMPARED_EVERY - 1} calls before" if self._later else ""
        require_same_batch(self._world.gather_numbers(digest), self._remedy, since)


def _digest(batch: Any, call: int, digest: int = 0, *, on_host: bool = False) -> int:
    """Return a checksum of a sample of all tensors, or of those `on_host` alone."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.numel() and not (on_host and leaf.is_cuda):
            data = _sample(leaf.detach(), call).resolve_conj().resolve_neg().cpu()
            digest = zlib.crc32(data.view(torch.uint8).numpy().data, digest)
    return digest


def _sample(data: Tensor, call: int) -> Tensor:
    """Return all elements of a small tensor, or blocks of a large one, which differ by `call`.

    Strides do not matter, and a tensor is not copied as a whole. Over calls all blocks are read.
    """
    count, step = data.numel(), -(-data.numel() // SAMPLED_ELEMENTS)
    if step == 1:
        return data.contiguous().view(-1)
    first = int(call * _GOLDEN_RATIO % 1 * step)
    blocks = range(first * BLOCK, count, step * BLOCK)
    if data.is_contiguous():
        return torch.cat([data.view(-1)[start : start + BLOCK] for start in blocks])
    if data.itemsize == 1:
        data = data.view(torch.uint8)  # `take` has no float8
    starts = torch.tensor(blocks, device=data.device)[:, None]
    places = (starts + torch.arange(BLOCK, device=data.device)).view(-1)
    return data.take(places[places < count])


class SliceCheck(BatchCheck):
    """Compares slices: ranks to which a plan gives the same piece bring equal slices."""

    _is_summed = False  # slices are compared by input

    def __init__(self, world: World, plan: Plan) -> None:
        super().__init__(world)
        self._plan, self._planned = plan, planned_inputs(plan)
        self._cuts: dict[tuple[str, ...], list[str]] = {}  # inputs by the axes that cut them
        for name in filter(None, self._planned.values()):
            axes = plan.decisions.placeholders[name].axes
            self._cuts.setdefault(axes, []).append(name)

    def compare(self, call: str, *batch: Any) -> None:
        """Refuse, on all ranks, slices that differ between ranks of one piece."""
        self._first += self._first < COMPARED_FIRST
        mesh = self._plan.whole_mesh
        leaves = {self._planned.get(path): leaf for path, leaf in flatten_call(*batch)[0]}
        for axes, names in self._cuts.items():
            digest = _digest([leaves.get(name) for name in names], self._call)
            digests = self._world.gather_numbers(digest)
            first: dict[int, int] = {}
            for rank, digest in enumerate(digests):
                other = first.setdefault(mesh.position(rank, axes), rank)
                if digest != digests[other]:
                    raise InvalidInput(
                        "with local inputs ranks bring the pieces that the plan cuts, and what it "
                        "does not cut over their axis is the same on them",
                        got=f"{', '.join(names)}, cut over {', '.join(axes) or 'nothing'}: rank "
                        f"{rank} has others than rank {other}",
                        remedy='mode="data", or ap.shard() of the inputs, cuts the batch; '
                        "ap.shard_loader(loader, module) gives what a plan wants",
                    )


def require_same_batch(
    digests: Sequence[object], remedy: str = _SAME_BATCH, since: str = ""
) -> None:
    """Refuse a step if global batches differ between ranks; `since` is added to the message."""
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise InvalidInput(
            "every rank is given the same global batch",
            got=f"another batch than rank 0 has on rank {', '.join(map(str, others))}{since}",
            remedy=remedy,
        )

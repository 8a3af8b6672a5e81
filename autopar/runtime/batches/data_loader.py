"""Data loader: each rank loads its slice alone from a loader of global batches.

    loader = DataLoader(dataset, batch_size=32, shuffle=True)        # of global batches
    pm = ap.parallelize(model, inputs, local_inputs=True)
    for x, y in ap.shard_loader(loader, pm):
        pm.step(x, y)

The slices of all ranks, one after another, are the batch of the plain loader on rank 0. Rank 0
decides the order of samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from autopar.errors import InvalidInput
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.passes.localize import Axes
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.backends.rank0_values import Rank0Values
from autopar.runtime.backends.world import World
from autopar.runtime.batches.batch_checks import BatchCheck
from autopar.runtime.batches.batch_slices import batch_axes
from autopar.runtime.batches.loader_position import (
    Generators,
    LoaderPosition,
    Skipping,
    generators_put_back,
)
from autopar.runtime.launching.failures import stop_all_on_failure
from autopar.runtime.module.parallel_module import ParallelModule

_HANDED_ON = (  # other arguments of a DataLoader
    "dataset num_workers collate_fn pin_memory timeout worker_init_fn generator in_order "
    "multiprocessing_context prefetch_factor persistent_workers"
)
_SAME_ORDER = (
    "seed what orders or makes samples alike on all ranks, or give a DataLoader over a dataset "
    "with an index, whose order is that of rank 0"
)


def shard_loader(loader: Iterable[Any], module: ParallelModule) -> ShardedLoader:
    """Return a loader of this rank's slices of the batches of a loader.

    From a `DataLoader` over a dataset with an index, a rank loads the samples of its slice alone:
    rank 0 runs the sampler and sends indices batch by batch, and its loop ends those of all ranks.
    Any other iterable, such as a loader over an `IterableDataset`, must give equal batches on
    every rank, which the first three calls compare; a rank takes its slice of every tensor whose
    first dim is the batch. `set_epoch(n)` is handed to the sampler, or to the dataset.

    Args:
        loader: A loader of global batches.
        module: A parallel module with `local_inputs=True`, or one on the virtual mesh, where the
            slice is the whole batch.
    """
    _require_global(loader)
    backend = module.backend
    if not isinstance(backend, TorchBackend):
        return ShardedLoader(loader)
    if not backend.local_inputs:
        raise InvalidInput(
            "a loader is split for a module whose ranks bring their own slices",
            got="a module that takes the global batch on every rank",
            remedy="parallelize(..., local_inputs=True), or hand it the plain loader's batches",
        )
    share = BatchShare(batch_axes(module.program), module.program.mesh, backend.ranks.rank_in_stage)
    return ShardedLoader(loader, share, backend.world)


def _require_global(loader: Any) -> None:
    """Refuse a loader that is split already."""
    for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        for candidate in (sampler, getattr(sampler, "sampler", None)):
            if isinstance(candidate, DistributedSampler) and candidate.num_replicas > 1:
                raise InvalidInput(
                    "a loader that is split gives global batches",
                    got=f"one with a DistributedSampler, of {candidate.num_replicas} replicas",
                    remedy="the loader of one device: shuffle=True, or the plain sampler",
                )


class BatchShare:
    """The samples of a batch that one rank of a mesh has."""

    def __init__(self, axes: Axes, mesh: Mesh, rank: int) -> None:
        self._layout, self._mesh, self._rank = Layout(axes), mesh, rank
        self.is_whole = not axes

    def slice_of(self, size: int) -> slice:
        """Return the rank's slice of a batch of `size` samples."""
        ranks = range(self._mesh.size)
        bounds = [self._layout.local_bounds((size,), self._mesh, rank)[0] for rank in ranks]
        if not all(length for _, length in bounds):  # true or false on all ranks
            raise InvalidInput(
                "every rank has a sample of every batch, whose pieces are of one size, rounded up, "
                "but for the last",
                got=f"a batch of {size} on {self._mesh}, in pieces of "
                f"{', '.join(str(length) for _, length in bounds)}",
                remedy="drop_last=True, or larger batches",
            )
        start, length = bounds[self._rank]
        return slice(start, start + length)


class ShardedLoader:
    """Yields a rank's slices of the batches of a loader, anew with every `iter()`."""

    def __init__(
        self, loader: Iterable[Any], share: BatchShare | None = None, world: World | None = None
    ) -> None:
        self.loader, self._world = loader, world
        self._share = None if share is None or share.is_whole else share
        self._batch_check = None if world is None else BatchCheck(world, _SAME_ORDER)
        self._epoch: int | None = None
        self._taken = 0  # batches of the loop that began last
        self._began: Generators | None = None  # where it began
        self._resumed: LoaderPosition | None = None  # the place where the next loop begins
        self._order: Skipping | None = None  # of the samples that rank 0 sends

    def __iter__(self) -> Iterator[Any]:
        position, self._resumed = self._resumed, None
        if position is None:
            self._began, self._taken = Generators.of(self.loader), 0
            return self._count(self._slices())
        self._began, self._taken = position.generators, position.batches
        with generators_put_back():
            position.generators.restore(self.loader)
            return self._count(self._slices_after(position.batches))

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the loop that runs, as plain data for `extra=` of `ap.save`.

        All but what draws at other moments than where a loop begins continues exactly: an order
        drawn by torch or Python, and by generators of the loader and its samplers. Random numbers
        that worker processes draw for samples do not.
        """
        began = Generators.of(self.loader) if self._began is None else self._began
        return LoaderPosition(self._taken, self._epoch, began).to_plain()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next loop go on where the one stood whose `state_dict` this is, on all ranks.

        Args:
            state_dict: Of a loader of the same samples, in batches of the same size, on any plan.
        """
        position = LoaderPosition.from_plain(state_dict, self.loader)
        if position.epoch is not None:
            self.set_epoch(position.epoch)
        self._resumed = position
        self._began, self._taken = position.generators, position.batches

    def _slices(self) -> Iterator[Any]:
        """Return this rank's slices of all batches of an epoch."""
        plain = self._indexed_loader
        if plain is None:
            return self._yield_slices(self.loader, self._batch_check)
        return iter(plain) if plain.batch_sampler is not None else self._yield_slices(plain, None)

    def _slices_after(self, count: int) -> Iterator[Any]:
        """Return this rank's slices of the batches after the first `count`.

        Samples of a dataset with an index are left out by their numbers; others are loaded."""
        if self._indexed_loader is not None:
            assert self._order is not None
            self._order.count = count
            batches = self._slices()
            if self._order.count:  # no worker has begun to draw the order
                self._order.generators = Generators.of(None)
            return batches
        batches = self._slices()
        for _ in islice(batches, count):
            pass
        return batches

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._taken += 1
            yield batch

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    @property
    def dataset(self) -> Any:
        """Return the dataset of the loader."""
        return self.loader.dataset  # type: ignore[attr-defined]

    def set_epoch(self, epoch: int) -> None:
        """Hand the number of an epoch to samplers and datasets that order samples by it."""
        self._epoch = epoch
        for name in ("batch_sampler", "sampler", "dataset"):
            setter = getattr(getattr(self.loader, name, None), "set_epoch", None)
            if setter is not None:
                setter(epoch)

    @cached_property
    def _indexed_loader(self) -> DataLoader | None:
        """Return a loader of this rank's samples if the dataset has an index, of whole batches if
        batches have one; None for other loaders."""
        plain = self.loader
        if not isinstance(plain, DataLoader) or type(plain).__iter__ is not DataLoader.__iter__:
            return None
        if isinstance(plain.dataset, IterableDataset) or self._world is None:
            return None
        options = {name: getattr(plain, name) for name in _HANDED_ON.split()}
        if plain.batch_sampler is None:
            self._order = Skipping(plain.sampler)
            order = Rank0Values(self._order, self._world, lambda index: index)
            return DataLoader(sampler=order, batch_size=None, **options)
        self._order = Skipping(plain.batch_sampler)
        local_batches = Rank0Values(self._order, self._world, self._local_indices)
        return DataLoader(batch_sampler=local_batches, **options)

    def _local_indices(self, batch: Any) -> Any:
        """Return this rank's slice of the indices of a batch."""
        return batch if self._share is None else batch[self._share.slice_of(len(batch))]

    def _yield_slices(self, batches: Iterable[Any], check: BatchCheck | None) -> Iterator[Any]:
        """Yield this rank's slices of loaded batches, some of which `check` compares."""
        for batch in batches:
            if check is not None and check.is_due(batch):
                with stop_all_on_failure(self._world, agreed=True):
                    check.compare("the next batch of a split loader", batch)
            yield self._slice_batch(batch)

    def _slice_batch(self, batch: Any) -> Any:
        """Return this rank's slice of a loaded batch."""
        sizes = [v.shape[0] for v in pytree.tree_leaves(batch) if isinstance(v, Tensor) and v.ndim]
        if self._share is None or not sizes:
            return batch
        local_slice = self._share.slice_of(sizes[0])

        def cut(value: Any) -> Any:
            is_batch = isinstance(value, Tensor) and value.shape[:1] == (sizes[0],)
            return value[local_slice] if is_batch else value

        return pytree.tree_map(cut, batch)

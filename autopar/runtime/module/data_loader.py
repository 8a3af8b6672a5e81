"""Data: a loader of global batches, of which each rank loads its own slice alone.

    loader = DataLoader(dataset, batch_size=32, shuffle=True)        # of global batches
    pm = ap.parallelize(model, inputs, local_inputs=True)
    for x, y in ap.shard_loader(loader, pm):
        pm.step(x, y)

The slices of all ranks, one after another, are the batch that the plain loader gives on rank 0,
which says in what order samples come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from autopar.errors import InvalidInput
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.passes.localize import Axes
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.backends.rank0_values import FromFirst
from autopar.runtime.backends.world import World
from autopar.runtime.launching.failures import stop_all_on_failure
from autopar.runtime.module.batch_checks import BatchCheck
from autopar.runtime.module.batch_slices import batch_axes
from autopar.runtime.module.parallel_module import ParallelModule

_HANDED_ON = (  # what else a DataLoader is given
    "dataset num_workers collate_fn pin_memory timeout worker_init_fn generator in_order "
    "multiprocessing_context prefetch_factor persistent_workers"
)
_SAME_ORDER = (
    "seed what orders or makes samples alike on all ranks, or give a DataLoader over a dataset "
    "with an index, whose order is that of rank 0"
)


def shard_loader(loader: Iterable[Any], module: ParallelModule) -> ShardedLoader:
    """The batches of `loader`, of which every rank is given the slice that `module` takes from it
    (`local_inputs=True`). On the virtual mesh that is the whole batch.

    Of a `DataLoader` over a dataset with an index, a rank loads the samples of its slice alone.
    Which these are rank 0 says, batch by batch: samplers run there alone, by whatever they order
    samples, and the loop ends everywhere when it ends there. All ranks make the same loops over it.
    Of whatever else gives batches, as a loader over an `IterableDataset`, every rank makes the same
    ones, which the first three compare, and takes its slice of every tensor that has the batch as
    first dim. `set_epoch(n)` is handed to the sampler, or to the dataset.
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
    share = BatchShare(batch_axes(module.program), module.program.mesh, backend.ranks.inner)
    return ShardedLoader(loader, share, backend.world)


def _require_global(loader: Any) -> None:
    """Refuse one that is split already."""
    for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        for one in (sampler, getattr(sampler, "sampler", None)):
            if isinstance(one, DistributedSampler) and one.num_replicas > 1:
                raise InvalidInput(
                    "a loader that is split gives global batches",
                    got=f"one with a DistributedSampler, of {one.num_replicas} replicas",
                    remedy="the loader of one device: shuffle=True, or the plain sampler",
                )


class BatchShare:
    """Which samples of a batch a rank of a mesh has."""

    def __init__(self, axes: Axes, mesh: Mesh, rank: int) -> None:
        self._layout, self._mesh, self._rank = Layout(axes), mesh, rank
        self.is_whole = not axes

    def of(self, size: int) -> slice:
        """Of a batch of `size`."""
        ranks = range(self._mesh.size)
        bounds = [self._layout.local_bounds((size,), self._mesh, rank)[0] for rank in ranks]
        if not all(length for _, length in bounds):  # on all ranks alike
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
    """Gives a rank's slices of the batches of a loader, again with every `iter()`."""

    def __init__(
        self, loader: Iterable[Any], share: BatchShare | None = None, world: World | None = None
    ) -> None:
        self.loader, self._world = loader, world
        self._share = None if share is None or share.is_whole else share
        self._batch_check = None if world is None else BatchCheck(world, _SAME_ORDER)

    def __iter__(self) -> Iterator[Any]:
        plain = self._ordered
        if plain is None:
            return self._cuts(self.loader, self._batch_check)
        return iter(plain) if plain.batch_sampler is not None else self._cuts(plain, None)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    @property
    def dataset(self) -> Any:
        """That of the loader."""
        return self.loader.dataset  # type: ignore[attr-defined]

    def set_epoch(self, epoch: int) -> None:
        """Another epoch begins, for samplers and datasets that order samples by its number."""
        for name in ("batch_sampler", "sampler", "dataset"):
            told = getattr(getattr(self.loader, name, None), "set_epoch", None)
            if told is not None:
                told(epoch)

    @cached_property
    def _ordered(self) -> DataLoader | None:
        """A loader of the samples of this rank's slices, where samples have an index; or of whole
        batches, where these have one."""
        plain = self.loader
        if not isinstance(plain, DataLoader) or type(plain).__iter__ is not DataLoader.__iter__:
            return None
        if isinstance(plain.dataset, IterableDataset) or self._world is None:
            return None
        options = {name: getattr(plain, name) for name in _HANDED_ON.split()}
        if plain.batch_sampler is None:
            order = FromFirst(plain.sampler, self._world, lambda index: index)
            return DataLoader(sampler=order, batch_size=None, **options)
        own = FromFirst(plain.batch_sampler, self._world, self._own)
        return DataLoader(batch_sampler=own, **options)

    def _own(self, batch: Any) -> Any:
        """This rank's slice of the indices of a batch."""
        return batch if self._share is None else batch[self._share.of(len(batch))]

    def _cuts(self, batches: Iterable[Any], check: BatchCheck | None) -> Iterator[Any]:
        """This rank's slices of batches that are there, some of which a `check` may compare."""
        for batch in batches:
            if check is not None and check.is_due(batch):
                with stop_all_on_failure(self._world, agreed=True):
                    check.compare("the next batch of a split loader", batch)
            yield self._cut(batch)

    def _cut(self, batch: Any) -> Any:
        """This rank's slice of a batch that is there."""
        sizes = [v.shape[0] for v in pytree.tree_leaves(batch) if isinstance(v, Tensor) and v.ndim]
        if self._share is None or not sizes:
            return batch
        own = self._share.of(sizes[0])

        def cut(value: Any) -> Any:
            is_batch = isinstance(value, Tensor) and value.shape[:1] == (sizes[0],)
            return value[own] if is_batch else value

        return pytree.tree_map(cut, batch)

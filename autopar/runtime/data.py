"""Data: a loader of global batches, of which each rank loads its own slice alone.

    loader = DataLoader(dataset, batch_size=32, shuffle=True)        # of global batches
    pm = ap.parallelize(model, inputs, local_inputs=True)
    for x, y in ap.shard_loader(loader, pm):
        pm.step(x, y)

The slices of all ranks, one after another, are the batch that the plain loader gives under the
random state of rank 0, which says in what order samples come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from autopar.errors import InvalidInput
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.passes.localize import Axes
from autopar.runtime.distributed import TorchBackend
from autopar.runtime.failures import one_fails_all_stop
from autopar.runtime.module import ParallelModule
from autopar.runtime.slices import batch_axes
from autopar.runtime.world import World


def shard_loader(loader: Iterable[Any], module: ParallelModule) -> ShardedLoader:
    """The batches of `loader`, of which every rank is given the slice that `module` takes from it
    (`local_inputs=True`). On the virtual mesh that is the whole batch.

    Of a `DataLoader` over a dataset with an index, a rank loads the samples of its slice alone, in
    the order that the loader has on rank 0: a sampler that draws from anything but torch's
    generators draws the same on all ranks by itself. Of whatever else gives batches, a rank takes
    its slice of every tensor that has the batch as first dim. `set_epoch(n)` is handed to the
    sampler, or to the dataset.
    """
    backend = module.backend
    if not isinstance(backend, TorchBackend):
        return ShardedLoader(loader)
    if not backend.local_inputs:
        raise InvalidInput(
            "a loader is split for a module whose ranks bring their own slices",
            got="a module that takes the global batch on every rank",
            remedy="parallelize(..., local_inputs=True), or hand it the plain loader's batches",
        )
    share = Share(batch_axes(module.program), module.program.mesh, backend.ranks.inner)
    return ShardedLoader(loader, share, backend.world)


class Share:
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
                "every rank has a sample of every batch",
                got=f"a batch of {size} on {self._mesh}",
                remedy="drop_last=True, or larger batches",
            )
        start, length = bounds[self._rank]
        return slice(start, start + length)


class ShardedLoader:
    """Gives a rank's slices of the batches of a loader, again with every `iter()`."""

    def __init__(
        self, loader: Iterable[Any], share: Share | None = None, world: World | None = None
    ) -> None:
        self.loader, self._world = loader, world
        self._share = None if share is None or share.is_whole else share

    def __iter__(self) -> Iterator[Any]:
        if self._sliced is not None:
            return iter(self._sliced)
        return map(self._cut, self.loader)

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
    def _sliced(self) -> DataLoader | None:
        """A loader of the samples of this rank's slices, where samples have an index."""
        plain = self.loader
        if not isinstance(plain, DataLoader) or type(plain).__iter__ is not DataLoader.__iter__:
            return None
        if plain.batch_sampler is None or self._world is None:
            return None
        given = (
            "dataset num_workers collate_fn pin_memory timeout worker_init_fn generator in_order "
            "multiprocessing_context prefetch_factor persistent_workers"
        )
        options = {name: getattr(plain, name) for name in given.split()}
        return DataLoader(batch_sampler=_Batches(plain.batch_sampler, self), **options)

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

    def numbered(self, batches: Iterable[list[Any]]) -> Iterator[list[Any]]:
        """This rank's slices of batches of numbers of samples, which come as they do on rank 0."""
        assert self._world is not None
        with one_fails_all_stop(self._world):
            before = torch.get_rng_state()
            told = self._world.told({"state": before})["state"].cpu()
        # Samplers of torch draw all that they draw before the first batch.
        torch.set_rng_state(told)
        coming = iter(batches)
        try:
            first = next(coming, None)
        finally:
            if self._world.rank:
                torch.set_rng_state(before)
        while first is not None:
            yield first if self._share is None else first[self._share.of(len(first))]
            first = next(coming, None)


class _Batches:
    """The batch sampler of one rank."""

    def __init__(self, plain: Any, loader: ShardedLoader) -> None:
        self._plain, self._loader = plain, loader

    def __iter__(self) -> Iterator[list[Any]]:
        return self._loader.numbered(self._plain)

    def __len__(self) -> int:
        return len(self._plain)

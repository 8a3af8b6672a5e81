"""Loaders of slices on four processes."""

from __future__ import annotations

import random as python_random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

import autopar as ap
from autopar import Mesh
from autopar.runtime.batches.data_loader import ShardedLoader
from tests.outputs import Deep, assert_close, made, parallel, random

MESH = Mesh(pp=2, dp=2)


class Noted(Dataset):
    """Samples, and which of them were loaded here."""

    def __init__(self) -> None:
        self.x, self.y, self.loaded = random(28, 6), torch.arange(28) % 5, list[int]()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        self.loaded.append(at)
        return self.x[at], self.y[at]


def own_half() -> slice:
    """Of a batch of 8."""
    return slice(0, 4) if MESH.coordinate(dist.get_rank())["dp"] == 0 else slice(4, 8)


def loads_its_slices() -> None:
    """Shuffled as on rank 0, whatever other ranks have drawn; of batches without numbers, cut."""
    dataset, example = Noted(), (random(8, 6), torch.arange(8) % 5)
    model = made(Deep)
    options = {"mesh": MESH, "microbatches": 2, "schedule": "1f1b"}
    pm = parallel(model, *example, local_inputs=True, **options)
    single = parallel(model, *example, mesh=Mesh(one=1), backend="virtual")
    plain = DataLoader(dataset, batch_size=8, shuffle=True, drop_last=True)
    half = own_half()
    sharded = ap.shard_loader(plain, pm)
    assert len(sharded) == 3
    for epoch in range(2):
        torch.manual_seed(epoch)
        batches = list(plain)
        torch.manual_seed(epoch + dist.get_rank())
        dataset.loaded.clear()
        slices = list(sharded)
        assert len(dataset.loaded) == 3 * 4
        assert_close(slices, [[value[half] for value in batch] for batch in batches])
        cut = list(ap.shard_loader(iter(batches), pm))
        assert_close(cut, slices)
        for batch, own in zip(batches, slices):
            torch.manual_seed(5)
            loss = single.step(*batch)
            torch.manual_seed(5)
            assert_close(pm.step(*own), loss)
    assert_close(pm.full_grads(), single.full_grads())
    loop = iter(sharded)
    next(loop)
    position, rest = [sharded.state_dict()], list(loop)
    dist.broadcast_object_list(position)  # rank 0's, as `extra` is
    resumed = ap.shard_loader(plain, pm)
    resumed.load_state_dict(position[0])
    dataset.loaded.clear()
    assert_close(list(resumed), rest)
    assert len(dataset.loaded) == 2 * 4  # and none of the batch that was taken
    lasting = DataLoader(dataset, batch_size=9)  # the last batch is of one sample
    with pytest.raises(ap.InvalidInput, match="every rank has a sample"):
        list(ap.shard_loader(lasting, pm))
    whole = parallel(model, *example, **options)
    with pytest.raises(ap.InvalidInput, match="bring their own slices"):
        ap.shard_loader(plain, whole)


class Drawn(Sampler):
    """Draws as it goes, from python's generator and from torch's: numbers, or lists of them."""

    def __init__(self, size: int | None = None, fails: bool = False) -> None:
        self.size, self.fails, self.given = size, fails, list[int]()

    def __iter__(self) -> Iterator[Any]:
        for _ in range(16 // (self.size or 1)):
            drawn = [self._draw() for _ in range(self.size or 1)]
            self.given += drawn
            yield drawn if self.size else drawn[0]
        if self.fails:
            raise RuntimeError("none are left")

    def _draw(self) -> int:
        return python_random.randrange(14) + int(torch.randint(14, ()))


class Rows(IterableDataset):
    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.values)


def loads_in_the_order_of_rank_0() -> None:
    """However samplers draw on each rank; what has no order of its own is the same on all."""
    rank, x = dist.get_rank(), torch.arange(28)
    pm = parallel(made(Deep), random(8, 6), torch.arange(8) % 5, local_inputs=True, mesh=MESH)
    python_random.seed(rank)
    torch.manual_seed(rank)

    def whole(loader: Any) -> list[int]:
        everyones: list[Any] = [None] * MESH.size
        dist.all_gather_object(everyones, [batch.tolist() for batch in loader])
        first, second = everyones[:2]
        assert everyones[2:] == everyones[:2]
        return [number for pair in zip(first, second) for half in pair for number in half]

    def of_first(given: list[int]) -> list[int]:
        box = [given]
        dist.broadcast_object_list(box)
        return box[0]

    def sharded(sampler: Any = None, data: Any = x, **options: Any) -> ShardedLoader:
        return ap.shard_loader(DataLoader(data, sampler=sampler, **options), pm)

    for options in ({"batch_size": 8}, {"batch_size": None}):
        drawn = Drawn(None if options["batch_size"] else 8)
        loader = sharded(drawn, **options)
        assert whole(loader) + whole(loader) == of_first(drawn.given)
    torch.manual_seed(4)
    python_random.seed(4)
    list(DataLoader(x, sampler=Drawn(8), batch_size=None))
    expected = torch.rand(2), python_random.random()
    for is_alike in (True, False):
        torch.manual_seed(4 + (0 if is_alike else rank))
        python_random.seed(4)
        list(sharded(Drawn(8), batch_size=None))
        found = torch.rand(2), python_random.random()
        assert torch.equal(found[0], expected[0]) == (is_alike or rank == 0)
        assert found[1] == expected[1]
    own = torch.Generator().manual_seed(rank)
    shuffled = sharded(batch_size=14, shuffle=True, generator=own)
    assert sorted(whole(shuffled)) == x.tolist() != whole(shuffled)
    next(iter(shuffled))  # and left
    assert sorted(whole(shuffled)) == x.tolist()
    assert whole(sharded(data=Rows(x), batch_size=8)) == x.tolist()
    with pytest.raises(ap.InvalidInput, match=r"the same global batch(.|\n)*seed what orders"):
        list(sharded(data=Rows(x + rank), batch_size=8))
    with pytest.raises(ap.InvalidInput if rank else RuntimeError, match="none are left"):
        list(sharded(Drawn(fails=True), batch_size=8))
    with pytest.raises(ap.InvalidInput, match="of 4 replicas"):
        sharded(DistributedSampler(x), batch_size=8)  # type: ignore[arg-type]

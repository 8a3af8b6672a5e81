"""Loaders of slices, as far as one process shows them; tests/distributed/checks.py has the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

import autopar as ap
from autopar import Mesh
from autopar.runtime.backends.world import World
from autopar.runtime.batches import batch_checks
from autopar.runtime.batches.data_loader import BatchShare, ShardedLoader


@pytest.mark.parametrize("size", [4, 5, 7, 8, 12])
def test_slices_of_all_ranks_are_the_batch(size: int) -> None:
    mesh, batch = Mesh(a=2, b=2), {"x": torch.arange(size), "name": "one"}
    taken = []
    for rank in range(mesh.size):
        loader = ShardedLoader([batch], BatchShare(("b", "a"), mesh, rank))
        for found in (*loader, *loader):
            assert found["name"] == "one"
        taken.append((mesh.position(rank, ("b", "a")), found["x"]))
    assert torch.equal(
        torch.cat([value for _, value in sorted(taken, key=lambda p: p[0])]), batch["x"]
    )


def test_a_batch_that_leaves_a_rank_without_a_sample_is_refused_by_all() -> None:
    mesh = Mesh(a=4)
    for rank in range(4):
        with pytest.raises(ap.InvalidInput, match="every rank has a sample"):
            BatchShare(("a",), mesh, rank).slice_of(3)


class Epochs(RandomSampler):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(12.0).view(6, 2))


def test_on_the_virtual_mesh_batches_are_whole() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Flatten(0))
    pm = ap.parallelize(model, (torch.ones(4, 2),), mesh=Mesh(a=2), mode="data", backend="virtual")
    data = torch.arange(20.0).view(10, 2)
    sampler = Epochs(data)  # type: ignore[arg-type]
    plain: DataLoader = DataLoader(data, batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    sharded = ap.shard_loader(plain, pm)
    for epoch in range(2):
        sharded.set_epoch(epoch)
        assert sampler.epoch == epoch
        torch.manual_seed(epoch)
        expected = list(plain)
        torch.manual_seed(epoch)
        assert all(map(torch.equal, sharded, expected))
    assert len(sharded) == len(plain) == 3
    assert sharded.dataset is data
    stream: DataLoader = DataLoader(Stream(), batch_size=4)
    assert [len(batch) for batch in ap.shard_loader(stream, pm)] == [4, 2]


class DigestsOfOneRank:
    """A world that collects the numbers which its one rank would send."""

    def __init__(self) -> None:
        self.digests: list[object] = []

    def gather_numbers(self, digest: object) -> list[object]:
        self.digests.append(digest)
        return [digest]


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_large_batch_with_a_constant_first_feature_is_compared(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_checks, "require_same_call", lambda *_, **__: None)
    ranks = []
    for seed in range(2):
        torch.manual_seed(seed)
        data = torch.randint(256, (8, 1 << 20), dtype=torch.uint8).t()
        data[:, 0] = 1  # a bias, or a token that begins every sample
        batch = data.contiguous() if layout == "rows" else data
        world = DigestsOfOneRank()
        check = batch_checks.BatchCheck(cast(World, world))
        for _ in range(13):
            if check.is_due(batch):
                check.compare("step", batch)
        ranks.append(world.digests)
    assert all(one != other for one, other in zip(*ranks, strict=True))


def test_a_large_tensor_is_read_in_blocks_that_cover_it_over_calls() -> None:
    data = (
        torch.arange(1 << 20).view(8, 16, -1).transpose(0, 1)
    )  # logical order, not that in memory
    for calls in (range(24), range(0, 240, 10)):  # each call on the host, each tenth on a GPU
        samples = [batch_checks._sample(data, call) for call in calls]
        assert max(sample.numel() for sample in samples) <= batch_checks.SAMPLED_ELEMENTS
        assert torch.equal(torch.cat(samples).unique(), torch.arange(1 << 20))
    assert torch.equal(batch_checks._sample(data, 5), batch_checks._sample(data.contiguous(), 5))


def test_one_changed_element_of_a_small_batch_is_always_seen() -> None:
    data = torch.zeros(4, 5, dtype=torch.bfloat16)
    digests = {batch_checks._digest([data], call) for call in range(3)}
    for place in range(data.numel()):
        other = data.clone()
        other.view(-1)[place] = 1
        digests.add(batch_checks._digest([other], place))
    assert len(digests) == 1 + data.numel()


@pytest.mark.parametrize("kind", ["seeded", "global", "stream"])
def test_a_loop_goes_on_where_it_stood(kind: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Flatten(0))
    pm = ap.parallelize(model, (torch.ones(4, 2),), mesh=Mesh(a=2), mode="data", backend="virtual")
    data = torch.arange(40.0).view(20, 2)

    def sharded() -> ShardedLoader:
        if kind == "stream":
            return ap.shard_loader(DataLoader(Stream(), batch_size=2), pm)
        generator = torch.Generator().manual_seed(3) if kind == "seeded" else None
        loader: DataLoader = DataLoader(data, 4, shuffle=True, generator=generator)  # type: ignore[arg-type]
        return ap.shard_loader(loader, pm)

    torch.manual_seed(5)
    loader, drawn, state, saved = sharded(), [], {}, torch.get_rng_state()
    for epoch in range(2):
        for number, batch in enumerate(loader):
            drawn.append((batch, torch.rand(1)))
            if (epoch, number) == (0, 1):
                state, saved = loader.state_dict(), torch.get_rng_state()
    torch.manual_seed(7)
    other = sharded()
    other.load_state_dict(state)
    torch.set_rng_state(saved)
    resumed = [(batch, torch.rand(1)) for _ in range(2) for batch in other]
    assert len(resumed) == len(drawn) - 2
    for (batch, number), (expected, draw) in zip(resumed, drawn[2:]):
        assert torch.equal(batch, expected)
        assert torch.equal(number, draw)
    with pytest.raises(ap.InvalidInput, match="state_dict"):
        other.load_state_dict({"batches": 1})

"""Private registries of process groups: how they are counted, ended and taken for the world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import (
    _abort_process_group,
    _get_default_store,
    _update_default_pg,
    _world,
)


def named_group_count() -> int:
    """Return how many groups this rank knows: torch names new groups after this number."""
    return len(_world.pg_names)


def abort_groups() -> Any:
    """End all process groups at once, so that waits of other ranks in them fail.

    Return the world that is left, which knows its ranks and moves nothing. A program that calls
    destroy_process_group() at its end finds it.
    """
    ended, store = dist.group.WORLD, _get_default_store()
    assert ended is not None
    name, rank, size = _world.pg_names[ended], ended.rank(), ended.size()
    _abort_process_group()
    left = dist.ProcessGroup(store, rank, size)
    _world.pg_map[left] = ("undefined", store)
    _world.pg_names[left] = name
    _world.pg_group_ranks[left] = {rank: rank for rank in range(size)}
    _update_default_pg(left)
    return left


def created_group_count() -> int:
    """Return how many groups this rank has made with others; torch names the next one after it."""
    return _world.group_count


def set_created_group_count(count: int) -> None:
    """Set the number after which torch names the next group, to that of ranks which know more."""
    _world.group_count = count


@contextmanager
def as_world(group: ProcessGroup) -> Iterator[None]:
    """Make all of torch take a group of all ranks for the world, within a `with`.

    At the end that group has gone, with the groups that were made meanwhile. Over gloo, ranks that
    wait in one of them hear of its end when nothing on this rank holds it any more.
    """
    world, earlier = dist.group.WORLD, {*_world.pg_names} - {group}
    _update_default_pg(group)
    try:
        yield
    finally:
        _update_default_pg(world)
        later = {name: new for new, name in _world.pg_names.items() if new not in earlier}
        for name in sorted(later, reverse=True):
            _abort_process_group(later[name])
        from torch.distributed.tensor import debug  # loads torch's compiler, a second

        # DTensors of one mesh are equal to those of another with the same ranks.
        debug._clear_sharding_prop_cache()

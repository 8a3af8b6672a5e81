"""The private corners of torch's process groups that autopar needs (torch 2.11 to 2.13)."""

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
from torch.distributed.tensor import debug


def groups_known() -> int:
    """How many groups this rank has been told of: torch names new ones after it."""
    return len(_world.pg_names)


def abort_groups() -> Any:
    """End all process groups at once: what others wait for in them fails. A world is left that
    knows its ranks and moves nothing, for destroy_process_group() at the end of a program."""
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


def groups_counted() -> int:
    """How many groups this rank has made with others: torch names the next one after it."""
    return _world.group_count


def count_groups_from(count: int) -> None:
    """Name the next one so, as other ranks do that were told of more."""
    _world.group_count = count


@contextmanager
def taken_for_world(group: ProcessGroup) -> Iterator[None]:
    """All of torch takes a group of all ranks for the world. At the end it has gone, with those
    that were made meanwhile: over gloo, others that wait in one hear of it when nothing here holds
    that one any more."""
    whole, known = dist.group.WORLD, {*_world.pg_names} - {group}
    _update_default_pg(group)
    try:
        yield
    finally:
        _update_default_pg(whole)
        made = {name: one for one, name in _world.pg_names.items() if one not in known}
        for name in sorted(made, reverse=True):
            _abort_process_group(made[name])
        # DTensors of one mesh are equal to those of another with the same ranks.
        debug._clear_sharding_prop_cache()

"""World: what its ranks have made together, kept and shared for as long as it lives.

A process group costs a rank sockets and a thread (over gloo), or memory on its GPU (over NCCL). So
there is one for each set of ranks and purpose, and one for each two ranks and direction of
messages. A backend may connect a group only when it is first used, and its members then wait for
one another: so each is used once when it is made, on all ranks in the same order, and never first
in the middle of a step, where some of its members wait for something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch.communication import (
    all_gather_single,
    moves_through_host,
    serves_store,
    world_store,
    world_timeout,
)
from autopar._torch.process_groups import as_world
from autopar.errors import ExecutionError
from autopar.mesh import Mesh
from autopar.runtime.launching.rank_liveness import RankLiveness, run_within
from autopar.runtime.launching.same_sources import require_same_sources

Group = dist.ProcessGroup
GRACE = 5.0  # seconds: torch's own deadlines come first


@dataclass
class World:
    """The world that this process is a rank of."""

    group: Group
    rank: int
    size: int
    carrier: torch.device  # where what it moves lies
    liveness: RankLiveness
    store_holder: int | None = None  # the rank that ends the store when it ends
    has_met: bool = False
    ended_by: str | None = None  # the first failure, once this rank has left because of it
    left: Any = None  # what torch then has for a world, until it is destroyed
    is_beside: bool = False  # another one goes on when it ends
    loops: int = 0  # over what comes from rank 0, begun on this rank
    groups: dict[tuple[Any, ...], Group | None] = field(default_factory=dict)
    meshes: dict[tuple[Mesh, str], DeviceMesh] = field(default_factory=dict)

    def meet(self) -> None:
        """The first use of the world itself, by all its ranks together."""
        if not self.has_met:
            if self.size > 1 and not self.is_beside:
                require_same_sources()
            holds = self.rank if serves_store(world_store()) else -1
            holder = torch.tensor(holds, device=self.carrier)
            dist.all_reduce(holder, dist.ReduceOp.MAX)
            self.store_holder = int(holder) if holder >= 0 else None
            self.has_met = True

    def group_of(
        self, ranks: Sequence[int], together: bool = True, purpose: str = ""
    ) -> Group | None:
        """The group over `ranks`; None if this rank is not in it.

        `together`: all ranks of the world ask for it in the same order, not its members alone.
        `purpose`: members use a group in one order; what may come in another one on each of them
        has a group of its own.
        """
        members = tuple(sorted(ranks))
        key = (members, together, purpose)
        if key not in self.groups:
            group = new_group(members, use_local_synchronization=not together)
            if self.rank not in members:
                group = None
            self.groups[key] = group
            if group is not None:
                dist.all_reduce(torch.zeros(1, device=self.carrier), group=group)
        return self.groups[key]

    @cached_property
    def host_group(self) -> Group:
        """All ranks, for words that lie on the host; first asked for by all of them together."""
        group: Group = new_group(range(self.size), backend="gloo")
        dist.all_reduce(torch.zeros(1), group=group)
        return group

    def numbers(self, own: int) -> tuple[int, ...]:
        """What each rank says in one number, on all ranks; nobody waits for a GPU."""
        group = self.group if self.carrier.type == "cpu" else self.host_group
        mine = torch.tensor([own])
        found = mine.new_empty(self.size)
        all_gather_single(found, mine, group=group)
        return tuple(found.tolist())

    def told(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What rank 0 has of these, on all ranks."""
        there = {name: value.to(self.carrier) for name, value in values.items()}
        for value in there.values() if self.size > 1 else ():
            dist.broadcast(value, 0, group=self.group)
        return there

    def channel(self, sender: int, receiver: int) -> Group | None:
        """The group for messages from one rank to another, asked for by all ranks together."""
        key = ("from", sender, "to", receiver)
        if key not in self.groups:
            group = new_group((sender, receiver))
            self.groups[key] = group if self.rank in (sender, receiver) else None
            value = torch.zeros(1, device=self.carrier)
            if self.rank == sender:
                dist.send(value, receiver, group)
            elif self.rank == receiver:
                dist.recv(value, sender, group)
        return self.groups[key]

    def mesh_of(self, mesh: Mesh, device_type: str) -> DeviceMesh:
        """The DeviceMesh of a mesh that all ranks stand on, over the groups of this world."""
        key = (mesh, device_type)
        if key not in self.meshes:
            own: list[Group] = []
            for axis in mesh:
                made = [self.group_of(ranks) for ranks in mesh.groups((axis,))]
                own += [group for group in made if group is not None]
            self.meshes[key] = (
                DeviceMesh.from_group(
                    own,
                    device_type,
                    mesh=torch.arange(mesh.size).view(mesh.shape),
                    mesh_dim_names=mesh.names,
                )
                if own
                else mesh.to_device_mesh(device_type)
            )
        return self.meshes[key]


_joined: World | None = None
_count = 0  # of the worlds that this process was a rank of


def world() -> World:
    """The world that this process is a rank of."""
    global _joined, _count
    require_living()
    group = dist.group.WORLD
    assert group is not None
    if _joined is None or _joined.group is not group:
        if _joined is not None:
            _joined.liveness.close()
        _count += 1
        rank, size, store = dist.get_rank(), dist.get_world_size(), world_store()
        gpu = torch.cuda.is_available() and not moves_through_host(group)
        carrier = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        liveness = RankLiveness(dist.PrefixStore(f"autopar/{_count}", store), rank, size)
        _joined = World(group, rank, size, carrier, liveness)
    return _joined


@contextmanager
def world_beside() -> Iterator[World]:
    """Another world of the same ranks, for what may fail: it ends with the block, and the one that
    was joined goes on. All ranks begin one together; what was made in it has gone by its end."""
    global _joined
    whole = world()
    with as_world(new_group(range(whole.size))):
        _joined = None
        here = world()
        here.is_beside = True
        try:
            here.meet()
            yield here
        finally:
            here.liveness.close()
            here.groups.clear()
            here.meshes.clear()
            _joined = whole


def joined() -> World | None:
    """The world of this process, if it has joined one that still lives."""
    if _joined is None or _joined.group is not dist.group.WORLD:
        return None
    return _joined if _joined.ended_by is None else None


def has_failed() -> bool:
    """Whether the world of this process has ended by a failure, and it joined no other since."""
    if _joined is None or _joined.ended_by is None:
        return False
    return dist.group.WORLD in (None, _joined.group, _joined.left)


def require_living(here: World | None = None) -> None:
    """Refuse what needs a world that has ended: `here`, or the one that was joined last."""
    if has_failed() if here is None else joined() is not here:
        ended = here or _joined
        assert ended is not None
        raise ExecutionError(
            "parallel modules live as long as the world that they were made in",
            got=ended.ended_by or "a module whose world was left by destroy_process_group()",
            remedy="let an error that comes while ranks wait for one another end the program, and "
            "start it again; or destroy_process_group(), join a new world and parallelize there",
        )


def new_group(ranks: Sequence[int], **how: Any) -> Any:
    """A group that waits as long as the world does: torch would give it half an hour.

    Its members find one another through the store, and a store that was stopped answers nobody.
    """
    wait = world_timeout()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def make() -> Any:
        if device is not None:  # each thread has its own
            torch.cuda.set_device(device)
        return dist.new_group(list(ranks), timeout=wait, **how)

    done = run_within(wait.total_seconds() + GRACE, make)
    if done is None:
        raise dist.DistStoreError("timed out: the store of the world does not answer")
    return done.result()

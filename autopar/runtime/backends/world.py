"""World: the process groups and meshes that the ranks of one world share while it lives.

A process group costs a rank sockets and a thread (gloo), or memory on its GPU (NCCL). So there is
one for each set of ranks and purpose, and one for each pair of ranks and direction of messages. A
backend may connect a group at its first use, when members wait for one another. So each group is
used once when it is made, in one order on all ranks: a first use during a step could deadlock.
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
GRACE = 5.0  # seconds after torch's deadlines, which are to come first


@dataclass
class World:
    """The world that this process is a rank of."""

    group: Group
    rank: int
    size: int
    carrier: torch.device  # the device of the tensors that it moves
    liveness: RankLiveness
    store_holder: int | None = None  # the rank whose end ends the store
    has_met: bool = False
    ended_by: str | None = None  # the failure because of which this rank has left
    left: Any = None  # torch's world after that, until it is destroyed
    is_second: bool = False  # an earlier world continues when this one ends
    loops: int = 0  # the count of loops over values of rank 0
    groups: dict[tuple[Any, ...], Group | None] = field(default_factory=dict)
    meshes: dict[tuple[Mesh, str], DeviceMesh] = field(default_factory=dict)

    def meet(self) -> None:
        """Use the world for the first time, on all ranks together."""
        if not self.has_met:
            if self.size > 1 and not self.is_second:
                require_same_sources()
            holds = self.rank if serves_store(world_store()) else -1
            holder = torch.tensor(holds, device=self.carrier)
            dist.all_reduce(holder, dist.ReduceOp.MAX)
            self.store_holder = int(holder) if holder >= 0 else None
            self.has_met = True

    def group_of(
        self, ranks: Sequence[int], *, by_all: bool = True, purpose: str = ""
    ) -> Group | None:
        """Return the group over `ranks`; None: this rank is not in it.

        `by_all`: all ranks of the world request it in the same order, not only its members.
        `purpose`: members use a group in one order, so work in another order needs another group.
        """
        members = tuple(sorted(ranks))
        key = (members, by_all, purpose)
        if key not in self.groups:
            group = new_group(members, use_local_synchronization=not by_all)
            if self.rank not in members:
                group = None
            self.groups[key] = group
            if group is not None:
                dist.all_reduce(torch.zeros(1, device=self.carrier), group=group)
        return self.groups[key]

    @cached_property
    def host_group(self) -> Group:
        """Return the group of all ranks for data on the host; first requested by all together."""
        group: Group = new_group(range(self.size), backend="gloo")
        dist.all_reduce(torch.zeros(1), group=group)
        return group

    def gather_numbers(self, number: int) -> tuple[int, ...]:
        """Return one number of each rank, over the host: no rank waits for a GPU."""
        group = self.group if self.carrier.type == "cpu" else self.host_group
        local = torch.tensor([number])
        gathered = local.new_empty(self.size)
        all_gather_single(gathered, local, group=group)
        return tuple(gathered.tolist())

    def broadcast(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return rank 0's values on all ranks."""
        sent = {name: value.to(self.carrier) for name, value in values.items()}
        for value in sent.values() if self.size > 1 else ():
            dist.broadcast(value, 0, group=self.group)
        return sent

    def channel(self, sender: int, receiver: int) -> Group | None:
        """Return the group of messages from one rank to another, requested by all ranks together;
        None: this rank is neither."""
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
        """Return the DeviceMesh of a mesh of all ranks, over the groups of this world."""
        key = (mesh, device_type)
        if key not in self.meshes:
            requests = [self.group_of(ranks) for axis in mesh for ranks in mesh.groups((axis,))]
            groups = [group for group in requests if group is not None]
            self.meshes[key] = (
                DeviceMesh.from_group(
                    groups,
                    device_type,
                    mesh=torch.arange(mesh.size).view(mesh.shape),
                    mesh_dim_names=mesh.names,
                )
                if groups
                else mesh.to_device_mesh(device_type)
            )
        return self.meshes[key]


_joined: World | None = None
_count = 0  # the number of worlds that this process has joined


def world() -> World:
    """Return the world that this process is a rank of."""
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
def second_world() -> Iterator[World]:
    """Join a second world of the same ranks for work that may fail, and return to the first one.

    All ranks enter together. Groups and modules of the second world end with the block.
    """
    global _joined
    first = world()
    with as_world(new_group(range(first.size))):
        _joined = None
        second = world()
        second.is_second = True
        try:
            second.meet()
            yield second
        finally:
            second.liveness.close()
            second.groups.clear()
            second.meshes.clear()
            _joined = first


def joined() -> World | None:
    """Return the world of this process; None: it has joined none, or the world has ended."""
    if _joined is None or _joined.group is not dist.group.WORLD:
        return None
    return _joined if _joined.ended_by is None else None


def has_failed() -> bool:
    """Return whether a failure ended the world of this process, which has joined none since."""
    if _joined is None or _joined.ended_by is None:
        return False
    return dist.group.WORLD in (None, _joined.group, _joined.left)


def require_living(current: World | None = None) -> None:
    """Refuse to use a world that has ended; None: the world that was joined last."""
    if has_failed() if current is None else joined() is not current:
        ended = current or _joined
        assert ended is not None
        raise ExecutionError(
            "parallel modules live as long as the world that they were made in",
            got=ended.ended_by or "a module whose world was left by destroy_process_group()",
            remedy="let an error that comes while ranks wait for one another end the program, and "
            "start it again; or destroy_process_group(), join a new world and parallelize there",
        )


def new_group(ranks: Sequence[int], **options: Any) -> Any:
    """Return a new process group with the timeout of the world; torch's default is half an hour.

    Members meet through the store. If the store has stopped, this raises instead of waiting.
    """
    wait = world_timeout()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def make() -> Any:
        if device is not None:  # a new thread begins with the first GPU
            torch.cuda.set_device(device)
        return dist.new_group(list(ranks), timeout=wait, **options)

    done = run_within(wait.total_seconds() + GRACE, make)
    if done is None:
        raise dist.DistStoreError("timed out: the store of the world does not answer")
    return done.result()

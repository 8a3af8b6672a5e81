"""Leaves: what a rank's program reads of its parameters, and what autograd works on.

A leaf lies in the memory of its parameter where that is what readers want; else it is a copy, whose
memory comes and goes with its group (gathered_copies.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar._torch.autograd import backward_pass_number
from autopar._torch.leaf_gradients import keep_gradients_unshared
from autopar._torch.tensors import local_of, version_of
from autopar.cost.bucket_prices import sharded_bucket_bytes
from autopar.cost.copy_groups import CopyGroup, largest_group_bytes
from autopar.mesh import Mesh
from autopar.passes import ParameterCopies
from autopar.passes.localize import Axes
from autopar.runtime.backends.host_copies import HOST, HostLink
from autopar.runtime.module.submodule_view import ClosedModule
from autopar.runtime.parameters.flat_buffers import TensorPieces
from autopar.runtime.parameters.gathered_copies import GatheredGroup, GatherWindow
from autopar.runtime.parameters.parameter_movement import ParameterMovement
from autopar.runtime.parameters.piece_exchange import PieceExchange


class LocalParameters:
    """One leaf for each parameter that lies here.

    A leaf stays the same as long as its parameter does: a backward that is under way reaches it.
    """

    def __init__(
        self,
        plans: Sequence[CopyGroup[ParameterMovement]] = (),
        group_over: Callable[[Axes], dist.ProcessGroup] | None = None,
        mesh: Mesh | None = None,
        rank: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """For `rank` of `mesh`, which computes on `device`; `plans` are the groups of copies of all
        ranks, `group_over` some axes are the ranks that gather."""
        self._device = device
        self.link = (
            HostLink(device) if any(plan.kind.goes_up for plan in plans) and device else None
        )
        self.parameters: dict[str, nn.Parameter] = {}
        self.version = 0  # grows when parameters are replaced, frozen or unfrozen
        self.by_name: dict[str, Tensor] = {}
        self.waits = False  # gradients are not summed for now
        self.unsummed: set[str] = set()  # parameters with such a gradient, or that had one
        self._plans, self._group_over, self._mesh, self._rank = plans, group_over, mesh, rank
        self._copied = {name for plan in plans for name in plan.names}
        self._between: dict[str, Tensor] = {}  # copies that others are made of
        self.window = GatherWindow()
        self.passing = -1  # the backward pass that last came to them
        self.is_asked = False  # a pass inside of another one is under way, for some of them

    @property
    def are_passed(self) -> bool:
        """Whether a backward pass that comes to them is under way here."""
        now = backward_pass_number()
        return now >= 0 and (self.is_asked or now == self.passing)

    def cut_bytes(self, stages: tuple[int, ...]) -> int:
        """What a bucket holds of gradients that are cut, of parameters that these stages read: all
        ranks that sum them see the same groups of copies."""
        return sharded_bucket_bytes(
            largest_group_bytes(self._plans, stages, self._mesh) if self._mesh else 0
        )

    @property
    def age(self) -> int:
        """Grows when a parameter changes. Of copies their groups know too, but not once another
        pass has begun."""
        return sum(map(version_of, self.parameters.values()))

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what the module holds now."""
        self.version += 1
        replaced = set()
        for name, parameter in tensors.items():
            if not isinstance(parameter, nn.Parameter):
                continue
            if self.parameters.get(name) is not parameter:
                replaced.add(name)
            self.parameters[name] = parameter
            if name not in self._copied:
                local = local_of(parameter)
                with torch.no_grad():
                    if name in replaced:
                        self.by_name[name] = local.detach()
                    else:
                        self.by_name[name].data = local
        if self._plans:
            self._make_groups(replaced)
        for name, leaf in self.by_name.items():
            leaf.requires_grad_(self.parameters[name].requires_grad)
        keep_gradients_unshared(self.by_name.values())

    def learns(self, name: str) -> bool:
        """Whether a parameter lies here and takes a gradient now."""
        leaf = self.by_name.get(name)
        return leaf is not None and leaf.requires_grad

    def close(self) -> None:
        """Let go of all parameters and copies; a backward that comes later is refused."""
        self.parameters = cast(dict, ClosedModule())
        self.by_name.clear()
        self._between.clear()
        self.window.take(())

    def copies(self, routes: Mapping[str, ParameterMovement]) -> ParameterCopies:
        """What a program with these routes is told of them."""
        groups = {
            name: number
            for number, plan in enumerate(self._plans)
            for name in plan.names
            if plan.kind.is_last
        }
        lasting = frozenset(number for number, plan in enumerate(self._plans) if plan.kind.lasts)
        return ParameterCopies(
            {r.name: r.taken for r in routes.values() if r.taken}, groups, lasting
        )

    def _make_groups(self, replaced: set[str]) -> None:
        """Groups of what is there now; one stays the same if all its tensors do."""
        made: list[GatheredGroup | None] = [None] * len(self._plans)
        holder: dict[str, GatheredGroup] = {}  # of the copies that others are made of
        for number, plan in sorted(enumerate(self._plans), key=lambda one: one[1].kind.is_last):
            if self.parameters.keys() >= {*plan.names}:
                group = made[number] = self._group(number, plan, replaced, holder)
                if not plan.kind.is_last:
                    holder |= dict.fromkeys(plan.names, group)
        self.window.take(made)

    def _group(
        self,
        number: int,
        plan: CopyGroup[ParameterMovement],
        replaced: set[str],
        holder: Mapping[str, GatheredGroup],
    ) -> GatheredGroup:
        names = plan.names
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        targets = [self._target(plan, one, one.name in replaced) for one in plan.parameters]
        is_second = plan.kind.is_last and not plan.kind.lasts
        sources = [
            self._between[name] if is_second and name in holder else local_of(parameter)
            for name, parameter in zip(names, parameters)
        ]
        old = self.window.groups[number] if self.window.groups else None
        if old is not None:
            tensors = zip([*old.sources, *old.targets], [*sources, *targets])
            if all(one is other for one, other in tensors):
                return old
            old.forget()
        over = self._group_over(plan.kind.axes) if plan.kind.axes and self._group_over else None
        needs = tuple(dict.fromkeys(holder[name] for name in names if name in holder))
        exchange = self._exchange(plan, over, targets[0]) if over is not None else None
        link = self.link if plan.kind.goes_up else None
        return GatheredGroup(
            number, exchange, parameters, sources, targets, plan.kind.lasts, needs, link
        )

    def _target(
        self, plan: CopyGroup[ParameterMovement], route: ParameterMovement, is_new: bool
    ) -> Tensor:
        """The copy of a parameter, without memory until its group comes."""
        held = self.by_name if plan.kind.is_last else self._between
        if is_new or route.name not in held:
            assert self._mesh is not None
            shape = plan.kind.way(route).coarse.local_shape(route.shape, self._mesh, self._rank)
            local = local_of(self.parameters[route.name])
            where: dict[str, Any] = {"device": self._device or local.device}
            if plan.kind.on_host:
                where = {"device": HOST, "pin_memory": local.is_pinned()}
            held[route.name] = torch.empty(shape, dtype=route.dtype, **where)
            held[route.name].untyped_storage().resize_(0)
        return held[route.name]

    def _exchange(
        self, plan: CopyGroup[ParameterMovement], over: dist.ProcessGroup, like: Tensor
    ) -> PieceExchange:
        assert self._mesh is not None
        pieces = [
            TensorPieces.between(
                way.coarse,
                way.fine,
                route.shape,
                mesh=self._mesh,
                rank=self._rank,
                axes=plan.kind.axes,
            )
            for route in plan.parameters
            for way in [plan.kind.way(route)]
        ]
        return PieceExchange(pieces, over, like.dtype, like.device)

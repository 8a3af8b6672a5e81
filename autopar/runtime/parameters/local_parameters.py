"""Hold the leaves of autograd: the tensors that a rank's program reads for its parameters.

A leaf lies in the memory of its parameter where readers want the parameter as it is stored. Else it
is a copy, whose memory comes and goes with its group (`gathered_copies.py`).

`optimizer.step()` changes parameters in place. A leaf in their memory sees it at once; copies were
freed by `GatherWindow.reset` at the end of the step and are filled again by the next forward.
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
from autopar.cost.bucket_prices import DIRECT_SEND_BYTES, SHORT_LIVED_BYTES, sharded_bucket_bytes
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
    """The parameters of one rank, with a leaf for each.

    A leaf stays as long as its parameter does, so that a backward under way reaches it.
    """

    def __init__(
        self,
        plans: Sequence[CopyGroup[ParameterMovement]] = (),
        group_over: Callable[[Axes], dist.ProcessGroup] | None = None,
        mesh: Mesh | None = None,
        rank: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Prepare `rank` of `mesh`, which computes on `device`, for the copies that `plans` groups.

        `group_over` returns the process group of some axes; None where nothing is gathered."""
        self._device = device
        self.link = (
            HostLink(device) if any(plan.kind.from_host for plan in plans) and device else None
        )
        self.parameters: dict[str, nn.Parameter] = {}
        self.version = 0  # grows when parameters are replaced, frozen or unfrozen
        self.by_name: dict[str, Tensor] = {}
        self.is_deferred = False  # gradients are not summed for now
        self.unsummed: set[str] = set()  # parameters with such a gradient, or that had one
        self._plans, self._group_over, self._mesh, self._rank = plans, group_over, mesh, rank
        self._copied = {name for plan in plans for name in plan.names}
        self._intermediate: dict[str, Tensor] = {}  # copies that others are made of
        self._slices: dict[str, Tensor] = {}  # views of parameters that copies are made of
        self.window = GatherWindow()
        self.last_backward = -1  # the number of the pass that last reached a leaf
        self.has_inner_backward = False  # a pass inside of another is under way, for some leaves

    @property
    def is_in_backward(self) -> bool:
        """Return whether a backward pass that reaches the leaves is under way in this thread."""
        now = backward_pass_number()
        return now >= 0 and (self.has_inner_backward or now == self.last_backward)

    def cut_bytes(self, stages: tuple[int, ...]) -> int:
        """Return the bytes of a bucket whose gradients are cut, for parameters of these stages.

        All ranks that sum them see the same groups of copies, and so the same limit."""
        return sharded_bucket_bytes(
            largest_group_bytes(self._plans, stages, self._mesh) if self._mesh else 0
        )

    @property
    def age(self) -> int:
        """Return a number that grows when a parameter changes, also after another pass began."""
        return sum(map(version_of, self.parameters.values()))

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the parameters among the tensors that the module holds now."""
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

    def is_trainable(self, name: str) -> bool:
        """Return whether a parameter lies on this rank and takes a gradient now."""
        leaf = self.by_name.get(name)
        return leaf is not None and leaf.requires_grad

    def close(self) -> None:
        """Let go of all parameters and copies; a backward that comes later is refused."""
        self.parameters = cast(dict, ClosedModule())
        self.by_name.clear()
        self._intermediate.clear()
        self._slices.clear()
        self.window.set_groups(())

    def copies(self, movements: Mapping[str, ParameterMovement]) -> ParameterCopies:
        """Return the copies that a program with these movements of parameters reads."""
        groups = {
            name: number
            for number, plan in enumerate(self._plans)
            for name in plan.names
            if plan.kind.is_leaf
        }
        step_long = frozenset(n for n, plan in enumerate(self._plans) if plan.kind.is_step_long)
        runtime_copies = {m.name: m.runtime_copies for m in movements.values() if m.runtime_copies}
        return ParameterCopies(runtime_copies, groups, step_long)

    def _make_groups(self, replaced: set[str]) -> None:
        """Make the groups of the present tensors; a group whose tensors all stay is kept."""
        groups: list[GatheredGroup | None] = [None] * len(self._plans)
        holder: dict[str, GatheredGroup] = {}  # of the copies that others are made of
        for number, plan in sorted(enumerate(self._plans), key=lambda item: item[1].kind.is_leaf):
            if self.parameters.keys() >= {*plan.names}:
                group = groups[number] = self._group(number, plan, replaced, holder)
                if not plan.kind.is_leaf:
                    holder |= dict.fromkeys(plan.names, group)
        self.window.set_groups(groups)

    def _group(
        self,
        number: int,
        plan: CopyGroup[ParameterMovement],
        replaced: set[str],
        holder: Mapping[str, GatheredGroup],
    ) -> GatheredGroup:
        names = plan.names
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        targets = [self._target(plan, m, is_new=m.name in replaced) for m in plan.parameters]
        is_second = plan.kind.is_leaf and not plan.kind.is_step_long
        sources = [
            self._intermediate[m.name] if is_second and m.name in holder else self._source(plan, m)
            for m in plan.parameters
        ]
        old = self.window.groups[number] if self.window.groups else None
        if old is not None:
            tensors = zip([*old.sources, *old.targets], [*sources, *targets])
            if all(before is now for before, now in tensors):
                return old
            old.reset()
        group = self._group_over(plan.kind.axes) if plan.kind.axes and self._group_over else None
        needs = tuple(dict.fromkeys(holder[name] for name in names if name in holder))
        exchange = self._exchange(plan, group, targets[0]) if group is not None else None
        is_step_long, link = plan.kind.is_step_long, self.link if plan.kind.from_host else None
        return GatheredGroup(
            number, names, exchange, parameters, sources, targets, is_step_long, needs, link
        )

    def _source(self, plan: CopyGroup[ParameterMovement], movement: ParameterMovement) -> Tensor:
        """Return the part of this rank's piece of a parameter that a copy is made of."""
        local, way = local_of(self.parameters[movement.name]), plan.kind.way(movement)
        if way.source == way.target or not way.source.cuts_into(way.target):
            return local
        assert self._mesh is not None
        where: dict[str, Any] = {"mesh": self._mesh, "rank": self._rank, "axes": ()}
        cut = TensorPieces.between(way.source, way.target, movement.shape, **where)
        piece, known = local.detach().narrow(cut.dim, *cut.bounds[0]), self._slices
        if movement.name not in known or not known[movement.name].is_set_to(piece):
            known[movement.name] = piece
        return known[movement.name]

    def _target(
        self, plan: CopyGroup[ParameterMovement], movement: ParameterMovement, *, is_new: bool
    ) -> Tensor:
        """Return the copy of a parameter, which has no memory until its group is gathered."""
        copies, name = self.by_name if plan.kind.is_leaf else self._intermediate, movement.name
        if is_new or name not in copies:
            assert self._mesh is not None
            shape = plan.kind.way(movement).target.local_shape(
                movement.shape, self._mesh, self._rank
            )
            local = local_of(self.parameters[name])
            where: dict[str, Any] = {"device": self._device or local.device}
            if plan.kind.on_host:
                where = {"device": HOST, "pin_memory": local.is_pinned()}
            copies[name] = torch.empty(shape, dtype=movement.dtype, **where)
            copies[name].untyped_storage().resize_(0)
        return copies[name]

    def _exchange(
        self, plan: CopyGroup[ParameterMovement], group: dist.ProcessGroup, like: Tensor
    ) -> PieceExchange:
        assert self._mesh is not None
        where: dict[str, Any] = {"mesh": self._mesh, "rank": self._rank, "axes": plan.kind.axes}
        ways = [(movement.shape, plan.kind.way(movement)) for movement in plan.parameters]
        pieces = [TensorPieces.between(way.target, way.source, s, **where) for s, way in ways]
        most = DIRECT_SEND_BYTES if plan.kind.is_step_long else SHORT_LIVED_BYTES
        return PieceExchange(pieces, group, like.dtype, like.device, most_copied=most)

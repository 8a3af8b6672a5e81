"""Make an optimizer of a parallel module: `ap.optimizer(torch.optim.AdamW, pm, lr=3e-4)`.

It behaves as the same class of torch does on one device, and works on this rank's local tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar._torch.tensors import local_of
from autopar.errors import InvalidInput
from autopar.passes.localize import Axes
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.backends.process_groups import Groups
from autopar.runtime.module.call_agreement import gather_values, run_on_all_ranks
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.optimizers.local_optimizer import (
    LocalOptimizer,
    UpdatedGroup,
    UpdatedParameter,
    local_class,
    local_parameter,
)
from autopar.runtime.optimizers.owner_exchange import OwnedTensor, OwnerExchange, PieceView
from autopar.runtime.optimizers.update_scope import UpdateKind, UpdateScope, update_kind
from autopar.runtime.parameters.old_parameters import parallel_modules
from autopar.text.suggestions import nearest

Group = Mapping[str, Any]


def optimizer(
    cls: type[Optimizer],
    parameters: ParallelModule | Iterable[Any],
    module: ParallelModule | None = None,
    /,
    **options: Any,
) -> Optimizer:
    """Make an optimizer that updates this rank's local tensors; all ranks make it together.

    The result is an instance of `cls`. Its groups hold the module's parameters, and its states are
    saved under their names. An optimizer that works element by element, as a trial on small tensors
    shows, updates each rank's piece. Of another one, such as Muon, each parameter that is cut has
    an owner: it receives the pieces of the parameter and its gradient, updates the whole, and sends
    the pieces back. Fused kernels are used where torch has them, unless `options` choose.

    Args:
        cls: A class of optimizers. Example: torch.optim.AdamW.
        parameters: The parallel module; or its parameters, or their names; or groups of them as
            dicts. Example: [{"params": ["head.weight"], "lr": 1e-2}]. Names of parameters in
            other stages of a pipeline are accepted on every rank.
        module: The parallel module whose parameters are named. None: found by its parameters.
        options: Those of the class. Example: lr=3e-4.
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise InvalidInput(
            "ap.optimizer makes an optimizer of a class of optimizers",
            got=f"{cls!r}, of type {type(cls).__name__}",
            remedy="ap.optimizer(torch.optim.AdamW, pm, lr=3e-4)",
        )
    if isinstance(parameters, ParallelModule):
        module, parameters = parameters, parameters.parameters()
    groups = _as_groups([*parameters])
    if module is None:
        module = _module_of(groups)
    placing = GroupPlacing(cls, options, module)
    updated, exchanges = placing.place(groups)
    make_class: Callable[[Any], Any] = local_class
    kind = make_class(cls)
    result: LocalOptimizer = kind.__new__(kind)
    result.sum_waiting, result.place_group = module.backend.sum_waiting, placing.place_group
    result.begin_inside(updated, exchanges)
    local = [{**group, "params": new.tensors} for group, new in zip(groups, updated)]
    kind.__init__(result, local, **options)
    result.end_inside()
    return result


@dataclass(frozen=True)
class GroupPlacing:
    """Decides how parameters of a module are updated: in pieces, or whole by owners."""

    kind: type[Optimizer]
    options: Mapping[str, Any]
    module: ParallelModule

    def place_group(self, group: Group) -> tuple[UpdatedGroup, list[OwnerExchange]]:
        """Place the parameters of one more group; all ranks do so together."""
        (updated,), exchanges = self.place([group])
        return updated, exchanges

    def place(self, groups: Sequence[Group]) -> tuple[list[UpdatedGroup], list[OwnerExchange]]:
        """Place the parameters of groups; all ranks do so together."""
        backend = self.module.backend
        accepted = run_on_all_ranks(backend, partial(self._accept, groups), "ap.optimizer()")
        cut: defaultdict[tuple[Axes, torch.dtype, torch.device], list[DTensor]] = defaultdict(list)
        for tensors, update in accepted:
            for tensor in tensors if update.scope is UpdateScope.PARAMETER else ():
                if isinstance(tensor, DTensor) and (axes := PieceView.of(tensor).axes):
                    cut[axes, tensor.dtype, local_of(tensor).device].append(tensor)
        exchanges = self._exchanges(cut)
        owned: dict[Tensor, OwnedTensor] = {
            item.parameter: item for exchange in exchanges for item in exchange.tensors
        }
        updated = []
        for tensors, update in accepted:
            items = [
                UpdatedParameter(tensor, owned[tensor].whole, is_owned=True)
                if tensor in owned
                else UpdatedParameter(tensor, local_parameter(tensor))
                for tensor in tensors
            ]
            updated.append(UpdatedGroup(items, has_fused=update.has_fused))
        return updated, exchanges

    def _accept(self, groups: Sequence[Group]) -> list[tuple[list[Tensor], UpdateKind]]:
        """Return the parameters of each group, and what their updates depend on; or refuse them."""
        chosen = [(self._parameters(group["params"]), group) for group in groups]
        return [(tensors, self._kind_of(tensors, group)) for tensors, group in chosen]

    def _exchanges(
        self, cut: Mapping[tuple[Axes, torch.dtype, torch.device], Sequence[DTensor]]
    ) -> list[OwnerExchange]:
        """Return an exchange for each kind of cut parameters, over groups that all ranks make."""
        backend = self.module.backend
        if not isinstance(backend, TorchBackend):
            return []
        wanted = gather_values(backend, {axes for axes, _, _ in cut})
        with backend.guard(agreed=True):
            all_axes = set[Axes]().union(*wanted)
            groups = Groups(backend.mesh, all_axes, backend.ranks.meshes, "owners")
        pairs = [(axes, tensors) for (axes, _, _), tensors in cut.items()]
        return [OwnerExchange(tensors, groups[axes], backend.guard) for axes, tensors in pairs]

    def _kind_of(self, tensors: Sequence[Tensor], group: Group) -> UpdateKind:
        """Return how the class updates parameters of these shapes with the options of a group."""
        options = {**self.options, **{k: v for k, v in group.items() if k != "params"}}
        if options.get("differentiable"):
            raise InvalidInput(
                "an update of local tensors has no gradients",
                got="differentiable=True",
                remedy=f"{self.kind.__name__}(pm.parameters(), differentiable=True)",
            )
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if not shapes:
            return UpdateKind(UpdateScope.ELEMENT, has_fused=False)
        device = local_of(tensors[0]).device
        update = update_kind(self.kind, options, sorted(shapes), device)
        is_real = all(tensor.is_floating_point() for tensor in tensors)
        return UpdateKind(update.scope, update.has_fused and is_real)

    def _parameters(self, named: Any) -> list[Tensor]:
        """Return the parameters of this rank among names and parameters of the module."""
        module = self.module
        by_name = dict(module.named_parameters(remove_duplicate=False))
        captured = module.program.captured
        elsewhere = {*module.saved_names, *captured.tied} - {*captured.buffers.values()}
        known = {id(parameter) for parameter in by_name.values()}
        chosen: dict[Tensor, None] = {}
        for item in [named] if isinstance(named, str | Tensor) else named:
            value: Any = item[1] if isinstance(item, tuple) and len(item) == 2 else item
            if isinstance(value, str) and value in by_name:
                value = by_name[value]
            elif isinstance(value, str) and value in elsewhere:
                continue  # a parameter of another stage
            if isinstance(value, str):
                meant = nearest(value, sorted(by_name))[:3]
                raise InvalidInput(
                    "an optimizer updates parameters of its module",
                    got=f"{value!r}, which is no parameter",
                    remedy=" or ".join(meant) or "a name of pm.named_parameters()",
                )
            if id(value) not in known:
                what = f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise InvalidInput(
                    "an optimizer of a parallel module is made of the module's own parameters",
                    got=f"a {type(value).__name__} that is none of them: {what}",
                    remedy="parameters of pm.parameters(), after pm = ap.parallelize(model, ...), "
                    "or their names",
                )
            chosen[value] = None
        return [*chosen]


def _as_groups(parameters: Sequence[Any]) -> list[dict[str, Any]]:
    """Return groups as given, or one group of parameters."""
    if not parameters or not isinstance(parameters[0], Mapping):
        return [{"params": [*parameters]}]
    for group in parameters:
        if not isinstance(group, Mapping) or "params" not in group:
            raise InvalidInput(
                "a group of an optimizer is a dict with its parameters and options",
                got=f"{group!r}"[:200],
                remedy='{"params": ["head.weight", "head.bias"], "lr": 1e-3}',
            )
    groups = [dict(group) for group in parameters]
    for group in groups:
        if not isinstance(group["params"], str | Tensor):
            group["params"] = [*group["params"]]
    return groups


def _module_of(groups: Sequence[Group]) -> ParallelModule:
    """Return the living parallel module with parameters of these groups."""
    named = [item for group in groups for item in group["params"]]
    wanted = {id(value) for value in named if isinstance(value, nn.Parameter)}
    for module in parallel_modules():
        if not wanted.isdisjoint(map(id, module.parameters())):
            assert isinstance(module, ParallelModule)
            return module
    raise InvalidInput(
        "an optimizer updates parameters of a parallel module",
        got="names alone" if named and not wanted else "parameters of no parallel module",
        remedy="ap.optimizer(cls, groups, pm, ...)",
    )

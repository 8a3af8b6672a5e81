"""Make an optimizer of a parallel module: `ap.optimizer(torch.optim.AdamW, pm, lr=3e-4)`.

It behaves as the same class of torch does on one device, and works on this rank's local tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    Placed,
    local_class,
)
from autopar.runtime.optimizers.owner_exchange import OwnerExchange, PieceView
from autopar.runtime.optimizers.update_scope import (
    UpdateKind,
    UpdateScope,
    require_one_call,
    update_kind,
)
from autopar.runtime.optimizers.updated_group import UpdatedParameter, local_parameter
from autopar.runtime.parameters.old_parameters import parallel_modules
from autopar.text.suggestions import nearest

Group = Mapping[str, Any]
CPU = torch.device("cpu")


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
    before = [group["params"] for group in groups]
    updated, exchanges = placing.place(groups)
    make_class: Callable[[Any], Any] = local_class
    kind = make_class(cls)
    result: LocalOptimizer = kind.__new__(kind)
    result.sum_waiting, result.place_group = module.backend.sum_waiting, placing.place_group
    result.check_closure = placing.check_closure
    result.begin_inside(updated, exchanges)
    try:
        kind.__init__(result, groups, **options)
    except BaseException:
        for group, parameters_before in zip(groups, before):
            group["params"] = parameters_before
        raise
    result.end_inside()
    return result


@dataclass(frozen=True)
class AcceptedGroup:
    """The parameters of this rank in one group, and what their updates depend on."""

    tensors: list[Tensor]
    names: list[str] | None  # of a group of named parameters
    options: dict[str, Any]
    update: UpdateKind

    def show_local(self, group: dict[str, Any], local: Mapping[int, Tensor]) -> None:
        """Put local tensors into the group, by the ids of their parameters."""
        tensors: list[Any] = [local[id(tensor)] for tensor in self.tensors]
        if self.names is not None:
            group["param_names"] = self.names  # torch does so for those that have some here
            tensors = [*zip(self.names, tensors)]
        group["params"] = tensors


@dataclass(frozen=True)
class GroupPlacing:
    """Decides how parameters of a module are updated: in pieces, or whole by owners."""

    kind: type[Optimizer]
    options: Mapping[str, Any]
    module: ParallelModule
    placed: dict[int, UpdatedParameter] = field(default_factory=dict)  # by ids of parameters
    accepted: list[AcceptedGroup] = field(default_factory=list)

    def place_group(self, group: dict[str, Any]) -> Placed:
        """Place the parameters of one more group; all ranks do so together."""
        return self.place([group])

    def place(self, groups: Sequence[dict[str, Any]]) -> Placed:
        """Make groups ones of local tensors; all ranks do so together."""
        backend = self.module.backend
        accepted = run_on_all_ranks(backend, partial(self._accept, groups), "ap.optimizer()")
        cut: defaultdict[tuple[Axes, torch.dtype, torch.device], list[DTensor]] = defaultdict(list)
        new: list[UpdatedParameter] = []
        for tensor, update in [(t, group.update) for group in accepted for t in group.tensors]:
            axes = PieceView.of(tensor).axes if isinstance(tensor, DTensor) else ()
            if id(tensor) in self.placed:
                self._require_same(self.placed[id(tensor)], update, is_cut=bool(axes))
            elif isinstance(tensor, DTensor) and axes and update.scope is UpdateScope.PARAMETER:
                cut[axes, tensor.dtype, local_of(tensor).device].append(tensor)
            else:
                local = local_parameter(tensor)
                new.append(UpdatedParameter(tensor, local, has_fused=update.has_fused))
        exchanges = self._exchanges(cut)
        fused = {id(t): g.update.has_fused for g in accepted for t in g.tensors}
        for item in (item for exchange in exchanges for item in exchange.tensors):
            has_fused = fused[id(item.parameter)]
            new.append(UpdatedParameter(item.parameter, item.whole, True, has_fused))
        self.placed.update((id(item.parameter), item) for item in new)
        self.accepted.extend(accepted)
        local_tensors = {key: item.tensor for key, item in self.placed.items()}
        for group, chosen in zip(groups, accepted):
            chosen.show_local(group, local_tensors)
        return new, exchanges

    def check_closure(self) -> None:
        """Refuse a class that does not compute what it does without a closure; on all ranks."""
        run_on_all_ranks(self.module.backend, self._check_closure, "step(closure)")

    def _check_closure(self) -> None:
        for group in self.accepted:
            require_one_call(self.kind, group.options, _shapes(group.tensors), CPU)

    def _require_same(self, item: UpdatedParameter, update: UpdateKind, *, is_cut: bool) -> None:
        """Refuse to update a parameter by its owner that was updated in pieces, or vice versa."""
        if is_cut and item.is_owned != (update.scope is UpdateScope.PARAMETER):
            raise InvalidInput(
                "a parameter that is added again is updated as it was before: in pieces, or whole",
                got=f"options of the group with which {self.kind.__name__} needs the other",
                remedy="make another optimizer for it",
            )

    def _accept(self, groups: Sequence[Group]) -> list[AcceptedGroup]:
        """Return the parameters of each group, and what their updates depend on; or refuse them."""
        return [self._accept_group(group) for group in groups]

    def _accept_group(self, group: Group) -> AcceptedGroup:
        params = group["params"]
        items = [params] if isinstance(params, str | Tensor) else [*params]
        tensors = self._parameters(items)
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        options = {**self.options, **options}
        names = [*tensors.values()] if items and isinstance(items[0], tuple) else None
        return AcceptedGroup([*tensors], names, options, self._kind_of([*tensors], options))

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

    def _kind_of(self, tensors: Sequence[Tensor], options: Mapping[str, Any]) -> UpdateKind:
        """Return how the class updates parameters of these shapes with the options of a group."""
        if options.get("differentiable"):
            raise InvalidInput(
                "an update of local tensors has no gradients",
                got="differentiable=True",
                remedy=f"{self.kind.__name__}(pm.parameters(), differentiable=True)",
            )
        if not tensors:
            return UpdateKind(UpdateScope.ELEMENT, has_fused=False)
        device = local_of(tensors[0]).device
        update = update_kind(self.kind, options, _shapes(tensors), device)
        is_real = all(tensor.is_floating_point() for tensor in tensors)
        return UpdateKind(update.scope, update.has_fused and is_real)

    def _parameters(self, items: Sequence[Any]) -> dict[Tensor, str]:
        """Return the parameters of this rank among names, parameters and pairs of both.

        With the names that stand before them in pairs."""
        module = self.module
        by_name = dict(module.named_parameters(remove_duplicate=False))
        captured = module.program.captured
        elsewhere = {*module.saved_names, *captured.tied} - {*captured.buffers.values()}
        known = {id(parameter) for parameter in by_name.values()}
        chosen: dict[Tensor, str] = {}
        for item in items:
            is_pair = isinstance(item, tuple) and len(item) == 2
            name, value = item if is_pair else ("", item)
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
            chosen[value] = name
        return chosen


def _as_groups(parameters: Sequence[Any]) -> list[dict[str, Any]]:
    """Return groups as given, which become the optimizer's; or one group of parameters."""
    if not parameters or not isinstance(parameters[0], dict):
        return [{"params": [*parameters]}]
    for group in parameters:
        if not isinstance(group, dict) or "params" not in group:
            raise InvalidInput(
                "a group of an optimizer is a dict with its parameters and options",
                got=f"{group!r}"[:200],
                remedy='{"params": ["head.weight", "head.bias"], "lr": 1e-3}',
            )
        if not isinstance(group["params"], str | Tensor | list):
            group["params"] = [*group["params"]]
    return [*parameters]


def _shapes(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return the different shapes of tensors; a small one if there are none."""
    return sorted({tuple(tensor.shape) for tensor in tensors}) or [(2, 2)]


def _module_of(groups: Sequence[Group]) -> ParallelModule:
    """Return the living parallel module with parameters of these groups."""
    items = [item for group in groups for item in group["params"]]
    named = [item[-1] if isinstance(item, tuple) and item else item for item in items]
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

"""Run an optimizer of torch on the tensors of this rank, under the parameters of a parallel module.

    optimizer.param_groups, .state      the module's parameters (DTensors), and states like them
    while step() runs                   the local tensors of the same parameters, and their states

A step of DTensors costs Python for each operator of each parameter; a step of local tensors is one
fused or foreach call. Both views share memory. The class of the optimizer is a subclass of the
user's, with its name, so that schedules, checkpoints and `isinstance` see what they expect.

What users change between steps (groups, their parameters, states) is taken up when a method of
torch needs it. A parameter that an owner updates whole has states on that rank alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar._torch.optimizers import step_without_hooks
from autopar._torch.tensors import plain_attributes
from autopar.errors import InvalidInput
from autopar.runtime.optimizers.owner_exchange import OwnerExchange
from autopar.runtime.optimizers.states_view import ParameterStates, StatesView
from autopar.runtime.optimizers.updated_group import (
    KnownParameters,
    UpdatedGroup,
    UpdatedParameter,
)

Placed = tuple[Sequence[UpdatedParameter], Sequence[OwnerExchange]]


class LocalOptimizer(Optimizer):
    """An optimizer whose steps work on local tensors; a subclass has the user's class as well."""

    user_class: ClassVar[type[Optimizer]]
    updated_groups: list[UpdatedGroup]
    exchanges: list[OwnerExchange]
    sum_waiting: Callable[[], None]  # completes gradients that are partial sums
    place_group: Callable[[dict[str, Any]], Placed]  # and makes it one of local tensors
    check_closure: Callable[[], None]  # refuses a class that does not call a closure once

    def begin_inside(self, updated: Sequence[UpdatedParameter], exchanges: Any) -> None:
        """Prepare for the constructor of the user's class, which sees local tensors."""
        self.updated_groups, self.exchanges = [], []
        self._known, self._lists = KnownParameters(), dict[int, tuple[Any, Any]]()
        self._view, self._checked, self._is_closure_checked = StatesView(self._known), 0, False
        self._is_inside = True
        self._add(updated, exchanges)

    def end_inside(self) -> None:
        """Show the module's parameters from now on."""
        for exchange in self.exchanges:
            exchange.release()
        self._leave()

    def _add(self, updated: Sequence[UpdatedParameter], exchanges: Sequence[OwnerExchange]) -> None:
        """Take up parameters; owners have the values until their exchange is released."""
        self._known.add(updated)
        self.exchanges += exchanges
        for exchange in exchanges:
            exchange.gather(has_gradients=False)

    def _enter(self) -> None:
        """Show local tensors and states, of the groups and the states as they are now."""
        groups, updated_groups = self.param_groups, self.updated_groups
        is_same = len(groups) == len(updated_groups)
        if not (is_same and all(map(UpdatedGroup.is_of, updated_groups, groups))):
            self.updated_groups = updated_groups = [*map(self._known.group, groups)]
        if self.state is not self._view:
            self._take_up_states(self.state)
        self._lists = {}
        for group, updated in zip(groups, updated_groups):
            self._lists[id(updated.tensors)] = updated, group["params"]
            group["params"] = updated.tensors
        states: Any = self._view.states
        self.state, self._is_inside = states, True

    def _take_up_states(self, states: Mapping[Any, Any]) -> None:
        """Keep the states that the user has assigned."""
        self._view.states = {}
        if isinstance(states, defaultdict):
            self._view.states = defaultdict(states.default_factory)
        for key, value in states.items():
            self._view[key] = value
        self._checked = 0

    def _leave(self) -> None:
        """Show the module's parameters, and states like them."""
        for group in self.param_groups:
            tensors = group["params"]
            updated, parameters = self._lists.get(id(tensors), (None, None))
            is_kept = updated is not None and updated.has_tensors(tensors)
            group["params"] = parameters if is_kept else self._known.parameters(tensors)
        self._view.states = self.state
        shown: Any = self._view
        self.state, self._is_inside = shown, False

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Show local tensors and states, to the methods of the user's class."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Update the parameters, and return what the user's class returns.

        A closure, which computes the loss, is called before."""
        values = [*args]
        closure = kwargs.get("closure", values[0] if values else None)
        if callable(closure):
            if not self._is_closure_checked:
                self.check_closure()
                self._is_closure_checked = True
            with torch.enable_grad():
                loss = closure()
            if values:
                values[0] = lambda: loss
            else:
                kwargs["closure"] = lambda: loss
        hooks = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks
        with self._inside():
            # They run around this step, and not again around a step that the user's class inherits.
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
            fused = [
                group
                for group, updated in zip(self.param_groups, self.updated_groups)
                if updated.has_fused and group.get("fused") is group.get("foreach") is None
            ]
            try:
                for group in fused:
                    group["fused"] = True
                if not all(map(UpdatedGroup.begin, self.updated_groups)):
                    self._complete_gradients()
                self._gather()
                result = step_without_hooks(self.user_class)(self, *values, **kwargs)
                for exchange in self.exchanges:
                    exchange.scatter()
            finally:
                self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = hooks
                for group in fused:
                    group["fused"] = None
                for updated in self.updated_groups:
                    updated.end()
                for exchange in self.exchanges:
                    exchange.release()
        if len(self._view.states) != self._checked:
            self._require_like_states()
        return result

    def _gather(self) -> None:
        """Bring the parameters of the groups to their owners, with their gradients."""
        if self.exchanges:
            present = {id(item.parameter) for g in self.updated_groups for item in g.updated}
            for exchange in self.exchanges:
                exchange.gather(has_gradients=True, present=present)

    def _complete_gradients(self) -> None:
        """Bring gradients to the places of their parameters; all ranks do so together."""
        self.sum_waiting()
        for updated in self.updated_groups:
            updated.complete_gradients()
            updated.begin()

    def _require_like_states(self) -> None:
        """Refuse states that show that an update depends on more than its element after all."""
        states = self._view.states
        self._checked = len(states)
        for tensor in [t for group in self.updated_groups for t in group.cut_without_owner]:
            held = states.get(tensor)
            for key, value in held.items() if isinstance(held, Mapping) else ():
                if isinstance(value, Tensor) and value.ndim and value.shape != tensor.shape:
                    raise InvalidInput(
                        "what an optimizer does with large parameters is what it did in a trial "
                        "with at most 256 elements in each dim",
                        got=f"{type(self).__name__}: {key} of shape {list(value.shape)} for a "
                        f"piece of {list(tensor.shape)}, and element by element in the trial",
                        remedy='states="whole" with mode="data", under which no parameter is cut',
                    )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the same module, by their names or themselves."""
        if self._is_inside or not isinstance(param_group, dict):  # in the constructor; or refused
            super().add_param_group(param_group)
            return
        before = param_group.get("params")
        updated, exchanges = self.place_group(param_group)
        self._add(updated, exchanges)
        try:
            with self._inside():
                super().add_param_group(param_group)
        except BaseException:
            param_group["params"] = before
            raise
        finally:
            for exchange in exchanges:
                exchange.release()

    def state_dict(self) -> dict[str, Any]:
        """Return options and states; states of this rank's pieces are DTensors.

        States that an owner keeps are on that rank alone: `ap.save` saves those of all ranks.
        """
        state_dict = super().state_dict()
        if not isinstance(state_dict, dict) or not isinstance(state_dict.get("state"), dict):
            return state_dict  # of a hook or a class that has its own
        states = state_dict["state"].items()
        held = {k: dict(v) if isinstance(v, ParameterStates) else v for k, v in states}
        return {**state_dict, "state": held}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned, or states in whole tensors.

        The user's hooks, and methods of the class, see the module's parameters."""
        handles = [
            self.register_load_state_dict_pre_hook(_begin_loading),
            self.register_load_state_dict_post_hook(_end_loading, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()
            if self._is_inside:
                self._leave()

    def begin_loading(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Show local tensors, and return this rank's part of a state dict."""
        self._enter()
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        items = [item for group in self.updated_groups for item in group.updated]
        updated, states = dict(zip(numbers, items)), dict[Any, Any]()
        for number, held in state_dict["state"].items():
            item = updated.get(number)
            if item is None or not isinstance(held, Mapping):
                states[number] = held if item is None else item.local_state(held)
            elif item.has_states:
                states[number] = {key: item.local_state(value) for key, value in held.items()}
        return {**state_dict, "state": states}

    def end_loading(self) -> None:
        """Show the module's parameters, after a state dict has been loaded."""
        self._leave()
        self._checked = 0

    def state_holder(self, parameter: Tensor) -> Tensor | None:
        """Return the tensor like which this rank keeps states of a parameter; None: it keeps none.

        It is the parameter, or at the owner of the parameter the whole tensor."""
        item = self._known.of_parameter(parameter)
        if item is None or not item.is_owned:
            return parameter
        return item.tensor if item.has_states else None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidInput(
            "an optimizer of a parallel module is bound to the ranks that run it",
            got=f"copy.deepcopy or pickle of {type(self).__name__}",
            remedy="save and load its state_dict(), or ap.save() and ap.load()",
        )


def _begin_loading(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    return optimizer.begin_loading(state_dict)


def _end_loading(optimizer: Any) -> None:
    optimizer.end_loading()


def _drop_gradients(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Drop the gradients of the parameters, or set them to zero."""
    if not set_to_none:
        Optimizer.zero_grad(optimizer, set_to_none=False)
        return
    with plain_attributes():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


@cache
def local_class(kind: type[Optimizer]) -> type[LocalOptimizer]:
    """Return a subclass of a class of optimizers that runs it on local tensors."""
    contents: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    contents |= {"__doc__": kind.__doc__, "user_class": kind}
    if kind.zero_grad is Optimizer.zero_grad:
        contents["zero_grad"] = _drop_gradients
    return type(kind.__name__, (LocalOptimizer, kind), contents)

"""The law of changes: what is done to an optimizer of `ap.optimizer` does what it does to torch's.

>>> assert_changes_are_taken_up(module, case, O.AdamW, CHANGES["fewer parameters"])

A change is made after two steps, to an optimizer with two groups; more steps follow.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from tests.models import Case

O = torch.optim  # noqa: E741
Change = Callable[[Any, Mapping[str, Tensor]], None]


def _delete(optimizer: Any, _: Any) -> None:
    del optimizer.param_groups[0]


def _reverse(optimizer: Any, _: Any) -> None:
    optimizer.param_groups.reverse()


def _clear(optimizer: Any, _: Any) -> None:
    optimizer.param_groups.clear()


def _fewer(optimizer: Any, _: Any) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]


def _pop(optimizer: Any, _: Any) -> None:
    optimizer.param_groups[1]["params"].pop()


def _move(optimizer: Any, _: Any) -> None:
    first, second = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())


def _assign(optimizer: Any, _: Any) -> None:
    first, second = optimizer.param_groups
    optimizer.param_groups = [{**second, "lr": 1e-3}, {**first, "params": first["params"][::-1]}]


def _add_again(optimizer: Any, _: Any) -> None:
    params = optimizer.param_groups.pop()["params"]
    optimizer.add_param_group({"params": params, "lr": 2e-3})


def _forget(optimizer: Any, _: Any) -> None:
    optimizer.state = defaultdict(dict)


def _clear_states(optimizer: Any, _: Any) -> None:
    optimizer.state.clear()


def _pop_states(optimizer: Any, named: Mapping[str, Tensor]) -> None:
    states = optimizer.state
    for parameter in [*named.values()][:2]:
        states.pop(parameter, None)
        assert parameter not in states
        assert states.get(parameter) is None


def _double_states(optimizer: Any, _: Any) -> None:
    for states in optimizer.state.values():
        for key, value in states.items():
            if isinstance(value, Tensor) and value.ndim:
                states[key] = 2 * value


def _assign_states(optimizer: Any, _: Any) -> None:
    doubled = {
        parameter: {key: 2 * value if value.ndim else value for key, value in states.items()}
        for parameter, states in optimizer.state.items()
    }
    optimizer.state = defaultdict(dict, doubled)


def _cycle(optimizer: Any, _: Any) -> None:
    """One cycle of rates and momenta, as far as its highest rate."""
    schedule = O.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=6, base_momentum=0.5)
    schedule.step()
    schedule.step()


CHANGES: dict[str, Change] = {
    "a group deleted": _delete,
    "groups reversed": _reverse,
    "no groups": _clear,
    "fewer parameters": _fewer,
    "a parameter popped": _pop,
    "a parameter moved": _move,
    "groups assigned": _assign,
    "a group added again": _add_again,
    "states forgotten": _forget,
    "states cleared": _clear_states,
    "states popped": _pop_states,
    "states doubled": _double_states,
    "states assigned": _assign_states,
    "one cycle": _cycle,
}
# An owner alone has the states of Adafactor, and no momentum.
OF_STATES = {"states doubled", "states assigned", "states popped", "one cycle"}


def assert_changes_are_taken_up(
    module: ap.ParallelModule, case: Case, kind: type[O.Optimizer], change: Change
) -> None:
    alone = case.fresh()
    named = dict(alone.model.named_parameters())
    names = [*named]
    module.load_state_dict(alone.model.state_dict())
    module.zero_grad()
    plain: Any = kind
    made = ap.optimizer(kind, _in_two(names), module, lr=1e-2, **_options(kind))
    expected = plain(_in_two([*named.values()]), lr=1e-2, **_options(kind))
    pairs = [
        (made, dict(module.named_parameters()), lambda: module.step(*case.args, **case.kwargs)),
        (expected, named, lambda: alone.loss(alone.run()).backward()),
    ]
    for optimizer, parameters, step in pairs:
        for number in range(4):
            if number == 2:
                change(optimizer, parameters)
            step()
            optimizer.step()
            optimizer.zero_grad()
        for parameter in parameters.values():
            parameter.grad = None
    assert _options_of(made) == _options_of(expected)
    state = alone.model.state_dict()
    torch.testing.assert_close(module.full_state_dict(), state, rtol=1e-9, atol=1e-11)


def _options(kind: type[O.Optimizer]) -> dict[str, Any]:
    return {} if kind is O.Adafactor else {"momentum": 0.9} if kind is O.SGD else {"eps": 1e-4}


def _in_two(params: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"params": [*params[:3]]}, {"params": [*params[3:]], "lr": 2e-2}]


def _options_of(optimizer: O.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group, and the number of its parameters."""
    return [{**group, "params": len(group["params"])} for group in optimizer.param_groups]


class Own(O.SGD):
    """Counts calls of its methods, and returns what is its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.calls: list[str] = []
        super().__init__(params, lr=lr, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        self.calls.append("step")
        return super().step(closure), "mine"

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.calls.append("zero_grad")
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: Any) -> None:
        self.calls.append("add_param_group")
        param_group.setdefault("scale", 3)
        super().add_param_group(param_group)

    def state_dict(self) -> Any:
        return super().state_dict() | {"calls": [*self.calls]}

    def load_state_dict(self, state_dict: Any) -> None:
        self.calls = state_dict.pop("calls")
        super().load_state_dict(state_dict)


class Doubled(O.SGD):
    """Computes the loss twice in a step."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            super().step(closure)
        return super().step(closure)


def assert_the_users_methods_are_called(module: ap.ParallelModule, case: Case) -> None:
    names = [name for name, _ in module.named_parameters()]
    optimizer: Any = ap.optimizer(Own, names[:2], module)
    group = {"params": names[2:], "lr": 0.2}
    optimizer.add_param_group(group)
    assert optimizer.param_groups[1] is group
    assert group["scale"] == 3
    seen: list[Any] = []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda seen_by, *_: seen.extend(seen_by.param_groups[0]["params"]))
    O.SGD(nn.Linear(1, 1).parameters())  # from now on a step that is inherited has hooks, too
    loss, mine = optimizer.step(lambda: module.step(*case.args, **case.kwargs))
    assert mine == "mine"
    assert loss.ndim == 0
    assert [*map(id, seen)] == 2 * [id(p) for p in [*module.parameters()][:2]]
    optimizer.zero_grad()
    assert all(parameter.grad is not None for parameter in module.parameters())
    calls = ["add_param_group", "add_param_group", "step", "zero_grad"]
    assert optimizer.calls == calls
    other: Any = ap.optimizer(Own, module)
    parameters = [*module.parameters()]
    group = other.param_groups[0]
    other.param_groups = [{**group, "params": p} for p in (parameters[:2], parameters[2:])]
    other.load_state_dict(optimizer.state_dict())
    assert other.calls == calls
    assert [g["lr"] for g in other.param_groups] == [0.1, 0.2]
    twice = ap.optimizer(Doubled, module, lr=0.1)
    with pytest.raises(ap.InvalidInput, match="calls it 2 times"):
        twice.step(lambda: module.step(*case.args, **case.kwargs))
    named = ap.optimizer(O.AdamW, module.named_parameters())
    assert named.param_groups[0]["param_names"] == names


def assert_loading_hooks_see_parameters(module: ap.ParallelModule, case: Case) -> None:
    """A state dict of torch's optimizer of the model loads, and hooks see what torch's see."""
    alone = case.fresh()
    expected = O.AdamW(alone.model.parameters(), lr=1e-2, eps=1e-4)
    optimizer = ap.optimizer(O.AdamW, module, lr=1.0)
    module.load_state_dict(alone.model.state_dict())
    seen: list[Any] = []

    def see_parameters(made: Any, state_dict: Any = None) -> None:
        seen.append([*map(id, made.param_groups[0]["params"])])
        if state_dict is not None:
            assert state_dict["state"][0]["exp_avg"].shape == next(iter(module.parameters())).shape

    optimizer.register_load_state_dict_pre_hook(see_parameters)
    optimizer.register_load_state_dict_post_hook(see_parameters)
    for number in range(2):
        alone.loss(alone.run()).backward()
        expected.step()
        expected.zero_grad()
        if number == 0:
            optimizer.load_state_dict(copy.deepcopy(expected.state_dict()))
            module.load_state_dict(alone.model.state_dict())
    module.step(*case.args, **case.kwargs)
    optimizer.step()
    assert seen == 2 * [[*map(id, module.parameters())]]
    state = alone.model.state_dict()
    torch.testing.assert_close(module.full_state_dict(), state, rtol=1e-9, atol=1e-11)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
    with pytest.raises(ap.InvalidInput, match="parameters that it was given"):
        optimizer.step()


def assert_states_are_written_before_a_step(module: ap.ParallelModule, case: Case) -> None:
    alone = case.fresh()
    module.load_state_dict(alone.model.state_dict())
    module.zero_grad()
    made = ap.optimizer(O.SGD, module, lr=0.1, momentum=0.9)
    expected = O.SGD(alone.model.parameters(), lr=0.1, momentum=0.9)
    for optimizer in (made, expected):
        for parameter in optimizer.param_groups[0]["params"]:
            assert not optimizer.state[parameter]
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter.detach())
    module.step(*case.args, **case.kwargs)
    alone.loss(alone.run()).backward()
    made.step()
    expected.step()
    state = alone.model.state_dict()
    torch.testing.assert_close(module.full_state_dict(), state, rtol=1e-9, atol=1e-11)

"""Show the states of local tensors under the parameters of the module, as DTensors like them.

    optimizer.state[parameter]["exp_avg"]     a DTensor in the memory of the local state

What is read and written goes to the states that the optimizer updates. Keys that are no parameters
of the module, and states that are no dicts, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from autopar.runtime.optimizers.updated_group import KnownParameters, UpdatedParameter


class StatesView(MutableMapping[Any, Any]):
    """The states of an optimizer by parameters of the module; changes reach the optimizer."""

    def __init__(self, known: KnownParameters) -> None:
        self.states: MutableMapping[Any, Any] = {}  # of local tensors
        self._known = known

    def _key(self, key: Any) -> Any:
        item = self._known.of_parameter(key)
        return key if item is None else item.tensor

    def __getitem__(self, key: Any) -> Any:
        try:
            states = self.states[self._key(key)]  # a defaultdict makes those that are missing
        except KeyError:
            raise KeyError(key) from None
        item = self._known.of_parameter(key)
        return states if item is None else shown(states, item)

    def __setitem__(self, key: Any, value: Any) -> None:
        item = self._known.of_parameter(key)
        if item is not None:
            is_dict = isinstance(value, Mapping)
            local = item.local_state
            value = {k: local(v) for k, v in value.items()} if is_dict else local(value)
        self.states[self._key(key)] = value

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        del self.states[self._key(key)]

    def __contains__(self, key: Any) -> bool:
        return self._key(key) in self.states

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if default and key not in self:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __iter__(self) -> Iterator[Any]:
        for key in [*self.states]:
            item = self._known.of_tensor(key)
            if item is None or item.has_states:
                yield key if item is None else item.parameter

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


class ParameterStates(MutableMapping[str, Any]):
    """The states of one parameter, as DTensors like it; changes reach the optimizer."""

    def __init__(self, states: MutableMapping[str, Any], updated: UpdatedParameter) -> None:
        self._states, self._updated = states, updated

    def __getitem__(self, key: str) -> Any:
        return self._updated.shown_state(self._states[key])

    def __setitem__(self, key: str, value: Any) -> None:
        self._states[key] = self._updated.local_state(value)

    def __delitem__(self, key: str) -> None:
        del self._states[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return repr(dict(self))


def shown(states: Any, updated: UpdatedParameter) -> Any:
    """Return what an optimizer keeps of a parameter, with tensors placed like the parameter."""
    if isinstance(states, MutableMapping):
        return ParameterStates(states, updated)
    return updated.shown_state(states)

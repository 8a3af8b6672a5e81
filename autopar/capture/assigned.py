"""Assigned buffers: what forward puts in the place of one is written to it as forward ends.

    self.count = self.count + 1    becomes    self.count.copy_(self.count + 1)    at the end

Export does so for buffers of the model itself, and takes what is assigned to one of a module inside
for nothing. Until forward ends, whoever has the buffer from before sees what was in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar._torch.tensors import memory_of
from autopar.capture.hooks import replaced
from autopar.errors import InvalidInput


@contextmanager
def buffers_written(
    model: nn.Module,
    varies: Callable[[Tensor], bool],
    lines: Mapping[tuple[int, str], str | None],
) -> Iterator[None]:
    """Within, forward of `model` does so, which is followed. What does not vary is made anew by
    every call: there it may have another shape, too. `lines`: where a module's buffer was assigned
    last, by its id and the name."""
    forward = model.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in dict.items(module._buffers)  # hidden.py: of those that are there
            if buffer is not None
        ]
        result = forward(*args, **kwargs)
        assigned = [
            (module, name, buffer, value)
            for module, name, buffer in before
            if (value := dict.get(module._buffers, name)) is not None and value is not buffer
        ]
        _require_one_value(model, before, {id(buffer) for _, _, buffer, _ in assigned})
        memories = {memory_of(buffer) for _, _, buffer, _ in assigned}
        result = pytree.tree_map_only(
            Tensor, lambda x: x.clone() if memory_of(x) in memories else x, result
        )
        # Of two that exchange their values, each is copied from what it was.
        values = [
            value.clone() if memory_of(value) in memories else value for *_, value in assigned
        ]
        for (module, name, buffer, _), value in zip(assigned, values, strict=True):
            if _form(value) == _form(buffer):
                with torch.no_grad():
                    buffer.copy_(value)
                if module is model:  # export copies what it was given last, too
                    setattr(module, name, value)
                module._buffers[name] = buffer
            elif module is model or varies(value):
                path, line = _path(model, module, name), lines.get((id(module), name))
                raise _refused(path, buffer, value, line)
        return result

    with replaced(model, "forward", run):
        yield


def _require_one_value(
    model: nn.Module, before: Sequence[tuple[nn.Module, str, Tensor]], assigned: set[int]
) -> None:
    """A buffer of several names is one in the program: it is assigned by all of them, or none. And
    none is taken away, or becomes another one, or a parameter, that goes on."""
    values = dict[int, tuple[nn.Module, str, Tensor | None]]()
    held = (dict.values(module._parameters) for module in model.modules())
    owners = {memory_of(one): 0 for parameters in held for one in parameters if one is not None}
    for module, name, buffer in before:
        value = dict.get(module._buffers, name)
        if value is None:
            raise InvalidInput(
                "a buffer is there for the next call",
                got=f"{_path(model, module, name)}, which forward takes away",
                remedy="a plain attribute for what one call makes",
            )
        other, known, first = values.setdefault(id(buffer), (module, name, value))
        is_one = owners.setdefault(memory_of(value), id(buffer)) == id(buffer)
        if (first is not value and id(buffer) in assigned) or (value is not buffer and not is_one):
            one, path = _path(model, other, known), _path(model, module, name)
            raise InvalidInput(
                "a buffer that modules share is assigned in all of them, or written to in place",
                got=f"{one} and {path}, which become two"
                if first is not value
                else f"{path}, which becomes one with another tensor of the model",
                remedy="self.state.copy_(...), or a buffer for each",
            )


def _path(model: nn.Module, module: nn.Module, name: str) -> str:
    path = next(path for path, one in model.named_modules() if one is module)
    return f"{path}.{name}" if path else name


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _refused(path: str, buffer: Tensor, value: Tensor, source: str | None) -> InvalidInput:
    was, becomes = (
        f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in (buffer, value)
    )
    return InvalidInput(
        "a buffer that forward assigns keeps its shape, dtype and device",
        got=f"{path}, {was} on {buffer.device}, which becomes {becomes} on {value.device}",
        remedy=f"register_buffer() {path} as it is after a call, or write to it in place",
        source=source,
    )

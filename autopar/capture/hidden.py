"""Hidden: the tensors of blocks that are called like others stay out of sight of torch.export.

    with hidden_in(model, blocks) as hidden:
        torch.export.export(model, ...)
    hidden.was_looked_for       # a forward asked for one of them: what was followed is no use

Export looks long at each tensor of a model, and at most of those of equal blocks for nothing: no
operator in the graph reads them before they are written out. Whoever asks for one while forward
runs is noticed, however it asks, and then the model is followed with all of them there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from autopar.capture.fake import FakeTensor
from autopar.capture.hooks import replaced


@dataclass(eq=False)
class Hidden:
    """What is out of sight."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # by name
    was_looked_for: bool = False
    _is_running: bool = False

    def noticed(self) -> None:
        """Somebody looks at what a module has."""
        self.was_looked_for |= self._is_running

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of the model: who looks before it runs has no interest in values."""

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            was_running, self._is_running = self._is_running, True
            try:
                return forward(*args, **kwargs)
            finally:
                self._is_running = was_running

        return call

    def is_missed(self, program: ExportedProgram) -> bool:
        """Whether what was followed may be another program than with all tensors there: one that
        was kept elsewhere, too, is taken for a constant."""
        return bool(self.tensors) and (
            self.was_looked_for
            or any(isinstance(one, FakeTensor) for one in program.constants.values())
        )


class _Nothing(dict[str, Any]):
    """The tensors of a module that has none in sight."""

    def __init__(self, hidden: Hidden) -> None:
        super().__init__()
        self.hidden = hidden


def _noticed(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    @functools.wraps(method)
    def call(self: _Nothing, *args: Any, **kwargs: Any) -> Any:
        self.hidden.noticed()
        return method(self, *args, **kwargs)

    return call


for _name in (
    *("__contains__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__"),
    *("get", "items", "keys", "values", "pop", "popitem", "setdefault", "update", "copy"),
):
    setattr(_Nothing, _name, _noticed(_name))


def is_hidden(block: nn.Module) -> bool:
    """Whether tensors of a block are out of sight."""
    return any(isinstance(vars(one)["_parameters"], _Nothing) for one in block.modules())


@contextmanager
def hidden_in(model: nn.Module, blocks: Iterable[tuple[str, nn.Module]]) -> Iterator[Hidden]:
    """Within, the parameters of these blocks of `model`, by path, are out of sight."""
    hidden = Hidden()
    with ExitStack() as stack:
        for path, block in blocks:
            for name, tensor in block.named_parameters():
                hidden.tensors[f"{path}.{name}"] = tensor
            for module in block.modules():
                own = vars(module)
                stack.callback(own.__setitem__, "_parameters", own["_parameters"])
                own["_parameters"] = _Nothing(hidden)
        if hidden.tensors:
            stack.enter_context(replaced(model, "forward", hidden.around(model.forward)))
        yield hidden

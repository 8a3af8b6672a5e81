"""Hidden: the tensors of blocks that are called like others stay out of sight of torch.export.

    with hidden_in(blocks) as hidden:
        torch.export.export(model, ...)
    hidden.was_looked_for       # some code of a model asked for one of them

Export looks long at each tensor of a model, and at most of those of equal blocks for nothing: no
operator in the graph reads them before they are written out. What is no part of torch and asks for
one is noticed. From then on all are in sight, so that forward runs to its end; but what was
followed is of no use, and another copy of the model is followed without hiding any.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from autopar.capture.fake import FakeTensor
from autopar.capture.source import is_users


@dataclass(eq=False)
class Hidden:
    """What is out of sight."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # by name
    was_looked_for: bool = False

    def is_missed(self, program: ExportedProgram) -> bool:
        """Whether what was followed may be another program than with all tensors in sight: one
        that was kept elsewhere, too, is taken for a constant."""
        specs = program.graph_signature.input_specs if self.tensors else ()
        constants = (one.target for one in specs if one.kind is InputKind.CONSTANT_TENSOR)
        return self.was_looked_for or any(
            isinstance(program.constants[str(name)], FakeTensor) for name in constants
        )


class _Unseen(dict[str, Any]):
    """The tensors of a module: of none to torch, of all to others."""

    def __init__(self, hidden: Hidden, tensors: dict[str, Any]) -> None:
        super().__init__()
        self.hidden, self.tensors = hidden, tensors


def _watched(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    @functools.wraps(method)
    def call(self: _Unseen, *args: Any, **kwargs: Any) -> Any:
        hidden = self.hidden
        hidden.was_looked_for = hidden.was_looked_for or _is_asked_by_others()
        return method(self.tensors if hidden.was_looked_for else self, *args, **kwargs)

    return call


def _is_asked_by_others() -> bool:
    """Whether a user's code, or a library's, stands between the export and who asks."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not _BEGINS:
        if is_users(frame.f_code.co_filename):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


for _name in sorted({*vars(dict)} - {*vars(object)} | {"__eq__", "__ne__", "__repr__"}):
    if callable(getattr(dict, _name)) and _name not in ("__class_getitem__", "fromkeys"):
        setattr(_Unseen, _name, _watched(_name))


def exported(*args: Any, **kwargs: Any) -> ExportedProgram:
    """What torch.export makes of a model; here the search for who asks ends."""
    return torch.export.export(*args, **kwargs)


_BEGINS = exported.__code__


def is_hidden(block: nn.Module) -> bool:
    """Whether tensors of a block are out of sight."""
    return any(True for _ in _unseen(block))


def looked_for(block: nn.Module) -> None:
    """A block has to be followed, whose tensors are out of sight."""
    for one in _unseen(block):
        one.hidden.was_looked_for = True


def _unseen(block: nn.Module) -> Iterator[_Unseen]:
    held = (vars(module)["_parameters"] for module in block.modules())
    return (one for one in held if isinstance(one, _Unseen))


@contextmanager
def hidden_in(blocks: Iterable[tuple[str, nn.Module]]) -> Iterator[Hidden]:
    """Within, the parameters of these blocks, by path, are out of sight."""
    hidden = Hidden()
    with ExitStack() as stack:
        for path, block in blocks:
            for name, tensor in block.named_parameters():
                hidden.tensors[f"{path}.{name}"] = tensor
            for module in block.modules():
                own = vars(module)
                stack.callback(own.__setitem__, "_parameters", own["_parameters"])
                own["_parameters"] = _Unseen(hidden, own["_parameters"])
        yield hidden

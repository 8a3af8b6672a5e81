"""Hidden: blocks that stand for calls of others have no tensors while a model is exported.

Export takes about a millisecond for each parameter, and a block that is not followed needs none.
Where forward asks for one after all, or fails, it ends with `Needed`: capture begins again with
more of them. Hidden are as many as are worth beginning again (`repeated.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from autopar.capture.fake import FakeTensor
from autopar.capture.hooks import while_it_runs

_KINDS = ("_parameters", "_buffers")


class Needed(BaseException):
    """The first `count` blocks of each kind are needed as they are; all, where it is None. No
    `Exception`: forward is not to catch it."""

    def __init__(self, count: int | None) -> None:
        self.count = count


class Hiding:
    """The blocks of a model whose tensors are hidden, and whether forward asks for them."""

    def __init__(self) -> None:
        self.is_any = False  # nor blocks that export is not shown
        self.left_out = set[str]()  # the paths of these
        self._is_running = False
        self._needed: Needed | None = None
        self._hidden: dict[int, list[Any]] = {}  # of each block, by identity

    @contextmanager
    def of(self, model: nn.Module, blocks: Collection[nn.Module]) -> Iterator[None]:
        """Within, the modules of these blocks are without their tensors."""
        spaces = [vars(module) for block in blocks for module in block.modules()]
        before = [{kind: space[kind] for kind in _KINDS} for space in spaces]
        self.is_any |= bool(spaces)
        try:
            for space, held in zip(spaces, before):
                space.update({kind: _Hidden(one, self) for kind, one in held.items()})
            self._hidden = {id(block): _held(block) for block in blocks}
            with while_it_runs(model, self._runs):
                yield
        finally:
            for space, held in zip(spaces, before):
                space.update(held)

    def is_untouched(self, block: nn.Module) -> bool:
        """Whether the modules of a hidden block are its own, and as they were hidden."""
        now, before = _held(block), self._hidden[id(block)]
        return len(now) == len(before) and all(one is two for one, two in zip(now, before))

    def need(self, count: int | None = None) -> None:
        """End forward, if it runs."""
        if self._is_running:
            self._needed = Needed(count)
            raise self._needed

    def require_unread(self, program: ExportedProgram) -> None:
        """Some can be read without being asked for: where a list holds them as well, or a function.
        They have no values, and are no placeholders then."""
        if not self.is_any:
            return
        graphs = (one for one in program.graph_module.modules() if isinstance(one, GraphModule))
        read = [
            getattr(graph, str(node.target))
            for graph in graphs
            for node in graph.graph.find_nodes(op="get_attr")
        ]
        read += [
            program.constants[name] for name in program.graph_signature.lifted_tensor_constants
        ]
        if any(isinstance(one, FakeTensor) for one in read):
            raise Needed(None)

    @contextmanager
    def _runs(self) -> Iterator[None]:
        was_running, self._is_running = self._is_running, True
        try:
            yield
        finally:
            self._is_running = was_running
            if self._needed is not None:  # whatever forward made of it
                raise self._needed


class _Hidden(dict[str, Any]):
    """The parameters, or buffers, of a module, without those that there are."""

    def __init__(self, held: Mapping[str, Any], hiding: Hiding) -> None:
        super().__init__({name: one for name, one in held.items() if one is None})
        self.hidden = {name for name, one in held.items() if one is not None}
        self.hiding = hiding


def _held(block: nn.Module) -> list[Any]:
    return [vars(module)[kind] for module in block.modules() for kind in _KINDS]


def _watched(name: str, is_of_one: bool) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def asked(self: _Hidden, *args: Any, **kwargs: Any) -> Any:
        if args[0] in self.hidden if is_of_one else self.hidden:
            self.hiding.need()
        return plain(self, *args, **kwargs)

    return asked


_OF_ONE = "__contains__ __getitem__ __setitem__ __delitem__ get pop setdefault"
_OF_ALL = "__iter__ __reversed__ __len__ __eq__ __ne__ __or__ __ror__ __ior__ items keys values"
for _name in _OF_ONE.split():
    setattr(_Hidden, _name, _watched(_name, True))
for _name in f"{_OF_ALL} copy update clear popitem __repr__ __sizeof__".split():
    setattr(_Hidden, _name, _watched(_name, False))

"""Decisions: what the code of forward asks of values, and what it is told.

Export has no values. Two kinds of questions have an answer all the same:

- One of whole numbers and masks that are inputs (`if labels.max() >= classes: raise`) is answered
  as the example has it, and asked again of every batch: another answer is refused. So is how many
  elements a mask chooses (`selections.py`).
- A guard (`assert ...`, `if ...: raise`) holds, unless forward catches what it raises
  (`guards.py`): what a model refuses is not part of its program.

All others are refused where they stand: parameters, activations and random numbers change.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar._torch.export_graph import traced_node
from autopar._torch.operators import written_arguments
from autopar.base.exact_values import is_same_value
from autopar.capture.fake import FakeTensor, has_no_data
from autopar.capture.graph_builder import is_mutable
from autopar.capture.grouped import Sizes
from autopar.capture.guard_questions import (
    MIRRORED,
    OF_TWO,
    GuardQuestion,
    Raised,
    answer_of,
)
from autopar.capture.guards import held_guard
from autopar.capture.hooks import in_another_thread, replaced, while_it_runs
from autopar.capture.number_formulas import NumberFormula
from autopar.capture.plainly import fakes_told_apart
from autopar.capture.randomness import may_be_random
from autopar.capture.selections import selections_counted
from autopar.capture.templates import AGAIN
from autopar.errors import InvalidInput
from autopar.text.source_lines import caller

_OF_ONE = ("__neg__", "__pos__", "__abs__", "__invert__", "__round__", "__trunc__")
# Of torch, what takes numbers of Python's own alone, and of tensors.
_OF_TORCH = (
    "full full_like arange linspace logspace clamp clip where masked_fill fill pow add sub mul"
)
_OF_TENSORS = "new_full clamp clamp_ clip masked_fill masked_fill_ fill_ where pow add sub mul div"
_AS_KEYS = ("__hash__", "__str__", "__repr__", "__format__")

Sliced = tuple[fx.Graph, dict[str, int], dict[str, Tensor]]  # a graph, and what it reads


@dataclass(frozen=True)
class Decision:
    """A question to the inputs, and its answer when the program was captured."""

    graph: fx.Graph | NumberFormula  # of what is asked, from some inputs
    inputs: Mapping[str, Any]  # placeholder -> number of the flat argument, or its own placeholder
    constants: Mapping[str, Tensor]  # placeholder -> value
    question: GuardQuestion  # to the number that the graph gives
    answer: Any
    source: str | None

    def found(self, given: Mapping[str, Tensor], known: dict[int, Any] | None = None) -> Any:
        """Return the answer of inputs, by placeholder.

        `known`: the values of formulas that other decisions have computed of them."""
        values = {name: given[of] for name, of in self.inputs.items()}
        graph = self.graph

        def ask() -> Any:
            if isinstance(graph, NumberFormula):
                numbers = {name: tensor.item() for name, tensor in values.items()}
                return self.question(graph.value(numbers, {} if known is None else known))
            return self.question(evaluated(graph, {**self.constants, **values}).item())

        return answer_of(ask)

    def require(self, given: Mapping[str, Tensor]) -> None:
        """Refuse inputs, by placeholder, of which it has another answer."""
        if not is_same_value(found := self.found(given), self.answer):
            raise InvalidInput(
                "forward goes the way on which it was captured: its example's values decided it",
                got=f"inputs of which this line finds {found}, not {self.answer}",
                remedy="hand over batches that are decided alike; or plan with inputs like these",
                source=self.source,
            )


@contextmanager
def decisions_made(
    model: nn.Module,
    leaves: Sequence[Any],
    numbers: Collection[int],
    around: Callable[[ValueQueries], AbstractContextManager[Any]],
) -> Iterator[list[Decision]]:
    """While forward of the model is followed, questions to values are answered by those of its flat
    inputs. `numbers`: those that are Python numbers. `around`: what else stands around it, and puts
    such questions."""
    made: list[Decision] = []
    asked = ValueQueries(leaves, made, numbers)

    def as_bool(self: Tensor) -> Any:
        number = asked.of(self)
        if number is not None:
            return bool(number)
        held = held_guard(sys._getframe(1)) if isinstance(self, FakeTensor) else None
        return plain["__bool__"](self) if held is None else held

    def as_number(name: str) -> Callable[..., Any]:
        def method(self: Tensor) -> Any:
            number = asked.of(self)
            if number is None:
                return plain[name](self)
            kind = "float" if name == "__float__" else "int"
            return number if name == "item" else number.asked(GuardQuestion(kind))

        return method

    def as_list(self: FakeTensor) -> Any:
        if self.ndim != 1 or self.is_floating_point():
            return plain_list(self)
        numbers = [asked.of(one) for one in self]
        unknown = any(number is None for number in numbers)
        return Sizes(self) if unknown or not numbers else numbers

    def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
        if num_classes == -1 and isinstance(tensor, FakeTensor):
            number = asked.of(tensor.max())
            num_classes = num_classes if number is None else int(number) + 1
        return one_hot_of(tensor, num_classes)

    def count(mask: Tensor) -> int | None:
        number = asked.of(mask.sum())
        return None if number is None else int(number)

    names = ("item", "__int__", "__float__", "__index__")
    plain = {name: getattr(Tensor, name) for name in ("__bool__", *names)}
    one_hot_of, plain_list = functional.one_hot, FakeTensor.tolist
    with ExitStack() as stack:
        stack.enter_context(around(asked))
        stack.enter_context(while_it_runs(model, _GivenPlain))
        for owner, given in ((torch, _OF_TORCH), (Tensor, _OF_TENSORS)):
            for name in given.split():
                stack.enter_context(replaced(owner, name, _given_plain(getattr(owner, name))))
        stack.enter_context(replaced(Tensor, "__bool__", as_bool))
        for name in names:
            stack.enter_context(replaced(Tensor, name, as_number(name)))
        stack.enter_context(replaced(FakeTensor, "tolist", as_list))
        stack.enter_context(replaced(functional, "one_hot", one_hot))
        stack.enter_context(selections_counted(model, count))
        stack.enter_context(fakes_told_apart(lambda fake: not asked.is_constant(fake)))
        yield made


def are_decided_alike(
    decisions: Sequence[Decision], numbers: Collection[str], given: Mapping[str, Tensor]
) -> bool:
    """Return whether all decisions that follow from numbers alone are those of these inputs.

    `numbers`: the placeholders of numbers. `given`: tensors by placeholder."""
    known, names = dict[int, Any](), {*numbers}
    return all(
        is_same_value(decision.found(given, known), decision.answer)
        for decision in decisions
        if names.issuperset(decision.inputs.values())
    )


def by_placeholder(made: Sequence[Decision], inputs: Sequence[str | None]) -> tuple[Decision, ...]:
    """Decisions that read flat arguments, reading placeholders; each once."""
    seen: dict[Any, Decision] = {}
    for one in made:
        named = {name: inputs[number] for name, number in one.inputs.items()}
        is_traced = isinstance(one.graph, fx.Graph)
        graph = str(one.graph) if is_traced else id(one.graph)
        key = one.source, one.question.key, graph, *named.values()
        seen.setdefault(key, replace(one, inputs=named))
    return tuple(seen.values())


class ValueQueries:
    """Values of what follows from inputs alone."""

    def __init__(
        self, leaves: Sequence[Any], made: list[Decision], numbers: Collection[int] = ()
    ) -> None:
        """`numbers`: the flat arguments that are Python numbers."""
        self.leaves, self.made, self.numbers = leaves, made, numbers

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a traced tensor holds the same in every batch."""
        sliced = self.sliced(tensor)
        return sliced is not None and not sliced[1]

    def sliced(self, tensor: Tensor) -> Sliced | None:
        node, root = traced_node(tensor)
        known = [at in self.numbers or _is_known(leaf) for at, leaf in enumerate(self.leaves)]
        return None if node is None else slice_of(node, root, known)

    def of(self, tensor: Tensor) -> NotedNumber | None:
        """The number that a traced tensor of one element holds, if it is known."""
        if not isinstance(tensor, FakeTensor) or tensor.numel() != 1:
            return None
        sliced = self.sliced(tensor)
        if sliced is None:
            return None
        graph, inputs, constants = sliced
        values = {name: self.leaves[number] for name, number in inputs.items()}
        value = in_another_thread(evaluated, graph, {**constants, **values}).item()
        return NotedNumber(value, graph, inputs, constants, self.made)


@dataclass(frozen=True, eq=False, repr=False)
class NotedNumber:
    """What `.item()` gives: a number that notes what is asked of it."""

    value: Any
    graph: fx.Graph | NumberFormula
    inputs: Mapping[str, int]
    constants: Mapping[str, Tensor]
    made: list[Decision] = field(repr=False)

    def asked(self, question: GuardQuestion) -> Any:
        answer = answer_of(lambda: question(self.value))
        made = self.graph, self.inputs, self.constants, question, answer
        if self.inputs:  # else it is the same in every batch
            self.made.append(Decision(*made, caller()))
        return question(self.value) if isinstance(answer, Raised) else answer

    def __bool__(self) -> bool:
        return bool(self.asked(GuardQuestion("bool")))

    def __int__(self) -> int:
        return int(self.asked(GuardQuestion("int")))

    def __float__(self) -> float:
        return float(self.asked(GuardQuestion("float")))

    def __index__(self) -> int:
        return int(self.asked(GuardQuestion("index")))

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance() finds
        return type(self.value)

    @property
    def itself(self) -> Any:
        """The number, which is part of the program then."""
        return self.asked(GuardQuestion(type(self.value).__name__))

    def for_torch(self, function: Any, args: Sequence[Any]) -> Any:
        """What torch is given of it."""
        return self.itself

    def __getattr__(self, name: str) -> Any:
        return getattr(self.itself, name)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self.itself, *args, **kwargs)


class _GivenPlain(TorchFunctionMode):
    """What torch is given of numbers is part of the program."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*_given(function, args), **_named(kwargs or {}))


def _given_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*_given(function, args), **_named(kwargs))

    return call


def _given(function: Any, args: Sequence[Any]) -> list[Any]:
    """The arguments of a function of torch; an argument of forward may go in as a tensor."""
    return [
        one.for_torch(function, args) if issubclass(type(one), NotedNumber) else _plain(one)
        for one in args
    ]


def _named(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(one) for name, one in kwargs.items()}


def _plain(given: Any) -> Any:
    if issubclass(type(given), NotedNumber):
        return given.itself
    if type(given) in (list, tuple):
        found = [_plain(one) for one in given]
        is_same = all(one is two for one, two in zip(found, given))
        return given if is_same else type(given)(found)
    return given


def _method(name: str) -> Callable[..., Any]:
    is_made = name in OF_TWO or name in MIRRORED

    def ask(self: NotedNumber, *others: Any) -> Any:
        plain = [one.itself if issubclass(type(one), NotedNumber) else one for one in others]
        if any(isinstance(one, Tensor) for one in plain):
            return GuardQuestion(name, tuple(plain))(self.itself)
        if is_made and not all(isinstance(one, Number) for one in plain):
            return NotImplemented  # as numbers themselves answer
        return self.asked(GuardQuestion(name, tuple(plain)))

    return ask


for _name in (*OF_TWO, *MIRRORED, *_OF_ONE, *_AS_KEYS):
    setattr(NotedNumber, _name, _method(_name))


def slice_of(asked: fx.Node, root: nn.Module, known: Sequence[bool]) -> Sliced | None:
    """What a node of a graph that grows follows from, if that is flat inputs that are `known`."""
    placeholders = asked.graph.find_nodes(op="placeholder")
    numbers = dict(zip(placeholders[len(placeholders) - len(known) :], range(len(known))))
    needed = followed(asked)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs, constants = dict[str, int](), dict[str, Tensor]()
    for node in asked.graph.nodes:
        if node not in needed:
            continue
        if node.target is AGAIN:
            return None  # which reads parameters
        if node.op == "call_function" and not may_be_random(node):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        copies[node] = made = graph.placeholder(f"value_{len(copies)}")
        held = getattr(root, str(node.target), None) if node.op == "get_attr" else None
        if node in numbers and known[numbers[node]]:
            inputs[made.name] = numbers[node]
        elif isinstance(held, Tensor) and not has_no_data(held):
            constants[made.name] = held
        else:
            return None
    graph.output(copies[asked])
    return graph, inputs, constants


def followed(asked: fx.Node) -> set[fx.Node]:
    """A node of a graph that grows, and all that it follows from."""
    needed, reached = {asked}, [asked]
    writes = [node for node in asked.graph.nodes if is_mutable(node.target)]
    while reached:
        for node in reached.pop().all_input_nodes:
            if node not in needed:
                needed.add(node)
                reached.append(node)
        if not reached:  # what writes to any of these, wherever it stands, is one of these too
            bases = {_base(node) for node in needed}
            reached = [one for one in writes if one not in needed and bases & {*written(one)}]
            needed |= {*reached}
    return needed


def written(node: fx.Node) -> Iterator[fx.Node]:
    """What the memory belongs to that a call changes."""
    written = pytree.tree_leaves(written_arguments(node.target, node.args, node.kwargs))
    return (_base(one) for one in written if isinstance(one, fx.Node))


def is_written(node: fx.Node) -> bool:
    """Whether a call of its graph changes the memory that a value stands in."""
    base = _base(node)
    return any(base in written(one) for one in node.graph.nodes if is_mutable(one.target))


def _base(node: fx.Node) -> fx.Node:
    """What made the memory that a value stands in, at most."""
    while node.op == "call_function" and node.all_input_nodes and _is_in_place_of(node.target):
        made = node.all_input_nodes[0]
        if node.target is operator.getitem and not _is_in_place_of(made.target):
            break  # each result has memory of its own
        node = made
    return node


def _is_in_place_of(operator: Any) -> bool:
    """Whether a result may stand in the memory of an argument."""
    schema = getattr(operator, "_schema", None)
    return schema is None or any(one.alias_info is not None for one in schema.arguments)


def _is_known(leaf: object) -> bool:
    """Whether an input is of whole numbers, or a mask, and has values."""
    if not isinstance(leaf, Tensor) or has_no_data(leaf):
        return False
    return not (leaf.is_floating_point() or leaf.is_complex())


@torch.no_grad()
def evaluated(graph: fx.Graph, given: Mapping[str, Tensor]) -> Any:
    """The tensor that a graph gives."""
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = given[node.name].detach().clone()  # which may be written to
        elif node.op == "output":
            return values[node.args[0]]
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    raise AssertionError("a graph ends with its output")

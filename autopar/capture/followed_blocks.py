"""Followed blocks: the program of a block that was followed in full, to be compared with others."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar._torch.export_graph import traced_node
from autopar._torch.tensors import memory_of
from autopar.capture.attributes import Reads
from autopar.capture.fake import FakeTensor
from autopar.capture.named import Named
from autopar.capture.object_contents import PLAIN
from autopar.capture.ran import Ran
from autopar.capture.source import of_stack
from autopar.capture.templates import AGAIN

_SWITCHES = (
    operator.getitem,
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
)
_ROOT = "_export_root."  # what export wraps a model in while it is followed


@dataclass(eq=False)
class FollowedBlock:
    """A block that was followed in full."""

    number: int
    block: nn.Module
    path: str
    call: Hashable  # how it was called
    nodes: list[fx.Node] = field(default_factory=list)
    given: list[fx.Node] = field(default_factory=list)
    results: list[fx.Node] = field(default_factory=list)
    tensors: dict[str, fx.Node] = field(default_factory=dict)  # its own, by name
    forms: str = ""  # of what it makes
    spec: pytree.TreeSpec | None = None
    # Of each leaf of its output: which of the given, or made, tensors it is; or what else.
    leaves: list[tuple[str, Any]] = field(default_factory=list)
    is_apart: bool = True  # it reads and makes nothing that others see
    is_proved: bool = False  # another one was the same
    # Of the last block that is equal: its place among those of its kind, and where what it was
    # given comes from.
    place: int = -1
    sources: Hashable = None
    row: int = 0  # blocks that were called so, one after another
    shown: Sequence[Tensor] = ()  # what the last of them made that export is shown

    def __post_init__(self) -> None:
        self.reads = Reads(self.block)
        self.ran = Ran()
        self.named = self.leads_to(self.ran)

    def leads_to(self, ran: Ran) -> Named:
        """What its modules keep, and what that and functions that `ran` lead to."""
        return Named(*self.block.modules(), *ran.functions(), ran=ran.found)

    def has_known_code(self, like: FollowedBlock) -> bool:
        """Whether its code ran for a block like it, and is of functions that something leads to."""
        own = self.ran.own
        is_known = self.ran.is_known and self.named.is_whole
        return is_known and own <= self.named.codes and own <= like.ran.found.keys()

    def is_next(self, place: int, sources: Hashable) -> bool:
        """Whether a block follows the last that is equal, and is given what that one was given."""
        is_next = (place, sources) == (self.place + 1, self.sources)
        self.row = self.row + 1 if is_next else 1
        self.place, self.sources = place, sources
        return is_next

    def again(self, path: str, leaves: Sequence[Any]) -> list[Tensor]:
        """What an equal block makes of such a call."""
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return AGAIN(self.number, path, self.forms, given)

    def output(self, leaves: Sequence[Any], made: Sequence[Tensor]) -> Any:
        """The output of a block that is given these leaves, and makes these tensors."""
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        tensors = {"given": given, "made": made}
        results = [tensors[kind][of] if kind in tensors else of for kind, of in self.leaves]
        assert self.spec is not None
        return pytree.tree_unflatten(results, self.spec)


def tensors_in(block: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a block by name."""
    yield from block.named_parameters()
    yield from block.named_buffers()


def note_results(now: FollowedBlock, made: Any, given: Sequence[Tensor]) -> bool:
    """Note what a block gives; whether a call can stand for it."""
    leaves, now.spec = pytree.tree_flatten(made)
    learns = any(x.requires_grad for x in given)
    seen, memories = list[Tensor](), {memory_of(x) for x in given}
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            now.leaves.append(("plain", leaf))
            if type(leaf) not in PLAIN:
                return False
            continue
        place = next((i for i, x in enumerate(given) if x is leaf), None)
        if place is not None:
            now.leaves.append(("given", place))
            continue
        said = call_form([leaf])
        is_floating = leaf.is_floating_point() or leaf.is_complex()
        is_plain = said is not None and leaf.device == given[0].device and is_floating
        if not is_plain or leaf.requires_grad != learns or memory_of(leaf) in memories:
            return False
        if leaf.storage_offset() or leaf.is_leaf:
            return False
        memories.add(memory_of(leaf))
        now.leaves.append(("made", len(seen)))
        seen.append(leaf)
    now.results, now.shown = [node_of(leaf) for leaf in seen], seen
    now.forms = "|".join(map(_written, seen))
    return bool(seen)


def _written(made: Tensor) -> str:
    shape, stride = (",".join(map(str, numbers)) for numbers in (made.shape, made.stride()))
    return ";".join((shape, stride, str(made.dtype).removeprefix("torch.")))


def is_made(leaf: Any, given: Sequence[Tensor]) -> bool:
    return isinstance(leaf, Tensor) and all(leaf is not x for x in given)


def is_alone(now: FollowedBlock) -> bool:
    """Whether the operators of a block read what it is given, placeholders, and each other."""
    known = {*now.nodes, *now.given}
    return all(
        node.op == "call_function"
        and _is_plain_call(node.target)
        and all(one in known or one.op == "placeholder" for one in node.all_input_nodes)
        for node in now.nodes
    )


def _is_plain_call(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace != "autopar" or target.name() == "autopar::border"
    return target in _SWITCHES


def is_same_program(one: FollowedBlock, other: FollowedBlock) -> bool:
    """Whether two blocks are the same, node for node."""
    if len(one.nodes) != len(other.nodes) or one.tensors.keys() != other.tensors.keys():
        return False
    same = {node: other.tensors[name] for name, node in one.tensors.items()}
    same |= dict(zip(one.given, other.given, strict=True))
    same |= dict(zip(one.nodes, other.nodes))
    for node, twin in zip(one.nodes, other.nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: same.get(x, x))
        border = getattr(node.target, "_schema", None)
        if border is not None and border.name == "autopar::border":
            args = twin.args[:1] + args[1:]  # they are numbered in turn
        if (node.op, node.target, args, kwargs) != (twin.op, twin.target, twin.args, twin.kwargs):
            return False
        if _values(node) != _values(twin) or _origin(node, one) != _origin(twin, other):
            return False
    results = [same.get(node) for node in one.results]
    return (results, one.leaves, one.spec) == (other.results, other.leaves, other.spec)


def _values(node: fx.Node) -> Hashable:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return tuple(form_of(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)


def _origin(node: fx.Node, of: FollowedBlock) -> Hashable:
    """Which module and line a node of a block is of."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()), ("",))[0] if stack else ""
    path = path.removeprefix(_ROOT)
    inside = path == of.path or path.removeprefix(of.path + ".")
    return inside, of_stack(node.meta.get("stack_trace"))


def node_of(tensor: Tensor) -> fx.Node:
    """Return the node of a tensor in the graph that export is making."""
    node = traced_node(tensor)[0]
    assert node is not None
    return node


def form_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return all that a program follows from of a tensor, but for its values."""
    place = tensor.stride(), tensor.storage_offset(), tensor.device
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, *place


def call_form(leaves: Sequence[Any]) -> Hashable | None:
    """How something is called: equal for calls that are alike; None where that cannot be said."""
    if not torch.is_grad_enabled():  # its weights are detached where the region begins
        return None
    said, tensors, memories = list[Any](), list[int](), list[int]()
    for leaf in leaves:
        if type(leaf) in PLAIN:
            said.append((type(leaf), leaf))
            continue
        if not isinstance(leaf, FakeTensor) or leaf.constant is not None:
            return None
        if isinstance(leaf, nn.Parameter) or traced_node(leaf)[0] is None:
            return None
        if any(type(number) is not int for number in (*leaf.shape, *leaf.stride())):
            return None
        tensors.append(id(leaf))
        memories.append(memory_of(leaf))
        first = tensors.index(id(leaf)), memories.index(memory_of(leaf))
        said.append((*form_of(leaf), leaf.is_leaf, first))
    return tuple(said) if tensors else None

"""GraphBuilder: a captured graph while it is still being normalised, and the ways to change it.

Every node that is made here has its fake value at once, and inherits the module and the source
line of the node it stands for.

>>> builder.replace(node, aten.reshape.default, x, (8, 16))    # its users now use the reshape
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from autopar._torch.tensors import memory_of
from autopar.capture.marker import Annotation
from autopar.strategies import OperatorCall
from autopar.strategies.node_info import info

INHERITED = ("source", "module", "no_grad", "checkpoint", "policy", "draw")


@dataclass(frozen=True, eq=False)
class Recipe:
    """Computes a constant again: the sizes of inputs may stand in its calls."""

    graph: fx.Graph
    constants: dict[str, torch.Tensor]  # placeholder -> value, whatever the sizes are


@dataclass(frozen=True, eq=False)
class ValueFact:
    """Keeps a question that normalisations put to a constant, and the answer that they rely on."""

    recipe: Recipe  # of the constant
    question: Callable[[torch.Tensor], Any]  # to its value
    answer: Any


@dataclass
class GraphBuilder:
    """What `Captured` will freeze. The output node holds one flat tuple of tensors: the user's
    outputs, those that `effects` keep, then the new values of the buffers named in `mutated`, in
    that order."""

    mode: FakeTensorMode
    tied: dict[str, str]
    input_spec: pytree.TreeSpec
    output_spec: pytree.TreeSpec
    graph: fx.Graph = field(default_factory=fx.Graph)
    parameters: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    recipes: dict[str, Recipe] = field(default_factory=dict)  # of folded constants
    value_facts: list[ValueFact] = field(default_factory=list)
    inputs: tuple[str | None, ...] = ()
    key: str | None = None  # the placeholder of that which random numbers follow from
    static_inputs: dict[int, object] = field(default_factory=dict)
    # Position among the flat outputs -> value.
    output_constants: dict[int, object] = field(default_factory=dict)
    mutated: list[str] = field(default_factory=list)
    writes: list[Any] = field(default_factory=list)  # to inputs (writes.py), of flat arguments
    bounds: dict[str, Any] = field(default_factory=dict)  # of parameters, by name (writes.py)
    effects: list[Any] = field(default_factory=list)  # in Python (effects.py)
    unread_annotations: dict[Annotation, str] = field(default_factory=dict)
    looked_at: fx.Node | None = None  # for errors that nobody foresaw
    # Whether calls that are alike have one value: where nothing is changed in place, it does not
    # matter that others than views share memory. Else what is made in memory of its own is alike.
    shares_values: bool = False
    _made: dict[tuple[object, str], Any] = field(default_factory=dict)

    @property
    def output(self) -> fx.Node:
        return self.graph.output_node()

    def calls(self, *targets: object) -> Iterator[fx.Node]:
        """The calls of any of `targets`, first to last: overloads, or operators with all of theirs.

        All calls if none are named."""
        wanted = {*map(id, targets)}  # operators are themselves alone, and slow to hash
        known: dict[int, tuple[object, bool]] = {}
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            target = node.target
            if id(target) not in known:
                packet = getattr(target, "overloadpacket", target)
                is_wanted = not wanted or id(target) in wanted or id(packet) in wanted
                known[id(target)] = target, is_wanted
            if known[id(target)][1]:
                self.looked_at = node
                yield node

    def placeholder(self, name: str, value: torch.Tensor) -> fx.Node:
        """A new one at the insertion point."""
        node = self.graph.placeholder(name)
        info(node).update(val=value, module="", source=None)
        return node

    def call(self, like: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A new node at the insertion point, with the origin of `like`."""
        node = self.graph.call_function(target, args, kwargs)
        _inherit(node, like)
        info(node).val = self.evaluate(target, args, kwargs)
        return node

    def replace(
        self, node: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> fx.Node:
        """Put one call in the place of `node`."""
        with self.graph.inserting_before(node):
            new = self.call(node, target, *args, **kwargs)
        self.substitute(node, new)
        return new

    def substitute(self, node: fx.Node, new: fx.Node) -> None:
        """Let the users of `node` use `new`, and drop `node`."""
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def evaluate(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        is_plain: bool = True,
    ) -> Any:
        """The fake value of a call; what torch makes of it may depend on more than its arguments
        where it is not `is_plain`."""

        def value(node: fx.Node) -> Any:
            # t_ and its like change the shape of the tensor that they are given: of an alias.
            fake = info(node).val
            return fake.detach() if changes and isinstance(fake, torch.Tensor) else fake

        changes = is_mutable(target)
        key = None
        if is_plain and not changes:
            key = target, _described(args, kwargs)
            if key in self._made:
                made = self._made[key]
                return made if self.shares_values else self._apart(made)
        fake_args, fake_kwargs = fx.map_arg((tuple(args), kwargs), value)
        with self.mode, torch.no_grad():
            made = target(*fake_args, **fake_kwargs)
        if key is not None and (self.shares_values or _is_apart(made, (fake_args, fake_kwargs))):
            self._made[key] = made
        return made

    def no_values_shared(self) -> None:
        """From here on; those that are shared tell nothing of memory."""
        self.shares_values = False
        self._made.clear()

    def _apart(self, made: Any) -> Any:
        """The same in memory of its own."""
        return pytree.tree_map_only(torch.Tensor, partial(fake_like, self.mode), made)

    def constant(self, name: str, value: torch.Tensor, like: fx.Node) -> fx.Node:
        """A placeholder for a constant, after those that exist."""
        names = {node.name for node in self.graph.find_nodes(op="placeholder")}
        unique, count = f"c_{name}", 0
        while unique in names:
            count += 1
            unique = f"c_{name}_{count}"
        first_input = next(
            node
            for node in self.graph.nodes
            if node.op != "placeholder" or node.name in self.inputs
        )
        with self.graph.inserting_before(first_input):
            node = self.graph.placeholder(unique)
        _inherit(node, like)
        info(node).update(val=fake_like(self.mode, value), differentiable=False)
        self.constants[node.name] = value
        return node

    def set_outputs(self, nodes: Sequence[fx.Node]) -> None:
        self.output.args = (tuple(nodes),)

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        return tuple(self.output.args[0])  # type: ignore[arg-type]


def _is_apart(made: Any, given: Any) -> bool:
    """Whether all that a call makes are whole tensors, each in memory of its own."""
    leaves = pytree.tree_leaves(made)
    if not all(isinstance(leaf, FakeTensor) and leaf.constant is None for leaf in leaves):
        return False
    if any(leaf.layout is not torch.strided or leaf.storage_offset() for leaf in leaves):
        return False
    tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]
    memories = {memory_of(leaf) for leaf in leaves}
    return len(memories) == len(leaves) and memories.isdisjoint(map(memory_of, tensors))


def is_mutable(target: object) -> bool:
    """Whether an operator changes what it is given."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _described(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Equal for arguments of which an operator makes the same."""
    numbers: dict[fx.Node, str] = {}

    def described(node: fx.Node) -> str:
        if node not in numbers:
            value = info(node).val
            forms = _form(value) if isinstance(value, FakeTensor) else pytree.tree_map(_form, value)
            numbers[node] = f"%{len(numbers)} {forms}"
        return numbers[node]

    return repr(fx.map_arg((tuple(args), kwargs), described))


def _form(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    place = value.stride(), value.storage_offset(), value.device
    return tuple(value.shape), value.dtype, value.requires_grad, *place


def _inherit(node: fx.Node, like: fx.Node) -> None:
    node.meta.update({key: like.meta[key] for key in INHERITED if key in like.meta})


def fake_like(
    mode: FakeTensorMode,
    value: torch.Tensor,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A fake tensor of the same shape, strides, dtype and need of a gradient, if none is given."""
    about, place = (value.shape, value.stride()), device or value.device
    kind = dtype or value.dtype
    if place.type == "meta":
        with mode:
            made = torch.empty_strided(*about, dtype=kind, device=place)
    else:  # what the mode does too, after it has looked at the call
        with no_dispatch():
            made = FakeTensor(mode, torch.empty_strided(*about, dtype=kind, device="meta"), place)
    return made.requires_grad_() if value.requires_grad else made


def shape_of(node: object) -> tuple[int, ...]:
    """The global shape of a node's tensor."""
    assert isinstance(node, fx.Node)
    return tuple(info(node).val.shape)


Normalisation = Callable[[GraphBuilder], None]
Rewrite = Callable[["Site"], fx.Node | None]
REWRITTEN: set[object] = set()  # the operators that a normalisation may give another form


class Site(OperatorCall):
    """A call that a normalisation looks at: its arguments by name, and a place to make others."""

    def __init__(self, builder: GraphBuilder, node: fx.Node) -> None:
        super().__init__(node)
        self.builder = builder

    def make(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Another call before it, with its origin."""
        return self.builder.call(self.node, target, *args, **kwargs)

    def canonical(self, target: Callable[..., Any], *args: Any) -> fx.Node | None:
        """The one form of the call; None where it has that already."""
        is_canonical = (self.node.target, self.node.args, self.node.kwargs) == (target, args, {})
        return None if is_canonical else self.make(target, *args)


def rewrites(*targets: object) -> Callable[[Rewrite], Normalisation]:
    """Makes a normalisation of a function that says what stands for a call of any of `targets`.

    The call stays where it gives None.
    """
    REWRITTEN.update(targets)

    def normalisation(function: Rewrite) -> Normalisation:
        @wraps(function)
        def rewrite(builder: GraphBuilder) -> None:
            for node in builder.calls(*targets):
                with builder.graph.inserting_before(node):
                    new = function(Site(builder, node))
                if new is not None:
                    builder.substitute(node, new)

        return rewrite

    return normalisation

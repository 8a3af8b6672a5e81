"""In-place operators become functional ones: add_(x, y) -> x' = add(x, y), later reads see x'.

Tensors that share storage form a family: a root and views of it. A write to a view is a write to
its root (slice -> slice_scatter, and so on), after which the other views are taken anew when they
are read. A write to a buffer becomes a mutation: an extra output of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar._torch.tensors import memory_of
from autopar.capture.graph_builder import GraphBuilder, Site, is_mutable, rewrites, shape_of
from autopar.capture.listing import operator_name
from autopar.capture.marker import ANNOTATE
from autopar.capture.normalisations.shapes import as_call
from autopar.capture.normalisations.strides import as_strided
from autopar.capture.values import refresh
from autopar.capture.writes import bounds_of, written_input
from autopar.errors import InvalidInput
from autopar.strategies import OperatorCall, traits_of
from autopar.strategies.node_info import info
from autopar.strategies.registry import permutation

aten = torch.ops.aten

# In-place operators whose functional form has another name, or none.
_FUNCTIONAL: dict[object, Callable[..., Any]] = {
    aten.transpose_.default: aten.transpose.int,
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
}
# What Python's operators with an equals sign call.
_SYMBOLS = {
    "__iand__": "bitwise_and",
    "__ior__": "bitwise_or",
    "__ixor__": "bitwise_xor",
    "__ilshift__": "bitwise_left_shift",
    "__irshift__": "bitwise_right_shift",
}
# Where they share memory; what is annotated is the tensor itself, though traced as a copy.
_THEMSELVES = (aten.alias.default, aten.contiguous.default, ANNOTATE)
_CASTS = (aten.to, aten.type_as)  # to the dtype that it has: the tensor itself
_SCATTERS: dict[object, Callable[..., Any]] = {  # with the arguments of the view
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
_INVERSES: dict[object, Callable[..., Any]] = {
    aten._conj.default: aten.conj_physical.default,
    aten.view_as_real.default: aten.view_as_complex.default,
    aten.view_as_complex.default: aten.view_as_real.default,
}


@rewrites(aten.fill_diagonal_.default)
def filled_diagonals_are_views(call: Site) -> fx.Node | None:
    """A number written to the diagonal of a matrix, which torch sees by strides."""
    x = call["self"]
    if len(call.shape) != 2 or (call["wrap"] and call.shape[0] > call.shape[1]):
        return None
    call.make(aten.fill_.Scalar, call.make(aten.diagonal.default, x), call["fill_value"])
    return x


def functionalise(builder: GraphBuilder) -> None:
    """In-place operators become functional; writes to buffers become mutations."""
    if any(_is_mutable(node) for node in builder.calls()):
        if builder.shares_values:  # a normalisation has made writes visible
            builder.no_values_shared()
            refresh(builder)
        _Functionaliser(builder).run()
        builder.shares_values = True
        refresh(builder)
    builder.shares_values = True


@dataclass
class _Functionaliser:
    builder: GraphBuilder
    parent: dict[fx.Node, fx.Node] = field(default_factory=dict)  # a view -> what it views
    root: dict[fx.Node, fx.Node] = field(default_factory=dict)
    version: dict[fx.Node, int] = field(default_factory=dict)  # of a root: writes so far
    value: dict[fx.Node, tuple[fx.Node, int]] = field(default_factory=dict)  # and its version
    now: dict[fx.Node, fx.Node] = field(default_factory=dict)  # a tensor -> the view it has become
    written: dict[fx.Node, fx.Node] = field(default_factory=dict)  # a root -> what changes it first

    def run(self) -> None:
        self._find_families()
        for node in list(self.builder.graph.nodes):
            if node.op == "placeholder":
                continue
            with self.builder.graph.inserting_before(node):
                if node in self.parent:
                    self.parent[node] = self._tensor(self.parent[node])
                if node.op == "call_function" and _is_mutable(node):
                    self._change(node)
                    continue
                latest = partial(self._read, reader=node)
                node.args = fx.map_arg(node.args, latest)
                node.kwargs = fx.map_arg(node.kwargs, latest)
        for node in reversed(list(self.builder.calls())):
            if _is_mutable(node):
                self.builder.graph.erase_node(node)
        for root, write in self.written.items():
            if root.op == "placeholder" and root.name in self.builder.inputs:
                made = written_input(self.builder, root, self.value[root][0])
                if made is None or info(root).val.requires_grad:
                    self._check(write, root, ())
                else:
                    self.builder.writes.append(made)
        for placeholder, name in self.builder.buffers.items():
            node = next(n for n in self.builder.graph.nodes if n.name == placeholder)
            if self.version.get(node, 0):
                self.builder.mutated.append(name)
                self.builder.set_outputs((*self.builder.outputs, self.value[node][0]))

    def _find_families(self) -> None:
        """Who views whom, by shared storage."""
        roots: dict[int, fx.Node] = {}
        for node in self.builder.graph.nodes:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                continue
            storage = memory_of(value)
            if node.target is ANNOTATE and (root := self.root.get(node.all_input_nodes[0])):
                roots[storage] = root
            if storage not in roots:
                roots[storage] = node
            elif node.op == "call_function":
                sources = [s for s in node.all_input_nodes if self.root.get(s) is roots[storage]]
                self.parent[node] = (sources or node.all_input_nodes)[0]
            self.root[node] = roots[storage]

    def _latest(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The node that holds the value of `node` now."""
        root = self.root.get(node)
        if root is None:
            return node
        version = self.version.get(root, 0)
        current, at = self.value.get(node, (node, 0))
        if at == version:
            return current
        parent = self._latest(self.parent[node], reader)
        if not _is_view(node.target):
            raise InvalidInput(
                "a view of a tensor that is changed in place can be taken anew",
                got=f"{node.target}, read after the change",
                remedy="change a copy: x = x.clone() before, or x = x + y in place of x += y",
                source=info(reader).source,
            )
        assert callable(node.target)
        new = self.builder.call(node, node.target, parent, *node.args[1:], **node.kwargs)
        self.value[node] = (new, version)
        return new

    def _change(self, node: fx.Node) -> None:
        """`node` writes to its argument, or makes another view of it."""
        given = node.kwargs.get("out", node.args[0])
        if not isinstance(given, fx.Node):
            raise _no_such_form(node)
        target = became = self._tensor(given)
        node.args = fx.map_arg(node.args, partial(self._read, reader=node))
        node.kwargs = fx.map_arg(node.kwargs, partial(self._read, reader=node))
        if _is_view(functional_of(node.target)):
            became = self._view(node, target)
        else:
            root = self.root[target]
            if self._bounds(node, target, root):
                return
            self._check(node, root, {*self.builder.buffers, *filter(None, self.builder.inputs)})
            self.written.setdefault(root, node)
            self._store(target, self._functional(node), node)
        for name, tensor in self.now.items():
            self.now[name] = became if tensor is target else tensor
        self.now[target] = self.now[node] = became

    def _bounds(self, node: fx.Node, target: fx.Node, root: fx.Node) -> bool:
        """Whether a write only puts a parameter between bounds, before it is read."""
        parameter = root.all_input_nodes[0] if root.target is aten.to.dtype else root
        name = self.builder.parameters.get(parameter.name)
        target_is_whole = all(one.target is aten.detach.default for one in self._views(target))
        if name is None or not target_is_whole:
            return False
        new = self._functional(node)
        bounds = bounds_of(parameter, new)
        known = self.builder.bounds.get(name)
        if bounds is None or (bounds != known and (known or self._is_read(root, node, new))):
            return False
        self.builder.bounds[name] = bounds
        self.now[node] = target
        return True

    def _views(self, target: fx.Node) -> list[fx.Node]:
        """A tensor, what it views, and so on up to the root."""
        found = []
        while target in self.parent:
            found.append(target)
            target = self.parent[target]
        return found

    def _is_read(self, root: fx.Node, write: fx.Node, new: fx.Node) -> bool:
        """Whether other calls than those of its new value read a tensor, or views, before."""
        family = [node for node, of in self.root.items() if of is root]
        readers = {user for node in family for user in node.users} - {*family, write}
        own, waiting = set[fx.Node](), [new]
        while waiting:
            node = waiting.pop()
            own.add(node)
            waiting.extend(node.all_input_nodes)
        return any(reader < write for reader in readers - own)

    def _view(self, node: fx.Node, target: fx.Node) -> fx.Node:
        """The view of its argument that an operator such as t_ makes of it, in its place."""
        detaches = node.target is aten.detach_.default
        self._check(node, target, self.builder.buffers if detaches else ())
        new = self.builder.call(node, functional_of(node.target), *node.args, **node.kwargs)
        root = self.root[new] = self.root[target]
        self.parent[new], self.value[new] = target, (new, self.version.get(root, 0))
        return new

    def _tensor(self, node: Any) -> Any:
        """Which view the tensor of `node` has become by now."""
        return self.now.get(node, node)

    def _read(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The node that holds what a reader of `node` sees now."""
        return self._latest(self._tensor(node), reader)

    def _store(self, target: fx.Node, new: fx.Node, write: fx.Node) -> None:
        """`target` has the value `new` from here on, and so has what it views."""
        root = self.root[target]
        if target is root or target not in self.parent:
            self.version[root] = self.version.get(root, 0) + 1
        else:
            parent = self.parent[target]
            base = self._latest(parent, write)
            self._store(parent, self._scatter(target, base, new, write), write)
        self.value[target] = (new, self.version[root])

    def _scatter(self, view: fx.Node, base: fx.Node, new: fx.Node, write: fx.Node) -> fx.Node:
        """`base` with the part that `view` shows replaced by `new`."""
        target, call = view.target, self.builder.call
        if target in _SCATTERS:
            _, *place = OperatorCall(view).arguments.values()
            return self._of_real_parts(write, _SCATTERS[target], (base, new), *place)
        if (order := permutation(view)) is not None:
            return call(write, *as_call(new, [order.index(dim) for dim in range(len(order))]))
        if target is aten.real.default and not info(base).val.is_complex():
            return new
        if target in (aten.real.default, aten.imag.default):
            other = aten.imag if target is aten.real.default else aten.real
            pair = (new, call(write, other.default, base))
            return call(write, aten.complex.default, *pair[:: 1 if other is aten.imag else -1])
        if target in _INVERSES:
            return call(write, _INVERSES[target], new)
        if target in _THEMSELVES or getattr(target, "overloadpacket", None) in _CASTS:
            return new
        if target is aten.detach.default and self.root[view].name in self.builder.buffers:
            return new  # a buffer has no gradient that would have to stay
        if target is aten.detach.default and not _may_learn(base):
            return call(write, target, new)
        if traits_of(view).in_order:
            return call(write, aten.reshape.default, new, shape_of(base))
        raise InvalidInput(
            "a write to a view can be carried over to the tensor it views",
            got=f"a write through {operator_name(target)}",
            remedy="compute a new tensor in place of the write",
            source=info(write).source,
        )

    def _functional(self, node: fx.Node) -> fx.Node:
        """The operator of `node` without the write."""
        call, (x, *rest) = self.builder.call, node.args
        if node.target is aten.copy_.default:
            new = self._copy(node, x, rest[0])
            if not (isinstance(x, fx.Node) and _may_learn(x)):
                return new
            # What is overwritten has a gradient of zeros, not none.
            zeros = self._of_real_parts(node, aten.zero.default, (x,))
            return call(node, aten.sub.Tensor, new, zeros)
        if "out" in node.kwargs:
            options = {name: value for name, value in node.kwargs.items() if name != "out"}
            new = call(node, _without_out(node.target), *node.args, **options)
            return self._copy(node, node.kwargs["out"], new)
        target = functional_of(node.target)
        if target is None:
            raise _no_such_form(node)
        if target is aten.bernoulli.p and not (rest or node.kwargs):
            rest = [0.5]  # which is a default of the other form alone
        new = call(node, target, x, *rest, **node.kwargs)
        if shape_of(new) != shape_of(x):
            raise _no_such_form(node)
        # x_ keeps the dtype of x whatever the other operand is.
        return self._copy(node, x, new)

    def _of_real_parts(
        self, node: fx.Node, target: Any, tensors: tuple[fx.Node, ...], *rest: Any
    ) -> fx.Node:
        """A call whose gradient torch has for real numbers alone: of complex ones for each part."""
        call = self.builder.call
        if not info(tensors[0]).val.is_complex():
            return call(node, target, *tensors, *rest)
        parts = (
            call(node, target, *(call(node, part, x) for x in tensors), *rest)
            for part in (aten.real.default, aten.imag.default)
        )
        return call(node, aten.complex.default, *parts)

    def _copy(self, node: fx.Node, x: Any, value: Any) -> fx.Node:
        """`value` in the dtype and shape of `x`."""
        old, given = info(x).val, info(value).val
        if given.dtype != old.dtype:
            value = self.builder.call(node, aten.to.dtype, value, old.dtype)
        if given.shape != old.shape:
            value = self.builder.call(node, aten.expand.default, value, list(old.shape))
        return value

    def _check(self, node: fx.Node, root: fx.Node, allowed: Container[str]) -> None:
        """Which tensors may be changed: `allowed` ones, and those that forward has made."""
        if root.op == "placeholder" and root.name not in allowed:
            kind = "a parameter" if root.name in self.builder.parameters else "an input"
            if root.name in self.builder.buffers:
                kind = "the shape of a buffer"
            if root.name in self.builder.constants:
                kind = "a tensor that is a plain attribute"
            raise InvalidInput(
                "forward changes only buffers and its own intermediate values",
                got=f"{kind} ({root.name}) is changed in place by {node.target}",
                remedy="compute a new tensor, or register_buffer() the one that keeps state",
                source=info(node).source,
            )


def _is_mutable(node: fx.Node) -> bool:
    return is_mutable(node.target)


def _may_learn(value: fx.Node) -> bool:
    """Whether a value is made of something that takes a gradient."""
    met: set[fx.Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        fake = info(node).val
        numbers = not isinstance(fake, torch.Tensor) or fake.is_floating_point()
        if node in met or node.target is aten.detach.default or not (numbers or fake.is_complex()):
            continue
        if node.op == "placeholder" and fake.requires_grad:
            return True
        met.add(node)
        waiting.extend(node.all_input_nodes)
    return False


def _no_such_form(node: fx.Node) -> InvalidInput:
    return InvalidInput(
        "an operator that changes its argument has a form that does not",
        got=str(node.target),
        remedy="use the operator without the trailing underscore",
        source=info(node).source,
    )


def functional_of(target: Any) -> Any:
    """The operator that returns what `target` makes of its argument; None if there is none."""
    return _FUNCTIONAL.get(target) or _without_underscore(target)


def _is_view(target: Any) -> bool:
    """Whether an operator returns a view of its argument."""
    schema = getattr(target, "_schema", None)
    is_operators = schema is not None and any(r.alias_info is not None for r in schema.returns)
    return is_operators or target in (as_strided, aten.type_as.default, ANNOTATE)


def _without_out(target: Any) -> Callable[..., Any]:
    """The overload that returns what `target` writes into its argument `out`."""
    arguments = [a for a in target._schema.arguments if a.name != "out"]
    overload = _overload_taking(target.overloadpacket, arguments)
    assert overload is not None, target
    return overload


def _without_underscore(target: Any) -> Callable[..., Any] | None:
    """The overload that returns what `target` writes into its first argument."""
    namespace, _, name = target._schema.name.partition("::")
    name = _SYMBOLS.get(name, name if name.endswith("_") else None)
    packet = name and getattr(getattr(torch.ops, namespace), name.rstrip("_"), None)
    return _overload_taking(packet, target._schema.arguments) if packet else None


def _overload_taking(packet: Any, arguments: Sequence[Any]) -> Callable[..., Any] | None:
    """The overload that takes arguments of these types and changes none of them."""
    types = [str(argument.type) for argument in arguments]
    for overload in (getattr(packet, name) for name in packet.overloads()):
        schema = overload._schema
        if not schema.is_mutable and [str(a.type) for a in schema.arguments] == types:
            return overload
    return None

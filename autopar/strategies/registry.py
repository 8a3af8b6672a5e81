"""The registry of rules by operator.

One call registers a rule, for an operator of a library or a plain function:

    register_rule("aten.linear", "... i, o i -> ... o", passes="each", saved="0 1")
    register_rule(torch.ops.mine.rotate, "... d!, d! -> ... d!")

Instead of a line it takes a function from `OperatorCall` (a node with its arguments by name) to a
`Rule`, for operators whose rule depends on more than shapes. `rule_of(node)` finds the rule again.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any, Unpack

import torch
from torch import fx

from autopar.errors import InvalidInput, unforeseen
from autopar.strategies.language import (
    Flops,
    Options,
    Passes,
    Pattern,
    line_of,
    parse,
    validate_options,
)
from autopar.strategies.node_info import flat_values, info
from autopar.strategies.results import is_result, result_index, values_of
from autopar.strategies.rule import Dim, ExtraTensor, Rule, Saved, product
from autopar.strategies.rules.equal_parts import parts_of_tensors
from autopar.text.units import counted

Operator = Any  # OpOverload, OpOverloadPacket, operator of torch.library.custom_op, or function


class OperatorCall:
    """A node as a call: arguments by name with defaults, tensor inputs in order, shapes."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.arguments, self._tensor_names = _bind(node)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    @cached_property
    def _slots(self) -> tuple[tuple[int, fx.Node], ...]:
        slots, slot = [], 0
        for name, value in self.arguments.items():
            items = value if isinstance(value, (list, tuple)) else (value,)
            holds = name in self._tensor_names or any(_is_tensor_node(item) for item in items)
            if not holds:
                continue
            for item in items:
                if _is_tensor_node(item):
                    slots.append((slot, item))
                slot += 1
        return tuple(slots)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """Return the tensor inputs that are present, in the schema's order, lists flattened."""
        return tuple(node for _, node in self._slots)

    @property
    def slots(self) -> tuple[int, ...]:
        """Return the number of the tensor parameter that each input fills."""
        return tuple(slot for slot, _ in self._slots)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(info(node).val.shape) for node in self.inputs)

    @cached_property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        return info(self.node).values

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the (first) output."""
        return tuple(self.outputs[0].shape)

    @property
    def source(self) -> str | None:
        return info(self.node).source

    def dim(self, value: int, ndim: int | None = None) -> int:
        """Return a dim counted from the left of `ndim` dims; None: those of the first input."""
        return value % max(len(self.shapes[0]) if ndim is None else ndim, 1)

    def dims(self) -> list[int]:
        """Return the dims that the argument `dim` or `dims` numbers; all if it is None."""
        numbers, every = self.get("dim", self.get("dims")), range(len(self.shapes[0]))
        numbers = [numbers] if isinstance(numbers, int) else numbers
        return [self.dim(dim) for dim in numbers or every] if every else []

    def parse(self, line: str | Pattern, **options: Unpack[Options]) -> Rule:
        """Return the rule of this call by a line."""
        outputs = [tuple(output.shape) for output in self.outputs]
        return parse(line, self.shapes, outputs, slots=self.slots, source=self.source, **options)

    def rule(
        self,
        inputs: Sequence[Sequence[Dim]],
        output: Sequence[Dim],
        sizes: Mapping[str, int] = MappingProxyType({}),
        *,
        more: Sequence[Sequence[Dim]] | None = None,
        whole: Iterable[str | Dim] = (),
        passes: Iterable[Iterable[int]] = (),
        saved: Saved = Saved(),  # noqa: B008 (frozen)
        saved_by_joint: Mapping[str, Saved] = MappingProxyType({}),
        **options: Any,
    ) -> Rule:
        """Return the rule of this call from its factors, those of size 1 left out.

        `sizes` are those that shapes do not tell: of all factors of a dim but one. `more` are
        further results; None: like the first. `whole` has factors or dims. `options` are fields
        of `Rule`; FLOPs are the points of all factors, if they have none.
        """
        outputs = (output, *([output] * (len(self.outputs) - 1) if more is None else more))
        sizes = self._sizes([*inputs, *outputs], dict(sizes))

        def large(dims: Sequence[Dim]) -> tuple[Dim, ...]:
            return tuple(tuple(f for f in dim if sizes[f] != 1) for dim in dims)

        flops = options.get("flops")
        into, out = tuple(map(large, inputs)), tuple(map(large, outputs))
        cuttable = {name: size for name, size in sizes.items() if size != 1}
        held = {f for part in whole for f in ((part,) if isinstance(part, str) else part)}
        marked = frozenset(held & cuttable.keys())

        def of_large(saved: Saved) -> Saved:
            extra = tuple(ExtraTensor(large(dims), dtype) for dims, dtype in saved.extra)
            return replace(saved, extra=extra)

        return Rule(
            into,
            out,
            cuttable,
            whole=marked,
            passes=tuple(map(frozenset, passes)),
            text=line_of(into, out, marked),
            saved=of_large(saved),
            saved_by_joint={name: of_large(tensors) for name, tensors in saved_by_joint.items()},
            **{**options, "flops": float(product(cuttable)) if flops is None else flops},
        )

    def _sizes(self, tensors: Sequence[Sequence[Dim]], sizes: dict[str, int]) -> dict[str, int]:
        """Return the sizes of all factors, where at most one of a dim is not known yet."""
        shapes = [*self.shapes, *(output.shape for output in self.outputs)]
        for dims, shape in zip(tensors, shapes):
            for dim, size in zip(dims, shape):
                missing = [factor for factor in dim if factor not in sizes]
                if len(missing) == 1:
                    known = math.prod(sizes[f] for f in dim if f in sizes)
                    sizes[missing[0]] = size // max(known, 1)
        return sizes


RuleFunction = Callable[[OperatorCall], Rule | None]


@dataclass(frozen=True)
class Traits:
    """Facts of an operator besides its rule, in every call."""

    view: bool | Callable[[OperatorCall], bool] = (
        False  # its output lies in the memory of its input
    )
    # Arguments that differ for a piece, from the shape of the piece of its (first) output.
    of_piece: Mapping[str, Callable[[OperatorCall, Sequence[int]], Any]] = field(
        default_factory=dict
    )
    in_order: bool = False  # gives the elements of its input in their order, in another shape
    as_reshape: bool = False  # in order, but reads sizes or strides: a piece is reshaped instead
    shift: int | None = None  # the argument that is read to keep digits: one of any age will do
    count: int | None = None  # the argument that counts the elements behind a statistic
    statistics: bool = False  # sums over the batch; each micro-batch has its own
    counts: bool = False  # counts over the batch what inputs hold: micro-batches share its count
    # Permutes dims: the input dim of each output dim; None if the call does more.
    order: Callable[[OperatorCall], list[int] | None] | None = None
    # More dims may stand before those of its input; the arguments that number dims.
    leading: str | None = None
    # Its output, and the gradient of its first input, are new memory; backward reads no output.
    makes_new: bool = False
    shape_only: bool = False  # reads no values of its first input, only shape and dtype
    takes_nothing: bool = False  # runs on pieces without elements, forward and backward


_RULES: dict[Operator, tuple[RuleFunction, Traits]] = {}
_DERIVED: dict[Operator, tuple[Operator, RuleFunction]] = {}
_RESOLVED: dict[int, tuple[Operator, tuple[RuleFunction | None, Traits]]] = {}  # by id


def register_rule(
    operators: Operator | Sequence[Operator],
    rule: str | RuleFunction,
    *,
    passes: Passes = (),
    kernels: Mapping[str, str] | None = None,
    even: Iterable[str] = (),
    flops: Flops | None = None,
    cost: float | None = None,
    saved: str = "",
    extra: str = "",
    sizes: Mapping[str, int] | None = None,
    traits: Traits | None = None,
) -> None:
    """Register the rule of an operator; a later call replaces an earlier one.

    Args:
        operators: One or several, each an operator of a torch library (the object, or its name as
            "aten.linear", which means all overloads) or a function that calls of the graph name.
        rule: A line of the rule language, or a function that returns the `Rule` of an
            `OperatorCall`; None: the call runs replicated. The options below go with a line.
        passes: The inputs that may be partial sums: "all" together, "each" one at a time, or sets
            of their numbers.
        kernels: The name of the kernel that cutting a factor needs, by factor.
        even: The factors that are cut only into equal pieces.
        flops: FLOPs of the forward, or a function of the sizes; None: they follow from `cost`.
        cost: FLOPs of each point of all factors; None: 1, doubled if a factor is contracted.
        saved: The inputs that autograd keeps, by number, and "output", as in "0 2 output".
        extra: Further tensors that autograd keeps, by factors, as in "n h, int64: n".
        sizes: Sizes of factors that shapes do not determine.
        traits: Facts of every call, by a line or a function; None: earlier ones stay.
    """
    if isinstance(rule, str):
        line = Pattern.read(rule)
        options = Options(
            sizes=sizes,
            passes=passes,
            kernels=kernels,
            even=even,
            flops=flops,
            cost=cost,
            saved=saved,
            extra=extra,
        )
        validate_options(line, options)
        function: RuleFunction = partial(OperatorCall.parse, line=line, **options)
    else:
        function = rule
    for operator in map(_resolve, _listed(operators)):
        _RULES[operator] = function, traits or _find(operator)[1]
        _RESOLVED.clear()


def aten(names: str) -> list[str]:
    """Return names of torch's operators, parted by blanks, as `register_rule` takes them."""
    return [f"aten.{name}" for name in names.split()]


def rule_of(node: fx.Node) -> Rule | None:
    """Return the rule of one call; None if its operator has none and runs replicated."""
    if node.op != "call_function":
        return None
    function, _ = _find(node.target)
    outputs = flat_values(node.meta.get("val"))
    if function is None or not all(isinstance(output, torch.Tensor) for output in outputs):
        return None
    call = OperatorCall(node)
    try:
        rule = function(call)
    except Exception as error:
        raise unforeseen("a rule is found for", node, error) from error
    if rule is None:
        return None
    if not isinstance(rule, Rule):
        raise InvalidInput(
            "the function of an operator's rule gives a Rule, or None",
            got=f"{type(rule).__name__} for {node.target}",
            remedy='return call.parse("... h -> ... h"), or call.rule() of factors',
            source=call.source,
        )
    if len(rule.inputs) != len(call.inputs):
        raise InvalidInput(
            "a rule names every tensor input of its operator",
            got=f"{rule.text!r} for {counted(len(call.inputs), 'input')} of {node.target}",
            remedy="give the inputs that it leaves out dims of their own, whole",
            source=call.source,
        )
    known = dict(enumerate(info(value).parts for value in call.inputs))
    known |= {len(known) + result_index(value): info(value).parts for value in values_of(node)}
    parts = parts_of_tensors(rule, known)
    return replace(rule, passes=tuple(_linear_passes(rule, call)), parts=parts)


def tensor_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the tensor inputs of a node in the order of its rule's inputs."""
    if node.op != "call_function" or is_result(node):
        return ()
    return OperatorCall(node).inputs


def has_rule(target: Operator) -> bool:
    """Return whether an operator is registered."""
    return _find(target)[0] is not None


def traits_of(node: fx.Node) -> Traits:
    """Return the traits of a node's operator; the defaults if it is not registered."""
    return _find(node.target)[1]


def is_view(node: fx.Node) -> bool:
    """Return whether a call computes nothing: its output lies in the memory of its input."""
    view = traits_of(node).view
    return view(OperatorCall(node)) if callable(view) else view


def permutation(node: fx.Node) -> list[int] | None:
    """Return the input's dims in the order of the output; None if a call does not only permute."""
    order = traits_of(node).order
    return None if order is None else order(OperatorCall(node))


def shape_of_piece(call: OperatorCall, shape: Sequence[int]) -> list[int]:
    """Return an argument that is the shape of the output, for a piece of that shape."""
    return list(shape)


def registered() -> tuple[Operator, ...]:
    """Return every operator with a rule."""
    return tuple(_RULES)


def _find(target: Operator) -> tuple[RuleFunction | None, Traits]:
    if (known := _RESOLVED.get(id(target))) is None:
        is_overload, operator = isinstance(target, torch._ops.OpOverload), target
        if operator not in _RULES and is_overload:
            operator = operator.overloadpacket
        function, rule = _DERIVED.get(operator, (operator, None))
        known = target, _RULES.get(operator, _RULES.get(function, (rule, Traits())))
        if is_overload:  # which stays
            _RESOLVED[id(target)] = known
    return known[1]


def register_derived(operator: Operator, function: Operator, rule: RuleFunction) -> None:
    """Give `operator`, which was made of `function`, the rule of that; `rule` if it has none."""
    _DERIVED[operator] = function, rule
    _RESOLVED.clear()


def origin_of(target: Operator) -> Operator:
    """Return the operator that rules are registered for: `target`, or the one it was made of."""
    return _DERIVED.get(getattr(target, "overloadpacket", target), (target,))[0]


def _linear_passes(rule: Rule, call: OperatorCall) -> Iterator[frozenset[int]]:
    """Yield the passes of a rule that hold for the dtypes of a call.

    A bool is no sum, and fractions that become whole numbers (by a `dtype`, say) are rounded.
    """
    dtypes = [output.dtype for output in call.outputs]
    if torch.bool in dtypes:
        return
    has_fractions = all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
    for members in rule.passes:
        taken = [info(call.inputs[index]).val.dtype for index in members]
        is_whole = not any(dtype.is_floating_point or dtype.is_complex for dtype in taken)
        if torch.bool not in taken and (has_fractions or is_whole):
            yield members


def _listed(operators: Operator | Sequence[Operator]) -> Sequence[Operator]:
    return operators if isinstance(operators, (list, tuple)) else (operators,)


def _resolve(operator: Operator) -> Operator:
    if isinstance(operator, str):
        target: Any = torch.ops
        for part in operator.replace("::", ".").split("."):
            target = getattr(target, part, None)
            if target is None:
                break
        if not callable(target):  # a whole library, say
            raise InvalidInput(
                "a rule is registered for an operator that exists",
                got=repr(operator),
                remedy="name it 'library.operator', as in \"aten.linear\", and define it before "
                "its rule",
            )
        return target
    # An operator of torch.library.custom_op is called through its overload (torch 2.11 to 2.13).
    overload = getattr(operator, "_opoverload", operator)
    if not callable(overload):
        raise InvalidInput(
            "a rule is registered for an operator or a function",
            got=repr(operator),
            remedy="pass torch.ops.library.operator, or the function that the graph calls",
        )
    return overload


def _is_tensor_node(value: object) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


@cache
def _declared(target: torch._ops.OpOverload) -> tuple[dict[str, Any], frozenset[str]]:
    """Return an operator's arguments with their defaults, and which of them take tensors."""
    arguments = target._schema.arguments
    defaults = {a.name: a.default_value if a.has_default_value() else None for a in arguments}
    return defaults, frozenset(a.name for a in arguments if "Tensor" in str(a.type))


def _bind(node: fx.Node) -> tuple[dict[str, Any], frozenset[str]]:
    """Return arguments by name in the order of the schema, and the names that take tensors."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        defaults, tensors = _declared(target)
        positional = dict(zip(defaults, node.args))
        return {
            name: positional.get(name, node.kwargs.get(name, value))
            for name, value in defaults.items()
        }, tensors
    try:
        signature = inspect.signature(target)  # type: ignore[arg-type]
        bound = signature.bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        named = {str(index): value for index, value in enumerate(node.args)} | dict(node.kwargs)
        return named, frozenset()
    bound.apply_defaults()
    named, annotated = {}, set[str]()
    for name, parameter in signature.parameters.items():
        value = bound.arguments[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            values = {f"{name}{index}": item for index, item in enumerate(value)}
        elif parameter.kind is parameter.VAR_KEYWORD:
            values = dict(value)
        else:
            values = {name: value}
        named |= values
        if "Tensor" in str(parameter.annotation):
            annotated |= values.keys()
    return named, frozenset(annotated)

"""The registry: which rule belongs to which operator.

One call registers a rule, for an operator of a library or a plain function:

    register_rule("aten.linear", "... i, o i -> ... o", passes="each", saved="0 1")
    register_rule(torch.ops.mine.rotate, "... d!, d! -> ... d!")

Instead of a line it takes a function from `Call` (a node with its arguments by name) to a `Rule`,
for operators whose rule depends on more than shapes. `rule_of(node)` finds the rule again.
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
from autopar.strategies.language import Flops, Options, Passes, Pattern, parse, require
from autopar.strategies.node_info import flat_values, info
from autopar.strategies.results import is_result
from autopar.strategies.rule import Dim, ExtraTensor, Rule, Saved, product
from autopar.strategies.rules.equal_parts import parts_of_tensors
from autopar.text.units import counted

Operator = Any  # OpOverload, OpOverloadPacket, operator of torch.library.custom_op, or function


class OperatorCall:
    """One node, read: arguments by name with defaults, tensor inputs in order, shapes, dtypes."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.arguments, self._tensor_names = _bind(node)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    @cached_property
    def _slots(self) -> tuple[tuple[int, fx.Node], ...]:
        found, slot = [], 0
        for name, value in self.arguments.items():
            items = value if isinstance(value, (list, tuple)) else (value,)
            holds = name in self._tensor_names or any(_is_tensor_node(item) for item in items)
            if not holds:
                continue
            for item in items:
                if _is_tensor_node(item):
                    found.append((slot, item))
                slot += 1
        return tuple(found)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The tensor inputs in the order of the schema, lists flattened, absent ones skipped."""
        return tuple(node for _, node in self._slots)

    @property
    def slots(self) -> tuple[int, ...]:
        """Which of the tensor parameters each input fills."""
        return tuple(slot for slot, _ in self._slots)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(info(node).val.shape) for node in self.inputs)

    @cached_property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        return info(self.node).values

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the (first) output."""
        return tuple(self.outputs[0].shape)

    @property
    def source(self) -> str | None:
        return info(self.node).source

    def dim(self, value: int, ndim: int | None = None) -> int:
        """A dim counted from the left; `ndim` is that of the first input if not given."""
        return value % max(len(self.shapes[0]) if ndim is None else ndim, 1)

    def dims(self) -> list[int]:
        """Those that the argument `dim` or `dims` numbers; all where it is not given."""
        given = self.get("dim", self.get("dims"))
        given, every = [given] if isinstance(given, int) else given, range(len(self.shapes[0]))
        return [self.dim(dim) for dim in given or every] if every else []

    def parse(self, line: str | Pattern, **options: Unpack[Options]) -> Rule:
        """The rule of this call by a line."""
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
        kept: Mapping[str, Saved] = MappingProxyType({}),
        **options: Any,
    ) -> Rule:
        """The rule of this call from factors found by a function, those of size 1 left out.

        `sizes` are those that shapes do not tell: of all factors of a dim but one. `more` are
        further results, like the first if not given; what is `whole` are factors or dims. FLOPs
        are the points of all factors, if `options` have none.
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
            extra = tuple(ExtraTensor(large(one.dims), one.dtype) for one in saved.extra)
            return replace(saved, extra=extra)

        return Rule(
            into,
            out,
            cuttable,
            whole=marked,
            passes=tuple(map(frozenset, passes)),
            text=line_of(into, out, marked),
            saved=of_large(saved),
            kept={name: of_large(own) for name, own in kept.items()},
            **{**options, "flops": float(product(cuttable)) if flops is None else flops},
        )

    def _sizes(self, tensors: Sequence[Sequence[Dim]], sizes: dict[str, int]) -> dict[str, int]:
        """Those of all factors, where at most one of a dim is not known yet."""
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
    """What is so of an operator besides its rule, in every call."""

    view: bool | Callable[[OperatorCall], bool] = (
        False  # its output lies in the memory of its input
    )
    # Arguments that a piece has others of, from the shape of the piece of its (first) output.
    of_piece: Mapping[str, Callable[[OperatorCall, Sequence[int]], Any]] = field(
        default_factory=dict
    )
    in_order: bool = False  # gives the elements of its input in their order, in another shape
    as_reshape: bool = False  # besides, looks at sizes or strides, of which a piece has others
    shift: int | None = None  # the argument that is read to keep digits: one of any age will do
    count: int | None = None  # the argument that counts the elements behind a statistic
    statistics: bool = False  # sums over the batch; each micro-batch has its own
    counts: bool = False  # counts over the batch what inputs hold: micro-batches share its count
    # Permutes dims: where each comes from; None of a call that does more.
    order: Callable[[OperatorCall], list[int] | None] | None = None
    # More dims may stand before those of its input; the arguments that number dims.
    leading: str | None = None
    # Its output, and the gradient of its first input, are new memory; backward reads no output.
    makes_new: bool = False
    shape_only: bool = False  # reads no values of its first input, only shape and dtype
    takes_nothing: bool = False  # runs on pieces without elements, forward and backward


_RULES: dict[Operator, tuple[RuleFunction, Traits]] = {}
_MADE_OF: dict[Operator, tuple[Operator, RuleFunction]] = {}
_FOUND: dict[int, tuple[Operator, tuple[RuleFunction | None, Traits]]] = {}  # by id


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
    """Say what an operator can do; a later call replaces an earlier one.

    `operators`: one or several, each an operator of a torch library (as object or as a name such
    as "aten.linear"; all overloads if none is named) or a function that calls of the graph name.
    `rule`: a line of the rule language, or a function from `Call` to `Rule` (or None: replicated).
    The options go with a line and are told of in `language.Options`; `traits` go with either,
    and stay where a later call gives none.
    """
    if isinstance(rule, str):
        line, options = (
            Pattern.read(rule),
            Options(
                sizes=sizes,
                passes=passes,
                kernels=kernels,
                even=even,
                flops=flops,
                cost=cost,
                saved=saved,
                extra=extra,
            ),
        )
        require(line, options)
        function: RuleFunction = partial(OperatorCall.parse, line=line, **options)
    else:
        function = rule
    for operator in map(_resolve, _listed(operators)):
        _RULES[operator] = function, traits or _find(operator)[1]
        _FOUND.clear()


def aten(names: str) -> list[str]:
    """Names of torch's own operators, parted by blanks, as `register_rule` takes them."""
    return [f"aten.{name}" for name in names.split()]


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of one call; None if its operator has none and runs replicated."""
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
    tensors = zip((*rule.inputs, rule.outputs[0]), (*call.inputs, node))
    parts = parts_of_tensors(rule, ((dims, info(value).parts) for dims, value in tensors))
    return replace(rule, passes=tuple(_linear_passes(rule, call)), parts=parts)


def tensor_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensor inputs of a node in the order of its rule's inputs."""
    if node.op != "call_function" or is_result(node):
        return ()
    return OperatorCall(node).inputs


def has_rule(target: Operator) -> bool:
    """Whether an operator is registered."""
    return _find(target)[0] is not None


def traits_of(node: fx.Node) -> Traits:
    """The traits of what a node calls; none of an operator that is not registered."""
    return _find(node.target)[1]


def is_view(node: fx.Node) -> bool:
    """Whether a call computes nothing: its output lies in the memory of its input."""
    view = traits_of(node).view
    return view(OperatorCall(node)) if callable(view) else view


def permutation(node: fx.Node) -> list[int] | None:
    """The dims of the input in the order of the output, if all that a call does is permute them."""
    order = traits_of(node).order
    return None if order is None else order(OperatorCall(node))


def shape_of_piece(call: OperatorCall, shape: Sequence[int]) -> list[int]:
    """Of an argument that is the shape of the output."""
    return list(shape)


def registered() -> tuple[Operator, ...]:
    """Every operator with a rule."""
    return tuple(_RULES)


def _find(target: Operator) -> tuple[RuleFunction | None, Traits]:
    if (known := _FOUND.get(id(target))) is None:
        is_overload, one = isinstance(target, torch._ops.OpOverload), target
        if one not in _RULES and is_overload:
            one = one.overloadpacket
        function, own = _MADE_OF.get(one, (one, None))
        known = target, _RULES.get(one, _RULES.get(function, (own, Traits())))
        if is_overload:  # which stays
            _FOUND[id(target)] = known
    return known[1]


def register_derived(operator: Operator, function: Operator, rule: RuleFunction) -> None:
    """Calls of `operator`, which was made of `function`, have the rule of that; or else this."""
    _MADE_OF[operator] = function, rule
    _FOUND.clear()


def origin_of(target: Operator) -> Operator:
    """What a rule is registered for: the operator, or what it was made of."""
    return _MADE_OF.get(getattr(target, "overloadpacket", target), (target,))[0]


def _linear_passes(rule: Rule, call: OperatorCall) -> Iterator[frozenset[int]]:
    """The passes between numbers: a bool is no sum, and fractions that become whole numbers (by a
    `dtype`, or written into some) are rounded."""
    given = [output.dtype for output in call.outputs]
    if torch.bool in given:
        return
    has_fractions = all(dtype.is_floating_point or dtype.is_complex for dtype in given)
    for members in rule.passes:
        taken = [info(call.inputs[index]).val.dtype for index in members]
        is_whole = not any(dtype.is_floating_point or dtype.is_complex for dtype in taken)
        if torch.bool not in taken and (has_fractions or is_whole):
            yield members


def _listed(operators: Operator | Sequence[Operator]) -> Sequence[Operator]:
    return operators if isinstance(operators, (list, tuple)) else (operators,)


def _resolve(operator: Operator) -> Operator:
    if isinstance(operator, str):
        found: Any = torch.ops
        for part in operator.replace("::", ".").split("."):
            found = getattr(found, part, None)
            if found is None:
                break
        if not callable(found):  # a whole library, say
            raise InvalidInput(
                "a rule is registered for an operator that exists",
                got=repr(operator),
                remedy="name it 'library.operator', as in \"aten.linear\", and define it before "
                "its rule",
            )
        return found
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
    """The arguments of an operator with their defaults, and those that take tensors."""
    arguments = target._schema.arguments
    defaults = {a.name: a.default_value if a.has_default_value() else None for a in arguments}
    return defaults, frozenset(a.name for a in arguments if "Tensor" in str(a.type))


def _bind(node: fx.Node) -> tuple[dict[str, Any], frozenset[str]]:
    """Arguments by name in the order of the schema, and the names that take tensors."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        defaults, tensors = _declared(target)
        given = dict(zip(defaults, node.args))
        return {
            name: given.get(name, node.kwargs.get(name, value)) for name, value in defaults.items()
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
            own = {f"{name}{index}": item for index, item in enumerate(value)}
        elif parameter.kind is parameter.VAR_KEYWORD:
            own = dict(value)
        else:
            own = {name: value}
        named |= own
        if "Tensor" in str(parameter.annotation):
            annotated |= own.keys()
    return named, frozenset(annotated)


def line_of(
    inputs: Sequence[Sequence[Dim]], outputs: Sequence[Sequence[Dim]], whole: frozenset[str]
) -> str:
    """The line of a rule that was derived from shapes."""

    def tensor(dims: Sequence[Dim]) -> str:
        return " ".join(
            "1" if not dim else marked(dim)[0] if len(dim) == 1 else f"({' '.join(marked(dim))})"
            for dim in dims
        )

    def marked(dim: Dim) -> list[str]:
        return [name + "!" * (name in whole) for name in dim]

    return f"{', '.join(map(tensor, inputs))} -> {', '.join(map(tensor, outputs))}".strip()

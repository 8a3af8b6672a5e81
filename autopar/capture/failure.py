"""Failure: what a model that cannot be captured tells its user.

Capture follows the tensors, not their values: whatever needs a value (an `if`, `.item()`, numpy)
stops it. The error names the user's line and what to write instead.
"""

from __future__ import annotations

import dataclasses
import inspect
import linecache
import re
from collections.abc import Mapping
from types import FunctionType, TracebackType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar.base.user_code import is_users_function
from autopar.capture.captured import Captured
from autopar.capture.dynamic import named_inputs
from autopar.capture.fake import FakeTensorMode
from autopar.capture.graph_builder import GraphBuilder
from autopar.capture.guards import VALUES
from autopar.capture.listing import operator_of
from autopar.capture.plain_tensors import require_plain
from autopar.capture.source import lines_before, of_traceback, passes_through
from autopar.errors import AutoparError, InvalidInput
from autopar.precision import Precision
from autopar.strategies import tensor_inputs
from autopar.strategies.node_info import info
from autopar.text.source_lines import describe, shorten

# torch's own text names unknowns that mean nothing to users.
DECISION = "a Python decision (if, while, int(), range()) on a value that a tensor holds"
# By which torch says that it knows nothing of what an operator would give.
_UNKNOWN_RESULTS = ("DynamicOutputShapeException", "UnsupportedOperatorException")
# What it says of tensors that have no values, wherever these are asked for.
_WITHOUT_VALUES = ("data pointer", "data is not allocated", "FakeTensor")
VALUES_REMEDY = "compute with tensors (torch.where, masks), or decide outside forward"


EXAMPLE = "the example inputs"  # what a model is captured for, as its user knows it


class Parallel:
    """What a model has become: it is not captured again."""


def check_call(model: object, args: object, kwargs: object, given: str = EXAMPLE) -> None:
    """Refuse what is not a model with arguments for its forward, that are `given`."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(
            "a model is a torch.nn.Module",
            got=f"{type(model).__name__}",
            remedy="wrap a function into a module with this forward",
        )
    for path, module in model.named_modules():
        if isinstance(module, Parallel):
            raise InvalidInput(
                "a model is given as it is written: one that is parallel already is no model to "
                "make parallel",
                got=f"{path or 'the model'}, which is a ParallelModule",
                remedy="the plain model that it was made from; plan=module.plan decides as there",
            )
    if not isinstance(args, tuple):
        raise InvalidInput(
            "the positional example inputs are a tuple",
            got=f"{type(args).__name__}",
            remedy="hand over a mapping of names as kwargs="
            if isinstance(args, Mapping)
            else "write (x, y), or (x,) for one input",
        )
    named = {} if kwargs is None else kwargs
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise InvalidInput(
            "the example inputs by name are a mapping of names to values",
            got=f"kwargs={shorten(repr(kwargs))}",
            remedy='write {"labels": labels} for one input, and options by name, as in mesh=...',
        )
    try:
        inspect.signature(model.forward).bind(*args, **named)
    except TypeError as error:
        raise InvalidInput(
            f"{given} fit the signature of forward",
            got=f"{error}; forward{inspect.signature(model.forward)}",
            remedy=_of_binding(str(error), given),
            source=_of_forward(model),
        ) from error
    for name, value in named_inputs(model, args, named).items():
        if isinstance(value, Tensor):
            require_plain(name, value)


def explain(
    error: Exception,
    model: nn.Module,
    mode: FakeTensorMode,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    given: str = EXAMPLE,
) -> AutoparError:
    """The error for the user, from what export ran into with a `model` and inputs of `mode`, that
    are `given`."""
    for one in (error, error.__cause__):  # torch's compiler, too, raises its own from ours
        if isinstance(one, AutoparError):
            return one
    found = _of_values(error)
    if found is not None:
        return found
    if "not a known type" in str(error):
        result, _ = _called(model, mode, args, kwargs)
        return _of_types(error, model, "returns", result)
    if "Unsupported input type" in str(error):
        return _of_types(error, model, "takes", (args, kwargs))
    _, own = _called(model, mode, args, kwargs)
    if own is None and "a leaf Variable" in str(error):
        return InvalidInput(
            "an input that forward changes in place takes no gradient",
            got=f"a tensor that requires a gradient among {given}",
            remedy="hand over x.detach(), or have forward change a copy: x = x.clone()",
            source=of_traceback(error.__traceback__),
        )
    if own is not None and own.kind is type(error) and not isinstance(error, NotImplementedError):
        return InvalidInput(
            f"the model runs on {given}",
            got=own.text,
            remedy="mend the inputs or the model: without torch.export, too, model(*args, "
            "**kwargs) fails on their shapes and dtypes",
            source=own.source,
        )
    return InvalidInput(
        f"torch.export can follow forward on {given}",
        got=_said(error, model),
        remedy="see whether model(*args, **kwargs) runs on its own; if it does, it goes another "
        "way while it is followed: write this line without asking for that",
        source=of_traceback(error.__traceback__),
    )


def _of_binding(text: str, given: str) -> str:
    """What to do about arguments that do not fit."""
    if "missing" in text:
        word = given.removeprefix("the ") if given == EXAMPLE else "a value"
        return f"pass {word} for every argument without a default"
    if "unexpected keyword" in text:
        return "leave this argument out, or have forward take it"
    return "give each argument that forward takes once"


_OF_PRECISION = (
    "buffers keep their dtype: cast them, or what is made of them, where they are read "
    "(table.to(x.dtype)); or leave the precision out"
)


_OF_INPUTS = (
    "hand over inputs in the dtype of the parameters, as x.float() is, or cast where it is read: "
    "x.to(weight.dtype)"
)
aten = torch.ops.aten
_PRODUCTS = (
    *(aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.dot),
    aten.einsum,
)
_NORMS = (aten.layer_norm, aten.group_norm, aten.batch_norm, aten.instance_norm)
_HALVES = (torch.bfloat16, torch.float16)


def require_one_dtype(captured: Captured, remedy: str = _OF_PRECISION) -> None:
    """Refuse products of tensors in several dtypes, which torch finds out when they run."""
    for node in captured.operators:
        rule = captured.rules[node.name]
        is_own = getattr(node.target, "namespace", "") != "aten"  # says itself what it takes
        if rule is None or is_own or not (rule.is_contraction or rule.is_heavy):
            continue
        floats = {d for d in map(_dtype, tensor_inputs(node)) if d.is_floating_point}
        if len(floats) > 1:
            raise _several_dtypes(node, remedy)


def require_products_of_one_dtype(builder: GraphBuilder, precision: Precision | None) -> None:
    """Refuse products and norms that torch refuses when they run, whole and complex numbers among
    them."""
    for node in builder.calls(*_PRODUCTS, *_NORMS):
        if len(set(map(_dtype, tensor_inputs(node)))) > 1 and not _takes_several_dtypes(node):
            raise _several_dtypes(node, _OF_INPUTS if precision is None else _OF_PRECISION)


def _takes_several_dtypes(node: fx.Node) -> bool:
    """Return whether torch runs it so: a norm of halves by float32, an einsum that does not sum."""
    operator: Any = node.target
    if operator.overloadpacket in _NORMS:
        return _dtype(tensor_inputs(node)[0]) in _HALVES
    return operator.overloadpacket == aten.einsum and not _sums(str(node.args[0]))


def _sums(equation: str) -> bool:
    """Return whether an einsum sums over a letter; one that does not multiplies elements."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    letters = [letter for letter in inputs if letter.isalpha()]
    return not {*letters} <= {*output} if arrow else len({*letters}) < len(letters)


def _dtype(value: fx.Node) -> torch.dtype:
    return info(value).val.dtype


def _several_dtypes(node: fx.Node, remedy: str) -> InvalidInput:
    return InvalidInput(
        "a layer is given its input in the dtype that it computes in",
        got=f"{operator_of(node)} of {', '.join(map(str, map(_dtype, tensor_inputs(node))))}, in "
        f"{info(node).module or 'the model'}",
        remedy=remedy,
        source=info(node).source,
    )


def _of_values(error: Exception) -> InvalidInput | None:
    """Where forward asks for what its tensors hold, or for a shape that depends on it."""
    trace, text, kind = error.__traceback__, str(error), type(error).__name__
    rule, remedy = VALUES, VALUES_REMEDY
    if "DataDependent" in kind or "data-dependent" in text:
        got, remedy = DECISION, _of_layer_drop(trace) or VALUES_REMEDY
        if passes_through(trace, "torch.nn.modules.batchnorm"):
            remedy = "give batch norm a momentum: without one it divides by a count it keeps"
    elif kind in _UNKNOWN_RESULTS:
        rule = "torch can tell the shape of every result without its values"
        got = f"{text.strip().splitlines()[0]}, of which it cannot"
        remedy = (
            "compute it outside forward, or make it an operator by "
            "torch.library.custom_op with register_fake, and a rule by register_rule()"
        )
    elif any(word in text for word in _WITHOUT_VALUES) and not isinstance(error, AttributeError):
        got = (
            "an operation that reads the memory of a tensor, which has none while forward "
            f"is followed ({kind}: {_first_lines(text, 1).partition('. If')[0]})"
        )
    elif ".numpy()" in text or (
        "numpy" in text.lower() and isinstance(error, RuntimeError | TypeError)
    ):
        got, remedy = "a tensor handed to numpy", "write the computation with torch"
    else:
        return None
    return InvalidInput(rule, got=got, remedy=remedy, source=of_traceback(trace))


def _of_types(error: Exception, model: nn.Module, verb: str, values: object) -> InvalidInput:
    """What forward takes or returns, among `values`, is of a type that torch does not look into."""
    leaves, named = pytree.tree_leaves(values), re.search(r"<class '([^']*)'>", str(error))
    name = named[1] if named else ""
    found = next((type(leaf) for leaf in leaves if str(type(leaf)) == f"<class '{name}'>"), None)
    remedy = "use a tuple or a dict"
    if name == "numpy.ndarray":
        remedy = "torch.from_numpy(...) makes tensors of arrays"
    elif name.startswith("transformers.") or name.endswith("Cache"):
        remedy = "set model.config.use_cache = False, or pass use_cache=False: training needs none"
    elif found is None or dataclasses.is_dataclass(found):
        kind = found.__name__ if found else "of a dataclass"
        remedy = f"call torch.export.register_dataclass({kind}), or {remedy}"
    return InvalidInput(
        f"forward {verb} tensors in tuples, lists, dicts, or dataclasses that torch knows",
        got=named[0] if named else _first_lines(str(error)),
        remedy=remedy,
        source=_of_forward(model),
    )


@dataclasses.dataclass(frozen=True)
class Failure:
    """Describes an error without keeping it: an error holds all that its frames do."""

    kind: type[Exception]
    text: str
    source: str | None


def _called(
    model: nn.Module, mode: FakeTensorMode, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[object, Failure | None]:
    """What the model itself gives on these fakes, outside of export; or how it fails."""
    try:
        with mode:  # the user's may be no leaves, which forward may change
            args, kwargs = pytree.tree_map_only(Tensor, Tensor.clone, (args, dict(kwargs)))
            return model(*args, **kwargs), None
    except Exception as error:
        return None, Failure(type(error), _said(error, model), of_traceback(error.__traceback__))


def _said(error: Exception, model: nn.Module) -> str:
    """An error in the words of its user, with the innermost module that met it."""
    paths = {id(module): path for path, module in model.named_modules()}
    where, trace = "", error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if "self" in frame.f_code.co_varnames:  # a frame keeps all its locals once it is asked
            where = paths.get(id(frame.f_locals.get("self")), where)
        trace = trace.tb_next
    kind = type(model.get_submodule(where)).__name__
    text = _first_lines(str(error)).replace("FakeTensor", "Tensor")
    return f"{type(error).__name__} in {f'{where}, a {kind}' if where else kind}: {text}"


def _of_forward(model: nn.Module) -> str | None:
    """The line where a forward of the user's begins, after its decorators."""
    forward = inspect.unwrap(model.forward)
    function = getattr(forward, "__func__", forward)
    if not isinstance(function, FunctionType) or not is_users_function(function):
        return None
    code = function.__code__
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    ahead = (number for number, line in enumerate(lines) if line.lstrip().startswith("def "))
    return describe(code.co_filename, code.co_firstlineno + next(ahead, 0))


def _of_layer_drop(trace: TracebackType | None) -> str | None:
    """What to set where a model leaves out layers at random, as transformers call it."""
    found = re.search(r"< self\.(?:config\.)?(\w*layerdrop)\b", lines_before(trace))
    if found is None:
        return None
    return f"set {found[1]} of the configuration (or the module) to 0: layers are dropped at random"


def _first_lines(text: str, count: int = 3) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return "\n".join(lines[:count]) if lines else "no message"

"""Functions with a backward of their own: each becomes an operator, which export keeps.

Export records what the forward of a `torch.autograd.Function` does, operator by operator, and
nothing of its backward: a gradient would be that of those operators, another one or none at all.
So a call of it is one of an operator of torch, `own_functions::NAME`, with the same forward and
backward. It is cut as what it does allows (`function_rules.py`), or as a rule for it says:

    register_rule(MyFunction, "... -> ...")

Its backward runs forward again for what that keeps, so that an operator holds its inputs alone.
Arguments that are no tensors stand in a table, and the operator is given what they print as: a plan
knows its model by that, in any process. So does the autocast that it is called under.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar._torch.tensors import memory_of
from autopar.capture.autocasts import Autocast, active, switched
from autopar.capture.fake import FakeTensor, FakeTensorMode
from autopar.capture.function_rules import followed_rule
from autopar.capture.hooks import in_another_thread, replaced
from autopar.capture.maps import whole_of
from autopar.errors import InvalidInput
from autopar.strategies import OperatorCall, Rule, register_derived
from autopar.text.source_lines import caller

_INNER = ("torch.", "autopar.")  # these stand behind operators that the graph keeps
_COMPILED = "AutogradFunctionApply."  # what torch's compiler makes of one with a gradient
_NAMESPACE = "own_functions"

# Known to have the backward that their operators have, and so captured as those.
_SAME = (
    "transformers.models.bloom.modeling_bloom.GeLUFunction",
    "transformers.models.sew_d.modeling_sew_d.XDropout",
    "transformers.models.sew_d.modeling_sew_d.XSoftmax",
)


@contextmanager
def own_backwards_kept() -> Iterator[None]:
    """Calls of autograd.Functions that a gradient would flow through are those of operators."""
    before = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        is_inner = cls.__module__.startswith(_INNER)
        is_same = f"{cls.__module__}.{cls.__qualname__}" in _SAME
        if torch.is_grad_enabled() and cls.__qualname__.startswith(_COMPILED):
            raise _refused(cls, "in a function that FlexAttention calls")
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        whole = [whole_of(leaf) for leaf in leaves]
        learns = any(leaf.requires_grad for leaf in (*leaves, *whole))
        if learns and torch.is_grad_enabled() and not (is_inner or is_same):
            if any(leaf is not own for leaf, own in zip(leaves, whole)):
                raise _refused(cls, "in a function that is mapped, as by torch.vmap")
            operator, passed_over = _operator(cls, args, kwargs)
            return operator(*(x.detach() if i in passed_over else x for i, x in enumerate(args)))
        return before.__get__(None, cls)(*args, **kwargs)

    with replaced(Function, "apply", classmethod(apply)):
        yield


class _Context:
    """What a Function is given to remember by, in place of autograd's own."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad, self.saved_tensors = needs, tuple[Any, ...]()
        self.is_plain = self.materializes = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    @property
    def saved_variables(self) -> tuple[Any, ...]:
        """An older name."""
        return self.saved_tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materializes = value

    def _is_more(self, *tensors: Any) -> None:
        self.is_plain = False  # a value written to, or one without a gradient

    mark_dirty = mark_non_differentiable = save_for_forward = _is_more


class _Drawn(TorchDispatchMode):
    """Notes whether random numbers are drawn, and refuses to write to a tensor with values, which
    is none that the call was given or made."""

    found = False

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.found |= torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
        for place, argument in enumerate(function._schema.arguments):  # type: ignore[attr-defined]
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            written = pytree.tree_leaves(given) if is_written else ()
            if any(isinstance(x, Tensor) and not isinstance(x, FakeTensor) for x in written):
                raise _Written
        return function(*args, **kwargs)


class _Written(Exception):
    """A Function writes to what it was not given."""


class _Settings(NamedTuple):
    """What else a call is made with."""

    others: tuple[Any, ...]  # the arguments, without tensors
    autocasts: tuple[Autocast, ...]

    def is_same(self, other: _Settings) -> bool:
        pairs = zip(self.others, other.others, strict=True)
        return self.autocasts == other.autocasts and all(
            one is two or (type(one) is type(two) and _equal(one, two)) for one, two in pairs
        )


def _forward(
    cls: Any, args: Sequence[Any], needs: tuple[bool, ...], autocasts: Sequence[Autocast]
) -> tuple[Any, _Context]:
    """What forward gives, and what it remembers."""
    context = _Context(needs)
    with torch.no_grad(), switched(autocasts):
        if cls.setup_context is Function.setup_context:
            return cls.forward(context, *args), context
        given = cls.forward(*args)
        cls.setup_context(context, tuple(args), given)
    return given, context


def _slopes(cls: Any, context: _Context, slopes: Sequence[Any]) -> tuple[Any, ...]:
    """A gradient, or None, for each argument."""
    backward = cls.backward if cls.vjp is Function.vjp else cls.vjp
    found = backward(context, *slopes)
    return found if isinstance(found, tuple) else (found,)


class _Operator:
    """One Function with tensors at these places of its arguments, as an operator of torch."""

    def __init__(self, cls: Any, places: tuple[int, ...], results: int, name: str) -> None:
        self.cls, self.places, self.name = cls, places, name
        self.settings: dict[str, _Settings] = {}
        takes = ", ".join(f"Tensor value_{place}" for place in places)
        gives = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        schema = f"({takes}, str settings) -> {gives}"
        self.call = torch.library.custom_op(
            f"{_NAMESPACE}::{name}", self._run, mutates_args=(), schema=schema
        )
        self.call.register_fake(self._run)
        self.call.register_autograd(self._backward, setup_context=self._keep)

    def __call__(self, *args: Any) -> Any:
        others = tuple(None if i in self.places else arg for i, arg in enumerate(args))
        given = _Settings(others, active())
        said = ", ".join(_said(arg) for i, arg in enumerate(args) if i not in self.places)
        said += "".join(f" under {one}" for one in given.autocasts)
        found = (said + "'" * count for count in range(len(self.settings) + 1))
        key = next(k for k in found if self.settings.setdefault(k, given).is_same(given))
        return self.call(*(args[place] for place in self.places), key)

    def _args(self, tensors: Sequence[Any], settings: str) -> list[Any]:
        args = list(self.settings[settings].others)
        for place, tensor in zip(self.places, tensors):
            args[place] = tensor
        return args

    def _run(self, *given: Any) -> Any:
        args, autocasts = self._args(given[:-1], given[-1]), self.settings[given[-1]].autocasts
        result, _ = _forward(self.cls, args, (False,) * len(args), autocasts)
        taken = {memory_of(arg) for arg in given[:-1]}

        def apart(out: Tensor) -> Tensor:
            """What an operator gives has memory of its own, a view of what it is given, too."""
            own = out.clone() if memory_of(out) in taken else out
            taken.add(memory_of(own))
            return own

        return pytree.tree_map_only(Tensor, apart, result)

    @staticmethod
    def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:-1])
        ctx.settings = inputs[-1]

    def _backward(self, ctx: Any, *slopes: Any) -> tuple[Any, ...]:
        args = self._args(ctx.saved_tensors, ctx.settings)
        autocasts = self.settings[ctx.settings].autocasts
        wanted = dict(zip(self.places, ctx.needs_input_grad))
        if torch.is_grad_enabled():
            return *self._differentiable(args, wanted, slopes, autocasts), None
        needs = tuple(wanted.get(place, False) for place in range(len(args)))
        result, context = _forward(self.cls, args, needs, autocasts)
        if context.materializes:
            outputs = pytree.tree_leaves(result)
            pairs = zip(slopes, outputs)
            slopes = tuple(torch.zeros_like(o) if s is None else s for s, o in pairs)
        found = _slopes(self.cls, context, slopes)
        return *(found[place] for place in self.places), None

    def rule(self, call: OperatorCall) -> Rule | None:
        """As far as it may be cut by what it does; where a user says nothing of it."""
        settings = call["settings"]
        if self.settings[settings].autocasts:
            return None

        def both(tensors: Sequence[Tensor], slopes: Sequence[Tensor]) -> Any:
            args = self._args(tensors, settings)
            result, context = _forward(self.cls, args, (True,) * len(args), ())
            found = _slopes(self.cls, context, slopes)
            return pytree.tree_leaves(result), [found[place] for place in self.places]

        return followed_rule(call, both)

    def _differentiable(
        self,
        args: list[Any],
        wanted: dict[int, bool],
        slopes: Sequence[Any],
        autocasts: Sequence[Autocast],
    ) -> list[Any]:
        """Gradients that have gradients of their own: autograd's, of a call of the Function."""
        learns = [place for place in self.places if wanted[place]]
        for place in learns:
            args[place] = args[place].view_as(args[place])  # which may be given twice
        with switched(autocasts):
            outputs = pytree.tree_leaves(self.cls.apply(*args))
        pairs = [(o, s) for o, s in zip(outputs, slopes) if s is not None and o.requires_grad]
        ends, seeds = zip(*pairs)
        values = [args[place] for place in learns]
        about = {"create_graph": True, "allow_unused": True}
        found = dict(zip(learns, torch.autograd.grad(ends, values, seeds, **about)))
        return [found.get(place) for place in self.places]


_made: dict[tuple[Any, tuple[int, ...], int], _Operator] = {}


class _Seen(NamedTuple):
    """What a Function does, seen without values."""

    results: int  # tensors that it gives
    passed_over: frozenset[int]  # the places of those that take a gradient, and get None


def _operator(
    cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_Operator, frozenset[int]]:
    """The operator of a Function that is called so, and the arguments that it gives no gradient;
    refused if it can be none."""
    if kwargs or any(isinstance(leaf, Tensor) for leaf in _inside(args)):
        raise _refused(cls, "with tensors inside of its arguments")
    places = tuple(place for place, arg in enumerate(args) if isinstance(arg, Tensor))
    seen = in_another_thread(_seen, cls, args, active())
    if isinstance(seen, str):
        raise _refused(cls, seen)
    key = cls, places, seen.results
    if key not in _made:
        name = re.sub(r"\W+", "_", cls.__qualname__.replace("<locals>", ""))
        same = sum(one.cls.__qualname__ == cls.__qualname__ for one in _made.values())
        _made[key] = _Operator(cls, places, seen.results, f"{name}_{same}" if same else name)
        register_derived(
            getattr(getattr(torch.ops, _NAMESPACE), _made[key].name), cls, _made[key].rule
        )
    return _made[key], seen.passed_over


def _seen(cls: Any, args: tuple[Any, ...], autocasts: tuple[Autocast, ...]) -> _Seen | str:
    """What it does with tensors without values; or why it is no operator."""
    numbers = _numbers_around(cls)
    try:
        found = _followed(cls, args, autocasts)
    except _Written:
        return _WRITES
    return found if _numbers_around(cls) == numbers else _WRITES


_WRITES = "which writes to what it is not given: a tensor, or a number, of its surroundings"


def _followed(cls: Any, args: tuple[Any, ...], autocasts: tuple[Autocast, ...]) -> _Seen | str:
    with FakeTensorMode() as mode, _Drawn() as drawn:
        fakes = [_like(arg, mode) if isinstance(arg, Tensor) else arg for arg in args]
        tensors = [fake for fake in fakes if isinstance(fake, Tensor)]
        before = [fake._version for fake in tensors]
        try:
            result, context = _forward(cls, fakes, (True,) * len(args), autocasts)
        except _Written:
            raise
        except Exception as error:
            return f"which fails without values: {type(error).__name__}"
        context.is_plain &= before == [fake._version for fake in tensors]  # buffers, say
        leaves = result if isinstance(result, tuple) else (result,)
        is_plain = context.is_plain and all(isinstance(one, Tensor) for one in leaves)
        if drawn.found or not is_plain:
            return "which draws, writes or gives more than values with gradients"
        learning = {i for i, x in enumerate(args) if isinstance(x, Tensor) and x.requires_grad}
        return _Seen(len(leaves), frozenset(learning & _without(cls, context, leaves)))


def _without(cls: Any, context: _Context, results: Sequence[Tensor]) -> set[int]:
    """The places of arguments for which backward gives None; not known where it needs values."""
    try:
        with torch.no_grad():
            found = _slopes(cls, context, [torch.zeros_like(one) for one in results])
    except _Written:
        raise
    except Exception:
        return set()
    return {place for place, slope in enumerate(found) if slope is None}


def _numbers_around(cls: Any) -> dict[str, Any]:
    """Those that the methods of a Function can see beside their arguments, by name."""
    found: dict[str, Any] = {}

    def note(name: str, value: object) -> None:
        if isinstance(value, bool | int | float | complex | str):
            found[name] = value

    for name in ("forward", "setup_context", "backward"):
        function = inspect.unwrap(getattr(cls, name))
        if not isinstance(function, FunctionType):
            continue
        code = function.__code__
        seen = {n: function.__globals__[n] for n in code.co_names if n in function.__globals__}
        for variable, cell in zip(code.co_freevars, function.__closure__ or ()):
            with suppress(ValueError):  # nothing is in it yet
                seen[variable] = cell.cell_contents
        for variable, value in seen.items():
            note(variable, value)
            if not isinstance(value, ModuleType):
                for attribute, inner in getattr(value, "__dict__", {}).items():
                    note(f"{variable}.{attribute}", inner)
    for attribute, value in vars(cls).items():
        note(f"{cls.__name__}.{attribute}", value)
    return found


def _like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    shape = tuple(tensor.shape), tensor.stride()
    return torch.empty_strided(*shape, dtype=tensor.dtype, device=tensor.device)


def _inside(args: tuple[Any, ...]) -> list[Any]:
    return pytree.tree_leaves([arg for arg in args if not isinstance(arg, Tensor)])


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (ValueError, TypeError, RuntimeError):  # arrays are equal here and there
        return False


def _said(argument: Any) -> str:
    """What an argument prints as, if that tells its value in any process."""
    if isinstance(argument, list | tuple):
        return f"({', '.join(map(_said, argument))})"
    is_plain = isinstance(argument, bool | int | float | complex | str | None | torch.dtype)
    return repr(argument) if is_plain else type(argument).__name__


def _refused(cls: type, why: str) -> InvalidInput:
    name = "" if cls.__qualname__.startswith(_COMPILED) else f"{cls.__name__}, "
    return InvalidInput(
        "gradients are those of the operators of forward; one written by hand belongs to an "
        "operator",
        got=f"{name}a torch.autograd.Function, on values that take a gradient, {why}",
        remedy="make it an operator by torch.library.custom_op and register_autograd, with a rule "
        "by register_rule(); or write its gradient with tensors, as y + (value - y).detach()",
        source=caller(),
    )

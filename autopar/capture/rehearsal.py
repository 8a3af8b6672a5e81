"""Rehearsal: forward runs once on fake tensors of other sizes, and notes all that it calls.

    rehearsal = Rehearsal(captured)
    rehearsal.run(leaves)       # Record(calls=[linear, 0, "up.weight", ...], numbers=[4, 12, ...])

Two runs whose records are equal have done the same: the same functions of torch, on the same
tensors, with the same numbers, by the same modes. Where they are not, or where forward asks for
values, fails, or changes anything in Python, the other sizes need a capture of their own. It stands
under the guards of capture, and costs a small part of one: nothing is traced, and of equal calls
one alone is computed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar._torch.compile_flags import as_exported
from autopar._torch.fake_shapes import grouped_products_of_floats
from autopar.base.exact_values import is_same_tensor
from autopar.base.garbage_collection import deferred_collection
from autopar.capture.autocasts import active, inside, switched
from autopar.capture.blind_losses import looks_at_no_values
from autopar.capture.caches import emptied_afterwards
from autopar.capture.captured import Captured
from autopar.capture.effects import carry_out_all
from autopar.capture.export import AROUND_FORWARD
from autopar.capture.fake import (
    FakeTensor,
    FakeTensorMode,
    computing,
    fake_inputs,
    new_mode,
    outside_fake_mode,
)
from autopar.capture.generators import generators_kept, generators_reached
from autopar.capture.graph_builder import fake_like
from autopar.capture.holders import VALUES, Change
from autopar.capture.hooks import hooks_refused
from autopar.capture.key_value_caches import returned_caches
from autopar.capture.learning_queries import function_name
from autopar.capture.meta_calls import MetaCalls
from autopar.capture.model_tensors import by_every_name
from autopar.capture.python_changes import tensors_put_back
from autopar.capture.python_state import PythonState
from autopar.strategies.node_info import info

_NUMBER = object()  # in the place of a whole number
_OF_TORCH = (BuiltinFunctionType, MethodDescriptorType)
_OF_USERS = (FunctionType, MethodType, partial, nn.Module)
# What tells a tensor of which only the form is known from one that was computed.
_OF_HISTORY = {"is_leaf", "grad_fn", "grad", "retain_grad", "retains_grad"}
_OF_HISTORY |= {"_base", "_is_view", "_version", "output_nr", "register_hook", "is_set_to"}
_OF_HISTORY |= {"data_ptr", "storage", "untyped_storage", "storage_offset"}


class Record(NamedTuple):
    """What forward has called, and the whole numbers in it apart, in their order."""

    calls: list[Any]
    numbers: list[int]
    changes: list[str]  # of what forward leaves in Python, which stand among the calls, too

    def is_same(self, calls: list[Any], numbers: list[int]) -> bool:
        """Return whether these are the calls and numbers, as far as they can be compared."""
        with suppress(Exception):  # forward may hand anything to a function
            return self.calls == calls and self.numbers == numbers
        return False


class Rehearsal:
    """Runs the forward of a program in the modes in which it was captured."""

    def __init__(self, captured: Captured) -> None:
        example = captured.example
        self._example, model = example, example.model
        fakes = (tensor for _, tensor in by_every_name(model) if isinstance(tensor, FakeTensor))
        self._mode = next((tensor.fake_mode for tensor in fakes), None) or new_mode()
        if example.precision is not None:
            model, _ = computing(model, [], self._mode, example.precision)
        self._model, self._generators = model, generators_reached(model)
        _, self._spec = pytree.tree_flatten((example.args, dict(example.kwargs)))
        self._meta_calls = MetaCalls()

    @deferred_collection()
    def run(
        self,
        leaves: Sequence[Any],
        *,
        is_known: bool = True,
        allows_changes: bool = False,
        left: Captured | None = None,
    ) -> Record | None:
        """Return what forward does with these flat arguments; None where that is not certain.

        `is_known`: a program of these sizes was captured; others are rehearsed by what is found out
        here of the functions that are called. `allows_changes`: what forward changes in Python is
        part of the record. `left`: the program whose effects were carried out before."""
        for is_brief in (True, False):
            with suppress(Exception, _HistoryNeeded), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with self._around():
                    recorder = _Recorder(self._mode, self._meta_calls, is_known, is_brief)
                    record = self._record(leaves, left, recorder)
                is_uncertain = record is not None and record.changes and not allows_changes
                return None if is_uncertain else record
        return None

    def _record(
        self, leaves: Sequence[Any], left: Captured | None, recorder: _Recorder
    ) -> Record | None:
        example, model = self._example, self._model
        inputs = fake_inputs(leaves, self._mode, example.device)
        if example.precision is not None:
            kind = example.precision.compute
            inputs = [
                x.to(kind) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
            ]
        args, kwargs = pytree.tree_unflatten(inputs, self._spec)
        before = state = PythonState(model)
        if left is not None:
            tensors = [fake_like(self._mode, info(node).val) for node in left.kept]
            carry_out_all(left.effects, model, tensors)
            state = PythonState(model)
        for name, tensor in by_every_name(model):
            recorder.know(tensor, name)
        for at, leaf in enumerate(inputs):
            recorder.know(leaf, at)
        try:
            with inside(model, example.autocasts), self._mode, _Watch(recorder), recorder:
                output = model(*args, **kwargs)
            changes = [_described(change) for change in state.changes()]
        finally:
            before.put_back()
        forms: list[Any] = [returned_caches((args, kwargs), output)]
        for values in ((args, kwargs), output):  # containers may hold something else by now
            leaves, spec = pytree.tree_flatten(values)
            recorder.note(leaves, [])
            forms.append(spec)
        if recorder.has_failed:
            return None
        return Record([*recorder.calls, *forms, *changes], recorder.numbers, changes)

    @contextmanager
    def _around(self) -> Iterator[None]:
        """Stand around forward as while it is captured, but for export itself."""
        model = self._model
        with ExitStack() as stack:
            outer_mode = stack.enter_context(outside_fake_mode())
            contexts: tuple[AbstractContextManager[Any], ...] = (
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.random.fork_rng(devices=[]),
                switched(()),
                looks_at_no_values(),
                grouped_products_of_floats(),
                hooks_refused(),
                tensors_put_back(model),
                emptied_afterwards(model, {}, outer_mode),
                generators_kept(*self._generators),
                *(around() for around in AROUND_FORWARD),
                as_exported(),
            )
            for around in contexts:
                stack.enter_context(around)
            yield


class _Recorder(TorchFunctionMode):
    """Notes the functions of torch that are called, with what they are given and what they give."""

    def __init__(
        self, mode: FakeTensorMode, meta_calls: MetaCalls, is_known: bool, is_brief: bool
    ) -> None:
        """`is_known`: a program was captured at these sizes. `is_brief`: of equal calls the first
        is computed alone."""
        super().__init__()
        self._mode, self._is_known, self._is_brief = mode, is_known, is_brief
        self._meta_calls = meta_calls
        self.calls: list[Any] = []
        self.numbers: list[int] = []
        self.has_failed = self.is_inside = False  # inside of a function that is noted
        self._names: dict[int, Any] = {}  # of tensors by identity
        self._kept: list[Any] = []  # so that no other gets their identity
        self._results: dict[Any, _Results] = {}  # of equal calls

    def know(self, tensor: Any, name: Any) -> None:
        """Name a tensor."""
        self._names.setdefault(id(tensor), name)
        self._kept.append(tensor)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(function, FunctionType) and _is_own(function):
            # What stands in the place of a method of torch has run already, and called that.
            function = getattr(function, "__wrapped__", function)
        self.calls.append(function)
        key: list[Any] = [function, torch.is_grad_enabled(), *active()]
        self.note(args, key)
        self.note(kwargs, key)
        try:
            result = self._result(function, args, kwargs, key)
        except Exception:
            self.has_failed = True  # whatever catches it
            raise
        if isinstance(result, Iterator):
            result = [*result]
            self._note_result(result)
            return iter(result)
        self._note_result(result)
        return result

    def note(self, value: Any, key: list[Any]) -> None:
        """Note a value that forward hands to a function, or returns; add what a result may depend
        on of it to a key."""
        kind = type(value)
        if kind is int:
            self.calls.append(_NUMBER)
            self.numbers.append(value)
            key.append(value)
        elif isinstance(value, Tensor):
            self.calls.append(self._name(value))
            key += (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
            key.append(type(value))
        elif isinstance(value, tuple | list):
            self._note_form((kind, len(value)), key)
            for item in value:
                self.note(item, key)
        elif kind is dict:
            self._note_form((kind, *value), key)
            for item in value.values():
                self.note(item, key)
        elif kind is slice:
            self.note((value.start, value.stop, value.step), key)
        else:  # of floats 0.0 is not -0.0, and nan is itself
            self.has_failed |= isinstance(value, _OF_USERS)  # which torch may call, unseen
            self._note_form((kind, repr(value) if isinstance(value, Number) else value), key)

    def _note_form(self, form: Any, key: list[Any]) -> None:
        self.calls.append(form)
        key.append(form)

    def _name(self, tensor: Tensor) -> Any:
        name = self._names.get(id(tensor))
        if name is None and not isinstance(tensor, FakeTensor):
            name = _Constant(tensor)
            self.know(tensor, name)
        self.has_failed |= name is None  # it comes from where nothing is seen
        return name

    def _note_result(self, result: Any) -> None:
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                if id(leaf) not in self._names:
                    self.know(leaf, len(self._kept))
                self.calls.append((self._names[id(leaf)], leaf.dtype, leaf.requires_grad))
                self.numbers += leaf.shape
            else:
                self.note(leaf, [])

    def _result(self, function: Any, args: Any, kwargs: dict[str, Any], key: list[Any]) -> Any:
        """Return what a function gives; of equal calls one alone is computed."""
        module = getattr(function, "__module__", None) or torch.__name__
        if module.partition(".")[0] != torch.__name__:
            with self:  # it is handed on by torch, and may be anybody's
                return function(*args, **kwargs)
        if self._is_brief and function_name(function) in _OF_HISTORY:
            self.has_failed = True
            raise _HistoryNeeded
        self.is_inside = True
        try:
            return self._computed(function, module, args, kwargs, key)
        finally:
            self.is_inside = False

    def _computed(
        self, function: Any, module: str, args: Any, kwargs: dict[str, Any], key: list[Any]
    ) -> Any:
        if not self._is_brief or not _is_pure(function, module):
            return function(*args, **kwargs)
        try:
            known = self._results.get(tuple(key))
        except TypeError:  # something in it has no hash
            return function(*args, **kwargs)
        if known is not None:
            results = [self._fake(*form) for form in known.forms]
            return results[0] if known.kind is None else known.kind(results)
        if not self._is_known:
            made = self._meta_calls.results(function, args, kwargs)
            if made is not None:
                self._results[tuple(key)] = _Results(made.kind, made.forms)
                results = [self._fake(*form) for form in made.forms]
                return results[0] if made.kind is None else made.kind(results)
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        versions = [tensor._version for tensor in tensors]
        result = function(*args, **kwargs)
        if versions == [tensor._version for tensor in tensors]:
            kind = type(result) if type(result) in (tuple, list) else None
            results = [result] if kind is None else result
            if all(type(r) is FakeTensor and not any(r is x for x in tensors) for r in results):
                self._results[tuple(key)] = _Results(kind, [*map(_form, results)])
                if self._is_known:
                    self._meta_calls.compare(function, args, kwargs, results)
        return result

    def _fake(self, meta: Tensor, device: torch.device, requires_grad: bool) -> Tensor:
        return FakeTensor(self._mode, meta, device).requires_grad_(requires_grad)


class _Watch(TorchDispatchMode):
    """Notes operators that are called past the functions of torch, as by a script."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._recorder.has_failed |= not self._recorder.is_inside
        return function(*args, **(kwargs or {}))


class _HistoryNeeded(BaseException):
    """Forward looks at how a tensor was made: all calls are to be computed."""


class _Results(NamedTuple):
    """What a call gives, without its history."""

    kind: type | None  # a list or a tuple; None: a tensor
    forms: list[tuple[Tensor, torch.device, bool]]


class _Constant:
    """A tensor with values, in a record: it equals another of the same values."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Constant):
            return False
        tensor, second = self.tensor, other.tensor
        if tensor is second or tensor.is_meta:
            return tensor is second and self.version == other.version
        return tensor.device == second.device and is_same_tensor(tensor, second)

    __hash__ = object.__hash__


def _described(change: Change) -> str:
    """Return what has changed in Python, and to which plain value."""
    value = change.value
    text = repr(value) if type(value) in VALUES else type(value).__name__
    return f"{change.name} {change.kind} {text}"


def _form(result: Tensor) -> tuple[Tensor, torch.device, bool]:
    with outside_fake_mode():
        size, stride = result.shape, result.stride()
        meta = torch.empty_strided(size, stride, dtype=result.dtype, device="meta")
    return meta, result.device, result.requires_grad


def _is_own(function: FunctionType) -> bool:
    return str(function.__globals__.get("__name__")).startswith("autopar.")


def _is_pure(function: Any, module: str) -> bool:
    """Return whether all that a function does is its result, which follows from its arguments."""
    is_computed = isinstance(function, _OF_TORCH) or module == F.__name__
    return is_computed and not function.__name__.endswith("_")

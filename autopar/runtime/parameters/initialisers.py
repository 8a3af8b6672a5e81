"""Initialisers: what makes the values of a model that was built on the meta device.

    for tensor, value in Initialisers(model, init).make(wanted): ...    # whole, one after another

They are the model's own, in the order in which building it calls them: of each module, after those
of its children, `reset_parameters()`; of a module with a method `_init_weights(module)` (as models
of transformers have) that, for all modules below it; at the end `init(module)` for all, as
`model.apply(init)` does. So random numbers are drawn as on one device. Each runs on a copy of its
module with memory of its own, which is let go when no later one reads it; the model stays as it is.

What an initialiser reaches is seen beforehand, in a trial on fake tensors.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar._torch.operators import written_arguments
from autopar._torch.tensors import memory_of
from autopar.capture.fake import new_mode
from autopar.capture.graph_builder import fake_like
from autopar.errors import InvalidInput, error_text

Initialise = Callable[[nn.Module], object]
RESETS = ("reset_parameters", "_reset_parameters")
INITIALISE_ALL = "_init_weights"
RULE = "initialisers make the values of a model on the meta device, module by module"
REMEDY = "parallelize(..., init=fn), whose fn(module) fills a module's own tensors in place"
CPU = torch.device("cpu")
CLONES = (nn.TransformerEncoder, nn.TransformerDecoder)  # of one layer, which is built once
# What writes to a tensor without reading it.
_OVERWRITES = (
    *("bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_"),
    *("normal_", "random_", "uniform_", "zero_"),
)


@dataclass
class _TensorEffect:
    """What an initialiser does to a tensor."""

    starts_anew: bool  # the values before do not matter
    overwritten: int = 0  # elements


@dataclass(frozen=True)
class _InitialiserCall:
    """An initialiser of one module, and what it does to tensors, by their identity."""

    module: nn.Module
    run: Initialise
    name: str
    touches: Mapping[int, _TensorEffect]
    kept: frozenset[int]  # of the module or below it: what is tied has its first place's values
    was_tried: bool  # if not, what it touches is a guess


class Initialisers:
    """Those of a model, in order."""

    def __init__(self, model: nn.Module, init: Initialise | None = None) -> None:
        self._paths = {module: path for path, module in model.named_modules()}
        self._tensors = {id(t): t for module in model.modules() for t in _direct_tensors(module)}
        self._owners: dict[int, nn.Module] = {}
        for module in model.modules():
            for tensor in _direct_tensors(module):
                self._owners.setdefault(id(tensor), module)
        self._calls = [self._call(*one) for one in _list_initialisers(model, init)]

    def unmade(self, wanted: Collection[Tensor]) -> list[Tensor]:
        """Those of `wanted` that no initialiser gives all their values."""
        made = {
            key
            for call in self._calls
            for key in call.kept
            if call.touches[key].overwritten >= self._tensors[key].numel()
        }
        return [tensor for tensor in wanted if id(tensor) not in made]

    def make(self, wanted: Collection[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each of `wanted` and its value, as soon as it is final."""
        keys = {id(tensor) for tensor in wanted}
        calls = [call for call in self._calls if not keys.isdisjoint(call.touches)]
        last = {key: place for place, call in enumerate(calls) for key in call.kept}
        living: dict[int, Tensor] = {}
        for place, call in enumerate(calls):
            values = {}
            for key in call.touches:
                mine = living.pop(key, None) if key in call.kept else None
                values[key] = _allocate(self._tensors[key]) if mine is None else mine
                if mine is None and not call.was_tried and values[key].is_floating_point():
                    values[key].detach().fill_(math.nan)
            self._carry_out(call, values)
            for key in call.kept:
                value = values.pop(key)
                if last[key] > place:
                    later = (c.touches[key] for c in calls[place + 1 :] if key in c.kept)
                    if not next(later).starts_anew:
                        living[key] = value
                elif key in keys:
                    yield self._tensors[key], value.detach()
                del value

    def _call(self, module: nn.Module, run: Initialise, name: str) -> _InitialiserCall:
        """What an initialiser reaches: maybe all below its module, where it cannot be tried."""
        mode, held = new_mode(), _all_tensors(module)
        with mode:
            fakes = {id(t): _as_parameter(fake_like(mode, t.detach(), CPU), t) for t in held}
        watch = _EffectRecorder({memory_of(value): key for key, value in fakes.items()})
        copy = _copy_module(module, fakes)
        try:
            with torch.no_grad(), mode, watch:
                run(copy)
            touches, was_tried = watch.touches, True
        except Exception:  # of something that has no result without data
            touches = {id(tensor): _TensorEffect(False, tensor.numel()) for tensor in held}
            was_tried = False
        if {id(tensor) for tensor in _all_tensors(copy)} - {id(fake) for fake in fakes.values()}:
            path = self._paths[module] or "the model"
            got = f"{name} of {path}, which puts another tensor in the place of one"
            raise InvalidInput(RULE, got=got, remedy=REMEDY)
        owners = set(module.modules())
        kept = frozenset(key for key in touches if self._owners[key] in owners)
        return _InitialiserCall(module, run, name, touches, kept, was_tried)

    def _carry_out(self, call: _InitialiserCall, values: Mapping[int, Tensor]) -> None:
        path = self._paths[call.module] or "the model"
        try:
            with torch.no_grad():
                call.run(_copy_module(call.module, values))
        except Exception as error:
            raise InvalidInput(
                RULE,
                got=f"{call.name} of {path}, which fails with {error_text(error)}",
                remedy=REMEDY,
            ) from error
        if not call.was_tried and any(values[key].isnan().any() for key in call.kept):
            raise InvalidInput(
                RULE,
                got=f"{call.name} of {path}, which does not fill all tensors",
                remedy=REMEDY,
            )


class _EffectRecorder(TorchDispatchMode):
    """Sees what happens to some memories, each that of one tensor."""

    def __init__(self, keys: Mapping[int, int]) -> None:
        super().__init__()
        self.touches: dict[int, _TensorEffect] = {}
        self._keys, self._answer = keys, True

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if operator is torch.ops.aten._local_scalar_dense.default:
            self._answer = not self._answer  # so that a loop until something holds ends
            return self._answer if args[0].dtype is torch.bool else 1
        if not _is_view(operator):
            written = written_arguments(operator, args, given)
            for value in pytree.tree_leaves((args, given)):
                if isinstance(value, Tensor):
                    self._note(operator, value, any(value is one for one in written))
        return operator(*args, **given)

    def _note(self, operator: Any, value: Tensor, is_written: bool) -> None:
        key = self._keys.get(memory_of(value))
        if key is None:
            return
        name = operator.overloadpacket.__name__
        is_new = is_written and (name in _OVERWRITES or not name.endswith("_"))
        size = value.untyped_storage().nbytes() // value.itemsize
        touch = self.touches.setdefault(key, _TensorEffect(is_new and value.numel() == size))
        if is_new:
            touch.overwritten += value.numel()


def _list_initialisers(
    model: nn.Module, init: Initialise | None
) -> Iterator[tuple[nn.Module, Initialise, str]]:
    """Every initialiser as building the model calls it, and at the end `init`."""
    yield from _list_module_initialisers(model, set(), set())
    if init is not None:
        yield from ((module, init, "init()") for module in _children_first(model, set()))


def _list_module_initialisers(
    module: nn.Module, seen: set[nn.Module], done: set[nn.Module]
) -> Iterator[tuple[nn.Module, Initialise, str]]:
    """Every initialiser of a module that is not `seen` yet; `done` are those that had `OF_ALL`."""
    layers = list(module.layers) if isinstance(module, CLONES) else []
    seen.update(layers[1:])
    for child in module.children():
        if child not in seen:
            seen.add(child)
            yield from _list_module_initialisers(child, seen, done)
    for number in range(1, len(layers)):
        yield module, partial(_copy_first_layer, number), "copying its first layer"
    for name in RESETS:
        if _accepts_arguments(getattr(module, name, None), 0):
            yield module, methodcaller(name), f"{name}()"
            break
    of_all: Any = getattr(module, INITIALISE_ALL, None)
    if _accepts_arguments(of_all, 1):
        for below in _children_first(module, set()):
            if below not in done:
                done.add(below)
                yield below, of_all, f"{INITIALISE_ALL}()"


def _accepts_arguments(method: Any, count: int) -> bool:
    """Whether a method can be called with so many arguments."""
    if not callable(method):
        return False
    with suppress(TypeError, ValueError):
        inspect.signature(method).bind(*range(count))
        return True
    return False


def _copy_first_layer(number: int, stack: Any) -> None:
    """Give a layer the values of the first one."""
    first, other = stack.layers[0], stack.layers[number]
    for copied, value in zip(_all_tensors(other), _all_tensors(first)):
        copied.copy_(value)


def _children_first(root: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """The order of `root.apply`, each module once; those that are `seen` are left out."""
    seen.add(root)
    for child in root.children():
        if child not in seen:
            yield from _children_first(child, seen)
    yield root


def _direct_tensors(module: nn.Module) -> list[Tensor]:
    """A module's own parameters and buffers."""
    held = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in held if tensor is not None]


def _all_tensors(root: nn.Module) -> list[Tensor]:
    return [tensor for module in root.modules() for tensor in _direct_tensors(module)]


def _copy_module(root: nn.Module, values: Mapping[int, Tensor]) -> nn.Module:
    """A module with other tensors, where `values` has some, and all that is not one."""
    copies: dict[nn.Module, nn.Module] = {}
    for module in root.modules():
        copies[module] = new = object.__new__(type(module))
        vars(new).update(vars(module))
        for kind in ("_parameters", "_buffers"):
            held = vars(module)[kind].items()
            vars(new)[kind] = {name: values.get(id(one), one) for name, one in held}
    for new in copies.values():
        children = vars(new)["_modules"].items()
        vars(new)["_modules"] = {k: m if m is None else copies[m] for k, m in children}
    return copies[root]


def _allocate(tensor: Tensor) -> Tensor:
    """Memory for what has none; the values of what has some."""
    if tensor.device.type != "meta":
        return _as_parameter(tensor.detach().clone(), tensor)
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return _as_parameter(empty, tensor)


def _as_parameter(value: Tensor, tensor: Tensor) -> Tensor:
    """`value` as a parameter, if `tensor` is one, with its attributes."""
    if not isinstance(tensor, nn.Parameter):
        return value
    parameter = nn.Parameter(value, tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


def _is_view(operator: Any) -> bool:
    """Whether an operator only looks at its arguments in another way."""
    given = operator._schema.arguments
    return any(a.alias_info is not None and not a.alias_info.is_write for a in given)

"""Run the initialisers that fill a model that was built on the meta device.

    for tensor, value in Initialisers(model, init).make_values(wanted): ...    # one after another

They run in the order in which building the model calls them, so random numbers are drawn as on one
device: children first, `reset_parameters()` of each module; `_init_weights(module)` for all modules
below one that has it, as in transformers; at last `init(module)`, as by `model.apply(init)`. Each
runs on a copy of its module, whose memory is freed when no later one reads it, and the model stays
as it is. A trial on fake tensors shows beforehand which tensors each fills.
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
    """The effect of an initialiser on one tensor."""

    ignores_old_values: bool
    overwritten: int = 0  # elements


@dataclass(frozen=True)
class _InitialiserCall:
    """An initialiser of one module, and its effects by the identity of each tensor."""

    module: nn.Module
    run: Initialise
    name: str
    effects: Mapping[int, _TensorEffect]
    owned: frozenset[int]  # tensors of the module or below it; a tied one has one owner
    was_tried: bool  # if not, the effects are a guess


class Initialisers:
    """The initialisers of a model, in the order in which they run."""

    def __init__(self, model: nn.Module, init: Initialise | None = None) -> None:
        """Find the initialisers of `model`, and `init`, and try each on fake tensors."""
        self._paths = {module: path for path, module in model.named_modules()}
        self._tensors = {id(t): t for module in model.modules() for t in _direct_tensors(module)}
        self._owners: dict[int, nn.Module] = {}
        for module in model.modules():
            for tensor in _direct_tensors(module):
                self._owners.setdefault(id(tensor), module)
        calls = _list_initialisers(model, init)
        self._calls = [self._try_call(module, run, name) for module, run, name in calls]

    def find_unfilled(self, wanted: Collection[Tensor]) -> list[Tensor]:
        """Return the tensors of `wanted` that no initialiser fills completely."""
        filled = {
            key
            for call in self._calls
            for key in call.owned
            if call.effects[key].overwritten >= self._tensors[key].numel()
        }
        return [tensor for tensor in wanted if id(tensor) not in filled]

    def make_values(self, wanted: Collection[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor of `wanted` with its value, as soon as this is final."""
        keys = {id(tensor) for tensor in wanted}
        calls = [call for call in self._calls if not keys.isdisjoint(call.effects)]
        last = {key: place for place, call in enumerate(calls) for key in call.owned}
        living: dict[int, Tensor] = {}
        for place, call in enumerate(calls):
            values = {}
            for key in call.effects:
                old = living.pop(key, None) if key in call.owned else None
                values[key] = _allocate(self._tensors[key]) if old is None else old
                if old is None and not call.was_tried and values[key].is_floating_point():
                    values[key].detach().fill_(math.nan)
            self._run_call(call, values)
            for key in call.owned:
                value = values.pop(key)
                if last[key] > place:
                    later = (c.effects[key] for c in calls[place + 1 :] if key in c.owned)
                    if not next(later).ignores_old_values:
                        living[key] = value
                elif key in keys:
                    yield self._tensors[key], value.detach()
                del value

    def _try_call(self, module: nn.Module, run: Initialise, name: str) -> _InitialiserCall:
        """Try an initialiser on fake tensors; if that fails, it may fill all tensors below it."""
        mode, tensors = new_mode(), _all_tensors(module)
        with mode:
            fakes = {id(t): _as_parameter(fake_like(mode, t.detach(), CPU), t) for t in tensors}
        recorder = _EffectRecorder({memory_of(value): key for key, value in fakes.items()})
        copy = _copy_module(module, fakes)
        try:
            with torch.no_grad(), mode, recorder:
                run(copy)
            effects, was_tried = recorder.effects, True
        except Exception:  # of something that has no result without data
            effects = {id(tensor): _TensorEffect(False, tensor.numel()) for tensor in tensors}
            was_tried = False
        if {id(tensor) for tensor in _all_tensors(copy)} - {id(fake) for fake in fakes.values()}:
            path = self._paths[module] or "the model"
            got = f"{name} of {path}, which puts another tensor in the place of one"
            raise InvalidInput(RULE, got=got, remedy=REMEDY)
        owners = set(module.modules())
        owned = frozenset(key for key in effects if self._owners[key] in owners)
        return _InitialiserCall(module, run, name, effects, owned, was_tried)

    def _run_call(self, call: _InitialiserCall, values: Mapping[int, Tensor]) -> None:
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
        if not call.was_tried and any(values[key].isnan().any() for key in call.owned):
            raise InvalidInput(
                RULE,
                got=f"{call.name} of {path}, which does not fill all tensors",
                remedy=REMEDY,
            )


class _EffectRecorder(TorchDispatchMode):
    """Records the effects of operators on the memory of some tensors."""

    def __init__(self, keys: Mapping[int, int]) -> None:
        """Watch the memories in `keys`, which has the key of the tensor that lies in each."""
        super().__init__()
        self.effects: dict[int, _TensorEffect] = {}
        self._keys, self._answer = keys, True

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if operator is torch.ops.aten._local_scalar_dense.default:
            self._answer = not self._answer  # so that a loop until something holds ends
            return self._answer if args[0].dtype is torch.bool else 1
        if not _is_view(operator):
            written = written_arguments(operator, args, options)
            for value in pytree.tree_leaves((args, options)):
                if isinstance(value, Tensor):
                    is_written = any(value is argument for argument in written)
                    self._record(operator, value, is_written=is_written)
        return operator(*args, **options)

    def _record(self, operator: Any, value: Tensor, *, is_written: bool) -> None:
        key = self._keys.get(memory_of(value))
        if key is None:
            return
        name = operator.overloadpacket.__name__
        is_new = is_written and (name in _OVERWRITES or not name.endswith("_"))
        size = value.untyped_storage().nbytes() // value.itemsize
        effect = self.effects.setdefault(key, _TensorEffect(is_new and value.numel() == size))
        if is_new:
            effect.overwritten += value.numel()


def _list_initialisers(
    model: nn.Module, init: Initialise | None
) -> Iterator[tuple[nn.Module, Initialise, str]]:
    """Yield every initialiser as building the model calls it, and at the end `init`."""
    yield from _list_module_initialisers(model, set(), set())
    if init is not None:
        yield from ((module, init, "init()") for module in _children_first(model, set()))


def _list_module_initialisers(
    module: nn.Module, seen: set[nn.Module], done: set[nn.Module]
) -> Iterator[tuple[nn.Module, Initialise, str]]:
    """Yield the initialisers of a module not `seen` yet; `done` had `_init_weights()` called."""
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
    """Return whether a method can be called with so many arguments."""
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
    """Yield each module that is not `seen` once, in the order of `root.apply`."""
    seen.add(root)
    for child in root.children():
        if child not in seen:
            yield from _children_first(child, seen)
    yield root


def _direct_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module itself, without its children's."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in tensors if tensor is not None]


def _all_tensors(root: nn.Module) -> list[Tensor]:
    return [tensor for module in root.modules() for tensor in _direct_tensors(module)]


def _copy_module(root: nn.Module, values: Mapping[int, Tensor]) -> nn.Module:
    """Copy a module and its children, sharing all attributes but the tensors in `values`."""
    copies: dict[nn.Module, nn.Module] = {}
    for module in root.modules():
        copies[module] = new = object.__new__(type(module))
        attributes = vars(new)
        attributes |= vars(module)
        for kind in ("_parameters", "_buffers"):
            tensors = vars(module)[kind].items()
            attributes[kind] = {name: values.get(id(t), t) for name, t in tensors}
    for new in copies.values():
        children = vars(new)["_modules"].items()
        vars(new)["_modules"] = {k: m if m is None else copies[m] for k, m in children}
    return copies[root]


def _allocate(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the CPU, without values if it is on the meta device."""
    if tensor.device.type != "meta":
        return _as_parameter(tensor.detach().clone(), tensor)
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return _as_parameter(empty, tensor)


def _as_parameter(value: Tensor, tensor: Tensor) -> Tensor:
    """Make a parameter of `value` with the attributes of `tensor`, if that is one."""
    if not isinstance(tensor, nn.Parameter):
        return value
    parameter = nn.Parameter(value, tensor.requires_grad)
    attributes = vars(parameter)
    attributes |= vars(tensor)
    return parameter


def _is_view(operator: Any) -> bool:
    """Return whether an operator makes a view of an argument."""
    arguments = operator._schema.arguments
    return any(a.alias_info is not None and not a.alias_info.is_write for a in arguments)

"""Parameters and buffers that forward reaches past the attributes of its module.

    self.tie = lambda x: x @ self.embedding.weight     # a closure keeps the model, no copy of it
    self.weights = {"up": nn.Parameter(...)}           # registered elsewhere, as in a ParameterList
    self.half = self.weight[:4]                        # a view that is made once

Export knows a parameter by the attribute in which it is registered, of the copy that it follows. So
while forward of a copy runs, an operator that gets another tensor of that memory reads what is
registered in the copy, or a view of it, and a call of a module of the model is one of the copy's.
What learns and is registered nowhere is refused by name, and so is a view that slices do not say.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar._torch.export_graph import is_exporting, traced_node
from autopar._torch.tensors import is_functorch_wrapped, memory_of, without_functions
from autopar.capture.graph_builder import FakeTensor
from autopar.capture.hooks import replaced
from autopar.capture.key_value_caches import is_cache
from autopar.capture.model_tensors import by_every_name, values_of
from autopar.capture.plain_tensors import computes_by_itself
from autopar.capture.source import of_stack
from autopar.errors import InvalidInput
from autopar.text.source_lines import caller


class ParameterAliases:
    """Tells which parameter or buffer of a model, or of copies of it, a tensor is or is a view of.

    It keeps no tensor alive: programs outlive the model that they were captured from.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[int, tuple[ref[Tensor], str]] = {}  # by the identity of the tensor
        self._at_memory = defaultdict[int, list[tuple[ref[Tensor], str]]](list)
        self._modules = {id(module): (ref(module), path) for path, module in model.named_modules()}
        self.add(model)
        for name, tensor in by_every_name(model):
            if _has_memory(tensor):
                self._at_memory[memory_of(tensor)].append((ref(tensor), name))

    def add(self, model: nn.Module) -> None:
        """Know the tensors of a copy by the same names."""
        for name, tensor in by_every_name(model):
            self._names[id(tensor)] = ref(tensor), name

    def is_alias(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a registered one, or lies in the memory of one."""
        return self.name_of(tensor) is not None or bool(self.owners_of(tensor))

    def is_view(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in the memory of a registered one, and is none."""
        return self.name_of(tensor) is None and bool(self.owners_of(tensor))

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name under which a tensor is registered."""
        known, name = self._names.get(id(tensor), (None, ""))
        return name if known is not None and known() is tensor else None

    def owners_of(self, tensor: Tensor) -> list[tuple[Tensor, str]]:
        """Return the tensors of the model that lie in the same memory, with their names."""
        if not self._at_memory or not _has_memory(tensor):
            return []
        known = self._at_memory.get(memory_of(tensor), ())
        return [(owner, name) for weak, name in known if (owner := weak()) is not None]

    def module(self, module: nn.Module, run: nn.Module) -> nn.Module:
        """Return what stands for a module of the model in a copy, whose mode may be another."""
        known, path = self._modules.get(id(module), (None, ""))
        return run.get_submodule(path) if known is not None and known() is module else module

    def registered(self, tensor: Tensor, run: nn.Module) -> Tensor | None:
        """Return what stands for an alias in a copy of the model; None where that is not known."""
        if (name := self.name_of(tensor)) is not None:
            return _named(run, name)
        views = (view_like(tensor, o, _named(run, name)) for o, name in self.owners_of(tensor))
        view = next((view for view in views if view is not None), None)
        return view if view is None or tensor.requires_grad else view.detach()

    def refusal(self, tensor: Tensor, run: nn.Module, source: str | None = None) -> InvalidInput:
        """Return the error for a tensor that learns, or is changed by what learns."""
        named = (name for name, value in values_of(run) if value is tensor)
        what = next(named, f"a tensor of shape {[*tensor.shape]}")
        owners = dict.fromkeys(name for _, name in self.owners_of(tensor))
        if owners:
            got = f"in the memory of {' and '.join(owners)}"
            remedy = "read the parameter or buffer itself in forward, and take the view there"
        elif tensor.is_leaf:
            got = "which learns and is no parameter of the model"
            remedy = "register it: an nn.Parameter or a module in an attribute of a module"
        else:
            got = "which was computed from parameters before forward ran"
            remedy = "compute it in forward, or keep it without a gradient (detach())"
        return InvalidInput(
            "what learns is a parameter of the model, registered in one of its modules",
            got=f"{what}, {got}, which forward reads",
            remedy=remedy,
            source=source or caller(),
        )

    def require_none(self, program: ExportedProgram, run: nn.Module) -> None:
        """Refuse constants of a program that are aliases, which it reads where no operator does."""
        specs = zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs)
        for node, spec in specs:
            if spec.kind is InputKind.CONSTANT_TENSOR and spec.target is not None:
                constant = program.constants[spec.target]
                if self.is_alias(constant) or constant.requires_grad:
                    user = next(iter(node.users), node)
                    raise self.refusal(constant, run, of_stack(user.meta.get("stack_trace")))


def aliases_of(model: nn.Module) -> ParameterAliases:
    """Return the aliases of a model; of a copy, those of what it is a copy of."""
    aliases: ParameterAliases | None = getattr(vars(model).get("forward"), "aliases", None)
    return aliases or ParameterAliases(model)


def lead(copied: nn.Module, model: nn.Module, memo: dict[int, Any]) -> None:
    """Let forward of a copy compute with the tensors of the copy, however it reaches them. `memo`:
    what `copy.deepcopy` has copied."""
    aliases, plain = aliases_of(model), vars(model).get("forward")
    aliases.add(copied)
    replacement: Any = copy.deepcopy(
        getattr(plain, "replacement", plain), memo
    )  # in place of the method
    vars(copied)["forward"] = _LedForward(aliases, copied, replacement)


class _LedForward:
    """Forward of a copy; it does not keep the copy alive, which is freed at once."""

    def __init__(self, aliases: ParameterAliases, run: nn.Module, replacement: Any) -> None:
        self.aliases, self.run, self.replacement = aliases, ref(run), replacement
        self.__wrapped__ = replacement or type(run).forward
        self.__signature__ = inspect.signature(replacement or partial(type(run).forward, run))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run, plain = self.run(), nn.Module.__call__
        assert run is not None
        forward = self.replacement or partial(type(run).forward, run)

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return plain(self.aliases.module(module, run), *args, **kwargs)

        with replaced(nn.Module, "__call__", call), _Led(self.aliases, run) as led:
            result = forward(*args, **kwargs)
        with without_functions():
            # A cache stays the one that it is, which the caller knows.
            return pytree.tree_map_only(Tensor, led.returned, result, is_leaf=is_cache)

    def __deepcopy__(self, memo: dict[int, Any]) -> _LedForward:
        run: Any = self.run()
        return _LedForward(self.aliases, *copy.deepcopy((run, self.replacement), memo))


def _has_memory(tensor: Tensor) -> bool:
    is_dense = not is_lazy(tensor) and tensor.layout is torch.strided
    return is_dense and not is_functorch_wrapped(tensor)


def _named(run: nn.Module, name: str) -> Tensor:
    path, _, key = name.rpartition(".")
    module = run.get_submodule(path)
    held: Any = module._parameters if key in module._parameters else module._buffers
    tensor: Tensor = held[key]
    return tensor


class _Led(TorchFunctionMode):
    """Leads operators to what is registered in the module that runs."""

    def __init__(self, aliases: ParameterAliases, run: nn.Module) -> None:
        self._aliases, self._run, self._is_traced = aliases, run, is_exporting()
        super().__init__()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():  # FlexAttention, whose inputs are led already
            return function(*args, **(kwargs or {}))
        with without_functions():
            args, kwargs = self._lead(args), self._lead(kwargs or {})
        for kind in types:
            is_tensor = issubclass(kind, Tensor) and not computes_by_itself(kind)
            if isinstance(kind.__torch_function__, MethodType) and not is_tensor:
                with self:  # it unpacks the tensors that it holds
                    return kind.__torch_function__(function, types, args, kwargs)
        return function(*args, **kwargs)

    def returned(self, value: Tensor) -> Tensor:
        """Return what stands for a tensor that forward returns."""
        return self._registered(value) if self._aliases.is_alias(value) else value

    def _lead(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._registered(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._lead, value))
        if type(value) is dict:
            return {key: self._lead(one) for key, one in value.items()}
        return value

    def _is_unfollowed(self, tensor: Tensor) -> bool:
        """Return whether export takes a tensor that learns for a constant. A fake tensor that it
        does not know is one of Dynamo's, which compiles FlexAttention."""
        is_other = is_functorch_wrapped(tensor) or isinstance(tensor, FakeTensor)
        return self._is_traced and tensor.requires_grad and not is_other

    def _registered(self, tensor: Tensor) -> Tensor:
        if not (self._is_unfollowed(tensor) or self._aliases.is_alias(tensor)):
            return tensor
        if self._is_traced and traced_node(tensor)[0] is not None:
            return tensor
        current = self._aliases.registered(tensor, self._run)
        if current is None and self._is_traced:
            raise self._aliases.refusal(tensor, self._run)
        return tensor if current is None else current


def view_like(view: Tensor, owner: Tensor, current: Tensor) -> Tensor | None:
    """Return the part of `current` that `view` is of `owner`; None where slices and a change of
    shape do not say it. Both have one memory; `current` has the shape of `owner`."""
    if view.dtype != owner.dtype:
        return None
    start = int(view.storage_offset()) - int(owner.storage_offset())
    if (sliced := _sliced(view, owner, start)) is not None:
        index, order = sliced
        return current[index].permute(order).reshape(view.shape)
    if (
        view.is_contiguous()
        and owner.is_contiguous()
        and 0 <= start <= owner.numel() - view.numel()
    ):
        return current.reshape(-1)[start : start + view.numel()].view(view.shape)
    return None


def _sliced(view: Tensor, owner: Tensor, start: int) -> tuple[tuple[Any, ...], list[int]] | None:
    """Return the index into a tensor, and the order of its dims then, that give a view."""
    dims = [dim for dim in range(owner.ndim) if owner.shape[dim] > 1]
    dims.sort(key=owner.stride, reverse=True)
    if any(owner.stride(dim) == 0 for dim in dims):
        return None
    index: list[Any] = [0] * owner.ndim
    for dim in dims:
        index[dim], start = divmod(start, owner.stride(dim))
    order: list[int] = []  # of the dims of the view, those of the owner
    for step, count in zip(view.stride(), view.shape):
        if count == 1:
            continue
        dim = next((dim for dim in dims if owner.stride(dim) <= step), -1)  # in whose span it steps
        if dim < 0 or dim in order or step % owner.stride(dim):
            return None
        first, step = index[dim], step // owner.stride(dim)
        end = first + (count - 1) * step + 1
        if end > owner.shape[dim]:
            return None
        index[dim] = slice(None) if count == owner.shape[dim] else slice(first, end, step)
        order.append(dim)
    kept = sorted(order)
    return None if start else (tuple(index), [kept.index(dim) for dim in order])

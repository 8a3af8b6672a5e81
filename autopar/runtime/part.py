"""Part: a submodule of a parallel module. It holds tensors and a mode, and does not run itself.

It is of the class of the model's submodule and has its attributes, so that code which looks through
a model (`isinstance(module, nn.LayerNorm)`, `model.config`) finds there what it looks for. What it
does as a module is a Part's alone: hooks, calls and attributes that would change what it computes
are refused, since the program is captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from types import FunctionType, MethodType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar import _torch
from autopar.errors import InvalidInput
from autopar.layout import TensorType

_REMEDY = "change the model itself and parallelize it again"


class Part(nn.Module):
    """Takes no attributes or hooks, which the captured program would not see."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Without what the class of a model does to those that are made of it."""

    def __setattr__(self, name: str, value: Any) -> None:
        kept = (self._parameters, self._buffers, self._modules)
        is_kept = isinstance(value, nn.Parameter | nn.Module) or any(name in held for held in kept)
        if not (is_kept or name == "training" or name.startswith("_")):
            raise refused_attribute(name, "a submodule")
        nn.Module.__setattr__(self, name, value)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidInput(
            "submodules of a parallel module do not run themselves: hooks on them would not either",
            got="a hook on a submodule",
            remedy=_REMEDY,
        )

    register_forward_hook = register_forward_pre_hook = _refuse
    register_backward_hook = register_full_backward_hook = _refuse
    register_full_backward_pre_hook = _refuse

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidInput(
            "submodules of a parallel module do not run themselves",
            got=f"a call of a {type(self).__name__} in it",
            remedy="call the parallel module, or have the model's forward return what is wanted",
        )

    def extra_repr(self) -> str:
        """That of the model's submodule, and the types of tensors that are cut."""
        try:
            said = super().extra_repr()
        except Exception:  # of one that looks at tensors of another rank
            said = ""
        types: Mapping[str, TensorType] = vars(self).get("_tensor_types", {})
        cut = [f"{name}: {t}" for name, t in types.items() if not t.layout.is_replicated]
        return ", ".join(filter(None, [said, *cut]))


# Whatever the class of the model's submodule does otherwise.
for _name, _method in vars(nn.Module).items():
    if isinstance(_method, FunctionType) and _name not in vars(Part):
        setattr(Part, _name, _method)


def refused_attribute(name: str, where: str) -> InvalidInput:
    """What comes of another value for something that forward may have read."""
    return InvalidInput(
        "what modules do is part of the program that was captured",
        got=f"another {name} for {where} of a parallel module",
        remedy=_REMEDY,
    )


class Described(nn.Module):
    """Has the attributes of a model that are no tensors, such as its configuration, to look at."""

    def describe(self, model: nn.Module) -> None:
        """Take those of `model` that this module has not itself."""
        self._attributes = {
            name: value
            for name, value in attributes_of(model).items()
            if not (name.startswith("_") or name in vars(self) or hasattr(type(self), name))
        }

    def __getattr__(self, name: str) -> Any:
        attributes = vars(self).get("_attributes", {})
        return attributes[name] if name in attributes else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_attributes", {}):
            raise refused_attribute(name, "the model")
        super().__setattr__(name, value)


class ListPart(Part):
    """In the place of a Sequential or a ModuleList: its children by place."""

    def __getitem__(self, place: int | slice) -> Any:
        return list(self._modules.values())[place]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())


class DictPart(Part):
    """In the place of a ModuleDict: its children by name."""

    def __getitem__(self, name: str) -> Any:
        return self._modules[name]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)


def add_parts(root: nn.Module, model: nn.Module) -> None:
    """A part for every submodule of a model, in its order; containers are indexed as there."""
    for path, module in model.named_modules(remove_duplicate=False):
        part = part_at(root, path, module)
        if isinstance(part, Part):
            vars(part).update(attributes_of(module))
            for name, tensor in module._parameters.items():
                if tensor is None:
                    part.register_parameter(name, None)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """What a module has beside tensors and modules, by name: those would be other ones here."""
    own = vars(nn.Module()).keys() | {"forward"}
    return {
        name: value
        for name, value in vars(module).items()
        if not (name in own or hasattr(nn.Module, name))
        and not any(map(_is_of_model, pytree.tree_leaves(value)))
    }


def _is_of_model(value: object) -> bool:
    owner = value.__self__ if isinstance(value, MethodType) else value
    return isinstance(owner, nn.Module | Tensor)


def part_at(root: nn.Module, path: str, like: nn.Module | None = None) -> nn.Module | None:
    """The submodule at `path`, made on the way, like another one; None if `root` has another thing
    of that name."""
    module = root
    for part in path.split(".") if path else ():
        if part not in module._modules:
            if module is root and hasattr(module, part):
                return None
            module._modules[part] = _made(type(like) if like is not None else nn.Module)
        found = module._modules[part]
        assert found is not None
        module = found
    return module


def owner_of(root: nn.Module, name: str) -> nn.Module:
    """The submodule that holds `name`, made on the way."""
    path = name.rpartition(".")[0]
    part = part_at(root, path)
    if part is None:
        raise InvalidInput(
            "submodules keep their names beside those of the parallel module itself",
            got=f"{path}, which a ParallelModule has for itself",
            remedy="give the submodule another name",
        )
    return part


@cache
def _kind(model: Any) -> type[Part]:
    """The class of parts in the place of modules of a class, which they belong to."""
    is_list = issubclass(model, nn.Sequential | nn.ModuleList)
    kind = ListPart if is_list else DictPart if issubclass(model, nn.ModuleDict) else Part
    if model is nn.Module or issubclass(model, torch.jit.ScriptModule):
        return kind
    names = {"__module__": model.__module__, "__qualname__": model.__qualname__}
    try:
        return cast(type[Part], type(model)(model.__name__, (kind, model), names))
    except TypeError:  # a class that does not let others be made of it
        return kind


def _made(model: Any) -> Part:
    kind = _kind(model)
    part = object.__new__(kind)
    nn.Module.__init__(part)
    return part


def refuse_late_hooks(root: nn.Module, kept: Mapping[str, Tensor], step: bool) -> None:
    """Refuse hooks on the gradients of what a parallel module has, and on itself in a step."""
    if _torch.have_gradient_hooks(kept.values()):
        named = (name for name, value in kept.items() if _torch.gradient_hooks(value))
        raise _late(f"a hook on the gradient of {next(named)}")
    if step and _torch.has_hooks(root):
        raise _late("a hook on the parallel module, in step()")


def _late(got: str) -> InvalidInput:
    return InvalidInput(
        "gradients are summed over ranks and micro-batches when a step ends, without hooks",
        got=got,
        remedy="take the hook away, and change parameter.grad after step()",
    )

"""Part: a submodule of a parallel module. It holds tensors and a mode, and does not run itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from autopar import _torch
from autopar.errors import InvalidInput

_REMEDY = "change the model itself and parallelize it again"


class Part(nn.Module):
    """Takes no attributes or hooks, which the captured program would not see."""

    def __setattr__(self, name: str, value: Any) -> None:
        kept = (self._parameters, self._buffers, self._modules)
        is_kept = isinstance(value, nn.Parameter | nn.Module) or any(name in held for held in kept)
        if not (is_kept or name == "training" or name.startswith("_")):
            raise InvalidInput(
                "what modules do is part of the program that was captured",
                got=f"another {name} for a submodule of a parallel module",
                remedy=_REMEDY,
            )
        super().__setattr__(name, value)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidInput(
            "submodules of a parallel module do not run themselves: hooks on them would not either",
            got="a hook on a submodule",
            remedy=_REMEDY,
        )

    register_forward_hook = register_forward_pre_hook = _refuse
    register_backward_hook = register_full_backward_hook = _refuse
    register_full_backward_pre_hook = _refuse


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
        is_list = isinstance(module, nn.Sequential | nn.ModuleList)
        is_dict = isinstance(module, nn.ModuleDict)
        part_at(root, path, ListPart if is_list else DictPart if is_dict else Part)


def part_at(root: nn.Module, path: str, kind: type[Part] = Part) -> nn.Module | None:
    """The submodule at `path`, made on the way; None if `root` has another thing of that name."""
    module = root
    for part in path.split(".") if path else ():
        if part not in module._modules:
            if hasattr(module, part):
                return None
            module.add_module(part, kind())
        found = module._modules[part]
        assert found is not None
        module = found
    return module


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

"""Tensors: the parameters and buffers of a parallel module, read from its tree, which owns them.

Every step reads them anew. What a user does to a module between two steps (freeze a parameter, put
another in its place, load a state with `assign=True`) so has the effect that it has on the model,
or is refused before the step: the modules, what is tied, what may learn and of which kind each
tensor is belong to the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import attrgetter

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._torch.tensors import local_of, memory_of, piece_of, plain_attributes
from autopar.errors import InvalidInput

PARALLELIZE_AGAIN = "change the model, then parallelize it"
PUT_BACK = f"put back what was there: it was changed after parallelize; or {PARALLELIZE_AGAIN}"
LOAD_STATE = "load_state_dict({name: value}, strict=False), which takes whole tensors too"
HOLDERS = ("_modules", "_parameters", "_buffers")
TreeContents = dict[str, "Tensor | nn.Module | None"]

_SHAPE, _LEARNS = map(attrgetter, ("shape", "requires_grad"))


class ModuleTensors:
    """What a module's tree holds by name, as it was last accepted."""

    def __init__(
        self, root: nn.Module, tied: Mapping[str, str], learns: Mapping[str, bool]
    ) -> None:
        """`tied`: other names of a parameter or buffer; `learns`: of the parameters that the
        program reads, whether it makes their gradients."""
        self._root, self._learns = root, learns
        self._held = [vars(module)[kind].values() for module in root.modules() for kind in HOLDERS]
        self._planned = self._contents()
        self._kinds = {name: _describe_kind(value) for name, value in self._planned.items()}
        self._shapes = {name: _shape_or_none(value) for name, value in self._planned.items()}
        self._tied = {alias: name for alias, name in tied.items() if alias in self._planned}
        self._accept(self._planned)

    @property
    def changed(self) -> bool:
        """Whether the tree holds anything else than `values`, or lets other parameters learn."""
        return self._look() != self._seen

    def take(self) -> None:
        """Accept what the tree holds now, or refuse it."""
        found = self._contents()
        for name in dict.fromkeys([*self._planned, *found]):
            self._check_kind(name, found.get(name))
        for name, value in found.items():
            if isinstance(value, Tensor):
                self._check_data(name, value)
                if value.requires_grad and not isinstance(value, nn.Parameter):
                    raise InvalidInput(
                        "buffers take no gradient",
                        got=f"{name} requires grad",
                        remedy="make it a parameter of the model, then parallelize that",
                    )
        for alias, name in self._tied.items():
            if found[alias] is not found[name]:
                raise InvalidInput(
                    "tensors that are tied in the program stay tied",
                    got=f"{alias} is another tensor than {name}",
                    remedy="put one tensor in both places, or untie the model first",
                )
        self._accept(found)

    def _accept(self, found: TreeContents) -> None:
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        self.values = {name: value for name, value in tensors.items() if name not in self._tied}
        self._data = {
            name: (local_of(value), _data_identity(value)) for name, value in tensors.items()
        }
        self._placed = [value for value in self.values.values() if isinstance(value, DTensor)]
        read = [self.values.get(name) for name in self._learns]
        self.are_frozen = not any(value is None or value.requires_grad for value in read)
        # Parameters that learn now, and did not when they were planned.
        learns = [name for name, planned in self._learns.items() if not planned]
        found_now = {name: self.values.get(name) for name in learns}
        self.unfrozen = frozenset(
            n for n, v in found_now.items() if v is not None and v.requires_grad
        )
        # As long as these live, other memory has other addresses.
        self._memory = [value.untyped_storage() for value in tensors.values()]
        self._found, self._seen = found, self._look()

    def _look(self) -> list[object]:
        """What tells two states of the tree apart; every step looks, so no line of Python runs for
        each parameter."""
        tensors = self.values.values()
        with plain_attributes():
            return [
                *map(id, chain.from_iterable(self._held)),
                *map(id, map(piece_of, self._placed)),
                *map(id, map(Tensor.untyped_storage, tensors)),
                *map(Tensor.storage_offset, tensors),
                *map(_SHAPE, tensors),
                *map(Tensor.stride, tensors),
                *map(_LEARNS, tensors),
            ]

    def _contents(self) -> TreeContents:
        return {
            f"{path}.{key}" if path else key: value
            for path, module in self._root.named_modules(remove_duplicate=False)
            for kind in HOLDERS
            for key, value in vars(module)[kind].items()
        }

    def _check_kind(self, name: str, value: Tensor | nn.Module | None) -> None:
        planned = self._planned.get(name)
        if isinstance(planned, nn.Module) or isinstance(value, nn.Module):
            rule = "the modules of a parallel module are those of the model"
        elif planned is None or value is None:
            rule = "a parallel module has the parameters and buffers of the model"
        elif _describe_kind(value) != self._kinds[name]:
            raise InvalidInput(
                "what takes the place of a tensor is of its kind",
                got=f"{name}: {_describe_kind(value)}; planned was {self._kinds[name]}",
                remedy=LOAD_STATE if _shape_or_none(value) == self._shapes[name] else PUT_BACK,
            )
        else:
            return
        if value is not planned:
            got = f"{name} is {_describe_change(planned, value)}"
            raise InvalidInput(rule, got=got, remedy=PARALLELIZE_AGAIN)

    def _check_data(self, name: str, value: Tensor) -> None:
        if not isinstance(value, DTensor) or self._found.get(name) is not value:
            return
        local, data = self._data[name]
        if local_of(value) is local and _data_identity(value) != data:
            raise InvalidInput(
                "a DTensor keeps its data: torch ignores what `.data` is set to",
                got=f"{name}.data = ...",
                remedy=f"copy_() into it under torch.no_grad(); or {LOAD_STATE}",
            )


def _data_identity(value: Tensor) -> object:
    """What tells that a tensor's `.data` was set, to a view of what it was too."""
    return memory_of(value), value.storage_offset(), value.shape, value.stride()


def _shape_or_none(value: Tensor | nn.Module | None) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def validate_replacement(module: nn.Module, name: str, value: object = None) -> None:
    """Refuse what may not take the place of that name in a module, where `None` takes it away.

    Modules are not replaced, and tensors keep their shape.
    """
    submodule = module._modules.get(name)
    if value is not submodule and (submodule is not None or isinstance(value, nn.Module)):
        raise InvalidInput(
            "the modules of a parallel module are those of the model",
            got=f"{name} is {_describe_change(submodule, value)}",
            remedy=PARALLELIZE_AGAIN,
        )
    held = module._parameters.get(name, module._buffers.get(name))
    if isinstance(held, Tensor) and isinstance(value, Tensor) and held.shape != value.shape:
        raise InvalidInput(
            "what takes the place of a tensor has its shape",
            got=f"{name}: {tuple(value.shape)}; planned was {tuple(held.shape)}",
            remedy=PARALLELIZE_AGAIN,
        )


def _describe_kind(value: Tensor | nn.Module | None) -> str:
    """What a tensor has in common with those that may take its place."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    what = "a parameter" if isinstance(value, nn.Parameter) else "a tensor"
    text = f"{what} {tuple(value.shape)} {value.dtype} on {value.device}"
    if not isinstance(value, DTensor):
        return text
    local = tuple(local_of(value).shape)
    return f"{text}, placed {value.placements} on {value.device_mesh}, {local} here"


def _describe_change(planned: object, value: object) -> str:
    return "gone" if value is None else "new" if planned is None else "another"

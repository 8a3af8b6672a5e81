"""Read the parameters and buffers of a parallel module from its tree, before every step.

So changes between two steps (freezing or replacing a parameter, `load_state_dict(assign=True)`)
have the effect that they have on the model. Changes of what belongs to the program are refused: of
modules, tied tensors, trainable parameters, and of a tensor's shape, dtype or device.
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
    """The tensors of a module's tree by name, as they were last accepted."""

    def __init__(
        self, root: nn.Module, tied: Mapping[str, str], learns: Mapping[str, bool]
    ) -> None:
        """Accept the tree of `root`.

        `tied` maps other names of a tensor to its first; `learns` has for each parameter that the
        program reads whether it makes the gradient."""
        self._root, self._learns = root, learns
        self._entries = [
            vars(module)[kind].values() for module in root.modules() for kind in HOLDERS
        ]
        self._planned = self._contents()
        self._kinds = {name: _describe_kind(value) for name, value in self._planned.items()}
        self._shapes = {name: _shape_or_none(value) for name, value in self._planned.items()}
        self._tied = {alias: name for alias, name in tied.items() if alias in self._planned}
        self._accept(self._planned)

    @property
    def has_changed(self) -> bool:
        """Return whether the tree holds other tensors than `values`, or other parameters learn."""
        return self._fingerprint() != self._accepted

    def accept_changes(self) -> None:
        """Accept the tensors that the tree holds now, or refuse them."""
        contents = self._contents()
        for name in dict.fromkeys([*self._planned, *contents]):
            self._check_kind(name, contents.get(name))
        for name, value in contents.items():
            if isinstance(value, Tensor):
                self._check_data(name, value)
                if value.requires_grad and not isinstance(value, nn.Parameter):
                    raise InvalidInput(
                        "buffers take no gradient",
                        got=f"{name} requires grad",
                        remedy="make it a parameter of the model, then parallelize that",
                    )
        for alias, name in self._tied.items():
            if contents[alias] is not contents[name]:
                raise InvalidInput(
                    "tensors that are tied in the program stay tied",
                    got=f"{alias} is another tensor than {name}",
                    remedy="put one tensor in both places, or untie the model first",
                )
        self._accept(contents)

    def _accept(self, contents: TreeContents) -> None:
        tensors = {name: value for name, value in contents.items() if isinstance(value, Tensor)}
        self.values = {name: value for name, value in tensors.items() if name not in self._tied}
        self._data = {
            name: (local_of(value), _data_identity(value)) for name, value in tensors.items()
        }
        self._placed = [value for value in self.values.values() if isinstance(value, DTensor)]
        read = [self.values.get(name) for name in self._learns]
        self.are_frozen = not any(value is None or value.requires_grad for value in read)
        # Parameters that learn now, and did not when they were planned.
        learns = [name for name, planned in self._learns.items() if not planned]
        now = {name: self.values.get(name) for name in learns}
        self.unfrozen = frozenset(n for n, v in now.items() if v is not None and v.requires_grad)
        # And those that did, and do not learn now.
        others = {name: self.values.get(name) for name in self._learns.keys() - now.keys()}
        self.frozen = frozenset(
            n for n, v in others.items() if v is not None and not v.requires_grad
        )
        # As long as these live, other memory has other addresses.
        self._memory = [value.untyped_storage() for value in tensors.values()]
        self._last_contents, self._accepted = contents, self._fingerprint()

    def _fingerprint(self) -> list[object]:
        """Return values that differ between two states of the tree.

        Every step calls this, so no line of Python runs for each parameter."""
        tensors = self.values.values()
        with plain_attributes():
            return [
                *map(id, chain.from_iterable(self._entries)),
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
        if not isinstance(value, DTensor) or self._last_contents.get(name) is not value:
            return
        local, data = self._data[name]
        if local_of(value) is local and _data_identity(value) != data:
            raise InvalidInput(
                "a DTensor keeps its data: torch ignores what `.data` is set to",
                got=f"{name}.data = ...",
                remedy=f"copy_() into it under torch.no_grad(); or {LOAD_STATE}",
            )


def _data_identity(value: Tensor) -> object:
    """Return values that differ after a tensor's `.data` was set, also to a view of itself."""
    return memory_of(value), value.storage_offset(), value.shape, value.stride()


def _shape_or_none(value: Tensor | nn.Module | None) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def validate_replacement(module: nn.Module, name: str, value: object = None) -> None:
    """Refuse to set attribute `name` of a module to `value`; None removes the attribute.

    Modules may not be replaced, and tensors keep their shape.
    """
    submodule = module._modules.get(name)
    if value is not submodule and (submodule is not None or isinstance(value, nn.Module)):
        raise InvalidInput(
            "the modules of a parallel module are those of the model",
            got=f"{name} is {_describe_change(submodule, value)}",
            remedy=PARALLELIZE_AGAIN,
        )
    old = module._parameters.get(name, module._buffers.get(name))
    if isinstance(old, Tensor) and isinstance(value, Tensor) and old.shape != value.shape:
        raise InvalidInput(
            "what takes the place of a tensor has its shape",
            got=f"{name}: {tuple(value.shape)}; planned was {tuple(old.shape)}",
            remedy=PARALLELIZE_AGAIN,
        )


def _describe_kind(value: Tensor | nn.Module | None) -> str:
    """Describe the kind, shape, dtype and placement that a tensor's replacement must have."""
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

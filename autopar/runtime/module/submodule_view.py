"""Submodule views: a parallel module has the model's submodules, classes and attributes.

So code that inspects a model (`isinstance(module, nn.LayerNorm)`, `model.config`,
`model.num_parameters()`) works on a parallel module too.

A `SubmoduleView` stands for a submodule. It holds tensors and a mode, and does not run itself:
hooks, calls and attributes that would change its computation are refused, since the program is
captured.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import wraps
from types import FunctionType, MethodType
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar._torch.leaf_gradients import gradient_hooks, has_gradient_hooks
from autopar._torch.modules import has_hooks, has_load_hooks, has_state_hooks
from autopar.capture.effects import Effect
from autopar.capture.failure import Parallel
from autopar.capture.holders import HOOKS, MODEL_STATE, attribute_at
from autopar.errors import InvalidInput
from autopar.runtime.parameters.tensor_tree import HOLDERS, PARALLELIZE_AGAIN, validate_replacement
from autopar.tensor_type import TensorType
from autopar.text.source_lines import frames_to_caller

_OF_TORCH = vars(nn.Module()).keys() | {"forward"}
_REMEDY = "change the model itself and parallelize it again"


class PlainModule(nn.Module):
    """Behaves as a plain `nn.Module`, even if the class of the model overrides methods of it."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Skip the hook of the model's class for its subclasses."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    def _refuse_state_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidInput(
            "a parallel module has the state dict of the model, as it is without hooks",
            got="a hook on what it saves or loads",
            remedy="change what state_dict() or full_state_dict() gives, or what "
            "load_state_dict() is given",
        )

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refuse a new submodule."""
        validate_replacement(self, name, module)

    register_module = add_module

    def __delattr__(self, name: str) -> None:
        validate_replacement(self, name)
        nn.Module.__delattr__(self, name)

    register_state_dict_pre_hook = register_state_dict_post_hook = _refuse_state_hook
    register_load_state_dict_pre_hook = _refuse_state_hook
    register_load_state_dict_post_hook = _refuse_state_hook
    _register_state_dict_hook = _register_load_state_dict_pre_hook = _refuse_state_hook


for _name, _method in vars(nn.Module).items():
    if isinstance(_method, FunctionType) and _name not in (*vars(PlainModule), "extra_repr"):
        setattr(PlainModule, _name, _method)


class ClosedModule:
    """Stands for the backend and programs of a closed module, and refuses every use."""

    def __getattr__(self, name: str) -> Any:
        raise InvalidInput(
            "a closed module has let go of its parameters and programs",
            got="a use of a ParallelModule after close()",
            remedy="parallelize the model again with plan=module.plan",
        )


def require_free_names(model: nn.Module, reserved: Container[str]) -> None:
    """Refuse a model whose tensors or submodules have names that a ParallelModule reserves."""
    held = [vars(model)[kind] for kind in HOLDERS] if isinstance(model, nn.Module) else []
    names = [name for by_name in held for name in by_name if name in reserved]
    if names:
        raise InvalidInput(
            "parameters, buffers and submodules of the model keep their names, beside those that a "
            "ParallelModule has itself",
            got=", ".join(names),
            remedy="another name, or a module that holds the model as one of its own",
        )


def require_free_attributes(effects: Iterable[Effect], reserved: Container[str]) -> None:
    """Refuse effects that set an attribute whose name a ParallelModule reserves."""
    for effect in effects:
        if effect.attribute is not None and effect.attribute in reserved:
            raise InvalidInput(
                "what forward keeps in an attribute of the model has another name than what a "
                "ParallelModule has itself",
                got=effect.attribute,
                remedy="another name",
                source=effect.source,
            )


class SubmoduleView(PlainModule, Parallel):
    """Stands for a submodule; refuses attributes and hooks that the program would not see."""

    def __setattr__(self, name: str, value: Any) -> None:
        holders = (self._parameters, self._buffers, self._modules)
        is_stored = isinstance(value, nn.Parameter | nn.Module) or any(
            name in held for held in holders
        )
        if not (is_stored or name == "training" or name.startswith("_")):
            raise attribute_refusal(name, "a submodule")
        validate_replacement(self, name, value)
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
        """Return the text of the model's submodule, and the types of tensors that are cut."""
        try:
            text = super().extra_repr()
        except Exception:  # it may read tensors of another rank
            text = ""
        types: Mapping[str, TensorType] = vars(self).get("_tensor_types", {})
        cut = [f"{name}: {t}" for name, t in types.items() if not t.layout.is_replicated]
        return ", ".join(filter(None, [text, *cut]))


def attribute_refusal(name: str, where: str) -> InvalidInput:
    """Return the refusal of a new value for an attribute that forward may have read."""
    return InvalidInput(
        "what modules do is part of the program that was captured",
        got=f"another {name} for {where} of a parallel module",
        remedy=_REMEDY,
    )


class ModelAttributes(PlainModule):
    """Has the attributes of a model that are no tensors, such as its configuration, for reading.

    They are the model's own objects. A change inside of one (`module.config.x = 1`) changes the
    model but no program, since programs keep the values of the capture.
    """

    _attributes: Set[str]

    def copy_attributes(self, model: nn.Module, reserved: Container[str]) -> None:
        """Take the attributes of `model`, except `reserved` names."""
        copied = {k: value for k, value in attributes_of(model).items() if k not in reserved}
        self.__dict__.update(copied)
        of_class = {name for name in dir(type(model)) if name[0] != "_" and name not in reserved}
        self._attributes = copied.keys() | of_class - {*dir(nn.Module)}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_attributes", ()):
            raise attribute_refusal(name, "the model")
        validate_replacement(self, name, value)
        super().__setattr__(name, value)


class ListChildren:
    """Gives the children of a Sequential or ModuleList by position."""

    _modules: dict[str, nn.Module | None]

    def __getitem__(self, place: int | slice) -> Any:
        return list(self._modules.values())[place]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())


class DictChildren:
    """Gives the children of a ModuleDict by name."""

    _modules: dict[str, nn.Module | None]

    def __getitem__(self, name: str) -> Any:
        return self._modules[name]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)


def add_submodule_views(root: nn.Module, model: nn.Module) -> None:
    """Add a view for every submodule of a model, in order; one that has several names gets one.
    Containers keep their indexing."""
    views = {id(model): root}
    for path, module in model.named_modules(remove_duplicate=False):
        owner, _, name = path.rpartition(".")
        if id(module) in views:
            if path:
                submodule_at(root, owner)._modules[name] = views[id(module)]
            continue
        view = views[id(module)] = submodule_at(root, owner)._modules[name] = _new_view(
            type(module)
        )
        view.__dict__.update(attributes_of(module))
        for name, tensor in module._parameters.items():
            if tensor is None:
                view.register_parameter(name, None)


def attach_model_state(root: nn.Module, model: nn.Module, effects: Sequence[Effect]) -> None:
    """Store the model's hooks, and the attributes that effects read or write, on a parallel module
    and its views."""
    holders = [holder for effect in effects for holder in effect.holders()]
    attributes = {attribute_at(holder.path) for holder in holders if holder.path}
    for path, module in model.named_modules():
        held: dict[str, Any] = {kind: dict(getattr(module, kind)) for kind in HOOKS}
        held |= {
            name: value
            for name, value in vars(module).items()
            if (path, name) in attributes and name not in _OF_TORCH
        }
        vars(submodule_at(root, path))[MODEL_STATE] = held


def register_tensor(
    root: nn.Module, full_name: str, tensor: Tensor, type_: TensorType, *, is_persistent: bool
) -> None:
    """Register a parameter or buffer of the model on the view that owns it."""
    path, _, key = full_name.rpartition(".")
    owner = submodule_at(root, path)
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(key, tensor)
    else:
        owner.register_buffer(key, tensor, persistent=is_persistent)
    vars(owner).setdefault("_tensor_types", {})[key] = type_


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module by name, except those with tensors and modules."""
    return {
        name: value
        for name, value in vars(module).items()
        if not (name in _OF_TORCH or hasattr(nn.Module, name))
        and not any(map(_is_of_model, pytree.tree_leaves(value)))
    }


def _is_of_model(value: object) -> bool:
    owner = value.__self__ if isinstance(value, MethodType) else value
    return isinstance(owner, nn.Module | Tensor)


def submodule_at(root: nn.Module, path: str) -> nn.Module:
    """Return the submodule at `path`; the root for an empty path."""
    for name in path.split(".") if path else ():
        child = root._modules[name]
        assert child is not None
        root = child
    return root


_classes = WeakValueDictionary[tuple[Any, Any], Any]()  # a class lives as long as its objects


def class_like(base: Any, model: Any) -> Any:
    """Return the subclass of `base` and of the class `model`, which stands for modules of it."""
    kind = _classes.get((base, model))
    if kind is None:
        kind = _classes[base, model] = _make_class(base, model)
    return kind


def _make_class(base: Any, model: Any) -> Any:
    is_list = issubclass(model, nn.Sequential | nn.ModuleList)
    is_dict = issubclass(model, nn.ModuleDict)
    bases = (*[ListChildren] * is_list, *[DictChildren] * is_dict, base)
    names: dict[str, Any] = {"__module__": model.__module__, "__qualname__": model.__qualname__}
    if hasattr(model, "__del__"):
        names["__del__"] = lambda self: None  # the model lives on
    if issubclass(base, ModelAttributes):
        names["forward"] = _forward_of(base, model)
        names |= _transformers_methods(base, model)
    if not (model is nn.Module or issubclass(model, torch.jit.ScriptModule)):
        with suppress(TypeError):  # a class that refuses subclasses
            return type(model)(model.__name__, (*bases, model), names)
    return type(base)(base.__name__, bases, names)


def _forward_of(base: Any, model: Any) -> Any:
    """Return the forward of `base` with the signature of the model's forward."""

    @wraps(model.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, *args, **kwargs)

    return forward


def _transformers_methods(base: Any, model: Any) -> dict[str, Any]:
    """Return methods of transformers' models, and similar ones, that need whole tensors."""
    names: dict[str, Any] = {}
    if (save := getattr(model, "save_pretrained", None)) is not None:

        @wraps(save)
        def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
            return base._written_whole(self, save, *args, **kwargs)

        names["save_pretrained"] = save_pretrained
    if (resize := getattr(model, "resize_token_embeddings", None)) is not None:

        @wraps(resize)
        def resize_token_embeddings(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not [value for value in (*args, *kwargs.values()) if value is not None]:
                return resize(self)  # which returns the embeddings
            raise InvalidInput(
                "a parallel module has the parameters that the model had when it was parallelized",
                got="resize_token_embeddings() of a ParallelModule",
                remedy=PARALLELIZE_AGAIN,
            )

        names["resize_token_embeddings"] = resize_token_embeddings
    return names


def _new_view(model: Any) -> SubmoduleView:
    view = object.__new__(class_like(SubmoduleView, model))
    nn.Module.__init__(view)
    return view


def refuse_late_hooks(root: nn.Module, tensors: Mapping[str, Tensor], *, is_step: bool) -> None:
    """Refuse hooks on gradients of a parallel module's tensors, and on the module in a step."""
    refuse_gradient_hooks(tensors)
    if is_step and has_hooks(root):
        raise _late_hook("a hook on the parallel module, in step()")
    if is_step and "forward" in vars(root):
        raise attribute_refusal("forward", "the model, in step(),")


def refuse_gradient_hooks(tensors: Mapping[str, Tensor]) -> None:
    """Refuse hooks that run when parameters get their gradients."""
    if has_gradient_hooks(tensors.values()):
        named = (name for name, value in tensors.items() if gradient_hooks(value))
        raise _late_hook(f"a hook on the gradient of {next(named)}")


def _late_hook(got: str) -> InvalidInput:
    return InvalidInput(
        "gradients are summed over ranks and micro-batches when a step ends, without hooks",
        got=got,
        remedy="take the hook away, and change parameter.grad after step()",
    )


def warn_about_state_hooks(model: nn.Module) -> None:
    """Warn of hooks on state dicts, and of extra states, which do not run."""
    named = list(model.named_modules())
    of_tensors = "the names of parameters and buffers"
    for has_some, what, consequence in (
        (has_state_hooks, "hooks of {} on state_dict", f"full_state_dict() has {of_tensors}"),
        (has_load_hooks, "hooks of {} on load_state_dict", f"it takes {of_tensors}"),
        (_has_extra_state, "get_extra_state() of {}", "give ap.save what it gives as extra="),
    ):
        paths = [path or "the model" for path, module in named if has_some(module)]
        if paths:
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            does = "does" if has_some is _has_extra_state else "do"
            warnings.warn(
                f"{what.format(paths[0] + more)} {does} not run: {consequence}",
                stacklevel=frames_to_caller(),
            )


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state

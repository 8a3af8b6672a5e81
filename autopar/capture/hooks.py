"""Hooks: what a model asks of autograd besides its operators, which export would drop.

Hooks on forward are traced like the rest. A hook on a gradient, or on what is kept for backward,
is a function that no graph has: it is refused, and so is a backward within forward, whose gradients
would be lost. Where it only moves what is kept (save_on_cpu), results stay the same, and the user
is told. Of torch.utils.checkpoint see checkpoints.py.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from functools import wraps
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, functional, graph

from autopar._torch.leaf_gradients import gradient_hooks
from autopar._torch.modules import backward_hooks, global_backward_hooks
from autopar.base.user_code import is_from_user, is_users_frame
from autopar.errors import InvalidInput
from autopar.text.source_lines import caller, describe, frames_to_caller
from autopar.text.units import counted

T = TypeVar("T")
_ON_TENSORS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
_SEEDS = ("manual_seed", "seed", "initial_seed")  # that are set or asked
_DERIVATIVES = (
    (torch.autograd, "grad"),
    (torch.func, "linearize"),
    (forward_ad, "make_dual"),
    *((functional, name) for name in ("vjp", "jvp", "jacobian", "hessian", "vhp", "hvp")),
)
_ON_NODES = ("register_hook", "register_prehook")  # of a grad_fn
_ONLY_MEMORY = (graph.save_on_cpu,)
_ONE_AT_A_TIME = threading.Lock()  # what two replaced in turns, neither could put back
# Whether this thread follows forward.
_FOLLOWS = ContextVar("follows", default=False)


def refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks on gradients that `model` has before it runs."""
    found: list[tuple[str, Iterable[Callable[..., Any]]]] = [
        ("a backward hook of all modules", global_backward_hooks())
    ]
    for path, module in model.named_modules():
        where = path or type(module).__name__
        found.append((f"a backward hook of the module {where}", backward_hooks(module)))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.append((f"a hook on the gradient of {name}", gradient_hooks(tensor)))
    for what, hooks in found:
        for hook in hooks:
            raise _refused(f"{what}: {_name(hook)}", _line_of(hook))


@contextmanager
def hooks_refused() -> Iterator[list[str | None]]:
    """While forward runs, refuse new hooks. Gives the lines that only ask to keep less memory."""
    seen: list[str | None] = []
    entered = graph.saved_tensors_hooks.__enter__
    node_of: Any = vars(torch.Tensor.__base__)["grad_fn"]

    def enter(self: graph.saved_tensors_hooks) -> None:
        if not isinstance(self, _ONLY_MEMORY):
            raise _refused("saved_tensors_hooks around operators of forward", caller())
        seen.append(caller())
        entered(self)

    def grad_fn(self: Tensor) -> Any:
        node = node_of.__get__(self)
        asked = is_users_frame(sys._getframe(2))  # behind _Property
        return _Node(node) if asked and node is not None else node

    with ExitStack() as stack:
        for name in _ON_TENSORS:
            stack.enter_context(replaced(Tensor, name, _refuse(name, getattr(Tensor, name))))
        several = graph.register_multi_grad_hook
        refuse = _refuse("register_multi_grad_hook", several)
        stack.enter_context(replaced(graph, "register_multi_grad_hook", refuse))
        stack.enter_context(replaced(Tensor, "grad_fn", property(grad_fn)))
        freeze = _refuse_freezing(Tensor.requires_grad_)
        stack.enter_context(replaced(Tensor, "requires_grad_", freeze))
        learns: Any = vars(torch.Tensor.__base__)["requires_grad"]
        learning = property(learns.__get__, _refuse_freezing(learns.__set__))
        stack.enter_context(replaced(Tensor, "requires_grad", learning))
        for owner in (Tensor, torch.autograd):
            stack.enter_context(replaced(owner, "backward", _refuse_backward(owner.backward)))
        for owner, name in _DERIVATIVES:
            refuse = _refuse_gradient(f"{owner.__name__}.{name}", getattr(owner, name))
            stack.enter_context(replaced(owner, name, refuse))
        for name in _SEEDS:
            stack.enter_context(replaced(torch, name, _refuse_seed(name, getattr(torch, name))))
        stack.enter_context(replaced(graph.saved_tensors_hooks, "__enter__", enter))
        yield seen


def warn_of_memory(lines: Sequence[str | None]) -> None:
    """Tell that what a model does to keep fewer activations is not done."""
    if not lines:
        return
    others = len(dict.fromkeys(lines)) - 1
    more = f" and {counted(others, 'more line')}" if others else ""
    warnings.warn(
        f"{lines[0]}{more}: save_on_cpu changes nothing in a captured program; activations are "
        "kept where they are made",
        stacklevel=frames_to_caller(),
    )


@contextmanager
def replaced(owner: Any, name: str, value: Any, others: Any = None) -> Iterator[None]:
    """`owner.name` is `value` for a while. Of classes and modules, which all threads share, only in
    this one: others find what was there, or `others`, and wait to replace anything themselves."""
    with nullcontext() if _FOLLOWS.get() else _ONE_AT_A_TIME:
        own, instead = vars(owner).get(name), value
        if isinstance(owner, type | ModuleType):
            kind = _Property if isinstance(value, property) else _OfThread
            instead = kind(name, value, others or inspect.getattr_static(owner, name))
        setattr(owner, name, instead)
        before = _FOLLOWS.set(True)
        try:
            yield
        finally:
            _FOLLOWS.reset(before)
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


class _OfThread:
    """An attribute that is `value` in the thread that follows forward, and `plain` in others;
    called without a frame between, which would hide who calls."""

    def __init__(self, name: str, value: Any, plain: Any) -> None:
        self._name, self._value, self._plain = name, value, plain

    def _here(self) -> Any:
        return self._value if _FOLLOWS.get() else self._plain

    def __get__(self, one: Any, owner: type | None = None) -> Any:
        here = self._here()
        bind = getattr(type(here), "__get__", None)
        return here if bind is None else bind(here, one, owner)

    @property
    def __call__(self) -> Any:
        return self._here()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here(), name)

    def __instancecheck__(self, one: Any) -> bool:
        return isinstance(one, self._here())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._here(),)

    def __reduce__(self) -> str:  # as of a function: a copy is the same
        return self._name


class _Property(_OfThread):
    """The same of one that is set as well."""

    def __set__(self, one: Any, value: Any) -> None:
        self._here().__set__(one, value)


def in_another_thread(work: Callable[..., T], *args: Any) -> T:
    """What work gives that is a part of following forward, without the modes of export: a thread
    begins without them."""
    with ThreadPoolExecutor(1) as outside:
        return outside.submit(copy_context().run, work, *args).result()


@contextmanager
def while_it_runs(model: nn.Module, around: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """Forward of the model runs within `around()`, and not what is done before and after it."""
    forward = model.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with around():
            return forward(*args, **kwargs)

    with replaced(model, "forward", run):
        yield


class _Node:
    """A node of autograd that takes no hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in _ON_NODES:
            raise _refused(f"{name} of a grad_fn in forward", caller())
        return getattr(self._node, name)


def _refuse(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """`plain`, refused where the user's own code calls it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_users_frame(sys._getframe(1)):
            raise _refused(f"{name} in forward", caller())
        return plain(*args, **kwargs)

    return call


def _refuse_freezing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return `plain`, which sets whether a tensor takes a gradient, refused where the user's code
    changes that of a parameter."""

    def call(tensor: Tensor, requires_grad: bool = True) -> Any:
        is_another = isinstance(tensor, nn.Parameter) and tensor.requires_grad != requires_grad
        frame: Any = sys._getframe(1)
        if is_another and is_from_user(frame.f_back if frame.f_globals is globals() else frame):
            raise InvalidInput(
                "the parameters that learn are known before forward runs",
                got=f"requires_grad of a parameter, which forward makes {requires_grad}",
                remedy="set it before the model is parallelized; inside forward, read the "
                "parameter through .detach()",
                source=caller(),
            )
        return plain(tensor, requires_grad)

    return call


def _refuse_backward(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The same of a backward, which would run once, and on no parameter of the user's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_users_frame(sys._getframe(1)):
            raise InvalidInput(
                "gradients of a step are made after forward, from the loss that it returns",
                got="backward in forward",
                remedy="return the loss, or add it to the one that is returned",
                source=caller(),
            )
        return plain(*args, **kwargs)

    return call


def gradient_refused(what: str) -> InvalidInput:
    """A gradient that forward asks for, other than by what is followed."""
    return InvalidInput(
        "forward differentiates functions by torch.func.grad and its like, called by that name",
        got=f"{what} in forward",
        remedy="torch.func.grad(function)(x), or grad_and_value, jvp, jacrev, jacfwd, hessian of "
        "torch.func; not by a name of one's own (from torch.func import grad)",
        source=caller(),
    )


def _refuse_gradient(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The same of derivatives of what is there already, which export drops."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_users_frame(sys._getframe(1)):
            raise gradient_refused(name)
        return plain(*args, **kwargs)

    return call


def _refuse_seed(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The same of a seed, which would be set or asked once, as forward is captured."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_users_frame(sys._getframe(1)):
            raise InvalidInput(
                "random numbers of a step follow from one key, which it takes as it begins",
                got=f"torch.{name} in forward",
                remedy="call it before step(), or draw outside of forward and hand the numbers "
                "over as an input",
                source=caller(),
            )
        return plain(*args, **kwargs)

    return call


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


def _line_of(hook: Callable[..., Any]) -> str | None:
    code = getattr(inspect.unwrap(hook), "__code__", None)
    return describe(code.co_filename, code.co_firstlineno) if code else None


def _refused(got: str, source: str | None) -> InvalidInput:
    return InvalidInput(
        "gradients are those of the operators of forward: a hook on them is in no graph",
        got=got,
        remedy="change gradients after step(), from parameter.grad; or inside forward with "
        "tensors, as y + (value - y).detach(); or by an operator of torch.library.custom_op with "
        "register_autograd",
        source=source,
    )

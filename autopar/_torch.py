"""The private corners of torch that autopar needs, each in one place (torch 2.11 to 2.13)."""

from __future__ import annotations

import sys
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import wraps
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch import _foreach_add_ as add_each  # tensors to tensors, from any dtype to any
from torch import _foreach_copy_ as copy_each  # tensors into tensors, from any dtype to any

# A guard under which attributes of DTensors and parameters are read in half the time; by what a
# kernel for autograd calls the one below it; how many dispatch modes (tracing, fakes) are active.
from torch._C import DisableTorchFunction as without_functions
from torch._C import DisableTorchFunctionSubclass as plain_attributes
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._C import _len_torch_dispatch_stack as active_modes
from torch._C._autograd import _top_saved_tensors_default_hooks as _outer_hooks
from torch._functorch import eager_transforms as function_transforms
from torch._functorch.predispatch import _vmap_decrement_nesting as mapping_ends
from torch._functorch.predispatch import _vmap_increment_nesting as mapping_begins
from torch._utils import _flatten_dense_tensors as joined_flat  # one tensor of them all
from torch._utils import _unflatten_dense_tensors as split_like  # views, like some tensors in turn
from torch.autograd import Variable, forward_ad, profiler
from torch.autograd.graph import get_gradient_edge
from torch.cpu import _is_amx_tile_supported as multiplies_tiles  # of half precision
from torch.distributed import AllreduceOptions, PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed._composable.contract import REGISTRY_KEY as COMPOSED
from torch.distributed.distributed_c10d import (
    _get_default_store,
    _resolve_process_group,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx.experimental import proxy_tensor
from torch.nn.modules import module as _modules
from torch.nn.modules.batchnorm import _NormBase

__all__ = [  # of what is imported here for others
    "COMPOSED",
    "StridedShard",
    "active_modes",
    "add_each",
    "below_autograd",
    "copy_each",
    "function_transforms",
    "joined_flat",
    "mapping_begins",
    "mapping_ends",
    "multiplies_tiles",
    "plain_attributes",
    "split_like",
    "without_functions",
]

# torch 2.13 renamed two public collectives and warns at each call of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CALL = "_call_impl"  # the method of a module that runs its forward, and hooks around that

# What `torch.export` loads when it is first called: most of the seconds of a first capture.
LOADED_BY_EXPORT = ("torch._dynamo", "torch.export._trace", "torch.export._unlift")

# The registry of process groups by name.
process_group: Callable[[str], ProcessGroup] = _resolve_process_group  # type: ignore[assignment]

_SUM = AllreduceOptions()
_SUM.asyncOp = False

Pack = Callable[[Tensor], Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def saving_hooks() -> tuple[Pack, Callable[[Any], Tensor]]:
    """How what is kept for backward is packed and unpacked here: by the innermost hooks."""
    return _outer_hooks(False) or (lambda tensor: tensor, lambda packed: packed)


def export_verifier() -> Any:
    """What export holds its own graphs against."""
    from torch._export import verifier

    return verifier


def flex_parts() -> tuple[Callable[..., Any], Any, Callable[..., Any]]:
    """Of FlexAttention: all of it, how functions index, what maps them. Loads the compiler."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch._higher_order_ops.flex_attention import math_attention
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv

    return math_attention, TransformGetItemToIndex, _vmap_for_bhqkv


def all_reduce_now(x: Tensor, group: str) -> None:
    """`dist.all_reduce` in place, without what that checks and logs at each call."""
    work = process_group(group).allreduce([x], _SUM)
    if work is not None:
        work.wait()


class Pending(Protocol):
    """What is under way with other ranks."""

    def wait(self) -> object: ...


def wait_for(work: Pending) -> None:
    """Wait for other ranks: what breaks here may have its cause on one of them."""
    work.wait()


def send_to(x: Tensor, member: int, group: ProcessGroup) -> Pending:
    """`dist.isend` to a member of a group, without what that checks at each call."""
    return group.send([x], member, 0)


def receive_from(x: Tensor, member: int, group: ProcessGroup) -> Pending:
    """`dist.irecv` from a member of a group, without what that checks at each call."""
    return group.recv([x], member, 0)


_WAITS = tuple(one.__code__ for one in (all_reduce_now, wait_for, send_to, receive_from))
_TORCH = Path(torch.__file__).parent
_COLLECTIVES = [
    _TORCH / "distributed" / f for f in ("distributed_c10d.py", "_functional_collectives.py")
]


def raised_while_waiting(error: Exception) -> bool:
    """Whether an error was raised by a collective: below it come frames of dispatch at most."""
    for code in reversed([frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]):
        path = Path(code.co_filename)
        if code in _WAITS or path in _COLLECTIVES:
            return True
        if _TORCH not in path.parents or _TORCH / "distributed" in path.parents:
            return False
    return False


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is under way has ended."""
    Variable._execution_engine.queue_callback(callback)


def backward_under_way() -> int:
    """The number of the backward pass that this is called in; -1 outside of one."""
    return torch._C._current_graph_task_id()


def is_transformed() -> bool:
    """Whether tensors are not what they seem: under functorch or forward differentiation."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_batched(gradient: Tensor) -> bool:
    """Whether it is several gradients, as of `is_grads_batched`."""
    return torch._C._functorch.is_legacy_batchedtensor(gradient)


def will_reach(leaf: Tensor) -> bool:
    """Whether the backward pass that is under way is to give a leaf its gradient."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # torch's answer where autograd.grad() is asked for this one
        return True


def world_store() -> Store:
    """The key-value store through which the ranks of the world met."""
    return _get_default_store()


def world_timeout() -> timedelta:
    """How long a rank of the world waits for another, as the world was told when it began."""
    world = dist.group.WORLD
    assert world is not None
    return world._get_backend(world._device_types[0]).options._timeout


def backward_hooks(module: nn.Module) -> list[Callable]:
    """The hooks of a module that run in backward."""
    return [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]


def global_backward_hooks() -> list[Callable]:
    """The hooks of all modules that run in backward."""
    hooks = (_modules._global_backward_pre_hooks, _modules._global_backward_hooks)
    return [hook for registered in hooks for hook in registered.values()]


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that run around its forward or backward."""
    around = module._forward_pre_hooks or module._forward_hooks
    return bool(around or module._backward_pre_hooks or module._backward_hooks)


def runs_around(module: nn.Module) -> bool:
    """Whether something of a user's runs around the forward of a module that is called."""
    registered = _modules._global_forward_pre_hooks or _modules._global_forward_hooks
    return type(module).__call__ is not nn.Module.__call__ or bool(registered) or has_hooks(module)


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module normalises by statistics that it keeps from call to call."""
    return isinstance(module, _NormBase) and module.track_running_stats


def state_hooks(module: nn.Module) -> bool:
    """Whether a module changes what `state_dict` gives; autopar's own hooks do not."""
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())
    return any(not getattr(hook, "__module__", "").startswith("autopar.") for hook in hooks)


def load_hooks(module: nn.Module) -> bool:
    """Whether a module changes what `load_state_dict` is given, or acts on it; not torch's own."""
    before, after = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    hooks = (*before.values(), *after.values())
    return any(not getattr(hook, "__module__", "").startswith("torch.") for hook in hooks)


def state_names(model: nn.Module) -> list[str]:
    """The names that `state_dict` has where no hook changes it."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    ]


def another_connection(store: Store) -> Store:
    """The same store, for another thread: one that waits blocks all others of its connection."""
    return store.clone()  # type: ignore[attr-defined]


def holds_store(store: Store) -> bool:
    """Whether this process serves the store of the world: when it ends, nobody can read it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore) and "server=TCPServer" in repr(store)


def moves_on_host(group: ProcessGroup) -> bool:
    """Whether a group moves what lies on a GPU through the memory of the host, as gloo does."""
    return torch.device("cuda") not in group._device_types or is_gloo(group, "cuda")


def is_gloo(group: ProcessGroup, device: str) -> bool:
    """Whether a group moves what lies on a kind of device by gloo."""
    return group._get_backend(torch.device(device)).name() == "gloo"


# What `torch.compile` takes besides what it compiles, and by what it asks whether a module is
# already compiled, before anything else.
COMPILER_OPTIONS = ("backend", "dynamic", "fullgraph", "mode", "options")
ASKED_BY_COMPILE = "_torchdynamo_orig_callable"


def collects_wrappers() -> bool:
    """Return whether torch asks who calls this, by one function of its own, because it collects the
    wrappers in a tree of modules, as it does for state dicts."""
    asks = sys._getframe(3)
    collects = asks.f_code.co_name == "_get_fsdp_states_with_modules"
    return collects and asks.f_globals["__name__"] == "torch.distributed.fsdp._traversal_utils"


def missing_cpp_compiler() -> str | None:
    """Why torch's compiler finds no compiler of C++, if it finds none."""
    from torch._inductor import cpp_builder, exc  # seconds to load

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        return str(error).partition("\n")[0]
    return None


def left_out(function: Function) -> Function:
    """`function`, which torch's compiler does not look into where what calls it is compiled."""
    made: list[Callable[..., Any]] = []  # when it is called: the compiler takes seconds to load

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(torch.compiler.disable(function, reason="a parallel module is compiled"))
        return made[0](*args, **kwargs)

    return call  # type: ignore[return-value]


def runs_on_host(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator has a kernel for the CPU, its own or made of others."""
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator.name(), "CPU")


def onednn_dtypes() -> frozenset[torch.dtype]:
    """Of the tensors that oneDNN may work on here, as torch asks it."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return frozenset()
    ask = torch.ops.mkldnn
    bf16, half = ask._is_mkldnn_bf16_supported(), ask._is_mkldnn_fp16_supported()
    return frozenset([torch.float32, *[torch.bfloat16] * bf16, *[torch.half] * half])


def moves_what_is_on_host(group: ProcessGroup) -> bool:
    """Whether a group moves tensors that are on the host."""
    return torch.device("cpu") in group._device_types


def placed_like(models: Iterable[Tensor], pieces: Iterable[Tensor]) -> list[DTensor]:
    """DTensors of local tensors, each placed as a DTensor of `models` is, without gradient, in 1 µs
    each, where the public `DTensor.from_local` takes 60."""
    return [
        DTensor.__new__(DTensor, piece, model._spec, requires_grad=False)  # type: ignore[attr-defined]
        for model, piece in zip(models, pieces)
    ]


# The piece of a DTensor itself, where `to_local` gives a view of it.
piece_of: Callable[[Tensor], Tensor] = attrgetter("_local_tensor")


def local_of(tensor: Tensor) -> Tensor:
    """The piece of a DTensor itself; of others, themselves."""
    return piece_of(tensor) if isinstance(tensor, DTensor) else tensor


def age_of(tensor: Tensor) -> int:
    """Grows with every change in place. torch counts those of a DTensor and of its piece apart."""
    return tensor._version + local_of(tensor)._version


def profiling() -> bool:
    """Whether a profiler of torch listens."""
    return profiler._is_profiler_enabled


def memory_of(tensor: Tensor) -> int:
    """A number that changes when a tensor is given other memory: in 0.3 µs, DTensors too."""
    return tensor.untyped_storage()._cdata


def written_arguments(operator: Any, args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
    """What an operator changes in place."""
    declared = operator._schema.arguments
    given = {a.name: value for a, value in zip(declared, args)} | dict(kwargs)
    is_written = {a.name for a in declared if a.alias_info is not None and a.alias_info.is_write}
    return [value for name, value in given.items() if name in is_written]


def python_call(operator: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What calls an operator with less work, and the arguments that it takes by name.

    The function of torch's Python interface that is generated from the operator's declaration;
    where none reads all arguments as the operator does, the operator itself.
    """
    if isinstance(operator, torch._ops.OpOverload) and operator.namespace == "aten":
        declared = operator._schema.arguments
        # Of a list of tensors it takes no None.
        mixed = any("List[Optional[Tensor]]" in str(argument.type) for argument in declared)
        # A default with a name in C++, such as the mean of a loss, it reads as 0.
        left_out = {
            argument.name: argument.default_value
            for argument in declared[len(args) :]
            if str(argument.type) == "int" and argument.default_value
        }
        for module in () if mixed else (torch._C._VariableFunctions, torch._C._nn):
            found = getattr(module, operator._schema.name.removeprefix("aten::"), None)
            if isinstance(found, types.BuiltinFunctionType):
                return found, {**left_out, **kwargs}
    return operator, dict(kwargs)


def has_kernel(operator: torch._ops.OpOverload, key: str) -> bool:
    """Whether an operator has a kernel of its own for a dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether torch.func stands around a tensor, whose memory nobody sees then."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_traced() -> bool:
    """Return whether export is making a graph of what runs."""
    return proxy_tensor.get_proxy_mode() is not None


def traced_node(tensor: Tensor) -> tuple[fx.Node | None, nn.Module]:
    """The node of a tensor in the graph that export is making, and what holds its constants."""
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return None, nn.Module()
    found = proxy_tensor.get_proxy_slot(tensor, mode.tracer, None, lambda slot: slot.proxy.node)
    return found, getattr(mode.tracer, "root", nn.Module())


class DeclaredDim(NamedTuple):
    """What a user says of a dim that varies: its size is `times` that of `root` and `plus`."""

    root: str
    times: int
    plus: int
    least: int  # of the root
    most: int | None


def declared_dim(entry: Any, where: str) -> DeclaredDim | None:
    """A `torch.export.Dim`, or one that is derived of it; of a hint (`Dim.DYNAMIC`, `Dim.AUTO`) the
    root is `where` it is said. None of `Dim.STATIC`."""
    named = torch.export.Dim
    if isinstance(entry, type(named.AUTO)):
        if entry.type.name == "STATIC":
            return None
        return DeclaredDim(where, 1, 0, entry.min or 0, entry.max)
    if not isinstance(entry, named):
        raise TypeError(f"{type(entry).__name__} is no dim")
    root = getattr(entry, "root", entry)
    plus, one = (entry.fn(0), entry.fn(1)) if root is not entry else (0, 1)  # type: ignore[attr-defined]
    most = root.max if isinstance(root.max, int) else None  # else torch's infinity
    return DeclaredDim(root.__name__, one - plus, plus, root.min, most)

"""shard(): annotate a few modules, functions or tensors with layouts; the rest follows.

    shard(model.up, params={"weight": ("tp", None)})       a module's parameters
    shard(model.bn, ((4, 1),))                              a module's inputs, in order
    matmul = shard(torch.matmul, ((1, 1), (1, 4)))          a function's inputs
    x = shard(x, ("dp", None, "tp"))                        a tensor, inside forward
    shard(model.layers[2], stage=1)                         where a stage of a pipeline starts
    shard(model.embedding, device="host")                   a module that is on the host
    shard(model.layers[2], recompute="full")                what runs again in backward

Each dim takes None, the name of a mesh axis, a tuple of names (outermost first), or a number of
slices. An annotation changes nothing until the model is parallelised.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.base.schema import is_count
from autopar.capture.annotations import DEVICE, MARKS, PARAMETERS, RECOMPUTE, STAGE
from autopar.capture.failure import Parallel
from autopar.capture.marker import Annotation, Entry, annotate
from autopar.errors import InvalidInput
from autopar.recompute import Recompute, RecomputeSetting
from autopar.text.source_lines import caller

Dims = Sequence[Entry]
Target = TypeVar("Target")
_calls = itertools.count()


def shard(
    target: Target,
    in_strategy: Sequence[Dims | None] | Dims | None = None,
    out_strategy: Sequence[Dims | None] | Dims | None = None,
    params: Mapping[str, Dims] | None = None,
    stage: int | None = None,
    device: str | None = None,
    recompute: RecomputeSetting | Literal["auto"] = "auto",
) -> Target:
    """Annotate a module (in place), wrap a function, or mark a tensor; the search keeps it.

    Each dim takes None (not cut), the name of a mesh axis, a tuple of names (outermost first), or a
    number of slices.

    Args:
        target: A module, a function, or a tensor inside forward.
        in_strategy: For a tensor one entry for each dim. For a module or function a tuple of such
            tuples, one for each tensor input in order; None leaves an input free. Example:
            `ap.shard(torch.matmul, ((1, 1), (1, 4)))`.
        out_strategy: Entries for the outputs of a module or function, as for inputs.
        params: Entries for parameters by name, dotted from the module. Example:
            `ap.shard(model.up, params={"weight": ("tp", None)})`.
        stage: The number of the pipeline stage that begins with this module.
        device: "host" keeps the parameters of a module on the host and runs its operators there,
            as is worth it for a large embedding; "device" excepts a part of such a module.
        recompute: What of this module runs again in backward: "full", "selective", a `Recompute`,
            or None for nothing. "auto" leaves the decision to the plan.

    Returns:
        The module itself, the wrapped function, or the marked tensor.
    """
    if isinstance(target, torch.Tensor) and torch.compiler.is_dynamo_compiling():
        return target
    if isinstance(target, nn.Module):
        _require_plain(target)
    if device is not None:
        _put(target, device)
    if not (isinstance(recompute, str) and recompute == "auto"):
        _recompute(target, recompute)
    return _shard(target, in_strategy, out_strategy, params, stage)


def _shard(
    target: Any,
    in_strategy: Any,
    out_strategy: Any,
    params: Mapping[str, Dims] | None,
    stage: int | None,
) -> Any:
    if stage is not None:
        _pin(target, stage)
    if isinstance(target, torch.Tensor):
        if in_strategy is None or out_strategy is not None or params is not None:
            raise InvalidInput(
                "a tensor takes one strategy, an entry for each dim",
                got=f"in_strategy={in_strategy}, out_strategy={out_strategy}, params={params}",
                remedy='shard(x, ("dp", None))',
            )
        return _mark(target, _annotation(_dims(in_strategy, "the tensor"), "tensor"))
    if isinstance(target, nn.Module):
        return _shard_module(target, in_strategy, out_strategy, params or {})
    if callable(target):
        if params is not None:
            raise InvalidInput(
                "params= names parameters of a module; a function has none",
                got=f"{_name(target)} with params={dict(params)}",
                remedy="shard the module that owns the parameters",
            )
        return _shard_function(target, _Marks.of(in_strategy, out_strategy, _name(target), "input"))
    raise InvalidInput(
        "shard() takes a module, a function or a tensor",
        got=f"{type(target).__name__}",
        remedy="shard(model.layer, ...), shard(torch.matmul, ...) or shard(x, ...)",
    )


def _require_plain(target: nn.Module) -> None:
    for path, module in target.named_modules():
        if isinstance(module, Parallel):
            raise InvalidInput(
                "a model is annotated before it is made parallel, for a plan stays as it is",
                got=f"{path or type(module).__name__}, which belongs to a parallel module",
                remedy="annotate the plain model, then parallelize it",
            )


def _recompute(target: Any, setting: Any) -> None:
    how = Recompute.of(setting)
    if not isinstance(target, nn.Module):
        raise InvalidInput(
            "recompute= is of a module, whose operators are a region",
            got=f"recompute={setting!r} for {type(target).__name__}",
            remedy='shard(model.layers[2], recompute="full")',
        )
    _note(target, RECOMPUTE, how, "a module is recomputed in one way")


def _pin(target: Any, stage: int) -> None:
    if not isinstance(target, nn.Module) or not isinstance(stage, int) or stage < 0:
        raise InvalidInput(
            "stage= is the number of the stage that a module starts, counted from 0",
            got=f"stage={stage!r} for {type(target).__name__}",
            remedy="shard(model.layers[2], stage=1)",
        )
    _note(target, STAGE, stage, "a module starts one stage", "stage {}".format)


def _note(
    target: nn.Module, key: str, value: object, rule: str, say: Callable[[Any], str] = str
) -> None:
    """Note a fact of a module, with the user's line; refuse another value of the same fact."""
    source = caller() or ""
    earlier, before = target.__dict__.setdefault(key, (value, source))
    if earlier != value:
        raise InvalidInput(
            rule,
            got=f"{say(earlier)} at {before}\nand {say(value)} at {source}",
            remedy="remove one of them",
        )


def _put(target: Any, device: str) -> None:
    if not isinstance(target, nn.Module) or device not in ("host", "device"):
        raise InvalidInput(
            'device= says where a module is: "host", or "device"',
            got=f"device={device!r} for {type(target).__name__}",
            remedy='shard(model.embedding, device="host")',
            source=caller() or "",
        )
    _note(target, DEVICE, device, "a module is on the host, or on the device", repr)


def _shard_module(
    module: nn.Module, in_strategy: Any, out_strategy: Any, params: Mapping[str, Dims]
) -> nn.Module:
    what = type(module).__name__
    names = dict(module.named_parameters(remove_duplicate=False))
    if not isinstance(params, Mapping):
        raise InvalidInput(
            "params= maps names of parameters to strategies",
            got=f"{params!r} for {what}",
            remedy='params={"weight": ("tp", None)}',
        )
    for name, entries in params.items():
        if name not in names:
            raise InvalidInput(
                "params= names parameters of the module",
                got=f"{name!r}; {what} has {', '.join(map(repr, names)) or 'none'}",
                remedy="use one of these names",
            )
        annotation = _annotation(_dims(entries, f"parameter {name!r}"), f"{what}.{name}")
        _require_each_dim(annotation, names[name], repr(name))
        module.__dict__.setdefault(PARAMETERS, []).append((name, annotation))
    # The inputs of a leaf bind the operators that read them. Those of a composite are values.
    role = "value" if any(module.children()) else "leaf"
    marks = _Marks.of(in_strategy, out_strategy, what, role)
    if marks.inputs is not None or marks.outputs is not None:
        module.__dict__.setdefault(MARKS, []).append(marks.source)
    if marks.inputs is not None:
        module.register_forward_pre_hook(marks.before, with_kwargs=True)
    if marks.outputs is not None:
        module.register_forward_hook(marks.after)
    return module


def _shard_function(function: Callable, marks: _Marks) -> Callable:
    regions: dict[Any, Any] = {}  # compiled for DTensors, by kind of call

    @functools.wraps(function, updated=())
    def annotated(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            return marked(args, kwargs)
        if _any_dtensor(args, kwargs):
            from autopar.eager_region import run_region

            return run_region(regions, marked, args, kwargs)
        return function(*args, **kwargs)

    def marked(args: tuple, kwargs: dict) -> Any:
        args, kwargs = marks.on((args, kwargs), marks.inputs, marks.role)
        return marks.on(function(*args, **kwargs), marks.outputs, "output")

    return annotated


@dataclass(frozen=True)
class _Marks:
    """The strategies for the inputs and outputs of a module or function.

    Its methods are the hooks of a module, which can be copied and pickled.
    """

    inputs: tuple | None
    outputs: tuple | None
    what: str  # how it is called in messages
    role: str  # of its inputs
    source: str  # the line with the call of shard()

    @classmethod
    def of(cls, in_strategy: Any, out_strategy: Any, what: str, role: str) -> _Marks:
        inputs = _strategies(in_strategy, "in_strategy", what)
        return cls(
            inputs, _strategies(out_strategy, "out_strategy", what), what, role, caller() or ""
        )

    def before(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        is_seen = torch.compiler.is_exporting()
        return self.on((args, kwargs), self.inputs, self.role) if is_seen else None

    def after(self, module: nn.Module, args: tuple, result: Any) -> Any:
        return self.on(result, self.outputs, "output") if torch.compiler.is_exporting() else result

    def on(self, tree: Any, strategies: tuple | None, role: str) -> Any:
        """Mark the tensors of `tree`, in order, with one strategy each."""
        if strategies is None:
            return tree
        leaves, spec = pytree.tree_flatten(tree)
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        plural = "outputs" if role == "output" else "inputs"
        if len(tensors) != len(strategies):
            raise InvalidInput(
                f"a strategy has one entry for each of the tensor {plural}, in order",
                got=f"{len(strategies)} for {self.what} with {len(tensors)} tensor {plural}",
                remedy=f"give {len(tensors)}, None for one without a wish",
                source=self.source,
            )
        call = next(_calls)
        for position, (index, dims) in enumerate(zip(tensors, strategies)):
            if dims is not None:
                annotation = Annotation(dims, role, call, position, self.what, self.source)
                leaves[index] = _mark(leaves[index], annotation)
        return pytree.tree_unflatten(leaves, spec)


def _annotation(dims: tuple[Entry, ...], what: str) -> Annotation:
    """Return the annotation of one value, with the line that called shard()."""
    return Annotation(dims, "value", next(_calls), 0, what, caller() or "")


def _mark(tensor: torch.Tensor, annotation: Annotation) -> torch.Tensor:
    if not torch.compiler.is_exporting():
        return tensor
    where = f"({annotation.role} {annotation.index} of {annotation.what})"
    _require_each_dim(annotation, tensor, "a tensor", where)
    return annotate(tensor, annotation.encode())


def _require_each_dim(
    annotation: Annotation, tensor: torch.Tensor, name: str, where: str = ""
) -> None:
    if tensor.ndim != len(annotation.dims):
        raise InvalidInput(
            "a strategy has one entry for each dim",
            got=f"{annotation.dims} for {name} of shape {tuple(tensor.shape)} {where}".rstrip(),
            remedy=f"give {tensor.ndim} entries, None or 1 for a dim that is not cut",
            source=annotation.source,
        )


def _strategies(strategies: Any, argument: str, what: str) -> tuple | None:
    if strategies is None:
        return None
    if isinstance(strategies, str | int) or not all(
        entry is None or isinstance(entry, tuple | list) for entry in strategies
    ):
        raise InvalidInput(
            f"{argument} is a tuple with one tuple for each tensor, in order",
            got=f"{strategies!r} for {what}",
            remedy=f'{argument}=(("dp", None),) for one tensor of two dims',
        )
    return tuple(None if entry is None else _dims(entry, what) for entry in strategies)


def _dims(strategy: Any, what: str) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    for entry in strategy if isinstance(strategy, tuple | list) else (strategy,):
        if entry is None or isinstance(entry, str):
            entries.append(entry)
        elif is_count(entry):
            entries.append(int(entry))
        elif isinstance(entry, tuple | list) and all(isinstance(name, str) for name in entry):
            entries.append(tuple(entry))
        else:
            raise InvalidInput(
                "each dim takes None, an axis, a tuple of axes, or a number of slices from 1",
                got=f"{entry!r} for {what}",
                remedy='("dp", None, ("sp", "tp")) or (2, 1, 4)',
            )
    return tuple(entries)


def _any_dtensor(*trees: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(trees))


def _name(function: Callable) -> str:
    name = getattr(function, "__qualname__", None) or repr(function)
    return name.removeprefix("_VariableFunctionsClass.")  # torch.matmul and its like

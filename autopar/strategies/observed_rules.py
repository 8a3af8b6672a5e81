"""Observed: what a call whose operator has no rule computes and keeps, seen on meta tensors.

It runs whole on every rank. torch itself counts the FLOPs of its parts, forward and backward, and
autograd shows what it keeps. A call that cannot run without values is taken to keep all that it
reads and gives, and to be limited by memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from autopar._torch.operators import onednn_dtypes
from autopar._torch.tensors import memory_of
from autopar.strategies.node_info import info
from autopar.strategies.registry import OperatorCall, tensor_inputs
from autopar.strategies.results import flat_values
from autopar.strategies.rule import Dim, ExtraTensor, Rule, Saved

TEXT = "no rule: whole on every rank"


class SavedMemory(NamedTuple):
    """Of one run of a call: which inputs it keeps, whether its output, and further storages."""

    inputs: tuple[int, ...]
    output: bool
    further: tuple[int, ...]  # bytes of each


def observed_rule(node: fx.Node) -> Rule:
    """A rule by which a call runs whole on every rank, with what is seen of its work."""
    values = [info(input_).val for input_ in tensor_inputs(node)]
    sizes: dict[str, int] = {}

    def dims(value: Any, name: str) -> tuple[Dim, ...]:
        found: list[Dim] = []
        for index, size in enumerate(getattr(value, "shape", ())):
            sizes[f"{name}_{index}"] = size
            found.append((f"{name}_{index}",) if size != 1 else ())
        return tuple(found)

    inputs = tuple(dims(value, f"in{index}") for index, value in enumerate(values))
    outputs = tuple(dims(v, f"out{i}") for i, v in enumerate(info(node).values))
    forward, backward, kept = _seen(node)
    sizes = {name: size for name, size in sizes.items() if size != 1}
    whole = frozenset(sizes)
    sizes |= {f"kept{index}": size for index, size in enumerate(kept.further)}
    extra = tuple(ExtraTensor(((f"kept{i}",),), torch.uint8) for i in range(len(kept.further)))
    return Rule(
        inputs,
        outputs,
        sizes,
        whole=whole,
        flops=forward,
        backward_flops=backward,
        product=forward > 0,
        text=TEXT,
        saved=Saved(kept.inputs, kept.output, extra),
    )


def _seen(node: fx.Node) -> tuple[float, float, SavedMemory]:
    """FLOPs forward and backward on meta tensors; what is kept there, or on the device if more."""
    values = [info(value).val for value in tensor_inputs(node)]
    try:
        with torch.enable_grad():
            forward, backward, kept = _run(node, torch.device("meta"), info(node).differentiable)
            mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
            if mode is not None:
                with mode:
                    *_, here = _run(node, info(node).values[0].device)
                kept = max(kept, here, key=lambda one: _bytes(one, values))
    except Exception:  # whatever torch, or an operator of the user, raises without values
        return 0.0, 0.0, SavedMemory(tuple(range(len(values))), True, ())
    return forward, backward, kept._replace(further=(*kept.further, *_workspaces(node)))


def _run(
    node: fx.Node, device: torch.device, differentiate: bool = False
) -> tuple[float, float, SavedMemory]:
    """One call on empty tensors of a device."""
    leaves = {value: _leaf(value, device) for value in tensor_inputs(node)}
    args, kwargs = fx.map_arg((node.args, node.kwargs), leaves.__getitem__)
    # Through lists, since fx keeps its own immutable ones.
    args, kwargs = pytree.tree_map(lambda x: x, (list(args), dict(kwargs)))
    if "device" in kwargs:
        kwargs["device"] = device
    saved: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        saved.append(value)
        return value

    assert callable(node.target)
    with FlopCounterMode(display=False) as forward, saved_tensors_hooks(keep, lambda value: value):
        outputs = [x for x in flat_values(node.target(*args, **kwargs)) if isinstance(x, Tensor)]
    kept = _kept(saved, list(leaves.values()), outputs)
    given = [output for output in outputs if output.requires_grad]
    with FlopCounterMode(display=False) as backward:
        if given and differentiate:
            learns = [leaf for leaf in leaves.values() if leaf.requires_grad]
            seeds = [torch.ones_like(output) for output in given]
            torch.autograd.grad(given, learns, seeds, allow_unused=True)
    back = float(backward.get_total_flops())
    # torch counts no decompositions of matrices; each takes as much as one of its gradients.
    return max(float(forward.get_total_flops()), back / 2), back, kept


def _leaf(node: fx.Node, device: torch.device) -> Tensor:
    value: Tensor = info(node).val
    leaf = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return leaf.requires_grad_(info(node).differentiable)


def _bytes(kept: SavedMemory, inputs: Sequence[Tensor]) -> int:
    return sum(kept.further) + sum(inputs[index].nbytes for index in kept.inputs)


def _workspaces(node: fx.Node) -> Iterator[int]:
    """What oneDNN keeps of an LSTM on a CPU, as measured: no empty tensor shows it. Of each layer
    and direction it has a page, and for each sample and step numbers of gates and of states."""
    call = OperatorCall(node)
    if node.target is not torch.ops.aten.lstm.input or not info(node).differentiable:
        return
    given: Tensor = call.outputs[0]
    if given.device.type != "cpu" or given.dtype not in onednn_dtypes():
        return
    rows = given.shape[0] * given.shape[1]
    weights = call["params"][:: 4 if call["has_biases"] else 2]
    for weight in weights:
        gates, width = info(weight).val.shape
        size = 8 * rows * (gates // 4 + max(width, gates // 4))
        yield size * (4 if given.dtype is torch.float32 else 3) + 2**15


def _kept(
    saved: Sequence[Tensor], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> SavedMemory:
    """Which inputs were kept, whether an output was, and the bytes of all other storages."""

    sizes = {memory_of(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
    read = {memory_of(tensor) for tensor in inputs}
    given = {memory_of(tensor) for tensor in outputs} - read
    further = tuple(size for pointer, size in sizes.items() if pointer not in read | given)
    return SavedMemory(
        tuple(index for index, tensor in enumerate(inputs) if memory_of(tensor) in sizes),
        not given.isdisjoint(sizes),
        tuple(size for size in further if size),
    )

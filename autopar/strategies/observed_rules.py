"""Observed rules: what a call without a rule computes and keeps, seen on meta tensors.

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
    """The storages that one run of a call keeps: inputs by number, the output, and others."""

    inputs: tuple[int, ...]
    output: bool
    further: tuple[int, ...]  # bytes of each


def observed_rule(node: fx.Node) -> Rule:
    """Return a rule by which a call runs whole on every rank, with the work that is observed."""
    values = [info(input_).val for input_ in tensor_inputs(node)]
    sizes: dict[str, int] = {}

    def dims(value: Any, name: str) -> tuple[Dim, ...]:
        factors: list[Dim] = []
        for index, size in enumerate(getattr(value, "shape", ())):
            sizes[f"{name}_{index}"] = size
            factors.append((f"{name}_{index}",) if size != 1 else ())
        return tuple(factors)

    inputs = tuple(dims(value, f"in{index}") for index, value in enumerate(values))
    outputs = tuple(dims(v, f"out{i}") for i, v in enumerate(info(node).values))
    forward, backward, saved = _observe(node)
    sizes = {name: size for name, size in sizes.items() if size != 1}
    whole = frozenset(sizes)
    sizes |= {f"kept{index}": size for index, size in enumerate(saved.further)}
    extra = tuple(ExtraTensor(((f"kept{i}",),), torch.uint8) for i in range(len(saved.further)))
    return Rule(
        inputs,
        outputs,
        sizes,
        whole=whole,
        flops=forward,
        backward_flops=backward,
        product=forward > 0,
        text=TEXT,
        saved=Saved(saved.inputs, saved.output, extra),
    )


class _Observation(NamedTuple):
    forward_flops: float
    backward_flops: float
    saved: SavedMemory


def _observe(node: fx.Node) -> _Observation:
    """Run a call on meta tensors, and on the fake device, whose memory counts if it is more."""
    values = [info(value).val for value in tensor_inputs(node)]
    try:
        with torch.enable_grad():
            seen = _run(node, torch.device("meta"), differentiate=info(node).differentiable)
            saved = seen.saved
            mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
            if mode is not None:
                with mode:
                    on_device = _run(node, info(node).values[0].device).saved
                saved = max(saved, on_device, key=lambda memory: _bytes(memory, values))
    except Exception:  # whatever torch, or an operator of the user, raises without values
        return _Observation(0.0, 0.0, SavedMemory(tuple(range(len(values))), True, ()))
    return seen._replace(saved=saved._replace(further=(*saved.further, *_workspaces(node))))


def _run(node: fx.Node, device: torch.device, *, differentiate: bool = False) -> _Observation:
    """Run one call on empty tensors of a device."""
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
    memory = _saved_memory(saved, list(leaves.values()), outputs)
    roots = [output for output in outputs if output.requires_grad]
    with FlopCounterMode(display=False) as backward:
        if roots and differentiate:
            learns = [leaf for leaf in leaves.values() if leaf.requires_grad]
            seeds = [torch.ones_like(output) for output in roots]
            torch.autograd.grad(roots, learns, seeds, allow_unused=True)
    back = float(backward.get_total_flops())
    # torch counts no decompositions of matrices; each takes as much as one of its gradients.
    return _Observation(max(float(forward.get_total_flops()), back / 2), back, memory)


def _leaf(node: fx.Node, device: torch.device) -> Tensor:
    value: Tensor = info(node).val
    leaf = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return leaf.requires_grad_(info(node).differentiable)


def _bytes(memory: SavedMemory, inputs: Sequence[Tensor]) -> int:
    return sum(memory.further) + sum(inputs[index].nbytes for index in memory.inputs)


def _workspaces(node: fx.Node) -> Iterator[int]:
    """Yield the bytes that oneDNN keeps for each layer and direction of an LSTM on a CPU.

    Measured, since no empty tensor shows them: a page, and gates and states of samples and steps.
    """
    call = OperatorCall(node)
    if node.target is not torch.ops.aten.lstm.input or not info(node).differentiable:
        return
    states: Tensor = call.outputs[0]
    if states.device.type != "cpu" or states.dtype not in onednn_dtypes():
        return
    rows = states.shape[0] * states.shape[1]
    weights = call["params"][:: 4 if call["has_biases"] else 2]
    for weight in weights:
        gates, width = info(weight).val.shape
        size = 8 * rows * (gates // 4 + max(width, gates // 4))
        yield size * (4 if states.dtype is torch.float32 else 3) + 2**15


def _saved_memory(
    saved: Sequence[Tensor], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> SavedMemory:
    """Return which inputs, whether an output, and which other storages are among `saved`."""
    sizes = {memory_of(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
    read = {memory_of(tensor) for tensor in inputs}
    new = {memory_of(tensor) for tensor in outputs} - read
    further = tuple(size for pointer, size in sizes.items() if pointer not in read | new)
    return SavedMemory(
        tuple(index for index, tensor in enumerate(inputs) if memory_of(tensor) in sizes),
        not new.isdisjoint(sizes),
        tuple(size for size in further if size),
    )

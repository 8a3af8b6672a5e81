"""Host: modules that run on the host, and what crosses between it and the device.

    ids ──to_host──▶ embedding ──to_device──▶ ...

`shard(module, device="host")` keeps the parameters of a module on the host, and those of its
buffers that stay as they are; its operators run there. At its borders stand two operators that
copy, each the backward of the other; whoever reads the same value on the other side shares one
copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar._torch.operators import has_cpu_kernel
from autopar.capture.annotations import devices_of
from autopar.capture.listing import operator_name
from autopar.errors import InvalidInput
from autopar.strategies import register_rule
from autopar.strategies.node_info import info
from autopar.strategies.results import has_results, is_result, maker


@torch.library.custom_op("autopar::to_host", mutates_args=())
def to_host(x: Tensor) -> Tensor:
    return x.to("cpu", copy=True)


@torch.library.custom_op("autopar::to_device", mutates_args=())
def to_device(x: Tensor, device: torch.device | None = None) -> Tensor:
    there = x.device if device is None else device
    if there.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(there, non_blocking=True)
    return x.to(there, copy=True)


@to_host.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@to_device.register_fake
def _(x: Tensor, device: torch.device | None = None) -> Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.device = inputs[0].device


to_host.register_autograd(lambda ctx, grad: to_device(grad, ctx.device), setup_context=_remember)
to_device.register_autograd(lambda ctx, grad: (to_host(grad), None), setup_context=_remember)

TO_HOST, TO_DEVICE = torch.ops.autopar.to_host.default, torch.ops.autopar.to_device.default
CROSSINGS = (TO_HOST, TO_DEVICE)
for _crossing in CROSSINGS:
    register_rule(_crossing, "... -> ...", passes="all", flops=0.0)


def cross_to_host(
    graph: fx.Graph, model: nn.Module, kept: Mapping[str, str], tied: Mapping[str, str]
) -> None:
    """Say what is on the host, and insert what crosses. `kept`: the names of parameters, and of
    buffers that stay as they are, by placeholder."""
    devices = devices_of(model)
    if not any(device == "host" for device, _ in devices.values()):
        return
    _mark(graph, {path: device for path, (device, _) in devices.items()}, kept, tied)
    for node in graph.nodes:
        is_operator = isinstance(node.target, torch._ops.OpOverload)
        if info(node).on_host and is_operator and not has_cpu_kernel(node.target):
            raise InvalidInput(
                "a module on the host has operators that run there",
                got=f"{operator_name(node.target)} in {info(node).module}, which no CPU runs",
                remedy="keep the module on the device",
                source=info(node).source,
            )
    crossed: dict[tuple[fx.Node, bool], fx.Node] = {}
    for node in list(graph.nodes):
        for value in node.all_input_nodes if not is_result(node) else ():
            there = info(node).on_host if node.op == "call_function" else False
            if info(value).on_host == there or has_results(value):
                continue
            if (value, there) not in crossed:
                crossed[value, there] = _cross(graph, value, node)
            node.replace_input_with(value, crossed[value, there])


def _mark(
    graph: fx.Graph,
    devices: Mapping[str, str],
    kept: Mapping[str, str],
    tied: Mapping[str, str],
) -> None:
    names: dict[str, list[str]] = {}
    for alias, name in tied.items():
        names.setdefault(name, []).append(alias)
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in kept:
            name = kept[node.name]
            info(node).on_host = any(
                _is_there(one, devices) for one in (name, *names.get(name, ()))
            )
        elif is_result(node):
            info(node).on_host = info(maker(node)).on_host
        elif node.op == "call_function":
            # A master is cast where it is.
            is_cast = node.target is torch.ops.aten.to.dtype and _are_kept_there(node)
            info(node).on_host = is_cast or _is_there(info(node).module, devices)


def _are_kept_there(node: fx.Node) -> bool:
    return all(value.op == "placeholder" and info(value).on_host for value in node.all_input_nodes)


def _is_there(path: str, devices: Mapping[str, str]) -> bool:
    """Whether the innermost module of a path that says where it is says the host."""
    return next((devices[p] for p in _around(path) if p in devices), "device") == "host"


def _around(path: str) -> Iterable[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _cross(graph: fx.Graph, value: fx.Node, reader: fx.Node) -> fx.Node:
    """Where the first reader wants it."""
    goes_up = info(value).on_host
    with graph.inserting_before(reader):
        if goes_up:
            made = graph.create_node(
                "call_function", TO_DEVICE, (value,), {"device": None}, name="to_device"
            )
        else:
            made = graph.create_node("call_function", TO_HOST, (value,), name="to_host")
    about = value if reader.op == "output" else reader
    info(made).update(
        val=info(value).val,
        source=info(about).source,
        module=info(about).module,
        differentiable=info(value).differentiable,
        on_host=not goes_up,
        checkpoint=info(about).checkpoint,
        policy=info(about).policy,
    )
    return made

"""Hosting: whether states may be on the host, and what that takes at least."""

from __future__ import annotations

from torch import nn

from autopar.capture.annotations import devices_of
from autopar.capture.captured import Captured
from autopar.capture.origins import state_bytes
from autopar.errors import InvalidInput
from autopar.planner.request import Request
from autopar.states import States
from autopar.strategies.node_info import info


def may_go(model: nn.Module, asked: States | None) -> bool:
    """Whether states may go to the host; refuse them where a module is to be on the device."""
    devices = devices_of(model)
    stays = [(path, at) for path, (device, at) in devices.items() if device == "device"]
    within = [path for path, (device, _) in devices.items() if device == "host"]
    stays = [one for one in stays if not any(f"{one[0]}.".startswith(f"{p}.") for p in within)]
    if stays and asked is not None and asked.is_on_host:
        raise InvalidInput(
            "a module that is to be on the device has no states on the host",
            got=f"{stays[0][0]}, with states {asked}",
            remedy='no device="device" for it, or states on the device',
            source=stays[0][1],
        )
    return not stays


def least_update(captured: Captured, request: Request) -> float:
    """The seconds by which a step is longer, at least, where hosts update all that learns: each
    device's host a part that is no larger than others'."""
    cluster, devices = request.cluster, request.cluster.devices
    host = cluster.strongest(range(devices)).host
    nodes = captured.graph.find_nodes(op="placeholder")
    learned = [n for n in nodes if n.name in captured.parameters and info(n).learns]
    moved = sum(info(n).val.numel() * state_bytes(n).updated * info(n).times for n in learned)
    return max(0.0, moved / devices * (1 / host.bandwidth - 1 / cluster.device.throughput))

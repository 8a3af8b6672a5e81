"""Hosting: whether states may be on the host."""

from __future__ import annotations

from torch import nn

from autopar.capture.annotations import devices_of
from autopar.errors import InvalidInput
from autopar.states import States


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

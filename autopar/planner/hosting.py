"""Hosting: whether states may be on the host."""

from __future__ import annotations

from torch import nn

from autopar.capture.annotations import devices_of
from autopar.errors import InvalidInput
from autopar.states import States


def may_go(model: nn.Module, states: States | None) -> bool:
    """Return whether states may go to the host; refuse them where a module stays on the device."""
    devices = devices_of(model)
    stays = [(path, at) for path, (device, at) in devices.items() if device == "device"]
    hosted = [path for path, (device, _) in devices.items() if device == "host"]
    stays = [
        (path, at) for path, at in stays if not any(f"{path}.".startswith(f"{p}.") for p in hosted)
    ]
    if stays and states is not None and states.is_on_host:
        raise InvalidInput(
            "a module that is to be on the device has no states on the host",
            got=f"{stays[0][0]}, with states {states}",
            remedy='no device="device" for it, or states on the device',
            source=stays[0][1],
        )
    return not stays

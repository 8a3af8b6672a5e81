"""Autocasts: automatic precision, in forward or around the capture of it, is part of the program.

    with torch.autocast("cuda", torch.bfloat16):
        pm = ap.parallelize(model, inputs)
    pm.step(x)                                  # casts as it was captured

Within forward, and around capture, it becomes casts (flatten.py). A program that has them runs
alike wherever it is called; where nothing was captured, nothing can be cast later.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from autopar.capture.hooks import while_it_runs
from autopar.capture.source import of_stack
from autopar.errors import InvalidInput
from autopar.text.source_lines import caller

_RULE = "autocast casts on the device that a model is captured on"
_REMEDY = (
    "device_type=x.device.type; where the model is planned on the CPU or the meta device for "
    "others, precision=ap.Precision(compute=torch.bfloat16)"
)


@dataclass(frozen=True)
class Autocast:
    """Automatic precision that a caller has switched on."""

    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f'torch.autocast("{self.device}", {self.dtype})'


def active() -> tuple[Autocast, ...]:
    """What is switched on here."""
    own = torch.accelerator.current_accelerator()
    devices = dict.fromkeys(["cpu", "cuda", *([own.type] if own is not None else [])])
    return tuple(
        Autocast(device, torch.get_autocast_dtype(device))
        for device in devices
        if torch.is_autocast_enabled(device)
    )


@contextmanager
def switched(autocasts: Sequence[Autocast]) -> Iterator[None]:
    """These, and no others that a caller has switched on."""
    before = active()
    with ExitStack() as stack:
        for one in before:
            if one not in autocasts:
                stack.enter_context(torch.autocast(one.device, one.dtype, enabled=False))
        for one in autocasts:
            if one not in before:
                stack.enter_context(torch.autocast(one.device, one.dtype))
        yield


def require_on(device: torch.device, autocasts: Sequence[Autocast]) -> None:
    """Refuse what is switched on around a capture, and casts nothing there."""
    for one in autocasts:
        if one.device != device.type:
            _refuse(f"{one} around a model on the {device.type}", None)


@contextmanager
def inside(model: nn.Module, autocasts: Sequence[Autocast]) -> Iterator[None]:
    """These as a part of the forward of `model`, for whoever follows that."""
    if not autocasts:
        yield
        return
    with while_it_runs(model, partial(switched, autocasts)):
        yield


@contextmanager
def idle_refused() -> Iterator[None]:
    """Refuse what torch itself switches off while forward is followed."""
    lines: list[str | None] = []

    def note(*args: Any, **kwargs: Any) -> None:
        frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
        own = next((f for f in frames if f.f_code is torch.autocast.__init__.__code__), None)
        if own is not None and own.f_locals.get("enabled"):
            lines.append(caller())
        else:
            show(*args, **kwargs)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=r"[\s\S]*[Dd]isabling")
        show = warnings.showwarning
        warnings.showwarning = note
        yield
    if lines:
        _refuse("one for a device or a dtype that torch has no autocast for here", lines[0])


def require_casting(program: ExportedProgram) -> None:
    """Refuse an autocast in forward around nothing that it could cast."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.target is torch.ops.higher_order.wrap_with_autocast:
                device, _, enabled, _, body = node.args[:5]
                inner = getattr(module, body.target)
                if enabled:
                    _require_any_on(torch.device(device).type, inner)


def _require_any_on(device: str, body: fx.GraphModule) -> None:
    calls = [node for node in body.graph.nodes if node.op == "call_function"]
    values = [node.meta.get("val") for node in calls]
    there = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    if there and device not in there:
        stack = next((node.meta.get("stack_trace") for node in calls), None)
        got = f'torch.autocast("{device}") around what is computed on the {", ".join(there)}'
        _refuse(got, of_stack(stack))


def require_same(captured: Sequence[Autocast]) -> None:
    """Refuse a call under another autocast than the program's own."""
    found = active()
    if found and found != tuple(captured):
        raise InvalidInput(
            "autocast is part of the program that was captured",
            got=f"{', '.join(map(str, found))} around a call of a program captured "
            f"{'under ' + ', '.join(map(str, captured)) if captured else 'without it'}",
            remedy="put it around parallelize(), which keeps it for every call, or into forward; "
            "or parallelize with precision=ap.Precision(compute=torch.bfloat16)",
        )


def _refuse(got: str, source: str | None) -> NoReturn:
    raise InvalidInput(_RULE, got=got, remedy=_REMEDY, source=source)

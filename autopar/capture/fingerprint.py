"""Fingerprint: what a captured model is to a plan, as plain text that two sides can compare.

    made = fingerprint_of(captured)
    made.differences(Fingerprint.from_json(saved))     # [] or lines that name what differs

Where tensors are (the meta device, a GPU) is no part of it, nor is the data of parameters. Of an
annotation the wish counts, not the line where it stands.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.listing import operator_name, type_text
from autopar.capture.marker import ANNOTATE, Annotation

_SHOWN = 4  # differences of one sort that a message lists
_PLAIN = (int, float, bool, str, complex, type(None), torch.dtype)


@dataclass(frozen=True)
class Fingerprint:
    """A model with its inputs; every tensor as its type without layout."""

    torch: str  # major.minor
    arguments: str  # how the model is called, and with which values that are no tensors
    inputs: Mapping[str, str]  # placeholder -> type
    parameters: Mapping[str, str]  # name in the model -> type
    buffers: Mapping[str, str]
    operators: tuple[str, ...]  # `name = operator(arguments): type`

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "operators": list(self.operators)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fingerprint:
        return cls(**{**data, "operators": tuple(data["operators"])})

    def differences(self, other: Fingerprint) -> list[str]:
        """What `self` has and `other` has not, the most telling first; empty if they are equal."""
        found = []
        if self.torch != other.torch:
            found.append(f"torch {self.torch}, not {other.torch}")
        for what in ("inputs", "parameters", "buffers"):
            found += _named(what.removesuffix("s"), getattr(self, what), getattr(other, what))
        if self.arguments != other.arguments:
            found.append(f"called with {self.arguments}, not {other.arguments}")
        pairs = itertools.zip_longest(self.operators, other.operators, fillvalue="nothing")
        lines = [f"{one}\n  not {two}" for one, two in pairs if one != two]
        if lines and not found:
            found.append(lines[0])
            if len(lines) > 1:
                found.append(f"and {len(lines) - 1} more operators")
        return found


def fingerprint_of(captured: Captured) -> Fingerprint:
    """The fingerprint of a model on this torch."""
    types = {n.name: _type(n) for n in captured.graph.nodes if n.op == "placeholder"}
    return Fingerprint(
        torch=".".join(torch.__version__.split(".")[:2]),
        arguments=_arguments(captured),
        inputs={name: types[name] for name in captured.inputs if name is not None},
        parameters=_by_name(captured.parameters, types),
        buffers=_by_name(captured.buffers, types),
        operators=tuple(_call(n) for n in captured.graph.nodes if n.op != "placeholder"),
    )


def _by_name(names: Mapping[str, str], types: Mapping[str, str]) -> dict[str, str]:
    return {name: types[placeholder] for placeholder, name in names.items()}


def _type(node: fx.Node) -> str:
    gradient = ", with gradient" if node.meta.get("differentiable") else ""
    return type_text(node) + gradient


def _call(node: fx.Node) -> str:
    if node.target is ANNOTATE:
        wish = Annotation.decode(str(node.args[1]))
        arguments = f"{node.args[0]}, {wish.dims}, {wish.role} {wish.index}"
    else:
        arguments = ", ".join(
            [*map(_argument, node.args), *(f"{k}={_argument(v)}" for k, v in node.kwargs.items())]
        )
    if node.op == "output":
        return f"return {arguments}"
    return f"{node.name} = {operator_name(node.target)}({arguments}): {_type(node)}"


def _argument(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]"
    return "a device" if isinstance(value, torch.device) else str(value)


def _arguments(captured: Captured) -> str:
    positional, keywords = captured.input_spec.children()
    names = ", ".join(map(str, keywords.context or ()))
    values = [
        f"{index}: {value if isinstance(value, _PLAIN) else type(value).__name__}"
        for index, value in captured.static_inputs.items()
    ]
    text = f"{positional.num_children} positional arguments and keywords ({names})"
    return f"{text}, of these no tensors {{{', '.join(values)}}}" if values else text


def _named(what: str, mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The differences of two mappings, by name."""
    lines = []
    for name in dict.fromkeys([*mine, *theirs]):
        one, two = mine.get(name), theirs.get(name)
        if one is None:
            lines.append(f"no {what} {name}: {two}")
        elif two is None:
            lines.append(f"{what} {name}: {one}, which is not there")
        elif one != two:
            lines.append(f"{what} {name}: {one}, not {two}")
    more = len(lines) - _SHOWN
    return lines[:_SHOWN] + ([f"and {more} more {what}s"] if more > 0 else [])

"""Fingerprint: what a captured model is to a plan, as plain text that two sides can compare.

    made = fingerprint_of(captured)
    made.differences(schema.read(Fingerprint, saved))     # [] or lines that name what differs

Constants are compared by value: they are part of the program. Where tensors are (the meta device, a
GPU) is no part of it, nor are the values of parameters and buffers. Of an annotation the wish
counts, not the line where it stands.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.annotations import wishes_of
from autopar.capture.captured import Captured
from autopar.capture.containers import Content, Made, shown
from autopar.capture.fake import FakeTensor
from autopar.capture.listing import operator_name, type_text
from autopar.capture.marker import ANNOTATE, Annotation
from autopar.capture.writes import Write
from autopar.strategies.node_info import info
from autopar.text.units import counted

_SHOWN = 4  # differences of one sort that a message lists
_PLAIN = (int, float, bool, str, complex, type(None), torch.dtype)
_NUMBER = re.compile(r"(?<![\w.])-?\d+(\.\d+)?(e[+-]?\d+)?\b")
_UNKNOWN = ", value unknown"  # of a constant on the meta device


@dataclass(frozen=True)
class Fingerprint:
    """A model with its inputs; every tensor as its type without layout."""

    torch: str  # major.minor
    arguments: str  # how the model is called, and with which values that are no tensors
    inputs: Mapping[str, str]  # placeholder -> type
    parameters: Mapping[str, str]  # name in the model -> type
    buffers: Mapping[str, str]
    tied: Mapping[str, str]  # other name of a parameter -> the name under which it is kept
    constants: Mapping[str, str]  # placeholder -> type and a hash of the value
    operators: tuple[str, ...]  # `name = operator(arguments): type`
    # The structure of what the model returns, what of it is no tensor, and what forward writes to.
    returns: str
    # What shard() said beside operators, with its lines; None in a file that does not tell.
    wishes: Mapping[str, str] | None = field(default=None, compare=False)
    places: tuple[str, ...] = field(  # of operators
        default=(), compare=False, metadata={"stored": False}
    )

    @cached_property
    def form(self) -> Hashable:
        """The same without sizes, and without values of constants, which may follow from these."""
        kept = (self.parameters, self.buffers, self.tied)
        plain = (tuple(sorted(names.items())) for names in kept)
        lines = (_NUMBER.sub("#", line) for line in (self.arguments, *self.operators, self.returns))
        return (*plain, tuple(self.inputs), tuple(self.constants), tuple(lines))

    @property
    def is_complete(self) -> bool:
        """Whether the value of every constant is known."""
        return not any(text.endswith(_UNKNOWN) for text in self.constants.values())

    def differences(self, other: Fingerprint) -> list[str]:
        """What `self` has and `other` has not, the most telling first; empty if they are equal."""
        found = []
        if self.torch != other.torch:
            found.append(f"torch {self.torch}, not {other.torch}")
        for what in ("inputs", "parameters", "buffers"):
            found += _named(what.removesuffix("s"), getattr(self, what), getattr(other, what))
        found += _named("tied parameter", self.tied, other.tied)
        if self.arguments != other.arguments:
            found.append(f"called with {self.arguments}, not {other.arguments}")
        if not found:
            found = self._other_operators(other)
        if not found and self.returns != other.returns:
            found.append(f"returns {self.returns}, not {other.returns}")
        return found or self._other_constants(other)

    def _other_operators(self, other: Fingerprint) -> list[str]:
        pairs = itertools.zip_longest(self.operators, other.operators, fillvalue="nothing")
        places = itertools.chain(self.places, itertools.repeat(""))
        lines = [
            f"{one}{place}\n  not {two}" for (one, two), place in zip(pairs, places) if one != two
        ]
        return lines[:1] + (
            [f"and {counted(len(lines) - 1, 'more operator')}"] if len(lines) > 1 else []
        )

    def _other_constants(self, other: Fingerprint) -> list[str]:
        """Those whose values differ, as far as both sides know them."""
        known = {
            name
            for name in self.constants.keys() | other.constants.keys()
            if not (self.constants.get(name, "") + other.constants.get(name, "")).count(_UNKNOWN)
        }
        mine, theirs = (
            {name: text for name, text in side.constants.items() if name in known}
            for side in (self, other)
        )
        readers = {
            name: line + place
            for line, place in zip(self.operators, self.places)
            for name in known
            if re.search(rf"\b{name}\b", line)
        }
        found = _named("constant", mine, theirs)
        first = next((name for name in mine if mine[name] != theirs.get(name)), None)
        return found + ([f"read by {readers[first]}"] if first in readers else [])


def fingerprint_of(captured: Captured) -> Fingerprint:
    """The fingerprint of a model on this torch."""
    types = {n.name: _type(n) for n in captured.graph.nodes if n.op == "placeholder"}
    calls = [node for node in captured.graph.nodes if node.op != "placeholder"]
    return Fingerprint(
        torch=".".join(torch.__version__.split(".")[:2]),
        arguments=_arguments(captured),
        inputs={name: types[name] for name in captured.inputs if name is not None},
        parameters=_by_name(captured.parameters, types),
        buffers=_by_name(captured.buffers, types),
        tied=dict(captured.tied),
        constants={
            name: types[name] + _value(tensor) for name, tensor in captured.constants.items()
        },
        operators=tuple(map(_call, calls)),
        returns=_returns(captured),
        wishes=wishes_of(captured.example.model),
        places=tuple(map(_place, calls)),
    )


def _value(constant: Tensor) -> str:
    """A hash of a constant's bytes."""
    if isinstance(constant, FakeTensor) or constant.device.type == "meta":
        return _UNKNOWN
    plain = constant.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
    data = plain.view(torch.uint8).numpy().tobytes()
    return f", sha256 {hashlib.sha256(data).hexdigest()[:32]}"


def _place(node: fx.Node) -> str:
    """Where an operator stands: its module and the user's line."""
    module, source = info(node).module, info(node).source
    within = f" in {module}" if module else ""
    return f"{within} ({source})" if source else within


def _by_name(names: Mapping[str, str], types: Mapping[str, str]) -> dict[str, str]:
    return {name: types[placeholder] for placeholder, name in names.items()}


def _type(node: fx.Node) -> str:
    gradient = ", with gradient" if info(node).differentiable else ""
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
    text = f"{node.name} = {operator_name(node.target)}({arguments})"
    return f"{text}: {_type(node)}" if "val" in node.meta else text


def _argument(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, torch.device):
        return "a device"
    return repr(value) if isinstance(value, str) else str(value)


def _arguments(captured: Captured) -> str:
    positional, keywords = captured.input_spec.children()
    names = ", ".join(map(str, keywords.context or ()))
    text = f"{positional.num_children} positional arguments and keywords ({names})"
    nested = [*positional.children(), *keywords.children()]
    if any(not argument.is_leaf() for argument in nested):
        text += f" as {_structure(captured.input_spec)}"
    values = [f"{index}: {_plain(value)}" for index, value in captured.static_inputs.items()]
    return f"{text}, of these no tensors {{{', '.join(values)}}}" if values else text


def _returns(captured: Captured) -> str:
    leaves = captured.output_leaves
    values = [f"{i}: {_plain(v)}" for i, v in enumerate(leaves) if not isinstance(v, fx.Node)]
    text = _structure(captured.output_spec)
    text += f", new values of {', '.join(captured.mutations)}" if captured.mutations else ""
    text += "".join(f", {one.target} becomes {_written(one)}" for one in captured.writes)
    text += "".join(f", {shown(one.path)} holds {_left(one)}" for one in captured.contents)
    text += "".join(f", {one}" for one in captured.effects)
    text += "".join(f", {cache}" for cache in captured.caches)
    text += "".join(f", {name} within {one}" for name, one in captured.bounds.items())
    return f"{text}, of these no tensors {{{', '.join(values)}}}" if values else text


def _left(content: Content) -> str:
    """What a container holds, as a line."""
    named = pytree.tree_map_only(Made, lambda made: f"({_written(made)})", content.items)
    return str(named)


def _written(write: Write | Made) -> str:
    """What an input becomes, as a line."""
    lines = [_call(node) for node in write.graph.nodes if node.op != "placeholder"]
    given = [f"{name} is {placeholder}" for name, placeholder in write.inputs.items()]
    given += [f"{name} is{_value(tensor)}" for name, tensor in write.constants.items()]
    return "; ".join([*lines, *given])


def _plain(value: Any) -> str:
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


def _structure(spec: pytree.TreeSpec) -> str:
    """Nested containers with their keys: `dict(loss=*, logits=*)`."""
    if spec.is_leaf():
        return "*"
    context = spec.context
    keys = context if isinstance(context, list | tuple) else ()
    is_named = len(keys) == spec.num_children and all(isinstance(key, str) for key in keys)
    names = [f"{key}=" for key in keys] if is_named else [""] * spec.num_children
    inside = ", ".join(name + _structure(child) for name, child in zip(names, spec.children()))
    return f"{getattr(spec.type, '__name__', spec.type)}({inside})"


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

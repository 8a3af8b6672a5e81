"""Marker: how an annotation travels through capture, as an identity operator that holds its text.

    x ──▶ autopar.annotate(x, '{"dims": ["dp", null], ...}') ──▶

Eager code never runs one: `shard` emits markers only while a model is being exported.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch

from autopar.strategies import Traits, register_rule

Entry = None | str | int | tuple[str, ...]


@dataclass(frozen=True)
class Annotation:
    """What the user asked of one tensor, and where."""

    dims: tuple[Entry, ...]  # names of axes, or a number of slices, for each dim
    role: str  # "value" (a tensor), "leaf" or "input" (read by a leaf module, a function), "output"
    call: int  # annotations of one call share a number
    index: int  # which input or output of the call
    what: str  # how the call is called in messages
    source: str  # the line with the call of shard()

    @property
    def layout(self) -> tuple[Entry, ...]:
        """Return the dims, each in the one way to write it: an axis alone stands in no tuple."""
        return tuple(_plain(entry) for entry in self.dims)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Annotation:
        data = json.loads(text)
        dims = tuple(tuple(d) if isinstance(d, list) else d for d in data.pop("dims"))
        return cls(dims=dims, **data)


def _plain(entry: Entry) -> Entry:
    is_short = isinstance(entry, tuple) and len(entry) < 2
    return (entry[0] if entry else None) if is_short else entry  # type: ignore[index]


@torch.library.custom_op("autopar::annotate", mutates_args=())
def annotate(x: torch.Tensor, spec: str) -> torch.Tensor:
    return x.clone()


@annotate.register_fake
def _(x: torch.Tensor, spec: str) -> torch.Tensor:
    return torch.empty_like(x)


ANNOTATE = torch.ops.autopar.annotate.default
register_rule(ANNOTATE, "... -> ...", passes="all", flops=0.0, traits=Traits(view=True))

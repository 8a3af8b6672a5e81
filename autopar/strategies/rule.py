"""Rule and Strategy: what an operator can do, and what it was told to do.

A rule names, for each dim of each tensor, the factor that runs over it. A strategy gives mesh axes
to factors. Everything else follows: the layouts of inputs and outputs, and of all gradients.

>>> rule = parse("m k, k n -> m n", ((8, 4), (4, 6)))
>>> signature = rule.signature(Strategy.of(m="dp", k="tp"))
>>> signature.outputs[0]
[@dp, _]{+tp}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.layout import Layout

Dim = tuple[str, ...]  # the factors of one dim, outermost first; () for a dim of size 1


@dataclass(frozen=True)
class Strategy:
    """Every mesh axis given to a factor, to a partial sum that passes through, or to nothing."""

    cuts: tuple[tuple[str, tuple[str, ...]], ...] = ()  # factor -> its axes, outermost first
    passes: tuple[tuple[str, int], ...] = ()  # axis -> index into Rule.passes

    @classmethod
    def of(cls, passes: Mapping[str, int] | None = None, **cuts: str | tuple[str, ...]) -> Strategy:
        """Build from keyword arguments: `Strategy.of(b="dp", h=("tp", "sp"))`."""
        named = {f: (axes,) if isinstance(axes, str) else tuple(axes) for f, axes in cuts.items()}
        return cls(
            tuple(sorted((f, axes) for f, axes in named.items() if axes)),
            tuple(sorted((passes or {}).items())),
        )

    @property
    def by_factor(self) -> dict[str, tuple[str, ...]]:
        return dict(self.cuts)


@dataclass(frozen=True)
class Signature:
    """The layouts that a strategy fixes. `gradients[i].partial` are the axes over which the
    gradient of input i arrives as a partial sum although the input itself is a replica."""

    inputs: tuple[Layout, ...]
    gradients: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


@dataclass(frozen=True)
class Rule:
    """What one call of an operator can do, with the sizes of that call."""

    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()  # factors that no axis may cut
    even: frozenset[str] = frozenset()  # factors that may be cut only into equal pieces
    passes: tuple[frozenset[int], ...] = ()  # inputs that may be partial sums together
    kernels: Mapping[str, str] = field(default_factory=dict)  # factor -> kernel needed to cut it
    flops: float = 0.0  # of the uncut forward
    text: str = ""

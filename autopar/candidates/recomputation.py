"""Recomputation: which regions run again in backward, as is asked for, or as memory asks for it.

Every region costs the seconds of its forward and spares what it does not keep. Which ones do, as
memory asks for it, is told in `mixed_problem`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from autopar.capture.annotations import MarkedRegion
from autopar.capture.captured import Captured
from autopar.capture.regions import blocks, checkpoints, found
from autopar.cluster import Host
from autopar.errors import InvalidInput
from autopar.recompute import FULL, PLAIN, SELECTIVE, Recompute
from autopar.strategies.node_info import info

KINDS = (PLAIN, SELECTIVE, FULL)
LEANER = (Recompute("full", "cut"), Recompute("full", "host"))  # where no others fit
# In the stages of a pipeline, whose regions are all treated alike.
STAGED = (PLAIN, Recompute(None, "cut"), SELECTIVE, Recompute("selective", "cut"), FULL)


@dataclass(frozen=True)
class AskedRecomputation:
    """What is asked for of the program's own regions, and of modules by name or pattern."""

    blocks: Literal["auto"] | Recompute = "auto"
    modules: Mapping[str, Recompute] = field(default_factory=dict)


class Regions:
    """The regions of one program: what must be, and what is left to choose."""

    def __init__(
        self,
        captured: Captured,
        asked: AskedRecomputation,
        marked: Sequence[MarkedRegion] = (),
    ) -> None:
        """`marked`: what annotations ask for, of modules, with their lines."""
        self.fixed: dict[str, Recompute] = dict.fromkeys(checkpoints(captured), FULL)
        own = blocks(captured)
        paths = {info(node).module.partition("@")[0] for node in captured.operators}
        modules = {p for path in paths for p in _prefixes(path)}
        named: dict[str, Recompute] = {}
        for pattern, kind in asked.modules.items():
            if pattern in self.fixed and kind == FULL:  # as it is
                continue
            matched = [name for name in (*sorted(modules), *own) if fnmatchcase(name, pattern)]
            if not matched:
                raise _unknown(pattern, [*own, *sorted(modules)])
            named |= {name: kind for name in matched if not _is_below(name, matched)}
        _require_agreement(marked, asked, named)
        _require_free_of_checkpoints(marked, captured)
        named |= {one.module: one.how for one in marked}
        for one in marked:
            if one.module not in modules:
                rule = "a module that is recomputed runs inside the model that is planned"
                remedy = "annotate modules inside it, or remove the annotation"
                raise InvalidInput(rule, got=one.name, remedy=remedy, source=one.source)
        outer = {name: kind for name, kind in named.items() if not _is_below(name, named)}
        covered = _covered(captured, self.fixed, outer)
        self.fixed |= {n: how for n, how in outer.items() if not how.is_plain and n not in covered}
        free = [n for n in own if n not in outer and not _is_below(n, outer)]
        if asked.blocks == "auto":  # what is said of a part is not chosen with the whole
            free = [n for n in free if not any(_is_below(part, [n]) for part in outer)]
        left = found(captured, (*self.fixed, *free)) if self.fixed else free
        self.free = tuple(name for name in free if name in left)
        self.kinds = KINDS if asked.blocks == "auto" and self.free else (self._plain(asked),)

    @property
    def staged(self) -> tuple[Recompute, ...]:
        """The ways to treat all of them in a pipeline, of which in the last all run again; what
        keeps pieces comes after what keeps the same whole."""
        return STAGED if len(self.kinds) > 1 else self.kinds

    def leaner(self, host: Host) -> tuple[Recompute, ...]:
        """Further ways, which are weighed where none of these fits."""
        if len(self.kinds) == 1:
            return ()
        return tuple(how for how in LEANER if how.keep != "host" or not host.is_device)

    def _plain(self, asked: AskedRecomputation) -> Recompute:
        return PLAIN if asked.blocks == "auto" else asked.blocks

    def all(self, how: Recompute) -> dict[str, Recompute]:
        """The decisions that treat all alike that are left to choose."""
        return self.fixed | ({} if how.is_plain else dict.fromkeys(self.free, how))


def _require_agreement(
    marked: Sequence[MarkedRegion], asked: AskedRecomputation, named: Mapping[str, Recompute]
) -> None:
    """Refuse annotations that contradict each other, or what is asked for by option."""
    rule = "what is recomputed of a module is said in one way"
    for one in marked:
        if isinstance(asked.blocks, Recompute) and not asked.modules and asked.blocks != one.how:
            raise _refused(rule, one, f"recompute={str(asked.blocks)!r} for the whole program")
        for name, how in named.items():
            if how != one.how and _are_nested(name, one.module):
                raise _refused(rule, one, f"recompute={{{name!r}: {str(how)!r}}}")
        for other in marked:
            if other.how != one.how and _are_nested(other.module, one.module):
                raise _refused(rule, one, f"{other.how} for {other.name} at {other.source}")


def _require_free_of_checkpoints(marked: Sequence[MarkedRegion], captured: Captured) -> None:
    for one in marked:
        for node in captured.operators if one.how != FULL else ():
            is_inside = f"{info(node).module}.".startswith(f"{one.module}.")
            if is_inside and info(node).checkpoint is not None:
                rule = "what the model wraps in torch.utils.checkpoint is recomputed in full"
                raise _refused(rule, one, f"a checkpoint at {info(node).source}")


def _covered(
    captured: Captured, wrapped: Mapping[str, Recompute], asked: Mapping[str, Recompute]
) -> list[str]:
    """The names that are asked for and have nothing outside what the user wrapped: that is
    recomputed in full, and they may ask for nothing else."""
    left = found(captured, (*wrapped, *asked)) if wrapped else asked
    covered = [name for name in asked if name not in left]
    for name in covered:
        if asked[name] != FULL:
            raise InvalidInput(
                "what the model wraps in torch.utils.checkpoint is recomputed in full",
                got=f"recompute={{{name!r}: {str(asked[name])!r}}}, all of it inside a checkpoint",
                remedy='"full" for it, or no checkpoint around it',
            )
    return covered


def _are_nested(one: str, other: str) -> bool:
    return one == other or _is_below(one, [other]) or _is_below(other, [one])


def _refused(rule: str, one: MarkedRegion, beside: str) -> InvalidInput:
    return InvalidInput(
        rule,
        got=f"{one.how} for {one.name}\nbeside {beside}",
        remedy="remove one of them",
        source=one.source,
    )


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))] if path else []


def _is_below(name: str, others: Sequence[str] | Mapping[str, Recompute]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def _unknown(pattern: str, known: Sequence[str]) -> InvalidInput:
    known = list(dict.fromkeys(known))
    close = difflib.get_close_matches(pattern, known, 4, 0.4) or known[:4]
    return InvalidInput(
        "recompute names modules of the model that run, or patterns of such names",
        got=repr(pattern),
        remedy=f"close to it: {', '.join(close)}" if close else "leave it out",
    )

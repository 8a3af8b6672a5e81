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
from autopar.errors import InvalidInput
from autopar.recompute import FULL, PLAIN, POLICY, SELECTIVE, Recompute
from autopar.strategies.node_info import info

KINDS = (PLAIN, SELECTIVE, FULL)
# In the stages of a pipeline, whose regions are all treated alike.
STAGED = (PLAIN, Recompute(None, "cut"), SELECTIVE, Recompute("selective", "cut"), FULL)


@dataclass(frozen=True)
class AskedRecomputation:
    """The requested recomputation of the program's regions, and of modules by name or pattern."""

    blocks: Literal["auto"] | Recompute = "auto"
    modules: Mapping[str, Recompute] = field(default_factory=dict)


class Regions:
    """The regions of one program: what must be, and what is left to choose."""

    def __init__(
        self,
        captured: Captured,
        request: AskedRecomputation,
        marked: Sequence[MarkedRegion] = (),
    ) -> None:
        """`marked`: modules that annotations name, with what they ask for and their lines."""
        self.fixed: dict[str, Recompute] = checkpoints(captured)
        block_names = blocks(captured)
        paths = {info(node).module.partition("@")[0] for node in captured.operators}
        modules = {p for path in paths for p in _prefixes(path)}
        named: dict[str, Recompute] = {}
        for pattern, kind in request.modules.items():
            if self.fixed.get(pattern) == kind:  # as it is
                continue
            matched = [
                name for name in (*sorted(modules), *block_names) if fnmatchcase(name, pattern)
            ]
            if not matched:
                raise _unknown(pattern, [*block_names, *sorted(modules)])
            named |= {name: kind for name in matched if not _is_below(name, matched)}
        _require_agreement(marked, request, named)
        _require_free_of_checkpoints(marked, captured)
        named |= {region.module: region.how for region in marked}
        for region in marked:
            if region.module not in modules:
                rule = "a module that is recomputed runs inside the model that is planned"
                remedy = "annotate modules inside it, or remove the annotation"
                raise InvalidInput(rule, got=region.name, remedy=remedy, source=region.source)
        outer = {name: kind for name, kind in named.items() if not _is_below(name, named)}
        covered = _covered(captured, self.fixed, outer)
        self.fixed |= {n: how for n, how in outer.items() if not how.is_plain and n not in covered}
        free = [n for n in block_names if n not in outer and not _is_below(n, outer)]
        if request.blocks == "auto":  # what is said of a part is not chosen with the whole
            free = [n for n in free if not any(_is_below(part, [n]) for part in outer)]
        left = found(captured, (*self.fixed, *free)) if self.fixed else free
        self.free = tuple(name for name in free if name in left)
        self.kinds = KINDS if request.blocks == "auto" and self.free else (self._plain(request),)

    @property
    def by_policy(self) -> tuple[str, ...]:
        """Return the regions that a policy by option is for; refuse one that is for none."""
        if not self.free:
            raise InvalidInput(
                "a policy is for the program's own blocks that no other key names",
                got="recompute={'policy': ...} for a program of which no such block is left",
                remedy="leave it out, or wrap a part of forward in torch.utils.checkpoint with "
                "context_fn=",
            )
        return self.free

    @property
    def staged(self) -> tuple[Recompute, ...]:
        """Return the ways to treat all regions alike in a pipeline, the leanest last. What keeps
        pieces comes after what keeps the same whole."""
        return STAGED if len(self.kinds) > 1 else self.kinds

    def _plain(self, request: AskedRecomputation) -> Recompute:
        return PLAIN if request.blocks == "auto" else request.blocks

    def all(self, how: Recompute) -> dict[str, Recompute]:
        """Return the decisions that treat all regions alike that are left to choose."""
        return self.fixed | ({} if how.is_plain else dict.fromkeys(self.free, how))


def _require_agreement(
    marked: Sequence[MarkedRegion], request: AskedRecomputation, named: Mapping[str, Recompute]
) -> None:
    """Refuse annotations that contradict each other, or what is asked for by option."""
    rule = "what is recomputed of a module is said in one way"
    for region in marked:
        if (
            isinstance(request.blocks, Recompute)
            and not request.modules
            and request.blocks != region.how
        ):
            raise _refused(rule, region, f"recompute={str(request.blocks)!r} for the whole program")
        for name, how in named.items():
            if how != region.how and _are_nested(name, region.module):
                raise _refused(rule, region, f"recompute={{{name!r}: {str(how)!r}}}")
        for other in marked:
            if other.how != region.how and _are_nested(other.module, region.module):
                raise _refused(rule, region, f"{other.how} for {other.name} at {other.source}")


def _require_free_of_checkpoints(marked: Sequence[MarkedRegion], captured: Captured) -> None:
    for region in marked:
        for node in captured.operators if region.how != FULL else ():
            is_inside = f"{info(node).module}.".startswith(f"{region.module}.")
            if is_inside and info(node).checkpoint is not None:
                rule = "what the model wraps in torch.utils.checkpoint is recomputed in full"
                raise _refused(rule, region, f"a checkpoint at {info(node).source}")


def _covered(
    captured: Captured, wrapped: Mapping[str, Recompute], named: Mapping[str, Recompute]
) -> list[str]:
    """Return the names that are asked for and have nothing outside what the user wrapped: that is
    recomputed in full, and they may ask for nothing else."""
    left = found(captured, (*wrapped, *named)) if wrapped else named
    covered = [name for name in named if name not in left]
    for name in covered:
        if named[name] != FULL or POLICY in wrapped.values():
            raise InvalidInput(
                "what the model wraps in torch.utils.checkpoint is recomputed in full",
                got=f"recompute={{{name!r}: {str(named[name])!r}}}, all of it inside a checkpoint",
                remedy='"full" for it, or no checkpoint around it',
            )
    return covered


def _are_nested(module: str, other: str) -> bool:
    return module == other or _is_below(module, [other]) or _is_below(other, [module])


def _refused(rule: str, region: MarkedRegion, conflict: str) -> InvalidInput:
    return InvalidInput(
        rule,
        got=f"{region.how} for {region.name}\nbeside {conflict}",
        remedy="remove one of them",
        source=region.source,
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

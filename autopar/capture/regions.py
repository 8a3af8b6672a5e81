"""Regions: the runs of a program that could be recomputed, and the names that they go by.

    layers.3                     a module: each run of operators that are made in it
    layers.0:layers.3            from the first operator of one module to the last of another
    checkpoint 0                 what the user wrapped in torch.utils.checkpoint

A program's own regions are its repeated blocks, the numbered modules that each multiply several
matrices. Where there are none, as in a row of single layers, about as many layers are put together
as there are regions then.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.capture.captured import Captured
from autopar.recompute import FULL, POLICY, Recompute
from autopar.strategies.node_info import info

CHECKPOINT = "checkpoint "
_TO = ":"
_NUMBERED = re.compile(r"\d+(?=\.|$)")
_WHOLE = 0.8  # of the operators of a module: modules in it that have so many stand for it


def checkpoints(captured: Captured) -> dict[str, Recompute]:
    """Return the regions that the user wrapped in torch.utils.checkpoint, and what they keep."""
    kinds = dict[str, Recompute]()
    for node in captured.operators:
        if info(node).checkpoint is not None:
            name = f"{CHECKPOINT}{info(node).checkpoint}"
            kinds[name] = FULL if info(node).policy_saves is None else POLICY
    return kinds


def blocks(captured: Captured) -> tuple[str, ...]:
    """The program's own regions, in the order in which they run."""
    return repeated(captured) or _rows(captured)


def repeated(captured: Captured) -> tuple[str, ...]:
    """The numbered modules that each multiply several matrices, in the order in which they run."""
    numbered = _numbered(captured)
    large = [name for name, one in numbered.items() if one.products > 1]
    chosen: list[str] = []
    for name in sorted(large, key=lambda name: (name.count("."), numbered[name].first)):
        if not any(name.startswith(f"{other}.") for other in chosen):
            chosen += _inside(name, large, {n: one.size for n, one in numbered.items()})
    return tuple(sorted(set(chosen), key=lambda name: numbered[name].first))


@dataclass
class _Numbered:
    """Of a numbered module the place of its first operator, its operators, those that multiply."""

    first: int
    size: int = 0
    products: int = 0


def _numbered(captured: Captured) -> dict[str, _Numbered]:
    found: dict[str, _Numbered] = {}
    for index, node in enumerate(captured.operators):
        rule, path = captured.rules[node.name], info(node).module
        for at in _NUMBERED.finditer(path):
            if at.start() == 0 or path[at.start() - 1] == ".":
                one = found.setdefault(path[: at.end()], _Numbered(index))
                one.size += 1
                one.products += rule is not None and (rule.product or rule.is_contraction)
    return found


def _rows(captured: Captured) -> tuple[str, ...]:
    """Single layers, several together."""
    numbered = _numbered(captured)
    outer = [n for n in numbered if not any(n.startswith(f"{other}.") for other in numbered)]
    layers = [name for name in outer if numbered[name].products]
    if len(layers) < 2:
        paths = (info(node).module.partition(".")[0] for node in captured.operators)
        layers = [path for path in dict.fromkeys(paths) if path]
    together = max(1, math.isqrt(len(layers)))
    rows = (layers[i : i + together] for i in range(0, len(layers), together))
    return tuple(row[0] if len(row) == 1 else f"{row[0]}{_TO}{row[-1]}" for row in rows)


def _inside(name: str, large: Collection[str], sizes: Mapping[str, int]) -> list[str]:
    """A module, or the numbered ones in it that are nearly all of it."""
    inner = [other for other in large if other.startswith(f"{name}.")]
    outermost = [n for n in inner if not any(n.startswith(f"{other}.") for other in inner)]
    if sum(sizes[other] for other in outermost) < _WHOLE * sizes[name]:
        return [name]
    return [found for other in outermost for found in _inside(other, large, sizes)]


def runs(
    graph: fx.Graph, names: Iterable[str], of_parameters: Callable[[fx.Node], bool]
) -> list[tuple[str, list[fx.Node]]]:
    """Each run of calls that one of `names` speaks of, in their order, with that name.

    What is made of parameters alone is of the region that it stands in, wherever it is made.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    names = tuple(names)
    labels = _labels([None if of_parameters(node) else node for node in calls], set(names))
    for name in names:
        start, to, end = name.partition(_TO)
        if not to or name in labels:  # a module that is called so
            continue
        inside = [index for index, node in enumerate(calls) if _is_in(node, start, end)]
        if inside:
            for index in range(inside[0], inside[-1] + 1):
                if not _is_checkpoint(labels[index]):
                    labels[index] = name
    found = []
    for label, run in itertools.groupby(zip(labels, calls), key=lambda pair: pair[0]):
        if label is not None:
            found.append((label, [node for _, node in run]))
    return found


def _labels(calls: Sequence[fx.Node | None], names: Collection[str]) -> list[str | None]:
    """The names that speak of calls; None is of the region that it stands in."""
    labels: list[str | None] = []
    waiting = 0
    for node in calls:
        if node is None:
            labels.append(None)
            waiting += 1
            continue
        label = label_of(node, names)
        before = len(labels) - waiting
        if waiting and before and labels[before - 1] == label:
            labels[before:] = [label] * waiting
        labels.append(label)
        waiting = 0
    return labels


def found(captured: Captured, names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names` that speak of some operator, which none of them further out speaks of."""
    names, known = tuple(names), set[str]()
    for node in captured.operators:
        label = label_of(node, names)
        known |= {name for name in names if name == label}
        if not _is_checkpoint(label):
            known |= {name for name in names if _TO in name and _is_in(node, *name.split(_TO))}
    return tuple(name for name in names if name in known)


def label_of(node: fx.Node, names: Collection[str]) -> str | None:
    """Which of `names` speaks of a call, the outermost of several."""
    number, path = info(node).checkpoint, info(node).module
    if number is not None and f"{CHECKPOINT}{number}" in names:
        return f"{CHECKPOINT}{number}"
    parts = path.split(".")
    prefixes = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return next((prefix for prefix in prefixes if prefix in names), None)


def _is_checkpoint(label: str | None) -> bool:
    """Whether the user wrapped what is called so: that runs again as is said there."""
    return label is not None and label.startswith(CHECKPOINT)


def _is_in(node: fx.Node, *paths: str) -> bool:
    module = f"{info(node).module}."
    return any(module.startswith(f"{path}.") for path in paths)

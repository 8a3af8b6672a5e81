"""Loss: which of a model's outputs a step differentiates.

{"aux": number, "loss": number}    the one called `loss`, the outermost if there are several
(logits, number)                   the only differentiable number
(number, other number)             the first of a tuple
{"a": number, "b": number}         refused: nothing says which
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import InvalidInput
from autopar.layout import Layout
from autopar.tensor_type import TensorType

NAME = "loss"
Path = tuple[int | str, ...]  # to a leaf: places in tuples and lists, keys and fields of the rest


def index_of_loss(outputs: Any, learned: Sequence[bool]) -> int:
    """The loss among the leaves of `outputs`, of which `learned` tells the differentiable ones."""
    leaves = _leaves(outputs)
    numbers = [
        path
        for (path, leaf), learns in zip(leaves, learned, strict=True)
        if learns and isinstance(leaf, Tensor) and leaf.ndim == 0
    ]
    if not numbers:
        remedy = "return the loss from forward, or call the parallel module and differentiate"
        _refuse(leaves, remedy)
    paths = [path for path, _ in leaves]
    named = sorted((path for path in paths if path[-1:] == (NAME,)), key=len)
    is_one = len(named) == 1 or (len(named) > 1 and len(named[0]) < len(named[1]))
    if is_one and named[0] in numbers:
        return paths.index(named[0])
    if named or not all(_goes_first(numbers[0], other) for other in numbers[1:]):
        _refuse(leaves, f"call the one differentiable number to train {NAME!r}, or return it alone")
    return paths.index(numbers[0])


def _goes_first(path: Path, other: Path) -> bool:
    """Whether the two part in a tuple that only tuples hold."""
    shared = [here for here, _ in takewhile(lambda pair: pair[0] == pair[1], zip(path, other))]
    return all(isinstance(key, int) for key in path[: len(shared) + 1])


def _leaves(tree: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Every leaf with its path, in the order of `pytree.tree_leaves`."""
    children, spec = pytree.tree_flatten(tree, is_leaf=_is_below(tree))
    if spec.is_leaf():
        return [(path, tree)]
    return [
        leaf
        for key, child in zip(_keys(tree, len(children)), children, strict=True)
        for leaf in _leaves(child, (*path, key))
    ]


def _is_below(container: Any) -> Callable[[Any], bool]:
    """Return a test that tells parts of a container from itself: by number, since torch keeps the
    test until the garbage collector comes."""
    number = id(container)
    return lambda part: id(part) != number


def _keys(container: Any, count: int) -> Sequence[int | str]:
    """The place of each child, or its key or field."""
    if isinstance(container, Mapping):
        return [str(key) for key in container]
    try:
        pairs, _ = pytree.tree_flatten_with_path(container, is_leaf=_is_below(container))
    except ValueError:  # registered without a function that tells them
        return ["?"] * count
    keys = (path[0] for path, _ in pairs)
    return [k.name if isinstance(k, pytree.GetAttrKey) else k.idx for k in keys]  # type: ignore[attr-defined]


def _refuse(leaves: Sequence[tuple[Path, Any]], remedy: str) -> NoReturn:
    raise InvalidInput(
        "a step needs a model that returns its loss: one differentiable number, or one called "
        f"{NAME!r}, or the first of a tuple",
        got="outputs " + ", ".join(_described(path, leaf) for path, leaf in leaves),
        remedy=remedy,
    )


def _described(path: Path, leaf: Any) -> str:
    kind = repr(leaf)
    if isinstance(leaf, Tensor):
        kind = str(TensorType.of(leaf, Layout.replicated(leaf.ndim)))
    return f"{'.'.join(map(str, path))}: {kind}" if path else kind

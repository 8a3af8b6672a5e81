"""Folded equals unfolded: what capture writes of equal blocks is what it would follow of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture, export, folding
from autopar.capture.captured import Captured
from autopar.capture.folding import fold, recognise_segments, unfold_captured
from autopar.capture.hidden import Hiding
from autopar.program.names import Numbered, numbered
from autopar.program.unfolding import unfold
from autopar.strategies.node_info import info
from tests import large_models, models
from tests.models import Case

LAYERS = 20


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout, self.scale = nn.Dropout(dropout), scale

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.dropout(self.down(F.gelu(self.up(self.norm(x))))) * self.scale
        return x + (y if mask is None else y * mask)


class Gated(Block):
    """A block of another kind."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x * torch.sigmoid(super().forward(x, mask))


class Net(nn.Module):
    """Blocks in a row, between a layer before and a layer behind them."""

    def __init__(self, *blocks: nn.Module, tied: bool = False, masked: bool = False) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(blocks)
        self.last, self.masked = nn.Linear(8, 8), masked
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        mask = (x > 0).double() if self.masked else None
        for layer in self.layers:
            x = self.run(layer, x, mask)
        return self.last(x).square().mean()

    def run(self, layer: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        return layer(x, mask)


class Checkpointed(Net):
    def run(self, layer: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        return checkpoint(layer, x, mask, use_reentrant=False)


class Skipping(Net):
    """Each block reads what went into the first."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.first(x)
        for layer in self.layers:
            x = layer(x) + first
        return self.last(x).square().mean()


class Collecting(Net):
    """What each block gives is read again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        values = [self.first(x)]
        for layer in self.layers:
            values.append(layer(values[-1]))
        return torch.stack(values).square().mean()


class Otherwise(Net):
    """Blocks run in another order than they stand in."""

    def __init__(self, *blocks: nn.Module, order: Callable[[int], Sequence[int]]) -> None:
        super().__init__(*blocks)
        self.order = order(len(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in self.order:
            x = self.layers[number](x)
        return self.last(x).square().mean()


class Returning(Net):
    """All values are outputs."""

    def forward(self, x: Tensor) -> list[Tensor]:
        values = [self.first(x)]
        for layer in self.layers:
            values.append(layer(values[-1]))
        return [self.last(values[-1]).square().mean(), *values]


class TwoBack(Net):
    """Each block reads what the last but one gave."""

    def forward(self, x: Tensor) -> Tensor:
        before = x = self.first(x)
        for layer in self.layers:
            before, x = x, layer(x, before)
        return self.last(x).square().mean()


class SumOfTwo(Net):
    def forward(self, x: Tensor) -> Tensor:
        before = x = self.first(x)
        for layer in self.layers:
            before, x = x, layer(x + before)
        return self.last(x).square().mean()


class Flagged(Net):
    """What all blocks read is set between them."""

    def __init__(self, *blocks: nn.Module, period: int) -> None:
        super().__init__(*blocks)
        self.period, self.flag = period, SimpleNamespace(scale=1.0)
        for block in blocks:
            block.flag = self.flag

    def run(self, layer: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        number = [*self.layers].index(layer)
        self.flag.scale = 2.0 if number % self.period == 0 else 1.0
        return layer(x)


class Reading(Block):
    flag: SimpleNamespace

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) * self.flag.scale


class Between(Net):
    """Something is done between two blocks in the middle."""

    def __init__(self, *blocks: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(*blocks)
        self.change = change

    def run(self, layer: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        return layer(self.change(x) if layer is self.layers[11] else x)


class Frozen(Net):
    """Some blocks in the middle run without gradients."""

    def run(self, layer: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        with torch.set_grad_enabled(layer not in [*self.layers[9:12]]):
            return layer(x)


class Unread(Block):
    """A parameter that forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Parameter(torch.zeros(8))


class Steps(nn.Module):
    """One cell, over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 8)
        for _ in range(LAYERS):
            state = self.cell(x, state)
        return state.square().mean()


class Again(Net):
    """A row of blocks, of which something is read once more."""

    def __init__(self, *blocks: nn.Module, read: Callable[[Again, Tensor], Tensor]) -> None:
        super().__init__(*blocks)
        self.read, self.other = read, Block()

    def row(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, self.row(self.first(x))).square().mean()


def without_gradients(net: Again, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = net.row(2 * x)
    return x - y


def backwards(net: Again, x: Tensor) -> Tensor:
    for layer in reversed(net.layers):
        x = layer(x)
    return x


def by_name(net: Again, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = layer(x=x)
    return x


def by_another_method(net: Again, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = x + layer.up(x).sum(1, keepdim=True)
    return x


def as_means(net: Again, x: Tensor) -> Tensor:
    means = [x := layer(x) for layer in net.layers]
    return torch.stack(means).mean(0)


def weights(net: Again, x: Tensor) -> Tensor:
    return x + sum(layer.up.weight.square().sum() for layer in net.layers)


READ_AGAIN: dict[str, Callable[[Again, Tensor], Tensor]] = {
    "weights": weights,
    "all parameters": lambda net, x: x + sum(value.sum() for value in net.parameters()),
    "the row": lambda net, x: net.row(x),
    "the row, behind a block": lambda net, x: net.row(net.other(x)),
    "the row, without gradients": without_gradients,
    "the row, backwards": backwards,
    "the row, by name": by_name,
    "parts of blocks": by_another_method,
    "the row, of which all values are read": as_means,
}


def net(kind: type[Net], *blocks: Callable[[], nn.Module], count: int = LAYERS, **options) -> Case:
    rows = (blocks[number % len(blocks)]() for number in range(count))
    return Case("", kind(*rows, **options).double(), (torch.zeros(4, 8).double(),))


def one_differs(attribute: float) -> Case:
    blocks = [Block(scale=attribute if number == 9 else 1.0) for number in range(LAYERS)]
    return Case("", Net(*blocks).double(), (torch.zeros(4, 8).double(),))


CASES: dict[str, Callable[[], Case]] = {
    "equal": lambda: net(Net, Block),
    "in turn": lambda: net(Net, Block, Gated, count=2 * LAYERS),
    "of three kinds, at the end two": lambda: net(
        Net, Block, Gated, partial(Block, scale=2.0), count=3 * LAYERS + 2
    ),
    "one differs in an attribute": lambda: one_differs(2.0),
    "tied, around": lambda: net(Net, Block, tied=True),
    "a mask that all read": lambda: net(Net, Block, masked=True),
    "dropout": lambda: net(Net, partial(Block, dropout=0.5)),
    "checkpoints": lambda: net(Checkpointed, Block),
    "dropout in checkpoints": lambda: net(Checkpointed, partial(Block, dropout=0.5)),
    "the first value in each": lambda: net(Skipping, Block),
    "all values at the end": lambda: net(Collecting, Block),
    "parameters that nobody reads": lambda: net(Net, Unread),
    "steps of a cell": lambda: Case("", Steps().double(), (torch.zeros(4, 8).double(),)),
    "one is left out": lambda: net(Otherwise, Block, order=lambda n: [*range(9), *range(10, n)]),
    "one runs twice": lambda: net(Otherwise, Block, order=lambda n: [*range(9), *range(8, n)]),
    "two change places": lambda: net(
        Otherwise, Block, order=lambda n: [*range(8), 9, 8, *range(10, n)]
    ),
    "in reverse": lambda: net(Otherwise, Block, order=lambda n: range(n)[::-1]),
    "all values are outputs": lambda: net(Returning, Block),
    "the last value but one": lambda: net(TwoBack, Block),
    "the sum of two values": lambda: net(SumOfTwo, Block),
    "a flag that all read": lambda: net(Flagged, Reading, period=7),
    "a flag of two blocks in turn": lambda: net(Flagged, Reading, period=2),
    "doubled in between": lambda: net(Between, Block, change=lambda x: x * 2),
    "doubled in place": lambda: net(Between, Block, change=lambda x: x.mul_(2)),
    "detached in between": lambda: net(Between, Block, change=lambda x: x.detach()),
    "without gradients in the middle": lambda: net(Frozen, Block),
    "gpt": lambda: models.gpt(layers=LAYERS),
    "gpt2": lambda: models.gpt2(layers=LAYERS),
    "llama": lambda: models.llama(layers=LAYERS),
    "t5": lambda: models.t5(layers=LAYERS),
    "vit": lambda: models.vit(layers=LAYERS),
    "mixtral": lambda: large_models.mixtral(batch=4, sequence=64, layers=LAYERS),
}
# Of equal blocks, where these are not all but the first and the last.
COUNTS = {
    "of three kinds, at the end two": [19],
    "one differs in an attribute": [8],
    "a mask that all read": [17],
    "all values at the end": [],
    "steps of a cell": [],
    "one is left out": [9],
    "one runs twice": [10],
    "two change places": [],
    "all values are outputs": [],
    "the last value but one": [8],  # of two blocks each
    "the sum of two values": [17],
    "a flag that all read": [],
    "doubled in between": [9],
    "doubled in place": [9],
    "detached in between": [9],
    "without gradients in the middle": [],
    "a flag of two blocks in turn": [8],
    "t5": [18, 18],
}


def followed(case: Case) -> Captured:
    """Return the program of a model, of which each block is written out as export gives it."""
    with (
        patch.object(export, "blocks_followed_once", lambda *_: nullcontext(Hiding())),
        patch.object(folding, "MIN_SEGMENT_BLOCKS", 1 << 30),  # it stays as export gave it
    ):
        return capture(case.model, case.args, case.kwargs)


def in_order(captured: Captured) -> list[fx.Node]:
    """Return the nodes, parameters and buffers by their names in the model."""
    nodes = captured.graph.nodes
    names = captured.parameters | captured.buffers
    held = sorted((n for n in nodes if n.name in names), key=lambda node: names[node.name])
    return [*held, *(node for node in nodes if node.name not in names)]


def assert_equal(whole: Captured, other: Captured) -> None:
    """Compare every fact of every node, whatever the nodes are called."""
    nodes, others = in_order(whole), in_order(other)
    assert len(nodes) == len(others)
    twins = dict(zip(nodes, others))
    for node, twin in twins.items():
        assert node.op == twin.op
        if node.op != "placeholder":
            arguments = fx.map_arg((node.args, node.kwargs), twins.__getitem__)
            assert (node.target, *arguments) == (twin.target, twin.args, twin.kwargs)
        facts, twin_facts = dict(node.meta), dict(twin.meta)
        assert str(facts.pop("val")) == str(twin_facts.pop("val"))
        facts.pop("block", None), twin_facts.pop("block", None)
        assert facts == twin_facts, node
        assert whole.classes.get(node.name) == other.classes.get(twin.name)
        for names, other_names in (
            (whole.parameters, other.parameters),
            (whole.buffers, other.buffers),
        ):
            assert names.get(node.name) == other_names.get(twin.name)
    leaves = [twins[o] if isinstance(o, fx.Node) else o for o in whole.output_leaves]
    assert leaves == [*other.output_leaves]


@pytest.mark.parametrize("name", CASES)
def test_few_blocks_are_written_for_all(name: str) -> None:
    case = CASES[name]()
    captured = capture(case.model, case.args, case.kwargs)
    whole = followed(case)
    assert_equal(whole, captured)
    assert captured.program is not None
    counts = [segment.count for segment in captured.program.segments if segment.count > 1]
    assert counts == COUNTS.get(name, [18])
    assert_equal(whole, unfold_captured(captured, captured.program))


@pytest.mark.parametrize("read", READ_AGAIN)
def test_blocks_that_are_read_elsewhere_stand_for_themselves(read: str) -> None:
    case = net(Again, Block, read=READ_AGAIN[read])
    captured = capture(case.model, case.args, case.kwargs)
    assert_equal(followed(case), captured)
    assert captured.program is None or not captured.program.is_folded


@pytest.mark.parametrize("name", ["equal", "in turn", "dropout", "a mask that all read"])
def test_a_folded_program_is_recognised_again(name: str) -> None:
    case = CASES[name]()
    captured = capture(case.model, case.args, case.kwargs)
    short = fold(captured)
    assert short.is_folded
    assert len(short.graph.nodes) < len(captured.graph.nodes)
    assert short.length == captured.length
    assert_equal(captured, unfold_captured(short, recognise_segments(short, 8)))


@pytest.mark.parametrize("counts", [[6, 12], [1, 16, 1], [18]])
def test_a_split_gives_segments_of_one_graph(counts: list[int]) -> None:
    case = CASES["dropout"]()
    captured = capture(case.model, case.args, case.kwargs)
    program = captured.program
    assert program is not None
    _, segment, _ = program.segments
    pieces = program.split(segment, counts).segments[1:-1]
    assert [piece.count for piece in pieces] == counts
    assert {id(piece.graph) for piece in pieces} == {id(segment.graph)}
    assert_equal(captured, unfold_captured(captured, program.split(segment, counts)))
    with pytest.raises(ValueError, match="blocks are not the 18 of the segment"):
        program.split(segment, [1, 2])


def test_each_run_of_a_split_has_a_block_that_stands_for_others() -> None:
    case = CASES["equal"]()
    captured = capture(case.model, case.args, case.kwargs)
    program = captured.program
    assert program is not None
    _, segment, _ = program.segments
    graph = unfold(program.split(segment, [8, 10]), (3, 3))
    calls = graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)
    counts = [info(node).count for node in calls]
    assert counts == [1, *(1, 1, 1, 2, 1, 1, 1), *(1, 1, 1, 4, 1, 1, 1), 1]


def test_segments_are_listed_by_their_modules() -> None:
    captured = capture(*(lambda case: (case.model, case.args))(CASES["equal"]()))
    assert captured.program is not None
    _, segment, _ = captured.program.segments
    assert str(segment) == "18 x layers.{1..18}"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.0.b", "a.1.b", "a.2.b"], (Numbered("a.", 0, 1, ".b"), [0, 1, 2])),
        (["a.0.b", "a.1.b", "a.7.b"], (Numbered("a.", 0, 1, ".b"), [0, 1, 7])),
        (["a.5.b2", "a.7.b2", "a.9.b2"], (Numbered("a.", 5, 2, ".b2"), [0, 1, 2])),
        (["a.3", "a.2", "a.1"], (Numbered("a.", 3, -1, ""), [0, 1, 2])),
        (["a.0.b.0", "a.1.b.1"], None),  # two numbers
        (["a.0", "a.2", "a.3"], (Numbered("a.", 0, 1, ""), [0, 2, 3])),
        (["a.0", "a.2", "a.1"], None),  # not in order
        (["a.00", "a.01"], None),  # not as numbers are written
        (["a.0", "b.1"], None),
        (["a", "a"], None),
    ],
)
def test_names_differ_in_one_number(names, expected) -> None:
    assert numbered(names) == expected

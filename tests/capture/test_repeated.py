"""Blocks that are followed once: the graph is that of a model which is followed in full."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar as ap
from autopar import Precision
from autopar.capture import capture, export, repeated
from autopar.capture.captured import Captured
from autopar.capture.followed_blocks import FollowedBlock
from autopar.capture.hidden import Hiding
from autopar.strategies.node_info import info
from tests import mixtures, models
from tests.models import Case


@pytest.fixture(autouse=True, params=[1, 10**9], ids=["hidden", "shown"])
def worth_hiding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(repeated, "WORTH_HIDING", request.param)
    return request.param


FACTS = ("module", "source", "differentiable", "learns", "checkpoint", "parts", "on_host")
Again = Callable[[FollowedBlock, str, Any], Any]


def rows(captured: Captured) -> list[tuple[Any, ...]]:
    """All that is known of each node."""
    found = []
    for node in captured.graph.nodes:
        vals = [
            (tuple(v.shape), v.stride(), v.dtype, v.requires_grad) if isinstance(v, Tensor) else v
            for v in info(node).values
        ]
        facts = [node.meta.get(fact) for fact in FACTS]
        found.append((node.name, node.op, str(node.target), node.args, node.kwargs, vals, *facts))
    return [tuple(map(repr, row)) for row in found]


def both(
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    precision: Precision | None = None,
) -> list[str]:
    """Require that a model has one graph, whether blocks are followed once or in full. Gives the
    blocks that stood for others' calls."""
    copied: list[str] = []
    again: Again = FollowedBlock.again

    def noted(self: FollowedBlock, path: str, leaves: Any) -> Any:
        copied.append(path)
        return again(self, path, leaves)

    with monkeypatch.context() as patch:
        patch.setattr(FollowedBlock, "again", noted)
        once = capture(model, args, kwargs, precision)
    with monkeypatch.context() as patch:
        patch.setattr(export, "blocks_followed_once", lambda model, shown: nullcontext(Hiding()))
        full = capture(model, args, kwargs, precision)
    assert rows(once) == rows(full)
    for name in ("parameters", "buffers", "inputs", "tied", "classes", "mutations", "key"):
        assert getattr(once, name) == getattr(full, name)
    assert once.constants.keys() == full.constants.keys()
    assert [*map(str, once.output_leaves)] == [*map(str, full.output_leaves)]
    assert len(once.decisions) == len(full.decisions)
    copy = once.example.model
    assert [module for module in copy.modules() if "forward" in vars(module)] == [copy]
    return copied


def gptj(*, layers: int, dropout: float) -> Case:
    transformers = models._transformers()
    config = transformers.GPTJConfig(
        vocab_size=61,
        n_positions=16,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        rotary_dim=4,
        resid_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    ids = models._ids(4, 8, 61)
    return models._case(
        "gptj", lambda: transformers.GPTJForCausalLM(config), input_ids=ids, labels=ids
    )


def gemma2(*, layers: int, dropout: float) -> Case:
    transformers = models._transformers()
    config = transformers.Gemma2Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        attention_dropout=dropout,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    ids = models._ids(4, 8, 61)
    return models._case(
        "gemma2", lambda: transformers.Gemma2ForCausalLM(config), input_ids=ids, labels=ids
    )


FAMILIES: dict[str, Callable[..., Case]] = {
    "gpt2": models.gpt2,
    "llama": models.llama,
    "bert": models.bert,
    "vit": models.vit,
    "t5": models.t5,
    "gptj": gptj,
    "gemma2": gemma2,
}


@pytest.mark.parametrize(
    ("name", "train"), [*((name, True) for name in FAMILIES), ("gpt2", False), ("t5", False)]
)
def test_families(name: str, train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = 2 if name == "gemma2" else 1  # which take turns
    case = FAMILIES[name](layers=2 * kinds + 2, dropout=0.1)
    case.model.train(train)
    copied = both(monkeypatch, case.model, case.args, case.kwargs)
    assert len(copied) >= 2


@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3", "GptOss"])
def test_mixtures_of_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = mixtures.family(name, monkeypatch, num_hidden_layers=3)
    assert both(monkeypatch, case.model, case.args, case.kwargs)


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.inner(self.norm(x)))


class Net(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module] = Block, count: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(block(index) for index in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


X = torch.randn(6, 4)


def test_a_block_in_which_nothing_differs_is_followed_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert both(monkeypatch, Net(), (X,)) == ["layers.2", "layers.3", "layers.4"]


def test_another_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = both(monkeypatch, Net(), (X,), precision=Precision(compute=torch.bfloat16))
    assert len(copied) == 3


def test_automatic_precision_around_and_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert len(both(monkeypatch, Net(), (X,))) == 3

    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.inner(x)
            with torch.no_grad():
                scale = x.abs().mean()
            return self.norm(x + y) * scale

    assert len(both(monkeypatch, Net(Inside), (X,))) == 3


class Where(Net):
    """Some blocks under another switch."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, layer in enumerate(self.layers):
            with torch.autocast("cpu", torch.bfloat16, enabled=index % 2 == 0):
                x = layer(x)
        return x.square().mean()


class Frozen(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.layers:
                x = layer(x)
        return self.first(x).square().mean()


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


class Scattered(Net):
    """Called by several lines, one twice, one with its result unused."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.first(x))
        x = self.layers[1](x)
        x = self.layers[2](x) + self.layers[3](x)
        self.layers[4](x)
        return self.layers[2](x).square().mean()


@pytest.mark.parametrize(
    ("make", "count"), [(Where, 1), (Frozen, 0), (Checkpointed, 3), (Scattered, 4)]
)
def test_surroundings(
    make: Callable[[], nn.Module], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(both(monkeypatch, make(), (X,))) == count


class CheckpointInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Statistics(Block):
    """Writes to a buffer, draws, and gives two results."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.batch_norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().mean(0))
        return F.dropout(self.batch_norm(x), 0.3, self.training) + self.seen


@pytest.mark.parametrize("block", [CheckpointInside, Statistics])
def test_blocks_that_are_followed_twice(
    block: Callable[[int], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(both(monkeypatch, Net(block), (X,))) == 3


class ReadsIndex(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.index + 1)


class ReadsDict(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (vars(self)["index"] + 1)


class Counting(Block):
    """Numbers outside of its modules: the third block would be divided by three."""

    shared: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shared.append(1)
        return super().forward(x) / len(self.shared)


class Counted(Net):
    """Each call of which counts from one."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        Counting.shared.clear()
        return found


class Constants(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


class WritesArgument(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return super().forward(x)


class Views(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[1:] if x.shape[0] % 2 else x.view(-1, 4)


class Hooked(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.inner.register_forward_hook(lambda module, args, out: out * (index + 1))


class Settings:
    def __init__(self) -> None:
        self.steps = {"taken": 0}


class ReadsSettings(Block):
    """Other numbers from the third on, the same in each call of all five."""

    settings = Settings()

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.kept = [type(self).settings]

    def forward(self, x: Tensor) -> Tensor:
        steps = self.kept[0].steps
        steps["taken"] = (steps["taken"] + 1) % 5
        return super().forward(x) * (1 if 0 < steps["taken"] < 3 else 2)


@pytest.mark.parametrize(
    "block", [ReadsIndex, ReadsDict, Constants, WritesArgument, Views, Hooked, ReadsSettings]
)
def test_blocks_that_are_followed_in_full(
    block: Callable[[int], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert both(monkeypatch, Net(block), (X,)) == []


def test_blocks_that_count_around_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FollowedBlock, "again", lambda *_: pytest.fail("followed once"))
    monkeypatch.setattr(Counting, "shared", [])
    divisions = [n for n in capture(Counted(Counting), (X,)).graph.nodes if "div" in n.name]
    by = [node.args[1] for node in divisions[:-1]]  # the last is of the mean
    assert by == [*range(by[0], by[0] + len(by))]
    assert len(by) >= 4


class Tied(Net):
    """All blocks have one weight; two have another in common."""

    def __init__(self) -> None:
        super().__init__(count=6)
        for layer in self.layers:
            layer.inner.weight = self.first.weight  # type: ignore[union-attr]
        self.layers[4].norm.weight = self.layers[5].norm.weight  # type: ignore[union-attr]


def test_tied_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert both(monkeypatch, Tied(), (X,)) == ["layers.2", "layers.3"]


class ReachingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + VALUES[-1]


VALUES: list[Tensor] = []


class Reaching(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        VALUES.append(x * 2)
        for layer in self.layers:
            x = layer(x)
        VALUES.clear()
        return x.square().mean()


def test_values_around_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert both(monkeypatch, Reaching(ReachingBlock), (X,)) == []


class Asks(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x if mask.all() else super().forward(x)


class Asked(Net):
    def forward(self, x: Tensor, masks: Tensor) -> Tensor:
        x = self.first(x)
        for layer, mask in zip(self.layers, masks.unbind()):
            x = layer(x, mask)
        return x.square().mean()


def test_questions_to_values(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = torch.tensor([[False], [False], [True], [False], [True]])
    assert both(monkeypatch, Asked(Asks), (X, masks)) == []


class TwoNames(Net):
    """One module of two paths, and blocks that are found by number."""

    def __init__(self) -> None:
        super().__init__()
        self.last = self.first

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in range(len(self.layers)):
            x = self.layers[index](x)
        return self.last(x).square().mean()


def test_a_module_of_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert both(monkeypatch, TwoNames(), (X,)) == []


def test_hooks_around_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    for index, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda module, args, out, index=index: out * (index + 1))
    assert len(both(monkeypatch, model, (X,))) == 3


SEEN: list[Tensor] = []


class Tells(nn.Sequential):
    """A block that leaves a tensor in a list of its file."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        SEEN.append(x.square().mean())
        return x


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Tells(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        SEEN.clear()
        x = self.layers(x)
        return x.mean() + sum((at + 1) * one for at, one in enumerate(SEEN))


def test_what_blocks_leave_in_a_file_is_all_there() -> None:
    torch.manual_seed(0)
    model, x = Told(), torch.randn(8, 4)
    expected = model(x)
    captured = capture(model, (x,))
    assert sum("square" in str(node.target) for node in captured.graph.nodes) == 6
    module = ap.parallelize(model, (x,), mesh=ap.Mesh(dp=2), backend="virtual")
    torch.testing.assert_close(module(x), expected)


COUNT = 0
STATE = SimpleNamespace(count=0)


def _count() -> None:
    global COUNT
    COUNT += 1


def _counter() -> tuple[Callable[[], None], Callable[[], int]]:
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    return add, lambda: count


ADD, ADDED = _counter()


class Counter:
    count = 0

    def add(self) -> None:
        type(self).count += 1


COUNTER = Counter()


class Counts(Block):
    """Somewhere that its own functions do not name."""

    kind, seen = "", 0
    numbers = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        kinds = {"global": _count, "closure": ADD, "class": COUNTER.add}
        if self.kind in kinds:
            kinds[self.kind]()
        elif self.kind == "held":
            _counted(STATE)
        elif self.kind == "iterator":
            next(self.numbers)
        elif self.kind == "own class":
            Counts.seen += 1
        return super().forward(x)


def _counted(state: Any) -> None:
    state.count += 1


class CountsRead(Net):
    def counted(self) -> int:
        repeats = int(repr(Counts.numbers)[6:-1])
        return COUNT + STATE.count + ADDED() + Counter.count + Counts.seen + repeats

    def forward(self, x: Tensor) -> Tensor:
        before = self.counted()
        return super().forward(x) * (self.counted() - before)


@pytest.mark.parametrize("kind", ["global", "closure", "class", "held", "iterator", "own class"])
def test_what_blocks_count_elsewhere(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counts, "kind", kind)
    assert both(monkeypatch, CountsRead(Counts), (X,)) == []


TURN = ContextVar("TURN", default=0)


class Depends(Block):
    """On numbers that its caller sets, which are alike in the first two."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if max(COUNT, STATE.count, TURN.get()) < 2 else 2)


class SetsNumbers(Net):
    kind, period = "", 8

    def set(self, number: int) -> None:
        global COUNT
        if self.kind == "global":
            COUNT = number
        elif self.kind == "held":
            STATE.count = number
        elif self.kind == "context":
            TURN.set(number)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, layer in enumerate(self.layers):
            self.set(index % self.period)
            x = layer(x)
        self.set(0)
        return x.square().mean()


@pytest.mark.parametrize("kind", ["global", "held", "context"])
def test_what_callers_of_blocks_set(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SetsNumbers, "kind", kind)
    for name, value in (("COUNT", 0), ("STATE", SimpleNamespace(count=0))):
        monkeypatch.setitem(globals(), name, value)
    assert both(monkeypatch, SetsNumbers(Depends, count=6), (X,)) == []
    monkeypatch.setattr(SetsNumbers, "period", 3)
    copied = both(monkeypatch, SetsNumbers(Depends, count=9), (X,))
    assert copied == ["layers.6", "layers.7", "layers.8"]


class Outside(nn.Module):
    """Reads what blocks hold from outside of them, in some way."""

    def __init__(self, read: Callable[[nn.ModuleList], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(index) for index in range(8))
        self.read = read
        self.kept = [layer.inner.weight for layer in self.layers]
        self.holder = SimpleNamespace(weight=self.layers[7].inner.weight)

    def forward(self, x: Tensor) -> Tensor:
        found = self.read(self)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + sum(one.square().sum() for one in found)


def _swallowed(net: Outside) -> list[Tensor]:
    try:
        return [net.layers[6].inner.weight]
    except BaseException:
        return []


ROADS: dict[str, Callable[[Any], Any]] = {
    "parameters": lambda net: net.parameters(),
    "of one block": lambda net: net.layers[5].parameters(),
    "by name": lambda net: [net.get_parameter("layers.6.inner.weight")],
    "attribute": lambda net: [net.layers[3].inner.weight],
    "getattr": lambda net: [
        t for b in net.layers if (t := getattr(b.inner, "bias", None)) is not None
    ],
    "hasattr": lambda net: (
        [net.layers[0].inner.weight] if hasattr(net.layers[4].inner, "bias") else []
    ),
    "all caught": _swallowed,
    "all of a module": lambda net: [*vars(net.layers[7].inner)["_parameters"].values()],
    "a copy": lambda net: [{**net.layers[7].inner._parameters}["weight"]],
    "states": lambda net: net.layers[7].state_dict(keep_vars=True).values(),
    "children": lambda net: [m.weight for m in net.modules() if isinstance(m, nn.Linear)],
    "a list": lambda net: net.kept[4:6],
    "an object": lambda net: [net.holder.weight],
    "how many": lambda net: [net.layers[0].inner.weight] * len([*net.layers[7].parameters()]),
}


@pytest.mark.parametrize("road", ROADS)
def test_what_is_read_of_blocks_from_outside(
    road: str, worth_hiding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, attempts, attempt = Outside(ROADS[road]), list[Any](), export._captured
    with monkeypatch.context() as patch:
        patch.setattr(export, "_captured", lambda *of: attempts.append(of) or attempt(*of))
        capture(net, (X,))
    assert (len(attempts) > 1) == (worth_hiding == 1)  # what it reads was hidden
    both(monkeypatch, net, (X,))


class Kinds(Block):
    """One in `every` blocks is of another kind."""

    every = 2

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.is_other = index % self.every == self.every - 1

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.sin() if self.is_other else x


@pytest.mark.parametrize(("every", "followed"), [(2, (0, 1, 2, 3)), (3, (0, 1, 2, 5))])
def test_blocks_of_two_kinds_in_turn(
    every: int, followed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kinds, "every", every)
    copied = [f"layers.{at}" for at in range(12) if at not in followed]
    assert both(monkeypatch, Net(Kinds, 12), (X,))[-8:] == copied  # in the last attempt


def test_an_export_has_the_parameters_of_blocks_that_are_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeated, "WORTH_HIDING", 1)
    counts, plain = [], torch.export.export

    def export_(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        counts.append(len([*model.parameters()]))
        return plain(model, *args, **kwargs)

    monkeypatch.setattr(torch.export, "export", export_)
    net = Net(Block, 12)
    captured = capture(net, (X,))
    of_block = len([*net.layers[0].parameters()])
    assert counts == [2 + 2 * of_block]
    assert len(captured.parameters) == 2 + 12 * of_block
    assert all(type(m._parameters) is dict for m in captured.example.model.modules())
    counts.clear()
    capture(Net(ReadsIndex, 12), (X,))
    assert counts == [2 + n * of_block for n in (2, 6, 12)]
    for more, shown in ((0, 2), (1, 12)):
        counts.clear()
        monkeypatch.setattr(repeated, "WORTH_HIDING", 10 * of_block + more)
        capture(Net(Block, 12), (X,))
        assert counts == [2 + shown * of_block]


class Hooks(Net):
    """What runs around its forward reads all that it holds."""

    def __init__(self) -> None:
        super().__init__(Block, 8)
        self.register_forward_hook(lambda net, _, out: out + norm(net))


class Called(Net):
    def __init__(self) -> None:
        super().__init__(Block, 8)

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) + norm(self)


def norm(net: nn.Module) -> Any:
    return sum(one.square().sum() for one in net.parameters())


class OthersTensors(Net):
    """Each call of its first block is with the tensors of another."""

    def __init__(self) -> None:
        super().__init__(Block, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            given = dict(layer.named_parameters())
            x = torch.func.functional_call(self.layers[0], given, (x,))
        return x.square().mean()


class Exchanged(Net):
    """A module, or what a module holds, is another's while forward runs."""

    def __init__(self, at: int, of: int, whole: bool) -> None:
        super().__init__(Block, 8)
        self.places = at, of, whole

    def forward(self, x: Tensor) -> Tensor:
        at, of, whole = self.places
        space = vars(self.layers[at])["_modules"] if whole else vars(self.layers[at].inner)
        name = "inner" if whole else "_parameters"
        kept = space[name]
        space[name] = self.layers[of].inner if whole else vars(self.layers[of].inner)[name]
        x = super().forward(x)
        space[name] = kept
        return x


AT = ((3, 0, True), (0, 3, True), (5, 6, True), (5, 1, False), (1, 5, False))
EXCHANGES: dict[str, Callable[[], nn.Module]] = {
    "hooks": Hooks,
    "call": Called,
    "others' tensors": OthersTensors,
    **{f"{about}": partial(Exchanged, *about) for about in AT},
}


@pytest.mark.parametrize("made", EXCHANGES)
def test_blocks_whose_tensors_are_not_their_own(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = EXCHANGES[made]()
    both(monkeypatch, model, (X,))
    module = ap.parallelize(copy.deepcopy(model), (X,), mesh=ap.Mesh(x=2), backend="virtual")
    assert torch.allclose(module(X), model(X))

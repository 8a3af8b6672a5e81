"""Repeated: blocks that are equal are followed once, and stand in the graph as often as called.

The blocks of a ModuleList or a Sequential are of one kind if their modules are of the same classes
and their tensors of the same shapes. Of each kind two are followed in full. If these are the same
node for node, one that is called alike, and in which all that forward reads of its modules is the
same, stands as one call, which `flatten.py` writes out. In doubt a block is followed in full: where
it reads what is not its own, keeps something, makes constants, or asks for values; and where code
ran, or an object is held, of which it cannot be told what that reads (`named.py`, `ran.py`).
"""

from __future__ import annotations

import functools
import operator
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar._torch.export_graph import traced_node
from autopar._torch.modules import has_code_around_forward
from autopar._torch.tensors import memory_of
from autopar.capture.attributes import Reads, has_same, is_equal, noted
from autopar.capture.autocasts import active
from autopar.capture.decisions import ValueQueries
from autopar.capture.fake import FakeTensor
from autopar.capture.hidden import Hiding
from autopar.capture.hooks import replaced, while_it_runs
from autopar.capture.model_tensors import by_every_name
from autopar.capture.named import Named
from autopar.capture.object_contents import PLAIN
from autopar.capture.ran import Ran
from autopar.capture.source import of_stack
from autopar.capture.templates import AGAIN, BEGINS, ENDS

FEWEST = 3  # of a kind: two are followed anyway
_KINDS = 8  # at most, of those that differ in what forward reads
WORTH_HIDING = 200  # tensors: to begin again, where it goes wrong, takes export as long as these


_SWITCHES = (
    operator.getitem,
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
)
_ROOT = "_export_root."  # what export wraps a model in while it is followed


@dataclass(eq=False)
class _Followed:
    """A block that was followed in full."""

    number: int
    block: nn.Module
    path: str
    call: Hashable  # how it was called
    nodes: list[fx.Node] = field(default_factory=list)
    given: list[fx.Node] = field(default_factory=list)
    results: list[fx.Node] = field(default_factory=list)
    tensors: dict[str, fx.Node] = field(default_factory=dict)  # its own, by name
    forms: str = ""  # of what it makes
    spec: pytree.TreeSpec | None = None
    # Of each leaf of its output: which of the given, or made, tensors it is; or what else.
    leaves: list[tuple[str, Any]] = field(default_factory=list)
    is_apart: bool = True  # it reads and makes nothing that others see
    is_proved: bool = False  # another one was the same

    def __post_init__(self) -> None:
        self.reads = Reads(self.block)
        self.ran = Ran()
        self.named = self.leads_to(self.ran)

    def leads_to(self, ran: Ran) -> Named:
        """What its modules keep, and what that and functions that `ran` lead to."""
        return Named(*self.block.modules(), *ran.functions(), ran=ran.found)

    def has_known_code(self, like: _Followed) -> bool:
        """Whether its code ran for a block like it, and is of functions that something leads to."""
        own = self.ran.own
        is_known = self.ran.is_known and self.named.is_whole
        return is_known and own <= self.named.codes and own <= like.ran.found.keys()

    def again(self, path: str, leaves: Sequence[Any]) -> Any:
        """What an equal block makes of such a call."""
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        made = AGAIN(self.number, path, self.forms, given)
        found = {"given": given, "made": made}
        results = [found[kind][of] if kind in found else of for kind, of in self.leaves]
        assert self.spec is not None
        return pytree.tree_unflatten(results, self.spec)


@contextmanager
def blocks_followed_once(model: nn.Module, shown: int | None) -> Iterator[Hiding]:
    """Within, one block of each kind in `model` is followed, and the others stand for calls of it
    in the graph: `Templates` has them written out. Of each kind so many are `shown`; the tensors of
    the others are hidden, where that spares enough."""
    follower = _Follower()
    blocks = _blocks(model)
    hidden = dict[nn.Module, int]()
    if shown is not None and not has_code_around_forward(model):  # else somebody may look unseen
        hidden = _worth_hiding(model, blocks, shown)
    with ExitStack() as stack:
        for path, block, kind in blocks:
            around = follower.around(path, block, kind, hidden.get(block))
            block.__dict__["forward"] = around
            stack.callback(block.__dict__.pop, "forward")
        stack.enter_context(follower.hiding.of(model, hidden))
        stack.enter_context(while_it_runs(model, partial(follower.knows, model)))
        asks = ValueQueries.sliced

        def sliced(asked: ValueQueries, tensor: Tensor) -> Any:
            follower.leaves_doubt()
            return asks(asked, tensor)

        stack.enter_context(replaced(ValueQueries, "sliced", sliced))
        yield follower.hiding


def _worth_hiding(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module, Hashable]], shown: int
) -> dict[nn.Module, int]:
    """The blocks to hide, each with how many of its kind are to be shown where it is needed: as
    many again, for kinds come in turn."""
    names, count = _names(model), Counter[Hashable]()
    found: dict[nn.Module, int] = {}
    for _, block, kind in blocks:
        count[kind] += 1
        if count[kind] > shown and all(len(names[id(one)]) == 1 for _, one in _tensors(block)):
            found[block] = 2 * count[kind]
    many = sum(len([*_tensors(block)]) for block in found)
    return found if many >= WORTH_HIDING else {}


class _Follower:
    """Follows each kind of block."""

    def __init__(self) -> None:
        self.kinds: dict[Hashable, list[_Followed]] = {}
        self.count = 0
        self.now: _Followed | None = None  # the one that is being followed
        self.hiding = Hiding()
        self.placeholders: dict[
            str, fx.Node | None
        ] = {}  # of parameters and buffers that are shown

    @contextmanager
    def knows(self, model: nn.Module) -> Iterator[None]:
        """Before anything is hidden from who asks: what tensors stand for as forward begins."""
        self.placeholders = {name: traced_node(one)[0] for name, one in by_every_name(model)}
        yield

    def has_its_own(self, path: str, block: nn.Module) -> bool:
        """Whether the tensors of a block are those that are given to the program by its name."""
        return all(
            self.placeholders.get(f"{path}.{name}") is traced_node(tensor)[0] is not None
            for name, tensor in _tensors(block)
        )

    def leaves_doubt(self) -> None:
        """What is followed asks for what may be another answer for the next."""
        if self.now is not None:
            self.now.is_apart = False

    def around(
        self, path: str, block: nn.Module, kind: Hashable, needed: int | None
    ) -> Callable[..., Any]:
        """Its forward; of one whose tensors are hidden, how many are `needed` to follow it."""
        forward = block.forward
        known = self.kinds.setdefault(kind, [])

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            said = _said(leaves) if self.now is None and _is_plain(spec) else None
            if said is None:
                if needed is not None:
                    self.hiding.need()
                return forward(*args, **kwargs)
            how = said, spec, active()
            like = next(
                (
                    one
                    for one in known
                    if one.call == how and has_same(block, one.reads) and one.named.is_as_before()
                ),
                None,
            )
            if needed is None:
                has_its_own = self.has_its_own(path, block)
            elif not (has_its_own := self.hiding.is_untouched(block)):
                self.hiding.need()
            if like is not None and like.is_apart and like.is_proved and has_its_own:
                return like.again(path, leaves)
            if needed is not None:
                self.hiding.need(needed)
            if len(known) >= _KINDS or (like is not None and not like.is_apart):
                return forward(*args, **kwargs)
            self.count += 1
            now = _Followed(self.count, block, path, how, is_apart=has_its_own)
            made = self._follow(now, like or now, forward, args, kwargs, leaves)
            if like is None:
                known.append(now)
            else:
                like.is_apart = now.is_apart and _is_same_program(like, now)
                like.is_proved = True
            return made

        return call

    def _follow(
        self,
        now: _Followed,
        like: _Followed,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        leaves: list[Any],
    ) -> Any:
        """Run `forward`, and note what it reads, keeps and makes."""
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        now.given = [_node(leaf) for leaf in given]
        own = dict(_tensors(now.block))
        now.tensors = {name: _node(tensor) for name, tensor in own.items()}
        forms = [*map(_form, own.values())]
        BEGINS(now.number, now.path, given)
        last = next(reversed(now.given[0].graph.nodes))
        before = now.leads_to(like.ran), [leaf._version for leaf in given]
        spec = pytree.tree_structure((args, kwargs))
        self.now = now
        try:
            with noted(now.reads), now.ran.noted():
                made = forward(*args, **kwargs)
        finally:
            self.now = None
        is_same = before[0].is_as_before()
        is_same &= before[1] == [leaf._version for leaf in given]
        after = pytree.tree_flatten((args, kwargs))
        is_same &= is_equal(leaves, after[0]) and spec == after[1]
        now.named = now.leads_to(now.ran)
        is_same &= now.reads.is_whole and now.has_known_code(like)
        now.is_apart &= is_same and _note_results(now, made, given)
        node = last.next
        while node.op != "root":
            now.nodes.append(node)
            node = node.next
        now.is_apart &= _is_alone(now) and forms == [*map(_form, own.values())]
        if now.is_apart:
            ENDS(now.number, [x for x in pytree.tree_leaves(made) if _is_made(x, given)])
        return made


def _tensors(block: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from block.named_parameters()
    yield from block.named_buffers()


def _note_results(now: _Followed, made: Any, given: Sequence[Tensor]) -> bool:
    """Note what a block gives; whether a call can stand for it."""
    leaves, now.spec = pytree.tree_flatten(made)
    learns = any(x.requires_grad for x in given)
    seen, memories = list[Tensor](), {memory_of(x) for x in given}
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            now.leaves.append(("plain", leaf))
            if type(leaf) not in PLAIN:
                return False
            continue
        place = next((i for i, x in enumerate(given) if x is leaf), None)
        if place is not None:
            now.leaves.append(("given", place))
            continue
        said = _said([leaf])
        is_floating = leaf.is_floating_point() or leaf.is_complex()
        is_plain = said is not None and leaf.device == given[0].device and is_floating
        if not is_plain or leaf.requires_grad != learns or memory_of(leaf) in memories:
            return False
        if leaf.storage_offset() or leaf.is_leaf:
            return False
        memories.add(memory_of(leaf))
        now.leaves.append(("made", len(seen)))
        seen.append(leaf)
    now.results = [_node(leaf) for leaf in seen]
    now.forms = "|".join(map(_written, seen))
    return bool(seen)


def _written(made: Tensor) -> str:
    shape, stride = (",".join(map(str, numbers)) for numbers in (made.shape, made.stride()))
    return ";".join((shape, stride, str(made.dtype).removeprefix("torch.")))


def _is_made(leaf: Any, given: Sequence[Tensor]) -> bool:
    return isinstance(leaf, Tensor) and all(leaf is not x for x in given)


def _is_alone(now: _Followed) -> bool:
    """Whether the operators of a block read what it is given, placeholders, and each other."""
    known = {*now.nodes, *now.given}
    return all(
        node.op == "call_function"
        and _is_plain_call(node.target)
        and all(one in known or one.op == "placeholder" for one in node.all_input_nodes)
        for node in now.nodes
    )


def _is_plain_call(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace != "autopar" or target.name() == "autopar::border"
    return target in _SWITCHES


def _is_same_program(one: _Followed, other: _Followed) -> bool:
    """Whether two blocks are the same, node for node."""
    if len(one.nodes) != len(other.nodes) or one.tensors.keys() != other.tensors.keys():
        return False
    same = {node: other.tensors[name] for name, node in one.tensors.items()}
    same |= dict(zip(one.given, other.given, strict=True))
    same |= dict(zip(one.nodes, other.nodes))
    for node, twin in zip(one.nodes, other.nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: same.get(x, x))
        border = getattr(node.target, "_schema", None)
        if border is not None and border.name == "autopar::border":
            args = twin.args  # they are numbered in turn
        if (node.op, node.target, args, kwargs) != (twin.op, twin.target, twin.args, twin.kwargs):
            return False
        if _values(node) != _values(twin) or _origin(node, one) != _origin(twin, other):
            return False
    results = [same.get(node) for node in one.results]
    return (results, one.leaves, one.spec) == (other.results, other.leaves, other.spec)


def _values(node: fx.Node) -> Hashable:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return tuple(_form(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)


def _origin(node: fx.Node, of: _Followed) -> Hashable:
    """Which module and line a node of a block is of."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()), ("",))[0] if stack else ""
    path = path.removeprefix(_ROOT)
    inside = path == of.path or path.removeprefix(of.path + ".")
    return inside, of_stack(node.meta.get("stack_trace"))


def _node(tensor: Tensor) -> fx.Node:
    node = traced_node(tensor)[0]
    assert node is not None
    return node


def _form(tensor: Tensor) -> tuple[Any, ...]:
    place = tensor.stride(), tensor.storage_offset(), tensor.device
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, *place


def _is_plain(spec: pytree.TreeSpec) -> bool:
    """Whether arguments stand in containers that hold nothing else."""
    if spec.is_leaf():
        return True
    return spec.type in (tuple, list, dict, OrderedDict) and all(map(_is_plain, spec.children()))


def _said(leaves: Sequence[Any]) -> Hashable | None:
    """How something is called: equal for calls that are alike; None where that cannot be said."""
    if not torch.is_grad_enabled():  # its weights are detached where the region begins
        return None
    said, tensors, memories = list[Any](), list[int](), list[int]()
    for leaf in leaves:
        if type(leaf) in PLAIN:
            said.append((type(leaf), leaf))
            continue
        if not isinstance(leaf, FakeTensor) or leaf.constant is not None:
            return None
        if isinstance(leaf, nn.Parameter) or traced_node(leaf)[0] is None:
            return None
        if any(type(number) is not int for number in (*leaf.shape, *leaf.stride())):
            return None
        tensors.append(id(leaf))
        memories.append(memory_of(leaf))
        first = tensors.index(id(leaf)), memories.index(memory_of(leaf))
        said.append((*_form(leaf), leaf.is_leaf, first))
    return tuple(said) if tensors else None


def _names(model: nn.Module) -> dict[int, list[str]]:
    """Of every parameter and buffer, by identity."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, tensor in by_every_name(model):
        found[id(tensor)].append(name)
    return found


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module, Hashable]]:
    """The repeated blocks of a model, none inside of another, by path and with their kinds."""
    names, modules = _names(model), Counter[int]()
    for _, module in model.named_modules(remove_duplicate=False):
        modules[id(module)] += 1
    if any(count > 1 for count in modules.values()):
        return []  # export calls by stand-ins then, of which each path has its own

    return list(_blocks_in(model, "", names))


def _blocks_in(
    parent: nn.Module, prefix: str, names: Mapping[int, list[str]]
) -> Iterator[tuple[str, nn.Module, Hashable]]:
    """The repeated blocks below the module at a path; `names` are those of tensors by identity."""
    is_list = isinstance(parent, nn.ModuleList | nn.Sequential)
    kinds: dict[str, Hashable] = {}
    for name, child in parent.named_children():
        if is_list and any(child.children()) and "forward" not in vars(child):
            kinds[name] = _kind_of(child, f"{prefix}{name}.", names)
    counts = Counter(kinds.values())
    for name, child in parent.named_children():
        if counts[kinds.get(name)] >= FEWEST:
            yield prefix + name, child, kinds[name]
        else:
            yield from _blocks_in(child, f"{prefix}{name}.", names)


def _kind_of(block: nn.Module, start: str, names: Mapping[int, list[str]]) -> Hashable:
    """Return what tells a block from others: modules, and the forms and `names` of tensors.

    Names of its own tensors begin with `start`."""
    kind: list[Any] = []
    for path, module in block.named_modules():
        kind.append((path, type(module)))
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                every = names[id(tensor)] if tensor is not None else []
                is_own = all(one.startswith(start) for one in every)
                whose = [one.removeprefix(start) for one in every] if is_own else every[:1]
                form = None if tensor is None else (type(tensor), *_form(tensor))
                kind.append((name, form, is_own, *whose))
    return tuple(kind)

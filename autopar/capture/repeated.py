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
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar._torch.export_graph import traced_node
from autopar._torch.modules import has_code_around_forward
from autopar.capture.annotations import is_annotated
from autopar.capture.attributes import has_same, is_equal, noted
from autopar.capture.autocasts import active
from autopar.capture.decisions import ValueQueries
from autopar.capture.followed_blocks import (
    FollowedBlock,
    call_form,
    form_of,
    is_alone,
    is_made,
    is_same_program,
    node_of,
    note_results,
    tensors_in,
)
from autopar.capture.hidden import Hiding
from autopar.capture.hooks import replaced, while_it_runs
from autopar.capture.left_out import AFTER, BEFORE, LeftOut
from autopar.capture.model_tensors import by_every_name
from autopar.capture.templates import BEGINS, ENDS

FEWEST = 3  # of a kind: two are followed anyway
_KINDS = 8  # at most, of those that differ in what forward reads
WORTH_HIDING = 200  # tensors: to begin again, where it goes wrong, takes export as long as these


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
        follower.leaves_out = not is_annotated(model)
    follower.sizes.update(kind for _, _, kind in blocks)
    places = Counter[Hashable]()
    with ExitStack() as stack:
        for path, block, kind in blocks:
            around = follower.around(path, block, kind, hidden.get(block), places[kind])
            places[kind] += 1
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
        if count[kind] > shown and all(len(names[id(one)]) == 1 for _, one in tensors_in(block)):
            found[block] = 2 * count[kind]
    many = sum(len([*tensors_in(block)]) for block in found)
    return found if many >= WORTH_HIDING else {}


class _Follower:
    """Follows each kind of block."""

    def __init__(self) -> None:
        self.kinds: dict[Hashable, list[FollowedBlock]] = {}
        self.count = 0
        self.now: FollowedBlock | None = None  # the one that is being followed
        self.hiding, self.left_out, self.leaves_out = Hiding(), LeftOut(), False
        self.sizes = Counter[Hashable]()  # blocks of each kind
        # Of parameters and buffers that are shown.
        self.placeholders: dict[str, fx.Node | None] = {}

    @contextmanager
    def knows(self, model: nn.Module) -> Iterator[None]:
        """Before anything is hidden from who asks: what tensors stand for as forward begins."""
        self.placeholders = {name: traced_node(one)[0] for name, one in by_every_name(model)}
        yield

    def has_its_own(self, path: str, block: nn.Module) -> bool:
        """Whether the tensors of a block are those that are given to the program by its name."""
        return all(
            self.placeholders.get(f"{path}.{name}") is traced_node(tensor)[0] is not None
            for name, tensor in tensors_in(block)
        )

    def leaves_doubt(self) -> None:
        """What is followed asks for what may be another answer for the next."""
        if self.now is not None:
            self.now.is_apart = False

    def around(
        self, path: str, block: nn.Module, kind: Hashable, needed: int | None, place: int
    ) -> Callable[..., Any]:
        """Its forward; of one whose tensors are hidden, how many are `needed` to follow it.
        `place`: among the blocks of its kind."""
        forward = block.forward
        known = self.kinds.setdefault(kind, [])

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            given, spec = pytree.tree_flatten((args, kwargs))
            leaves = self.left_out.without_stand_ins(given)
            said = call_form(leaves) if self.now is None and _is_plain(spec) else None
            if said is None:
                if needed is not None or self.left_out.has_stand_ins(given):
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
            sources = self.left_out.sources(given)
            if like is not None and like.is_apart and like.is_proved and has_its_own:
                is_next = like.is_next(place, sources)
                is_inside = like.row >= BEFORE < place < self.sizes[kind] - AFTER
                if is_next and is_inside and self.leaves_out:
                    made = self._stand_ins(path, like)
                    return like.output(given, made)
                if not is_next and self.left_out.has_stand_ins(given):
                    self.hiding.need()
                made = like.again(path, leaves)
                self.left_out.note(made)
                like.shown = made
                return like.output(given, made)
            if needed is not None or self.left_out.has_stand_ins(given):
                self.hiding.need(needed)
            if len(known) >= _KINDS or (like is not None and not like.is_apart):
                return forward(*args, **kwargs)
            self.count += 1
            now = FollowedBlock(self.count, block, path, how, is_apart=has_its_own)
            (like or now).is_next(place, sources)
            made = self._follow(now, like or now, forward, args, kwargs, leaves)
            self.left_out.note(now.shown)
            if like is None:
                known.append(now)
            else:
                like.is_apart = now.is_apart and is_same_program(like, now)
                like.is_proved = True
            return made

        return call

    def _stand_ins(self, path: str, like: FollowedBlock) -> list[Tensor]:
        """What a block makes that export is not shown."""
        self.hiding.is_any = True
        self.hiding.left_out.add(path)
        made = self.left_out.stand_ins(like.shown)
        self.left_out.note(made)
        return made

    def _follow(
        self,
        now: FollowedBlock,
        like: FollowedBlock,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        leaves: list[Any],
    ) -> Any:
        """Run `forward`, and note what it reads, keeps and makes."""
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        now.given = [node_of(leaf) for leaf in given]
        own = dict(tensors_in(now.block))
        now.tensors = {name: node_of(tensor) for name, tensor in own.items()}
        forms = [*map(form_of, own.values())]
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
        now.is_apart &= is_same and note_results(now, made, given)
        node = last.next
        while node.op != "root":
            now.nodes.append(node)
            node = node.next
        now.is_apart &= is_alone(now) and forms == [*map(form_of, own.values())]
        if now.is_apart:
            ENDS(now.number, [x for x in pytree.tree_leaves(made) if is_made(x, given)])
        return made


def _is_plain(spec: pytree.TreeSpec) -> bool:
    """Whether arguments stand in containers that hold nothing else."""
    if spec.is_leaf():
        return True
    return spec.type in (tuple, list, dict, OrderedDict) and all(map(_is_plain, spec.children()))


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
                form = None if tensor is None else (type(tensor), *form_of(tensor))
                kind.append((name, form, is_own, *whose))
    return tuple(kind)

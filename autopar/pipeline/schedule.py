"""A pipeline schedule as plain data: for each rank, an ordered list of actions.

Here a *rank* is one place of the pipeline; with other mesh axes it stands for one rank at each
position inside a stage.

>>> F, B = Action("F", 0, 1, (2,)), Action("B", 1, 0, (4, 5))
>>> print(F, B)
1F2 0B4+5@1

An action is one piece of work of one stage on one or more micro-batches of one pipe:

- ``F``: forward;
- ``B``: the whole backward, gradients of inputs and of weights;
- ``I``: only the gradients of inputs, for which the stage before waits;
- ``W``: only the gradients of weights, any time after the ``I`` of the same micro-batches;
- ``REDUCE_GRAD``: its rank starts to sum the gradient of the stage over all ranks that have it. The
  sum runs beside later actions. Where none is listed, it starts with the last ``B`` or ``W``.
- ``U``: the update of the stage's weights with the gradients of its micro-batches. Where none is
  listed, one update follows the step (see `weight_versions.py` for schedules with several).

A micro-batch goes through every stage of exactly one pipe: ``F`` from stage 0 to the last, then
``B`` (or ``I`` and ``W``) back. A pipe is one way of placing all stages on the ranks, with its own
copy of the weights. Movements between ranks are not listed: an ``F`` sends its output to the next
stage, a ``B`` or ``I`` its input gradient to the stage before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, overload

Kind = Literal["F", "B", "I", "W", "REDUCE_GRAD", "U"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")  # that compute, and take time
SUM: Kind = "REDUCE_GRAD"
UPDATE: Kind = "U"
KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
    SUM: "sum of gradients",
    UPDATE: "update of weights",
}
MOST_UNLISTED = 1 << 12  # micro-batches times stages that a header may count beyond the actions
Option = int | float | str | tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class Action:
    """Describe one piece of work: `kind` of `stage` of `pipe` on `microbatches` together.

    A sum of gradients is of no micro-batch.
    """

    kind: Kind
    pipe: int
    stage: int
    microbatches: tuple[int, ...]
    # Overlapped with the next action of its rank: the two start when both inputs have arrived and
    # send when both are done (a forward under a backward, as in DualPipe).
    overlaps: bool = False

    def __str__(self) -> str:
        pipe = f"@{self.pipe}" if self.pipe else ""
        return f"{self.stage}{self.kind}{'+'.join(map(str, self.microbatches))}{pipe}"


@dataclass(frozen=True)
class Schedule:
    """Hold the orders of all ranks for one step: checked, simulated, drawn and executed as data."""

    # The generator's name, such as "1f1b", for messages and plans.
    name: str
    # How many micro-batches the whole pipeline, all pipes together, processes in a step.
    microbatches: int
    # placement[pipe][stage] is the rank that holds this stage of this pipe.
    placement: tuple[tuple[int, ...], ...]
    # orders[rank]: this rank's actions, first to last.
    orders: Sequence[tuple[Action, ...]]
    # Into how many equal parts each micro-batch is cut: actions then name parts, not micro-batches
    # (2 for backward halving: F on both parts of a micro-batch together, B on each alone).
    parts: int = 1
    # The options of its generator, sorted by name.
    options: tuple[tuple[str, Option], ...] = ()
    # Of an asynchronous schedule, by stage: how many updates before the one that applies its
    # gradient a micro-batch reads the weights. None: it reads those that the update changes.
    delays: tuple[int, ...] = ()
    # The lengths, in tokens or in proportion, of the slices of each sequence. Actions then name
    # slices: those of micro-batch 1 in 4 slices are 4 to 7. None: sequences are whole.
    slices: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Return the hash, for which no action is listed."""
        return hash((self.name, self.microbatches, self.placement, self.options))

    @property
    def short(self) -> Schedule:
        """Return the schedule with the repeated middle left out, itself if nothing repeats.

        All kinds of moments of a step are in it: of what ranks hold, of who waits for whom.
        """
        return self.orders.short if isinstance(self.orders, RepeatedOrders) else self

    @cached_property
    def of_sequences(self) -> Schedule:
        """Return the schedule of whole sequences that keep memory for as long as their slices do.

        Each goes forward with its first slice, and is done with the last backward, of that slice.
        """
        if not self.slices:
            return self

        def whole(action: Action) -> Action:
            return replace(
                action, microbatches=tuple(self.slice_of(n)[0] for n in action.microbatches)
            )

        orders = tuple(
            tuple(
                whole(action)
                for action in order
                if all(self.slice_of(n)[1] == 0 for n in action.microbatches)
            )
            for order in self.orders
        )
        return replace(self, orders=orders, slices=())

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the pipeline."""
        return len(self.orders)

    @property
    def stages(self) -> int:
        """Return the number of stages into which the model is cut: ranks x chunks."""
        return len(self.placement[0])

    @property
    def chunks(self) -> int:
        """Return the number of stages of one pipe that a rank holds."""
        return max(1, self.stages // self.ranks)

    @property
    def pipes(self) -> int:
        """Return the number of pipes: each has its own copy of the weights of every stage."""
        return len(self.placement)

    @property
    def all_parts(self) -> int:
        """Return the number of parts or slices in a step, which `Action.microbatches` count."""
        return self.batch_parts * self.slice_count

    @property
    def slice_count(self) -> int:
        """Return into how many slices of tokens each sequence is cut, 1 for none."""
        return max(1, len(self.slices))

    @property
    def batch_parts(self) -> int:
        """Return into how many parts a step cuts the batch, whose sequences may be sliced."""
        return self.microbatches * self.parts

    def slice_of(self, microbatch: int) -> tuple[int, int]:
        """Return the part of the batch, and the slice of its tokens, that an action's number is."""
        return divmod(microbatch, self.slice_count)

    @cached_property
    def actions(self) -> tuple[tuple[int, Action], ...]:
        """Return every action with its rank, rank by rank."""
        return tuple((rank, action) for rank, order in enumerate(self.orders) for action in order)

    @cached_property
    def pipe_of(self) -> tuple[int, ...]:
        """Return the pipe that carries each part of a micro-batch (-1: no action names it)."""
        pipes = [-1] * self.all_parts
        for _, action in self.actions:
            for microbatch in action.microbatches:
                pipes[microbatch] = action.pipe
        return tuple(pipes)

    @cached_property
    def goes_back(self) -> bool:
        """Return whether there is a backward, as in every training step."""
        return any(action.kind not in ("F", UPDATE) for _, action in self.short.actions)

    @cached_property
    def split_stages(self) -> frozenset[int]:
        """Return the stages whose backward is split into I and W."""
        return frozenset(action.stage for _, action in self.short.actions if action.kind == "I")

    @cached_property
    def gradient_positions(self) -> tuple[Mapping[int, tuple[int, ...]], ...]:
        """Return, by rank and stage, the positions of the actions that compute weight gradients.

        The last one completes the gradient there. A rank without micro-batches has none.
        """
        by_rank = []
        for order in self.orders:
            positions: dict[int, list[int]] = {}
            for at, action in enumerate(order):
                if action.kind in ("B", "W"):
                    positions.setdefault(action.stage, []).append(at)
            by_rank.append({stage: tuple(every) for stage, every in positions.items()})
        return tuple(by_rank)

    @cached_property
    def sum_positions(self) -> tuple[Mapping[int, int], ...]:
        """Return, by rank and stage, the position of the action with which the sum of the stage's
        gradient over ranks starts: in the runtime, and so in the planner's price.

        That is the sum that the order lists, unless it follows directly on the last action that
        computes the gradient: with that action, the gradients that it completes first are summed
        beside the rest. Where none is listed, it is that action. A rank without either has none,
        and starts before its first action.
        """
        by_rank = []
        for order, computed in zip(self.orders, self.gradient_positions):
            positions = {stage: every[-1] for stage, every in computed.items()}
            before = -1  # the last action that is no sum
            for at, action in enumerate(order):
                if action.kind != SUM:
                    before = at
                elif positions.get(action.stage) != before:
                    positions[action.stage] = at
            by_rank.append(positions)
        return tuple(by_rank)

    @cached_property
    def messages(self) -> list[list[tuple[int, int, bool]]]:
        """Return for each action the key of the message it awaits (-1: none), the key of the one it
        sends (-1: none), and whether that goes to another rank.

        A key stands for the output of F, or of B or I, on a stage, by the first of its
        micro-batches: those that are joined stay joined on all stages.
        """
        count, stages = self.all_parts, self.stages
        by_rank = []
        for rank, order in enumerate(self.orders):
            row = []
            for action in order:
                if action.kind in ("W", SUM, UPDATE):
                    row.append((-1, -1, False))
                    continue
                step = 1 if action.kind == "F" else -1
                key = action.stage * count + action.microbatches[0]
                key += 0 if action.kind == "F" else stages * count
                before, after = action.stage - step, action.stage + step
                row.append((
                    key - step * count if 0 <= before < stages else -1,
                    key,
                    0 <= after < stages and self.placement[action.pipe][after] != rank,
                ))  # fmt: skip
            by_rank.append(row)
        return by_rank

    @cached_property
    def senders(self) -> dict[int, tuple[int, int]]:
        """Return, by the key of a message, its sending rank and the action's position there."""
        return {
            key: (rank, position)
            for rank, row in enumerate(self.messages)
            for position, (_, key, _) in enumerate(row)
            if key >= 0
        }

    @cached_property
    def readers(self) -> dict[int, tuple[int, int]]:
        """Return, by the key of a message, the rank that awaits it and the action's position."""
        return {
            key: (rank, position)
            for rank, row in enumerate(self.messages)
            for position, (key, _, _) in enumerate(row)
            if key >= 0
        }

    def rank_of(self, pipe: int, stage: int) -> int:
        """Return the rank that holds `stage` of `pipe`."""
        return self.placement[pipe][stage]

    def local_stages(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the (pipe, stage) pairs that `rank` holds, in that order."""
        return tuple(
            (pipe, stage)
            for pipe, ranks in enumerate(self.placement)
            for stage, holder in enumerate(ranks)
            if holder == rank
        )

    def stages_on(self, rank: int) -> list[int]:
        """Return the stages of which `rank` holds a copy, in any pipe, each once."""
        return sorted({stage for _, stage in self.local_stages(rank)})

    def replicas_of(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold a copy of `stage`, by pipe: they share its gradient."""
        return tuple(ranks[stage] for ranks in self.placement)

    def holders(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks that hold one of `stages` in any pipe."""
        return tuple(sorted({rank for stage in stages for rank in self.replicas_of(stage)}))

    def __str__(self) -> str:
        return to_text(self)


class RepeatedOrders(Sequence[tuple[Action, ...]]):
    """Stand for the orders of a schedule that repeats a part of a shorter one, until they are read.

    A schedule of 64 stages and 384 micro-batches has 50,000 actions, of which a planner needs few.
    """

    def __init__(
        self, short: Schedule, period: int, repeats: int, listed: Callable[[], Schedule]
    ) -> None:
        """`period`: the micro-batches that each of the `repeats` adds to those of `short`.
        `listed`: makes the schedule with all actions."""
        self.short, self.period, self.repeats, self._make = short, period, repeats, listed

    @cached_property
    def _listed(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(self._make().orders)

    def __len__(self) -> int:
        return len(self.short.orders)

    @overload
    def __getitem__(self, rank: int) -> tuple[Action, ...]: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[tuple[Action, ...], ...]: ...
    def __getitem__(self, rank: int | slice) -> tuple[Action, ...] | tuple[tuple[Action, ...], ...]:
        return self._listed[rank]

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return iter(self._listed)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RepeatedOrders) and self.short == other.short:
            return self.repeats == other.repeats
        return isinstance(other, Sequence) and self._listed == tuple(other)

    def __hash__(self) -> int:
        return hash(self._listed)


def one_stage(microbatches: int) -> Schedule:
    """Return the schedule of a program without a pipeline: one micro-batch after another."""
    order = tuple(Action(kind, 0, 0, (n,)) for n in range(microbatches) for kind in ("F", "B"))
    return Schedule("one stage", microbatches, ((0,),), (order,))


def forward_only(placement: tuple[tuple[int, ...], ...], microbatches: int) -> Schedule:
    """Return a schedule that sends every micro-batch forward, the pipes in turn, and none back.

    As many micro-batches as ranks go through a stage before the next stage of the same rank begins.
    All ranks follow one order, in which a micro-batch leaves a stage before it enters the next.
    """
    ranks = max(map(max, placement)) + 1
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    for first in range(0, microbatches, ranks):
        for stage in range(len(placement[0])):
            for microbatch in range(first, min(first + ranks, microbatches)):
                pipe = microbatch % len(placement)
                orders[placement[pipe][stage]].append(Action("F", pipe, stage, (microbatch,)))
    return make("forward only", microbatches, placement, orders)


def forward_then_backward(placement: tuple[tuple[int, ...], ...], microbatches: int) -> Schedule:
    """Return a step for any stages and micro-batches: all forward, then all back in reverse."""
    forwards = forward_only(placement, microbatches)
    orders = (
        (*order, *(Action("B", f.pipe, f.stage, f.microbatches) for f in reversed(order)))
        for order in forwards.orders
    )
    return make("there and back", microbatches, placement, orders)


def make(
    name: str,
    microbatches: int,
    placement: Iterable[Sequence[int]],
    orders: Iterable[Iterable[Action]],
    parts: int = 1,
    slices: tuple[int, ...] = (),
    /,
    **options: Option,
) -> Schedule:
    """Return a schedule made of a generator's lists."""
    return Schedule(
        name,
        microbatches,
        tuple(map(tuple, placement)),
        tuple(map(tuple, orders)),
        parts,
        tuple(sorted(options.items())),
        slices=slices,
    )


def heading(schedule: Schedule) -> list[tuple[str, str]]:
    """Return everything of a schedule besides its orders, as keys and values."""
    lines = [("name", schedule.name), ("microbatches", str(schedule.microbatches))]
    if schedule.parts > 1:
        lines.append(("parts", str(schedule.parts)))
    if schedule.delays:
        lines.append(("delays", " ".join(map(str, schedule.delays))))
    if schedule.slices:
        lines.append(("slices", " ".join(map(str, schedule.slices))))
    if schedule.options:
        options = (f"{name}={_write_option(value)}" for name, value in schedule.options)
        lines.append(("options", " ".join(options)))
    for pipe, ranks in enumerate(schedule.placement):
        lines.append((f"pipe {pipe}", " ".join(map(str, ranks))))
    return lines


def to_text(schedule: Schedule) -> str:
    """Return the schedule as lines of `key: value`."""
    lines = heading(schedule)
    for rank, order in enumerate(schedule.orders):
        lines.append((f"rank {rank}", " ".join(cells(order))))
    return "\n".join(f"{key}: {value}".rstrip() for key, value in lines)


def cells(order: Iterable[Action]) -> list[str]:
    """Return the cells of an order: the inverse of `notation.parse_cell`."""
    written: list[str] = []
    first: Action | None = None
    for action in order:
        if first is not None:
            written.append(f"({first};{action})OVERLAP_F_B")
            first = None
        elif action.overlaps:
            first = action
        else:
            written.append(str(action))
    return written


def _write_option(value: Option) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)

"""Random runs: a random program under a random configuration, beside the single program.

>>> run(7, 0).verdict
'compared'

Each step has another batch, and some add the gradients of two. Half of all configurations are in
micro-batches, most of these in a pipeline; some cut states (ZeRO). Some do to a parameter after
`parallelize` what people do: freeze, unfreeze, replace and load it.
"""

from __future__ import annotations

import random
import signal
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import autopar as ap
from tests.models import Case
from tests.parity import STEPS, Batches, Outcome, assert_equal, parallel_outcome, single_outcome
from tests.random_programs import BatchStatistics, Coarse, another_batch, has, program
from tests.toy import machines

MESHES = (
    {"a": 2},
    {"a": 3},
    {"a": 4},
    {"a": 2, "b": 2},
    {"a": 2, "b": 3},
    {"a": 2, "b": 2, "c": 2},
)
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "gems",
    "chimera",
    "zb-h1",
    "zb-v",
    "dualpipe",
    "dualpipe-v",
    "chimera-zb",
)
STATES = ("zero1", "zero2", "zero3")
CHANGES = ("freeze", "unfreeze", "replace", "load", "assign")
# A part in bfloat16, whose values round either way: four units in their last place.
COARSE = {"tolerance": 2.0**-5, "floor": 1e-2}
SECONDS = 120


@dataclass(frozen=True)
class Configuration:
    """How a program is run in parallel."""

    options: dict[str, Any]
    cuts: dict[str, tuple[tuple[str, ...], ...]]  # parameter -> axes of each dim
    change: str  # what is done to a parameter after parallelize; "" nothing
    parts: int  # micro-batches
    passes: int  # batches whose gradients add up

    def __str__(self) -> str:
        shown = {key: value for key, value in self.options.items() if key != "cluster"}
        more = f"change {self.change or 'none'}, batches of a step {self.passes}"
        return f"{shown}, cuts {self.cuts}, {more}"


@dataclass(frozen=True)
class Result:
    """What became of one run."""

    verdict: (
        str  # "compared", "coarse" (compared, with a part in bfloat16), "refused", "wrong", "raw"
    )
    reason: str = field(default="")
    configuration: str = field(default="")


def configuration(seed: int, number: int, case: Case) -> Configuration:
    """The `number`-th configuration of a program."""
    rng = random.Random(f"{seed}/{number}")
    batch = len(case.args[0])
    sizes = dict(rng.choice(MESHES))
    options: dict[str, Any] = {"mode": rng.choice(["auto", "propagate", "propagate", "data"])}
    parts = 1
    if rng.random() < 0.5:
        parts = rng.choice([count for count in (2, 3, 4, 6) if batch % count == 0])
        options["microbatches"] = parts
        if rng.random() < 0.7:
            sizes = {"pp": 2} | dict(rng.choice(MESHES[:4] + ({},)))  # noqa: RUF005
            options["schedule"] = rng.choice(SCHEDULES)
    options["recompute"] = rng.choice([None, None, "selective", "full"])
    mesh = ap.Mesh(**sizes)
    options["mesh"] = mesh
    if options["mode"] == "auto":
        options["cluster"] = machines(mesh.size, bandwidth=rng.choice([1e8, 1e9, 1e12]))
    axes = [name for name in sizes if name != "pp"]
    cuts: dict[str, tuple[tuple[str, ...], ...]] = {}
    if options["mode"] == "propagate" and axes:
        density = rng.choice([0.0, 0.2, 0.6])
        for name, parameter in case.model.named_parameters():
            if rng.random() < density:
                cuts[name] = _cut(rng, parameter, axes, sizes)
    change = rng.choice(CHANGES) if rng.random() < 0.2 else ""
    if rng.random() < 0.3:
        options["states"] = rng.choice(STATES)
    return Configuration(options, cuts, change, parts, rng.choice([1, 1, 2]))


def run(seed: int, number: int) -> Result:
    """One program in one configuration; nothing that happens is raised."""
    made = ""
    try:
        with warnings.catch_warnings(), _deadline():
            warnings.simplefilter("ignore")
            case, other = program(seed), program(seed)
            chosen = configuration(seed, number, case)
            made = str(chosen)
            for name, dims in chosen.cuts.items():
                owner, _, leaf = name.rpartition(".")
                ap.shard(case.model.get_submodule(owner), params={leaf: dims})
            module = ap.parallelize(
                case.model, case.args, case.kwargs, backend="virtual", **chosen.options
            )
            changed = _changed(seed, number, other.model)
            change(module, chosen.change, *changed)
            batches = _batches(case, chosen.passes)
            actual = parallel_outcome(module, case, batches=batches)
            change(other.model, chosen.change, *changed)
            expected = _expected(other, chosen.parts, batches)
            _compare(actual, expected, has(case.model, Coarse))
    except ap.AutoparError as error:
        return Result("refused", f"{error.rule} | {error.got}", made)
    except AssertionError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        verdict = "wrong" if last.name == "assert_equal" else "raw"
        return Result(verdict, str(error) or str(last), made)
    except Exception as error:
        return Result("raw", f"{type(error).__name__}: {error}", made)
    return Result("coarse" if has(case.model, Coarse) else "compared", "", made)


def _compare(actual: Outcome, expected: Outcome, is_coarse: bool) -> None:
    """Where values are coarse, loss and gradients: AdamW's first step makes any rounding large."""
    if is_coarse:
        pair = (replace(one, state={}) for one in (actual, expected))
        assert_equal(*pair, **COARSE)
    else:
        assert_equal(actual, expected)


def change(model: nn.Module, what: str, name: str, value: Tensor) -> None:
    """Do to a model what people do to one that exists."""
    owner, _, leaf = name.rpartition(".")
    parameter = model.get_parameter(name)
    if what == "freeze":
        parameter.requires_grad_(False)
    elif what == "unfreeze":
        parameter.requires_grad_(True)
    elif what == "replace":
        learns = parameter.requires_grad
        setattr(model.get_submodule(owner), leaf, nn.Parameter(value.clone(), learns))
    elif what in ("load", "assign"):
        model.load_state_dict({name: value.clone()}, strict=False, assign=what == "assign")


def _changed(seed: int, number: int, model: nn.Module) -> tuple[str, Tensor]:
    rng = random.Random(f"change {seed}/{number}")
    name, parameter = rng.choice(list(model.named_parameters()))
    generator = torch.Generator().manual_seed(seed)
    return name, torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def _batches(case: Case, passes: int) -> Batches:
    """The batches of each step, the first of which is the case's own."""
    count = passes * (1 if has(case.model, Coarse) else STEPS)
    every = [case.args, *(another_batch(case, seed) for seed in range(1, count))]
    return [every[start : start + passes] for start in range(0, count, passes)]


def _expected(case: Case, parts: int, batches: Batches) -> Outcome:
    if parts > 1 and has(case.model, BatchStatistics):
        case = InTurns.of(case, parts)
    return single_outcome(case, batches=batches)


@dataclass(frozen=True)
class InTurns(Case):
    """A case whose batch norm sees one micro-batch after another, for losses that are means."""

    parts: int = 1

    @classmethod
    def of(cls, case: Case, parts: int) -> InTurns:
        return cls(case.name, case.model, case.args, case.kwargs, parts)

    def run(self) -> Tensor:
        pieces = zip(*(value.chunk(self.parts) for value in self.args))
        return torch.stack([self.loss(self.model(*piece)) for piece in pieces]).mean()


def _cut(
    rng: random.Random, parameter: Tensor, axes: list[str], sizes: dict[str, int]
) -> tuple[tuple[str, ...], ...]:
    dims: list[tuple[str, ...]] = [() for _ in parameter.shape]
    for axis in rng.sample(axes, len(axes)):
        dim = rng.randrange(-1, parameter.ndim)
        degree = sizes[axis] * torch.tensor([sizes[a] for a in dims[dim]]).prod().int().item()
        if dim >= 0 and parameter.shape[dim] >= degree:
            dims[dim] += (axis,)
    return tuple(dims)


@contextmanager
def _deadline() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {SECONDS} s of this process's time")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)

"""SavedValue: a plan as it is on disk, field by field, without the model that it is for.

Times and bytes are not saved: they are computed anew for the model that the plan is attached to.
A new decision gets a field here; files, `diff` and the comparison of ranks follow from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autopar.base.schema import Count, Positive, write
from autopar.candidates.alternative import Alternative
from autopar.candidates.search_step import SearchStep
from autopar.candidates.trial import Trial
from autopar.capture.dynamic import DynamicShapes
from autopar.capture.fingerprint import Fingerprint
from autopar.capture.policies import saved_results
from autopar.cluster import Cluster
from autopar.defaults import Mode
from autopar.errors import InvalidInput
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.pipeline.pipelining import Pipelining
from autopar.plans.plan_value import PlanValue
from autopar.precision import Precision
from autopar.search.decisions import Decisions, TypedDecisions
from autopar.search.search_report import SearchReport
from autopar.states import States
from autopar.tensor_type import TensorType

# Fields on how a plan was found: plans that differ in these alone decide the same.
_ACCOUNT = {"decides": False}
# Fields on what the machines are taken to be: each rank may know its own.
_OF_RANK = {"is_of_rank": True}


@dataclass(frozen=True)
class SavedValue:
    """Everything that was decided, and the fingerprint of the model it was decided for."""

    mode: Mode
    # Bytes of each device that the search kept to.
    limit: Positive | None = field(metadata={"key": "memory_limit"} | _OF_RANK)
    # Micro-batches of a step; None: the batch was not cut.
    microbatch_count: Count | None = field(metadata={"key": "microbatches"})
    typed: TypedDecisions = field(metadata={"key": "decisions"})
    cluster: Cluster = field(metadata=_OF_RANK)
    precision: Precision | None
    pipelining: Pipelining | None = field(metadata={"key": "pipeline"})
    search: SearchReport | None = field(metadata=_ACCOUNT)
    states: States  # what the places of parameters follow from
    # Ways to run a step that were weighed.
    alternatives: tuple[Alternative, ...] = field(metadata=_ACCOUNT)
    left_out: Mapping[str, Count] = field(metadata=_ACCOUNT)  # how many were not asked about
    asked: tuple[SearchStep, ...] = field(metadata=_ACCOUNT)  # what the planner asked, in order
    trials: tuple[Trial, ...] = field(metadata=_ACCOUNT)  # of plans that were run to choose
    annotated: Mapping[str, str] = field(metadata=_ACCOUNT)  # parameter -> the user's line
    # Of parameters and buffers by name, of all values but placeholders by node.
    others: Mapping[str, TensorType] = field(metadata={"key": "types"})
    dynamic: DynamicShapes | None = field(metadata={"key": "dynamic_shapes"})
    strict: bool
    fingerprint: Fingerprint = field(metadata={"key": "model"})
    saved_results: tuple[str, ...] = ()  # the calls whose results checkpoint policies save

    @cached_property
    def decisions(self) -> Decisions:
        return self.typed.untyped

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """The type of every parameter and buffer by its name, of every value by its node's."""
        placed = self.typed.placeholders
        stored = {
            name: replace(placed[name], layout=places.storage)
            for name, places in self.typed.apart.items()
        }
        return {**placed, **stored, **self.typed.fixed, **self.others}

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of every parameter and buffer by its name, of every value by its node's."""
        return {name: type_.layout for name, type_ in self.types.items()}

    @property
    def mesh(self) -> Mesh:
        return self.typed.mesh

    @property
    def whole_mesh(self) -> Mesh:
        """The mesh of all ranks, the axis of a pipeline among its axes."""
        return self.mesh if self.pipelining is None else self.pipelining.mesh

    @property
    def microbatches(self) -> int:
        return self.microbatch_count or 1


def deciding() -> tuple[Field[Any], ...]:
    """Return the fields in which plans that decide the same are equal."""
    return tuple(f for f in fields(SavedValue) if f.metadata.get("decides", True))


def values_to_save(plan: PlanValue) -> dict[str, Any]:
    """Return the values of a plan that go to disk, by field."""
    placeholders = plan.decisions.placeholders
    computed = {
        "microbatch_count": None if plan.batches is None else plan.batches.count,
        "typed": TypedDecisions.of(plan.decisions, plan.types),
        "saved_results": saved_results(plan.captured),
        "others": {name: t for name, t in plan.types.items() if name not in placeholders},
    }
    names = (field.name for field in fields(SavedValue))
    return {n: computed[n] if n in computed else getattr(plan, n) for n in names}


def digest(plan: PlanValue) -> str:
    """Return a hash of a plan's decisions, whatever the machines are taken to be."""
    data, decided = write(SavedValue(**values_to_save(plan))), {}
    for decision in deciding():
        if not decision.metadata.get("is_of_rank"):
            key = decision.metadata.get("key", decision.name)
            decided[key] = data[key]
    if decided["pipeline"] is not None:  # the times of its stages depend on the machines
        starts = [stage["starts"] for stage in decided["pipeline"]["stages"]]
        decided["pipeline"] = {**decided["pipeline"], "stages": starts}
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]


def read_file(path: str | Path) -> Any:
    """Return the data in a plan's file."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
        return json.loads(text, object_pairs_hook=_require_unique)
    except OSError as error:
        raise InvalidInput(
            "a plan file can be read",
            got=f"{path}: {error.strerror}",
            remedy="give the path of a file that plan.save() wrote",
        ) from None
    except (ValueError, RecursionError) as error:
        raise malformed(str(path), f"no JSON: {error}") from None


def _require_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; refuse a key that it has twice."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} twice")
    return unique


def malformed(source: str, what: str) -> InvalidInput:
    """Return the error of a file that does not hold a plan as it was written."""
    return InvalidInput(
        "a plan file is as plan.save() wrote it",
        got=f"{source}: {what}",
        remedy="save the plan again",
    )

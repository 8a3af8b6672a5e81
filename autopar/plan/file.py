"""SavedPlan: a plan as it stands on disk, without the model that it is for.

    plan.save("plan.json")
    saved = Plan.load("plan.json")               # prints, compares, tells layouts
    plan = saved.attach(model, args, kwargs)     # refuses another model, shape or torch
    pm = parallelize(model, args, kwargs, plan=saved)

Times and bytes are not saved: they are computed anew for the model that the plan is attached to.
What a plan comes to hold besides gets a field here and in `StoredPlan`, and its lines in `of`,
`to_json` and `read`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from torch import nn

from autopar.capture import capture
from autopar.capture.captured import Captured
from autopar.capture.fingerprint import Fingerprint, fingerprint_of
from autopar.cluster import Cluster, StoredCluster
from autopar.cost.price import ClusterPrice
from autopar.errors import AutoparError, InvalidInput
from autopar.layout import Layout, TensorType
from autopar.mesh import Mesh
from autopar.passes import rewrite
from autopar.passes.microbatches import cut_batch
from autopar.pipeline.pipelining import Pipelining, StoredPipelining
from autopar.pipeline.price import stage_costs
from autopar.pipeline.stages.costs import price_stages
from autopar.plan.diff import PlanDiff, compare
from autopar.plan.plan import Plan
from autopar.plan.sound import require_fitting, require_sound, require_types
from autopar.plan.text import saved_text
from autopar.planner.choose import Alternative
from autopar.schema import Count, Mismatch, Positive, read
from autopar.search.auto import Search, StoredSearch
from autopar.search.constraints import Constraints, LayoutConstraint, read_constraints
from autopar.search.decisions import Decisions
from autopar.search.stored import Axes, StoredDecisions, decisions_to_json

FORMAT, VERSION = "autopar plan", 4


@dataclass(frozen=True)
class SavedPlan:
    """Everything that was decided, and the fingerprint of the model it was decided for."""

    decisions: Decisions
    cluster: Cluster
    fingerprint: Fingerprint
    types: Mapping[str, TensorType]  # of parameters and buffers by name, of all values by node
    mode: str
    limit: float | None  # bytes of each device that the search kept to
    slices: int | None  # micro-batches of a step; None: the batch was not cut
    annotated: Mapping[str, str]  # parameter -> the user's line
    search: Search | None
    pipelining: Pipelining | None
    alternatives: tuple[Alternative, ...] = ()  # ways to run a step that were weighed

    is_attached = False

    @property
    def mesh(self) -> Mesh:
        return self.decisions.mesh

    @property
    def microbatches(self) -> int:
        return self.slices or 1

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of every parameter and buffer by its name, of every value by its node's."""
        return {name: type_.layout for name, type_ in self.types.items()}

    @property
    def cost(self) -> NoReturn:
        raise self._without_model("its cost")

    @property
    def memory(self) -> NoReturn:
        raise self._without_model("its memory")

    @property
    def program(self) -> NoReturn:
        raise self._without_model("its program")

    def explain(self, name: str) -> NoReturn:
        raise self._without_model(f"an explanation of {name}")

    def movements(self) -> NoReturn:
        raise self._without_model("its movements")

    def diff(self, other: Plan | SavedPlan) -> PlanDiff:
        """Two plans side by side."""
        return compare(self, other)

    @classmethod
    def of(cls, plan: Plan) -> SavedPlan:
        """What of a plan goes to disk."""
        constraints = plan.constraints.parameters if plan.constraints is not None else {}
        return cls(
            decisions=plan.decisions,
            cluster=plan.cluster,
            fingerprint=plan.fingerprint,
            types=plan.types,
            mode=plan.mode,
            limit=plan.limit,
            slices=None if plan.batches is None else plan.batches.count,
            annotated={name: constraint.source for name, constraint in constraints.items()},
            search=plan.search,
            pipelining=plan.pipelining,
            alternatives=plan.alternatives,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data, with everything that `from_json` wants."""
        shown = self.types.keys() - self.decisions.placeholders.keys()
        return {
            "format": FORMAT,
            "version": VERSION,
            "mode": self.mode,
            "memory_limit": self.limit,
            "microbatches": self.slices,
            "decisions": decisions_to_json(self.decisions, self.types),
            "cluster": self.cluster.to_json(),
            "pipeline": None if self.pipelining is None else self.pipelining.data(),
            "search": None if self.search is None else self.search.to_json(),
            "alternatives": [alternative.to_json() for alternative in self.alternatives],
            "annotated": dict(self.annotated),
            "types": {name: str(type_) for name, type_ in self.types.items() if name in shown},
            "model": self.fingerprint.to_json(),
        }

    @classmethod
    def from_json(cls, data: Any, source: str = "the data") -> SavedPlan:
        """The plan that `data` describes; `source` says where it came from."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise InvalidInput(
                "a plan file is one that plan.save() wrote",
                got=f"{source}, which holds something else",
                remedy="save a plan with plan.save(path), or `autopar plan ... --out path`",
            )
        if data.get("version") != VERSION:
            raise InvalidInput(
                f"this autopar reads plans of version {VERSION}",
                got=f"{source} of version {str(data.get('version'))[:20]}",
                remedy="make the plan again with this version",
            )
        try:
            saved = read(StoredPlan, data).read()
            require_sound(saved)
        except Mismatch as error:
            raise _malformed(source, str(error)) from None
        except AutoparError as error:
            raise _malformed(source, f"{error.rule}: {error.got}") from None
        return saved

    def save(self, path: str | Path) -> None:
        """Write the plan to a file; equal plans give equal files."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1, sort_keys=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> SavedPlan:
        """Read what `save` wrote."""
        try:
            text = Path(path).read_bytes().decode("utf-8")
            data = json.loads(text, object_pairs_hook=_once)
        except OSError as error:
            raise InvalidInput(
                "a plan file can be read",
                got=f"{path}: {error.strerror}",
                remedy="give the path of a file that plan.save() wrote",
            ) from None
        except (ValueError, RecursionError) as error:
            raise _malformed(str(path), f"no JSON: {error}") from None
        return cls.from_json(data, str(path))

    def attach(
        self, model: nn.Module, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Plan:
        """The plan of this very model: another model, shape or torch is refused by name."""
        captured = capture(model, args, dict(kwargs or {}))
        self.require_same(fingerprint_of(captured))
        return self.attach_captured(captured)

    def require_same(self, found: Fingerprint) -> None:
        """Refuse a model that is not the one that the plan was made for."""
        differences = found.differences(self.fingerprint)
        if differences:
            raise InvalidInput(
                "a plan is for one model, with inputs of one shape, on one torch",
                got="\n".join(differences),
                remedy="give what the plan was made for, or make a plan for this",
            )

    def attach_captured(self, captured: Captured) -> Plan:
        """The plan of a model that was captured and is the same."""
        batches = None if self.slices is None else cut_batch(captured, self.slices)
        captured = captured if batches is None else batches.captured
        require_fitting(self, captured)
        marked = read_constraints(captured, self.mesh, {})
        names = {name: placeholder for placeholder, name in captured.parameters.items()}
        parameters = {
            name: LayoutConstraint(self.decisions.placeholders[names[name]], source)
            for name, source in self.annotated.items()
        }
        plan = Plan(
            captured,
            self.decisions,
            ClusterPrice(self.cluster, self.mesh),
            self.cluster,
            self.search,
            batches,
            self._priced(captured),
            mode=self.mode,
            limit=self.limit,
            constraints=Constraints(marked.values, parameters, marked.inputs, marked.bound),
            alternatives=self.alternatives,
        )
        require_types(self, plan.types)
        return plan

    def _priced(self, captured: Captured) -> Pipelining | None:
        """The pipeline with what its stages take now."""
        if self.pipelining is None:
            return None
        graph = rewrite(captured, self.decisions, ClusterPrice(self.cluster, self.mesh))
        starts = [stage.starts for stage in self.pipelining.stages]
        whole, axis = self.pipelining.mesh, self.pipelining.axis
        line = stage_costs(captured, graph, self.mesh, self.cluster, whole, axis)
        stages = price_stages(line.recomputed() if self.pipelining.recompute else line, starts)
        return replace(self.pipelining, stages=tuple(stages))

    def _without_model(self, what: str) -> InvalidInput:
        return InvalidInput(
            "what depends on the model is computed for the model, and never saved",
            got=f"{what} of a plan without its model",
            remedy="attach it: Plan.load(path).attach(model, args, kwargs)",
        )

    def __str__(self) -> str:
        return saved_text(self)


@dataclass(frozen=True)
class StoredAlternative:
    mesh: Axes
    microbatches: Count
    schedule: str
    options: Mapping[str, bool | int | float | str | tuple[float, ...] | None]
    seconds: float
    memory: float
    fits: bool
    recompute: bool = False

    def read(self) -> Alternative:
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        options = tuple(self.options.items())
        return Alternative(**{**known, "mesh": Mesh(**self.mesh), "options": options})


@dataclass(frozen=True)
class StoredPlan:
    """All that a plan's file holds."""

    format: str
    version: int
    mode: Literal["auto", "propagate", "data"]
    memory_limit: Positive | None
    microbatches: Count | None
    decisions: StoredDecisions
    cluster: StoredCluster
    pipeline: StoredPipelining | None
    search: StoredSearch | None
    alternatives: tuple[StoredAlternative, ...]
    annotated: Mapping[str, str]
    types: Mapping[str, TensorType]
    model: Fingerprint

    def read(self) -> SavedPlan:
        return SavedPlan(
            decisions=self.decisions.read(),
            cluster=Cluster.from_stored(self.cluster),
            fingerprint=self.model,
            types={**self.decisions.placeholders, **self.decisions.fixed, **self.types},
            mode=self.mode,
            limit=self.memory_limit,
            slices=self.microbatches,
            annotated=self.annotated,
            search=None if self.search is None else self.search.read(),
            pipelining=None if self.pipeline is None else self.pipeline.read(),
            alternatives=tuple(entry.read() for entry in self.alternatives),
        )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, with each key once."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} twice")
    return found


def _malformed(source: str, what: str) -> InvalidInput:
    return InvalidInput(
        "a plan file is as plan.save() wrote it",
        got=f"{source}: {what}",
        remedy="save the plan again",
    )

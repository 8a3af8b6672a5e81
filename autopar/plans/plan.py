"""Plan: what was decided, and what a person asks of it; SavedPlan: the same without its model.

print(plan)                                  # what was decided, predicted time and memory
plan.explain("layers.0.mlp.up")              # why: each candidate, as formula and number
plan.what_if(nodes=4)                        # the same decisions elsewhere, priced
plan.diff(other)                             # two plans side by side
plan.save("plan.json")
saved = Plan.load("plan.json")               # prints, compares, tells layouts
plan = saved.attach(model, args, kwargs)     # refuses another model, shape or torch
pm = parallelize(model, args, kwargs, plan=saved)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from autopar.base.files import write_file
from autopar.base.schema import Mismatch, read, write
from autopar.candidates.candidate import Candidate
from autopar.candidates.laid_out_program import LaidOutProgram
from autopar.candidates.room_checks import require_room
from autopar.candidates.training_step import TrainingStep
from autopar.capture import capture
from autopar.capture.captured import Captured
from autopar.capture.dynamic import DynamicShapes
from autopar.capture.failure import check_call
from autopar.capture.fingerprint import Fingerprint, fingerprint_of
from autopar.capture.policies import keep_answers
from autopar.cluster.cluster_part import PipelineLine
from autopar.errors import AutoparError, InvalidInput
from autopar.passes.microbatches import cut_batch
from autopar.plans.operator_reasons import explain
from autopar.plans.plan_diff import compare
from autopar.plans.plan_pages import draw, report, trace
from autopar.plans.plan_text import plan_data, plan_text, saved_text
from autopar.plans.plan_value import PlanValue
from autopar.plans.saved_value import SavedValue, malformed, read_file, values_to_save
from autopar.plans.soundness import (
    require_apart,
    require_fitting,
    require_sound,
    require_step,
    require_types,
)
from autopar.plans.what_if import what_if
from autopar.search.constraints import LayoutConstraint, read_constraints

FORMAT, VERSION = "autopar plan", 15


class Plan(PlanValue):
    """Every decision about one model. `program` is what runs; `movements()` lists what moves.

    A plan prints as a page, and `to_json()` gives that page as plain data. Nothing of it changes.
    """

    explain, diff, report, draw, trace = explain, compare, report, draw, trace
    what_if = what_if
    to_json, __str__ = plan_data, plan_text

    def save(self, path: str | Path) -> None:
        """Write every decision to a file; equal plans give equal files.

        Args:
            path: The file, with or without folders that do not exist yet.
        """
        write_file(path, self.file, "the file of a plan")

    @cached_property
    def file(self) -> bytes:
        """The bytes that `save` writes, made once: nothing of a plan changes."""
        return SavedPlan.of(self).to_bytes()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a plan as its file, which is attached to its model when it comes back."""
        return SavedPlan.of_bytes, (self.file,)

    def __copy__(self) -> Plan:
        return self  # nothing of it changes

    def __deepcopy__(self, memo: object) -> Plan:
        return self

    @staticmethod
    def load(path: str | Path) -> SavedPlan:
        """Read a plan from a file. It runs once it is attached to its model.

        Args:
            path: A file that `save` wrote.
        """
        return SavedPlan.load(path)

    def attach(
        self, model: nn.Module, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Plan:
        """Return this plan for another copy of the model; any other model is refused.

        Args:
            model: A model equal to the one that was planned, values aside.
            args: Its positional arguments. Without any, those that were planned.
            kwargs: Its keyword arguments.
        """
        require_step(self.pipelining)
        example = self.original.example
        if not args and not kwargs:
            args, kwargs = example.args, example.kwargs
        args, kwargs = _as_planned(self.dynamic, model, args, kwargs)
        captured = capture(model, args, kwargs, self.precision)
        saved, fingerprint = SavedPlan.of(self), fingerprint_of(captured)
        saved.require_same(fingerprint)
        is_same = fingerprint == self.fingerprint and fingerprint.is_complete
        if is_same and captured.example.device == example.device:
            return self
        return saved.attach_captured(captured)


class NoModel(InvalidInput, AttributeError):
    """A plan without its model was asked for what only the two together have."""


class SavedPlan(SavedValue):
    """Everything that was decided, and the fingerprint of the model it was decided for."""

    diff, __str__ = compare, saved_text

    @classmethod
    def of(cls, plan: PlanValue) -> SavedPlan:
        """Return the part of a plan that goes to disk."""
        return cls(**values_to_save(plan))

    def to_json(self) -> dict[str, Any]:
        """Plain data, with everything that `from_json` wants."""
        return {"format": FORMAT, "version": VERSION, **write(self)}

    @classmethod
    def from_json(cls, data: Any, source: str = "the data") -> SavedPlan:
        """Return the plan that `data` describes; `source` says where it came from."""
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
            saved = read(cls, {k: v for k, v in data.items() if k not in ("format", "version")})
            require_sound(saved)
        except Mismatch as error:
            raise malformed(source, str(error)) from None
        except AutoparError as error:
            raise malformed(source, f"{error.rule}: {error.got}") from None
        return saved

    def save(self, path: str | Path) -> None:
        """Write the plan to a file; equal plans give equal files."""
        write_file(path, self.to_bytes(), "the file of a plan")

    def to_bytes(self) -> bytes:
        """Return the bytes that `save` writes."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False).encode() + b"\n"

    def __reduce__(self) -> tuple[Any, ...]:
        return SavedPlan.of_bytes, (self.to_bytes(),)

    @classmethod
    def of_bytes(cls, data: bytes) -> SavedPlan:
        """Return the plan whose file holds `data`."""
        return cls.from_json(json.loads(data))

    @classmethod
    def load(cls, path: str | Path) -> SavedPlan:
        """Read the file that `save` wrote."""
        return cls.from_json(read_file(path), str(path))

    def attach(
        self, model: nn.Module, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Plan:
        """Return the plan of this very model: another model, shape or torch is refused by name.

        Sizes of dynamic dims may be others: the plan is then attached at those that were planned.

        Args:
            model: The model that was planned, or a copy of it.
            args: Its positional arguments, as an example.
            kwargs: Its keyword arguments.
        """
        args, kwargs = _as_planned(self.dynamic, model, args, kwargs)
        return self.attach_compared(capture(model, args, kwargs, self.precision))

    def attach_compared(self, captured: Captured) -> Plan:
        """Return the plan of a captured model; any but the one that was planned is refused."""
        require_step(self.pipelining)
        self.require_same(fingerprint_of(captured))
        return self.attach_captured(captured)

    def require_same(self, fingerprint: Fingerprint) -> None:
        """Refuse a model that is not the one that the plan was made for."""
        differences = fingerprint.differences(self.fingerprint)
        if differences:
            raise InvalidInput(
                "a plan is for one model, with inputs of one shape, on one torch",
                got="\n".join(differences),
                remedy="give what the plan was made for, or make a plan for this",
            )
        wishes = fingerprint.wishes or {}
        planned = wishes if self.fingerprint.wishes is None else self.fingerprint.wishes
        for wish in wishes.keys() - planned.keys():
            raise InvalidInput(
                "a plan keeps the annotations that the model had when it was planned",
                got=f"{wish}, which was annotated afterwards",
                remedy="make the plan after all calls of shard()",
                source=wishes[wish],
            )

    def attach_captured(self, captured: Captured) -> Plan:
        """Return the plan of a captured model, which is known to be the one that was planned."""
        decided = self.decisions.recompute
        by_policy = [name for name, how in decided.items() if how.kind == "policy"]
        captured = keep_answers(captured, by_policy, self.saved_results)
        batches = (
            None if self.microbatch_count is None else cut_batch(captured, self.microbatch_count)
        )
        captured = captured if batches is None else batches.captured
        require_fitting(self, captured)
        decisions = self.decisions
        pipelining = self.pipelining
        line = None if pipelining is None else PipelineLine.of(pipelining.mesh, pipelining.axis)
        program = LaidOutProgram.of(
            captured, self.cluster, replace(decisions, apart={}), line=line
        ).with_states(self.states)
        candidate = Candidate(TrainingStep(program, batches), self.search)
        require_apart(self, candidate.decisions.apart)
        if pipelining is not None:
            candidate = candidate.cut_as(pipelining)
        # A way that is given by name may take more than a device has; the host is never exceeded.
        is_limited = self.limit is not None and (
            self.mode == "auto" or self.limit != self.cluster.device.usable_memory
        )
        require_room(candidate, self.limit if is_limited and self.limit else math.inf)
        names = {name: placeholder for placeholder, name in captured.parameters.items()}
        annotated = {
            name: LayoutConstraint(decisions.placeholders[names[name]], source)
            for name, source in self.annotated.items()
        }
        plan = Plan.of(
            candidate,
            mode=self.mode,
            limit=self.limit,
            constraints=replace(
                read_constraints(captured, self.mesh, {}),
                parameters=annotated,
                recompute=decisions.recompute,
            ),
            alternatives=self.alternatives,
            left_out=self.left_out,
            asked=self.asked,
            trials=self.trials,
            dynamic=self.dynamic,
            strict=self.strict,
        )
        require_types(self, plan.types)
        return plan

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse an attribute that only a plan with its model has: such are never saved."""
        if name.startswith("_") or not hasattr(Plan, name):
            raise AttributeError(f"a plan has no {name!r}", name=name, obj=self)
        raise NoModel(
            "what depends on the model is computed for the model, and never saved",
            got=f"{name} of a plan without its model",
            remedy="attach it: Plan.load(path).attach(model, args, kwargs)",
        )


def _as_planned(
    dynamic: DynamicShapes | None, model: nn.Module, args: tuple, kwargs: Mapping[str, Any] | None
) -> tuple[tuple, Mapping[str, Any]]:
    """Return the arguments of a call, brought to the sizes that were planned."""
    if dynamic is None:
        return args, dict(kwargs or {})
    check_call(model, args, kwargs)
    return dynamic.as_planned(model, args, kwargs or {})

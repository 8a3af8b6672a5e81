"""Traces: what is simulated and what is measured are the same actions in the same order."""

from __future__ import annotations

import gzip
import json
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar as ap
from autopar.cli import main
from autopar.errors import InvalidInput
from autopar.pipeline.running.worker import Worker
from autopar.plans.saved_value import digest
from autopar.report.trace import ACTIONS, Event, Trace, events_of, read, write
from autopar.report.trace_comparison import compare
from tests import models

OPTIONS: dict[str, dict[str, Any]] = {
    "chimera": {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "chimera", "microbatches": 4},
    "zb-v": {"mesh": ap.Mesh(pp=2), "schedule": "zb-v", "microbatches": 4},
    "micro-batches": {"mesh": ap.Mesh(dp=2, tp=2), "microbatches": 2},
    "one": {"mesh": ap.Mesh(tp=2)},
}


def module_of(name: str) -> tuple[Any, models.Case]:
    case = models.gpt(layers=4, tied=False)
    about = {"cluster": ap.Cluster.preset("dgx-h100"), "backend": "virtual", **OPTIONS[name]}
    return ap.parallelize(case.model, case.args, case.kwargs, **about), case


def orders(events: Sequence[Event], step: int = 0) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for one in sorted(events, key=lambda one: one.start):
        if one.track == ACTIONS and one.args["step"] == step:
            found.setdefault(one.rank, []).append(one.name)
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_measured_is_simulated_in_its_order(name: str, tmp_path: Path) -> None:
    module, case = module_of(name)
    recording = module.record(steps=2)
    for _ in range(3):
        module.step(*case.args, **case.kwargs)
    recording.save(tmp_path / "measured.json")
    module.plan.trace(tmp_path / "simulated.json.gz")
    one, other = (
        read(tmp_path / f"{what}.json{end}", what)
        for what, end in (("simulated", ".gz"), ("measured", ""))
    )
    simulated, measured = one.events, other.events
    ranks = module.plan.whole_mesh.size
    assert orders(simulated) == orders(measured) == orders(measured, 1)
    assert [*orders(measured)] == [*range(ranks)]
    assert {one.args["step"] for one in measured} == {0, 1}
    assert math.isclose(max(one.end for one in simulated), module.plan.seconds, rel_tol=1e-9)
    with pytest.raises(InvalidInput, match="a measured trace is wanted here"):
        read(tmp_path / "simulated.json.gz", "measured")
    found = compare(one, other)
    assert found.step.count == 2
    assert math.isclose(found.step.predicted, module.plan.seconds, rel_tol=1e-9)
    assert sum(one.count for one in found.actions) == len(measured) - 2 * ranks + 2
    # Of one rank no two actions run at a time.
    for rank in range(ranks):
        own = sorted((one.start, one.end) for one in measured if one.rank == rank)
        assert all(end <= start for (_, end), (start, _) in pairwise(own))


def test_the_file_is_what_chrome_reads(tmp_path: Path) -> None:
    module, _ = module_of("chimera")
    module.plan.trace(tmp_path / "plan.json.gz")
    data = json.loads(gzip.decompress((tmp_path / "plan.json.gz").read_bytes()))
    for one in data["traceEvents"]:
        assert one["ph"] in ("X", "M")
        assert isinstance(one["pid"], int)
        assert isinstance(one["tid"], int)
        assert one["ph"] == "M" or (one["ts"] >= 0 and one["dur"] >= 0)
    # Perfetto's rule: what is on one track stands inside of another, or beside it.
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in data["traceEvents"]:
        if one["ph"] == "X":
            own = tracks.setdefault((one["pid"], one["tid"]), [])
            own.append((one["ts"], one["ts"] + one["dur"]))
    for spans in tracks.values():
        around: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1] <= start + 1e-3:
                around.pop()
            assert not around or end <= around[-1] + 1e-3  # microseconds
            around.append(end)
    named = {
        o["pid"]: o["args"]["name"] for o in data["traceEvents"] if o["name"] == "process_name"
    }
    assert named == {rank: f"rank {rank}" for rank in range(4)}


def test_without_a_pipeline_calls_stand_inside_of_actions() -> None:
    case = models.gpt(layers=4, tied=False)
    for layer in case.model.layers:
        ap.shard(layer.up, params={"weight": ("tp", None)})
    about: dict[str, Any] = {"cluster": ap.Cluster.preset("dgx-h100"), "mode": "propagate"}
    plan = ap.plan(case.model, case.args, **about, **OPTIONS["micro-batches"])
    events = [one for one in events_of(plan) if one.rank == 0]
    actions = [one for one in events if one.track == ACTIONS]
    inside = [one for one in events if "module" in one.args]
    assert len(actions) == 4
    for one in inside:
        assert any(a.start <= one.start and one.end <= a.end * (1 + 1e-12) for a in actions)
    moved = [one for one in inside if one.args.get("over") == "tp"]
    assert len(moved) >= 2 * 2 * 4  # forward and backward of each layer and micro-batch


def test_calls_beside_steps_are_not_recorded(tmp_path: Path) -> None:
    module, case = module_of("chimera")
    recording = module.record()
    with torch.no_grad():
        module(*case.args, **case.kwargs)
    with pytest.raises(InvalidInput, match="0 of 1 step"):
        recording.save(tmp_path / "measured.json")
    module.step(*case.args, **case.kwargs)
    assert recording.done == 1
    kept = module.record()
    with pytest.raises(InvalidInput, match="one recording at a time"):
        module.record()
    kept.stop()
    assert module.record().done == 0  # which nobody keeps
    module.record()
    with pytest.raises(InvalidInput, match="at least 1"):
        module.record(steps=0)


def test_compare_tells_which_predictions_were_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, case = module_of("chimera")
    recording = module.record()
    module.step(*case.args, **case.kwargs)
    recording.save(measured := str(tmp_path / "measured.json.gz"))
    module.plan.trace(simulated := str(tmp_path / "simulated.json"))
    assert main(["compare", simulated, measured]) == 0
    assert "backward of stage 1" in capsys.readouterr().out
    assert main(["compare", simulated, measured, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["step"]["ratio"] == figures["step"]["measured"] / figures["step"]["predicted"]
    other, _ = module_of("zb-v")
    other.plan.trace(tmp_path / "other.json")
    assert main(["compare", str(tmp_path / "other.json"), measured]) == 2
    assert "of one plan" in capsys.readouterr().err
    (tmp_path / "nothing").write_text("{}")
    for wrong in ("nothing", "missing"):
        assert main(["compare", str(tmp_path / wrong), measured]) == 2
        assert "a trace is a file that autopar wrote" in capsys.readouterr().err


def test_a_step_that_breaks_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    module, case = module_of("chimera")
    recording = module.record(steps=2)
    module.step(*case.args, **case.kwargs)
    backward, count = Worker.backward, 0

    def breaks(*words: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise MemoryError
        return backward(*words)

    with monkeypatch.context() as inside:
        inside.setattr(Worker, "backward", breaks)
        with pytest.raises(MemoryError):
            module.step(*case.args, **case.kwargs)
    assert recording.done == 1
    module.step(*case.args, **case.kwargs)
    found = recording.events()
    assert orders(found) == orders(found, 1) == orders(events_of(module.plan))


def test_a_step_is_measured_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what comes after the last action, as sums of gradients do."""
    module, case = module_of("chimera")
    recording, now = module.record(), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    update = module.backend._update_buffers

    def slow() -> None:
        update()
        now[0] += 7.0

    monkeypatch.setattr(module.backend, "_update_buffers", slow)
    module.step(*case.args, **case.kwargs)
    of = digest(module.plan)
    simulated = Trace("simulated", of, tuple(events_of(module.plan)))
    found = compare(simulated, Trace("measured", of, tuple(recording.events())))
    assert found.step.measured == 7.0
    assert found.actions[0].what == "after the last action"
    assert found.actions[0].measured == 7.0


def test_traces_of_two_plans_are_not_compared() -> None:
    """Though their actions be the same."""
    traces = {}
    for mesh in (ap.Mesh(tp=2), ap.Mesh(dp=2), ap.Mesh(dp=4)):
        case = models.shared("gpt", layers=1)
        plan = ap.plan(case.model, case.args, case.kwargs, mesh=mesh, mode="propagate")
        other = plan.with_program(cluster=ap.Cluster.preset("dgx-a100"))
        assert digest(other) == digest(plan)
        traces[mesh.size, mesh.names] = digest(plan), tuple(events_of(plan))
    for one in traces:
        for other in traces:
            pair = Trace("simulated", *traces[one]), Trace("measured", *traces[other])
            if one == other:
                compare(*pair)
            else:
                with pytest.raises(InvalidInput, match="are of one plan"):
                    compare(*pair)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no args": lambda one: one.pop("args"),
    "a list": lambda one: one.update(args=[]),
    "a step in words": lambda one: one["args"].update(step="x"),
    "no number": lambda one: one["args"].update(step=math.nan),
    "another kind": lambda one: one["args"].update(kind="Q"),
    "a rank in words": lambda one: one.update(pid="a"),
    "ranks": lambda one: one.update(pid=[1]),
    "no time": lambda one: one.update(ts=math.inf),
    "back in time": lambda one: one.update(dur=-1.0),
    "no name": lambda one: one.update(name=None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_autopar_did_not_write_is_no_trace(change: str, tmp_path: Path) -> None:
    path, about = tmp_path / "trace.json", {"step": 0, "kind": "F", "stage": 0, "pipe": 0}
    write(path, Trace("measured", "", (Event(0, "0F0", 0.0, 1.0, ACTIONS, about),)))
    assert len(read(path, "measured").events) == 1
    data = json.loads(path.read_text())
    CHANGES[change](data["traceEvents"][-1])
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidInput, match="a file that autopar wrote"):
        read(path, "measured")


@pytest.mark.parametrize("data", [b"\x1f\x8b" + bytes(40), b"[" * 100_000, b"\x1f\x8b\x08\x00" * 9])
def test_what_is_no_file_of_its_kind_is_no_trace(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace.json.gz").write_bytes(data)
    with pytest.raises(InvalidInput, match="a file that autopar wrote"):
        read(tmp_path / "trace.json.gz", "measured")

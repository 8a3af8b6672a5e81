"""States: parameters, gradients and what an optimizer keeps, cut over replicas; the laws hold."""

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.candidates.candidate import Candidate
from autopar.candidates.state_places import data_axes
from autopar.capture import capture
from autopar.cluster import Host, Link
from autopar.cost.copy_groups import copy_groups_of_nodes, live_copy_bytes
from autopar.planner.rules import SIMPLER
from autopar.plans.plan import SavedPlan
from autopar.states import BUFFER_BYTES, NAMED, StateBytes
from autopar.strategies.node_info import info
from tests import large_models, models
from tests.annotations import megatron
from tests.models import Case
from tests.parity import assert_equal, assert_parity, parallel_outcome, single_outcome
from tests.pipeline.models import share_captures  # noqa: F401
from tests.toy import EVEN, machines
from tests.training import assert_trains_alike

PARTIAL = [ap.States(1, 1, 2), ap.States(1, 2, 4), ap.States(2, 4, 4), ap.States(2, 2, 2)]
# Parameters are cut into more parts than what an optimizer keeps, or than gradients.
FINER = [ap.States(4, 2, 2), ap.States(4, 1, 2), ap.States("all", 1, "all"), ap.States(2, 1, 1)]
STEP = ap.States("all", "all", "all", lifetime="step")
HOST = ap.States(optimizer_device="host")
BOTH = ap.States("all", "all", "all", parameters_device="host", optimizer_device="host")
DP4 = {"mesh": ap.Mesh(dp=4)}
TWO = {"mesh": ap.Mesh(a=2, b=2)}
LAW = [
    *(("zero1", DP4), ("zero2", DP4), ("zero3", DP4), (STEP, DP4)),
    *((states, TWO) for states in PARTIAL),
    *((states, DP4) for states in PARTIAL[1:3]),
    *((states, {**DP4, "microbatches": 2}) for states in FINER),
    (ap.States(4, 2, 2), {"mesh": ap.Mesh(pp=2, dp=4), "schedule": "1f1b", "microbatches": 2}),
    (replace(FINER[0], optimizer_device="host"), {**TWO, "microbatches": 2}),
    ("zero3", {**TWO, "microbatches": 2}),
    (PARTIAL[2], {**DP4, "microbatches": 2, "mode": "data"}),
    ("zero2", {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "1f1b", "microbatches": 4}),
    ("zero3", {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "zb-v", "microbatches": 4}),
    ("zero3", {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "chimera", "microbatches": 4}),
    (ap.States(2, 2, 4), {"mesh": ap.Mesh(pp=2, dp=4), "schedule": "1f1b", "microbatches": 2}),
    (BOTH, {**TWO, "microbatches": 2}),
    (HOST, {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "1f1b", "microbatches": 2}),
    ("zero1", {**TWO, "mode": "auto"}),
    ("zero3", {**TWO, "mode": "auto"}),
]


@pytest.mark.parametrize(("states", "options"), LAW, ids=str)
def test_parity(states, options):
    layers = 4 if options.get("schedule") == "zb-v" else 2
    assert_parity(models.shared("gpt", layers=layers), states=states, **options)


@pytest.mark.parametrize(
    ("states", "options"),
    [
        ("zero1", DP4),
        ("zero2", {**DP4, "microbatches": 2}),
        ("zero3", TWO),
        (PARTIAL[2], DP4),
        ("zero3", {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "1f1b", "microbatches": 2}),
    ],
    ids=str,
)
def test_training_with_momentum_groups_frozen_parameters_and_clipping(states, options):
    case = models.shared("gpt", layers=2)
    module = ap.parallelize(
        case.model, case.args, mode="data", states=states, backend="virtual", **options
    )
    assert_trains_alike(module, case)


@cache
def tensor_parallel() -> models.Case:
    return megatron(models.gpt())


@pytest.mark.parametrize("states", ["zero1", "zero3"])
def test_parity_beside_tensor_parallelism(states):
    module = assert_parity(tensor_parallel(), ap.Mesh(dp=2, tp=2), states=states)
    for places in module.plan.decisions.apart.values():
        assert places.is_nested
        cut = set(places.optimizer.axes) - set(places.working.axes)
        assert cut <= {"dp", "tp"}


READS = {
    "slices": lambda w: w[:4] + w[4:8],
    "one slice": lambda w: w[:4],
    "chunk": lambda w: sum(w.chunk(3)),
    "unbind": lambda w: sum(w.view(3, 4, 8).unbind(0)),
    "one of unbind": lambda w: w.view(3, 4, 8).unbind(0)[1],
    "normalised": lambda w: nn.functional.normalize(w, dim=1)[:4],
    "of two": lambda w: (w.tanh() * 2 + 1)[:4] + w[8:] @ (w.t() @ w),
}


class ReadsThroughOperators(nn.Module):
    """Computes a weight from a parameter before any input is read."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.weight, self.read = nn.Parameter(torch.randn(12, 8)), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, READS[self.read](self.weight)).square().mean()


@pytest.mark.parametrize("states", ["zero2", "zero3"])
@pytest.mark.parametrize("read", READS)
def test_a_parameter_is_cut_whatever_forward_reads_of_it(read, states):
    x = torch.randn(8, 8, dtype=torch.float64)
    case = models.Case(read, ReadsThroughOperators(read).double(), (x,))
    module = assert_parity(case, ap.Mesh(dp=4), mode="data", microbatches=2, states=states)
    whole = case.model.weight.nbytes
    memory = module.plan.memory
    quarters = whole // 4, whole // 4, 2 * whole // 4
    assert (memory.parameters, memory.gradients, memory.optimizer) == quarters


@pytest.mark.parametrize("states", ["whole", "zero1", "zero3"])
@pytest.mark.parametrize("read", READS)
def test_what_a_search_adds_up_is_the_cost_whatever_forward_reads(read, states):
    case = models.Case(read, ReadsThroughOperators(read), (torch.randn(64, 8),))
    options = {"mode": "auto", "cluster": machines(4, 1e8, 1e-6), "states": states}
    plan = planned(case, ap.Mesh(dp=4), microbatches=1, **options)
    assert plan.search.added_up == pytest.approx(plan.cost.seconds, rel=1e-2)
    assert plan.search.bound <= plan.cost.seconds * (1 + 1e-9)


class ReadsAfterSum(nn.Linear):
    """Reads a parameter where every rank has the whole batch's sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sum(0).softmax(0) @ self.bias


@pytest.mark.parametrize("mode", ["data", "propagate", "auto"])
def test_parameters_that_stay_whole_are_told_of(mode: str):
    case = models.Case("after sum", ReadsAfterSum(8, 8), (torch.randn(8, 8),))
    with pytest.warns(UserWarning, match=r"states=zero3 leaves bias \(32 bytes\) whole"):
        planned(case, ap.Mesh(dp=4), states="zero3", mode=mode)


def planned(case: models.Case, mesh: ap.Mesh | None, **options) -> ap.Plan:
    options = {"mode": "data", **options}
    return ap.plan(case.model, case.args, case.kwargs, mesh=mesh, **options)


@pytest.fixture(scope="module")
def gpt() -> models.Case:
    return models.shared("gpt", layers=4)


def test_traffic_of_a_step(gpt):
    """In bytes over a link without latency: 2, 2, 2 and 3 times the parameters, (N - 1) / N."""
    cluster = machines(4, 1e9, 0.0)
    size = sum(p.numel() * p.itemsize for p in gpt.model.parameters())
    known = planned(gpt, ap.Mesh(dp=4), states="whole", cluster=cluster).cost
    loss = known.communication - known.gradient_sync
    for states, times in (("whole", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3)):
        cost = planned(gpt, ap.Mesh(dp=4), states=states, cluster=cluster).cost
        moved = (cost.communication - loss) * 1e9
        assert moved == pytest.approx(times * size * 3 / 4, rel=1e-3)


def test_what_moves_once_a_step_and_what_for_each_micro_batch(gpt):
    cluster = machines(4, 1e9, 0.0)
    size = sum(p.numel() * p.itemsize for p in gpt.model.parameters()) * 3 / 4 / 1e9
    base = planned(gpt, ap.Mesh(dp=4), states="whole", cluster=cluster, microbatches=2).cost
    others = base.communication - base.gradient_sync
    for states, times in (("zero1", 2), ("zero2", 3), (STEP, 3), ("zero3", 6)):
        cost = planned(gpt, ap.Mesh(dp=4), states=states, cluster=cluster, microbatches=2).cost
        assert cost.communication - others == pytest.approx(times * size, rel=1e-3)


@pytest.mark.parametrize(
    ("states", "times"),
    [
        # For each micro-batch two gathers over 4 and a sum over 2; then a sum of halves over 2.
        (ap.States(4, 2, 2), 2 * (2 * 3 / 4 + 1 / 2) + 1 / 2),
        # A sum of whole gradients over 2, and one of halves.
        (ap.States(4, 1, 2), 2 * 2 * 3 / 4 + 1 / 2 + 1 / 2),
        # One sum over 4; what is stored is what was updated.
        (ap.States(4, 1, 4), 2 * 2 * 3 / 4 + 3 / 4),
        # Gathers over 2, a sum over 4, and a gather of halves of what was updated.
        (ap.States(2, 1, 4), 2 * 2 * 1 / 2 + 3 / 4 + 1 / 4),
    ],
    ids=str,
)
def test_what_moves_where_parameters_are_cut_most(gpt, states, times):
    options = {"cluster": machines(4, 1e9, 0.0), "microbatches": 2}
    size = sum(p.numel() * p.itemsize for p in gpt.model.parameters()) / 1e9
    base = planned(gpt, ap.Mesh(a=2, b=2), states="whole", **options).cost
    cost = planned(gpt, ap.Mesh(a=2, b=2), states=states, **options).cost
    moved = cost.communication - (base.communication - base.gradient_sync)
    assert moved == pytest.approx(times * size, rel=1e-3)


@pytest.mark.parametrize("precision", [None, ap.Precision(torch.bfloat16)])
def test_what_is_held_where_parameters_are_cut_most(gpt, precision):
    """A half of a parameter with its gradient and states, and a quarter that a step computes with:
    pieces of both are even."""
    plan = planned(gpt, ap.Mesh(dp=4), states=ap.States(4, 2, 2), precision=precision)
    size, copy = (sum(p.numel() for p in gpt.model.parameters()) * bytes_ for bytes_ in (8, 2))
    memory, copy = plan.memory, copy if precision else size
    held = memory.parameters, memory.gradients, memory.optimizer
    gradient = size // 4 if precision else size // 2
    assert held == (size // 2, gradient, size)
    groups = copy_groups_of_nodes(plan.rewritten.nodes, plan.mesh, plan.states.buffer_bytes)
    once = sum(g.bytes(plan.mesh) for g in groups if g.kind.is_step_long)
    assert once == copy // 4
    assert memory.gathered == once + live_copy_bytes(groups, plan.mesh)


class Squares(nn.Sequential):
    """Layers, and the mean of the squares of what they give."""

    def forward(self, x):
        return super().forward(x).square().mean()


@pytest.mark.parametrize("states", ["zero1", "zero3"])
def test_what_is_asked_for_is_searched_with_an_axis_for_the_batch(states):
    """The search cuts the weights of such layers, so that no rank has a replica of them."""
    layers = nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False)
    model = Squares(*layers).double()
    case = models.Case("squares", model, (torch.randn(4, 64, dtype=torch.float64),))
    options = {"cluster": machines(4, 1e9, 1e-6), "mode": "auto"}
    free = planned(case, ap.Mesh(a=2, b=2), states="whole", **options)
    assert not any(data_axes(free.rewritten, free.mesh).values())
    module = assert_parity(case, ap.Mesh(a=2, b=2), states=states, **options)
    assert module.plan.decisions.apart
    assert free.cost.seconds <= module.plan.cost.seconds
    assert 0 < module.plan.search.bound <= module.plan.cost.seconds * (1 + 1e-9)


def test_less_memory_cuts_more_states():
    """A model is larger than the buckets in which gradients wait until they are cut."""
    gpt = models.shared("gpt", hidden=512, layers=4)
    names, seconds = ("whole", "zero1", "zero2", "zero3"), []
    for name in names:
        limit = planned(gpt, ap.Mesh(dp=4), states=name, microbatches=2).memory.peak
        plan = planned(gpt, ap.Mesh(dp=4), memory=limit, microbatches=2)
        states = replace(plan.states, buffer_bytes=BUFFER_BYTES)
        assert (str(states), plan.memory.peak) == (name, limit)
        seconds.append(plan.cost.seconds)
        assert plan.states in [one.states for one in plan.alternatives if one.fits]
    assert all(one <= two * (1 + 1e-9) for one, two in pairwise(seconds))
    whole = planned(gpt, ap.Mesh(dp=4))
    with pytest.raises(ap.InvalidInput, match="states zero3"):
        planned(gpt, ap.Mesh(dp=4), memory=0.05 * whole.memory.peak)


def test_falling_limits():
    """Layouts stay while memory shrinks: every plan fits, none is faster than with more; at
    first nothing is cut and nothing runs again, at last all is cut, and runs again or leaves the
    device."""
    gpt = models.shared(
        "gpt", hidden=512, sequence=64, layers=4
    )  # larger than what waits in buckets
    free = planned(gpt, ap.Mesh(dp=4), microbatches=2)
    lean = planned(gpt, ap.Mesh(dp=4), microbatches=2, states="zero3", recompute="full")
    walk = [free]
    for part in (0.85, 0.55, 0.25, 0.0):
        limit = lean.memory.peak + part * (free.memory.peak - lean.memory.peak)
        walk.append(planned(gpt, ap.Mesh(dp=4), microbatches=2, memory=limit))
        assert walk[-1].memory.peak <= limit
    assert all(one.cost.seconds <= two.cost.seconds * (1 + 1e-9) for one, two in pairwise(walk))
    assert free.states.is_whole
    assert not free.decisions.recompute
    last = walk[-1]
    assert last.states.parameters == "all"
    assert last.memory.host or {one.kind for one in last.decisions.recompute.values()} == {"full"}
    kinds = [(str(one.states), bool(one.decisions.recompute)) for one in walk]
    assert len(set(kinds)) > 3


@pytest.mark.parametrize("states", [*list(NAMED.values())[1:], STEP], ids=str)
def test_other_states_need_no_other_program(gpt, states):
    """Giving a rewritten program other states is rewriting it with these."""
    plan = planned(gpt, ap.Mesh(dp=4), states="whole", recompute={"layers.*": "full"})
    captured = capture(gpt.model, gpt.args, gpt.kwargs)
    whole = Candidate.laid_out(captured, machines(4, *EVEN), plan.decisions)
    made = whole.placed(states)
    again = made.with_program()
    assert again.rewritten is not made.rewritten
    for one, two in zip(made.rewritten.nodes, again.rewritten.nodes, strict=True):
        facts = [{k: str(v) for k, v in n.meta.items() if k != "val" and v} for n in (one, two)]
        assert (one.name, facts[0]) == (two.name, facts[1])
    assert (made.memory, made.cost) == (again.memory, again.cost)


def test_a_part_of_a_large_model_without_a_mesh():
    """Two of GPT-3's blocks on 8 devices with so little memory that states have to be cut: no rank
    keeps what an optimizer keeps of a parameter beside another that does."""
    case = large_models.gpt3(layers=2, batch=8)
    limit, cluster = 16e9, ap.Cluster.preset("dgx-a100")
    precision = ap.Precision(compute=torch.bfloat16)
    plan = planned(case, None, mode="auto", cluster=cluster, memory=limit, precision=precision)
    assert plan.memory.peak <= limit
    fitting = [one for one in plan.alternatives if one.fits]
    fastest = min(one.seconds for one in fitting)
    assert fitting[0].seconds == fastest
    assert plan.seconds <= fastest * (1 + SIMPLER)
    parameters = [n for n in plan.rewritten.nodes if info(n).places is not None]
    for node in parameters:
        assert {*info(node).sync} <= {*info(node).places.optimizer.axes}
    assert {info(node).state_bytes for node in parameters} == {
        StateBytes.of(torch.float32, torch.bfloat16, precision.reduce)
    }


def test_the_search_cuts_states_where_memory_asks_for_it(gpt):
    options = {"mode": "auto", "cluster": machines(4, *EVEN), "pipeline": None}
    options |= {"recompute": None, "microbatches": 1}
    free = planned(gpt, None, **options)
    assert free.states.is_whole
    plan = planned(gpt, None, memory=0.9 * free.memory.peak, **options)
    assert plan.states.is_cut
    assert plan.search.bound <= plan.cost.seconds == plan.search.objective


@pytest.mark.parametrize("precision", [None, ap.Precision(compute=torch.bfloat16)])
def test_what_a_search_without_a_limit_adds_up_is_exact(gpt, precision):
    """Positions are read as what is looked up of them, or cast, is: its sum is that of theirs."""
    options = {"mode": "auto", "cluster": machines(4, 1e8, 1e-6), "precision": precision}
    for states in NAMED:
        plan = planned(gpt, ap.Mesh(x=4), states=states, **options)
        assert plan.cost.seconds == pytest.approx(plan.search.added_up, rel=1e-9)


@pytest.mark.parametrize("states", ["zero1", "zero2", "zero3", FINER[2]], ids=str)
def test_what_a_search_adds_up_is_what_the_program_costs(gpt, states):
    options = {"mode": "auto", "cluster": machines(4, 1e8, 1e-6), "states": states}
    plan = planned(gpt, ap.Mesh(a=2, b=2), **options)
    assert plan.search.added_up == pytest.approx(plan.cost.seconds, rel=1e-2)


@pytest.mark.parametrize("states", [HOST, BOTH])
def test_what_is_on_the_host_is_counted_there(gpt, states):
    size = sum(p.numel() * p.itemsize for p in gpt.model.parameters())
    part = size if states is HOST else size / 4
    plan = planned(gpt, ap.Mesh(dp=4), states=states)
    memory, kept = plan.memory, planned(gpt, ap.Mesh(dp=4), states="whole").memory
    assert (memory.parameters, memory.optimizer) == (0, 0)
    assert (memory.host_parameters, memory.host_gradients, memory.host_optimizer) == (
        pytest.approx((part, part, 2 * part))
    )
    assert memory.host == pytest.approx(4 * part)
    assert memory.peak <= kept.peak - (2 * size if states is HOST else 3 * part)
    assert plan.cost.seconds > 0
    text = str(plan)
    assert "optimizer on the host" in text
    assert f"{'kept' if states is HOST else 'stored'} on the host" in " ".join(text.split())
    assert "\n  host       " in text


def test_what_crosses_to_the_host_and_back(gpt):
    """In bytes over a link without latency: each part once up and down, or up for each use."""
    cluster = machines(4, 1e12, 0.0)
    host = Host(copy_alpha=0.0, copy_bandwidth=1.0, bandwidth=4e9)
    (node,) = cluster.nodes
    node = replace(node, device=replace(node.device, host=host))
    cluster = replace(cluster, nodes=(node,))
    size = sum(p.numel() * p.itemsize for p in gpt.model.parameters())
    for states in (HOST, replace(BOTH, parameters_device="device"), BOTH):
        plan = planned(gpt, ap.Mesh(dp=4), states=states, cluster=cluster, microbatches=2)
        up = 2 if states is BOTH else 1  # micro-batches
        part = size if states is HOST else size / 4
        more = part * (2 * up if states is BOTH else up)
        assert plan.cost.communication + plan.cost.updated == pytest.approx(part + more, rel=1e-3)


def test_states_go_to_the_host_at_last(gpt, tmp_path):
    """Under a limit that full recomputation of all that is cut does not meet."""
    options = {"microbatches": 2}
    least = planned(gpt, ap.Mesh(dp=4), states="zero3", recompute="full", **options)
    hosted = planned(gpt, ap.Mesh(dp=4), states=BOTH, recompute="full", **options)
    limit = (least.memory.peak + hosted.memory.peak) / 2
    plan = planned(gpt, ap.Mesh(dp=4), memory=limit, **options)
    assert plan.states.optimizer_device == "host"
    assert plan.memory.peak <= limit
    assert not any(one.fits for one in plan.alternatives if one.states.optimizer_device != "host")
    plan.save(tmp_path / "plan.json")
    again = ap.Plan.load(tmp_path / "plan.json").attach(gpt.model, gpt.args, gpt.kwargs)
    assert (again.states, again.memory) == (plan.states, plan.memory)


@pytest.mark.parametrize(("bandwidth", "is_there"), [(1e12, True), (1e4, False)])
def test_the_fastest_that_fits_is_on_the_host_or_recomputed(bandwidth, is_there):
    """Under a limit that recomputation meets, too."""
    gpt = models.shared(
        "gpt", hidden=512, sequence=64, layers=4
    )  # larger than what waits in buckets
    (node,) = machines(4, 1e8, 0.0).nodes
    host = Host(copy_alpha=0.0, copy_bandwidth=bandwidth, bandwidth=bandwidth)
    node = replace(node, device=replace(node.device, host=host))
    options = {"cluster": replace(machines(4, 1e8, 0.0), nodes=(node,)), "microbatches": 2}
    remade = planned(gpt, ap.Mesh(dp=4), states="zero3", recompute="full", **options)
    hosted = planned(gpt, ap.Mesh(dp=4), states=BOTH, **options)
    limit = max(remade.memory.peak, hosted.memory.peak)
    assert limit < planned(gpt, ap.Mesh(dp=4), states="zero3", **options).memory.peak
    plan = planned(gpt, ap.Mesh(dp=4), memory=limit, **options)
    assert (plan.states.optimizer_device == "host") == is_there
    assert plan.memory.peak <= limit
    assert plan.cost.seconds <= min(remade.cost.seconds, hosted.cost.seconds)


def test_no_room_on_the_host_is_refused(gpt):
    cluster = machines(4, 1e9, 0.0)
    (node,) = cluster.nodes
    node = replace(node, device=replace(node.device, host=Host(memory=1e4)))
    with pytest.raises(ap.InvalidInput, match="fits into the memory that it has for them"):
        planned(gpt, ap.Mesh(dp=4), states=HOST, cluster=replace(cluster, nodes=(node,)))


@pytest.mark.parametrize("side", ["device", "host"])
def test_a_file_for_less_memory_than_a_plan_takes_is_refused(gpt, side):
    plan = planned(gpt, ap.Mesh(dp=4), states=BOTH, memory=1e9, cluster=machines(4, 1e9, 0.0))
    saved = SavedPlan.of(plan)
    again = saved.attach(gpt.model, gpt.args, gpt.kwargs)
    assert again.memory == plan.memory
    (node,) = plan.cluster.nodes
    less = replace(node, device=replace(node.device, host=Host(memory=plan.memory.host - 1)))
    changed = {
        "device": {"limit": plan.memory.peak - 1},
        "host": {"cluster": replace(plan.cluster, nodes=(less,))},
    }
    with pytest.raises(ap.InvalidInput, match="fits into the memory"):
        replace(saved, **changed[side]).attach(gpt.model, gpt.args, gpt.kwargs)


def test_a_file_whose_states_are_not_where_its_parameters_are_is_refused(gpt):
    saved = SavedPlan.of(planned(gpt, ap.Mesh(dp=4), states=HOST))
    for states in (BOTH, ap.States.of("zero3"), ap.States()):
        with pytest.raises(ap.InvalidInput, match="follow from the states of a plan"):
            replace(saved, states=states).attach(gpt.model, gpt.args, gpt.kwargs)


def test_an_axis_is_split_for_factors_inside_it(gpt):
    states = ap.States(parameters=2, gradients=4, optimizer=8)
    plan = planned(gpt, ap.Mesh(dp=8), states=states)
    assert plan.mesh.sizes == {"dp.0": 2, "dp.1": 2, "dp.2": 2}
    (key,) = [k for k, name in plan.captured.parameters.items() if name == "layers.0.up.weight"]
    places = plan.decisions.parameter(key)
    assert places.working.is_replicated
    assert places.storage.dims[0] == ("dp.2",)
    assert places.gradient.dims[0] == ("dp.2", "dp.1")
    assert places.optimizer.dims[0] == ("dp.2", "dp.1", "dp.0")
    assert "states     parameters in 2, gradients in 4, optimizer in 8" in str(plan)
    assert "kept as f64[128@dp.2@dp.1@dp.0, 32]" in " ".join(str(plan).split())


def test_annotations_of_a_split_axis_mean_all_its_parts():
    case = tensor_parallel()
    states = ap.States(optimizer=2)
    plan = planned(case, ap.Mesh(dp=4, tp=2), states=states, mode="propagate")
    assert plan.mesh == ap.Mesh(**{"dp.0": 2, "dp.1": 2, "tp": 2})
    (up,) = [k for k, name in plan.captured.parameters.items() if name == "layers.0.up.weight"]
    assert plan.decisions.parameter(up).optimizer.dims[0] == ("tp", "dp.1")


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (lambda: ap.States(optimizer=3), "divides"),
        (lambda: ap.States(optimizer=16), "divides"),
        (lambda: ap.States(4, 3, 12), "parameters=4, gradients=3"),
        (lambda: ap.States(4, 1, 6), "one divides\\s+the other"),
        (lambda: ap.States(4, 4, 2), "gradients=4, optimizer=2"),
        (lambda: ap.States("all", "all", 4), "divide those of the optimizer"),
        (lambda: ap.States(4, 2, 2, lifetime="step"), "optimizer=4, or no lifetime"),
        (lambda: ap.States(optimizer=0), "optimizer=0"),
        (lambda: ap.States(lifetime="week"), "'week'"),
        (lambda: ap.States(1, "all", "all", lifetime="step"), "stored in parts"),
        (lambda: ap.States(optimizer_device="disk"), "'disk'"),
        (lambda: ap.States(optimizer_device="cpu"), "remedy: 'host'"),
        (lambda: ap.States(parameters_device="host"), "optimizer_device='device'"),
        (lambda: replace(BOTH, lifetime="step"), "for each use"),
        (lambda: ap.States(buffer_bytes=0), "buffer_bytes=0"),
        (lambda: "zero4", "given:  'zero4'"),
    ],
)
def test_what_cannot_be_is_refused(gpt, states, said):
    with pytest.raises(ap.InvalidInput, match=said):
        planned(gpt, ap.Mesh(dp=8), states=states())


def test_what_an_annotation_cuts_holds():
    case = models.gpt()
    ap.shard(case.model.layers[0].up, params={"weight": ("dp", None)})
    ap.shard(case.model, (("dp", None), ("dp", None)))
    mesh = ap.Mesh(dp=4)
    with pytest.raises(ap.InvalidInput, match=r"layers\.0\.up\.weight is") as error:
        planned(case, mesh, states=ap.States(2, 2, 2), mode="propagate")
    assert "test_states.py" in str(error.value)
    plan = planned(case, mesh, states=ap.States(1, 2, 4), mode="propagate")
    (up,) = [k for k, name in plan.captured.parameters.items() if name == "layers.0.up.weight"]
    assert plan.decisions.parameter(up).is_tied
    assert_parity(case, mesh, states="zero2")


def test_nothing_to_cut_over_is_refused():
    case = tensor_parallel()
    with pytest.raises(ap.InvalidInput, match="where no gradient is summed over ranks"):
        planned(case, ap.Mesh(tp=2), states="zero1", mode="propagate")
    assert not planned(
        models.shared("gpt", layers=2), ap.Mesh(one=1), states="zero3"
    ).decisions.apart


class Linears(nn.Module):
    """So many parameters, and next to nothing else."""

    def __init__(self, count: int, rows: int, columns: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(rows, columns, device="meta")) for _ in range(count)
        )

    def forward(self, x):
        return sum((x @ weight).sum() for weight in self.weights)


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ((6, 40000, 31250), 64, (120.0, 31.40625, 16.640625, 1.875)),
        ((5, 51200, 500000), 1024, (2048.0, 513.5, 257.75, 2.0)),
        ((5, 51200, 3906250), 1024, (None, None, None, 15.625)),
    ],
)
def test_states_of_large_models_take_what_is_known_of_them(sizes, ranks, expected):
    """2 bytes of copies, 2 of gradients, 12 of masters and moments, in GB."""
    x = torch.empty(ranks, sizes[1], device="meta")
    precision = ap.Precision(compute=torch.bfloat16, reduce=torch.bfloat16)
    options = {"mesh": ap.Mesh(dp=ranks), "mode": "data", "precision": precision}
    count = math.prod(sizes)
    for states, held in zip(("whole", "zero1", "zero2", "zero3"), expected):
        if held is None:
            continue
        asked = replace(ap.States.of(states), buffer_bytes=2 * count)
        memory = ap.plan(Linears(*sizes), (x,), states=asked, **options).memory
        copies = memory.gathered
        if states == "zero3":  # the piece lives a step, and all that is one group a use
            copies -= 2 * count
        found = memory.parameters + memory.gradients + memory.optimizer + copies
        assert found / 1e9 == pytest.approx(held, rel=1e-6)


def test_parity_with_masters():
    case = models.shared("gpt", layers=2)
    precision = ap.Precision(compute=torch.float64, reduce=torch.float64)
    assert_parity(case, ap.Mesh(dp=4), states="zero3", precision=precision)


class Deep(nn.Module):
    """Layers whose gradients take long to sum between nodes."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_states_are_cut_over_nodes_where_that_gains_more_than_a_percent() -> None:
    """Near ranks gather fast, and what each holds moves between nodes in pieces."""
    (node,) = machines(4, *EVEN).nodes
    torch.manual_seed(0)
    batch = (torch.randn(256, 16, dtype=torch.float64),)
    case = Case("deep", Deep().double(), batch)
    chosen = {}
    for speed in (3e7, 1e9):
        cluster = ap.Cluster((node, node), Link(1e-6, speed), "two nodes")
        options = {"cluster": cluster, "microbatches": 1}
        plan = ap.plan(case.model, batch, mesh=ap.Mesh(dp=8), **options)
        named = ap.plan(case.model, batch, mesh=ap.Mesh(dp=8), states="zero1", **options)
        chosen[speed] = plan.states
        assert plan.seconds <= named.seconds * (1 if plan.states.numbers else 1 + SIMPLER)
        module = ap.parallelize(case.fresh().model, plan=plan, backend="virtual")
        assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))
    assert chosen[3e7].numbers == (4,)
    assert chosen[1e9].is_whole

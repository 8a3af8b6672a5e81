"""Regions that are recomputed: the same numbers, less kept, each forward run once more."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import autopar as ap
from autopar.capture import capture
from autopar.capture.regions import blocks
from autopar.cost.saved_tensors import saved_by
from autopar.runtime.execution import activation_offload, recomputed_regions
from autopar.strategies.node_info import info
from tests import models
from tests.annotations import megatron
from tests.held import kept_for_backward
from tests.models import Case
from tests.parity import assert_equal, assert_parity, parallel_outcome, single_outcome
from tests.pipeline.models import share_captures  # noqa: F401

KINDS = ("selective", "full")
SELECTIVE, FULL = map(ap.Recompute, KINDS)
CASES = {
    "gpt": lambda: models.gpt(layers=4, hidden=16, heads=2),
    "gpt2": models.gpt2,
    "llama": models.llama,
    "resnet": models.resnet,
    "mlp": lambda: models.mlp(layers=6),
}
case_of = cache(lambda name: CASES[name]())
FORMS = {
    "dp2 tp2": {"mesh": ap.Mesh(dp=2, tp=2), "mode": "propagate"},
    "zero3": {"mesh": ap.Mesh(dp=2), "mode": "data", "states": "zero3"},
    "micro-batches": {"mesh": ap.Mesh(dp=2), "mode": "data", "microbatches": 2},
    "1f1b": {"mesh": ap.Mesh(pp=2), "schedule": "1f1b", "microbatches": 4},
    "zb-v": {"mesh": ap.Mesh(pp=2), "schedule": "zb-v", "microbatches": 4},
    "chimera": {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "chimera", "microbatches": 4},
}
SAMPLED = [
    ("gpt", "zero3", "full"),
    ("gpt", "zb-v", "selective"),
    ("gpt2", "1f1b", "selective"),
    ("gpt2", "micro-batches", "full"),
    ("llama", "dp2 tp2", "selective"),
    ("resnet", "dp2 tp2", "full"),
    ("mlp", "1f1b", "full"),
    ("gpt", "dp2 tp2", "full, cut"),
    ("gpt", "dp2 tp2", "none, host"),
    ("gpt2", "dp2 tp2", "selective, cut"),
    ("llama", "dp2 tp2", "full, host"),
    ("resnet", "dp2 tp2", "none, cut"),
    ("resnet", "zero3", "full, host"),
    ("mlp", "chimera", "full, cut"),
    ("gpt", "1f1b", "full, host"),
]


@pytest.mark.parametrize(("name", "form", "kind"), SAMPLED)
def test_parity(name: str, form: str, kind: str) -> None:
    how = ap.Recompute.parse(kind)
    module = assert_parity(case_of(name), recompute=how, **FORMS[form])
    assert set(module.plan.decisions.recompute.values()) == {how}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("gpt", "full"), ("gpt", "selective"), ("gpt2", "full"), ("llama", "selective")),
        *(("resnet", "full"), ("resnet", "selective")),
    ],
)
def test_what_is_kept_is_what_is_predicted(name: str, kind: str) -> None:
    case = case_of(name)
    options = {"mesh": ap.Mesh(one=1), "mode": "data", "backend": "virtual"}
    module = ap.parallelize(case.model, case.args, case.kwargs, recompute=kind, **options)
    memory = module.plan.memory
    # Copies of buffers that a region reads are not counted.
    assert memory.activations == pytest.approx(kept_for_backward(module, case), rel=0.015)
    plain = ap.plan(case.model, case.args, case.kwargs, mesh=ap.Mesh(one=1), mode="data")
    assert memory.activations < plain.memory.activations
    assert memory.peak <= plain.memory.peak  # which may be held elsewhere


def test_each_region_runs_once_more_and_no_further_than_needed() -> None:
    case, runs = case_of("gpt"), Counter[int]()
    module = ap.parallelize(
        case.model, case.args, mesh=ap.Mesh(one=1), mode="data", recompute="full"
    )
    again = recomputed_regions._RecomputedRun.rerun

    def counted(run: recomputed_regions._RecomputedRun) -> None:
        runs[id(run.region)] += 1
        again(run)

    with patch.object(recomputed_regions._RecomputedRun, "rerun", counted):
        module.step(*case.args)
    assert list(runs.values()) == [1, 1, 1, 1]
    nodes = [node for node in module.plan.rewritten.nodes if "layers.0" in str(node.meta["module"])]
    last = [node for node in nodes if node.meta.get("remade")][-1]
    after = nodes[nodes.index(last) + 1 :]
    inside = {node for node in nodes if node.op == "call_function"}
    assert after
    assert not [
        node for node in after for key in saved_by(node, module.plan.mesh) if key[0] in inside
    ]


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("of", ["parameter", "input"])
def test_what_a_region_reads_again_must_not_have_changed(kind: str, of: str) -> None:
    """As torch says of what it keeps itself."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    given = {"mesh": ap.Mesh(dp=2), "mode": "data", "recompute": {"*": kind}}
    module = ap.parallelize(nn.Sequential(model, nn.Linear(4, 4)), (x,), **given)
    assert module.plan.decisions.recompute
    for names in ("0.1.weight", "0.3.weight") if of == "parameter" else ("",):
        loss = module(x).sum()
        with torch.no_grad():
            (module.get_parameter(names) if names else x).mul_(2.0)
        with pytest.raises((ap.InvalidInput, RuntimeError), match=r"stay as they are|modified"):
            loss.backward()


@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers_are_the_same_when_they_are_drawn_again(kind: str) -> None:
    case = models.gpt(dropout=0.2)

    def outcome(kind: str | None) -> list[Tensor]:
        module = ap.parallelize(
            case.model, case.args, mesh=ap.Mesh(one=1), mode="data", recompute=kind
        )
        torch.manual_seed(3)
        loss = module.step(*case.args)
        return [loss, *module.full_grads().values(), torch.rand(1)]

    for one, other in zip(outcome(None), outcome(kind)):
        assert torch.equal(one, other)


def residual(row: nn.Module, x: Tensor) -> Tensor:
    return x + checkpoint(row, x, use_reentrant=False)


class Checkpointed(nn.Module):
    """Blocks of which some are wrapped by the user."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)
        ).double()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "sequential":
            return checkpoint_sequential(self.rows, 2, x, use_reentrant=False).square().mean()
        for number, row in enumerate(self.rows):
            if number % 2:
                x = x + row(x)
            elif self.how == "nested":
                x = checkpoint(partial(residual, row), x, use_reentrant=False)
            else:
                x = x + checkpoint(row, x, use_reentrant=self.how == "reentrant")
        return x.square().mean()


X = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")
@pytest.mark.parametrize("how", ["plain", "reentrant", "nested", "sequential"])
def test_the_users_checkpoints_are_kept(how: str, tmp_path) -> None:
    x = X.clone().requires_grad_(how == "reentrant")
    case = Case(how, Checkpointed(how), (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = ap.parallelize(case.model, (x,), mesh=ap.Mesh(dp=2), mode="data", recompute=None)
        assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))
    found = module.plan.decisions.recompute
    assert found == {f"checkpoint {n}": FULL for n in range(1 if how == "sequential" else 2)}
    module.plan.save(tmp_path / "plan.json")
    attached = ap.Plan.load(tmp_path / "plan.json").attach(case.fresh().model, (x,))
    assert attached.memory == module.plan.memory


def test_what_a_checkpoint_covers_is_asked_for_once(tmp_path) -> None:
    model = Checkpointed("plain")
    ap.shard(model.rows[0], recompute="full")
    options = {"mesh": ap.Mesh(dp=2), "mode": "data"}
    plan = ap.plan(model, (X,), **options)
    assert plan.decisions.recompute == {f"checkpoint {n}": FULL for n in range(2)}
    plan.save(tmp_path / "plan.json")
    assert ap.Plan.load(tmp_path / "plan.json").attach(model, (X,)).memory == plan.memory
    for how in ("selective", None):
        with pytest.raises(ap.InvalidInput, match="all of it inside a checkpoint"):
            ap.plan(Checkpointed("plain"), (X,), recompute={"rows.0": how}, **options)


class Layered(nn.Module):
    """Blocks whose layers stand in several lists, each block in a checkpoint but for its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(16, 32) for _ in range(3))
        self.second = nn.ModuleList(nn.Linear(32, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def block(x: torch.Tensor, number: int) -> torch.Tensor:
            return self.second[number](nn.functional.gelu(self.first[number](x)))

        for number in range(3):
            x = x + checkpoint(block, x, number, use_reentrant=False)
        return x.square().mean()


def test_own_regions_leave_the_users_checkpoints_alone() -> None:
    kept = {f"checkpoint {n}": FULL for n in range(3)}
    for how in ("auto", "selective", None, kept):
        plan = ap.plan(Layered(), (torch.randn(8, 16),), mesh=ap.Mesh(x=2), recompute=how)
        assert plan.decisions.recompute == kept, how
        wrapped = [n for n in plan.rewritten.nodes if n.meta.get("checkpoint") is not None]
        assert len(wrapped) >= 9, how
        for node in wrapped:
            assert info(node).region.name == f"checkpoint {info(node).checkpoint}", how
            assert info(node).remade, how


@pytest.mark.parametrize("is_learning", [True, False])
def test_what_a_checkpoint_changes_is_changed_once(is_learning: bool) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda y: self.norm(self.linear(y)), x, use_reentrant=False).sum()

    model, x = Normed().train(is_learning), torch.randn(4, 4)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        module = ap.parallelize(model, (x,), mesh=ap.Mesh(dp=2), backend="virtual")
    told = [str(one.message) for one in heard if "changed in a checkpoint" in str(one.message)]
    assert len(told) == is_learning
    assert all("norm.running_mean and 2 more" in one for one in told)
    module.step(x)
    assert module.full_state_dict()["norm.num_batches_tracked"] == is_learning


def test_a_checkpoint_that_chooses_what_it_keeps_is_refused() -> None:
    def context():
        return torch.autograd.graph.save_on_cpu(), torch.autograd.graph.save_on_cpu()

    class Chosen(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.rows[0], x, use_reentrant=False, context_fn=context).sum()

    with pytest.raises(ap.InvalidInput, match="keeps what its function reads") as error:
        ap.plan(Chosen("plain"), (X,), mesh=ap.Mesh(one=1))
    assert "test_recompute.py" in str(error.value)


def test_blocks_are_the_numbered_modules_that_multiply() -> None:
    def of(model: nn.Module, *args: Tensor) -> tuple[str, ...]:
        return blocks(capture(model, args))

    assert of(case_of("gpt").model, *case_of("gpt").args) == tuple(f"layers.{i}" for i in range(4))
    assert of(case_of("mlp").model, *case_of("mlp").args) == (
        "layers.0:layers.1",
        "layers.2:layers.3",
        "layers.4",
    )
    assert of(nn.Sequential(nn.Linear(8, 8)).double(), X) == ("0",)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"layers.[02]": "full"}, {"layers.0": FULL, "layers.2": FULL}),
        ({"layers.1.attention": "selective"}, {"layers.1.attention": SELECTIVE}),
        ({"layers.3": ap.Recompute(keep="cut")}, {"layers.3": ap.Recompute("full", "cut")}),
        (ap.Recompute(None), {}),
        (True, {f"layers.{i}": FULL for i in range(4)}),
        (False, {}),
        ("auto", {}),
    ],
)
def test_it_is_asked_for_by_module(asked: object, found: dict[str, str]) -> None:
    case = case_of("gpt")
    plan = ap.plan(case.model, case.args, mesh=ap.Mesh(dp=2), mode="data", recompute=asked)
    assert plan.decisions.recompute == found


def test_as_much_is_recomputed_as_memory_asks_for() -> None:
    """In data-parallel plans, whose layouts are given: the fewest seconds of all mixes that fit."""
    case = models.gpt(sequence=64, layers=4)  # keeps more for backward than waits in buckets

    def planned(**options: object) -> ap.Plan:
        return ap.plan(case.model, case.args, mesh=ap.Mesh(dp=2), mode="data", **options)

    free = planned(states="whole", recompute=None)
    full = planned(states="whole", recompute="full")
    seconds, kinds = free.cost.seconds, set()
    for part in (0.9, 0.6, 0.3, 0.0):
        limit = full.memory.peak + part * (free.memory.peak - full.memory.peak)
        plan = planned(states="whole", memory=limit)
        assert plan.memory.peak <= limit
        assert seconds <= plan.cost.seconds <= full.cost.seconds
        seconds = plan.cost.seconds
        kinds |= set(plan.decisions.recompute.values())
        assert "recomputed" in str(plan.alternatives[0])
    assert kinds == {SELECTIVE, FULL}


def test_selective_regions_keep_what_is_dear_alone() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return norm(gelu(norm(x, (8,)) @ w) @ w.T, (8,)).sum()

    region = recomputed_regions.SelectiveRecompute(function)
    norm, gelu = region.recompute(F.layer_norm), region.recompute(F.gelu)
    x, w = X.clone().requires_grad_(), torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    found = torch.autograd.grad(region(x, w), (x, w))
    expected = torch.autograd.grad(
        F.layer_norm(F.gelu(F.layer_norm(x, (8,)) @ w) @ w.T, (8,)).sum(), (x, w)
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


class Watched:
    """Bytes that regions keep elsewhere, and how many gathers bring them back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cut = self.on_host = self.gathers = 0
        put, call = (
            activation_offload.ActivationOffload.put,
            activation_offload.OffloadedMemory.__call__,
        )

        def watched_put(
            offload: activation_offload.ActivationOffload,
            values: list[Tensor],
            axes: tuple[str, ...],
            *,
            on_host: bool,
        ) -> activation_offload.OffloadedMemory:
            memory = put(offload, values, axes, on_host=on_host)
            for piece in memory._pieces:
                if isinstance(piece, activation_offload.HostPiece):
                    self.on_host += piece._host_copy.nbytes
                else:
                    self.cut += piece.nbytes
            return memory

        def watched_call(memory: activation_offload.OffloadedMemory, place: int) -> Tensor:
            self.gathers += bool(memory._pieces) and bool(memory._axes)
            return call(memory, place)

        monkeypatch.setattr(activation_offload.ActivationOffload, "put", watched_put)
        monkeypatch.setattr(activation_offload.OffloadedMemory, "__call__", watched_call)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gpt", "full"), ("gpt", None), ("llama", "selective"), ("resnet", "full"), ("resnet", None)],
)
def test_what_is_kept_on_the_host_is_what_is_predicted(name, kind, monkeypatch) -> None:
    case, watched = case_of(name), Watched(monkeypatch)
    options = {"mesh": ap.Mesh(one=1), "mode": "data", "backend": "virtual"}
    how = ap.Recompute(kind, keep="host")
    module = ap.parallelize(case.model, case.args, case.kwargs, recompute=how, **options)
    memory = module.plan.memory
    assert memory.activations == pytest.approx(kept_for_backward(module, case), rel=0.015)
    assert memory.host_activations == pytest.approx(watched.on_host, rel=0.015)
    assert (watched.cut, watched.gathers) == (0, 0)


@pytest.mark.parametrize("kind", ["full", "selective", None])
def test_ranks_that_keep_alike_keep_pieces(kind, monkeypatch) -> None:
    case, watched = annotated_for_tensors(), Watched(monkeypatch)
    options = {"mesh": ap.Mesh(tp=2), "mode": "propagate", "backend": "virtual"}
    device, cut, host = (
        ap.parallelize(case.model, case.args, recompute=ap.Recompute(kind, keep), **options)
        for keep in ("device", "cut", "host")
    )
    cut(*case.args)
    less = device.plan.memory.activations - cut.plan.memory.activations
    assert watched.cut / 2 == pytest.approx(less, rel=0.01)  # the other half goes
    assert cut.plan.cost.seconds > device.plan.cost.seconds
    loss = cut.step(*case.args)
    assert watched.gathers >= 4
    assert torch.equal(loss, device.step(*case.args))
    assert host.plan.memory.activations < cut.plan.memory.activations
    assert host.plan.memory.host == host.plan.memory.host_activations >= less


@cache
def annotated_for_tensors() -> Case:
    return megatron(models.gpt(layers=4, hidden=16, heads=2))


def annotated(**recompute: object) -> Case:
    """A GPT with blocks of which shard() says what is recomputed; `a` is the first."""
    case = models.gpt(layers=4, hidden=16, heads=2)
    for letter, asked in recompute.items():
        ap.shard(case.model.layers["abcd".index(letter)], recompute=asked)
    return case


def test_it_is_asked_for_by_annotation(tmp_path) -> None:
    case = annotated(a="full", b=ap.Recompute(None, keep="host"), c=None)
    ap.shard(case.model.layers[3].attention, recompute="selective")
    module = assert_parity(case, mesh=ap.Mesh(dp=2), mode="data")
    decided = {
        "layers.0": FULL,
        "layers.1": ap.Recompute(None, "host"),
        "layers.3.attention": SELECTIVE,
    }
    assert module.plan.decisions.recompute == decided
    module.plan.save(tmp_path / "plan.json")
    saved = ap.Plan.load(tmp_path / "plan.json")
    assert saved.decisions.recompute == decided
    fresh = models.gpt(layers=4, hidden=16, heads=2)
    assert saved.attach(fresh.model, fresh.args).memory == module.plan.memory


@pytest.mark.parametrize(
    ("make", "options", "rule", "beside"),
    [
        (lambda: annotated(a="full"), {"recompute": None}, "said in one way", "recompute='none'"),
        (
            lambda: annotated(a="full"),
            {"recompute": {"layers.*": "selective"}},
            "said in one way",
            "'layers.0': 'selective'",
        ),
        (
            lambda: Case("", ap.shard(Checkpointed("plain"), recompute="full"), (X,)),
            {},
            "runs inside the model",
            "the model itself",
        ),
    ],
)
def test_annotations_that_contradict_are_refused(make, options, rule, beside) -> None:
    case = make()
    with pytest.raises(ap.InvalidInput, match=rule) as error:
        ap.plan(case.model, case.args, mesh=ap.Mesh(dp=2), mode="data", **options)
    assert beside in str(error.value)
    assert "test_recompute.py" in str(error.value)


def test_annotations_that_contradict_each_other_are_refused() -> None:
    case = annotated(a="full")
    with pytest.raises(ap.InvalidInput, match="recomputed in one way"):
        ap.shard(case.model.layers[0], recompute="selective")
    ap.shard(case.model.layers[0].attention, recompute=None)
    with pytest.raises(ap.InvalidInput, match="said in one way"):
        ap.plan(case.model, case.args, mesh=ap.Mesh(dp=2), mode="data")
    wrapped = Checkpointed("plain")
    ap.shard(wrapped.rows[0], recompute=ap.Recompute("full", keep="cut"))
    with pytest.raises(ap.InvalidInput, match=r"torch\.utils\.checkpoint"):
        ap.plan(wrapped, (X,), mesh=ap.Mesh(dp=2), mode="data")
    with pytest.raises(ap.InvalidInput, match="is of a module"):
        ap.shard(torch.matmul, recompute="full")
    with pytest.raises(ap.InvalidInput, match="word, None or a Recompute"):
        ap.shard(nn.Linear(2, 2), recompute=3)
    with pytest.raises(ap.InvalidInput, match="kind is one of"):
        ap.shard(nn.Linear(2, 2), recompute="all")


def test_people_are_told_of_regions(tmp_path) -> None:
    case = annotated(a="full", b="full", c=ap.Recompute("selective", keep="host"))
    options = {"mesh": ap.Mesh(dp=2), "mode": "data"}
    plan = ap.plan(case.model, case.args, **options)
    lines = [
        "recomputed in backward",
        "  layers.{0..1}  in full",
        "  layers.2       selectively, kept on the host",
    ]
    plan.save(tmp_path / "plan.json")
    for text in (str(plan), str(ap.Plan.load(tmp_path / "plan.json"))):
        assert "\n".join(lines) in text
    assert "host" in str(plan)
    apart = "2 in full; 1 selectively, kept on the host"  # one way and the next
    assert plan.alternative(1e9).recompute == apart
    region = str(plan.explain("layers.2.up"))
    assert "region: layers.2, selectively, kept on the host" in region
    fresh = models.gpt(layers=4, hidden=16, heads=2)
    other = ap.plan(fresh.model, fresh.args, recompute={"layers.0": "full"}, **options)
    diff = plan.diff(other)
    assert diff.regions == {
        "layers.1": ("in full", None),
        "layers.2": ("selectively, kept on the host", None),
    }
    assert "  layers.1: in full | -" in str(diff)


@pytest.mark.parametrize("kind", ["full", None])
def test_people_are_told_where_nothing_is_kept_in_pieces(kind) -> None:
    case, told = annotated_for_tensors(), "kept as pieces: no ranks keep it alike"
    options = {"mode": "propagate", "recompute": ap.Recompute(kind, keep="cut")}
    for mesh, is_told in ((ap.Mesh(dp=2, tp=1), True), (ap.Mesh(tp=2), False)):
        plan = ap.plan(case.model, case.args, mesh=mesh, **options)
        assert (told in str(plan)) == is_told


def test_less_is_kept_on_devices_where_memory_binds() -> None:
    """On machines whose hosts have memory of their own: pieces, then the host."""
    case = megatron(models.gpt(layers=4, hidden=32, heads=2, sequence=32))
    options = {"cluster": ap.Cluster.preset("dgx-a100"), "mesh": ap.Mesh(tp=2)}
    options |= {"mode": "propagate", "states": "whole"}

    def planned(**more: object) -> ap.Plan:
        return ap.plan(case.model, case.args, **options, **more)

    free = planned(recompute=None).memory.peak
    host = planned(recompute=ap.Recompute(None, keep="host"))
    seconds = 0.0
    for part, keep in ((0.4, "cut"), (0.02, "host")):
        limit = host.memory.peak + part * (free - host.memory.peak)
        plan = planned(memory=limit)
        assert plan.memory.peak <= limit
        assert keep in {how.keep for how in plan.decisions.recompute.values()}
        assert seconds < plan.cost.seconds
        seconds = plan.cost.seconds
    assert plan.memory.host > 0


@pytest.mark.parametrize(("is_shared", "part"), [(False, 0.1), (False, 0.2), (True, 0.3)])
def test_what_is_kept_on_the_host_is_there_beside_states(is_shared: bool, part: float) -> None:
    """A mix is taken that has room there, and no worse one that keeps all alike."""
    case = megatron(models.gpt(layers=4, hidden=32, heads=2, sequence=32))
    options = {"mesh": ap.Mesh(tp=2), "mode": "propagate"}
    options["states"] = ap.States(optimizer_device="host")
    preset = ap.Cluster.preset("dgx-a100")
    (node,) = preset.nodes

    def planned(there: float = 1e9, own: float = 1e9, **more: object) -> ap.Plan:
        """On machines of whose hosts each device has `there`, beside its own."""
        host = replace(node.device.host, memory=there, is_device=is_shared)
        one = replace(node, device=replace(node.device, memory=own, reserve=0.0, host=host))
        return ap.plan(
            case.model, case.args, cluster=replace(preset, nodes=(one,)), **options, **more
        )

    free, full = planned(recompute=None), planned(recompute="full")
    if is_shared:
        limit = full.memory.peak + part * (free.memory.peak - full.memory.peak)
        there = free.memory.host + limit
        plan = planned(there, memory=there)
        assert planned(there, there).cost == plan.cost
    else:
        host = planned(recompute=ap.Recompute(None, keep="host"))
        limit = host.memory.peak + part * (free.memory.peak - host.memory.peak)
        there = (free.memory.host + host.memory.host) / 2
        plan = planned(there, memory=limit)
        assert free.memory.host < plan.memory.host <= there
    assert plan.memory.peak <= limit
    assert len(set(plan.decisions.recompute.values())) > 1
    assert plan.cost.seconds < full.cost.seconds

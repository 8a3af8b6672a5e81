"""A parallel module in the ways that people use modules; an annotated model without it."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar as ap
from autopar import Mesh, shard
from autopar.runtime.module.parallel_module import RESERVED_NAMES
from tests import models
from tests.annotations import megatron, sequence, vocabulary
from tests.models import Case
from tests.parity import assert_equal, assert_parity, parallel_outcome, relative, single_outcome
from tests.training import assert_broken_steps_leave_no_trace

D2 = Mesh(d=2)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = shard(nn.Linear(4, 6), ((None, None),), params={"weight": ("d", None)})
        self.down = shard(nn.Linear(6, 3), None, ((None, None),))

    def forward(self, x: Tensor) -> Tensor:
        x = shard(torch.relu(self.up(x)), (None, "d"))
        return self.down(x).square().mean()


@dataclass
class Result:
    loss: Tensor
    features: Tensor


torch.export.register_dataclass(Result)


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def case_of(model: nn.Module, *args: Any, **kwargs: Any) -> Case:
    return Case("case", model.double(), args, kwargs)


def test_an_annotated_model_runs_unchanged() -> None:
    torch.manual_seed(0)
    annotated = Two().double()
    plain = nn.Sequential(annotated.up, nn.ReLU(), annotated.down)
    assert torch.equal(annotated(random(8, 4)), plain(random(8, 4)).square().mean())
    assert list(annotated.state_dict()) == ["up.weight", "up.bias", "down.weight", "down.bias"]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_annotations_survive_copies_and_pickles(again: Any) -> None:
    model = again(Two().double())
    module = assert_parity(case_of(model, random(8, 4)), D2)
    assert str(module.plan.layouts["up.weight"]) == "[@d, _]"


def test_an_annotated_model_compiles() -> None:
    model = Two().double()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(random(8, 4)), model(random(8, 4)))


def test_a_parallel_module_is_not_copied() -> None:
    module = ap.parallelize(Two().double(), (random(8, 4),), mesh=D2, mode="propagate")
    for act in (copy.deepcopy, pickle.dumps, AveragedModel):
        with pytest.raises(ap.InvalidInput, match="bound to the ranks"):
            act(module)


def test_a_moving_average_is_kept_as_the_message_says() -> None:
    case = models.mlp()
    single = case.fresh()
    module = ap.parallelize(case.model, case.args, mesh=D2, mode="propagate")
    expected = AveragedModel(single.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    expected.update_parameters(single.model)
    average = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, single.model)]
    for _ in range(2):
        module.step(*case.args)
        single.loss(single.run()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        expected.update_parameters(single.model)
        for name, parameter in module.named_parameters():
            average[name].lerp_(parameter.detach(), 0.1)
    second = ap.parallelize(case.model, plan=module.plan)
    second.load_state_dict(average, strict=False)
    found = second.full_state_dict()
    for name, value in expected.module.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-12, atol=1e-12)


def test_it_is_called_and_differentiated_like_the_model() -> None:
    case = megatron(models.gpt(layers=1))
    module = ap.parallelize(
        case.model, case.args, mesh=Mesh(dp=2, tp=2), check=True, mode="propagate"
    )
    loss, logits = module(*case.args)
    (loss + logits.square().mean()).backward()
    single = case.fresh()
    loss, logits = single.run()
    (loss + logits.square().mean()).backward()
    for name, parameter in single.model.named_parameters():
        assert parameter.grad is not None
        assert relative(module.full_grads()[name], parameter.grad, 1e-4) < 1e-9


@pytest.mark.parametrize("mode", ["propagate", "data", "auto"])
def test_a_plan_with_micro_batches_is_called_with_the_whole_batch(mode: str) -> None:
    case = models.gpt(layers=1)
    case = case if mode == "data" else megatron(case)
    module = ap.parallelize(
        case.model, case.args, mesh=Mesh(dp=2, tp=2), check=True, mode=mode, microbatches=2
    )
    single = case.fresh()
    for run in (module, single.model):
        loss, logits = run(*case.args)
        (loss + logits.square().mean()).backward()
    single.loss(single.run()).backward()
    module.step(*case.args)  # in micro-batches, on the same parameters
    for name, parameter in single.model.named_parameters():
        assert parameter.grad is not None
        assert relative(module.full_grads()[name], parameter.grad, 1e-4) < 1e-9


def test_a_direct_call_normalises_the_whole_batch_and_changes_the_buffers() -> None:
    case = models.resnet()
    module = ap.parallelize(case.model, case.args, mesh=D2, mode="propagate", microbatches=2)
    single = case.fresh()
    torch.testing.assert_close(module(*case.args), single.run())
    for name, value in single.model.named_buffers():
        torch.testing.assert_close(module.full_state_dict()[name], value)


def test_gradients_add_up_over_steps() -> None:
    case = models.mlp()
    module = ap.parallelize(case.model, case.args, mesh=D2, mode="propagate")
    module.step(*case.args)
    once = module.full_grads()
    module.step(*case.args)
    for name, grad in module.full_grads().items():
        torch.testing.assert_close(grad, 2 * once[name], rtol=1e-12, atol=0)


def test_steps_that_make_one_update_are_scaled() -> None:
    case, parts = models.mlp(), {"mesh": Mesh(pp=2), "microbatches": 2, "schedule": "zb-h1"}
    for options in ({"mesh": D2}, parts):
        module = ap.parallelize(case.model, case.args, mode="propagate", **options)
        loss, once = module.step(*case.args), module.full_grads()
        module.zero_grad()
        for _ in range(4):
            torch.testing.assert_close(module.step(*case.args, scale=1 / 4), loss)
        for name, grad in module.full_grads().items():
            torch.testing.assert_close(grad, once[name], rtol=1e-12, atol=0)


def test_a_scale_that_the_model_takes_is_its_own() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return (self.linear(x) * scale).square().mean()

    inputs, model = {"x": random(8, 4), "scale": torch.tensor(3.0).double()}, Scales().double()
    module = ap.parallelize(model, kwargs=inputs, mesh=D2, mode="propagate")
    torch.testing.assert_close(module.step(**inputs), model(**inputs).detach())
    module = ap.parallelize(model, (inputs["x"], inputs["scale"]), mesh=D2, mode="propagate")
    module.step(*inputs.values())
    once = module.full_grads()
    module.step(*inputs.values(), scale=0.5)  # the model has its own already
    for name, grad in module.full_grads().items():
        torch.testing.assert_close(grad, 1.5 * once[name], rtol=1e-12, atol=0)


def test_the_loss_of_a_step_is_a_number_like_any_other() -> None:
    case = models.mlp()
    module = ap.parallelize(case.model, case.args, mesh=D2, mode="propagate")
    loss = module.step(*case.args)
    plain = loss.detach().clone()
    assert not loss.requires_grad
    assert (f"{loss:.3f}", repr(loss), loss.item()) == (f"{plain:.3f}", repr(plain), plain.item())
    written = io.BytesIO()
    torch.save({"loss": loss}, written)
    written.seek(0)
    read = torch.load(written, weights_only=True)["loss"]
    for same in (read, copy.deepcopy(loss), loss.detach(), loss.clone(), loss.double()):
        assert torch.equal(same, plain)
    for other in (loss.detach(), copy.deepcopy(loss), read, loss.exp(), torch.stack([loss])):
        assert type(other) is Tensor
    mean, more = sum([loss, loss]) / 2, torch.ones(2, requires_grad=True)
    assert torch.equal(mean, plain)
    (loss + more.sum()).backward()
    assert torch.equal(more.grad, torch.ones(2))  # type: ignore[arg-type]


def test_a_model_that_was_parallelized_is_trained_plainly_too() -> None:
    case = models.mlp()
    optimizers = [torch.optim.SGD(case.model.parameters(), lr=0.1)]
    module = ap.parallelize(case.model, case.args, mesh=D2, mode="propagate")
    optimizers.append(torch.optim.SGD(case.model.parameters(), lr=0.1))
    before = next(case.model.parameters()).detach().clone()
    for optimizer in optimizers:
        case.loss(case.run()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(before, next(case.model.parameters()))
    own = torch.optim.SGD(module.parameters(), lr=0.1)
    own.step()  # nothing learns yet
    both = torch.optim.SGD([*case.model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
    both.step()


@pytest.mark.parametrize(
    "options",
    [{"mesh": Mesh(dp=2)}, {"mesh": Mesh(pp=2), "microbatches": 2, "schedule": "zb-h1"}],
    ids=str,
)
def test_a_step_that_breaks_off_leaves_gradients_as_they_were(options) -> None:
    case = models.mlp()
    options = {"mode": "propagate", "backend": "virtual", **options}
    module = ap.parallelize(case.model, case.args, **options)
    assert_broken_steps_leave_no_trace(module, case)
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))


def test_state_of_the_model_is_loaded() -> None:
    module = ap.parallelize(Two().double(), (random(8, 4),), mesh=D2, mode="propagate")
    other = Two().double()
    module.load_state_dict(other.state_dict())
    torch.testing.assert_close(module(random(8, 4)), other(random(8, 4)))


class Structured(nn.Module):
    """Inputs by keyword, in a dict; outputs in a structure with things that are no tensors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)

    def forward(self, *, batch: dict[str, Any]) -> Any:
        features = self.linear(batch["x"]) * batch["scale"]
        loss = features.square().mean()
        if self.kind == "dict":
            return {"features": features, "loss": loss, "count": 3, "nothing": None}
        return Result(loss, features)


@pytest.mark.parametrize("kind", ["dict", "dataclass"])
def test_structures_go_in_and_out(kind: str) -> None:
    model, batch = Structured(kind).double(), {"x": random(8, 4), "scale": 2}
    module = ap.parallelize(model, kwargs={"batch": batch}, mesh=D2, check=True, mode="propagate")
    parallel, single = module(batch=batch), model(batch=batch)
    assert type(parallel) is type(single)
    if kind == "dict":
        assert (parallel["count"], parallel["nothing"]) == (3, None)
        parallel, single = Result(parallel["loss"], parallel["features"]), single
        single = Result(single["loss"], single["features"])
    torch.testing.assert_close(parallel.loss, single.loss)
    torch.testing.assert_close(parallel.features, single.features)
    torch.testing.assert_close(module.step(batch=batch), single.loss.detach())


class Uneven(nn.Module):
    """Frozen, unused, shared and scalar parameters, buffers of all kinds, a module run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = shard(nn.Linear(4, 4), params={"weight": ("d", None)})
        self.norm = nn.BatchNorm1d(4)
        self.frozen = shard(nn.Linear(4, 4), params={"weight": (None, "d")}).requires_grad_(False)
        self.unused = shard(nn.Linear(3, 3), params={"weight": ("d", None)})
        self.matrix = nn.Parameter(random(4, 4))
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("shift", random(4))
        self.register_buffer("fleeting", random(4), persistent=False)
        self.register_buffer("idle", random(2))

    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        x = self.linear(self.norm(self.linear(self.norm(x))))
        x = self.frozen(x @ self.matrix @ self.matrix.T) * self.shift * self.fleeting
        return (x * self.scale.exp() + self.matrix.sum(0)).pow(3).mean()


def test_parameters_and_buffers_of_every_kind() -> None:
    case = case_of(Uneven(), random(8, 4), random(3, 2))
    module = assert_parity(case, D2)
    assert list(module.full_state_dict()) == list(case.model.state_dict())
    assert {n for n, p in module.named_parameters() if not p.requires_grad} == {
        "frozen.weight",
        "frozen.bias",
    }


class Alone(nn.Module):
    """No inputs at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(random(4, 4))
        shard(self, params={"weight": ("d", None)})

    def forward(self) -> Tensor:
        return self.weight.square().sum()


def test_a_model_without_inputs() -> None:
    assert_parity(case_of(Alone()), D2)


def test_the_batch_on_another_dim() -> None:
    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(shard(x, (None, "d", None))).square().mean()

    module = assert_parity(case_of(Second(), random(3, 8, 4)), D2)
    assert str(module.plan.layouts["x"]) == "[_, @d, _]"


def test_spectral_norm_keeps_its_vectors() -> None:
    """Power iteration writes into its buffers, by views and by `out=`, where no gradient flows."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6))
            self.down = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(x))).square().mean()

    for options in ({}, {"microbatches": 2}):
        assert_parity(case_of(Normed(), random(8, 4)), D2, **options)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(d=1)], ids=str)
def test_one_rank_moves_nothing(mesh: Mesh) -> None:
    module = assert_parity(models.mlp(), mesh)
    assert module.plan.movements() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_lower_precision(name: str, dtype: torch.dtype) -> None:
    case = vocabulary(megatron(models.ZOO[name](layers=1)))
    case.model.to(dtype)
    module = ap.parallelize(
        case.model, case.args, case.kwargs, mesh=Mesh(dp=2, tp=2), check=True, mode="propagate"
    )
    tolerance = 200 * torch.finfo(dtype).eps
    actual, expected = parallel_outcome(module, case, 1), single_outcome(case.fresh(), 1)
    assert_equal(actual, expected, tolerance, floor=1e-2)


def test_a_rule_with_a_wrong_shape_is_caught_where_it_is() -> None:
    @torch.library.custom_op("tests_module::halve", mutates_args=())
    def halve(x: Tensor) -> Tensor:
        return x[: len(x) // 2].clone()

    halve.register_fake(lambda x: torch.empty_like(x[: len(x) // 2]))
    ap.register_rule(halve, "n c -> m c")

    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return halve(shard(x, ("d", None)))

    module = ap.parallelize(Halves(), (random(8, 4),), mesh=D2, check=True, mode="propagate")
    with pytest.raises(ap.AutoparError, match="every rank's piece has the shape") as caught:
        module(random(8, 4))
    assert "halve(shard(x" in (caught.value.source or "")


def test_gradients_that_are_not_summed_are_caught_where_they_are() -> None:
    case = sequence(megatron(models.gpt(layers=1)))
    plan = ap.plan(case.model, case.args, mesh=Mesh(tp=2), mode="propagate")
    gather = next(n for n in plan.program.graph.nodes if "all_gather" in n.name)
    gather.meta["movement"] = replace(gather.meta["movement"], pending=False)
    module = ap.parallelize(case.model, case.args, plan=plan, check=True)
    with pytest.raises(ap.AutoparError, match="differ in the gradient of all_gather"):
        module.step(*case.args)


def test_a_module_that_runs_twice_keeps_all_names_of_its_buffers():
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("mean", torch.ones(4))
            self.register_buffer("shift", torch.ones(4), persistent=False)

        def forward(self, x):
            return self.inner(x) * self.mean + self.shift

    block = Counted().double()
    model, x = nn.Sequential(block, nn.Tanh(), block), torch.randn(4, 4, dtype=torch.float64)
    module = ap.parallelize(model, (x,), mesh=ap.Mesh(dp=2), mode="propagate", backend="virtual")
    assert set(module.full_state_dict()) == set(model.state_dict())
    module.load_state_dict(model.state_dict())
    with torch.no_grad():
        model.get_buffer("2.mean").mul_(2)
        module.get_buffer("2.mean").mul_(2)
    torch.testing.assert_close(module(x), model(x), rtol=1e-12, atol=1e-12)


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.list = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.named = nn.ModuleDict({"b": nn.Linear(4, 4), "a": nn.Linear(4, 4)})

    def forward(self, x):
        x = self.row(x)
        for layer in [*self.list, *self.named.values()]:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("options", [{"mesh": ap.Mesh(dp=2)}, {"mesh": ap.Mesh(pp=2)}], ids=str)
def test_containers_are_indexed_as_in_the_model(options):
    model, x = Containers(), torch.randn(4, 4)
    module = ap.parallelize(model, (x,), mode="propagate", backend="virtual", **options)
    parameters = dict(module.named_parameters())
    assert module.row[-1].weight is parameters["row.2.weight"]
    assert [len(part) for part in (module.row, module.list, module.named)] == [3, 2, 2]
    assert [p.weight is parameters[f"list.{i}.weight"] for i, p in enumerate(module.list)] == [1, 1]
    assert list(module.named) == ["b", "a"]
    assert module.named["a"].weight is parameters["named.a.weight"]
    module.row[0].weight = nn.Parameter(torch.zeros(4, 4))
    assert module.full_state_dict()["row.0.weight"].count_nonzero() == 0


@pytest.mark.parametrize(
    "options",
    [{"mesh": ap.Mesh(dp=2)}, {"mesh": ap.Mesh(dp=1), "microbatches": 2}, {"mesh": ap.Mesh(pp=2)}],
    ids=str,
)
def test_a_step_of_frozen_parameters_alone_is_refused(options):
    x = torch.randn(4, 4)
    module = ap.parallelize(Containers(), (x,), mode="propagate", backend="virtual", **options)
    module.requires_grad_(False)
    with pytest.raises(ap.InvalidInput, match="parameters are all frozen"):
        module.step(x)
    module.row[0].requires_grad_(True)
    module.step(x)
    assert set(module.full_grads()) == {"row.0.weight", "row.0.bias"}


class Config:
    hidden = 4


class Described(nn.Module):
    """What code that looks through a model may ask for."""

    registry: dict[str, type] = {}  # noqa: RUF012
    kind = "none"

    def __init_subclass__(cls) -> None:
        Described.registry[cls.__name__] = cls

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.size, self.config, self.kind = size, Config(), "own"
        self.up = shard(nn.Linear(size, size, bias=False), params={"weight": ("d", None)})
        self.norm, self.parts = nn.LayerNorm(size), nn.ParameterList([torch.ones(size)])
        self.table, self.held = torch.ones(size), [self.up]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)) * self.parts[0]

    def count(self) -> int:
        return sum(p.numel() for p in self.parameters()) * self.size


class Inner(Described):
    pass


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.plan, self.inner, self.again = Config(), "mine", Inner(4), Inner(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.inner(x)).square().mean()


@pytest.mark.parametrize("mesh", [Mesh(d=2), Mesh(pp=2, d=2)], ids=str)
def test_code_that_looks_through_a_model_finds_what_it_looks_for(mesh: Mesh) -> None:
    model = Outer()
    module = ap.parallelize(model, (random(8, 4).float(),), mesh=mesh, mode="propagate")
    for kind in (Described, Inner, nn.LayerNorm, nn.Linear, nn.ParameterList):
        named = [
            [n for n, m in of.named_modules() if isinstance(m, kind)] for of in (module, model)
        ]
        assert named[0] == named[1] != []
    inner: Any = module.inner
    assert type(inner) is type(module.again)
    assert Described.registry["Inner"] is Inner
    assert (inner.size, inner.kind, inner.count()) == (4, "own", model.inner.count())
    assert inner.config is model.inner.config
    assert module.config is model.config
    assert isinstance(module.plan, ap.Plan)
    assert inner.up.bias is None
    assert inner.up.in_features == 4
    assert [p is inner.get_parameter("parts.0") for p in inner.parts] == [True]
    assert "Linear(in_features=4, out_features=4, bias=False, weight: f32[4@d, 4])" in repr(module)
    assert "(norm): LayerNorm((4,), eps=1e-05" in repr(module)
    for name in ("table", "held"):  # which are the model's own
        assert not hasattr(inner, name)
    for owner, name in ((module, "config"), (inner, "size")):
        with pytest.raises(ap.InvalidInput, match="what modules do is part of the program"):
            setattr(owner, name, 8)
    for owner, name in ((module, "inner"), (inner, "norm"), (inner, "another")):
        for put in (setattr, lambda o, n, m: o.add_module(n, m)):
            before = dict(owner.named_modules())
            with pytest.raises(ap.InvalidInput, match="modules of a parallel module are those"):
                put(owner, name, nn.Linear(4, 4))
            assert dict(owner.named_modules()) == before
    with pytest.raises(ap.InvalidInput, match="modules of a parallel module are those"):
        del inner.norm
    inner.norm = inner.norm
    for act in (inner, inner.norm):
        with pytest.raises(ap.InvalidInput, match="submodules of a parallel module do not run"):
            act(random(8, 4))


class Root(nn.Module):
    """One that has methods, properties and a name of its own."""

    kind, training_steps = "none", 3
    deleted: set[type] = set()  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.width, self.kind, self._hidden = nn.Linear(4, 4), 4, "own", 5

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return (self.linear(x) * scale).square().mean()

    @property
    def dtype(self) -> torch.dtype:
        return self.linear.weight.dtype

    def count(self) -> int:
        return sum(p.numel() for p in self.parameters()) + self.width + self._hidden

    def evaluate(self, x: Tensor) -> Tensor:
        return self(x) + 1

    def features(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def step(self) -> None:
        raise AssertionError

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def __del__(self) -> None:
        Root.deleted.add(type(self))


def test_the_root_is_of_the_models_class_and_does_what_reads() -> None:
    model, x = Root().double(), random(8, 4)
    module: Any = ap.parallelize(model, (x,), mesh=D2, mode="propagate")
    assert isinstance(module, Root)
    assert isinstance(module, ap.ParallelModule)
    assert type(module).__name__ == "Root"
    assert inspect.signature(module.forward) == inspect.signature(model.forward)
    assert (module.count(), module.dtype, module.kind) == (model.count(), torch.float64, "own")
    assert (module.width, module.training_steps) == (4, 3)
    torch.testing.assert_close(module.evaluate(x), model.evaluate(x))  # runs the program
    torch.testing.assert_close(module.step(x), model(x).detach())
    module.load_state_dict(model.state_dict())
    with pytest.raises(ap.InvalidInput, match="submodules of a parallel module do not run"):
        module.features(x)
    for name in ("kind", "training_steps", "dtype", "count"):
        with pytest.raises(ap.InvalidInput, match="what modules do is part of the program"):
            setattr(module, name, 8)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing
    del module
    gc.collect()
    assert {*Root.deleted} <= {Root}


def test_who_shares_a_parameter_is_told_that_it_is_copied(recwarn: Any) -> None:
    """Not where a model is parallelized again, or grows."""
    one, other, x = Root().double(), Root().double(), random(8, 4)
    other.linear.weight = one.linear.weight
    made = [ap.parallelize(model, (x,), mesh=D2, mode="data") for model in (one, one)]
    one.register_parameter("more", nn.Parameter(random(4)))
    made.append(ap.parallelize(one, (x,), mesh=D2, mode="data"))
    assert not recwarn.list
    with pytest.warns(UserWarning, match="linear.weight of this model is another's too"):
        made.append(ap.parallelize(other, (x,), mesh=D2, mode="data"))


def test_a_parameter_in_the_memory_of_one_that_is_gone_is_another(recwarn: Any) -> None:
    x = random(8, 4)
    gone = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(20)), Mean()).double()
    numbers = {id(parameter) for parameter in gone.parameters()}
    modules = [ap.parallelize(gone, (x,), mesh=D2, mode="data")]
    del gone
    gc.collect()
    filling = list[nn.Parameter]()  # what else is free, until one of the numbers is given again
    while id(weight := nn.Parameter(torch.empty(4, 4).double())) not in numbers:
        filling.append(weight)
        assert len(filling) < 100_000, "no number was given again"
    nn.init.normal_(weight)
    layers = [nn.Linear(4, 4).double(), nn.Linear(4, 4).double()]
    layers[1].weight = weight
    model = nn.Sequential(*layers[-2:], nn.Linear(4, 4).double(), Mean())
    modules += [ap.parallelize(model, (x,), mesh=D2, mode="data") for _ in range(2)]
    assert not recwarn.list


def test_what_would_see_pieces_or_not_run_is_refused() -> None:
    x = random(8, 4)
    module: Any = ap.parallelize(Root().double(), (x,), mesh=D2, mode="propagate")
    for owner in (module, module.linear):
        for register in (
            owner.register_state_dict_pre_hook,
            owner.register_state_dict_post_hook,
            owner.register_load_state_dict_pre_hook,
            owner.register_load_state_dict_post_hook,
        ):
            with pytest.raises(ap.InvalidInput, match="the state dict of the model, as it is"):
                register(print)
    inner = module.forward
    module.forward = lambda x: 3 * inner(x)
    torch.testing.assert_close(module(x), 3 * inner(x))
    with pytest.raises(ap.InvalidInput, match="what modules do is part of the program") as caught:
        module.step(x)
    assert "another forward" in str(caught.value.got)


def test_a_root_that_is_a_list_is_indexed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0), Mean())
    module: Any = ap.parallelize(model.double(), (random(8, 4),), mesh=D2, mode="propagate")
    assert isinstance(module, nn.Sequential)
    assert (len(module), module[-1], module[0:2]) == (5, module[4], [module[0], module[1]])


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class Named(nn.Module):
    def __init__(self, kind: str, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if kind == "parameter":
            self.register_parameter(name, nn.Parameter(torch.ones(4)))
        elif kind == "buffer":
            self.register_buffer(name, torch.ones(4))
        else:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def test_what_has_a_name_of_the_parallel_module_is_refused() -> None:
    for kind, name in (
        ("parameter", "memory"),
        ("buffer", "plan"),
        ("buffer", "step"),
        ("module", "graph"),
        ("module", "loss_scale"),
        ("parameter", "_names"),
    ):
        model, x = Named(kind, name), torch.ones(4, 4)
        with pytest.raises(ap.InvalidInput, match="keep their names, beside those that") as caught:
            ap.parallelize(model, (x,), mesh=D2, mode="propagate")
        assert caught.value.got == name
        outer = nn.Sequential(model)  # as the remedy says
        module = ap.parallelize(outer, (x,), mesh=D2, mode="propagate")
        assert module.full_state_dict().keys() == outer.state_dict().keys()
    added = vars(module).keys() - vars(outer).keys()
    told = {name for name in added if name.startswith("__") or name == "_is_accelerate_prepared"}
    assert added - told <= RESERVED_NAMES


class OneUnread(nn.Module):
    """Three layers, and a parameter that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Parameter(torch.ones(3))
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize(
    "options",
    [{"mesh": Mesh(dp=2)}, {"mesh": Mesh(pp=2), "schedule": "1f1b", "microbatches": 2}],
    ids=["whole", "pipeline"],
)
def test_beside_an_unread_parameter_others_may_be_frozen_between_steps(options):
    x = torch.ones(4, 4)
    module = ap.parallelize(OneUnread(), (x,), backend="virtual", **options)
    module.step(x)
    frozen = dict(module.named_parameters())["layers.1.weight"].requires_grad_(False)
    frozen.grad = None
    module.step(x)
    assert frozen.grad is None
    assert sorted(module.full_grads()) == [
        f"layers.{layer}.{name}"
        for layer in range(3)
        for name in ("bias", "weight")
        if (layer, name) != (1, "weight")
    ]


def test_a_dim_of_no_elements_is_left_whole() -> None:
    linear = ap.shard(nn.Linear(2, 8, bias=False), params={"weight": ("d", None)})
    linear.weight = nn.Parameter(torch.empty(8, 0))
    module = ap.parallelize(nn.Sequential(linear), (torch.ones(4, 0),), mesh=D2, mode="propagate")
    torch.testing.assert_close(module(torch.ones(4, 0)), torch.zeros(4, 8))

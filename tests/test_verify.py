"""verify: three programs side by side, and the first value in which they part."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.capture.fake import FakeTensor
from autopar.cli import main
from autopar.commands import verify as verify_command
from autopar.verification.references import Comparison, loss_of
from autopar.verification.verification import Verification
from tests import models


class Exported(nn.Module):
    """Export gives it another program: the scores of the second layer are not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = self.second(x if isinstance(x, FakeTensor) else x.tril())
        return x.square().mean()


class Mixed(nn.Module):
    """Rows are mixed by an operator whose rule denies it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return mix(torch.tanh(self.up(x))).square().mean()


@torch.library.custom_op("verifytest::mix", mutates_args=())
def mix(x: Tensor) -> Tensor:
    return x.flip(0) * x


@mix.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


mix.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0].flip(0) + (grad * ctx.saved_tensors[0]).flip(0),
    setup_context=_keep,
)
ap.register_rule("verifytest.mix", "b h -> b h")


def batch(rows: int = 8) -> tuple[Tensor]:
    return (torch.randn(rows, 6, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (models.gpt, {"mesh": ap.Mesh(dp=2, tp=2)}),
        (models.resnet, {"mesh": ap.Mesh(dp=2), "mode": "propagate"}),
        (models.gpt, {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "zb-h1", "microbatches": 4}),
    ],
)
def test_models_of_the_tests_are_the_same_three_times(make, options):
    case = make()
    found = ap.verify(case.model, case.args, case.kwargs, **options)
    assert found.ok, found
    assert found.dtype == torch.float64
    assert {"loss", "gradient", "state at the end"} <= {row.kind for row in found.parallel}
    assert json.loads(json.dumps(found.to_json()))["ok"]
    assert "are the same program" in str(found)


def test_the_model_is_not_touched_and_float32_becomes_double():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = ap.verify(model, batch(), mesh=ap.Mesh(dp=2), mode="propagate")
    assert found.ok, found
    assert found.dtype == torch.float64
    assert [row.name for row in found.parallel if row.kind == "buffer"] == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


class Mean(nn.Module):
    """A loss."""

    def forward(self, x):
        return x.mean()


def test_without_a_word_about_machines_four_ranks_are_planned_for():
    found = ap.verify(nn.Linear(6, 6), batch())
    assert "same draws" not in str(found)
    assert found.ok
    assert found.mesh.size == 4


def test_what_is_differentiated_is_said():
    without, own = (
        ap.verify(model, batch(), mesh=ap.Mesh(dp=2), steps=1)
        for model in (nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), Mean()))
    )
    assert "a weighted sum of its outputs is differentiated" in str(without)
    assert "weighted sum of step 1 " in str(without)
    assert "loss of step" not in str(without)
    assert "loss of step 1 " in str(own)
    assert "weighted" not in str(own)


def test_a_model_that_export_changes_is_found_with_its_line():
    found = ap.verify(Exported(), batch(), mesh=ap.Mesh(dp=2))
    assert not found.ok
    (difference,) = found.differences  # the parallel program is the captured one
    assert difference.between == "plain and captured"
    assert difference.where == "result of second"
    assert "self.second(x if" in (difference.source or "")
    assert "NOT the same program" in str(found)


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"pipeline": 2, "microbatches": 2}])
def test_a_checked_first_step_refuses_what_export_changed(options):
    module = ap.parallelize(
        Exported().double(), (batch()[0].double(),), mesh=ap.Mesh(dp=2), check=True, **options
    )
    with pytest.raises(ap.ExecutionError, match="what the plain model does") as error:
        module.step(batch()[0].double())
    assert "result of second" in str(error.value)
    assert "ap.verify()" in str(error.value)


@pytest.mark.parametrize("declared", [None, ({0: torch.export.Dim("batch", max=8)},)])
def test_a_checked_first_step_is_compared_whatever_its_program_is(declared):
    model, (x,) = Exported().double(), batch()
    about = {"mesh": ap.Mesh(dp=2), "mode": "data", "dynamic_shapes": declared}
    module = ap.parallelize(model, (x.double(),), check=True, **about)
    with torch.no_grad():
        module.eval()(x[:4].double())  # is no step of a training
    module(x[:3].double())
    for _ in range(2):
        with pytest.raises(ap.ExecutionError, match="what the plain model does"):
            module.train().step(x[:6].double())


class ExportedSmall(Exported):
    """Another model while it is exported, of few rows."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            raise ValueError("rows")
        return super().forward(x) if x.shape[0] < 8 else self.first(x).square().mean()


def test_the_ends_of_a_range_of_sizes_are_verified():
    about = {"mesh": ap.Mesh(dp=2), "mode": "data", "steps": 1}
    for least, is_ok in ((1, True), (2, False)):
        rows = torch.export.Dim("rows", min=least, max=64)
        found = ap.verify(ExportedSmall(), batch(), dynamic_shapes=({0: rows},), **about)
        assert found.ok is is_ok
        assert "loss 1 at rows 16" in {f"{row.kind} {row.name}" for row in found.parallel}
        assert (found.sizes[0], found.sizes[2]) == ("rows 8", "rows 16")
        assert found.sizes[1].startswith("rows 1 not" if is_ok else "rows 2")
        assert "; rows 16" in str(found)
        assert is_ok or "result of second" in str(found)


def test_sizes_are_those_that_were_run_and_none_is_empty():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.up(x).square().mean() + y.square().mean()

    rows = torch.export.Dim("rows", max=9)
    x, y = torch.randn(8, 6).double(), torch.randn(6, 6).double()
    said = {"dynamic_shapes": ({0: rows}, {0: rows - 2}), "mesh": ap.Mesh(dp=2), "mode": "data"}
    plan = ap.plan(Two().double(), (x, y), **said)
    assert plan.dynamic.ends(2) == [{"rows": 3}, {"rows": 9}]
    found = ap.verify(Two().double(), (x[:4], y[:2]), plan=plan, steps=1)
    assert found.ok
    assert found.sizes == ("rows 4", "rows 8", "rows 3", "rows 9")


def test_a_wrong_rule_is_found_with_its_node():
    ap.shard(model := Mixed(), (("dp", None),))
    found = ap.verify(model, batch(), mesh=ap.Mesh(dp=2), mode="propagate")
    assert all(row.ok for row in found.captured)
    (difference,) = found.differences
    assert difference.between == "captured and parallel"
    assert difference.where.startswith("verifytest_mix, f64[8@dp, 6]")
    assert "return mix(" in (difference.source or "")


@pytest.mark.parametrize("learns", [True, False])
def test_an_output_beside_the_loss_is_compared(learns):
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            hidden = self.up(x)
            return {"loss": hidden.square().mean(), "mixed": mix(hidden)}

    model = Beside().requires_grad_(learns)
    found = ap.verify(model, batch(), mesh=ap.Mesh(dp=2), mode="data")
    assert all(row.ok for row in found.captured)
    assert [(row.kind, row.name) for row in found.parallel if not row.ok] == [("output", "1")]
    assert found.differences[0].where.startswith("verifytest_mix")


def test_coarse_numbers_are_compared_in_double_as_well():
    class Negated(nn.Module):
        """Export negates the gradient of a shift."""

        def __init__(self) -> None:
            super().__init__()
            self.shift, self.up = nn.Parameter(torch.zeros(6)), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            shift = self.shift
            if isinstance(x, FakeTensor):
                shift = shift.detach() * 2 - shift
            hidden = self.up(x)
            return (hidden * 10).square().mean() + 0.1 * (hidden + shift).square().mean()

    model, (x,) = Negated().bfloat16(), batch()
    module = ap.parallelize(model, (x.bfloat16(),), mesh=ap.Mesh(dp=2), check=True)
    with pytest.raises(ap.ExecutionError, match="what the plain model does"):
        module.step(x.bfloat16())


def test_the_verdict_says_how_much_is_cut():
    model = nn.Linear(6, 6)
    cut = str(ap.verify(model, batch(), mesh=ap.Mesh(dp=2), mode="data"))
    assert "values cut" in cut
    whole = ap.verify(model, batch(), mesh=ap.Mesh(one=1))
    assert "every rank runs all of it" in str(whole)


def test_a_gradient_on_one_side_only_is_a_difference():
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return (y + 0 * self.b(x) if isinstance(x, FakeTensor) else y).sum()

    found = ap.verify(Once(), batch(), mesh=ap.Mesh(dp=2))
    wrong = {(row.kind, row.name, row.expected) for row in found.captured if not row.ok}
    assert ("gradient", "b.weight", None) in wrong


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: ap.verify(nn.Linear(6, 6), batch(), steps=0), "at least one step"),
        (lambda: ap.verify(nn.Linear(6, 6), batch(), backend="torch"), "virtual mesh"),
        (lambda: ap.verify(nn.Linear(6, 6, device="meta"), batch()), "with data"),
        (lambda: ap.verify(nn.Linear(6, 6), (batch()[0].to("meta"),)), "with data"),
        (lambda: ap.verify(nn.Linear(5, 6), batch()), "plain model runs"),
        (lambda: ap.verify(nn.Linear(6, 6), (batch()[0] / 0,)), "loss is a number"),
    ],
)
def test_wrong_input_is_refused(call, rule):
    with pytest.raises(ap.InvalidInput, match=rule):
        call()


def test_a_model_without_a_loss_is_differentiated_as_a_whole():
    values = [torch.ones(2, 3, requires_grad=True), torch.ones((), dtype=torch.long)]
    assert loss_of(values).shape == ()
    assert loss_of([torch.ones(2)]).requires_grad is False


@pytest.mark.parametrize(("name", "code"), [("right", 0), ("wrong", 1)])
def test_the_command_says_by_its_exit_code(name, code, tmp_path, capsys):
    path = tmp_path / f"{name}_model.py"
    path.write_text(
        "import torch\nfrom tests.test_verify import Exported, batch\n"
        "right = lambda: (torch.nn.Linear(6, 6), batch())\n"
        "wrong = lambda: (Exported(), batch())\n"
    )
    words = ["verify", f"{path}:{name}", "--mesh", "dp=2", "--steps", "1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([*words, "--json"]) == code
        assert json.loads(capsys.readouterr().out)["ok"] is (code == 0)
        assert main(words) == code
    assert ("NOT the same" in capsys.readouterr().out) is (code == 1)


def test_the_command_fails_where_coarse_numbers_leave_it_open(monkeypatch, capsys):
    row = Comparison("loss", "0", 1.0, 1.2, error=0.2, allowed=0.5, ok=False)
    left_open = Verification(ap.Mesh(dp=2), "", torch.bfloat16, 1e-9, 1, (row,), (row,), ())
    assert (left_open.ok, left_open.differs) == (False, False)
    monkeypatch.setattr(verify_command, "load_call", lambda spec: (None, (), {}))
    monkeypatch.setattr(verify_command, "verify", lambda *args, **options: left_open)
    assert main(["verify", "model.py:make", "--mesh", "dp=2"]) == 1
    assert "cannot be verified" in capsys.readouterr().out


class Cast(nn.Module):
    """A part is cast to a coarse dtype; `wrong` is what export takes another multiple of."""

    def __init__(self, join: Callable[[Tensor, Tensor, float], Tensor], wrong: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.join, self.wrong = nn.Linear(6, 6), join, wrong

    def forward(self, x: Tensor) -> Tensor:
        factor = self.wrong if isinstance(x, FakeTensor) else 1.0
        return self.join(self.up(x), self.up.weight, factor)


def _float8(y: Tensor) -> Tensor:
    return y.to(torch.float8_e4m3fn).to(y.dtype)


BESIDE: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "float8 goes in": lambda y, w, k: (_float8(y).detach() + k * y).square().mean(),
    "bfloat16 counts nothing": lambda y, w, k: (0 * y.bfloat16() + k * y).square().mean(),
    "bfloat16 goes in": lambda y, w, k: (y.bfloat16() + k * y).square().mean(),
    "float32 goes in": lambda y, w, k: k * y.float().square().mean(),
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("float8 goes in", 1.5),
        ("bfloat16 counts nothing", 1 + 1e-6),
        ("bfloat16 goes in", 1.2),
        ("float32 goes in", 1 + 1e-5),
    ],
)
def test_a_coarse_number_does_not_hide_a_difference(name, wrong):
    options = {"mesh": ap.Mesh(dp=2), "mode": "propagate", "steps": 1}
    found = ap.verify(Cast(BESIDE[name], wrong), batch(), **options)
    assert found.differs
    assert not all(row.ok for row in found.captured)
    assert ap.verify(Cast(BESIDE[name], 1.0), batch(), **options).ok


def test_what_coarse_numbers_do_not_reach_is_compared_as_ever():
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            factor = 1 + 1e-6 if isinstance(x, FakeTensor) else 1.0
            fine = factor * self.up(x)
            return {"loss": fine.square().mean(), "coarse": factor * self.down(x).bfloat16()}

    found = ap.verify(Beside(), batch(), mesh=ap.Mesh(dp=2), mode="propagate", steps=1)
    wrong = {(row.kind, row.name) for row in found.captured if row.differs}
    assert {("loss", "1"), ("gradient", "up.weight")} <= wrong
    assert ("output", "1") not in wrong
    allowed = {(row.kind, row.name): row.allowed for row in found.captured}
    assert allowed["loss", "1"] == 1e-9 < allowed["output", "1"] <= 2**-4
    assert "after coarser numbers" in str(found)


def test_what_rounding_may_explain_and_nothing_proves_is_neither_right_nor_wrong():
    model = Cast(lambda y, w, k: (_float8(k * y) - y.detach()).square().mean(), 1.02)
    found = ap.verify(model, batch(), mesh=ap.Mesh(dp=2), mode="propagate", steps=1)
    assert not found.ok
    assert not found.differs
    assert "loss 1" in found.unverified
    assert "cannot be verified" in str(found)
    assert not json.loads(json.dumps(found.to_json()))["ok"]
    module = ap.parallelize(model, batch(), mesh=ap.Mesh(dp=2), mode="propagate", check=True)
    with pytest.warns(UserWarning, match="cannot tell whether"):
        module.step(*batch())


def test_complex_parameters_are_compared_as_the_single_numbers_that_they_are():
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(6, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).abs().square().mean()

    found = ap.verify(Waves(), batch(), mesh=ap.Mesh(dp=2), mode="propagate")
    assert found.ok, found
    assert all(row.allowed <= 2.2e-5 for row in found.parallel)


def test_what_a_model_keeps_of_a_run_is_no_obstacle() -> None:
    """A tensor of autograd, as a recurrent layer keeps its state."""

    class Keeps(nn.Linear):
        state: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.state = y[-1]
            return y.square().sum()

    model, x = Keeps(4, 4), torch.randn(8, 4)
    model(x).backward()
    assert ap.verify(model, (x,), mesh=ap.Mesh(dp=2)).ok

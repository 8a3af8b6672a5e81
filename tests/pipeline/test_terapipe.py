"""TeraPipe: slices of tokens follow one another through the stages, and train exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from autopar.errors import InvalidInput
from autopar.pipeline import check, from_text, schedule, simulate
from autopar.pipeline.running.worker import Worker
from tests.annotations import megatron
from tests.held import storages
from tests.models import Case, gpt, llama
from tests.parity import assert_equal, assert_parity, parallel_outcome, single_outcome

Slices = int | list[int]


def small(**sizes: Any) -> Case:
    return gpt(**{"batch": 4, "hidden": 16, "heads": 2, "sequence": 8, "vocabulary": 19, **sizes})


def sliced(slices: Slices, microbatches: int = 1) -> dict[str, Any]:
    """Options of a plan whose sequences are sliced."""
    return {
        "schedule": "terapipe",
        "schedule_options": {"slices": slices},
        "microbatches": microbatches,
    }


@pytest.mark.parametrize("slices", [1, 2, 4, [3, 5], [1, 4, 2, 1]], ids=str)
def test_one_sample_trains_in_a_pipeline(slices):
    case = small(batch=1)
    module = ap.parallelize(
        case.model, case.args, mesh=ap.Mesh(pp=2), mode="propagate", **sliced(slices)
    )
    outcome = parallel_outcome(module, case, steps=5)
    assert_equal(outcome, single_outcome(case.fresh(), steps=5))
    made = module.plan.pipelining.schedule
    for rank, record in module.backend.recorded.items():
        assert tuple(record.order) == made.orders[rank]
        assert record.peak_activations == simulate(made).peak_activations[rank]


@pytest.mark.parametrize(
    ("make", "mesh", "options"),
    [
        (small, ap.Mesh(pp=2, dp=2), sliced([3, 5], 2)),
        (lambda: megatron(small()), ap.Mesh(pp=2, tp=2), sliced(4)),
        (partial(small, fused=True, tied=False), ap.Mesh(pp=2), sliced([6, 2], 4)),
        (small, ap.Mesh(pp=2, dp=2), {**sliced([3, 5], 2), "states": "zero1"}),
        (small, ap.Mesh(pp=2, dp=2), {**sliced(2, 2), "states": "zero2"}),
        (small, ap.Mesh(pp=2, dp=2), {**sliced([3, 5], 2), "states": "zero3"}),
        (small, ap.Mesh(pp=2), {**sliced(4, 2), "recompute": "full"}),
        (partial(small, layers=4), ap.Mesh(pp=4), sliced([1, 2, 5], 2)),
        (partial(llama, batch=2), ap.Mesh(pp=2), sliced(4)),
    ],
    ids=["dp", "tp", "untied", "zero1", "zero2", "zero3", "recompute", "four", "llama"],
)
def test_parity(make: Callable[[], Case], mesh: ap.Mesh, options: dict[str, Any]):
    assert_parity(make(), mesh, **options)


@pytest.mark.parametrize("mesh", [ap.Mesh(pp=2), ap.Mesh(pp=2, dp=2)], ids=str)
def test_dropout_is_that_of_whole_sequences(mesh):
    def outcome(mesh: ap.Mesh, **options: Any) -> Any:
        case = small(dropout=0.3)
        module = ap.parallelize(case.model, case.args, mesh=mesh, mode="propagate", **options)
        torch.manual_seed(3)
        return parallel_outcome(module, case)

    assert_equal(outcome(mesh, **sliced([3, 5], 2)), outcome(ap.Mesh(dp=1)))


def test_outputs_and_calls_are_of_whole_sequences():
    case = small()
    loss, logits = case.model(*case.args)
    module = ap.parallelize(
        case.model, case.args, mesh=ap.Mesh(pp=2), mode="propagate", **sliced([3, 5], 2)
    )
    with torch.no_grad():
        torch.testing.assert_close(module(*case.args)[1], logits)
    torch.testing.assert_close(module.step(*case.args, outputs=True)[1][1], logits)
    torch.testing.assert_close(module.step(*case.args), loss.detach())


class Mixing(nn.Module):
    """A layer whose tokens read one another, in one of some ways."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(6, 6), nn.Linear(6, 6), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mix(self.first(x))).square().sum()


def attention(x: Tensor, **options: Any) -> Tensor:
    heads = x.unsqueeze(1)
    return F.scaled_dot_product_attention(heads, heads, heads, **options).squeeze(1)


@pytest.mark.parametrize(
    ("mix", "named"),
    [
        (attention, "scaled_dot_product_attention"),
        (partial(attention, attn_mask=torch.ones(8, 8).tril(2).bool()), "scaled_dot_product"),
        (lambda x: x.softmax(1), "softmax"),
        (lambda x: x - x.mean(1, keepdim=True), "sub"),
        (lambda x: F.pad(x[:, 1:], (0, 0, 0, 1)), "slice"),
        (lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT, "avg_pool1d"),
        (lambda x: x.cumsum(1), "cumsum"),
        (lambda x: x.flip(1), "flip"),
    ],
    ids=["bidirectional", "mask", "softmax", "mean", "shift", "pool", "cumsum", "flip"],
)
def test_what_reads_several_tokens_is_refused(mix, named):
    with pytest.raises(InvalidInput, match="each token from itself") as caught:
        ap.plan(Mixing(mix), (torch.randn(2, 8, 6),), mesh=ap.Mesh(pp=2), **sliced(2))
    assert named in str(caught.value.got)
    assert "test_terapipe.py" in caught.value.source


def test_inputs_may_be_numbers_of_tokens():
    model = Mixing(partial(attention, is_causal=True)).double()
    x = torch.randn(2, 8, 6, dtype=torch.float64)
    expected = model(x)
    module = ap.parallelize(model, (x,), mesh=ap.Mesh(pp=2), mode="propagate", **sliced([5, 3]))
    torch.testing.assert_close(module.step(x), expected.detach())


@pytest.mark.parametrize(
    ("slices", "match"),
    [
        ([3, 4], "make up the sequence"),
        (9, "each slice of terapipe has a token"),
        (0, "a number of equal ones"),
        ("many", "a number of equal ones"),
    ],
    ids=str,
)
def test_slices_are_those_of_the_sequence(slices, match):
    case = small()
    with pytest.raises(InvalidInput, match=match):
        ap.plan(case.model, case.args, mesh=ap.Mesh(pp=2), **sliced(slices))


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("slices", [1, 4, [3, 5, 1]], ids=str)
def test_a_schedule_is_sound_and_its_text_is_read_back(microbatches, slices):
    made = schedule("terapipe", stages=3, microbatches=microbatches, slices=slices)
    check(made)
    assert from_text(str(made)) == made


@pytest.mark.parametrize("times", [[1.0] * 4, [1.0, 2.0, 4.0, 3.0]], ids=str)
@pytest.mark.parametrize("stages", [2, 4])
def test_the_makespan_is_that_of_the_formula(times, stages):
    """T = sum t_j + (K - 1) max t_j, forward and back."""
    made = schedule("terapipe", stages=stages, microbatches=1, slices=4)
    formula = sum(times) + (stages - 1) * max(times)
    step = simulate(made, forward=1.0, backward=2.0, slice_times=times)
    assert step.makespan == pytest.approx(3 * formula)


def test_slices_are_chosen_by_their_price():
    """The chosen lengths are no slower than equal ones, and one slice is slower."""
    case = small(batch=1, sequence=64, hidden=64)

    def seconds(slices: Any) -> float:
        plan = ap.plan(
            case.model, case.args, mesh=ap.Mesh(pp=2), mode="propagate", **sliced(slices)
        )
        assert slices != "auto" or sum(plan.pipelining.schedule.slices) == 64
        return plan.cost.seconds

    chosen = seconds("auto")
    assert chosen < 0.95 * seconds(1)
    assert chosen <= 1.02 * seconds(4)


def test_a_plan_counts_what_slices_keep(monkeypatch):
    """No more is alive after an action than the plan counts, and not much less at the peak."""
    case = small(batch=2, sequence=32, hidden=64)
    module = ap.parallelize(
        case.model, case.args, mesh=ap.Mesh(pp=2), mode="propagate", **sliced(4)
    )
    module.step(*case.args)
    for parameter in module.parameters():
        parameter.grad = None
    before, alive = sum(storages().values()), [0]

    def watched(call: Callable[..., Any], *args: Any) -> Any:
        result = call(*args)
        alive[0] = max(alive[0], sum(storages().values()) - before)
        return result

    for name in ("forward", "backward"):
        monkeypatch.setattr(Worker, name, partialmethod(partial(watched, getattr(Worker, name))))
    module.step(*case.args)
    memories = module.plan.memories
    assert alive[0] <= sum(m.peak - m.parameters - m.optimizer for m in memories)
    assert alive[0] >= 0.9 * sum(memory.activations for memory in memories)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("0F0 0F1", "0F1 0F0"), "slice 1, slice 0 comes next"),
        (("0B1 0B0", "0B0 0B1"), "slice 0, slice 1 comes next"),
    ],
)
def test_slices_out_of_order_are_refused(change, match):
    text = str(schedule("terapipe", stages=2, microbatches=1, slices=2))
    text = text.replace(*change).replace(*(part.replace("0", "1", 1) for part in change))
    with pytest.raises(InvalidInput, match="slices of a sequence go through a stage in order") as e:
        from_text(text)
    assert match in str(e.value.got)


def test_slices_run_eagerly():
    case = small()
    with pytest.raises(InvalidInput, match="run eagerly"):
        ap.parallelize(case.model, case.args, mesh=ap.Mesh(pp=2), compile=True, **sliced(2))


def test_other_lengths_are_cut_into_slices_in_proportion():
    case = small(batch=1, sequence=12)
    options = {"mesh": ap.Mesh(pp=2), "mode": "propagate", **sliced([4, 8])}
    module = ap.parallelize(case.model, case.args, **options)
    plain = case.fresh().model
    for length in (12, 9, 7, 8, 10, 11):
        args = tuple(value[:, :length] for value in case.args)
        module.zero_grad(set_to_none=True)
        plain.zero_grad(set_to_none=True)
        loss, (expected, *_) = module.step(*args), plain(*args)
        assert expected.isfinite()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        parallel = dict(module.named_parameters())
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(parallel[name].grad, parameter.grad, msg=f"{length}: {name}")

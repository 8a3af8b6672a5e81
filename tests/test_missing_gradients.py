"""Law: the parameters with a gradient are those of the single program, on every way to run it.

An optimizer tells a gradient of zeros from none: it decays, and moves by what it remembers.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar as ap
from autopar.capture import capture
from autopar.capture.gradients import reached
from tests.parity import assert_equal, parallel_outcome, single_outcome
from tests.partly_learned import partly_learned, without_gradient
from tests.pipeline.models import FORMS, share_captures  # noqa: F401

CASE = partly_learned(layers=4)


def test_the_case_has_parameters_of_all_kinds() -> None:
    missing = without_gradient(CASE)
    assert {"unused.bias", "second.bias", "side.weight", "constant", "frozen.bias"} <= missing
    assert {f"blocks.0.{name}" for name in ("gate.bias", "average", "bound", "kind")} <= missing
    assert not missing & {"zero", "last.weight", "blocks.0.halves"}


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": ap.Mesh(dp=2)},
        {"mesh": ap.Mesh(dp=2), "microbatches": 2},
        {"mesh": ap.Mesh(dp=2, tp=2), "mode": "auto", "microbatches": 2},
        {"mesh": ap.Mesh(pp=2, dp=2), "microbatches": 2, "schedule": "zb-h1", "recompute": True},
        *(
            {"mesh": ap.Mesh(pp=2), "microbatches": 4, "schedule": {"name": name, **options}}
            for name, options in FORMS
            if "pipes" not in options
        ),
    ],
    ids=str,
)
def test_the_same_parameters_learn(options) -> None:
    options = {"mode": "propagate", "backend": "virtual", "check": True, **options}
    module = ap.parallelize(CASE.model, CASE.args, **options)
    assert_equal(parallel_outcome(module, CASE), single_outcome(CASE.fresh()))


def test_what_the_user_differentiates_decides() -> None:
    module = ap.parallelize(
        CASE.model, CASE.args, mesh=ap.Mesh(dp=2), mode="propagate", backend="virtual"
    )
    for output in (0, 1):
        module.zero_grad()
        module(*CASE.args)[output].sum().backward()
        missing = without_gradient(CASE, output)
        assert set(module.full_grads()) == {n for n, _ in CASE.model.named_parameters()} - missing
        assert module.program.parameters_by_output[output] == set(module.full_grads())


@pytest.mark.parametrize("states", ["whole", "zero2"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_memory_is_planned_for_what_learns_alone(states: str, microbatches: int) -> None:
    module = ap.parallelize(
        CASE.model,
        CASE.args,
        mesh=ap.Mesh(dp=2),
        mode="data",
        states=states,
        microbatches=microbatches,
        backend="virtual",
    )
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    module.step(*CASE.args)
    optimizer.step()
    held = module.memory(optimizer)[0]
    counters = 8 * len(optimizer.state)  # steps that it counts, no larger
    assert held["gradients"].held == held["gradients"].planned
    assert 0 <= held["optimizer"].held - held["optimizer"].planned <= counters


class Read(nn.Module):
    """Two parameters, read in any way."""

    def __init__(self, read) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.p, self.q = (nn.Parameter(torch.rand(4) + 0.1) for _ in range(2))
        self.read = read

    def forward(self, x):
        return self.read(self.layer(x), x, self.p, self.q).square().sum()


def wholly(value, new, view=lambda z: z[:], reads_it=False):
    """A copy of `value` with `new` written over it, or over a view of it, which is then read."""
    copy = value.clone()
    part = view(copy)
    part[...] = new.view_as(part) if part.numel() == new.numel() else new[0]
    return part if reads_it else copy


READS = {
    "type as": lambda y, x, p, q: y.type_as(p) + x.float().type_as(q),
    "expand as": lambda y, x, p, q: y + x[0, 0].expand_as(p),
    "condition": lambda y, x, p, q: torch.where(p > q, y, x),
    "sign": lambda y, x, p, q: torch.copysign(y, p) + q.sign(),
    "rounded": lambda y, x, p, q: y + p.round() + torch.div(x, q, rounding_mode="floor"),
    "like": lambda y, x, p, q: y + torch.zeros_like(p) + torch.ones_like(q),
    "times zero": lambda y, x, p, q: y + p * 0 + torch.add(x, q, alpha=0),
    "indices": lambda y, x, p, q: y + p.topk(4)[0] + q.topk(4)[1],
    "places": lambda y, x, p, q: y + torch.zeros_like(p).scatter(0, q.argsort(), p),
    "one of two": lambda y, x, p, q: y + torch.cat([p, q]).chunk(2)[0],
    "nothing of it": lambda y, x, p, q: y + p[:0].sum() + torch.cat([q[:0], p]),
    "masked away": lambda y, x, p, q: y + p.masked_fill(p > -1, 0.0) + q.clamp(5, 6),
    "buckets": lambda y, x, p, q: y + torch.bucketize(x, p.cumsum(0)) + F.dropout(q, 0.0),
    "straight through": lambda y, x, p, q: y * (p + (p.round() - p).detach()) + q.detach(),
    "targets": lambda y, x, p, q: F.mse_loss(y, p.expand(8, 4)) + F.l1_loss(x, q.detach() + x),
    "statistics": lambda y, x, p, q: F.batch_norm(y, None, None, p, q, training=True),
    "overwritten": lambda y, x, p, q: y + p.clone().copy_(q) + q.clone().fill_(2.0).zero_(),
    "overwritten with a number": lambda y, x, p, q: y + p.clone().copy_(x[0]) + q * 1,
    "overwritten by parts": lambda y, x, p, q: y + wholly(p, q) + wholly(q, x[0], lambda z: z[0]),
    "overwritten through views": lambda y, x, p, q: (
        y + wholly(p, q, lambda z: z.view(2, 2).t(), reads_it=True).sum()
    ),
    "overwritten while read": lambda y, x, p, q: y + p.clone().copy_(p * 2) + wholly(q, p),
    "overwritten in part": lambda y, x, p, q: y + p.index_copy(0, torch.arange(4), q),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_operators_pass_gradients_on_as_autograd_says(read) -> None:
    torch.manual_seed(0)
    model, x = Read(read).double(), torch.randn(8, 4).double()
    captured = capture(model, (x,))
    learned = reached(captured.graph.output_node().all_input_nodes)
    model(x).backward()
    expected = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert {captured.parameters.get(node.name) for node in learned} - {None} == expected

"""What masks choose of inputs is counted once, and again in each batch; labels are read as rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from autopar.capture import capture
from autopar.errors import InvalidInput
from tests.capture.support import Function, program, random, targets

LANGUAGES = torch.tensor([0, 1, 1, 0])
LABELS = torch.tensor([[1, -100, 2], [-100, -100, 3], [2, 2, 1], [-100, 1, -100]])


class Adapters(nn.Module):
    """A layer for each language, of as many rows as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, languages: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            chosen = languages == number
            result[chosen] = layer(x[chosen])
        (rows,) = torch.where(languages == 1)
        places = (languages > 0).nonzero()
        picked = x.masked_select(languages[:, None] > 0)
        return result.square().mean() + x[rows, 1:].sum() + x[places].sum() + picked.sum()


def test_counts_are_those_of_the_example() -> None:
    model, x = Adapters().double(), random(4, 4)
    assert ap.verify(model, (x, LANGUAGES), mesh=ap.Mesh(dp=2, tp=2)).ok
    module = ap.parallelize(model, (x, LANGUAGES), mesh=ap.Mesh(dp=2), backend="virtual")
    other = torch.tensor([1, 0, 0, 1])
    expected = model(x, other)
    torch.testing.assert_close(module.step(x, other), expected)
    with pytest.raises(InvalidInput, match="forward goes the way on which") as caught:
        module.step(x, torch.tensor([0, 1, 1, 1]))
    assert "chosen" in str(caught.value.source)


def test_labels_are_rows() -> None:
    """Of as many as a batch has: none is refused for its lengths."""

    def aligned(self: Function, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.linear(x).log_softmax(-1)
        mask = labels > 0
        chosen, lengths = labels.masked_select(mask), torch.full((4,), 6)
        labels += 0 * mask
        several = F.ctc_loss(scores, chosen[:4], lengths, torch.ones(4, dtype=torch.int64))
        return F.ctc_loss(scores, chosen, lengths, mask.sum(-1)) + several

    assert targets(program(lambda s, x, y: aligned(s, x, y.clone()), random(6, 4, 4), LABELS))

    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            mask = labels > 0
            chosen, lengths = labels.masked_select(mask), torch.full((4,), 6)
            scores = self.linear(x).log_softmax(-1).transpose(0, 1)
            return F.ctc_loss(scores, chosen, lengths, mask.sum(-1))

    model, x = Speech().double(), random(4, 6, 4)
    assert ap.verify(model, (x, LABELS), mesh=ap.Mesh(dp=2)).ok
    module = ap.parallelize(model, (x, LABELS), mesh=ap.Mesh(dp=2), backend="virtual")
    fewer = LABELS.clamp(max=1)
    fewer[2] = -100
    expected = model(x, fewer)
    torch.testing.assert_close(module.step(x, fewer), expected)


def test_what_is_computed_chooses_nothing() -> None:
    def chooses(self: Function, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.masked_select(y > 0).sum()  # the line

    with pytest.raises(InvalidInput, match="forward must not depend on the values") as caught:
        capture(Function(chooses), (torch.randn(4, 4),))
    assert (caught.value.source or "").endswith("# the line")


def test_a_tensor_stays_no_sequence() -> None:
    """What is set on the class leaves slots in it, by which scalars were taken for lists."""
    program(lambda s, x: s.linear(x)[..., :2], random(4, 4))
    assert torch.tensor([torch.tensor(3), 1]).tolist() == [3, 1]


def test_rows_are_a_tensor_to_all_but_a_loss() -> None:
    def forward(self: Function, x: Tensor, labels: Tensor) -> Tensor:
        rows = labels.masked_select(labels >= 0)
        assert isinstance(rows, Tensor)
        found = (rows == 1).sum() + (2 - rows).sum() * len(rows) - rows[0] + (-rows % 3).sum()
        return self.linear(x) * found

    program(forward, random(4, 4), torch.tensor([[1, -1, 2], [-1, 1, 0]]))

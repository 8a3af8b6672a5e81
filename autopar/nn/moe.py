"""MoE: a mixture of experts, in which a router chooses some experts for each token.

>>> layer = MoE(hidden=8, inside=16, experts=4, choices=2)
>>> y, loss = layer(torch.randn(3, 5, 8))
>>> tuple(y.shape)
(3, 5, 8)

On one device it runs as written. A plan may cut its experts, its tokens and the rows inside of
experts (`autopar/strategies/rules/expert_layers.py`). Dropped tokens and the balance loss are those
of the whole batch, or with `over="sequence"` of each sequence: both are equal on every mesh, and
the latter in micro-batches, too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InvalidInput
from autopar.strategies.kernels.experts.capacity import within_capacity
from autopar.strategies.kernels.experts.expert_kernels import experts as through_experts
from autopar.strategies.kernels.expressions import evaluate, require

SCORES = ("softmax", "sigmoid")
OVER = ("batch", "sequence")


class MoE(nn.Module):
    """A mixture of experts in the place of a feed-forward layer.

    It returns its output and the sum of its own losses, to be added to the model's loss.
    """

    def __init__(
        self,
        hidden: int,
        inside: int,
        experts: int,
        choices: int = 2,
        *,
        inner: str = "mul(silu(gate), up)",
        scores: str = "softmax",
        normalize: bool = True,
        capacity: float | None = None,
        shared: int = 0,
        jitter: float = 0.0,
        balance_loss: float = 0.0,
        z_loss: float = 0.0,
        over: str = "batch",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a router and experts, with values as linear layers have.

        Args:
            hidden: The width of tokens.
            inside: The width of an expert between its layers.
            experts: The number of experts.
            choices: The number of experts that a token goes through.
            inner: The function of `gate` and `up` between the layers of an expert. Without `up`
                an expert has two layers.
            scores: "softmax" or "sigmoid", of the router's logits.
            normalize: Whether the weights of a token's choices sum to 1.
            capacity: How many times its even share of tokens an expert takes, the earlier and
                first-chosen ones. None: all tokens.
            shared: The width of an expert that all tokens go through. 0: there is none.
            jitter: In training the router sees numbers up to this share larger or smaller.
            balance_loss: The factor of the balance loss (Shazeer, Fedus).
            z_loss: The factor of the loss of large logits (Zoph).
            over: "batch" takes capacity and balance over all tokens, so that the batch cannot be
                cut into micro-batches. "sequence" takes them over each sequence, the dim before
                the last, and the mean of the losses (as DeepSeek-V3 does).
            device: Where parameters are made.
            dtype: The dtype of parameters.
        """
        super().__init__()
        if not 1 <= choices <= experts:
            raise InvalidInput(
                "a token is given to at least one expert, and to each at most once",
                got=f"{choices} choices among {experts} experts",
                remedy="choices from 1 to the number of experts",
            )
        if scores not in SCORES:
            raise InvalidInput(
                "scores of experts are a softmax or a sigmoid",
                got=f"scores={scores!r}",
                remedy='scores="softmax"',
            )
        if over not in OVER:
            raise InvalidInput(
                "capacity and balance are those of the whole batch, or of each sequence",
                got=f"over={over!r}",
                remedy='over="sequence"',
            )
        require(inner, ("gate", "up"))
        self.choices, self.inner, self.scores = choices, inner, scores
        self.normalize, self.capacity, self.jitter = normalize, capacity, jitter
        self.balance_loss, self.z_loss, self.over = balance_loss, z_loss, over
        place: Any = {"device": device, "dtype": dtype}
        self.router = nn.Linear(hidden, experts, bias=False, **place)
        self.gate = nn.Parameter(torch.empty(experts, inside, hidden, **place))
        self.up = (
            nn.Parameter(torch.empty(experts, inside, hidden, **place)) if "up" in inner else None
        )
        self.down = nn.Parameter(torch.empty(experts, hidden, inside, **place))
        self.shared = FeedForward(hidden, shared, inner, **place) if shared else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights as those of linear layers."""
        for weight in (self.gate, self.up, self.down):
            if weight is not None:
                bound = 1 / math.sqrt(weight.shape[-1])
                nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(self._shaken(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
        weights, chosen = scores.topk(self.choices, -1)
        loss = self._loss(logits, scores, chosen)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        count = logits.shape[-1]
        if self.capacity is not None:
            among = self._sequences(chosen)
            most = math.ceil(self.capacity * math.prod(among.shape[-2:]) / count)
            is_taken = within_capacity(among, count, most).view_as(chosen)
            weights = weights * is_taken
            chosen = chosen.where(is_taken, count)  # an expert that does not exist
        y = through_experts(x, chosen, weights, self.down, self.gate, self.up, inner=self.inner)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, loss

    def _shaken(self, x: Tensor) -> Tensor:
        if not (self.training and self.jitter):
            return x
        return x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)

    def _sequences(self, of_tokens: Tensor) -> Tensor:
        """Return values as [sequences tokens ...]; the whole batch may be one sequence."""
        is_whole = self.over == "batch" or of_tokens.ndim < 3
        return of_tokens.reshape(-1, of_tokens.shape[-1]) if is_whole else of_tokens

    def _loss(self, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        loss = logits.new_zeros(())
        count = logits.shape[-1]
        if self.balance_loss:
            parts = scores if self.scores == "softmax" else scores / scores.sum(-1, keepdim=True)
            taken = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
            shares = self._mean(taken) / self.choices
            even = (shares * self._mean(parts)).sum(-1).mean()
            loss = loss + self.balance_loss * count * even
        if self.z_loss:
            loss = loss + self.z_loss * logits.logsumexp(-1).square().mean()
        return loss

    def _mean(self, of_tokens: Tensor) -> Tensor:
        """Return the mean over the tokens of each sequence, or of the batch."""
        dims = tuple(range(of_tokens.ndim - 1))
        dims = dims if self.over == "batch" else dims[-1:]
        return of_tokens.mean(dims) if dims else of_tokens


class FeedForward(nn.Module):
    """The expert that all tokens go through."""

    def __init__(self, hidden: int, inside: int, inner: str, **place: Any) -> None:
        super().__init__()
        self.inner = inner
        self.gate = nn.Linear(hidden, inside, bias=False, **place)
        self.up = nn.Linear(hidden, inside, bias=False, **place) if "up" in inner else None
        self.down = nn.Linear(inside, hidden, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        values = {"gate": self.gate(x)}
        if self.up is not None:
            values["up"] = self.up(x)
        return self.down(evaluate(self.inner, **values))

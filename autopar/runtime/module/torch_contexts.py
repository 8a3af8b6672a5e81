"""Torch contexts: transforms and backward passes in which a parallel module refuses a call."""

from __future__ import annotations

from autopar._torch.autograd import is_transformed
from autopar.errors import InvalidInput


def refuse_transforms() -> None:
    """Refuse a call whose inputs are batched by vmap, or carry tangents."""
    if is_transformed():
        raise InvalidInput(
            "a parallel module is called on plain tensors, and differentiated backward",
            got="a call inside of torch.vmap, torch.func (grad, jvp, jacrev, ...) or forward "
            "automatic differentiation",
            remedy="torch.autograd.grad of what the call gives; or transform the model's functions "
            "in its forward, which is captured as it runs",
        )


def nested_call_refusal() -> InvalidInput:
    """Return the refusal of a call on processes inside of a backward pass."""
    return InvalidInput(
        "on processes no call comes in the middle of the backward pass of another: gradients of "
        "the same parameters are being summed",
        got="a call of a parallel module in its backward, as by torch.utils.checkpoint around it",
        remedy='parallelize(..., recompute="full"), which runs its regions again',
    )

"""Embedding and losses: with the vocabulary cut, each has a kernel of its own."""

from __future__ import annotations

from functools import partial

from autopar.strategies.kernels import count_targets, cross_entropy
from autopar.strategies.language import parse
from autopar.strategies.registry import Call, aten, register_rule
from autopar.strategies.rule import Dim, Rule, Saved

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for the reduction of a loss


def _embedding(call: Call) -> Rule:
    special = call["scale_grad_by_freq"]
    return parse(
        "v! e!, ...! -> ...! e!" if special else "v+ e, ... -> ... e",
        call.shapes,
        [call.shape],
        passes="" if special else [(0,)],
        kernels={} if special else {"v": "cut_embedding"},
        flops=0.0,
        saved="1",
        source=call.source,
    )


def _pointwise_loss(call: Call, absolute: bool = False) -> Rule:
    """Elementwise, and summed by `reduction`."""
    reduction = call["reduction"]
    line = {
        NONE: "..., ... -> ...",
        MEAN: "...!, ...! -> ",
        SUM: "..., ... -> " if call.shapes[0] == call.shapes[1] else "...!, ...! -> ",
    }[reduction]
    return parse(
        line,
        call.shapes,
        [call.shape],
        saved="" if absolute else "0 1",
        extra="..." if absolute else "",
        cost=2,
        source=call.source,
    )


def _loss_of_elements(call: Call, line: str) -> Rule | None:
    """By a line, for what capture makes of every loss: the losses alone, not reduced."""
    if call["reduction"] != NONE:
        return None
    return parse(
        line,
        call.shapes,
        [call.shape],
        slots=call.slots,
        saved=" ".join(map(str, range(line.count(",") + 1))),
        cost=4,
        source=call.source,
    )


def _class_loss(call: Call) -> Rule:
    """torch's own losses by class: the class dim stays whole, and all of it for a mean."""
    shape, target = call.shapes[:2]
    dims: list[Dim] = [(f"d{i}",) for i in range(len(shape))]
    sizes = {dim[0]: size for dim, size in zip(dims, shape)}
    classes = 1 if len(shape) > 1 else 0
    rest = dims[:classes] + dims[classes + 1 :]
    inputs = [dims, rest if len(target) == len(rest) else dims]
    inputs += [[dims[classes]]] * (len(call.shapes) - 2)
    reduction = call["reduction"]
    whole = list(sizes) if reduction == MEAN else [f"d{classes}"]
    saved = Saved((*range(len(inputs)),))
    if "label_smoothing" in call.arguments:  # takes logits, and keeps their log-softmax
        saved = Saved(saved.inputs[1:], extra=(tuple(dims), ()))
    return call.rule(
        inputs,
        rest if reduction == NONE else [],
        sizes,
        whole=whole,
        sums=frozenset(dim[0] for dim in rest) if reduction == SUM else frozenset(),
        flops=5.0 * call.inputs[0].meta["val"].numel(),
        saved=saved,
    )


register_rule("aten.embedding", _embedding)
register_rule(
    cross_entropy,
    "... v, ..., v -> ...",
    kernels={"v": "cross_entropy"},
    cost=5,
    saved="1 2",
    extra="... v, ",  # and one number
)
register_rule(count_targets, "...+, v! -> ")
register_rule(aten("mse_loss huber_loss smooth_l1_loss"), _pointwise_loss)
register_rule("aten.l1_loss", partial(_pointwise_loss, absolute=True))
register_rule(aten("cross_entropy_loss nll_loss nll_loss_nd"), _class_loss)
for _names, _line in {
    "binary_cross_entropy binary_cross_entropy_with_logits": "..., ..., ..., ... -> ...",
    "kl_div soft_margin_loss hinge_embedding_loss poisson_nll_loss": "..., ... -> ...",
    "margin_ranking_loss": "..., ..., ... -> ...",
    "cosine_embedding_loss": "... e!, ... e!, ... -> ...",
    "triplet_margin_loss": "... e!, ... e!, ... e! -> ...",
    "multi_margin_loss": "... c!, ..., c! -> ...",
    "multilabel_margin_loss": "... c!, ... c! -> ...",
}.items():
    register_rule(aten(_names), partial(_loss_of_elements, line=_line))

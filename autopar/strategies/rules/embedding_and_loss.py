"""Embedding and losses: with the vocabulary cut, each has a kernel of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from autopar.strategies.kernels import (
    bags_of_rows,
    count_classes,
    count_targets,
    cross_entropy,
    ctc_losses,
)
from autopar.strategies.node_info import info
from autopar.strategies.registry import OperatorCall, Traits, aten, register_rule
from autopar.strategies.rule import ExtraTensor, Rule, Saved, names

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for the reduction of a loss


def _embedding(call: OperatorCall) -> Rule:
    special = call["scale_grad_by_freq"]
    return call.parse(
        "v! e!, ...! -> ...! e!" if special else "v+ e, ... -> ... e",
        passes="" if special else [(0,)],
        kernels={} if special else {"v": "cut_embedding"},
        flops=0.0,
        saved="1",
    )


def _bags(call: OperatorCall) -> Rule:
    """Return the rule of bags of any length: a column of the table is one of the bags.

    torch keeps the size and the contents of each bag, and the bag of each row, except for sums
    that a CPU takes in few digits.
    """
    bags, mode = call.outputs[0], call["mode"]
    quick = mode == 0 and bags.device.type == "cpu" and bags.dtype is not torch.float64
    integers = ["b", "b e" if mode == 2 else "b", *([] if quick else ["i", ""])]
    integers += [""] * call["include_last_offset"]
    extra = ", ".join(f"int64: {dims}" for dims in integers)
    saved = "1 2" if call["per_sample_weights"] is None else "0 1 2 3"
    return call.parse("v! e, i!, o!, i! -> b! e", saved=saved, extra=extra, flops=0.0)


def _pointwise_loss(call: OperatorCall, *, absolute: bool = False) -> Rule:
    """Return the rule of an elementwise loss, summed by its `reduction`."""
    reduction = call["reduction"]
    line = {
        NONE: "..., ... -> ...",
        MEAN: "...!, ...! -> ",
        SUM: "..., ... -> " if call.shapes[0] == call.shapes[1] else "...!, ...! -> ",
    }[reduction]
    if absolute:
        return call.parse(line, extra="...", cost=2)
    return call.parse(line, saved="0 1", cost=2)


def _loss_of_elements(
    call: OperatorCall, line: str, saved: str | None = None, extra: str = ""
) -> Rule | None:
    """Return the rule by a line of losses that are not reduced, as capture makes them.

    `saved` None: all inputs are kept.
    """
    is_number = "c!" in line and not call.shapes[0]  # of one class of one sample
    if call["reduction"] != NONE or is_number:
        return None
    every = " ".join(map(str, range(line.count(",") + 1)))
    return call.parse(line, saved=every if saved is None else saved, extra=extra, cost=4)


def _divergence(call: OperatorCall) -> Rule | None:
    """Return the rule of kl_div; targets as logarithms are kept as probabilities."""
    if call["log_target"]:
        return _loss_of_elements(call, "..., ... -> ...", saved="", extra="..., ...")
    return _loss_of_elements(call, "..., ... -> ...")


def _count_loss(call: OperatorCall) -> Rule | None:
    """Return the rule of poisson_nll_loss; a target that learns keeps Stirling's formula."""
    stirling = call["full"] and info(call.inputs[1]).differentiable
    extra = "..., ..., ..., bool: ..." if stirling else "..."
    rule = _loss_of_elements(call, "..., ... -> ...", extra=extra)
    if rule is None:
        return None
    return replace(rule, saved=replace(rule.saved, factors=frozenset({0})))


def _triplet_loss(call: OperatorCall) -> Rule | None:
    """Return the rule of triplet_margin_loss: each distance keeps a difference and its norm."""
    distances = 3 if call["swap"] else 2
    extra = "... e, ..., " * distances + "..."
    return _loss_of_elements(call, "... e!, ... e!, ... e! -> ...", saved="", extra=extra)


def _cross_entropy(call: OperatorCall) -> Rule:
    """Return the rule of cross_entropy, which keeps the log-softmax and a number."""
    extra = "... v, " + ", bool: ..." * (call["label_smoothing"] > 0)
    line, kernels = "... v, ..., v -> ...", {"v": "cross_entropy"}
    return call.parse(line, kernels=kernels, cost=5, saved="1 2", extra=extra)


def _alignments(call: OperatorCall) -> Rule:
    """Return the rule of ctc_losses; targets without padding are whole, and so is the batch."""
    line = "t! n c!, n s!, n, n -> n" if len(call.shapes[1]) == 2 else "t! n! c!, s!, n!, n! -> n!"
    return call.parse(line, saved="0 1 2 3", cost=8)


def _class_loss(call: OperatorCall) -> Rule:
    """Return the rule of torch's losses by class: the class dim stays whole; for a mean, all."""
    shape, target = call.shapes[:2]
    dims = names(len(shape))
    classes = 1 if len(shape) > 1 else 0
    rest = dims[:classes] + dims[classes + 1 :]
    inputs = [dims, rest if len(target) == len(rest) else dims]
    inputs += [[dims[classes]]] * (len(call.shapes) - 2)
    reduction = call["reduction"]
    whole = dims if reduction == MEAN else [dims[classes]]
    number = ExtraTensor(())
    saved = Saved((*range(len(inputs)),), extra=(number,))
    if "label_smoothing" in call.arguments:  # takes logits, and keeps their log-softmax
        saved = Saved(saved.inputs[1:], extra=(ExtraTensor(tuple(dims)), number))
    return call.rule(
        inputs,
        rest if reduction == NONE else [],
        whole=whole,
        sums=frozenset(dim[0] for dim in rest) if reduction == SUM else frozenset(),
        flops=5.0 * info(call.inputs[0]).val.numel(),
        saved=saved,
    )


register_rule("aten.embedding", _embedding)
register_rule(bags_of_rows, _bags)
register_rule(cross_entropy, _cross_entropy)
register_rule(count_targets, "...+, v! -> ")
register_rule(count_classes, "... -> v!", traits=Traits(counts=True))
register_rule(ctc_losses, _alignments)
register_rule(aten("mse_loss huber_loss smooth_l1_loss"), _pointwise_loss)
register_rule("aten.l1_loss", partial(_pointwise_loss, absolute=True))
register_rule(aten("cross_entropy_loss nll_loss nll_loss_nd"), _class_loss)
# torch composes most of these of operators, some of which keep intermediate values.
for _names, _line, _saved, _extra in (
    (
        "binary_cross_entropy binary_cross_entropy_with_logits",
        "..., ..., ..., ... -> ...",
        None,
        "",
    ),
    ("soft_margin_loss", "..., ... -> ...", None, ""),
    ("multi_margin_loss", "... c!, ..., c! -> ...", None, ""),
    ("multilabel_margin_loss", "... c!, ... c! -> ...", "0 1", "... c"),
    ("margin_ranking_loss", "..., ..., ... -> ...", "", "..., ..."),
    # Kept is the rest above the margin, and where the targets are 1 and -1.
    ("hinge_embedding_loss", "..., ... -> ...", "", "..., bool: ..., bool: ..."),
    (
        "cosine_embedding_loss",
        "... e!, ... e!, ... -> ...",
        "0 1",
        "..., ..., ..., ..., ..., bool: ..., bool: ...",
    ),
):
    register_rule(aten(_names), partial(_loss_of_elements, line=_line, saved=_saved, extra=_extra))
register_rule("aten.kl_div", _divergence)
register_rule("aten.poisson_nll_loss", _count_loss)
register_rule("aten.triplet_margin_loss", _triplet_loss)

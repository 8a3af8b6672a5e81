"""Embedding and losses: with the vocabulary cut, each has a kernel of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from autopar.strategies.kernels import count_targets, cross_entropy
from autopar.strategies.language import parse
from autopar.strategies.node_info import info
from autopar.strategies.registry import Call, aten, register_rule
from autopar.strategies.rule import Dim, Extra, Rule, Saved

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


def _loss_of_elements(
    call: Call, line: str, saved: str | None = None, extra: str = ""
) -> Rule | None:
    """By a line, for what capture makes of every loss: the losses alone, not reduced.

    It keeps all inputs if `saved` does not say which."""
    if call["reduction"] != NONE:
        return None
    every = " ".join(map(str, range(line.count(",") + 1)))
    return parse(
        line,
        call.shapes,
        [call.shape],
        slots=call.slots,
        saved=every if saved is None else saved,
        extra=extra,
        cost=4,
        source=call.source,
    )


def _divergence(call: Call) -> Rule | None:
    """Of targets given as logarithms torch keeps their probabilities, and the difference."""
    if call["log_target"]:
        return _loss_of_elements(call, "..., ... -> ...", saved="", extra="..., ...")
    return _loss_of_elements(call, "..., ... -> ...")


def _count_loss(call: Call) -> Rule | None:
    """The input is kept as a factor of the target; one that learns brings Stirling's formula."""
    stirling = call["full"] and info(call.inputs[1]).differentiable
    extra = "..., ..., ..., bool: ..." if stirling else "..."
    rule = _loss_of_elements(call, "..., ... -> ...", extra=extra)
    if rule is None:
        return None
    return replace(rule, saved=replace(rule.saved, factors=frozenset({0})))


def _triplet_loss(call: Call) -> Rule | None:
    """Each distance keeps a difference and its norm."""
    distances = 3 if call["swap"] else 2
    extra = "... e, ..., " * distances + "..."
    return _loss_of_elements(call, "... e!, ... e!, ... e! -> ...", saved="", extra=extra)


def _hinge_loss(call: Call) -> Rule | None:
    """What a margin leaves, and where the targets are 1 and -1."""
    saved = "..., bool: ..., bool: ..."
    return _loss_of_elements(call, "..., ... -> ...", saved="", extra=saved)


def _cross_entropy(call: Call) -> Rule:
    """The kernel: kept are the log-softmax, a number, and with smoothing what is ignored."""
    return parse(
        "... v, ..., v -> ...",
        call.shapes,
        [call.shape],
        slots=call.slots,
        kernels={"v": "cross_entropy"},
        gathered=["v"],
        cost=5,
        saved="1 2",
        extra="... v, " + ", bool: ..." * (call["label_smoothing"] > 0),
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
    number = Extra(())
    saved = Saved((*range(len(inputs)),), extra=(number,))
    if "label_smoothing" in call.arguments:  # takes logits, and keeps their log-softmax
        saved = Saved(saved.inputs[1:], extra=(Extra(tuple(dims)), number))
    return call.rule(
        inputs,
        rest if reduction == NONE else [],
        sizes,
        whole=whole,
        sums=frozenset(dim[0] for dim in rest) if reduction == SUM else frozenset(),
        flops=5.0 * info(call.inputs[0]).val.numel(),
        saved=saved,
    )


register_rule("aten.embedding", _embedding)
register_rule(cross_entropy, _cross_entropy)
register_rule(count_targets, "...+, v! -> ")
register_rule(aten("mse_loss huber_loss smooth_l1_loss"), _pointwise_loss)
register_rule("aten.l1_loss", partial(_pointwise_loss, absolute=True))
register_rule(aten("cross_entropy_loss nll_loss nll_loss_nd"), _class_loss)
for _names, _line in {
    "binary_cross_entropy binary_cross_entropy_with_logits": "..., ..., ..., ... -> ...",
    "soft_margin_loss": "..., ... -> ...",
    "multi_margin_loss": "... c!, ..., c! -> ...",
}.items():
    register_rule(aten(_names), partial(_loss_of_elements, line=_line))
# torch makes these of parts, of which some keep values in between.
register_rule("aten.kl_div", _divergence)
register_rule("aten.poisson_nll_loss", _count_loss)
register_rule("aten.triplet_margin_loss", _triplet_loss)
register_rule("aten.hinge_embedding_loss", _hinge_loss)
for _name, _line, _kept, _extra in (
    ("margin_ranking_loss", "..., ..., ... -> ...", "", "..., ..."),
    (
        "cosine_embedding_loss",
        "... e!, ... e!, ... -> ...",
        "0 1",
        ", ".join(["..."] * 5 + ["bool: ..."] * 2),
    ),
    ("multilabel_margin_loss", "... c!, ... c! -> ...", "0 1", "... c"),
):
    register_rule(
        f"aten.{_name}", partial(_loss_of_elements, line=_line, saved=_kept, extra=_extra)
    )

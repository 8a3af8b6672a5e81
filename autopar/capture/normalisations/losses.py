"""Mean losses become losses of elements, their sum, and a division by the count.

A mean over cut data is not the mean of means; a sum is the sum of sums.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, argument, shape_of
from autopar.strategies.kernels import count_targets, cross_entropy
from autopar.strategies.node_info import info

aten = torch.ops.aten

NONE, MEAN = 0, 1  # how torch numbers its reductions


def means_are_sums(draft: GraphBuilder) -> None:
    """mean is sum / count; pooling to one point is a mean."""
    for node in draft.calls(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default):
        size = argument(node, "output_size")
        if all(n == 1 for n in size):
            rank = len(shape_of(node.args[0]))
            dims = list(range(rank - len(size), rank))
            draft.replace(node, aten.mean.dim, node.args[0], dims, True)
    for node in draft.calls(aten.mean.default, aten.mean.dim):
        x = node.args[0]
        dtype = info(node).val.dtype
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        rank = len(shape_of(x))
        given = argument(node, "dim") if node.target is aten.mean.dim else None
        dims = [dim % rank for dim in given] if given and rank else list(range(rank))
        count = prod(shape_of(x)[dim] for dim in dims)
        keep = node.target is aten.mean.dim and argument(node, "keepdim")
        kwargs = {} if info(x).val.dtype == wide else {"dtype": wide}  # type: ignore[arg-type]
        with draft.graph.inserting_before(node):
            if len(dims) == rank and not keep:
                total = draft.call(node, aten.sum.default, x, **kwargs)
            else:
                total = draft.call(node, aten.sum.dim_IntList, x, dims, bool(keep), **kwargs)
            mean = draft.call(node, aten.div.Tensor, total, count)
            if wide != dtype:
                mean = draft.call(node, aten.to.dtype, mean, dtype)
        draft.substitute(node, mean)


def losses_of_elements(draft: GraphBuilder) -> None:
    """A loss with a reduction is the loss without, then the reduction."""
    for node in draft.calls():
        names = _argument_names(node)
        if "reduction" not in names or node.target in _CLASS_LOSSES:
            continue
        reduction = argument(node, "reduction")
        if reduction == NONE:
            continue
        before = [argument(node, name) for name in names[: names.index("reduction")]]
        after = node.args[len(before) + 1 :]
        kwargs = {
            name: value
            for name, value in node.kwargs.items()
            if name not in names[: len(before) + 1]
        }
        with draft.graph.inserting_before(node):
            losses = draft.call(node, node.target, *before, NONE, *after, **kwargs)  # type: ignore[arg-type]
        draft.replace(node, *_reduced(losses, reduction))


def cross_entropies(draft: GraphBuilder) -> None:
    """Cross-entropy on n-d logits with the classes last, whatever form it was called in."""
    for node in draft.calls(aten.cross_entropy_loss.default, aten.nll_loss_nd.default, *_NLL):
        with draft.graph.inserting_before(node):
            result = _class_loss(draft, node)
        draft.substitute(node, result)


_NLL = (aten.nll_loss.default, aten.nll_loss2d.default)
_CLASS_LOSSES = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, *_NLL)


def _class_loss(draft: GraphBuilder, node: fx.Node) -> fx.Node:
    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return draft.call(node, target, *args, **kwargs)

    logits, target = argument(node, "self"), argument(node, "target")
    weight, reduction = argument(node, "weight"), argument(node, "reduction")
    is_logits = node.target is aten.cross_entropy_loss.default
    smoothing = argument(node, "label_smoothing") if is_logits else 0.0
    ignored = argument(node, "ignore_index")
    rank, shape = len(shape_of(logits)), shape_of(target)
    if rank > 2:
        logits = call(aten.permute.default, logits, [0, *range(2, rank), 1])
    elif rank == 1:
        logits = call(aten.unsqueeze.default, logits, 0)
        target = call(aten.unsqueeze.default, target, 0)
    if info(target).val.is_floating_point():
        if rank > 2:
            target = call(aten.permute.default, target, [0, *range(2, rank), 1])
        losses = _soft_loss(call, logits, target, weight, smoothing)
        if reduction == MEAN:
            points = max(prod(shape_of(losses)), 1)
            return call(aten.div.Tensor, call(aten.sum.default, losses), points)
        if reduction == NONE:
            return losses if rank > 1 else call(aten.reshape.default, losses, [])
        return call(aten.sum.default, losses)
    # Undo a flattening of the logits, so that batch and sequence stay visible.
    if logits.target is aten.reshape.default and rank == 2:
        before = shape_of(logits.args[0])
        if len(before) > 2 and before[-1] == shape_of(logits)[-1]:
            logits = logits.args[0]
            target = call(aten.reshape.default, target, list(before[:-1]))
    if is_logits:
        losses = call(cross_entropy, logits, target, weight, ignored, smoothing)
    else:
        losses = _negative_likelihood(call, logits, target, weight, ignored)
    if reduction == NONE:
        if shape_of(losses) != shape:
            losses = call(aten.reshape.default, losses, list(shape))
        return losses
    total = call(aten.sum.default, losses)
    if reduction != MEAN:
        return total
    return call(aten.div.Tensor, total, call(count_targets, target, weight, ignored))


def _soft_loss(call: Any, logits: Any, target: Any, weight: Any, smoothing: float) -> fx.Node:
    """Cross-entropy with probabilities as targets."""
    if smoothing:
        classes = shape_of(logits)[-1]
        target = call(aten.mul.Tensor, target, 1 - smoothing)
        target = call(aten.add.Tensor, target, smoothing / classes)
    product = call(aten.mul.Tensor, call(aten.log_softmax.int, logits, -1), target)
    if weight is not None:
        product = call(aten.mul.Tensor, product, weight)
    return call(aten.neg.default, call(aten.sum.dim_IntList, product, [-1]))


def _negative_likelihood(
    call: Any, scores: fx.Node, target: Any, weight: Any, ignored: int
) -> fx.Node:
    """-scores[target], 0 where the target is ignored; of log_softmax(z) the cross-entropy of z."""
    last = len(shape_of(scores)) - 1
    if scores.target is aten.log_softmax.int and argument(scores, "dim") % (last + 1) == last:
        return call(cross_entropy, scores.args[0], target, weight, ignored, 0.0)
    outside = call(aten.eq.Scalar, target, ignored)
    safe = call(aten.masked_fill.Scalar, target, outside, 0)
    index = call(aten.unsqueeze.default, safe, last)
    losses = call(aten.squeeze.dim, call(aten.gather.default, scores, last, index), last)
    losses = call(aten.neg.default, losses)
    if weight is not None:
        losses = call(aten.mul.Tensor, losses, call(aten.index.Tensor, weight, [safe]))
    return call(aten.masked_fill.Scalar, losses, outside, 0)


def _reduced(losses: fx.Node, reduction: int) -> tuple[Any, ...]:
    """The call that reduces `losses`."""
    return (aten.mean.default if reduction == MEAN else aten.sum.default, losses)


def _argument_names(node: fx.Node) -> list[str]:
    schema = getattr(node.target, "_schema", None)
    return [declared.name for declared in schema.arguments] if schema is not None else []

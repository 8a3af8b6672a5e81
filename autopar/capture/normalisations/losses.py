"""Mean losses become losses of elements, their sum, and a division by the count.

A mean over cut data is not the mean of means; a sum is the sum of sums.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, Site, rewrites, shape_of
from autopar.strategies import OperatorCall
from autopar.strategies.kernels import count_classes, count_targets, cross_entropy
from autopar.strategies.node_info import info
from autopar.strategies.results import has_results

aten = torch.ops.aten

NONE, MEAN = 0, 1  # how torch numbers its reductions


@rewrites(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default)
def pools_of_one_point_are_means(call: Site) -> fx.Node | None:
    """Pooling to one point is a mean."""
    size, rank = call["output_size"], len(call.shape)
    if any(n != 1 for n in size):
        return None
    return call.make(aten.mean.dim, call["self"], list(range(rank - len(size), rank)), True)


@rewrites(aten.mean.default, aten.mean.dim)
def means_are_sums(call: Site) -> fx.Node:
    """mean is sum / count."""
    x, dims, dtype = call["self"], call.dims(), call.outputs[0].dtype
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    count = prod(call.shapes[0][dim] for dim in dims) if call.shapes[0] else 1
    keep = bool(call.get("keepdim"))
    kwargs = {} if info(x).val.dtype == wide else {"dtype": wide}
    if len(dims) == len(call.shapes[0]) and not keep:
        total = call.make(aten.sum.default, x, **kwargs)
    else:
        total = call.make(aten.sum.dim_IntList, x, dims, keep, **kwargs)
    mean = call.make(aten.div.Tensor, total, count)
    return mean if wide == dtype else call.make(aten.to.dtype, mean, dtype)


def chunked_products_are_whole(builder: GraphBuilder) -> None:
    """A linear operator and its cross-entropy in chunks of the batch: cut by the mesh, here."""
    for node in builder.calls():
        target = node.target
        if not (isinstance(target, torch._ops.OpOverload) and str(target).startswith(_CHUNKED)):
            continue
        call = Site(builder, node)
        reduction = _REDUCTIONS[call.get("reduction", "none")]
        smoothing = call.get("label_smoothing", 0.0)
        with builder.graph.inserting_before(node):
            linear = aten.linear.default, call["input"], call["linear_weight"], call["linear_bias"]
            loss = call.make(
                aten.cross_entropy_loss.default,
                call.make(*linear),
                *(call[name] for name in ("target", "weight")),
                *(reduction, call["ignore_index"], smoothing),
            )
        is_several = isinstance(info(node).val, list | tuple)
        for user in list(node.users) if is_several else [node]:
            builder.substitute(user, loss)
        if is_several:
            builder.graph.erase_node(node)


_CHUNKED = "torch_nn._linear_cross_entropy_batch_chunked"  # of torch 2.13
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


@rewrites(aten.multi_margin_loss.default, aten.multilabel_margin_loss.default)
def single_samples_are_batches(call: Site) -> fx.Node | None:
    """Of a single sample's loss torch predicts one dim, and gives none: of a batch of one, one.

    One that is not reduced stays as it is: what comes after it was made for the shape predicted."""
    x, target, *rest = call.arguments.values()
    if len(call.shapes[0]) != 1 or call["reduction"] == 0:
        return None
    row = [1, *shape_of(x)]
    given = [1] if call.node.target is aten.multi_margin_loss.default else row
    batch = (
        call.make(aten.reshape.default, x, row),
        call.make(aten.reshape.default, target, given),
    )
    return call.make(call.node.target, *batch, *rest)  # type: ignore[arg-type]


def losses_of_elements(builder: GraphBuilder) -> None:
    """A loss with a reduction is the loss without, then the reduction."""
    for node in builder.calls():
        call = Site(builder, node)
        reduction, names = call.get("reduction", NONE), list(call.arguments)
        if not isinstance(reduction, int) or reduction == NONE or node.target in _CLASS_LOSSES:
            continue
        if has_results(node) or shape_of(node):  # as the gradient of such a loss
            continue
        place = names.index("reduction")
        before, after = [call[name] for name in names[:place]], node.args[place + 1 :]
        kwargs = {name: v for name, v in node.kwargs.items() if name not in names[: place + 1]}
        with builder.graph.inserting_before(node):
            losses = call.make(node.target, *before, NONE, *after, **kwargs)  # type: ignore[arg-type]
        builder.replace(node, aten.mean.default if reduction == MEAN else aten.sum.default, losses)


_CLASS_LOSSES = (
    aten.cross_entropy_loss.default,
    aten.nll_loss_nd.default,
    aten.nll_loss.default,
    aten.nll_loss2d.default,
)


@rewrites(*_CLASS_LOSSES)
def cross_entropies(site: Site) -> fx.Node:
    """Cross-entropy on n-d logits with the classes last, whatever form it was called in."""
    call = site.make
    logits, target, weight, reduction, ignored, *smoothings = site.arguments.values()
    is_logits, smoothing = bool(smoothings), sum(smoothings)
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
    if _is_kept(site.builder, weight):
        counts = call(count_classes, target, shape_of(weight)[0], ignored)
        count = call(aten.sum.default, call(aten.mul.Tensor, weight, counts))
    else:
        count = call(count_targets, target, weight, ignored)
    return call(aten.div.Tensor, total, count)


def _is_kept(builder: GraphBuilder, weight: fx.Node | None) -> bool:
    """Whether a weight is of the model: of classes, then, whose counts are of the inputs alone."""
    while weight is not None and weight.op != "placeholder":
        weight = weight.all_input_nodes[0] if len(weight.all_input_nodes) == 1 else None
    return weight is not None and weight.name in {**builder.buffers, **builder.parameters}


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
    if scores.target is aten.log_softmax.int and OperatorCall(scores)["dim"] % (last + 1) == last:
        return call(cross_entropy, scores.args[0], target, weight, ignored, 0.0)
    outside = call(aten.eq.Scalar, target, ignored)
    safe = call(aten.masked_fill.Scalar, target, outside, 0)
    index = call(aten.unsqueeze.default, safe, last)
    losses = call(aten.squeeze.dim, call(aten.gather.default, scores, last, index), last)
    losses = call(aten.neg.default, losses)
    if weight is not None:
        losses = call(aten.mul.Tensor, losses, call(aten.index.Tensor, weight, [safe]))
    return call(aten.masked_fill.Scalar, losses, outside, 0)

"""Recurrent layers: the samples can be cut; time, directions, layers and gates stay whole.

A recurrence that is linear can be cut along time as well: ranks hand on their last states.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.strategies.kernels.recurrences import LINEAR_SCAN
from autopar.strategies.observed_rules import observed_rule
from autopar.strategies.registry import OperatorCall, aten, register_rule
from autopar.strategies.rule import Dim, ExtraTensor, IntermediateWork, Rule, Saved, names
from autopar.strategies.strategy import JointCut


def _layers(call: OperatorCall) -> Rule | None:
    """Return the rule of all layers over all steps; samples keep equal parts of the memory seen.

    None with dropout between layers, which torch draws for all samples together.
    """
    if call["dropout"] and call["train"] and call["num_layers"] > 1:
        return None
    seen = observed_rule(call.node)
    batch = 0 if call["batch_first"] else 1
    samples = call.shapes[0][batch]
    states = len(call.outputs) - 1

    def sequence(name: str) -> list[Dim]:
        dims: list[Dim] = [("t",), (name,)]
        dims.insert(batch, ("n",))
        return dims

    # The states of several kinds, cells and hidden ones, may differ in size.
    inner: list[list[Dim]] = [[("l",), ("n",), (f"h{state}",)] for state in range(states)]
    weights = [names(len(shape), f"w{i}_") for i, shape in enumerate(call.shapes[1 + states :])]
    inputs: list[list[Dim]] = [sequence("i"), *inner, *weights]
    sizes: dict[str, int] = {}
    extra = []
    for index, storage in enumerate(seen.saved.extra):
        (size,) = (seen.sizes[factor] for (factor,) in storage.dims)
        parts = samples if samples and size % samples == 0 else 1
        sizes[f"kept{index}"] = size // parts
        shared: list[Dim] = [("n",)] if parts == samples else []
        extra.append(ExtraTensor((*shared, (f"kept{index}",)), storage.dtype))
    whole = {dim for dims in [*inputs, sequence("o")] for dim in dims} - {("n",)}
    return call.rule(
        inputs,
        sequence("o"),
        sizes,
        more=inner,
        whole=whole,
        flops=seen.flops,
        backward_flops=seen.backward_flops,
        product=True,
        saved=replace(seen.saved, extra=tuple(extra)),
    )


register_rule(aten("lstm.input gru.input rnn_tanh.input rnn_relu.input"), _layers)
# One step of a recurrent layer: the samples can be cut.
_STEP = "n i!, n h!, g! i!, g! h!, g!, g! -> n h!"
register_rule("aten.gru_cell", _STEP, saved="0 1 2 3", extra=", ".join(["n h!"] * 6))
register_rule(aten("rnn_tanh_cell rnn_relu_cell"), _STEP, saved="0 1 2 3 output")


def _linear_scan(call: OperatorCall) -> Rule:
    """Return the rule of a linear scan: of factors, terms, and perhaps a start."""
    dims, dim = names(len(call.shape)), call.dim(call["dim"])
    row = [*dims[:dim], *dims[dim + 1 :]]
    inputs = [dims, dims, row][: len(call.inputs)]
    # Of half, a quarter, ... of the states products and sums are written, and read.
    forward = 8.0 * call.outputs[0].nbytes
    rule = call.rule(
        inputs,
        dims,
        whole=dims[dim],
        passes=[range(1, len(inputs))],
        intermediate=IntermediateWork(forward, 2 * forward, forward, 2 * forward),
        saved=Saved((0, 2), output=True),
    )
    if not (time := rule.outputs[0][dim]):
        return rule
    cut = time[0], time[0], None
    before = () if len(inputs) > 2 else (tuple(name for (name,) in row),)
    joint = JointCut("cut_linear_scan", cut[: len(inputs)], time, keeps=before, travelling_rows=1)
    return replace(rule, joints={"carry": joint})


register_rule(LINEAR_SCAN, _linear_scan)

"""Kernels: what a rank runs where cutting a factor changes the local computation.

A rule names them by factor: `Rule.kernels == {"v": "cut_embedding"}` says that the operator, cut
along v, runs another function. There are three kinds:

- of each rank alone: the local call is `kernel.function(*args, **kwargs, start=offset)` with the
  arguments of the operator (localised as ever) and the start of this rank's piece of the factor,
  `rule.bounds(factor, strategy, mesh, rank)[0]`. Layouts are those of the rule's signature.
- `expand`: the call becomes three nodes, and the output is whole over the axes of the factor:

      part      = expand.part(...)       # on each rank: [..., columns]
      gathered  = all-gather of part     # of type [..., columns * parts], cut on the last dim
                                         # by the axes of the factor; gradient: slice
      output    = expand.combine(...)    # on replicas

  `expand.part_call` and `expand.combine_call` give the arguments of the two functions.
- `joint`: the ranks over the axes of the factor, or of a joint of the rule (`rule.Joint`), carry
  the call out together, with messages inside (`collectives/joint_kernels.py`). The kernel gets the
  arguments of the operator by name, as they are for the whole, tensors local; how the axes cut each
  of its tensors stands in its group.

Besides, plain functions that capture puts into graphs: `batch_sums`, `batch_normalize`,
`running_mean`, `running_var`, `rms_norm`, `cross_entropy`, `count_targets`, `count_classes`,
`ctc_losses`, `bags_of_rows`. Kernels work on empty pieces; of every other operator a rank without
elements runs `nothing`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopar.collectives.joint_kernels import JointKernel
from autopar.strategies.kernels.alignments import ctc_losses
from autopar.strategies.kernels.attention.causal import cut_causal_attention
from autopar.strategies.kernels.attention.ring import CAUSAL_RING, RING
from autopar.strategies.kernels.cross_entropy import (
    COLUMNS,
    count_classes,
    count_targets,
    cross_entropy,
    cross_entropy_combine,
    cross_entropy_combine_call,
    cross_entropy_part,
    cross_entropy_part_call,
)
from autopar.strategies.kernels.empty_pieces import zero_result, zero_results
from autopar.strategies.kernels.experts.chosen_products import CHOSEN_PRODUCTS
from autopar.strategies.kernels.experts.expert_kernels import EXPERTS
from autopar.strategies.kernels.experts.routed_experts import ROUTED
from autopar.strategies.kernels.halo import HALOS
from autopar.strategies.kernels.lookup import bags_of_rows, cut_embedding
from autopar.strategies.kernels.norms.batch_statistics import (
    batch_normalize,
    batch_sums,
    running_mean,
    running_var,
)
from autopar.strategies.kernels.norms.group_statistics import GROUP_NORM
from autopar.strategies.kernels.norms.root_mean_square import rms_norm
from autopar.strategies.kernels.recurrences import SCAN
from autopar.strategies.kernels.reduction_kernels import REDUCTIONS, SOFTMAXES
from autopar.strategies.kernels.ring_products import GATHERED, SCATTERED
from autopar.strategies.kernels.scans import CUMSUM

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Expansion:
    """A local function, an all-gather of its small output, and a function of the gathered."""

    part: Callable[..., Tensor]
    columns: int  # the size of the last dim of a part
    part_call: Callable[..., Arguments]  # (args, kwargs, start, size of the factor) -> arguments
    combine: Callable[..., Tensor]
    combine_call: Callable[..., Arguments]  # (gathered, args, kwargs, parts, dtype) -> arguments


@dataclass(frozen=True)
class Kernel:
    """Of each rank alone, where neither `expand` nor `joint` is given."""

    name: str
    function: Callable[..., Any]
    expand: Expansion | None = None
    joint: JointKernel | None = None

    @classmethod
    def of_all(cls, joint: JointKernel) -> Kernel:
        """One that ranks carry out together, by the name of its forward."""
        return cls(joint.forward.__name__, joint.forward, joint=joint)


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("cut_embedding", cut_embedding),
        Kernel("cut_causal_attention", cut_causal_attention),
        Kernel("some_experts", EXPERTS),
        Kernel("some_products", CHOSEN_PRODUCTS),
        Kernel(
            "cross_entropy",
            cross_entropy,
            expand=Expansion(
                cross_entropy_part,
                COLUMNS,
                cross_entropy_part_call,
                cross_entropy_combine,
                cross_entropy_combine_call,
            ),
        ),
        Kernel.of_all(GATHERED),
        Kernel.of_all(SCATTERED),
        Kernel.of_all(ROUTED),
        *map(Kernel.of_all, (*HALOS, GROUP_NORM, CUMSUM, SCAN, RING, CAUSAL_RING)),
        *map(Kernel.of_all, (*REDUCTIONS, *SOFTMAXES)),
    )
}

__all__ = [
    "KERNELS",
    "Expansion",
    "Kernel",
    "bags_of_rows",
    "batch_normalize",
    "batch_sums",
    "count_classes",
    "count_targets",
    "cross_entropy",
    "cross_entropy_combine",
    "cross_entropy_part",
    "ctc_losses",
    "cut_causal_attention",
    "cut_embedding",
    "rms_norm",
    "running_mean",
    "running_var",
    "zero_result",
    "zero_results",
]

"""Kernels: functions that ranks run where cutting a factor changes the local computation.

`Rule.kernels == {"v": "cut_embedding"}` says that the operator, cut along v, runs another function.
A `Kernel` is of one of three kinds: each rank runs it alone, from the `start` of its piece; or it
has an all-gather in its middle (`Expansion`); or ranks carry it out together, with messages inside
(`collectives/joint_kernels.py`), also for a joint of the rule (`JointCut`).

Kernels work on empty pieces; a rank without elements of any other operator runs `zero_result`.
Plain functions that capture puts into graphs are here, too: `batch_sums`, `rms_norm`, `ctc_losses`.
Read `lookup.py` first, then `cross_entropy.py` and `scans.py`. `attention/` has attention in rings
and with dropped weights, `experts/` mixtures of experts, `norms/` norms by shared statistics.
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
    """A call in three nodes: a local function, an all-gather of its output, and a combination.

    The all-gather is along the last dim over the axes of the factor; its backward is a slice. The
    combination runs on replicas.
    """

    part: Callable[..., Tensor]
    columns: int  # the size of the last dim of a part
    part_call: Callable[..., Arguments]  # (args, kwargs, start, size of the factor) -> arguments
    combine: Callable[..., Tensor]
    combine_call: Callable[..., Arguments]  # (gathered, args, kwargs, parts, dtype) -> arguments


@dataclass(frozen=True)
class Kernel:
    """A function that replaces an operator whose factor is cut.

    Each rank runs it alone if `expand` and `joint` are None: with the operator's arguments, and
    `start`, where its piece of the factor begins. A joint kernel gets the arguments by name, as of
    the whole; its tensors are local.
    """

    name: str
    function: Callable[..., Any]
    expand: Expansion | None = None
    joint: JointKernel | None = None

    @classmethod
    def of_all(cls, joint: JointKernel) -> Kernel:
        """Return the kernel of ranks that work together, by the name of its forward."""
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

"""Kernel calls: calls that need a kernel under their strategy, and each rank's pieces of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.collectives.joint_kernels import JointKernel, KernelGroup, ShardedDim
from autopar.mesh import Mesh
from autopar.strategies.kernels import KERNELS, Kernel
from autopar.strategies.rule import Dim, Rule
from autopar.strategies.strategy import Strategy


@dataclass(frozen=True, eq=False)
class KernelCall:
    """A call whose strategy cuts a factor that needs a kernel."""

    rule: Rule
    strategy: Strategy
    name: str  # of the factor or joint that needs the kernel
    kernel: Kernel

    @classmethod
    def of(cls, rule: Rule, strategy: Strategy) -> KernelCall | None:
        """Return the kernel call of a rule; None where each rank runs the operator itself."""
        kernel = rule.kernel(strategy)
        return None if kernel is None else cls(rule, strategy, kernel[0], KERNELS[kernel[1]])

    @property
    def joint(self) -> JointKernel:
        """Return the kernel that several ranks carry out together."""
        assert self.kernel.joint is not None
        return self.kernel.joint

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes that cut the factor: the ranks over them have its pieces."""
        return self.strategy.by_factor[self.name]

    def start(self, mesh: Mesh, rank: int) -> int:
        """Return where the piece of the factor begins that `rank` has."""
        return self.rule.bounds(self.name, self.strategy, mesh, rank)[0]

    def group(self, mesh: Mesh, rank: int) -> KernelGroup:
        """Return the ranks that share the call with `rank`, and their pieces of its tensors."""
        rule = self.rule
        members = next(group for group in mesh.groups(self.axes) if rank in group)
        pieces = rule.pieces(self.name, self.strategy, mesh, members)

        def cut(dims: Sequence[Dim], factor: str | None) -> ShardedDim | None:
            at = next((at for at, dim in enumerate(dims) if factor in dim), None)
            if at is None or factor is None:
                return None
            inner = math.prod(rule.sizes[f] for f in dims[at][1:])
            scaled = ((start * inner, length * inner) for start, length in pieces[factor])
            return ShardedDim(at, tuple(scaled))

        inputs, outputs = rule.factors_of(self.name)
        return KernelGroup(
            len(members),
            members.index(rank),
            tuple(map(cut, rule.inputs, inputs)),
            tuple(map(cut, rule.outputs, outputs)),
        )

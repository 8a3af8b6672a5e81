"""Kernel calls: a call whose strategy cuts what needs a kernel, and what each rank has of it."""

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
    """One call, by its rule under a strategy."""

    rule: Rule
    strategy: Strategy
    name: str  # of the factor, or joint, that needs the kernel
    kernel: Kernel

    @classmethod
    def of(cls, rule: Rule, strategy: Strategy) -> KernelCall | None:
        """None of a call that is the operator's own on each piece."""
        found = rule.kernel(strategy)
        return None if found is None else cls(rule, strategy, found[0], KERNELS[found[1]])

    @property
    def joint(self) -> JointKernel:
        """By which ranks carry it out together."""
        assert self.kernel.joint is not None
        return self.kernel.joint

    @property
    def axes(self) -> tuple[str, ...]:
        """That cut the factor: the ranks over them have its pieces."""
        return self.strategy.by_factor[self.name]

    def start(self, mesh: Mesh, rank: int) -> int:
        """Of the piece of the factor that `rank` has."""
        return self.rule.bounds(self.name, self.strategy, mesh, rank)[0]

    def group(self, mesh: Mesh, rank: int) -> KernelGroup:
        """Those who carry it out together with `rank`, and what each has of its tensors."""
        rule = self.rule
        members = next(group for group in mesh.groups(self.axes) if rank in group)
        pieces = rule.pieces(self.name, self.strategy, mesh, members)

        def cut(dims: Sequence[Dim], factor: str | None) -> ShardedDim | None:
            at = next((at for at, dim in enumerate(dims) if factor in dim), None)
            if at is None or factor is None:
                return None
            inner = math.prod(rule.sizes[one] for one in dims[at][1:])
            own = ((start * inner, length * inner) for start, length in pieces[factor])
            return ShardedDim(at, tuple(own))

        inputs, outputs = rule.factors_of(self.name)
        return KernelGroup(
            len(members),
            members.index(rank),
            tuple(map(cut, rule.inputs, inputs)),
            tuple(map(cut, rule.outputs, outputs)),
        )

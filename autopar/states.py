"""States: the number of parts that a parameter, its gradient and optimizer states are cut into.

They are cut over the ranks that hold replicas of a parameter and sum its gradient. A factor smaller
than their number cuts over the innermost of them, and leaves replicas over the others. So pieces
nest: a quarter of a parameter lies in the half of it whose optimizer states the rank keeps.

>>> mesh = Mesh(dp=4, tp=2)
>>> zero1 = States.of("zero1").places(Layout("tp", None), (8, 6), ("dp",), mesh)
>>> zero1.storage == zero1.gradient == zero1.working, zero1.optimizer
(True, [@tp@dp, _])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import TYPE_CHECKING, Literal, get_args

from autopar.base.schema import Count, Size, is_count
from autopar.errors import InvalidInput, require_one_of
from autopar.layout import ALL_PLACES, Layout, ParameterPlacement, Place
from autopar.mesh import Mesh
from autopar.text.units import counted

if TYPE_CHECKING:
    import torch

Factor = Count | Literal["all"]  # "all": as many as there are replicas
Lifetime = Literal["use", "step"]
Side = Literal["device", "host"]
# Of a buffer that travels: large enough to hide latency, small enough to start early.
BUFFER_BYTES = 25 * 2**20


def _divides(factor: Factor, finer: Factor) -> bool:
    """Return whether each of so many parts is cut further, or not, by the `finer` number."""
    if factor == "all" or finer == "all":
        return finer == "all"
    return finer % factor == 0


@dataclass(frozen=True)
class States:
    """The parts into which ZeRO cuts parameters, gradients and optimizer states over replicas.

    Fewer parts than replicas cut over nearest neighbours, as ZeRO++ (hpZ), HSDP and InternEvo do.
    Of any two numbers of parts one divides the other, and those of gradients divide those of the
    optimizer. Parameters may be cut into more parts than both.

    Attributes:
        parameters: Parts of the parameter that lives through a step; 1 keeps it whole, "all" cuts
            over all replicas (ZeRO-3).
        gradients: Parts of the gradient that adds up over micro-batches (ZeRO-2).
        optimizer: Parts, between steps, of the parameter and of what an optimizer keeps (ZeRO-1).
        lifetime: How long a gathered parameter lives: a "use" (gathered again in backward) or a
            "step".
        parameters_device: "host" keeps parameters on the host; they are copied for each use.
        optimizer_device: "host" updates parameters on the host (ZeRO-Offload); a step copies
            parameters to the device and gradients back.
        buffer_bytes: The most bytes that travel in one message; a larger parameter travels alone.
    """

    parameters: Factor = 1
    gradients: Factor = 1
    optimizer: Factor = 1
    lifetime: Lifetime = "use"  # of a gathered parameter: gathered again in backward; or "step"
    parameters_device: Side = "device"
    optimizer_device: Side = "device"
    buffer_bytes: Size = BUFFER_BYTES

    def __post_init__(self) -> None:
        for name, factor in self._factors.items():
            if not is_count(factor) and factor != "all":
                raise InvalidInput(
                    "states are cut into a number of parts from 1, or over all replicas",
                    got=f"{name}={factor!r}",
                    remedy=f'{name}=4, or "all"',
                )
        require_one_of("lifetime", self.lifetime, get_args(Lifetime))
        require_one_of("parameters_device", self.parameters_device, get_args(Side))
        require_one_of("optimizer_device", self.optimizer_device, get_args(Side))
        self._require_sides()
        if not is_count(self.buffer_bytes):
            raise InvalidInput(
                "a buffer has a whole number of bytes, 1 or more",
                got=f"buffer_bytes={self.buffer_bytes!r}",
                remedy=f"buffer_bytes={BUFFER_BYTES}, which is the default",
            )
        self._require_nested()
        if self.lifetime == "step" and not _divides(self.parameters, self.optimizer):
            raise InvalidInput(
                "what is gathered for a step is stored as the optimizer updates it",
                got=f"lifetime='step', parameters={self.parameters!r}, "
                f"optimizer={self.optimizer!r}",
                remedy=f"optimizer={self.parameters!r}, or no lifetime",
            )
        if self.lifetime == "step" and self.parameters == 1:
            raise InvalidInput(
                "what is gathered for a step is stored in parts",
                got="lifetime='step', parameters=1",
                remedy='parameters="all" beside it, or no lifetime',
            )

    def _require_nested(self) -> None:
        for (name, factor), (other, finer) in combinations(self._factors.items(), 2):
            if not (_divides(factor, finer) or _divides(finer, factor)):
                raise InvalidInput(
                    "parts of states lie in one another: of any two numbers of parts, one divides "
                    "the other",
                    got=f"{name}={factor!r}, {other}={finer!r}",
                    remedy="numbers such as 2, 4 and 8",
                )
        if not _divides(self.gradients, self.optimizer):
            raise InvalidInput(
                "an optimizer reads the gradient of all that it updates: the parts of gradients "
                "divide those of the optimizer",
                got=f"gradients={self.gradients!r}, optimizer={self.optimizer!r}",
                remedy=f"gradients={self.optimizer!r}, or optimizer={self.gradients!r}",
            )

    def _require_sides(self) -> None:
        if self.parameters_device == "device":
            return
        got = f"parameters_device='host', optimizer_device={self.optimizer_device!r}"
        if self.optimizer_device == "device":
            raise InvalidInput(
                "parameters that are on the host through a step are there from step to step",
                got=got,
                remedy='optimizer_device="host" beside it',
            )
        if self.lifetime == "step":
            raise InvalidInput(
                "what is on the host through a step is copied to the device for each use",
                got=f"{got}, lifetime='step'",
                remedy='lifetime="use", or parameters_device="device"',
            )

    @property
    def _factors(self) -> dict[str, Factor]:
        names = ("parameters", "gradients", "optimizer")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, name: str) -> States:
        """Return the setting of a name such as "zero1"."""
        return NAMED[name]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The factors that are given as numbers above 1, in the order of the fields."""
        return tuple(f for f in self._factors.values() if f != "all" and f > 1)

    @property
    def keeps_mesh(self) -> bool:
        """Return whether no axis of the mesh is split: a number of parts may do that."""
        return not self.numbers

    @property
    def is_on_host(self) -> bool:
        """Return whether hosts update parameters."""
        return self.optimizer_device == "host"

    @property
    def is_whole(self) -> bool:
        """Return whether nothing is cut, and nothing on the host."""
        return not self.is_cut and not self.is_on_host

    @property
    def is_cut(self) -> bool:
        return any(factor != 1 for factor in self._factors.values())

    def on_host(self, *, learns: bool = True) -> tuple[Place, ...]:
        """Return the places of a parameter that are on the host.

        An optimizer keeps nothing of a parameter that does not learn.
        """
        if self.parameters_device == "host":
            return ("storage", "optimizer")
        return ("optimizer",) if self.is_on_host and learns else ()

    def places(
        self,
        working: Layout,
        shape: Sequence[int],
        axes: Sequence[str],
        mesh: Mesh,
        *,
        learns: bool = True,
        already: int = 1,
        runs_on_host: bool = False,
    ) -> ParameterPlacement:
        """Return the places of a parameter that readers start from at `working`.

        The others are cut over some of `axes`, in one dim. `already` is the number of parts into
        which annotations cut it over such axes. `runs_on_host`: its readers run on the host.
        """
        on_host = ALL_PLACES if runs_on_host else self.on_host(learns=learns)
        axes = tuple(axis for axis in axes if mesh[axis] > 1)
        stored = 1 if self.lifetime == "step" else self.parameters
        factors = (stored, self.gradients, self.optimizer) if learns else (stored,) * 3
        left = (f if f == "all" else max(1, f // already) for f in factors)
        levels = [innermost(factor, axes, mesh) for factor in left]
        finest = max(levels, key=len)
        if not finest or not shape:
            return ParameterPlacement.tied(working, on_host)
        sizes = list(working.largest_shape(shape, mesh))
        for at, _ in working.parts:
            sizes[at] = 0  # what is in parts is not cut further
        if not any(sizes):
            return ParameterPlacement.tied(working, on_host)
        dim = _dim_to_cut(sizes, mesh.degree(finest))
        cuts: tuple[str, ...] = ()  # further axes cut further inside
        for level in sorted(levels, key=len):
            cuts += tuple(axis for axis in mesh if axis in level and axis not in cuts)
        storage, gradient, optimizer = (
            working.with_dim(dim, (*working.dims[dim], *(cut for cut in cuts if cut in level)))
            for level in levels
        )
        if working.parts and [*optimizer.dims[dim]] != [
            axis for axis in mesh if axis in optimizer.dims[dim]
        ]:  # DTensor has no whole of a tensor with strides in two dims
            return ParameterPlacement.tied(working, on_host)
        return ParameterPlacement(storage, working, gradient, optimizer, on_host)

    def __str__(self) -> str:
        for name, setting in NAMED.items():
            if self == setting:
                return name
        if self.buffer_bytes != BUFFER_BYTES:
            return f"{replace(self, buffer_bytes=BUFFER_BYTES)}, {self.buffer_bytes:,} at a time"
        if self.is_on_host:
            hosted = "parameters and " * (self.parameters_device == "host") + "optimizer"
            on_device = replace(self, parameters_device="device", optimizer_device="device")
            return f"{on_device}, {hosted} on the host"
        parts = ", ".join(f"{name} in {factor}" for name, factor in self._factors.items())
        return parts if self.parameters == 1 else f"{parts}, gathered for a {self.lifetime}"


@dataclass(frozen=True)
class StateBytes:
    """Bytes that training keeps for each element of a parameter, in each of its places."""

    master: int  # what an optimizer updates
    copy: int  # what a step works with: the master itself, where it lies there in the same dtype
    gradient: int
    optimizer: int  # its states

    @property
    def updated(self) -> int:
        """The bytes that an update moves: it reads the gradient, and reads and writes the rest."""
        return self.master + 2 * (self.master + self.optimizer)

    @classmethod
    def of(
        cls,
        master: torch.dtype,
        copy: torch.dtype | None = None,
        gradient: torch.dtype | None = None,
    ) -> StateBytes:
        """Return the bytes that Adam keeps, with two moments in the dtype of the master."""
        used, summed = copy or master, gradient or master
        return cls(master.itemsize, used.itemsize, summed.itemsize, 2 * master.itemsize)


WHOLE = States()
# Settings that use the host, the one with less traffic first.
HOSTED = (
    States("all", "all", "all", optimizer_device="host"),
    States("all", "all", "all", parameters_device="host", optimizer_device="host"),
)
NAMED: Mapping[str, States] = {
    "whole": WHOLE,
    "zero1": States(optimizer="all"),
    "zero2": States(gradients="all", optimizer="all"),
    "zero3": States("all", "all", "all"),
}


def innermost(factor: Factor, axes: Sequence[str], mesh: Mesh) -> tuple[str, ...]:
    """Return the last of `axes` that together have `factor` ranks, or the most that divide it."""
    if factor == "all":
        return tuple(axes)
    count = 0
    while count < len(axes) and factor % mesh.degree(axes[len(axes) - count - 1 :]) == 0:
        count += 1
    return tuple(axes[len(axes) - count :])


def split_for(states: States, axes: Sequence[str], mesh: Mesh) -> tuple[str, int] | None:
    """Return an axis of `mesh` to be split and the ranks of its outer part, so that the last of
    `axes` have one of the numbers of parts of `states`. `None`: all of these fit."""
    for number in states.numbers:
        own = innermost(number, axes, mesh)
        left, outer = number // mesh.degree(own), axes[: len(axes) - len(own)]
        if left == 1:
            continue
        if not outer or mesh[outer[-1]] % left:
            degree = mesh.degree(axes)
            raise InvalidInput(
                "states are cut into as many parts as ranks with replicas can be grouped into: "
                "the number of parts divides theirs",
                got=f"{states}, with {counted(degree, 'rank')} over which gradients are summed"
                f" ({', '.join(f'{a}={mesh[a]}' for a in axes) or 'none'}) on {mesh}",
                remedy=f'a number of parts that divides {degree}, or "all"'
                if degree > 1
                else 'states="whole", or a mesh whose axes cut the batch',
            )
        return outer[-1], mesh[outer[-1]] // left
    return None


def split_mesh(states: States, axes: Sequence[str], mesh: Mesh) -> tuple[Mesh, tuple[str, ...]]:
    """Return the mesh on which the last of `axes` have the numbers of parts of `states`.

    Return also what its axes are called that `axes` were split into.
    """
    is_cutting = [axis in axes for axis in mesh]
    while (split := split_for(states, axes, mesh)) is not None:
        at = mesh.names.index(split[0])
        mesh, is_cutting[at:at] = mesh.split(*split), [True]
        axes = tuple(axis for axis, cuts in zip(mesh, is_cutting) if cuts)
    return mesh, tuple(axes)


def nested_settings(
    replicas: int, levels: Sequence[int] = (), *, microbatches: int = 1
) -> list[States]:
    """Return the settings worth weighing, the simple ones first.

    `levels` are numbers of neighbours among the `replicas` that share a node, a rack and so on.
    Parameters, gradients and optimizer states are each cut over one of these levels, over all
    replicas or not at all. Left out is what moves no less than another and holds more:

    - Parameters that are cut where optimizer states are whole: an all-reduce of gradients moves as
      much as scattering them and gathering what was updated.
    - Optimizer states over fewer replicas that parameters and gradients are cut over as well: the
      all-reduce of their pieces is, again, a scatter and a gather.
    - With one micro-batch, whole gradients beside cut optimizer states, and gradients that are cut
      as parameters are and no further: they are summed once, and that moves as much if they stay in
      pieces.
    - `lifetime="step"`, which is `parameters=1`.
    """
    chain = [1]
    for level in sorted(levels):
        if level < replicas and replicas % level == 0 and level % chain[-1] == 0:
            chain += [level] * (level > chain[-1])
    if replicas == 1:
        return [WHOLE]
    factors: list[Factor] = [*chain, "all"]
    partial = []
    for cut, summed, updated in product(range(len(factors)), repeat=3):
        is_scattered_once = cut >= updated and summed == updated < len(chain)
        is_summed_once = microbatches == 1 and (summed == 0 or summed == cut) and summed < updated
        if summed <= updated and not is_scattered_once and not is_summed_once:
            partial.append(States(factors[cut], factors[summed], factors[updated]))
    partial.sort(key=lambda states: len(states.numbers))
    return list(dict.fromkeys([*NAMED.values(), *partial]))


def buffer_sizes(parameter_bytes: float) -> list[int]:
    """Return the sizes of buffers worth weighing for so many bytes of parameters on one rank.

    A larger buffer shares the latency of a message among more parameters, and takes memory. One
    that holds half of all parameters leaves nothing to compute while they travel.
    """
    sizes = (BUFFER_BYTES, 128 * 2**20, 512 * 2**20)
    return [size for size in sizes if size == BUFFER_BYTES or 2 * size <= parameter_bytes]


def _dim_to_cut(sizes: Sequence[int], parts: int) -> int:
    """Return the first dim that is cut evenly, else the largest."""
    even = (dim for dim, size in enumerate(sizes) if size and size % parts == 0)
    return next(even, max(range(len(sizes)), key=sizes.__getitem__))

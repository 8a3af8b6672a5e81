"""Saved tensors: the bytes that autograd keeps from forward to backward, and where they are
counted.

In a cost graph a saved tensor is counted on one edge: where it is made, or where it is moved to. A
view saves the tensor it looks at, so tensors that its readers save count as its input.

In a rewritten graph `saved_by` is what one operator saves by itself. `saved_on_device` is the part
that stays from forward to backward where regions are recomputed. Each storage counts once in a
program or stage. While the backward of a region runs, recomputed tensors are alive as well: see
`peak_recomputed_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.origins import copied_parameter
from autopar.cost.operator_costs import ShardSizes
from autopar.cost.policy_regions import calls_made_again, extend_spans
from autopar.cost.value_storage import source, storage
from autopar.mesh import Mesh
from autopar.program.equal_blocks import NO_EQUAL_BLOCKS, EqualBlocks
from autopar.recompute import Keep
from autopar.strategies import tensor_inputs
from autopar.strategies.node_info import RecomputeRegion, flat_values, info
from autopar.strategies.results import maker, result_index, tensor_arguments, tensors_of
from autopar.strategies.rule import Facts, Saved

Storage = tuple[fx.Node, int | str]
SavedBytes = Mapping[Storage, float]  # bytes


class SavedTensors:
    """The tensors that each reader saves in one captured graph.

    A fully recomputed region saves only its inputs. A selectively recomputed one drops results that
    are cheap to make, and one with a policy those that it does not save. A region that saves on the
    host has nothing on the device.
    """

    def __init__(
        self,
        facts: Mapping[str, Facts | None],
        readers: Mapping[str, Sequence],
        regions: Mapping[str, RecomputeRegion],
        runs: Iterable[Sequence[fx.Node]] = (),
    ) -> None:
        """Take `regions` by the names of all values in them; `runs`: the nodes of each region."""
        self.facts, self.readers, self.regions = facts, readers, regions
        self._kept: dict[str, bool] = {}
        self._inputs: dict[int, tuple[int, ...]] = {}  # by id of facts
        self._by_policy = set[str]()  # values that policies let be made again
        for nodes in runs:
            if regions[nodes[0].name].is_by_policy:
                again = calls_made_again(nodes, self._saved_calls(nodes))
                self._by_policy |= {node.name for node in nodes if source(node) in again}

    def keeps(self, value: str, reader: str, position: int) -> bool:
        """Return whether an operator saves one of its inputs, itself or through views of it."""
        facts, region = self.facts[reader], self.regions.get(reader)
        if facts is None or (region is not None and region.how.keep == "host"):
            return False
        if self._is_there(value):
            return False
        if region is not None and region.is_full:
            return self.regions.get(value) != region
        if self.regions.get(value) == region and self._is_dropped(value, region):
            return False
        if facts.is_view and position == 0:
            return self.is_kept(reader)
        if reader in self._by_policy:
            return True  # it runs again
        if id(facts) not in self._inputs:
            self._inputs[id(facts)] = facts.rule.saved.inputs_for(facts.differentiable)
        return position in self._inputs[id(facts)]

    def is_kept(self, value: str) -> bool:
        """Return whether some reader saves a value."""
        if value not in self._kept:
            readings = self.readers.get(value, ())
            self._kept[value] = any(self.keeps(value, r.reader, r.position) for r in readings)
        return self._kept[value]

    def keeps_output(self, operator: str) -> bool:
        """Return whether an operator saves its output."""
        facts, region = self.facts[operator], self.regions.get(operator)
        if self._is_there(operator):
            return False
        if region is not None and (region.is_full or region.how.keep == "host"):
            return False
        if self._is_dropped(operator, region):
            return False
        return facts is not None and facts.rule.saved.output and any(facts.differentiable)

    def remade(self, nodes: Sequence[fx.Node]) -> set[str]:
        """Return the calls of a region that run again under any layouts, but for cheap ones. In a
        fully recomputed region they go up to the last one that saves a tensor of the region."""
        region = self.regions.get(nodes[0].name)
        if region is not None and not region.is_full:
            return {node.name for node in nodes if node.name in self._by_policy}
        in_region = {node.name for node in nodes}
        needs = [index for index, node in enumerate(nodes) if self._keeps_of(in_region, node)]
        return {node.name for node in nodes[: needs[-1] + 1]} if needs else set()

    def _saved_calls(self, nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
        """Yield the calls whose results some of `nodes` save."""
        for node in nodes:
            facts = self.facts.get(node.name)
            if facts is not None and any(facts.differentiable):
                read, saved = tensor_arguments(node), facts.rule.saved
                places = saved.inputs_for(facts.differentiable)
                yield from (source(read[i]) for i in places if i < len(read))
                yield from [source(node)] * saved.output

    def _keeps_of(self, in_region: set[str], node: fx.Node) -> bool:
        """Return whether a call saves a value of the region, by whatever kernel."""
        facts = self.facts.get(node.name)  # none of a result
        if facts is None or not any(facts.differentiable):
            return False

        def keeps(saved: Saved) -> bool:
            read = tensor_arguments(node)
            places = [i for i in saved.inputs_for(facts.differentiable) if i < len(read)]
            values = [storage(read[i]) for i in places] + [storage(node)] * saved.output
            return bool(saved.extra) or any(maker(value).name in in_region for value in values)

        return all(map(keeps, (facts.rule.saved, *facts.rule.saved_by_joint.values())))

    def _is_there(self, value: str) -> bool:
        """Return whether a value is on the host in any case."""
        facts = self.facts.get(value)
        return facts is not None and facts.on_host

    def _is_dropped(self, value: str, region: RecomputeRegion | None) -> bool:
        if value in self._by_policy:
            return True
        facts = self.facts.get(value)
        is_selective = region is not None and region.how.kind == "selective"
        return is_selective and facts is not None and facts.is_cheap


def saved_values(captured: Captured, *, at_most: bool = False) -> dict[tuple[fx.Node, int], int]:
    """Return the bytes of call results that a captured program saves with any kernels: the least,
    or `at_most` the most, of all ranks together."""
    combined = set.union if at_most else set.intersection
    some = any if at_most else all
    sizes: dict[tuple[fx.Node, int], int] = {}
    for node in captured.operators:
        rule, inputs = captured.priced[node.name], tensor_inputs(node)
        learns = [info(node).learns and info(value).learns for value in inputs]
        if rule is None or not any(learns):
            continue
        ways = rule.saved, *rule.saved_by_joint.values()
        read = combined(*(set(saved.inputs_for(learns)) for saved in ways))
        values = [storage(inputs[i]) for i in sorted(read)]
        values += [storage(node)] if some(saved.output for saved in ways) else []
        for value in values:
            if value.op != "placeholder" and copied_parameter(value) is None:
                for place, tensor in enumerate(tensors_of(value), result_index(value)):
                    size = tensor.numel() * tensor.itemsize
                    sizes[maker(value), place] = size * info(maker(value)).count
    return sizes


def saved_by(node: fx.Node, mesh: Mesh) -> dict[Storage, float]:
    """Return the bytes that an operator saves for its backward, by storage.

    A storage is a call with the number of its result, or a further tensor of the operator. Tensors
    from outside the program are held anyway, and a gathered parameter is gathered again.
    """
    if node.op != "call_function" or not info(node).differentiable:
        return {}
    read = tensor_arguments(node)
    values = [storage(read[i]) for i in info(node).saved if i < len(read)]
    if info(node).saves_output:
        values.append(storage(node))
    saved = _storage_bytes(values, mesh)
    rule, strategy = info(node).rule, info(node).strategy
    if rule is None or strategy is None or info(node).start_of is not None:
        return saved  # a part keeps its inputs
    extras = rule.saved_under(strategy).extra
    if not extras and info(node).joint is None:
        return saved
    pieces = ShardSizes(rule, [strategy], mesh)
    dtype = tensors_of(node)[0].dtype
    for number, extra in enumerate(extras):
        saved[node, f"extra {number}"] = float(pieces.bytes(extra, dtype)[0])
    if besides := float(pieces.kept_by_joints(dtype)[0]):
        saved[node, "extra of a joint"] = besides
    return saved


def _storage_bytes(values: Sequence[fx.Node], mesh: Mesh) -> dict[Storage, float]:
    """Return the bytes of storages that come from inside the program."""
    return {
        (maker(value), place): float(type_.local_bytes(mesh))
        for value in values
        if value.op != "placeholder" and copied_parameter(value) is None
        for place, type_ in enumerate(flat_values(info(value).type), result_index(value))
        if type_ is not None
    }


def saved_on_device(
    node: fx.Node, mesh: Mesh, saved: SavedBytes | None = None
) -> dict[Storage, float]:
    """Return the storages of an operator that stay on the device from forward to backward. A fully
    recomputed region keeps its inputs, a selective one all but those it drops. `own`: the result of
    `saved_by`, where that is known."""
    region = info(node).region
    if region is None or node.op != "call_function":
        saved = saved_by(node, mesh) if saved is None else saved
        saved = saved if info(node).learns else {}  # else it goes with its results
        return {k: size for k, size in saved.items() if not info(k[0]).on_host}
    staying = dict[Storage, float]()
    for key, size in saved_throughout(node, region, mesh, saved).items():
        if info(key[0]).on_host:
            continue
        axes = offload_axes(key, region.how.keep, mesh)
        if axes is None:
            staying[key] = size
        elif region.how.keep != "host":
            staying[_offloaded_key(key, region)] = piece_bytes(size, axes, mesh)
    return staying


def saved_on_host(
    node: fx.Node, mesh: Mesh, saved: SavedBytes | None = None
) -> dict[Storage, float]:
    """Return the storages of an operator that stay on the host from forward to backward."""
    region = info(node).region
    saved = saved_by(node, mesh) if saved is None else saved
    if region is None or node.op != "call_function":
        saved = saved if info(node).learns else {}
        return {k: size for k, size in saved.items() if info(k[0]).on_host}
    staying, is_host = dict[Storage, float](), region.how.keep == "host"
    for key, size in saved_throughout(node, region, mesh, saved).items():
        if info(key[0]).on_host:
            staying[key] = size
        elif (axes := offload_axes(key, region.how.keep, mesh)) is not None and is_host:
            staying[_offloaded_key(key, region)] = piece_bytes(size, axes, mesh)
    return staying


def recomputed_for(
    node: fx.Node, mesh: Mesh, saved: SavedBytes | None = None
) -> dict[Storage, float]:
    """Return the storages that backward reads and a region recomputes or brings back."""
    region = info(node).region
    if region is None or node.op != "call_function":
        return {}
    saved = saved_by(node, mesh) if saved is None else saved
    recomputed = {
        k: v for k, v in saved.items() if _is_recomputed(k, region) and not info(k[0]).on_host
    }
    if region.how.keep == "device":
        return recomputed
    staying = saved_throughout(node, region, mesh, saved).items()
    return recomputed | {
        k: s for k, s in staying if offload_axes(k, region.how.keep, mesh) is not None
    }


def offload_axes(key: Storage, keep: Keep, mesh: Mesh) -> tuple[str, ...] | None:
    """Return the axes over which a region shards a saved storage; None: it stays as it is."""
    node, place = key
    if keep == "device" or info(node).on_host:
        return None
    if isinstance(place, str):  # who knows what it is
        return () if keep == "host" else None
    type_ = flat_values(info(node).type)[place]
    cut = {*type_.layout.axes, *type_.layout.partial}
    axes = tuple(axis for axis in mesh.names if axis not in cut and mesh[axis] > 1)
    return axes if type_.shape and (axes or keep == "host") else None


def piece_bytes(size: float, axes: tuple[str, ...], mesh: Mesh) -> float:
    """Return the bytes of the largest of equal pieces over some axes."""
    return float(-(-size // mesh.degree(axes)))


def _offloaded_key(key: Storage, region: RecomputeRegion) -> Storage:
    return key[0], f"{key[1]} of {region.number} {region.name}"


def saved_throughout(
    node: fx.Node, region: RecomputeRegion, mesh: Mesh, saved: SavedBytes | None = None
) -> dict[Storage, float]:
    """Return the storages that backward reads, or runs again from, without recomputing them."""
    storages = dict(saved_by(node, mesh) if saved is None else saved)
    if (region.is_full or region.is_by_policy) and info(node).remade:
        storages |= _storage_bytes([storage(value) for value in node.all_input_nodes], mesh)
    return {key: size for key, size in storages.items() if not _is_recomputed(key, region)}


class SavedBytesCache:
    """The saved storages of the nodes of one program, each computed once."""

    def __init__(self, mesh: Mesh, blocks: EqualBlocks = NO_EQUAL_BLOCKS) -> None:
        self.mesh, self._blocks = mesh, blocks
        self._own: dict[fx.Node, SavedBytes] = {}
        self._through: dict[fx.Node, SavedBytes] = {}
        self._remade: dict[fx.Node, SavedBytes] = {}

    def own(self, node: fx.Node) -> SavedBytes:
        """Return `saved_by` of a node."""
        if node not in self._own:
            saved = self._of_twin(node, self.own)
            self._own[node] = saved_by(node, self.mesh) if saved is None else saved
        return self._own[node]

    def through(self, node: fx.Node) -> SavedBytes:
        """Return `saved_on_device` of a node."""
        if node not in self._through:
            staying = self._of_twin(node, self.through)
            saved = None if staying is not None else self.own(node)
            self._through[node] = (
                saved_on_device(node, self.mesh, saved) if staying is None else staying
            )
        return self._through[node]

    def on_host(self, node: fx.Node) -> SavedBytes:
        """Return `saved_on_host` of a node."""
        return saved_on_host(node, self.mesh, self.own(node))

    def remade(self, node: fx.Node) -> SavedBytes:
        """Return `recomputed_for` of a node."""
        if node not in self._remade:
            recomputed = self._of_twin(node, self.remade)
            saved = None if recomputed is not None else self.own(node)
            self._remade[node] = (
                recomputed_for(node, self.mesh, saved) if recomputed is None else recomputed
            )
        return self._remade[node]

    def _of_twin(self, node: fx.Node, ask: Callable[[fx.Node], SavedBytes]) -> SavedBytes | None:
        """Return the storages of a node's twin, moved to the node's block; None without a twin."""
        twin = self._blocks.twin(node)
        if twin is node:
            return None
        storages = ask(twin).items()
        return {(self._blocks.beside(at, node), place): size for (at, place), size in storages}


def peak_recomputed_bytes(
    nodes: Sequence[fx.Node],
    mesh: Mesh,
    known: SavedBytesCache | None = None,
    stays: Callable[[fx.Node], SavedBytes] = lambda node: {},
) -> float:
    """Return the bytes by which backward through `nodes`, a program or stage in order, exceeds
    forward's; at least 0.

    Backward goes from the last node to the first. A saved tensor lives until its operator's
    backward is done, a recomputed one from its region's first reader. `stays`: storages that live
    on, if they are made inside.
    """
    if all(info(node).region is None for node in nodes):
        return 0.0
    known = known or SavedBytesCache(mesh)
    inside, first = set(nodes), dict[Storage, tuple[int, float]]()
    regions: dict[RecomputeRegion, dict[Storage, list[float]]] = {}
    ends: dict[RecomputeRegion, int] = {}
    staying: dict[Storage, tuple[int, float]] = {}  # those of all operators from there on
    for index, node in enumerate(nodes):
        for key, size in known.through(node).items():
            if key[0] in inside:
                first.setdefault(key, (index, size))
        staying |= {key: (index, size) for key, size in stays(node).items() if key[0] in inside}
        region = info(node).region
        if region is not None and info(node).differentiable and node.op == "call_function":
            ends[region] = index
            for key, size in known.remade(node).items():
                spans = regions.setdefault(region, {}).setdefault(key, [index, index, size])
                spans[1] = index
    kept_by_forward, sizes = sum(size for _, size in first.values()), np.zeros(len(nodes))
    for index, size in first.values():
        sizes[index] += size
    until = {key: first.get(key, alive_sizes)[0] for key, alive_sizes in staying.items()}
    for key, (_, size) in staying.items():  # before that, it is there as what is kept
        sizes[0] += size
        sizes[until[key]] -= size
    alive, most = sizes.cumsum().tolist(), 0.0
    for region, remade in regions.items():
        if region.is_by_policy:
            extend_spans([node for node in nodes if info(node).region == region], remade)
        if region.is_full:
            most = max(most, alive[ends[region]] + sum(size for _, _, size in remade.values()))
            continue
        for at in {int(end) for _, end, _ in remade.values()}:
            alive_sizes = [
                size
                for key, (start, end, size) in remade.items()
                if start <= at <= end and until.get(key, 0) <= at
            ]
            most = max(most, alive[at] + sum(alive_sizes))
    return max(0.0, most - kept_by_forward)


def _is_recomputed(key: Storage, region: RecomputeRegion) -> bool:
    """Return whether a region recomputes a storage that it saves, so that it does not stay."""
    node, place = key
    if info(node).region != region:
        return False
    return region.is_full or (isinstance(place, int) and info(node).dropped)


def local_bytes(node: fx.Node, mesh: Mesh) -> float:
    """Return the bytes of one rank's piece of a value."""
    return float(info(node).type.local_bytes(mesh))

"""The shortest redistribution: it arrives, it is adjoint, and nothing is cheaper."""

import doctest
import itertools
import math
import random as plain_random

import numpy as np
import pytest
import torch

from autopar import collectives
from autopar.collectives import (
    LinkPrice,
    Movement,
    apply_path,
    from_ranks,
    move,
    movement_cost,
    redistribute,
    redistribution,
    redistribution_cost,
    to_ranks,
    verify_path,
)
from autopar.errors import InvalidInput, VerifierError
from autopar.layout import Layout, Placement
from autopar.mesh import Mesh
from autopar.search.reshard_table import ReshardTerms, reshard_table
from tests.collectives.spaces import (
    Parts,
    Pending,
    all_layouts,
    all_states,
    are_replicas,
    gradient_layout,
    random_gradient,
    random_value,
)

TWO, THREE = Mesh(a=2, b=2), Mesh(a=2, b=2, c=2)


def uniform(mesh: Mesh) -> LinkPrice:
    return LinkPrice.uniform(mesh)


def skewed(mesh: Mesh) -> LinkPrice:
    """The outermost axis is slow, so that paths go round it."""
    count = len(mesh.names)
    return LinkPrice(mesh, (2e-5, *(2e-6,) * (count - 1)), (1e-9, *(1e-11,) * (count - 1)))


def carry_out(
    path: tuple[Movement, ...],
    source: Layout,
    target: Layout,
    pending: Pending,
    shape: tuple[int, ...],
    mesh: Mesh,
    random: torch.Generator,
) -> None:
    """The whole value arrives in the target, and the whole gradient returns to the source.

    As both are equalities of whole tensors, they hold the adjoint law <Cx, y> = <x, C^T y>: both
    sides are the inner product of the whole value and the whole gradient.
    """
    x = random_value(source, shape, mesh, random)
    values = [value.requires_grad_() for value in x]
    layout = source
    for movement in path:
        values = move(movement, values, mesh, shape=shape, layout=layout)
        layout = movement.apply(layout)
    assert layout == target
    torch.testing.assert_close(
        from_ranks(values, target, mesh, shape), from_ranks(x, source, mesh, shape)
    )
    assert are_replicas(values, target, mesh)
    y = random_gradient(target, pending, shape, mesh, random)
    back = torch.autograd.grad(values, x, y) if path else y
    torch.testing.assert_close(
        from_ranks(back, source.gradient, mesh, shape),
        from_ranks(y, gradient_layout(target, pending), mesh, shape),
    )
    assert are_replicas(back, source.gradient, mesh)


def pairs(mesh: Mesh, ndim: int, parts: Parts = ()) -> list[tuple[Layout, Layout, Pending]]:
    return [
        (source, target, pending)
        for source in all_layouts(mesh, ndim, parts)
        for target, pending in all_states(mesh, ndim, parts)
        if set(target.partial) <= set(source.partial)
    ]


def _name(value: object) -> str:
    return getattr(value, "__name__", None) or str(value)


def sample(numbers: range, most: int) -> list[int]:
    return sorted(plain_random.Random(0).sample(numbers, min(most, len(numbers))))


@pytest.mark.parametrize(
    ("mesh", "shape", "price"),
    [
        *((TWO, shape, uniform) for shape in ((8,), (3, 5), (4, 4, 8))),
        *((TWO, shape, skewed) for shape in ((5,), (4, 8), (4, 4, 8))),
        (THREE, (8,), skewed),
        (THREE, (8, 8, 8), skewed),
        (THREE, (3, 5, 8), uniform),
    ],
    ids=_name,
)
def test_every_pair_arrives_and_is_adjoint(mesh: Mesh, shape: tuple[int, ...], price) -> None:
    """All pairs by their layouts, of very many a sample, and a sample of these with numbers.

    Each single movement out of each state is run with numbers in `test_virtual`; a path of them
    that ends in its target is therefore right.
    """
    random, everything = torch.Generator().manual_seed(0), pairs(mesh, len(shape))
    everything = [everything[at] for at in sample(range(len(everything)), 6000)]
    numbered = set(sample(range(len(everything)), 300))
    for number, (source, target, pending) in enumerate(everything):
        path = redistribute(source, Placement(target, pending), shape, 8, mesh, price(mesh))
        verify_path(path, source, Placement(target, pending))
        if number in numbered:
            carry_out(path, source, target, pending, shape, mesh, random)


def test_dims_cut_in_parts_arrive_and_are_adjoint() -> None:
    """From parts and into them, into other parts, and with dims beside them; the tables of the
    search say what the ways cost."""
    random, parts, shape, itemsize = torch.Generator().manual_seed(0), ((0, 2), (0, 3)), (24, 4), 8
    table = reshard_table(TWO, 2, parts)
    seconds = table.seconds(shape, ReshardTerms(itemsize, skewed(TWO)))
    everything = pairs(TWO, 2, parts)
    for at in sample(range(len(everything)), 1500):
        source, target, pending = everything[at]
        end = Placement(target, pending)
        path = redistribute(source, end, shape, itemsize, TWO, skewed(TWO))
        verify_path(path, source, end)
        carry_out(path, source, target, pending, shape, TWO, random)
        if Placement(source) in table.index and end in table.index:
            cost = redistribution_cost(source, end, shape, itemsize, TWO, skewed(TWO))
            found = seconds[table.index[Placement(source)], table.index[end]]
            assert found <= cost * (1 + 1e-9) + 1e-12


# The cost, against all paths. The edges are found anew: from every pair of states, by what
# differs between the two, whether one collective leads from the first to the second.

Entry = tuple[Layout, Pending]


def single(before: Entry, after: Entry, shape: tuple[int, ...], mesh: Mesh) -> Movement | None:
    """The one collective between two states, if there is one."""
    (start, was), (end, now) = before, after
    if not set(end.partial) <= set(start.partial) or not set(was) <= set(now):
        return None
    summed = tuple(a for a in mesh.names if a in start.partial and a not in end.partial)
    added = tuple(a for a in mesh.names if a in now and a not in was)
    changed = [d for d in range(start.ndim) if start.dims[d] != end.dims[d]]
    if not changed:
        if summed:
            return (
                Movement("all_reduce", summed, pending=True)
                if added == summed
                else (None if added else Movement("all_reduce", summed))
            )
        return Movement("identity", added, pending=True) if added else None
    lost: dict[int, tuple[str, ...]] = {}
    won: dict[int, tuple[str, ...]] = {}
    for dim in changed:
        old, new = start.dims[dim], end.dims[dim]
        if old[: len(new)] == new:
            lost[dim] = old[len(new) :]
        elif new[: len(old)] == old:
            won[dim] = new[len(old) :]
        else:
            return None
    if len(lost) > 1 or len(won) > 1:
        return None
    axes = next(iter((*lost.values(), *won.values())))
    ordered = tuple(a for a in mesh.names if a in axes)
    if axes != ordered:
        return None
    if len(axes) > 1:
        for dim in changed:
            if shape[dim] % mesh.degree(max(start.dims[dim], end.dims[dim], key=len)):
                return None
    if lost and won:
        ((dim, gone),), ((to_dim, come),) = lost.items(), won.items()
        return (
            None if gone != come or summed or added else Movement("all_to_all", axes, dim, to_dim)
        )
    if lost:
        if summed or added not in ((), axes):
            return None
        return Movement("all_gather", axes, next(iter(lost)), pending=bool(added))
    if added or summed not in ((), axes):
        return None
    return Movement("reduce_scatter" if summed else "slice", axes, next(iter(won)))


def written_out(
    movement: Movement, layout: Layout, shape: tuple[int, ...], price: LinkPrice, forward: bool
) -> float:
    """The price of one movement by the formulas, each row of the table by itself."""
    mesh = price.mesh
    p = mesh.degree(movement.axes)
    alpha = max(price.alpha[mesh.names.index(axis)] for axis in movement.axes)
    beta = max(price.beta[mesh.names.index(axis)] for axis in movement.axes)
    volumes = [
        8.0 * math.prod(moment.local_shape(shape, mesh, 0))
        for moment in (layout, movement.apply(layout))
    ]
    V = max(volumes)
    gather = (p - 1) / p * V * beta + np.log2(p) * alpha
    swap = (p - 1) / p * V * beta + np.log2(p) * alpha
    both = {
        ("identity", True): (0.0, 2 * gather),
        ("all_reduce", True): (2 * gather, 2 * gather),
        ("all_reduce", False): (2 * gather, 0.0),
        ("all_gather", True): (gather, gather),
        ("all_gather", False): (gather, 0.0),
        ("reduce_scatter", False): (gather, gather),
        ("slice", False): (0.0, gather),
        ("all_to_all", False): (swap, swap),
    }[movement.kind, movement.pending]
    return both[0] if forward else sum(both)


def all_costs(
    states: list[Entry], shape: tuple[int, ...], price: LinkPrice, forward: bool
) -> np.ndarray:
    """The cheapest path between any two states (Floyd and Warshall)."""
    costs = np.full((len(states), len(states)), np.inf)
    for i, j in itertools.product(range(len(states)), repeat=2):
        if i == j:
            costs[i, j] = 0.0
            continue
        movement = single(states[i], states[j], shape, price.mesh)
        if movement is not None:
            costs[i, j] = written_out(movement, states[i][0], shape, price, forward)
    for middle in range(len(states)):
        np.minimum(costs, costs[:, middle, None] + costs[None, middle], out=costs)
    return costs


@pytest.mark.parametrize(
    ("mesh", "shape", "price", "differentiable"),
    [
        *itertools.product(
            [TWO], [(8,), (5,), (4, 8), (3, 5), (4, 4, 8), (2, 3, 4)], [uniform, skewed], [True]
        ),
        (TWO, (4, 6), skewed, False),
        (Mesh(a=3, b=4), (12, 24), uniform, True),
        (Mesh(a=2, b=1), (2, 3), uniform, True),
        (THREE, (8, 64), skewed, True),
        (THREE, (3, 6), uniform, True),
        (THREE, (64, 64, 8), skewed, True),
        (THREE, (12, 5, 8), uniform, True),
        (THREE, (8, 16, 8), uniform, False),
    ],
    ids=_name,
)
def test_nothing_is_cheaper(mesh: Mesh, shape: tuple[int, ...], price, differentiable) -> None:
    """To all states, from a sample of many."""
    states = all_states(mesh, len(shape))
    if not differentiable:
        states = [state for state in states if not state[1]]
    cheapest = all_costs(states, shape, price(mesh), not differentiable)
    sources = [i for i, (_, before) in enumerate(states) if not before]
    for i in (sources[number] for number in sample(range(len(sources)), 20)):
        source, _ = states[i]
        for j, (target, pending) in enumerate(states):
            if not set(target.partial) <= set(source.partial):
                assert cheapest[i, j] == np.inf
                continue
            given = (
                source,
                Placement(target, pending),
                shape,
                8,
                mesh,
                price(mesh),
                differentiable,
            )
            cost = redistribution_cost(*given)
            assert cost == pytest.approx(cheapest[i, j], rel=1e-6, abs=1e-11)
            path, layout, summed = redistribute(*given), source, 0.0
            for movement in path:
                summed += movement_cost(
                    movement, layout, shape, 8, mesh, price(mesh), learns=differentiable
                )
                layout = movement.apply(layout)
            assert summed == pytest.approx(cost)


def test_equal_paths_prefer_fewer_movements() -> None:
    """An all-reduce, and not a reduce-scatter with an all-gather after it."""
    path = redistribute(
        Layout(None, partial=("a", "b")), Placement(Layout(None)), (8,), 4, TWO, uniform(TWO)
    )
    assert [movement.kind for movement in path] == ["all_reduce"]
    (path,) = redistribute(Layout(("a", "b")), Placement(Layout(None)), (8,), 4, TWO, uniform(TWO))
    assert path.axes == ("a", "b")


def test_a_group_never_holds_another_outer_piece() -> None:
    path = redistribute(Layout(("a", "b"), None), Placement(Layout(None, "a")), (8, 8), 4, TWO,
                        uniform(TWO))  # fmt: skip
    assert path == (
        Movement("all_gather", ("b",), 0),
        Movement("all_to_all", ("a",), 0, 1),
    )


def test_uneven_pieces_go_axis_by_axis() -> None:
    path = redistribute(Layout(("a", "b")), Placement(Layout(None)), (5,), 4, TWO, uniform(TWO))
    assert [movement.axes for movement in path] == [("b",), ("a",)]


def test_pending_alone_is_an_identity() -> None:
    layout = Layout("a", None)
    path = redistribute(layout, Placement(layout, "b"), (4, 4), 4, TWO, uniform(TWO))
    assert path == (Movement("identity", ("b",), pending=True),)
    assert redistribute(layout, Placement(layout), (4, 4), 4, TWO, uniform(TWO)) == ()
    forward = redistribute(layout, Placement(layout, "b"), (4, 4), 4, TWO, uniform(TWO), False)
    assert forward == ()


def test_a_partial_sum_that_stays() -> None:
    source, target = Layout("a", None, partial="b"), Layout(None, None, partial="b")
    path = redistribute(source, Placement(target), (4, 4), 4, TWO, uniform(TWO))
    assert path == (Movement("all_gather", ("a",), 0),)


def test_no_movement_makes_a_partial_sum() -> None:
    for source in (Layout(None), Layout("a")):
        with pytest.raises(InvalidInput, match="no movement makes a partial sum"):
            redistribute(source, Placement(Layout(None, partial="a")), (4,), 4, TWO, uniform(TWO))


@pytest.mark.parametrize("axis", ["a", "z"])
def test_only_replicas_are_pending(axis: str) -> None:
    with pytest.raises(InvalidInput, match="only over axes on which the value is a replica"):
        redistribute(Layout("a"), Placement(Layout("a"), axis), (4,), 4, TWO, uniform(TWO))


def test_a_path_that_ends_elsewhere() -> None:
    path = (Movement("all_gather", ("a",), 0, pending=True),)
    assert apply_path(path, Layout("a")) is Placement(Layout(None), "a")
    verify_path(path, Layout("a"), Placement(Layout(None), "a"))
    for target, pending in ((Layout(None), ()), (Layout("b"), "a")):
        with pytest.raises(VerifierError, match="lead from its source to its target"):
            verify_path(path, Layout("a"), Placement(target, pending))


def test_order_of_questions_does_not_matter() -> None:
    """A search that is kept gives what a fresh one gives."""
    asked = [entry for entry in pairs(TWO, 2) if entry[0] == Layout(("a", "b"), None)]
    answers = []
    for order in (asked, asked[::-1]):
        redistribution._solve.cache_clear()
        redistribution._search.cache_clear()
        paths = {
            (source, *target): redistribute(
                source, Placement(*target), (8, 8), 4, TWO, uniform(TWO)
            )
            for source, *target in order
        }
        answers.append([paths[entry] for entry in asked])
    assert answers[0] == answers[1]


def test_whole_tensor_through_a_long_way() -> None:
    """Two axes change their order on one dim."""
    whole = torch.arange(8.0)
    source, target = Layout(("a", "b")), Layout(("b", "a"))
    values = to_ranks(whole, source, TWO)
    for movement in redistribute(source, Placement(target), (8,), 4, TWO, uniform(TWO)):
        values = move(movement, values, TWO)
    assert [value.tolist() for value in values] == [[0, 1], [4, 5], [2, 3], [6, 7]]


@pytest.mark.parametrize("module", [collectives, redistribution], ids=lambda m: m.__name__)
def test_tour(module) -> None:
    assert doctest.testmod(module).failed == 0

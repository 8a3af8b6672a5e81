"""Ring attention: the pieces of all members are the uncut operator, whatever they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.collectives.joint_kernels import (
    KernelGroup,
    RingShift,
    ShardedDim,
    Steps,
    in_lock_step,
)
from autopar.layout import chunk
from autopar.strategies.kernels.attention import attention_blocks
from autopar.strategies.kernels.attention.attention_blocks import AttentionOptions
from autopar.strategies.kernels.attention.dropped_attention import attention
from autopar.strategies.kernels.attention.ring import CAUSAL_RING, RING, Ring
from autopar.strategies.kernels.keyed_draws import DrawPlace

ROWS = ((8, 8), (7, 7), (5, 5), (6, 9), (9, 4), (1, 3), (1, 1))  # queries, keys
HEADS = (  # of queries, keys and values, and whether they are grouped
    ((2, 4), (2, 4), (2, 4), False),
    ((2, 4), (2, 2), (2, 2), True),
    ((1, 4), (2, 1), (2, 4), False),
    ((3,), (3,), (3,), False),
    ((), (), (), False),
)


def double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def pieces(size: int, count: int) -> tuple[tuple[int, int], ...]:
    return tuple(chunk(size, count, index) for index in range(count))


def cut(x: Tensor, count: int) -> list[Tensor]:
    return [x.narrow(-2, *piece) for piece in pieces(x.shape[-2], count)]


def cuts_of(
    query: Tensor, key: Tensor, count: int
) -> tuple[tuple[ShardedDim, ...], tuple[ShardedDim, ...]]:
    """Return the cuts of the inputs and of the output of attention."""
    rows, columns = (ShardedDim(x.ndim - 2, pieces(x.shape[-2], count)) for x in (query, key))
    return (rows, columns, columns), (rows,)


def run_ring(
    count: int, inputs: list[Tensor], slope: Tensor, mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """Return output and gradients of all members, put together."""
    query, key, value = (x.detach() for x in inputs)
    cuts = cuts_of(query, key, count)
    learns = mask is not None and mask.requires_grad
    needs = (True,) * 3 + (learns,) * (mask is not None) + (False,) * ("drawn" in options)
    groups = [KernelGroup(count, index, *cuts, needs) for index in range(count)]
    is_cut = mask is not None and mask.ndim > 1 and mask.shape[-2] == query.shape[-2]
    masks: list[Any] = [mask] * count
    if mask is not None and is_cut:
        masks = cut(mask.detach(), count)
    parts = zip(groups, *(cut(x, count) for x in (query, key, value)), masks)
    with torch.no_grad():
        results = in_lock_step(
            [RING.forward(g, q, k, v, attn_mask=m, **options) for g, q, k, v, m in parts]
        )
        calls = zip(groups, results, cut(slope, count))
        grads = in_lock_step([RING.backward(g, r[1], r[2], s) for g, r, s in calls])
    gradients = [torch.cat([of_member[index] for of_member in grads], -2) for index in range(3)]
    if learns:
        of_mask = [of_member[3] for of_member in grads]
        gradients.append(torch.cat(of_mask, -2) if is_cut else sum(of_mask))  # type: ignore[arg-type]
    return torch.cat([outputs[0] for outputs, _, _ in results], -2), gradients


def check(count: int, inputs: list[Tensor], mask: Tensor | None = None, **options: Any) -> None:
    """Compare with torch's attention."""
    wanted = F.scaled_dot_product_attention(*inputs, attn_mask=mask, **options)
    leaves = [*inputs, *([mask] if mask is not None and mask.requires_grad else [])]
    slope = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, leaves, slope)
    close(run_ring(count, inputs, slope, mask, **options), wanted, gradients)


def close(
    results: tuple[Tensor, list[Tensor]], wanted: Tensor, wanted_gradients: tuple[Tensor, ...]
) -> None:
    got, gradients = results
    torch.testing.assert_close(got, wanted.detach(), rtol=1e-10, atol=1e-10)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-10, atol=1e-10)


@pytest.fixture(params=[2**20, 48], ids=["fused", "tiles"])
def scores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute by torch's fused kernels, or by some rows and columns at a time."""
    monkeypatch.setattr(attention_blocks, "_SCORES", {"cpu": request.param})
    if request.param < 2**20:
        monkeypatch.setattr(attention_blocks, "_is_fused", lambda block, weights: False)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.usefixtures("scores")
def test_attention(count: int, is_causal: bool) -> None:
    """Uneven and empty pieces, other numbers of keys, heads that are grouped, broadcast or none."""
    for rows, columns in ROWS:
        for *heads, is_grouped in HEADS:
            shapes = zip(heads, (rows, columns, columns), (8, 8, 8 - 2 * (rows == columns)))
            inputs = [double(*leading, length, width) for leading, length, width in shapes]
            check(count, inputs, is_causal=is_causal, enable_gqa=is_grouped, scale=0.4)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_whose_numbers_do_not_stand_together(is_causal: bool) -> None:
    """As of channels that attend to one another."""
    plain = [double(2, 3, 8, 4) for _ in range(3)]
    for turned in range(3):
        inputs = list(plain)
        inputs[turned] = double(2, 3, 4, 8).mT.detach().requires_grad_()
        check(2, inputs, is_causal=is_causal)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.usefixtures("scores")
def test_masks(count: int) -> None:
    """Added ones learn; of boolean ones some rows see nothing. Both are broadcast in any dims."""
    for rows, columns, heads in ((7, 5, 4), (4, 6, 2)):
        lengths = (4, rows), (heads, columns), (heads, columns)
        inputs = [double(2, heads_of_input, length, 8) for heads_of_input, length in lengths]
        for shape in ((rows, columns), (1, columns), (4, rows, 1), (2, 1, rows, columns)):
            check(count, inputs, double(*shape), enable_gqa=True)
            is_seen = torch.rand(shape) > 0.4
            is_seen[..., 0, :] = False
            check(count, inputs, is_seen, enable_gqa=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_dropped_weights(is_causal: bool) -> None:
    """All ranks together drop the weights that one rank drops."""
    drawn, inputs = torch.tensor([123456, 1]), [double(2, n, 7, 8) for n in (4, 2, 2)]
    place = DrawPlace(3, (2, 4, 7, 7))
    options = {"drawn": drawn, "place": place, "dropout_p": 0.3, "is_causal": is_causal}
    wanted = attention(*inputs, None, **options, enable_gqa=True)  # type: ignore[arg-type]
    slope = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, inputs, slope)
    for count in (2, 3, 4):
        close(run_ring(count, inputs, slope, **options, enable_gqa=True), wanted, gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    """As near to the exact numbers as torch's own kernel."""
    inputs = [torch.randn(2, 4, 64, 16).to(dtype).requires_grad_() for _ in range(3)]
    slope = torch.randn(2, 4, 64, 16).to(dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    results = []
    for leaves in (exact, inputs):
        output = F.scaled_dot_product_attention(*leaves, is_causal=True)
        results.append([output, *torch.autograd.grad(output, leaves, slope.to(output.dtype))])
    output, gradients = run_ring(4, inputs, slope, is_causal=True)
    for wanted, whole, got in zip(*results, [output, *gradients], strict=True):
        assert got.dtype == dtype
        distances = [(x.double() - wanted).norm() for x in (got, whole)]
        assert distances[0] < 1.3 * distances[1]


@pytest.mark.parametrize("is_causal", [False, True])
def test_all_is_computed_once_and_by_all_alike(is_causal: bool) -> None:
    """Every row meets every column that it sees in one task; the causal ones are shared out."""
    for count in range(1, 9):
        for rows, columns in (*ROWS, (64, 64)):
            weights = AttentionOptions(1.0, is_causal)
            ring = Ring(pieces(rows, count), pieces(columns, count), weights)
            met, work = torch.zeros(rows, columns, dtype=torch.int64), []
            is_seen = torch.ones(rows, columns, dtype=torch.bool)
            is_seen = is_seen.tril() if is_causal else is_seen
            for member in range(count):
                before = met.clone()
                for step in (0, *ring.steps):
                    if (task := ring.task(member, step)) is not None:
                        (row, _), (column, width) = ring.rows[task.queries], ring.columns[task.keys]
                        rows_met = slice(row + task.rows.start, row + task.rows.stop)
                        met[rows_met, column : column + width] += 1
                work.append(int((met - before)[is_seen].sum()))
            assert (met[is_seen] == 1).all()
            if rows == columns == 64 and 64 % (2 * count) == 0:
                assert max(work) == min(work)


def counted(steps: Steps, sent_bytes: list[int]) -> Steps:
    """A member, with the bytes that it sends."""
    answer = None
    try:
        while True:
            request = steps.send(answer)
            if isinstance(request, RingShift):
                sent_bytes.append(sum(tensor.nbytes for tensor in request.tensors))
            answer = yield request
    except StopIteration as end:
        return end.value


@pytest.mark.parametrize("kernel", [RING, CAUSAL_RING], ids=["all", "causal"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_traffic(kernel: Any, count: int) -> None:
    """Predicted messages are those of the member that sends most in each step; and
    of all keys and values a member gets (n - 1) / n."""
    is_causal, length = kernel is CAUSAL_RING, 24
    inputs = [torch.randn(1, heads, length, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    cuts = cuts_of(*inputs[:2], count)
    groups = [KernelGroup(count, index, *cuts, (True,) * 3) for index in range(count)]
    parts = list(zip(*(cut(x, count) for x in inputs)))
    sent_bytes: list[list[list[int]]] = [[[] for _ in range(count)] for _ in range(2)]
    options = {"is_causal": is_causal, "enable_gqa": True}
    results = in_lock_step(
        [
            counted(kernel.forward(group, query=q, key=k, value=v, **options), of_member)
            for group, (q, k, v), of_member in zip(groups, parts, sent_bytes[0])
        ]
    )
    calls = zip(groups, results, cut(torch.randn_like(inputs[0]), count), sent_bytes[1])
    in_lock_step(
        [counted(kernel.backward(g, r[1], r[2], s), of_member) for g, r, s, of_member in calls]
    )
    sizes = [part.nbytes for part in parts[0]]
    sizes_by_name = {"e": 8, "itemsize": 8}
    predicted = kernel.traffic(
        count, sizes, [results[0][0][0].nbytes], (True,) * 3, **sizes_by_name
    )
    for way, ways in zip((predicted.forward, predicted.backward), sent_bytes, strict=True):
        most = sorted(max(step) for step in zip(*ways))
        assert {kind for kind, _ in way} == {"shift"}
        for size, real in zip(sorted(size for _, size in way), most, strict=True):
            assert size == real
    if not is_causal:
        every = inputs[1].nbytes + inputs[2].nbytes
        assert sum(sent_bytes[0][0]) == every * (count - 1) // count
        assert sum(sent_bytes[1][0]) == 2 * every * (count - 1) // count


def test_what_is_kept_falls_with_the_number_of_ranks() -> None:
    inputs = [torch.randn(2, 4, 32, 8) for _ in range(3)]
    for count in (1, 2, 4):
        cuts = cuts_of(*inputs[:2], count)
        parts = zip(*(cut(x, count) for x in inputs))
        groups = (KernelGroup(count, index, *cuts) for index in range(count))
        results = in_lock_step(
            [
                RING.forward(group, *inputs_of_member, is_causal=True)
                for group, inputs_of_member in zip(groups, parts)
            ]
        )
        for _, saved, _ in results:
            whole = 4 * inputs[0].nbytes + inputs[0].nbytes // 8
            assert sum(x.nbytes for x in saved) == whole // count


def test_nobody_gets_what_it_does_not_see() -> None:
    """Causal rows that are cut otherwise than the keys get some of these; cut alike, they help."""
    ring = Ring(pieces(4, 4), pieces(8, 4), AttentionOptions(1.0, True))
    tasks = [[ring.task(member, step) is not None for step in range(4)] for member in range(4)]
    assert [sum(of_member) for of_member in tasks] == [1, 1, 2, 2]
    assert replace(ring, columns=ring.rows).task(0, 1) is not None

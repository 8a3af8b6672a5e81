# ruff: noqa: E501
"""Each normalisation on the smallest program that needs it: captured calls as text.

Every program here is also run and differentiated against the function it came from.
"""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.support import program, random, targets, text

aten = torch.ops.aten

IDS = torch.tensor([[0, 1, -100], [2, 2, 3]])


def golden(expected: str, *args: Any, **members: Any) -> None:
    assert text(*args, **members) == dedent(expected).strip()


def write_to_views(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    y[:, 0] = 0
    y[1].mul_(3)
    return y * 2


def write_to_buffer(self: Any, x: Tensor) -> Tensor:
    self.total.add_(x.detach().sum(0))
    return self.linear(x) + self.total


def flattened_heads(self: Any, x: Tensor) -> Tensor:
    q = self.linear(x).view(2, 3, 2, 2).transpose(1, 2).reshape(4, 3, 2)
    out = torch.bmm(torch.bmm(q, q.transpose(1, 2)).softmax(-1), q)
    return out.view(2, 2, 3, 2).transpose(1, 2).reshape(2, 3, 4)


def masked(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    q, places = self.linear(x).view(2, 1, 3, 4), torch.arange(3)
    causal = (places[None, :] <= places[:, None]).expand(2, 1, 3, 3)
    full = torch.ones(3, 3, dtype=torch.bool)
    attend = F.scaled_dot_product_attention
    return attend(q, q, q, attn_mask=causal), attend(q, q, q, attn_mask=full)


def without_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.linear(x)
    return self.linear(y)


def test_in_place_operators_are_functional() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[3, 4]
        add = add(linear, p_linear_bias) : f64[3, 4]
        add_1 = add(add, 1) : f64[3, 4]
        relu = relu(add_1) : f64[3, 4]
        return (relu)
        """,
        lambda self, x: self.linear(x).add_(1).relu_(),
        random(3, 4),
    )


def test_writes_to_views_are_writes_to_their_base() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[3, 4]
        add = add(linear, p_linear_bias) : f64[3, 4]
        select = select(add, 1, 0) : f64[3]
        fill = fill(select, c_lifted_tensor_0) : f64[3]
        select_scatter = select_scatter(add, fill, 1, 0) : f64[3, 4]
        select_1 = select(select_scatter, 0, 1) : f64[4]
        mul = mul(select_1, 3) : f64[4]
        select_scatter_1 = select_scatter(select_scatter, mul, 0, 1) : f64[3, 4]
        mul_1 = mul(select_scatter_1, 2) : f64[3, 4]
        return (mul_1)
        """,
        write_to_views,
        random(3, 4),
    )


def test_writes_to_buffers_are_outputs() -> None:
    golden(
        """
        sum_1 = sum(args_0, [0]) : f64[4]
        add = add(b_total, sum_1) : f64[4]
        linear = linear(args_0, p_linear_weight) : f64[3, 4]
        add_1 = add(linear, p_linear_bias) : f64[3, 4]
        add_2 = add(add_1, add) : f64[3, 4]
        return (add_2, add)
        """,
        write_to_buffer,
        random(3, 4),
        total=torch.zeros(4),
    )


def test_what_is_joined_with_nothing_else_is_itself() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[3, 4]
        add = add(linear, p_linear_bias) : f64[3, 4]
        return (add)
        """,
        lambda self, x: torch.cat([torch.cat([self.linear(x)]), torch.empty(0)]),
        random(3, 4),
    )


def test_addmm_is_matmul_and_add() -> None:
    golden(
        """
        matmul = matmul(args_0, p_linear_weight) : f64[3, 4]
        add = add(matmul, p_linear_bias) : f64[3, 4]
        return (add)
        """,
        lambda self, x: torch.addmm(self.linear.bias, x, self.linear.weight),
        random(3, 4),
    )


def test_a_product_with_a_transposed_weight_is_linear() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[3, 4]
        return (linear)
        """,
        lambda self, x: torch.mm(x, self.linear.weight.t()),
        random(3, 4),
    )


def test_bmm_is_matmul() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[2, 3, 4]
        add = add(linear, p_linear_bias) : f64[2, 3, 4]
        transpose = transpose(args_0, 1, 2) : f64[2, 4, 3]
        matmul = matmul(add, transpose) : f64[2, 3, 3]
        return (matmul)
        """,
        lambda self, x: torch.bmm(self.linear(x), x.transpose(1, 2)),
        random(2, 3, 4),
    )


def test_convolution_and_bias_are_apart() -> None:
    golden(
        """
        conv2d = conv2d(args_0, p_c_weight, None, [1, 1], [1, 1], [1, 1], 1) : f64[2, 4, 6, 6]
        reshape = reshape(p_c_bias, [4, 1, 1]) : f64[4, 1, 1]
        add = add(conv2d, reshape) : f64[2, 4, 6, 6]
        return (add)
        """,
        lambda self, x: self.c(x),
        random(2, 3, 6, 6),
        c=nn.Conv2d(3, 4, 3, padding="same"),
    )


def test_flattened_tokens_are_apart_again() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[2, 3, 4]
        add = add(linear, p_linear_bias) : f64[2, 3, 4]
        gelu = gelu(add) : f64[2, 3, 4]
        return (gelu)
        """,
        lambda self, x: F.gelu(self.linear(x.view(-1, 4))).view(2, 3, 4),
        random(2, 3, 4),
    )


def test_flattened_tokens_are_apart_from_what_was_beside_heads() -> None:
    golden(
        """
        reshape = reshape(args_0, [2, 3, 4]) : f64[2, 3, 4]
        linear = linear(reshape, p_linear_weight) : f64[2, 3, 4]
        add = add(linear, p_linear_bias) : f64[2, 3, 4]
        return (add)
        """,
        lambda self, x: self.linear(x.reshape(6, 4)).view(2, 3, 4),
        random(2, 6, 2),
    )


def test_flattened_heads_are_apart_again() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[2, 3, 4]
        add = add(linear, p_linear_bias) : f64[2, 3, 4]
        reshape = reshape(add, [2, 3, 2, 2]) : f64[2, 3, 2, 2]
        transpose = transpose(reshape, 1, 2) : f64[2, 2, 3, 2]
        transpose_1 = transpose(transpose, 2, 3) : f64[2, 2, 2, 3]
        matmul = matmul(transpose, transpose_1) : f64[2, 2, 3, 3]
        softmax = softmax(matmul, 3) : f64[2, 2, 3, 3]
        matmul_1 = matmul(softmax, transpose) : f64[2, 2, 3, 2]
        transpose_2 = transpose(matmul_1, 1, 2) : f64[2, 3, 2, 2]
        reshape_1 = reshape(transpose_2, [2, 3, 4]) : f64[2, 3, 4]
        return (reshape_1)
        """,
        flattened_heads,
        random(2, 3, 4),
    )


def test_chunks_are_slices() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[3, 4]
        add = add(linear, p_linear_bias) : f64[3, 4]
        slice_1 = slice(add, 1, 0, 2) : f64[3, 2]
        slice_2 = slice(add, 1, 2, 4) : f64[3, 2]
        mul = mul(slice_1, 2) : f64[3, 2]
        mul_1 = mul(slice_2, 2) : f64[3, 2]
        return (mul, mul_1)
        """,
        lambda self, x: [part * 2 for part in self.linear(x).chunk(2, -1)],
        random(3, 4),
    )


def test_unbind_is_selections() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[3, 4]
        add = add(linear, p_linear_bias) : f64[3, 4]
        reshape = reshape(add, [3, 2, 2]) : f64[3, 2, 2]
        select = select(reshape, 1, 0) : f64[3, 2]
        select_1 = select(reshape, 1, 1) : f64[3, 2]
        mul = mul(select, 2) : f64[3, 2]
        mul_1 = mul(select_1, 2) : f64[3, 2]
        return (mul, mul_1)
        """,
        lambda self, x: [part * 2 for part in self.linear(x).view(3, 2, 2).unbind(1)],
        random(3, 4),
    )


def test_max_is_argmax_and_gather() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[3, 4]
        add = add(linear, p_linear_bias) : f64[3, 4]
        argmax = argmax(add, -1, True) : i64[3, 1]
        gather = gather(add, -1, argmax) : f64[3, 1]
        squeeze = squeeze(gather, -1) : f64[3]
        return (squeeze)
        """,
        lambda self, x: self.linear(x).max(-1).values,
        random(3, 4),
    )


def test_a_dim_that_is_named_by_its_numbers_is_kept() -> None:
    golden(
        """
        reshape = reshape(args_0, [3, 1, 1, 4]) : f64[3, 1, 1, 4]
        linear = linear(reshape, p_linear_weight) : f64[3, 1, 1, 4]
        add = add(linear, p_linear_bias) : f64[3, 1, 1, 4]
        return (add)
        """,
        lambda self, x: self.linear(x[torch.arange(3)[:, None, None, None], torch.arange(4)]),
        random(3, 4),
    )


X = random(3, 4, 5, 6)
BATCH, ROW, WHERE = torch.arange(3), torch.arange(4), torch.tensor([[2], [0]])
INDICES = {  # and how many of them are left
    "apart": (lambda x: x[BATCH, :, 1], 0),
    "of the second dim": (lambda x: x[WHERE, ROW], 1),
    "a row of indices": (lambda x: x[BATCH[:, None, None], WHERE], 1),
    "the others apart": (lambda x: x[WHERE, :, torch.arange(5), 1], 1),
    "after a dim": (
        lambda x: x[:, WHERE[:, :, None], torch.arange(5)[:, None], torch.arange(6)],
        1,
    ),
    "in another order": (lambda x: x[torch.arange(3), torch.arange(4)[:, None]], 0),
    "a diagonal": (lambda x: x[BATCH[:, None], ROW[:3, None], WHERE.T], 1),
    "not all": (lambda x: x[BATCH[:2, None], ROW[1:]], 1),
    "changed along": (lambda x: x[BATCH[:, None], torch.arange(6).view(3, 2) % 4], 1),
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_that_count_a_dim(name: str) -> None:
    function, left = INDICES[name]
    captured = program(lambda self, x: function(x * self.linear.weight.sum()), X)
    assert targets(captured).count("index") == left


def masked_writes(self: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = self.linear(x)
    y[ids == 2] = x[0, 0]
    y[:, ids[0] == 2] = x[:, :1]
    y[ids == 1] = 7.0
    y[torch.ones(2, 3, dtype=torch.bool)] = y.reshape(6, 4) * 2
    return y.index_put((ids > 1,), x[0, :1], accumulate=True)


def test_one_value_where_a_mask_says_so_is_a_choice() -> None:
    captured = program(masked_writes, random(2, 3, 4), torch.tensor([[0, 2, 3], [2, 1, 2]]))
    assert "index_put" not in targets(captured)
    assert targets(captured).count("where") == 5


def with_nothing(self: Any, x: Tensor) -> Tensor:
    nothing, y = torch.tensor([], dtype=x.dtype), self.linear(x)
    return torch.cat([nothing, y.unsqueeze(1)], -2) + torch.cat([y, nothing, y]).sum()


def test_what_is_joined_with_nothing_stays_itself() -> None:
    found = targets(program(with_nothing, random(3, 4)))
    assert found == ["linear", "add", "unsqueeze", "cat", "sum", "add"]


def test_several_results_are_one_call() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[3, 4]
        add = add(linear, p_linear_bias) : f64[3, 4]
        topk = topk(add, 2) : f64[3, 2], i64[3, 2]
        result = result(topk, 0) : f64[3, 2]
        result_1 = result(topk, 1) : i64[3, 2]
        return (result, result_1)
        """,
        lambda self, x: tuple(self.linear(x).topk(2)),
        random(3, 4),
    )


def test_a_mean_is_a_sum_and_a_count() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[3, 4]
        add = add(linear, p_linear_bias) : f64[3, 4]
        sum_1 = sum(add, [1], False) : f64[3]
        div = div(sum_1, 4) : f64[3]
        return (div)
        """,
        lambda self, x: self.linear(x).mean(-1),
        random(3, 4),
    )


def test_mean_squared_error_is_elements_sum_and_count() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[3, 4]
        add = add(linear, p_linear_bias) : f64[3, 4]
        mse_loss = mse_loss(add, args_0, 0) : f64[3, 4]
        sum_1 = sum(mse_loss) : f64[]
        div = div(sum_1, 12) : f64[]
        return (div)
        """,
        lambda self, x: F.mse_loss(self.linear(x), x),
        random(3, 4),
    )


def test_cross_entropy_undoes_the_flattening() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[2, 3, 4]
        add = add(linear, p_linear_bias) : f64[2, 3, 4]
        cross_entropy = cross_entropy(add, args_1, None, -100, 0.0) : f64[2, 3]
        sum_1 = sum(cross_entropy) : f64[]
        count_targets = count_targets(args_1, None, -100) : i64[]
        div = div(sum_1, count_targets) : f64[]
        return (div)
        """,
        lambda self, x, t: F.cross_entropy(self.linear(x).view(-1, 4), t.view(-1)),
        random(2, 3, 4),
        IDS,
    )


def test_cross_entropy_has_classes_last() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[2, 3, 4]
        add = add(linear, p_linear_bias) : f64[2, 3, 4]
        cross_entropy = cross_entropy(add, args_1, None, -100, 0.0) : f64[2, 3]
        sum_1 = sum(cross_entropy) : f64[]
        return (sum_1)
        """,
        lambda self, x, t: F.cross_entropy(self.linear(x).transpose(1, 2), t, reduction="sum"),
        random(2, 3, 4),
        IDS,
    )


def test_likelihood_of_log_softmax_is_cross_entropy() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[3, 4]
        add = add(linear, p_linear_bias) : f64[3, 4]
        cross_entropy = cross_entropy(add, args_1, None, -100, 0.0) : f64[3]
        sum_1 = sum(cross_entropy) : f64[]
        count_targets = count_targets(args_1, None, -100) : i64[]
        div = div(sum_1, count_targets) : f64[]
        return (div)
        """,
        lambda self, x, t: F.nll_loss(F.log_softmax(self.linear(x), -1), t),
        random(3, 4),
        IDS[0],
    )


def test_batch_norm_is_sums_and_normalisation() -> None:
    golden(
        """
        add = add(b_norm_num_batches_tracked, 1) : i64[]
        batch_sums = batch_sums(args_0, b_norm_running_mean) : f64[2, 4]
        batch_normalize = batch_normalize(args_0, batch_sums, b_norm_running_mean, p_norm_weight, p_norm_bias, 5, 1e-05) : f64[5, 4]
        running_mean = running_mean(b_norm_running_mean, batch_sums, b_norm_running_mean, None, 0.1, 5) : f64[4]
        running_var = running_var(b_norm_running_var, batch_sums, b_norm_running_mean, None, 0.1, 5) : f64[4]
        relu = relu(batch_normalize) : f64[5, 4]
        return (relu, running_mean, running_var, add)
        """,
        lambda self, x: F.relu(self.norm(x)),
        random(5, 4),
        norm=nn.BatchNorm1d(4),
    )


def test_batch_norm_of_given_statistics_is_a_scale() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[5, 4]
        add = add(linear, p_linear_bias) : f64[5, 4]
        add_1 = add(b_norm_running_var, 1e-05) : f64[4]
        rsqrt = rsqrt(add_1) : f64[4]
        mul = mul(p_norm_weight, rsqrt) : f64[4]
        mul_1 = mul(b_norm_running_mean, mul) : f64[4]
        sub = sub(p_norm_bias, mul_1) : f64[4]
        mul_2 = mul(add, mul) : f64[5, 4]
        add_2 = add(mul_2, sub) : f64[5, 4]
        return (add_2)
        """,
        lambda self, x: self.norm(self.linear(x)),
        random(5, 4),
        norm=nn.BatchNorm1d(4).eval(),
    )


def test_pooling_to_a_point_is_a_mean() -> None:
    golden(
        """
        conv2d = conv2d(args_0, p_c_weight) : f64[2, 4, 4, 4]
        sum_1 = sum(conv2d, [2, 3], True) : f64[2, 4, 1, 1]
        div = div(sum_1, 16) : f64[2, 4, 1, 1]
        return (div)
        """,
        lambda self, x: F.adaptive_avg_pool2d(self.c(x), 1),
        random(2, 3, 4, 4),
        c=nn.Conv2d(3, 4, 1, bias=False),
    )


def test_masks_that_are_causal_or_full_are_flags() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[2, 3, 4]
        add = add(linear, p_linear_bias) : f64[2, 3, 4]
        reshape = reshape(add, [2, 1, 3, 4]) : f64[2, 1, 3, 4]
        scaled_dot_product_attention = scaled_dot_product_attention(reshape, reshape, reshape, None, 0.0, True) : f64[2, 1, 3, 4]
        scaled_dot_product_attention_1 = scaled_dot_product_attention(reshape, reshape, reshape, None, 0.0, False) : f64[2, 1, 3, 4]
        return (scaled_dot_product_attention, scaled_dot_product_attention_1)
        """,
        masked,
        random(2, 3, 4),
    )


def test_small_constants_are_folded() -> None:
    golden(
        """
        linear = linear(args_0, p_linear_weight) : f64[3, 4]
        add = add(linear, p_linear_bias) : f64[3, 4]
        add_1 = add(add, c_mul) : f64[3, 4]
        return (add_1)
        """,
        lambda self, x: self.linear(x) + torch.arange(4)[None] * 2,
        random(3, 4),
    )


def test_regions_without_gradient_are_detached() -> None:
    golden(
        """
        detach = detach(p_linear_weight) : f64[4, 4]
        detach_1 = detach(p_linear_bias) : f64[4]
        linear = linear(args_0, detach) : f64[3, 4]
        add = add(linear, detach_1) : f64[3, 4]
        linear_1 = linear(add, p_linear_weight) : f64[3, 4]
        add_1 = add(linear_1, p_linear_bias) : f64[3, 4]
        return (add_1)
        """,
        without_gradient,
        random(3, 4),
    )


PRODUCTS = {
    "three": (lambda x, v, w: torch.einsum("bi,io,ok->bk", x, v, w), (3, 4), (4, 5), (5, 2)),
    "four": (
        lambda x, v, w, y: torch.einsum("bi,io,ok,bk->b", x, v, w, y),
        *((3, 4), (4, 5), (5, 2), (3, 2)),
    ),
    "elements": (lambda x, v, w: torch.einsum("bi,bi,bj->bj", x, v, w), (3, 4), (3, 4), (3, 5)),
    "implicit": (lambda x, v, w: torch.einsum("...i,io,ok", x, v, w), (2, 3, 4), (4, 5), (5, 2)),
    "size 1": (lambda x, v, w: torch.einsum("bi,io,ok->bk", x, v, w), (3, 4), (1, 5), (5, 2)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, ([1, -1], [1, 0])), (3, 4, 5), (5, 4, 2)),
    "tensordot of none": (lambda x, w: torch.tensordot(x, w, 0), (3,), (2, 2)),
    "chain": (lambda *m: torch.linalg.multi_dot(m), (6, 2), (2, 5), (5, 3), (3, 4)),
    "chain from left": (lambda *m: torch.linalg.multi_dot(m), (2, 5), (5, 3), (3, 4)),
    "chain from right": (lambda *m: torch.linalg.multi_dot(m), (5, 4), (4, 6), (6, 1)),
    "chain, both even": (lambda *m: torch.linalg.multi_dot(m), (3, 3), (3, 3), (3, 3)),
    "chain of vectors": (lambda *m: torch.linalg.multi_dot(m), (4,), (4, 5), (5,)),
    "addbmm": (
        lambda b, x, w: torch.addbmm(b, x, w, beta=0.5, alpha=2),
        (3, 2),
        (4, 3, 5),
        (4, 5, 2),
    ),
    "addmv": (lambda b, x, w: torch.addmv(b, x, w, alpha=2), (3,), (3, 5), (5,)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_several_are_products_of_two(name: str) -> None:
    function, *shapes = PRODUCTS[name]
    inputs = [random(*shape, seed=place) for place, shape in enumerate(shapes)]

    def scaled(self: Any, *args: Tensor) -> Tensor:
        return function(*(x * self.linear.weight.sum() for x in args))

    captured = program(scaled, *inputs)
    assert set(targets(captured)) <= {"sum", "mul", "reshape", "matmul", "einsum", "add"}
    products = [
        n for n in captured.graph.nodes if n.target in (aten.einsum.default, aten.matmul.default)
    ]
    assert products
    assert all(len(node.all_input_nodes) == 2 for node in products)


def test_operators_by_another_name_have_one() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = torch.special.expit(self.linear(x))
        return torch.arccos(y) + torch.special.gammaln(y) * torch.negative(torch.fix(y))

    names = ["linear", "add", "sigmoid", "acos", "lgamma", "trunc", "neg", "mul", "add"]
    assert targets(program(forward, random(3, 4))) == names


def test_what_is_marked_conjugate_is_so_in_memory() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = torch.complex(self.linear(x), x).conj()
        return torch.view_as_real(y.resolve_conj()) * y.imag[..., None]

    found = targets(program(forward, random(3, 4)))
    assert "conj_physical" in found
    assert not any(name.startswith(("_conj", "_neg_view")) for name in found)

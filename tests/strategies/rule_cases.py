"""Calls of every operator that has a rule, with sizes that divide and sizes that do not."""

from __future__ import annotations

import torch

from autopar.strategies import kernels, registered
from autopar.strategies.kernels import keyed_draws
from autopar.strategies.kernels.attention import dropped_attention
from autopar.strategies.kernels.experts.capacity import WITHIN_CAPACITY
from autopar.strategies.kernels.experts.chosen_products import CHOSEN_PRODUCTS
from autopar.strategies.kernels.experts.expert_kernels import EXPERTS, GATED
from autopar.strategies.kernels.keyed_draws import DrawPlace
from autopar.strategies.kernels.recurrences import LINEAR_SCAN
from autopar.strategies.rules.elementwise import (
    COMPARISONS,
    LINEAR,
    PAIRS,
    SAVES_BOTH,
    SAVES_INPUT,
    SAVES_NOTHING,
    SAVES_OUTPUT,
    VIEWS,
)
from tests.strategies import functional_cases, math_cases  # noqa: F401 (add their own)
from tests.strategies.case_book import CASES, b, case, i, operator, plain, t, u, z

__all__ = ["BUILT_IN", "CASES", "i", "operator", "t", "u"]

# The operators of torch and of the kernels; other rooms and tests register their own.
BUILT_IN = [
    operator_
    for operator_ in registered()
    if str(operator_).startswith("aten.") or operator_.__module__.startswith(kernels.__name__)
]
# elementwise
for _name in plain(SAVES_OUTPUT + SAVES_INPUT + SAVES_BOTH + SAVES_NOTHING + LINEAR + VIEWS):
    case(f"{_name}.default", {"bitwise_not": b(5, 4), "acosh": u(5, 4) + 1}.get(_name, u(5, 4)))
for _name in plain(COMPARISONS[:-1]):
    if "shift" in _name:
        case(f"{_name}.Tensor", i(9, 5, 4), i(3, 4))
    elif _name.startswith(("bitwise", "__")):
        case(f"{_name}.Tensor", b(5, 4), b(4))
    elif _name.startswith("logical"):
        case(f"{_name}.default", t(5, 4), t(5, 1))
    else:
        case(f"{_name}.Tensor", t(5, 4), u(5, 1))
case("floor_divide.default", t(5, 4), u(5, 1), constants=(0, 1))
for _name in plain(PAIRS):
    _overload = {"remainder": "Tensor", "fmod": "Tensor", "xlogy": "Tensor"}
    _full_name = _name if "." in _name else f"{_name}.{_overload.get(_name, 'default')}"
    case(_full_name, u(5, 4), u(4) + 1)
for _name in ("eq", "ge"):
    case(f"{_name}.Scalar", t(5, 4), 0.0)
case("log_sigmoid.default", u(5, 4))
case("threshold.default", t(5, 4), 0.1, 0.2)
case("pow.Tensor_Tensor", u(5, 4), u(4) + 1)
case("hypot.default", u(5, 4), u(4))
case("pow.Tensor_Scalar", t(5, 4), 3.0)
case("pow.Scalar", 2.0, t(5, 4))
for _name in ("add", "sub", "rsub"):
    case(f"{_name}.Tensor", t(5, 4), t(5, 4))
    case(f"{_name}.Tensor", t(3, 5, 4), t(5, 1), alpha=2)
    case(f"{_name}.Scalar", t(5, 4), 2.5)
case("add.Tensor", i(9, 5), i(9, 5))
case("add.Tensor", t(5, 4), 1.5)
case("mul.Tensor", t(5, 4), t(5, 1))
case("mul.Tensor", t(5, 4), 3.0)
case("mul.Tensor", b(5, 4), t(4))
case("div.Tensor", t(5, 4), u(4))
case("div.Tensor", t(5, 4), 3.0)
case("div.Tensor_mode", t(5, 4), u(4), rounding_mode="floor")
case("div.Scalar_mode", t(5, 4), 0.3, rounding_mode="trunc")
case("to.dtype", t(5, 4), torch.float32, tolerance=1e-5)
case("to.dtype", b(5, 4), torch.float64)
case("to.dtype", t(5, 4), torch.int64)
case("to.dtype", i(5, 4), torch.float64)
case("to.dtype_layout", t(5, 4), dtype=torch.float64)
case("to.other", t(5, 4), t(3, 2))
case("_to_copy.default", i(5, 4), dtype=torch.float64)
case("type_as.default", i(5, 4), t(3))
case("clamp.default", t(5, 4), -0.5, 0.5)
case("clamp.Tensor", t(5, 4), u(4) - 1, u(5, 1))
case("clamp.Tensor", t(5, 4), None, u(4))
case("clamp_min.default", t(5, 4), 0.0)
case("clamp_max.Tensor", t(5, 4), t(4))
case("addcmul.default", t(5, 4), t(5, 1), t(4))
case("addcdiv.default", t(5, 4), t(5, 1), u(4))
case("lerp.Tensor", t(5, 4), t(5, 4), u(5, 1))
case("lerp.Scalar", t(5, 4), t(5, 4), 0.3)
case("where.self", b(5, 4), t(5, 4), t(4))
case("where.ScalarOther", b(5, 4), t(5, 4), 0.0)
case("where.ScalarSelf", b(5, 4), 1.0, t(5, 4))
case("masked_fill.Scalar", t(5, 4), b(5, 1), 0.0)
case("masked_fill.Scalar", t(5, 4), b(5, 1), float("-inf"))
case("masked_fill.Tensor", t(5, 4), b(4), t())

# contractions
case("linear.default", t(3, 5, 6), t(4, 6))
case("linear.default", t(5, 6), t(3, 6), t(3))
case("linear.default", z(5, 6), z(3, 6))
case("linear.default", t(3, 2, 6), t(12, 6), parts=(((2, 3),),))
case("linear.default", t(8, 6), t(12, 6), t(12), parts=(((0, 2), (1, 3)), ((0, 2),)))
case("cat.default", [t(4, 3), t(4, 3)], parts=(((0, 2),),))
case("cat.default", [t(8, 3), t(4, 3)], parts=(((0, 3),), ((0, 2),)))
case("slice.Tensor", t(16, 3), 0, 4, 12, parts=(((0, 2),), ((0, 4),)))
case("slice_scatter.default", t(8, 3), t(4, 3), 0, 4, 8, parts=(((0, 2),),))
case("reshape.default", t(2, 4, 3), [8, 3], parts=(((0, 2),),))
case("reshape.default", t(16, 3), [2, 8, 3], parts=(((1, 2),), ((0, 4),)))
case("sum.dim_IntList", t(8, 3), [0], parts=((), ((0, 2),)))
case("layer_norm.default", t(8, 3), [3], t(3), t(3), parts=(((0, 2),),))
case("linear.default", t(4, 6), t(16, 6), t(16), parts=(((1, 2),),))
case("matmul.default", t(4, 6), t(6, 12), parts=(((1, 3),),))
case("add.Tensor", t(4, 12), t(12), parts=(((1, 3),),))
case("transpose.int", t(12, 4), 0, 1, parts=(((1, 3),),))
case("matmul.default", t(5, 3), t(3, 4))
case("matmul.default", t(2, 3, 5), t(5, 4))
case("matmul.default", t(1, 3, 5), t(2, 5, 4))
case("matmul.default", t(5), t(5, 4))
case("matmul.default", t(3, 5), t(5))
case("matmul.default", t(5), t(5))
case("dot.default", t(5), t(5))
case("vdot.default", t(5), t(5))
case("mv.default", t(4, 5), t(5))
case("mm.default", t(5, 3), t(3, 4))
case("bmm.default", t(3, 5, 2), t(3, 2, 4))
case("outer.default", t(5), t(4))
case("addmm.default", t(4), t(5, 3), t(3, 4))
case("addmm.default", t(5, 1), t(5, 3), t(3, 4), beta=0.5)
case("baddbmm.default", t(1, 5, 4), t(3, 5, 2), t(3, 2, 4))
case("einsum.default", "bqhd,bkhd->bhqk", [t(2, 3, 2, 5), t(2, 4, 2, 5)])
case("einsum.default", "...i,oi", [t(3, 5), t(4, 5)])
case("einsum.default", "ij,j->i", [t(5, 3), t(3)])
case("einsum.default", "bi,bj->ij", [t(6, 4), t(1, 4)])
case("einsum.default", "b...i,b...i->b", [t(4, 1, 3), t(1, 5, 3)])
case("bilinear.default", t(5, 3), t(5, 2), t(4, 3, 2), t(4))
for _name, _gates in {"gru_cell": 12, "rnn_tanh_cell": 4, "rnn_relu_cell": 4}.items():
    _weights = (t(_gates, 3), t(_gates, 4), t(_gates), t(_gates))
    case(f"{_name}.default", t(5, 3), t(5, 4), *_weights)

# shapes
for _name in ("view", "reshape", "_unsafe_view"):
    case(f"{_name}.default", t(5, 4), [20])
    case(f"{_name}.default", t(6, 4, 3), [-1, 3])
    case(f"{_name}.default", t(4, 6), [4, 1, 2, 3])
    case(f"{_name}.default", t(4, 6), [2, 12])
    case(f"{_name}.default", t(6, 4), [4, 6])
    case(f"{_name}.default", t(5, 4), [5, 4])
    case(f"{_name}.default", t(2, 2, 3, 1), [4, 3])
    case(f"{_name}.default", t(4, 3, 0), [4, 0])
case("flatten.using_ints", t(2, 5, 4), 1, -1)
case("unflatten.int", t(3, 8), 1, [4, -1])
case("unsqueeze.default", t(5, 4), 1)
case("squeeze.default", t(2, 1, 4))
case("squeeze.dim", t(2, 1, 4), 1)
case("squeeze.dim", t(2, 1, 4), 0)
case("squeeze.dims", t(2, 1, 4), [0, 1])
case("ravel.default", t(4, 3))
case("view_as.default", t(4, 6), t(4, 2, 3))
case("reshape_as.default", t(4, 6), t(24))
case("transpose.int", t(5, 3, 4), 0, -1)
case("swapaxes.default", t(5, 4), 0, 1)
case("swapdims.default", t(5, 4), 0, 1)
case("t.default", t(5, 4))
case("t.default", t(5))
case("mT.default", t(2, 5, 4))
case("adjoint.default", t(2, 5, 4))
case("matrix_H.default", t(5, 4))
case("permute.default", t(5, 3, 4), [2, 0, 1])
case("movedim.int", t(5, 3, 4), 0, 2)
case("movedim.intlist", t(5, 3, 4), [0, 1], [2, 0])
case("expand.default", t(5, 1, 4), [2, -1, 3, 4])
case("expand.default", t(1, 4), [5, -1])
case("expand_as.default", t(1, 4), t(5, 4))
case("repeat_interleave.self_int", t(4, 3), 2, 0)
case("repeat_interleave.self_int", t(4, 3), 2, 0, output_size=8)
case("repeat_interleave.self_int", t(4, 1, 3), 6, 1, output_size=6)
case("view_as_real.default", z(5, 4))
case("view_as_complex.default", t(5, 4, 2))
for name in ("real", "imag"):
    case(f"{name}.default", z(5, 4))
for name in ("complex", "polar"):
    case(f"{name}.default", t(5, 4), t(5, 4))
case("cat.default", [t(5, 2), t(5, 3)], 1)
case("cat.default", [t(2, 4), t(3, 4), t(1, 4)])
case("stack.default", [t(5, 4), t(5, 4)], 1)
case("pad.default", t(5, 4), [1, 2])
case("pad.default", t(5, 4), [1, 0], "constant", 2.0)
case("pad.default", t(5, 4), [1, 1], "reflect")
case("constant_pad_nd.default", t(5, 4), [0, 0, 1, 2], 0)
case("cumsum.default", t(5, 4), 1)
case("cumsum.default", t(5, 3), 0)
case("cumsum.default", b(5, 4), -1)
case("cumprod.default", u(5, 4), 1)
case("topk.default", t(5, 4), 2)
case("native_layer_norm.default", t(5, 3, 4), [4], t(4), t(4), 1e-5)
case("native_layer_norm.default", t(5, 3, 4), [3, 4], t(3, 4), None, 1e-5)
case("topk.default", t(5, 4), 3, 0)
case("sort.default", t(5, 4), 1, True)
case("sort.stable", t(5, 4), stable=True, dim=0)
case("cummax.default", t(5, 4), 0)
case("cummin.default", t(5, 4), 1)
case("glu.default", t(5, 4))
case("glu.default", t(5, 6, 4), 1)
case("channel_shuffle.default", t(5, 4, 2, 3), 2)
case("pixel_shuffle.default", t(5, 8, 2, 3), 2)
case("pixel_unshuffle.default", t(5, 2, 4, 6), 2)
case(LINEAR_SCAN, t(3, 5, 4), t(3, 5, 4), None, 1)
case(LINEAR_SCAN, t(5, 3), t(5, 3), t(3), 0)
case(LINEAR_SCAN, z(3, 5), z(3, 5), z(3))
case("logcumsumexp.default", t(5, 4), 0)
case("argsort.default", t(5, 4), -1, True)
case("flip.default", t(5, 4), [1])
case("roll.default", t(5, 4), [1], [0])
case("roll.default", t(5, 4), [3])
case("tril.default", t(3, 5, 4))
case("triu.default", t(3, 5, 4), 1)
case("diff.default", t(5, 4))
case("diff.default", t(5, 4), 1, -1, t(5, 1))

# indexing
case("slice.Tensor", t(5, 4), 1, 1, 3)
for _place in range(3):
    _bounds = 4 * _place, 4 * _place + 4
    case("slice.Tensor", t(5, 12), 1, *_bounds, parts=((), ((1, 3),)))
case("slice.Tensor", t(5, 4), 0, 0, 9223372036854775807)
case("slice.Tensor", t(5, 4), 0, -3, -1)
case("narrow.default", t(5, 4), 0, 1, 3)
case("select.int", t(5, 4, 3), 1, -1)
case("index_select.default", t(5, 4), 1, i(4, 5))
case("gather.default", t(5, 4), 1, i(4, 5, 6))
case("gather.default", t(5, 4), 1, i(4, 3, 6))
case("index.Tensor", t(5, 4), [i(5, 2, 1), i(4, 3)])
case("index.Tensor", t(5, 4, 3), [None, i(4, 5)])
case("index.Tensor", t(5, 4, 3), [i(5, 6), None, i(3, 6)])
case("index.Tensor", t(5, 4), [i(5, 6)])
case("scatter.src", t(5, 4), 1, i(4, 5, 2), t(5, 2))
case("scatter.value", t(5, 4), 1, i(4, 3, 2), 1.0)
case("scatter_add.default", t(5, 4), 1, i(4, 5, 6), t(5, 6))
case("select_scatter.default", t(5, 3, 4), t(5, 4), 1, -1)
case("slice_scatter.default", t(5, 6), t(5, 2), 1, 1, 5, 2)
case("slice_scatter.default", t(5, 6), t(5, 6), 0)
case("one_hot.default", i(4, 5, 3), 4)
case("diagonal_scatter.default", t(5, 4, 3), t(4, 3), 0, 0, 2)
case("index_add.default", t(5, 4), 0, i(5, 3), t(3, 4))
case("index_add.default", t(5, 4), -1, i(4, 6), t(5, 6))
case("index_copy.default", t(5, 4), 1, torch.tensor([2, 0]), t(5, 2))

# reductions
case("sum.default", t(5, 4))
case("sum.default", b(5, 4))
case("sum.dim_IntList", t(5, 4, 3), [0, -1])
case("sum.dim_IntList", t(5, 4, 3), [1], True)
case("sum.dim_IntList", t(5, 4), None)
case("sum.dim_IntList", b(5, 4), [0], dtype=torch.bool)
case("sum.default", t(5, 4) * 5, dtype=torch.int64, constants=(0,))
case("cumsum.default", t(5, 4) * 5, 0, dtype=torch.int64, constants=(0,))
case("select_scatter.default", i(5, 5, 4), t(4) * 5, 0, 1, constants=(0, 1))
case("mean.dim", t(5, 4), [1], True)
case("mean.default", t(5, 4))
case("linalg_vector_norm.default", t(5, 4), 2, [1])
for _name in ("amax", "amin", "logsumexp"):
    case(f"{_name}.default", t(5, 4), [1])
case("max.default", t(5, 4))
case("min.default", t(5, 4))
case("prod.dim_int", u(5, 4), 1)
case("var.correction", t(5, 4), [1], correction=1)
case("std.dim", t(5, 4), [1])
case("argmax.default", t(5, 4), 1)
case("argmin.default", t(5, 4), -1, True)
case("any.dim", b(5, 4), 1)
case("all.dim", b(5, 4), 0)
case("softmax.int", t(5, 4), -1)
case("log_softmax.int", t(5, 4), 0)
case("_softmax.default", t(5, 4), 1, False)
case("_log_softmax.default", t(5, 4), 1, False)

# attention
_attention = "scaled_dot_product_attention.default"
case(_attention, t(2, 3, 5, 4), t(2, 3, 6, 4), t(2, 3, 6, 4))
case(_attention, t(3, 2, 5, 4), t(3, 2, 5, 4), t(3, 2, 5, 4), None, 0.0, True)
case(_attention, t(2, 2, 7, 4), t(2, 2, 4, 4), t(2, 2, 4, 4), None, 0.0, True, scale=0.3)
case(_attention, t(2, 2, 5, 4), t(2, 2, 6, 4), t(2, 2, 6, 4), b(2, 1, 5, 6) | (i(6, 6) >= 0))
case(_attention, t(2, 4, 5, 4), t(2, 2, 5, 4), t(2, 2, 5, 4), t(5, 5), enable_gqa=True)
case(_attention, t(2, 4, 5, 4), t(2, 2, 5, 4), t(2, 2, 5, 4), t(2, 4, 5, 5), enable_gqa=True)
case(_attention, t(2, 4, 5, 4), t(2, 2, 5, 4), t(2, 2, 5, 4), None, 0.0, True, enable_gqa=True)
case(_attention, t(2, 3, 5, 4), t(2, 1, 5, 4), t(2, 1, 5, 4), None, 0.0, True, enable_gqa=True)
case(_attention, t(3, 2, 5, 4), t(1, 2, 6, 4), t(1, 2, 6, 4))
case(_attention, t(3, 5, 4), t(3, 6, 4), t(3, 6, 4))

# random numbers
_dropped = dropped_attention.attention
_key = torch.tensor([123456789, 1])
_batch = DrawPlace(3, (10, 4), (), (0, 5))  # the second of two micro-batches
for _drawn in (keyed_draws.dropout, keyed_draws.alpha_dropout):
    case(_drawn, t(5, 4), _key, DrawPlace(3, (5, 4)), 0.5)
    case(_drawn, t(5, 4), _key, _batch, 0.5)
for _drawn in (keyed_draws.feature_dropout, keyed_draws.feature_alpha_dropout):
    case(_drawn, t(5, 4, 3), _key, DrawPlace(3, (5, 4, 1)), 0.5)
case(keyed_draws.rrelu, t(5, 4), _key, DrawPlace(3, (5, 4)), 0.1, 0.3)
case(keyed_draws.native_dropout, t(5, 4), _key, DrawPlace(3, (5, 4)), 0.5)
case(keyed_draws.bernoulli, u(5, 4), None, _key, DrawPlace(3, (5, 4)), torch.float64)
case(
    keyed_draws.bernoulli,
    t(5, 4),
    u(5, 1),
    _key,
    DrawPlace(3, (5, 4)),
    torch.float64,
    constants=(0,),
)
case(keyed_draws.chosen, u(5, 4), _key, DrawPlace(3, (5, 4)), 0.3, torch.float64)
case(
    keyed_draws.uniform_like,
    u(5, 4),
    _key,
    DrawPlace(3, (5, 4)),
    -1.0,
    2.0,
    torch.float64,
    constants=(0,),
)
case(
    keyed_draws.normal_like,
    u(5, 4),
    _key,
    DrawPlace(3, (5, 4)),
    1.0,
    2.0,
    torch.float64,
    constants=(0,),
)
case(keyed_draws.normal_around, t(5, 1), u(4), _key, DrawPlace(3, (5, 4)), torch.float64)
case(keyed_draws.normal_around, 1.5, u(5, 4), _key, DrawPlace(3, (5, 4)), torch.float64)
case(
    keyed_draws.log_normal_like,
    u(5, 4),
    _key,
    DrawPlace(3, (5, 4)),
    1.0,
    2.0,
    torch.float64,
    constants=(0,),
)
case(
    keyed_draws.exponential_like,
    u(5, 4),
    _key,
    DrawPlace(3, (5, 4)),
    2.0,
    torch.float64,
    constants=(0,),
)
case(
    keyed_draws.cauchy_like,
    u(5, 4),
    _key,
    DrawPlace(3, (5, 4)),
    1.0,
    2.0,
    torch.float64,
    constants=(0,),
)
case(
    keyed_draws.geometric_like,
    u(5, 4),
    _key,
    DrawPlace(3, (5, 4)),
    0.3,
    torch.int64,
    constants=(0,),
)
case(keyed_draws.poisson, u(5, 4), _key, DrawPlace(3, (5, 4)))
case(
    keyed_draws.whole_like,
    u(5, 4),
    9,
    _key,
    DrawPlace(3, (5, 4)),
    -3,
    torch.int64,
    constants=(0,),
)
case(
    keyed_draws.whole_like,
    u(5, 4),
    torch.tensor(9),
    _key,
    DrawPlace(3, (5, 4)),
    0,
    torch.int64,
    constants=(0,),
)
case(keyed_draws.permutation, i(5, 7), _key, DrawPlace(3, (7,)))
case(keyed_draws.multinomial, u(5, 4), _key, DrawPlace(3, (5, 4)), 2, False, constants=(0,))
case(keyed_draws.multinomial, u(5, 4), _key, DrawPlace(3, (5, 4)), 6, True, constants=(0,))
for _heads, _causal, _masks in ((4, True, None), (2, False, t(5, 6)), (4, False, b(2, 1, 5, 6))):
    case(_dropped, t(2, 4, 5, 4), t(2, _heads, 6, 4), t(2, _heads, 6, 4), _masks, _key,
         DrawPlace(3, (2, 4, 5, 6)), 0.3, _causal, None, _heads == 2)  # fmt: skip

for _bias in (t(2, 1, 5, 6), t(1, 4, 1, 6), t(6)):
    case(_dropped, t(2, 4, 5, 4), t(2, 2, 6, 4), t(2, 2, 6, 4), _bias, _key,
         DrawPlace(3, (2, 4, 5, 6)), 0.3, False, None, True)  # fmt: skip
case(_dropped, t(1, 4, 5, 4), t(1, 4, 6, 4), t(2, 4, 6, 4), None, _key,
     DrawPlace(3, (1, 4, 5, 6)), 0.3, False)  # fmt: skip

# convolution and pooling
case("conv1d.default", t(5, 4, 6), t(2, 4, 3))
case("conv2d.default", t(3, 4, 5, 5), t(6, 4, 3, 3), None, [2, 2], [1, 1])
case("conv2d.default", t(3, 4, 5, 5), t(2, 4, 3, 3), t(2))
case("conv2d.default", t(3, 4, 5, 5), t(8, 2, 3, 3), t(8), [1, 1], [0, 0], [1, 1], 2)
case("conv2d.default", t(3, 4, 5, 5), t(4, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 4)
case("conv2d.padding", t(3, 4, 5, 5), t(2, 4, 3, 3), None, [1, 1], "same")
case("conv2d.padding", t(3, 4, 5, 5), t(4, 2, 2, 3), t(4), [1, 1], "same", [3, 3], 2)
case("conv1d.padding", t(4, 5), t(2, 4, 4), None, [1], "same")
case("conv2d.default", t(4, 5, 5), t(2, 4, 3, 3))
case("conv_transpose1d.default", t(3, 4, 5), t(4, 2, 3), t(2), [2], [1], [1])
case("conv_transpose2d.input", t(3, 4, 3, 3), t(4, 4, 2, 2), t(8), [2, 2], [0, 0], [0, 0], 2)
case("conv_transpose3d.input", t(3, 2, 2, 2, 2), t(2, 4, 2, 2, 2))
case("convolution.default", t(3, 4, 5), t(4, 2, 3), None, [2], [1], [1], True, [1], 2)
case("conv3d.default", t(3, 2, 3, 3, 3), t(2, 2, 2, 2, 2))
case("convolution.default", t(3, 4, 5), t(8, 1, 3), None, [1], [0], [1], False, [0], 4)
case("conv2d.default", t(2, 2, 9, 7), t(2, 2, 3, 3), t(2), [2, 2], [2, 1], [2, 1])
case("conv1d.default", t(1, 2, 11), t(2, 2, 2), None, [3])
case(
    "conv_transpose2d.input", t(1, 2, 5, 7), t(2, 2, 3, 2), t(2), [2, 3], [1, 0], [1, 2], 1, [1, 1]
)
case("conv_transpose1d.default", t(1, 2, 4), t(2, 2, 2), None, [4])
case("conv_transpose1d.default", t(2, 2, 3), t(2, 2, 1), t(2), [3], [1], [2], 1, [2])
case("conv_transpose1d.default", t(2, 2, 3), t(2, 2, 1), None, [1], [0], [1], 1, [2])
case("conv_transpose1d.default", t(1, 4, 5), t(4, 2, 3), t(4), [2], [0], [0], 2)
case("max_pool2d.default", t(1, 2, 7, 9), [3, 3], [2, 2], [1, 1])
case("max_pool1d.default", t(2, 9), [2], [2], [0], [3])
case("avg_pool2d.default", t(1, 2, 7, 9), [3, 3], [2, 2], [1, 1])
case("max_pool1d.default", t(5, 4, 6), [2])
case("max_pool2d.default", t(5, 4, 6, 6), [2, 2])
case("max_pool3d.default", t(5, 2, 4, 4, 4), [2])
case("avg_pool1d.default", t(5, 4, 6), [2])
case("avg_pool2d.default", t(5, 4, 6, 6), [3, 3], [2, 2])
case("avg_pool3d.default", t(5, 2, 4, 4, 4), [2])
case("adaptive_avg_pool1d.default", t(5, 4, 6), [2])
case("adaptive_avg_pool2d.default", t(5, 4, 6, 6), [1, 1])
case("adaptive_avg_pool3d.default", t(5, 2, 4, 4, 4), [1, 2, 2])
case("upsample_nearest1d.vec", t(5, 4, 3), [6], None)
case("_upsample_nearest_exact2d.vec", t(5, 4, 3, 3), [6, 6], None)
case("_upsample_nearest_exact1d.vec", t(5, 4, 3), [6], None)
case("_upsample_nearest_exact3d.vec", t(5, 2, 2, 2, 2), [4, 4, 4], None)
case("_upsample_bilinear2d_aa.vec", t(5, 4, 6, 6), [3, 3], False, None)
case("_upsample_bicubic2d_aa.vec", t(5, 4, 6, 6), [3, 3], False, None)
case("upsample_nearest2d.vec", t(1, 1, 5, 3), None, [3.0, 2.0])
case("upsample_nearest2d.vec", t(1, 1, 5, 4), None, [2.0, 1.3])
case("upsample_bilinear2d.vec", t(1, 1, 5, 5), None, False, [2.0, 1.5])
case("upsample_bilinear2d.vec", t(1, 1, 5, 4), [15, 8], False, None)
case("upsample_nearest2d.vec", t(5, 4, 3, 3), [6, 6], None)
case("upsample_nearest3d.vec", t(5, 2, 2, 2, 2), [4, 4, 4], None)
case("upsample_linear1d.vec", t(5, 4, 3), [6], False, None)
case("upsample_bilinear2d.vec", t(5, 4, 3, 3), [6, 6], False, None)
case("upsample_bicubic2d.vec", t(5, 4, 3, 3), [6, 6], False, None)
case("upsample_trilinear3d.vec", t(5, 2, 2, 2, 2), [4, 4, 4], False, None)

# normalisation
case("layer_norm.default", t(5, 3, 4), [4], t(4), t(4))
case("layer_norm.default", t(5, 3, 4), [3, 4])
case("_weight_norm.default", t(5, 4, 6), u(1, 1, 6), 2)
case("_weight_norm.default", t(5, 4), u(5, 1))
case("_weight_norm.default", t(5, 4), u(), -1)
case(kernels.rms_norm, t(5, 3, 4), [4], t(4), 1e-6)
case(kernels.rms_norm, t(5, 3, 4), [3, 4])
case("group_norm.default", t(5, 8, 3), 4, t(8), t(8))
case("group_norm.default", t(5, 6, 2, 2), 2)
case("group_norm.default", t(1, 4, 5, 3), 2, t(4), t(4))
case("instance_norm.default", t(5, 4, 3), t(4), t(4), None, None, True, 0.1, 1e-5, False)
case("instance_norm.default", t(5, 4, 3, 2), None, None, None, None, True, 0.1, 1e-5, False)
case("batch_norm.default", t(5, 4, 3), t(4), t(4), t(4), u(4), False, 0.1, 1e-5, False,
     constants=(3, 4))  # fmt: skip
_sums = torch.stack((t(4), u(4) * 20 + 5))
case(kernels.batch_sums, t(5, 4, 3), t(4))
case(kernels.batch_sums, t(5, 4), None)
case(kernels.batch_normalize, t(5, 4, 3), _sums, t(4), t(4), t(4), 15, 1e-5)
case(kernels.batch_normalize, t(5, 4, 3), _sums, None, None, None, 15, 1e-5)
case(kernels.running_mean, t(4), _sums, t(4), None, 0.1, 15, constants=range(4))
case(kernels.running_var, t(4), _sums, t(4), torch.tensor(3), None, 15, constants=range(4))

# embedding and losses
_targets = i(7, 5, 3)
_targets[1, 2] = _targets[4, 0] = -100
case("embedding.default", t(7, 4), i(7, 5, 3))
case("embedding.default", t(7, 4), i(7, 5, 3), 2)
case(kernels.cross_entropy, t(5, 3, 7), _targets)
case(kernels.cross_entropy, t(5, 3, 5), _targets % 5, None, 2, 0.2)
case(kernels.cross_entropy, t(6, 8), i(8, 6), None, -100, 0.1)
case(kernels.cross_entropy, t(5, 3, 7), _targets, u(7), constants=(2,))
case(kernels.cross_entropy, t(5, 3, 7), _targets, u(7), -100, 0.2, constants=(2,))
case(kernels.count_targets, _targets)
case(kernels.count_classes, _targets, 7)
_lengths = torch.tensor([6, 5, 6, 4, 6]), torch.tensor([3, 2, 3, 1, 2])
_scores = t(6, 5, 4).log_softmax(-1)
case(torch.ops.autopar.ctc_losses.default, _scores, i(3, 5, 3) + 1, *_lengths, 0, False)
case(torch.ops.autopar.ctc_losses.default, _scores, i(3, 11) + 1, *_lengths, 0, True)
case(kernels.count_targets, _targets, u(7), constants=(1,))
for _name in ("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss"):
    for _reduction in range(3):
        case(f"{_name}.default", t(5, 4), t(5, 4), _reduction)
for _reduction in range(3):
    case("cross_entropy_loss.default", t(5, 7, 3), _targets, None, _reduction)
    case("cross_entropy_loss.default", t(5, 7), _targets[:, 0], u(7), _reduction, constants=(2,))
    case("nll_loss.default", t(5, 7), _targets[:, 0], None, _reduction)
case("nll_loss_nd.default", t(5, 7, 3), _targets, None, 0)

_signs = (i(2, 5) * 2 - 1).double()
case("binary_cross_entropy.default", u(5, 4), u(5, 4), u(5, 1), 0, constants=(1, 2))
case("binary_cross_entropy_with_logits.default", t(5, 4), u(5, 4), None, u(4), 0, constants=(1, 2))
case("kl_div.default", t(5, 4), u(5, 4), 0)
case("kl_div.default", t(5, 4), t(5, 4), 0, log_target=True)
case("soft_margin_loss.default", t(5, 4), _signs[:, None], 0, constants=(1,))
case("hinge_embedding_loss.default", t(5, 4), _signs[:, None], 1.0, 0, constants=(1,))
case("poisson_nll_loss.default", t(5, 4), u(5, 4) * 5, True, True, 1e-8, 0, constants=(1,))
case("margin_ranking_loss.default", t(5), t(5), _signs, 0.5, 0, constants=(2,))
case("cosine_embedding_loss.default", t(5, 4), t(5, 4), _signs, 0.1, 0, constants=(2,))
case("triplet_margin_loss.default", t(5, 4), t(5, 4), t(5, 4), 1.0, 2.0, 1e-6, True, 0)
case("multi_margin_loss.default", t(5, 4), i(4, 5), 1, 1.0, u(4), 0, constants=(2,))
case("multilabel_margin_loss.default", t(5, 4), i(4, 5, 4), 0)

_chosen = u(12, 5).topk(2).indices
_experts = t(12, 4), _chosen, t(12, 2), t(5, 4, 6)
case(EXPERTS, *_experts, t(5, 6, 4), t(5, 6, 4), t(5, 6), t(5, 6), GATED)
for _columns in ("halves", "interleaved"):
    case(EXPERTS, *_experts, t(5, 12, 4), None, t(5, 12), None, GATED, _columns)
_experts = t(6, 2, 4), _chosen.view(6, 2, 2), t(6, 2, 2), t(5, 4, 6)
case(EXPERTS, *_experts, t(5, 6, 4), None, None, None, "silu(gate)")
case(CHOSEN_PRODUCTS, t(9, 4), t(5, 6, 4), i(5, 9))
case(CHOSEN_PRODUCTS, t(8, 4), t(4, 6, 4), torch.tensor([3, 0, 0, 1, 3, 3, 0, 1]))
case(WITHIN_CAPACITY, _chosen, 5, 3)
case(WITHIN_CAPACITY, _chosen.view(6, 2, 2), 5, 1)

# creation
_double = {"dtype": torch.float64}
for _name in ("zeros", "ones"):
    case(f"{_name}.default", [5, 4], **_double)
    case(f"new_{_name}.default", t(3), [5, 4])
    case(f"{_name}_like.default", t(5, 4))
case("full.default", [5, 4], 2.5, **_double)
case("new_full.default", t(3), [5, 4], 2.0)
case("full_like.default", t(5, 4), 2.5)
case("fill.Scalar", t(5, 4), 2.0)
case("fill.Tensor", t(5, 4), t())
case("arange.default", 5)
case("arange.start_step", 1, 9, 2)
case("linspace.default", 0.0, 1.0, 5)
case("zero.default", t(5, 4))
case("index_select.default", t(), 0, torch.tensor(0))
case("linspace.Tensor_Tensor", torch.tensor(0.0), torch.tensor(1.0), 5, constants=(0, 1))
case("eye.default", 5)
case("scalar_tensor.default", 2.0)
case("moveaxis.int", t(5, 3, 4), 0, 2)
case("moveaxis.intlist", t(5, 3, 4), [0, 1], [2, 0])
case("numpy_T.default", t(5, 4))

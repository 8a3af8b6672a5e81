"""Calls of operators on shapes, indices and windows, and of torch.nn.functional."""

from __future__ import annotations

import torch

from autopar.strategies import kernels
from tests.strategies.case_book import b, case, i, t, u

# shapes
case("diagonal.default", t(5, 4, 3))
case("diagonal.default", t(5, 4, 3), 1, -1, 0)
case("diag_embed.default", t(5, 4))
case("diag_embed.default", t(5, 4), -1, 0, 2)
case("trace.default", t(5, 4))
for _times in (1, 2, 3):
    case("rot90.default", t(5, 4, 3), _times, [0, 2])
case("unfold.default", t(5, 7, 4), 1, 3, 2)
case("unfold.default", t(7), 0, 3, 2)
case("renorm.default", t(5, 4, 3), 2.0, 0, 1.0)
case("pixel_shuffle.default", t(3, 8, 2, 4), 2)
case("pixel_unshuffle.default", t(3, 4, 6, 4), 2)
case("channel_shuffle.default", t(3, 4, 5, 4), 2)
case("kthvalue.default", t(5, 4), 2)
case("kthvalue.default", t(5, 4, 3), 2, 1, True)

# indexing
case("index_fill.int_Scalar", t(5, 4), 0, i(4, 3), 2.0)
case("index_fill.int_Tensor", t(5, 4), -1, i(4, 3), t())
for _reduce in ("prod", "mean", "amax", "amin"):
    case("index_reduce.default", t(5, 4), 1, i(4, 3), t(5, 3), _reduce)
    case("scatter_reduce.two", t(5, 4), 1, i(4, 5, 3), t(5, 3), _reduce)
    case("scatter_reduce.two", t(5, 4), 0, i(5, 6, 4), t(6, 4), _reduce, include_self=False)
case("scatter_reduce.two", t(5, 4), 1, i(4, 5, 3), t(5, 3), "sum")
case("scatter.reduce", t(5, 4), 1, i(4, 5, 3), t(5, 3), reduce="multiply", constants=(0, 2))
case("scatter.value_reduce", t(5, 4), 1, i(4, 5, 3), 2.0, reduce="add", constants=(0,))
for _added in (False, True):
    case("index_put.default", t(5, 4), [torch.tensor([3, 0, 1])], t(3, 4), _added)
    case("index_put.default", t(5, 4, 3), [None, torch.tensor([3, 0])], t(5, 2, 1), _added)
case("index_put.default", t(5, 4, 3), [i(5, 2), None, i(3, 2)], t(2, 4), True)
case("take.default", t(5, 4), i(20, 6, 3))
case("bucketize.Tensor", t(5, 4), torch.tensor([-1.0, 0.0, 0.5]), constants=(0, 1))
case("searchsorted.Tensor", t(6).sort().values, t(5, 4), constants=(0, 1))
case("searchsorted.Tensor", t(5, 6).sort().values, t(5, 4), constants=(0, 1))
case("searchsorted.Tensor", t(5, 6), t(5, 4), sorter=t(5, 6).argsort(), constants=(0, 1))
case("histc.default", t(5, 4), 3, -1.0, 1.0, constants=(0,))
case("histc.default", t(5, 4), 3, constants=(0,))
case("histogram.bin_ct", t(5, 4), 3, constants=(0,))
case("histogram.bins_tensor", t(7), torch.tensor([-1.0, 0.0, 2.0]).double(), constants=(0, 1))
case("masked_scatter.default", t(5, 4), b(5, 4), t(5, 4))
for _added in (False, True):
    case("put.default", t(5, 4), torch.tensor([[3, 0], [7, 12]]), t(2, 2), _added)
case("block_diag.default", [t(2, 3), t(3, 2)])
case("_chunk_cat.default", [t(5, 4), t(3, 4)], 0, 2, constants=(0, 1))
for _reduce in ("sum", "mean", "max", "min", "prod"):
    case("segment_reduce.default", t(5, 4, 3), _reduce, lengths=torch.tensor([2, 0, 3]))
case("pdist.default", t(5, 4))

# recurrent layers
for _name, _gates in {"lstm": 16, "gru": 12, "rnn_tanh": 4, "rnn_relu": 4}.items():
    for _first, _shape in ((False, (3, 5, 3)), (True, (5, 3, 3))):
        _weights = [t(_gates, 3), t(_gates, 4), t(_gates), t(_gates)]
        _state = t(1, 5, 4)
        _states = [_state, t(1, 5, 4)] if _name == "lstm" else _state
        _more = (True, 1, 0.0, True, False, _first)
        case(f"{_name}.input", t(*_shape), _states, _weights, *_more)
_weights = [w for width in (3, 4) for _ in range(2) for w in (t(8, width), t(8, 2))]
case("lstm.input", t(3, 5, 3), [t(4, 5, 2), t(4, 5, 2)], _weights, False, 2, 0.0, True, True, False)

# pooling, windows and sampling
for _name in ("max_pool2d_with_indices", "adaptive_max_pool2d"):
    case(f"{_name}.default", t(5, 4, 6, 6), [2, 2])
    case(f"{_name}.default", t(4, 6, 6), [3, 3])
case("max_pool3d_with_indices.default", t(5, 2, 4, 4, 4), [2, 2, 2])
case("adaptive_max_pool3d.default", t(5, 2, 4, 4, 4), [2, 2, 2])
case("fractional_max_pool2d.default", t(5, 4, 6, 6), [2, 2], [3, 3], u(5, 4, 2), constants=(1,))
case("fractional_max_pool2d.default", t(4, 6, 6), [2, 2], [3, 3], u(1, 4, 2), constants=(1,))
case(
    "fractional_max_pool3d.default", t(5, 2, 4, 4, 4), [2] * 3, [2] * 3, u(5, 2, 3), constants=(1,)
)
_places = torch.stack([torch.randperm(16)[:4] for _ in range(20)]).view(5, 4, 2, 2)
case("max_unpool2d.default", t(5, 4, 2, 2), _places, [4, 4])
_places = torch.stack([torch.randperm(64)[:8] for _ in range(10)]).view(5, 2, 2, 2, 2)
case("max_unpool3d.default", t(5, 2, 2, 2, 2), _places, [4] * 3, [2] * 3, [0] * 3)
case("im2col.default", t(5, 4, 6, 5), [2, 3], [1, 1], [0, 1], [2, 1])
case("im2col.default", t(4, 6, 5), [2, 2], [1, 1], [0, 0], [1, 1])
case("col2im.default", t(5, 24, 9), [4, 5], [2, 3], [1, 1], [0, 0], [1, 1])
case("grid_sampler_2d.default", t(5, 4, 6, 6), t(5, 3, 4, 2), 0, 0, False)
case("grid_sampler_2d.default", t(5, 4, 6, 6), t(5, 3, 4, 2), 2, 1, True)
case("grid_sampler_3d.default", t(5, 2, 3, 3, 3), t(5, 2, 2, 4, 3), 0, 0, False)
case("affine_grid_generator.default", t(5, 2, 3), [5, 4, 3, 6], False)
case("affine_grid_generator.default", t(5, 3, 4), [5, 4, 3, 6, 2], True)
case("_prelu_kernel.default", t(5, 4, 3), u(1, 4, 1))

# norms and bags
case("native_group_norm.default", t(5, 8, 3), t(8), t(8), 5, 8, 3, 4, 1e-5)
case("native_group_norm.default", t(5, 6, 2, 2), None, None, 5, 6, 4, 2, 1e-5)
case("_safe_softmax.default", t(5, 4), 1)
_ids, _starts = i(7, 8), torch.tensor([0, 3, 3, 5])
for _mode in range(3):
    case(kernels.bags_of_rows, t(7, 4), _ids, _starts, False, _mode)
case(kernels.bags_of_rows, t(7, 4), _ids, _starts, False, 0, False, t(8))
case(kernels.bags_of_rows, t(7, 4), _ids, _starts, True, 1, False, None, True, 2)

# backward of others, by hand
_given = t(5, 4), t(5, 4).softmax(0), 0, torch.float64
case("_softmax_backward_data.default", *_given)
case("_log_softmax_backward_data.default", t(5, 4), t(5, 4).log_softmax(1), 1, torch.float64)
case("native_dropout_backward.default", t(5, 4), b(5, 4), 2.0)

"""Captured programs compute what their models compute: outputs, gradients, buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.support import Function, check, program, random, targets
from tests.models import ZOO, gpt, gpt2, llama, resnet

IDS = torch.tensor([[0, 1, 3], [-100, 2, 2]])
WEIGHT = torch.tensor([0.5, 1, 2, 0.3], dtype=torch.float64)


@pytest.mark.parametrize("name", ZOO)
def test_zoo(name: str) -> None:
    case = ZOO[name](batch=4)
    check(case.model, case.args, case.kwargs, case.loss)


def test_variants() -> None:
    for case in (
        gpt(batch=3, fused=True, tied=False, heads=2),
        gpt(batch=3, dropout=0.3),
        resnet(batch=3, bottleneck=True),
    ):
        check(case.model, case.args, case.kwargs, case.loss)


def test_models_that_cast_to_float32_agree_to_its_digits() -> None:
    for case in (gpt2(batch=2, precise=False), llama(batch=2, precise=False)):
        check(case.model, case.args, case.kwargs, case.loss, tolerance=1e-5)


def test_eval_mode_is_kept() -> None:
    case = resnet(batch=3)
    case.model.eval()
    assert not check(case.model, case.args, loss=case.loss).mutations


def test_transformers_masks_are_recognised() -> None:
    for name in ("gpt2", "llama"):
        case = ZOO[name](batch=2)
        captured = check(case.model, case.args, case.kwargs, case.loss)
        calls = [n for n in captured.graph.nodes if "dot_product" in str(n.target)]
        assert len(calls) == 2
        assert all(call.args[3:] == (None, 0.0, True) for call in calls)
        assert "le" not in targets(captured)
    case = ZOO["bert"](batch=2)
    captured = check(case.model, case.args, case.kwargs, case.loss)
    calls = [n for n in captured.graph.nodes if "dot_product" in str(n.target)]
    assert all(call.args[3:] == (None, 0.0, False) for call in calls)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_cross_entropy(reduction: str, smoothing: float, weight: Tensor | None) -> None:
    options: Any = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}

    def forward(self: Function, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        logits = self.linear(x)
        return (
            F.cross_entropy(logits.view(-1, 4), ids.view(-1), **options),
            F.cross_entropy(logits.transpose(1, 2), ids, **options),
            F.cross_entropy(logits[0, 0], ids[0, 0], **options),
            F.cross_entropy(logits.transpose(1, 2), x.softmax(-1).transpose(1, 2), **options),
        )

    names = targets(program(forward, random(2, 3, 4), IDS))
    assert "cross_entropy_loss" not in names
    assert names.count("cross_entropy") == 3


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_other_losses(reduction: str) -> None:
    def forward(self: Function, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        y, options = self.linear(x), {"reduction": reduction}
        raw = y.transpose(1, 2)
        return (
            F.mse_loss(y, x, **options),
            F.l1_loss(y, x, **options),
            F.smooth_l1_loss(y, x, beta=0.3, **options),
            F.huber_loss(y, x, **options),
            F.binary_cross_entropy(y.sigmoid(), x.sigmoid(), **options),
            F.binary_cross_entropy_with_logits(y, x.sigmoid(), pos_weight=WEIGHT, **options),
            F.kl_div(y, x.softmax(-1), **options),
            F.nll_loss(raw, ids, weight=WEIGHT, **options),
            F.nll_loss(F.log_softmax(y.view(-1, 4), -1), ids.view(-1), **options),
        )

    assert "mean" not in targets(program(forward, random(2, 3, 4), IDS))


def test_shapes() -> None:
    def forward(self: Function, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        return (
            y.flatten(),
            y.unflatten(-1, (2, 2)),
            y.mT,
            y.T,
            y.t(),
            y.movedim(0, 1),
            y.swapaxes(0, 1),
            y.narrow(1, 1, 2),
            y[..., -1],
            y[:, -3:-1],
            y[::2],
            y.expand(2, 3, 4),
            y.clone(),
            y.to(torch.float32),
            y.reshape(-1, 2).view(12).view(4, 3),
            y * 1 + 0,
        )

    names = set(targets(program(forward, random(3, 4))))
    assert names <= {
        "linear", "add", "reshape", "transpose", "select", "slice", "expand", "to"
    }  # fmt: skip


def test_results_of_tuples() -> None:
    def forward(self: Function, x: Tensor) -> Any:
        y = self.linear(x)
        return (
            y.max(-1), y.min(0, keepdim=True), y.topk(2), y.sort(0, descending=True),
            torch.var_mean(y, -1), torch.var_mean(y), y.split([1, 3], -1), y.tensor_split(2),
            torch.meshgrid(y[0], y[1], indexing="ij"),
        )  # fmt: skip

    program(forward, random(3, 4))


def test_writes_in_place() -> None:
    def chained(self: Function, x: Tensor) -> Any:
        y = self.linear(x)
        turned = y.t()
        y *= 2
        y.view(-1)[3:] += turned.reshape(-1)[3:]
        y[1, 1:].zero_()
        return turned * 1, y.transpose(0, 1)[1:].sum()

    def views(self: Function, x: Tensor) -> Any:
        y = self.linear(x)
        plain = x + 1
        parts, rows = plain.chunk(2, -1), plain.unbind(0)
        plain *= 3
        others = (
            y.unflatten(-1, (2, 2)),
            y.mT,
            y.narrow(0, 1, 2),
            y.view_as(x),
            y.movedim(0, 1),
            y.diagonal(),
        )
        y.diagonal()[1:] *= 3
        y += x
        return [view * 2 for view in (*parts, *rows, *others)]

    def buffers(self: Function, x: Tensor) -> Tensor:
        self.total += x.detach().sum(0)
        self.total[0] = 7
        scale = self.total * 2
        self.total.mul_(0.5)
        self.other = self.total + self.other
        return self.linear(x) * scale

    def dropped(self: Function, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = F.dropout(y, 0.0)
        z += x
        return y * F.dropout(F.dropout(z, 0.5, training=False), 0.0, inplace=True)

    program(chained, random(3, 4))
    program(dropped, random(3, 4))
    program(views, random(3, 4))
    captured = program(buffers, random(3, 4), total=torch.zeros(4), other=torch.ones(4))
    assert set(captured.mutations) == {"total", "other"}


def test_an_element_of_its_own_for_each_row() -> None:
    def forward(self: Function, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        y, rows = self.linear(x), torch.arange(x.shape[0])
        return y[rows, ids], y[rows, ids.int()], y[rows, -1], y[rows, ids[1:2]], y[rows, ids, 0]

    names = targets(program(forward, random(3, 5, 4), torch.tensor([4, -2, 0])))
    assert (names.count("gather"), names.count("index")) == (3, 1)  # one place for all: no gather

    def other_rows(self: Function, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        y, rows = self.linear(x), torch.arange(3)
        return y[rows.flip(0), ids], y[ids, rows], y[rows[:, None], ids], y[:, rows, ids]

    program(other_rows, random(3, 5, 4), torch.tensor([1, 2, 0]))


def test_creations_read_no_tensor() -> None:
    def forward(self: Function, x: Tensor) -> Tensor:
        y = x.new_empty(x.shape, dtype=torch.float32)
        z = torch.empty(x.shape, dtype=x.dtype)
        y[:, :2], y[:, 2:] = x[:, 2:], 1.5
        z.copy_(x.new_full(x.shape, 3.0) + x.new_ones(4) + x.new_zeros(3, 1))
        return self.linear(y.to(x.dtype) + z)

    captured = program(forward, random(3, 4))
    assert not {name for name in targets(captured) if name.startswith(("new_", "empty"))}


def test_batch_norms() -> None:
    twice = nn.BatchNorm1d(4)
    captured = program(
        lambda self, x: self.norm(self.norm(self.linear(x))) + self.norm.running_mean,
        random(5, 4),
        norm=twice,
    )
    assert set(captured.mutations) == {
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"
    }  # fmt: skip
    plain = nn.BatchNorm2d(3, affine=False, track_running_stats=False)
    program(
        lambda self, x: self.norm(self.c(x)), random(2, 3, 4, 4), norm=plain, c=nn.Conv2d(3, 3, 1)
    )


@pytest.mark.parametrize("trains", [True, False])
def test_instance_norms_keep_statistics(trains: bool) -> None:
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True).train(trains)
    with torch.no_grad():
        norm.running_mean.add_(0.5)
        norm.running_var.mul_(2.0)
    captured = program(lambda self, x: self.norm(self.linear(x)), random(5, 4, 4), norm=norm)
    assert {"norm.running_mean", "norm.running_var"} <= set(captured.mutations) or not trains
    assert all(captured.rules[node.name] is not None for node in captured.operators)


def test_convolutions() -> None:
    program(
        lambda self, x: (self.a(x), self.b(x), self.c(x), self.d(x[0])),
        random(2, 3, 6, 6),
        a=nn.Conv2d(3, 4, 3, padding="same"),
        b=nn.ConvTranspose2d(3, 3, 3, stride=2),
        c=nn.Conv2d(3, 6, 4, padding="same", groups=3),
        d=nn.Conv2d(3, 6, 3, dilation=2, padding="valid"),
    )


def test_modules_of_torch() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    program(lambda self, x: self.m(x, self.linear(x), x), random(2, 3, 4), m=attention)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
    captured = program(lambda self, x: self.m(x, mask), random(2, 3, 4), m=layer)
    assert "scaled_dot_product_attention" in targets(captured)
    program(lambda self, x: self.m(self.linear(x)), random(2, 3, 4), m=nn.LSTM(4, 4))


def test_mixture_of_experts() -> None:
    def forward(self: Function, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 4)
        weights, experts = self.linear(tokens).softmax(-1).topk(2, -1)
        chosen = (F.one_hot(experts, 4) * weights[..., None]).sum(1)
        return torch.einsum("ne,nd->ned", chosen, tokens).sum(1).view(2, 3, 4)

    program(forward, random(2, 3, 4))


def test_other_operators() -> None:
    def forward(self: Function, x: Tensor) -> Any:
        y = self.linear(x)
        built = torch.zeros(3, 8, dtype=x.dtype)
        built[:, :4], built[:, 4:] = y, x
        masked = y.clone()
        masked[x > 0] = 0.0
        return (
            built, masked, y.cumsum(0), y.prod(-1), y.norm(dim=-1), y.std(), y.logsumexp(-1),
            torch.where(x > 0, y, 0.0), torch.stack([y, x]), F.pad(y, (1, 1)), y.roll(1, 0),
            y.tril(), y.repeat(2, 1), y[[0, 2]], y.flip(0), y.diagonal(), y * torch.rand(3, 4),
            F.dropout(y, 0.5), self.linear.weight, x,
        )  # fmt: skip

    program(forward, random(3, 4))


def test_masks_that_are_neither_causal_nor_full_stay() -> None:
    def forward(self: Function, x: Tensor) -> tuple[Tensor, ...]:
        y, attend = self.linear(x), F.scaled_dot_product_attention
        strict = torch.ones(3, 3, dtype=torch.bool).tril(-1) | torch.eye(3, dtype=torch.bool)[0]
        minus = torch.full((3, 3), float("-inf"), dtype=x.dtype).triu(1)
        return attend(y, y, y, attn_mask=strict), attend(y, y, y, attn_mask=minus)

    captured = program(forward, random(2, 1, 3, 4))
    calls = [n for n in captured.graph.nodes if "dot_product" in str(n.target)]
    assert [call.args[3] is None for call in calls] == [False, True]
    assert [call.args[5] for call in calls] == [False, True]


def test_regions() -> None:
    def no_grad(self: Function, x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            y = self.linear(x) * 2
            with torch.enable_grad():
                z = self.linear(y)
        return y + z, y, self.linear(x).detach() * self.linear(x)

    program(no_grad, random(3, 4))


def test_what_a_region_without_gradients_gives_back_keeps_its_gradient() -> None:
    def same(self: Function, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            scale = y.to(self.linear.weight.dtype).contiguous() * 2  # both give y itself
        return (self.linear(y) * scale).sum()

    program(same, random(3, 4))


def test_a_backward_by_hand_that_is_that_of_its_operators() -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    program(lambda self, x: self.gelu(self.linear(x)), random(3, 4), gelu=bloom.BloomGelu())


def test_autocast_becomes_casts() -> None:
    def forward(self: Function, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
            z = torch.matmul(F.layer_norm(y, (4,)), y.T)
        return z.float().sum(), F.cross_entropy(z, torch.arange(3))

    model = Function(forward)
    captured = check(
        model, (random(3, 4).float(),), loss=lambda outputs: outputs[0], tolerance=0.05
    )
    casts = [n for n in captured.graph.nodes if n.op == "call_function" and "to.d" in str(n.target)]
    assert casts
    products = [n for n in captured.graph.nodes if str(n.target).startswith("aten.linear")]
    assert products[0].meta["val"].dtype is torch.bfloat16


def test_other_dtypes_are_kept() -> None:
    half = Function(lambda self, x: (self.linear(x).mean(), x.to(torch.int32))).bfloat16()
    captured = check(
        half, (random(3, 4).bfloat16(),), loss=lambda outputs: outputs[0], tolerance=0.02
    )
    assert [node.meta["val"].dtype for node in captured.graph.output_node().args[0]] == [
        torch.bfloat16,
        torch.int32,
    ]

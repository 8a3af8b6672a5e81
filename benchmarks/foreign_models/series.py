"""Nets that forecast series, and nets of ordinary differential equations."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.foreign_models.build import BATCH, Build, Built, Call, load, new, rows

INPUT, HORIZON = 24, 8


def tsai(name: str, *args: object, **options: object) -> Built:
    return Built(new(f"tsai.models.{name}", *args, **options), rows(3, INPUT))


CASES: dict[str, Build] = {
    "gluonts/simple_feedforward": lambda: Built(
        Call(
            new(
                "gluonts.torch.model.simple_feedforward.module:SimpleFeedForwardModel",
                prediction_length=HORIZON,
                context_length=INPUT,
                hidden_dimensions=[16],
            ),
            lambda module, x: module(x),
        ),
        rows(INPUT),
    ),
    "gluonts/dlinear": lambda: Built(
        new(
            "gluonts.torch.model.d_linear.module:DLinearModel",
            prediction_length=HORIZON,
            context_length=INPUT,
            hidden_dimension=8,
        ),
        rows(INPUT),
        torch.ones(BATCH, INPUT),
    ),
    "gluonts/patch_tst": lambda: Built(
        new(
            "gluonts.torch.model.patch_tst.module:PatchTSTModel",
            prediction_length=HORIZON,
            context_length=INPUT,
            patch_len=4,
            stride=4,
            padding_patch="end",
            num_feat_dynamic_real=0,
            scaling="mean",
            d_model=16,
            nhead=2,
            dim_feedforward=16,
            dropout=0.0,
            activation="relu",
            norm_first=False,
            num_encoder_layers=1,
        ),
        rows(INPUT),
        torch.ones(BATCH, INPUT),
    ),
    "pytorch-forecasting/nbeats": lambda: Built(
        new(
            "pytorch_forecasting.models.nbeats.sub_modules:NBEATSGenericBlock",
            units=16,
            thetas_dim=4,
            num_block_layers=2,
            backcast_length=INPUT,
            forecast_length=HORIZON,
            dropout=0.0,
        ),
        rows(INPUT),
    ),
    "pytorch-forecasting/gated_residual": lambda: Built(
        new(
            "pytorch_forecasting.models.temporal_fusion_transformer.sub_modules:"
            "GatedResidualNetwork",
            input_size=8,
            hidden_size=16,
            output_size=8,
            dropout=0.0,
        ),
        rows(INPUT, 8),
    ),
    "pytorch-forecasting/interpretable_attention": lambda: Built(
        new(
            "pytorch_forecasting.models.temporal_fusion_transformer.sub_modules:"
            "InterpretableMultiHeadAttention",
            n_head=2,
            d_model=16,
            dropout=0.0,
        ),
        *[rows(INPUT, 16) for _ in range(3)],
    ),
    "tsai/inception_time": lambda: tsai("InceptionTime:InceptionTime", 3, 4, nf=4),
    "tsai/tst": lambda: tsai("TST:TST", 3, 4, INPUT, n_layers=1, d_model=16, n_heads=2, d_ff=16),
    "tsai/fcn": lambda: tsai("FCN:FCN", 3, 4, layers=[8, 16, 8]),
    "tsai/lstm_fcn": lambda: tsai("RNN_FCN:LSTM_FCN", 3, 4, INPUT, hidden_size=8),
    "iTransformer/itransformer": lambda: Built(
        Call(
            new(
                "iTransformer:iTransformer",
                num_variates=3,
                lookback_len=INPUT,
                dim=16,
                depth=1,
                heads=2,
                dim_head=8,
                pred_length=HORIZON,
                num_tokens_per_variate=1,
            ),
            lambda module, x: module(x),
        ),
        rows(INPUT, 3),
    ),
    "torchdiffeq/ode": lambda: Built(
        Call(
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)),
            lambda module, x: load("torchdiffeq:odeint")(
                lambda time, y: module(y), x, torch.linspace(0, 1, 4, dtype=x.dtype), method="rk4"
            ),
        ),
        rows(4),
    ),
    "chronos-forecasting/residual_block": lambda: Built(
        new("chronos.chronos_bolt:ResidualBlock", 16, 32, 8, "relu"), rows(6, 16)
    ),
}

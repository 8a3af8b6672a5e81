"""Nets for tables, recommendations and Gaussian processes."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.foreign_models.build import BATCH, Build, Built, Call, new, rows

CARDINALITIES = [3, 4, 5]


def categories() -> torch.Tensor:
    return torch.stack([torch.randint(0, size, (BATCH,)) for size in CARDINALITIES], -1)


def deepctr(name: str, **options: object) -> Built:
    sparse = [new("deepctr_torch.inputs:SparseFeat", f"c{i}", 5, 4) for i in range(3)]
    dense = [new("deepctr_torch.inputs:DenseFeat", "d", 2)]
    columns = sparse + dense
    model = new(
        f"deepctr_torch.models:{name}", columns, columns, dnn_hidden_units=(16, 8), **options
    )
    inputs = torch.cat([torch.randint(0, 5, (BATCH, 3)).float(), rows(2)], -1)
    return Built(model, inputs)


def rechub(name: str, **options: object) -> Built:
    sparse = [
        new("torch_rechub.basic.features:SparseFeature", f"c{i}", vocab_size=5, embed_dim=4)
        for i in range(3)
    ]
    model = new(f"torch_rechub.models.ranking:{name}", sparse, **options)
    return Built(
        Call(model, lambda module, c: module({f"c{i}": c[:, i] for i in range(3)})),
        torch.randint(0, 5, (BATCH, 3)),
    )


def gaussian_process() -> Built:
    kernel = new("gpytorch.kernels:ScaleKernel", new("gpytorch.kernels:RBFKernel"))
    net = nn.ModuleDict({"net": nn.Linear(8, 2), "kernel": kernel})
    return Built(
        Call(net, lambda m, x: m["kernel"](m["net"](x)).to_dense()),
        rows(6, 8),
    )


CASES: dict[str, Build] = {
    "tab-transformer-pytorch/tab_transformer": lambda: Built(
        new(
            "tab_transformer_pytorch:TabTransformer",
            categories=tuple(CARDINALITIES),
            num_continuous=4,
            dim=16,
            dim_out=1,
            depth=1,
            heads=2,
            mlp_act=nn.ReLU(),
        ),
        categories(),
        rows(4),
    ),
    "tab-transformer-pytorch/ft_transformer": lambda: Built(
        new(
            "tab_transformer_pytorch:FTTransformer",
            categories=tuple(CARDINALITIES),
            num_continuous=4,
            dim=16,
            dim_out=1,
            depth=1,
            heads=2,
        ),
        categories(),
        rows(4),
    ),
    "pytorch-tabnet/tabnet": lambda: Built(
        new(
            "pytorch_tabnet.tab_network:TabNetNoEmbeddings",
            8,
            2,
            n_d=4,
            n_a=4,
            n_steps=2,
            virtual_batch_size=4,
            group_attention_matrix=torch.eye(8),
        ),
        rows(8),
    ),
    "rtdl-revisiting-models/mlp": lambda: Built(
        new("rtdl_revisiting_models:MLP", d_in=8, d_out=2, n_blocks=2, d_block=16, dropout=0.0),
        rows(8),
    ),
    "rtdl-revisiting-models/resnet": lambda: Built(
        new(
            "rtdl_revisiting_models:ResNet",
            d_in=8,
            d_out=2,
            n_blocks=2,
            d_block=16,
            d_hidden_multiplier=2.0,
            dropout1=0.0,
            dropout2=0.0,
        ),
        rows(8),
    ),
    "rtdl-revisiting-models/ft_transformer": lambda: Built(
        new(
            "rtdl_revisiting_models:FTTransformer",
            n_cont_features=4,
            cat_cardinalities=CARDINALITIES,
            d_out=1,
            n_blocks=2,
            d_block=16,
            attention_n_heads=2,
            attention_dropout=0.0,
            ffn_d_hidden_multiplier=2.0,
            ffn_dropout=0.0,
            residual_dropout=0.0,
        ),
        rows(4),
        categories(),
    ),
    "rtdl-num-embeddings/periodic": lambda: Built(
        new("rtdl_num_embeddings:PeriodicEmbeddings", 8, 4, lite=False), rows(8)
    ),
    "rtdl-num-embeddings/piecewise": lambda: Built(
        new(
            "rtdl_num_embeddings:PiecewiseLinearEmbeddings",
            [torch.tensor([-1.0, 0.0, 0.5, 1.0])] * 3,
            4,
            activation=True,
            version="B",
        ),
        rows(3),
    ),
    "tabm/tabm": lambda: Built(
        new(
            "tabm:TabM.make",
            n_num_features=8,
            cat_cardinalities=[],
            d_out=1,
            k=4,
            d_block=16,
            n_blocks=2,
            dropout=0.0,
        ),
        rows(8),
    ),
    "deepctr-torch/deepfm": lambda: deepctr("DeepFM"),
    "deepctr-torch/xdeepfm": lambda: deepctr("xDeepFM", cin_layer_size=(8, 4)),
    "deepctr-torch/dcn": lambda: deepctr("DCN"),
    "deepctr-torch/fibinet": lambda: deepctr("FiBiNET"),
    "torch-rechub/dcn": lambda: rechub("DCN", n_cross_layers=2, mlp_params={"dims": [8]}),
    "torch-rechub/mlp": lambda: Built(
        new("torch_rechub.basic.layers:MLP", 8, dims=[16, 8], activation="dice"), rows(8)
    ),
    "fastai/tabular": lambda: Built(
        new("fastai.tabular.model:TabularModel", [(3, 2), (4, 2), (5, 3)], 4, 2, [16, 8]),
        categories(),
        rows(4),
    ),
    "fastai/xresnet": lambda: Built(
        new("fastai.vision.models.xresnet:xresnet18", n_out=4), rows(3, 32, 32)
    ),
    "fastai/awd_lstm": lambda: Built(
        Call(
            new(
                "fastai.text.models.awdlstm:AWD_LSTM",
                32,
                16,
                16,
                1,
                hidden_p=0.0,
                input_p=0.0,
                embed_p=0.0,
                weight_p=0.0,
            ),
            lambda module, x: module(x),
        ),
        torch.randint(2, 32, (BATCH, 8)),
    ),
    "gpytorch/deep_kernel": gaussian_process,
    "pytorch-metric-learning/arcface": lambda: Built(
        Call(
            nn.ModuleDict(
                {
                    "net": nn.Linear(8, 16),
                    "loss": new("pytorch_metric_learning.losses:ArcFaceLoss", 4, 16),
                }
            ),
            lambda m, x, y: m["loss"](m["net"](x), y),
        ),
        rows(8),
        torch.randint(0, 4, (BATCH,)),
    ),
    "pytorch-metric-learning/ntxent": lambda: Built(
        Call(
            nn.ModuleDict(
                {"net": nn.Linear(8, 16), "loss": new("pytorch_metric_learning.losses:NTXentLoss")}
            ),
            lambda m, x, y: m["loss"](m["net"](x), y),
        ),
        rows(8),
        torch.tensor([0, 0, 1, 1]),
    ),
}

"""Nets on graphs, points, molecules and fields."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.foreign_models.build import BATCH, Build, Built, Call, new, rows

NODES, EDGES = 12, 24
EDGE_INDEX = torch.arange(2 * EDGES).reshape(2, EDGES) * 7 % NODES
MASK = torch.ones(BATCH, 6).bool()


def edges() -> Tensor:
    return torch.randint(0, NODES, (2, EDGES))


def features(width: int = 8) -> Tensor:
    return torch.randn(NODES, width)


def geometric(name: str, *args: object, **options: object) -> Built:
    """Return a net of torch_geometric on one graph."""
    return Built(new(f"torch_geometric.nn:{name}", *args, **options), features(), edges())


def species() -> Tensor:
    return torch.randint(1, 8, (NODES,))


CASES: dict[str, Build] = {
    "torch_geometric/gcn": lambda: geometric("GCN", 8, 16, 2, 4),
    "torch_geometric/sage": lambda: geometric("GraphSAGE", 8, 16, 2, 4),
    "torch_geometric/gat": lambda: geometric("GAT", 8, 16, 2, 4, heads=2),
    "torch_geometric/gin": lambda: geometric("GIN", 8, 16, 2, 4),
    "torch_geometric/transformer_conv": lambda: geometric("TransformerConv", 8, 4, heads=2),
    "torch_geometric/cheb": lambda: geometric("ChebConv", 8, 4, K=3),
    "torch_geometric/pna": lambda: Built(
        new(
            "torch_geometric.nn:PNAConv",
            8,
            4,
            aggregators=["mean", "max", "std"],
            scalers=["identity", "attenuation"],
            deg=torch.tensor([1, 3, 5, 3]),
        ),
        features(),
        edges(),
    ),
    "torch_geometric/schnet": lambda: Built(
        Call(
            new("torch_geometric.nn:SchNet", 16, 16, 2, 8, cutoff=5.0),
            lambda module, x, z: module.interactions[0](
                module.embedding(z),
                EDGE_INDEX,
                x.norm(dim=-1),
                module.distance_expansion(x.norm(dim=-1)),
            ),
        ),
        torch.randn(EDGES, 3),
        species(),
    ),
    "torch_geometric/dense_gcn": lambda: Built(
        new("torch_geometric.nn:DenseGCNConv", 8, 4), rows(6, 8), rows(6, 6).sigmoid()
    ),
    "torch_geometric/dense_diff_pool": lambda: Built(
        Call(
            nn.ModuleList([nn.Linear(8, 3)]),
            lambda module, x, a: new("torch_geometric.nn:dense_diff_pool", x, a, module[0](x)),
        ),
        rows(6, 8),
        rows(6, 6).sigmoid(),
    ),
    "egnn-pytorch/egnn": lambda: Built(new("egnn_pytorch:EGNN", dim=16), rows(8, 16), rows(8, 3)),
    "egnn-pytorch/network": lambda: Built(
        new("egnn_pytorch:EGNN_Network", num_tokens=8, dim=16, depth=2, num_nearest_neighbors=4),
        torch.randint(0, 8, (BATCH, 8)),
        rows(8, 3),
    ),
    "invariant-point-attention/ipa": lambda: Built(
        new(
            "invariant_point_attention:IPABlock",
            dim=16,
            heads=2,
            scalar_key_dim=4,
            scalar_value_dim=4,
            point_key_dim=2,
            point_value_dim=2,
        ),
        rows(6, 16),
        pairwise_repr=rows(6, 6, 16),
        rotations=torch.eye(3).expand(BATCH, 6, 3, 3).clone(),
        translations=rows(6, 3),
    ),
    "se3-transformer-pytorch/se3": lambda: Built(
        Call(
            new(
                "se3_transformer_pytorch:SE3Transformer",
                dim=8,
                heads=2,
                depth=1,
                dim_head=4,
                num_degrees=2,
                valid_radius=10,
                num_neighbors=3,
            ),
            lambda module, x, c: module(x, c, MASK),
        ),
        rows(6, 8),
        rows(6, 3),
    ),
    "equiformer-pytorch/equiformer": lambda: Built(
        new(
            "equiformer_pytorch:Equiformer",
            dim=(8, 4),
            dim_head=(4, 4),
            heads=(2, 2),
            num_linear_attn_heads=0,
            num_degrees=2,
            depth=1,
            attend_self=True,
            reversible=False,
            num_neighbors=3,
        ),
        rows(6, 8),
        rows(6, 3),
    ),
    "e3nn/linear": lambda: Built(new("e3nn.o3:Linear", "4x0e+2x1o", "3x0e+2x1o"), rows(10)),
    "e3nn/tensor_product": lambda: Built(
        new("e3nn.o3:FullyConnectedTensorProduct", "2x0e+1x1o", "1x0e+1x1o", "2x0e+1x1o"),
        rows(5),
        rows(4),
    ),
    "e3nn/gate": lambda: Built(
        nn.Sequential(
            new("e3nn.o3:Linear", "4x0e+2x1o", "4x0e+2x0e+2x1o"),
            new("e3nn.nn:Gate", "4x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o"),
        ),
        rows(10),
    ),
    "neuraloperator/fno": lambda: Built(
        new(
            "neuralop.models:FNO",
            n_modes=(4, 4),
            in_channels=2,
            out_channels=1,
            hidden_channels=8,
            n_layers=2,
        ),
        rows(2, 12, 12),
    ),
    "neuraloperator/uno": lambda: Built(
        new(
            "neuralop.models:UNO",
            in_channels=2,
            out_channels=1,
            hidden_channels=8,
            n_layers=3,
            uno_out_channels=[8, 8, 8],
            channel_mlp_skip="linear",
            uno_n_modes=[[4, 4]] * 3,
            uno_scalings=[[1, 1], [0.5, 0.5], [2, 2]],
        ),
        rows(2, 12, 12),
    ),
    "neuraloperator/fno_1d": lambda: Built(
        new(
            "neuralop.models:FNO",
            n_modes=(4,),
            in_channels=2,
            out_channels=1,
            hidden_channels=8,
            n_layers=2,
            use_channel_mlp=True,
            norm="instance_norm",
        ),
        rows(2, 16),
    ),
}

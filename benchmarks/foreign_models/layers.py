"""Layers that are models of their own: attention in many forms, mixtures, quantisers, states."""

from __future__ import annotations

from functools import partial

from torch import nn

from benchmarks.foreign_models.build import Build, Built, Call, new, rows

SEQUENCE = (16, 32)  # positions and width


def layer(path: str, *args: object, **options: object) -> Built:
    """Return a module of sequences that is called with one."""
    return Built(new(path, *args, **options), rows(*SEQUENCE))


def quantiser(path: str, **options: object) -> Built:
    return Built(new(f"vector_quantize_pytorch:{path}", **options), rows(*SEQUENCE))


def spikes(net, x):
    spikes, membrane = net[1](net[0](x), net[1].init_leaky())
    return spikes, membrane


def hyper_connections() -> Built:
    initialise, expand, reduce = new(
        "hyper_connections:get_init_and_expand_reduce_stream_functions", 4
    )
    module = initialise(dim=32, branch=nn.Linear(32, 32))
    return Built(Call(module, lambda module, x: reduce(module(expand(x)))), rows(*SEQUENCE))


def xlstm() -> Built:
    mlstm = new("xlstm:mLSTMLayerConfig", conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=2)
    config = new(
        "xlstm:xLSTMBlockStackConfig",
        mlstm_block=new("xlstm:mLSTMBlockConfig", mlstm=mlstm),
        context_length=16,
        num_blocks=2,
        embedding_dim=32,
    )
    return Built(new("xlstm:xLSTMBlockStack", config), rows(*SEQUENCE))


CASES: dict[str, Build] = {
    "local-attention/transformer": lambda: Built(
        new("local_attention:LocalMHA", dim=32, window_size=4, dim_head=16, heads=2, causal=True),
        rows(*SEQUENCE),
    ),
    "nystrom-attention/attention": partial(
        layer,
        "nystrom_attention:NystromAttention",
        dim=32,
        dim_head=16,
        heads=2,
        num_landmarks=4,
        pinv_iterations=2,
    ),
    "axial-attention/attention": lambda: Built(
        new("axial_attention:AxialAttention", dim=8, dim_index=1, heads=2, num_dimensions=2),
        rows(8, 8, 8),
    ),
    "axial-attention/image": lambda: Built(
        new("axial_attention:AxialImageTransformer", dim=8, depth=1, heads=2, reversible=False),
        rows(8, 8, 8),
    ),
    "axial-positional-embedding/embedding": partial(
        layer, "axial_positional_embedding:AxialPositionalEmbedding", dim=32, axial_shape=(4, 4)
    ),
    "linear-attention-transformer/attention": partial(
        layer,
        "linear_attention_transformer:LinearAttentionTransformer",
        dim=32,
        heads=2,
        depth=1,
        max_seq_len=16,
        n_local_attn_heads=1,
        local_attn_window_size=4,
        causal=True,
        blindspot_size=1,
    ),
    "performer-pytorch/self_attention": partial(
        layer, "performer_pytorch:SelfAttention", dim=32, heads=2, dim_head=16, nb_features=16
    ),
    "sinkhorn-transformer/transformer": partial(
        layer,
        "sinkhorn_transformer:SinkhornTransformer",
        dim=32,
        depth=1,
        heads=2,
        bucket_size=4,
        max_seq_len=16,
    ),
    "routing-transformer/transformer": partial(
        layer,
        "routing_transformer:RoutingTransformer",
        dim=32,
        depth=1,
        heads=2,
        max_seq_len=16,
        window_size=4,
        local_attn_window_size=4,
        n_local_attn_heads=1,
    ),
    "product-key-memory/memory": partial(
        layer, "product_key_memory:PKM", dim=32, heads=2, num_keys=8, topk=4, dim_head=16
    ),
    "colt5-attention/feedforward": partial(
        layer,
        "colt5_attention:ConditionalRoutedFeedForward",
        32,
        light_ff_mult=0.5,
        heavy_ff_mult=2,
        num_heavy_tokens=4,
    ),
    "soft-moe-pytorch/soft_moe": partial(
        layer, "soft_moe_pytorch:SoftMoE", dim=32, seq_len=16, num_experts=2
    ),
    "st-moe-pytorch/moe": partial(
        layer, "st_moe_pytorch:MoE", dim=32, num_experts=4, gating_top_n=2
    ),
    "mixture-of-experts/moe": partial(
        layer, "mixture_of_experts:MoE", dim=32, num_experts=4, hidden_dim=32
    ),
    "gateloop-transformer/simple": partial(
        layer, "gateloop_transformer:SimpleGateLoopLayer", dim=32, use_heinsen=True
    ),
    "g-mlp-pytorch/block": partial(
        layer, "g_mlp_pytorch:gMLPBlock", dim=32, dim_ff=64, seq_len=16, causal=True
    ),
    "reformer-pytorch/lsh_attention": partial(
        layer,
        "reformer_pytorch:LSHSelfAttention",
        dim=32,
        heads=2,
        bucket_size=4,
        n_hashes=2,
        causal=True,
    ),
    "conformer/block": partial(
        layer, "conformer:ConformerBlock", dim=32, dim_head=16, heads=2, conv_kernel_size=5
    ),
    "conformer/conformer": partial(
        layer, "conformer:Conformer", dim=32, depth=1, dim_head=16, heads=2, conv_kernel_size=5
    ),
    "hyper-connections/residual": hyper_connections,
    "entmax/entmax15": lambda: Built(
        Call(new("torch.nn:Linear", 32, 32), lambda module, x: new("entmax:entmax15", module(x))),
        rows(*SEQUENCE),
    ),
    "entmax/sparsemax": lambda: Built(
        Call(new("torch.nn:Linear", 32, 32), lambda module, x: new("entmax:sparsemax", module(x))),
        rows(*SEQUENCE),
    ),
    "rotary-embedding-torch/queries": lambda: Built(
        Call(
            new("rotary_embedding_torch:RotaryEmbedding", dim=16, learned_freq=True),
            lambda module, x: module.rotate_queries_or_keys(x),
        ),
        rows(2, 16, 32),
    ),
    "vector-quantize-pytorch/vq": partial(
        quantiser, "VectorQuantize", dim=32, codebook_size=16, decay=0.8
    ),
    "vector-quantize-pytorch/residual": partial(
        quantiser, "ResidualVQ", dim=32, codebook_size=16, num_quantizers=2
    ),
    "vector-quantize-pytorch/fsq": partial(quantiser, "FSQ", levels=[4, 4, 4], dim=32),
    "vector-quantize-pytorch/lfq": partial(quantiser, "LFQ", codebook_size=16, dim=32),
    "vector-quantize-pytorch/sim_vq": partial(
        quantiser,
        "SimVQ",
        dim=32,
        codebook_size=16,
    ),
    "mambapy/mamba": lambda: Built(
        new("mambapy.mamba:Mamba", new("mambapy.mamba:MambaConfig", d_model=32, n_layers=1)),
        rows(*SEQUENCE),
    ),
    "yet-another-retnet/retention": lambda: Built(
        new("yet_another_retnet.retention:MultiScaleRetention", 32, 4),
        *[rows(*SEQUENCE)] * 3,
    ),
    "xlstm/mlstm": xlstm,
    "ncps/cfc": lambda: Built(new("ncps.torch:CfC", 32, 16), rows(8, 32)),
    "ncps/ltc": lambda: Built(new("ncps.torch:LTC", 8, 8, ode_unfolds=2), rows(4, 8)),
    "snntorch/leaky": lambda: Built(
        Call(
            new("torch.nn:Sequential", new("torch.nn:Linear", 32, 16), new("snntorch:Leaky", 0.9)),
            spikes,
        ),
        rows(32),
    ),
    "pytorch-tcn/tcn": lambda: Built(
        new("pytorch_tcn:TCN", 8, [16, 16], kernel_size=3, dropout=0.0), rows(8, 16)
    ),
    "pykan/kan": lambda: Built(
        new("kan:KAN", width=[4, 5, 2], grid=3, k=3, auto_save=False, save_act=False), rows(4)
    ),
}

"""Models of language, and of words beside something else."""

from __future__ import annotations

from functools import partial

from benchmarks.foreign_models.build import (
    LENGTH,
    VOCABULARY,
    Build,
    Built,
    Call,
    new,
    rows,
    tokens,
)


def x_transformer(attention: dict, **options: object) -> Built:
    layers = new("x_transformers:Decoder", dim=32, depth=2, heads=2, attn_dim_head=16, **attention)
    return Built(
        new(
            "x_transformers:TransformerWrapper",
            num_tokens=VOCABULARY,
            max_seq_len=LENGTH,
            attn_layers=layers,
            **options,
        ),
        tokens(),
    )


def litgpt(**options: object) -> Built:
    config = new(
        "litgpt.config:Config",
        block_size=LENGTH,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        n_layer=2,
        n_embd=32,
        n_head=4,
        **options,
    )
    return Built(new("litgpt.model:GPT", config), tokens())


def torchtune(module: str, name: str, **options: object) -> Built:
    sizes = {"vocab_size": VOCABULARY, "num_layers": 2, "num_heads": 4, "embed_dim": 32}
    return Built(
        new(f"torchtune.models.{module}:{name}", **(sizes | {"max_seq_len": LENGTH} | options)),
        tokens(),
    )


CASES: dict[str, Build] = {
    "x-transformers/gpt": partial(x_transformer, {}),
    "x-transformers/rotary": partial(
        x_transformer, {"rotary_pos_emb": True, "ff_glu": True, "use_rmsnorm": True}
    ),
    "x-transformers/alibi": partial(
        x_transformer, {"alibi_pos_bias": True, "alibi_num_heads": 1, "attn_one_kv_head": True}
    ),
    "x-transformers/flash": partial(x_transformer, {"attn_flash": True, "attn_qk_norm": True}),
    "x-transformers/memory": partial(
        x_transformer, {"rel_pos_bias": True, "attn_gate_values": True}, num_memory_tokens=2
    ),
    "x-transformers/encoder": lambda: Built(
        new(
            "x_transformers:XTransformer",
            dim=32,
            enc_num_tokens=VOCABULARY,
            enc_depth=1,
            enc_heads=2,
            enc_max_seq_len=LENGTH,
            dec_num_tokens=VOCABULARY,
            dec_depth=1,
            dec_heads=2,
            dec_max_seq_len=LENGTH,
        ),
        tokens(),
        tokens(),
    ),
    "x-transformers/autoregressive": lambda: Built(
        new("x_transformers:AutoregressiveWrapper", x_transformer({}).model), tokens()
    ),
    "litgpt/gpt_neox": partial(litgpt, rotary_percentage=0.5, parallel_residual=True),
    "litgpt/llama": partial(
        litgpt,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=64,
        n_query_groups=2,
    ),
    "litgpt/moe": partial(
        litgpt,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMoE",
        intermediate_size=64,
        n_expert=4,
        n_expert_per_token=2,
    ),
    "torchtune/llama3": partial(torchtune, "llama3", "llama3", num_kv_heads=2),
    "torchtune/lora": partial(
        torchtune,
        "llama3",
        "lora_llama3",
        lora_attn_modules=["q_proj", "v_proj"],
        num_kv_heads=2,
        lora_rank=4,
        lora_alpha=8,
    ),
    "torchtune/gemma": partial(
        torchtune, "gemma", "gemma", num_kv_heads=1, head_dim=8, intermediate_dim=64
    ),
    "torchtune/qwen2": partial(
        torchtune, "qwen2", "qwen2", num_kv_heads=2, intermediate_dim=64, tie_word_embeddings=True
    ),
    "torchtune/phi3": partial(torchtune, "phi3", "phi3", num_kv_heads=4, intermediate_dim=64),
    "perceiver-pytorch/perceiver": lambda: Built(
        new(
            "perceiver_pytorch:Perceiver",
            num_freq_bands=2,
            max_freq=8.0,
            depth=2,
            input_channels=3,
            input_axis=2,
            num_latents=4,
            latent_dim=32,
            cross_dim_head=16,
            latent_heads=2,
            latent_dim_head=16,
            num_classes=4,
            weight_tie_layers=True,
        ),
        rows(8, 8, 3),
    ),
    "perceiver-pytorch/io": lambda: Built(
        new(
            "perceiver_pytorch:PerceiverIO",
            dim=16,
            queries_dim=16,
            logits_dim=8,
            depth=1,
            num_latents=4,
            latent_dim=32,
            cross_dim_head=16,
            latent_heads=2,
            latent_dim_head=16,
        ),
        rows(8, 16),
        queries=rows(4, 16),
    ),
    "performer-pytorch/language": lambda: Built(
        new(
            "performer_pytorch:PerformerLM",
            num_tokens=VOCABULARY,
            max_seq_len=LENGTH,
            dim=32,
            depth=1,
            heads=2,
            dim_head=16,
            nb_features=16,
            feature_redraw_interval=None,
            generalized_attention=True,
        ),
        tokens(),
    ),
    "linear-attention-transformer/language": lambda: Built(
        new(
            "linear_attention_transformer:LinearAttentionTransformerLM",
            num_tokens=VOCABULARY,
            dim=32,
            heads=2,
            depth=1,
            max_seq_len=LENGTH,
            n_local_attn_heads=1,
            local_attn_window_size=4,
        ),
        tokens(),
    ),
    "routing-transformer/language": lambda: Built(
        new(
            "routing_transformer:RoutingTransformerLM",
            num_tokens=VOCABULARY,
            dim=32,
            heads=2,
            depth=1,
            max_seq_len=LENGTH,
            window_size=4,
            local_attn_window_size=4,
            n_local_attn_heads=1,
            causal=True,
        ),
        tokens(),
    ),
    "sinkhorn-transformer/language": lambda: Built(
        new(
            "sinkhorn_transformer:SinkhornTransformerLM",
            num_tokens=VOCABULARY,
            dim=32,
            heads=2,
            depth=1,
            max_seq_len=LENGTH,
            bucket_size=4,
        ),
        tokens(),
    ),
    "reformer-pytorch/language": lambda: Built(
        new(
            "reformer_pytorch:ReformerLM",
            num_tokens=VOCABULARY,
            dim=32,
            depth=1,
            max_seq_len=LENGTH,
            heads=2,
            bucket_size=4,
            n_hashes=2,
            causal=True,
            reverse_thres=1000,
        ),
        tokens(),
    ),
    "g-mlp-pytorch/language": lambda: Built(
        new(
            "g_mlp_pytorch:gMLP",
            num_tokens=VOCABULARY,
            dim=32,
            depth=2,
            seq_len=LENGTH,
            causal=True,
        ),
        tokens(),
    ),
    "gateloop-transformer/language": lambda: Built(
        new(
            "gateloop_transformer:Transformer",
            num_tokens=VOCABULARY,
            dim=32,
            depth=1,
            use_gate_looped_attn=True,
        ),
        tokens(),
    ),
    "x-clip/clip": lambda: Built(
        new(
            "x_clip:CLIP",
            dim_text=32,
            dim_image=32,
            dim_latent=16,
            num_text_tokens=VOCABULARY,
            text_enc_depth=1,
            text_seq_len=LENGTH,
            text_heads=2,
            text_dim_head=16,
            visual_enc_depth=1,
            visual_image_size=32,
            visual_patch_size=8,
            visual_heads=2,
            visual_dim_head=16,
            visual_patch_dropout=0.0,
        ),
        tokens(),
        rows(3, 32, 32),
        return_loss=True,
    ),
    "fair-esm/esm2": lambda: Built(
        Call(
            new("esm:ESM2", num_layers=2, embed_dim=32, attention_heads=2, token_dropout=False),
            lambda module, ids: module(ids)["logits"],
        ),
        tokens(16, 24),
    ),
    "yet-another-retnet/retnet": lambda: Built(
        new(
            "yet_another_retnet.retnet:RetNet",
            num_tokens=VOCABULARY,
            d_model=32,
            nhead=4,
            num_layers=1,
            dim_feedforward=64,
            dropout=0.0,
        ),
        tokens(),
        tokens(),
    ),
    "pytorch-crf/crf": lambda: Built(
        new("torchcrf:CRF", 5, batch_first=True), rows(8, 5), tokens(8, 5)
    ),
}

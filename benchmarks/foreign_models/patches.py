"""Nets for pictures and films that see patches: vision transformers and mixers."""

from __future__ import annotations

from functools import partial

from benchmarks.foreign_models.build import Build, Built, images, new, rows

VIT = {"image_size": 32, "patch_size": 8, "num_classes": 4, "dim": 32, "depth": 2}
HEADS = {"heads": 2, "mlp_dim": 64}


def vit(module: str, name: str, *inputs: object, **options: object) -> Built:
    return Built(new(f"vit_pytorch.{module}:{name}", **options), *(inputs or (images(32),)))


CASES: dict[str, Build] = {
    "vit-pytorch/vit": partial(vit, "vit", "ViT", **VIT, **HEADS),
    "vit-pytorch/simple_vit": partial(vit, "simple_vit", "SimpleViT", **VIT, **HEADS),
    "vit-pytorch/deepvit": partial(vit, "deepvit", "DeepViT", **VIT, **HEADS),
    "vit-pytorch/cait": partial(vit, "cait", "CaiT", **VIT, **HEADS, cls_depth=1),
    "vit-pytorch/t2t": partial(
        vit, "t2t", "T2TViT", dim=32, image_size=32, depth=1, heads=2, mlp_dim=64, num_classes=4
    ),
    "vit-pytorch/cct": partial(
        vit,
        "cct",
        "CCT",
        img_size=32,
        embedding_dim=32,
        num_layers=2,
        num_heads=2,
        mlp_ratio=2,
        num_classes=4,
        stochastic_depth_rate=0.0,
    ),
    "vit-pytorch/cross_vit": partial(
        vit,
        "cross_vit",
        "CrossViT",
        image_size=32,
        num_classes=4,
        depth=1,
        sm_dim=16,
        lg_dim=32,
        sm_patch_size=8,
        lg_patch_size=16,
        sm_enc_heads=2,
        lg_enc_heads=2,
        cross_attn_heads=2,
        sm_enc_depth=1,
        lg_enc_depth=1,
    ),
    "vit-pytorch/levit": partial(
        vit,
        "levit",
        "LeViT",
        images(64),
        image_size=64,
        num_classes=4,
        stages=2,
        dim=(16, 32),
        depth=1,
        heads=(2, 2),
        mlp_mult=2,
        dim_key=8,
        dim_value=8,
    ),
    "vit-pytorch/cvt": partial(
        vit,
        "cvt",
        "CvT",
        num_classes=4,
        s1_emb_dim=8,
        s2_emb_dim=16,
        s3_emb_dim=16,
        s3_depth=1,
        s2_depth=1,
    ),
    "vit-pytorch/nest": partial(
        vit,
        "nest",
        "NesT",
        image_size=32,
        patch_size=4,
        dim=16,
        heads=2,
        num_hierarchies=2,
        block_repeats=(1, 1),
        num_classes=4,
    ),
    "vit-pytorch/mobile_vit": partial(
        vit,
        "mobile_vit",
        "MobileViT",
        image_size=(64, 64),
        dims=[16, 24, 32],
        patch_size=(1, 1),
        channels=[8, 8, 16, 16, 24, 24, 32, 32, 32, 32, 48],
        num_classes=4,
    ),
    "vit-pytorch/vivit": partial(
        vit,
        "vivit",
        "ViViT",
        rows(3, 4, 32, 32),
        image_size=32,
        frames=4,
        image_patch_size=8,
        frame_patch_size=2,
        num_classes=4,
        dim=32,
        spatial_depth=1,
        temporal_depth=1,
        heads=2,
        mlp_dim=64,
    ),
    "timesformer-pytorch/timesformer": lambda: Built(
        new(
            "timesformer_pytorch:TimeSformer",
            dim=32,
            image_size=32,
            patch_size=8,
            num_frames=4,
            num_classes=4,
            depth=1,
            heads=2,
            dim_head=16,
        ),
        rows(4, 3, 32, 32),
    ),
    "mlp-mixer-pytorch/mixer": lambda: Built(
        new(
            "mlp_mixer_pytorch:MLPMixer",
            image_size=32,
            channels=3,
            patch_size=8,
            dim=32,
            depth=2,
            num_classes=4,
        ),
        images(32),
    ),
    "bottleneck-transformer-pytorch/bottleneck": lambda: Built(
        new(
            "bottleneck_transformer_pytorch:BottleStack",
            dim=8,
            fmap_size=8,
            dim_out=16,
            proj_factor=2,
            downsample=True,
            heads=2,
            dim_head=4,
            num_layers=2,
        ),
        rows(8, 8, 8),
    ),
    "lambda-networks/lambda_layer": lambda: Built(
        new("lambda_networks:LambdaLayer", dim=8, dim_out=8, r=5, dim_k=4, heads=2, dim_u=2),
        rows(8, 8, 8),
    ),
}

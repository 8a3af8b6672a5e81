"""Models that generate: diffusion, flows, and the nets that they are made of."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.foreign_models.build import BATCH, Build, Built, Call, images, load, new, rows


def steps() -> torch.Tensor:
    return torch.randint(0, 100, (BATCH,))


def diffusers(name: str, *inputs: object, **options: object) -> Built:
    """Return a net of diffusers that is asked for a tuple."""
    return Built(new(f"diffusers:{name}", **options), *inputs, return_dict=False)


def flow(path: str, *args: object, **options: object) -> Built:
    """Return a flow of zuko that is trained by likelihood."""
    return Built(
        Call(new(f"zuko.flows:{path}", *args, **options), lambda m, x: -m().log_prob(x).mean()),
        rows(4),
    )


UNET = {
    "sample_size": 16,
    "in_channels": 3,
    "out_channels": 3,
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}
DIT = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "sample_size": 8}


def autoregressive() -> Built:
    transform = new(
        "nflows.transforms:MaskedAffineAutoregressiveTransform", features=4, hidden_features=16
    )
    net = new(
        "nflows.flows:Flow",
        new(
            "nflows.transforms:CompositeTransform",
            [transform, new("nflows.transforms:ReversePermutation", features=4)],
        ),
        new("nflows.distributions:StandardNormal", [4]),
    )
    return Built(Call(net, lambda m, x: -m.log_prob(x).mean()), rows(4))


def coupling() -> Built:
    layers = []
    for _ in range(2):
        net = new("normflows.nets:MLP", [2, 16, 4], init_zeros=False)
        layers.append(new("normflows.flows:AffineCouplingBlock", net))
        layers.append(new("normflows.flows:Permute", 4, mode="swap"))
    model = new("normflows:NormalizingFlow", new("normflows.distributions:DiagGaussian", 4), layers)
    return Built(Call(model, lambda m, x: m.forward_kld(x)), rows(4))


def invertible() -> Built:
    net = new("FrEIA.framework:SequenceINN", 4)
    for _ in range(2):
        net.append(
            load("FrEIA.modules:AllInOneBlock"),
            subnet_constructor=lambda i, o: nn.Sequential(
                nn.Linear(i, 16), nn.ReLU(), nn.Linear(16, o)
            ),
        )
    return Built(net, rows(4))


CASES: dict[str, Build] = {
    "diffusers/unet": lambda: diffusers(
        "UNet2DModel",
        images(16),
        steps(),
        **UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    ),
    "diffusers/unet_condition": lambda: diffusers(
        "UNet2DConditionModel",
        images(16),
        steps(),
        rows(4, 16),
        **UNET,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ),
    "diffusers/vae": lambda: diffusers(
        "AutoencoderKL",
        images(16),
        in_channels=3,
        out_channels=3,
        latent_channels=2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    "diffusers/vq": lambda: diffusers(
        "VQModel", images(16), num_vq_embeddings=16, block_out_channels=(8,), norm_num_groups=4
    ),
    "diffusers/dit": lambda: diffusers(
        "DiTTransformer2DModel",
        rows(4, 8, 8),
        timestep=steps(),
        class_labels=torch.randint(0, 8, (BATCH,)),
        **DIT,
        patch_size=2,
        in_channels=4,
        num_embeds_ada_norm=8,
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
    ),
    "diffusers/pixart": lambda: diffusers(
        "PixArtTransformer2DModel",
        rows(4, 8, 8),
        encoder_hidden_states=rows(4, 16),
        timestep=steps(),
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        **DIT,
        patch_size=2,
        cross_attention_dim=32,
        caption_channels=16,
        use_additional_conditions=False,
    ),
    "diffusers/sd3": lambda: diffusers(
        "SD3Transformer2DModel",
        rows(4, 8, 8),
        encoder_hidden_states=rows(4, 16),
        pooled_projections=rows(16),
        timestep=steps(),
        **DIT,
        patch_size=2,
        in_channels=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
    ),
    "diffusers/flux": lambda: diffusers(
        "FluxTransformer2DModel",
        rows(16, 8),
        encoder_hidden_states=rows(4, 16),
        pooled_projections=rows(16),
        timestep=rows().sigmoid(),
        img_ids=torch.randint(0, 4, (16, 3)).float(),
        txt_ids=torch.zeros(4, 3),
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
    ),
    "diffusers/unet_1d": lambda: diffusers(
        "UNet1DModel",
        rows(2, 16),
        steps(),
        sample_size=16,
        in_channels=2,
        out_channels=2,
        extra_in_channels=16,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
        up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
        mid_block_type="UNetMidBlock1D",
        layers_per_block=1,
    ),
    "diffusers/controlnet": lambda: diffusers(
        "ControlNetModel",
        images(16),
        steps(),
        rows(4, 16),
        images(32),
        in_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        conditioning_embedding_out_channels=(8, 8),
    ),
    "denoising-diffusion-pytorch/unet": lambda: Built(
        new(
            "denoising_diffusion_pytorch:Unet",
            dim=8,
            dim_mults=(1, 2),
            flash_attn=False,
            attn_dim_head=8,
            attn_heads=2,
        ),
        images(16),
        steps(),
    ),
    "denoising-diffusion-pytorch/unet_1d": lambda: Built(
        new("denoising_diffusion_pytorch:Unet1D", dim=8, dim_mults=(1, 2), channels=2),
        rows(2, 16),
        steps(),
    ),
    "denoising-diffusion-pytorch/gaussian": lambda: Built(
        new(
            "denoising_diffusion_pytorch:GaussianDiffusion",
            new("denoising_diffusion_pytorch:Unet", dim=8, dim_mults=(1, 2), flash_attn=False),
            image_size=16,
            timesteps=20,
        ),
        images(16).sigmoid(),
    ),
    "imagen-pytorch/unet": lambda: Built(
        new(
            "imagen_pytorch:Unet",
            dim=8,
            dim_mults=(1, 2),
            num_resnet_blocks=1,
            layer_attns=(False, True),
            layer_cross_attns=(False, True),
            attn_heads=2,
            attn_dim_head=8,
            text_embed_dim=16,
            cond_drop_prob=0.0,
        ),
        images(16),
        rows(),
        text_embeds=rows(4, 16),
        cond_drop_prob=0.0,
    ),
    "dalle2-pytorch/prior": lambda: Built(
        new(
            "dalle2_pytorch:DiffusionPriorNetwork",
            dim=16,
            depth=1,
            heads=2,
            dim_head=8,
            num_timesteps=20,
        ),
        rows(16),
        steps() % 20,
        text_embed=rows(16),
        text_encodings=rows(4, 16),
    ),
    "zuko/nsf": lambda: flow("NSF", 4, transforms=2, hidden_features=(16, 16)),
    "zuko/maf": lambda: flow("MAF", 4, transforms=2, hidden_features=(16, 16)),
    "zuko/nice": lambda: flow("NICE", 4, transforms=2, hidden_features=(16, 16)),
    "nflows/autoregressive": autoregressive,
    "normflows/realnvp": coupling,
    "FrEIA/glow": invertible,
}

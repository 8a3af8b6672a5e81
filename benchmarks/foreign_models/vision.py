"""Nets for pictures, films and volumes: classifiers, segmentation, contrastive pairs."""

from __future__ import annotations

from functools import partial

from torch import nn

from benchmarks.foreign_models.build import Build, Built, images, load, new, rows, tokens

TIMM: dict[str, dict] = {
    "vit": {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "swin": {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16}
    | {"depths": (2, 2), "num_heads": (2, 4)},
    "convnext": {"depths": (1, 1, 1, 1), "dims": (8, 16, 32, 64)},
    "mixer": {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 32},
    "poolformer": {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
    "cait": {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "beit": {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "pvt": {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4)},
    "crossvit": {"img_size": 60, "img_scale": (1.0, 0.9), "patch_size": (12, 18)}
    | {"embed_dim": (16, 32), "depth": ((1, 2, 0),), "num_heads": (2, 2)},
    "xcit": {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
}
TIMM_CLASSES = {
    "vit": "timm.models.vision_transformer:VisionTransformer",
    "swin": "timm.models.swin_transformer:SwinTransformer",
    "convnext": "timm.models.convnext:ConvNeXt",
    "mixer": "timm.models.mlp_mixer:MlpMixer",
    "poolformer": "timm.models.metaformer:MetaFormer",
    "cait": "timm.models.cait:Cait",
    "beit": "timm.models.beit:Beit",
    "pvt": "timm.models.pvt_v2:PyramidVisionTransformerV2",
    "crossvit": "timm.models.crossvit:CrossVit",
    "xcit": "timm.models.xcit:Xcit",
}
TIMM_NAMES = {  # of its registry, small as they are
    "efficientnet": "test_efficientnet",
    "byobnet": "test_byobnet",
    "mobilenet": "mobilenetv3_small_050",
    "ghostnet": "ghostnet_050",
    "resnet": "resnet10t",
}


def timm(name: str) -> Built:
    size = TIMM[name].get("img_size", 32)
    return Built(new(TIMM_CLASSES[name], num_classes=4, **TIMM[name]), images(size))


def timm_named(name: str) -> Built:
    model = new("timm:create_model", name, num_classes=4, drop_rate=0.0)
    return Built(model, images(64))


def torchvision(name: str, size: int = 32, **options: object) -> Built:
    model = new(f"torchvision.models:{name}", weights=None, num_classes=4, **options)
    return Built(model, images(size))


def segmentation(name: str, **options: object) -> Built:
    model = new(
        f"segmentation_models_pytorch:{name}",
        "resnet18",
        encoder_weights=None,
        encoder_depth=3,
        classes=2,
        **options,
    )
    return Built(model, images(32))


def monai(name: str, *inputs: object, **options: object) -> Built:
    return Built(new(f"monai.networks.nets:{name}", **options), *(inputs or (images(32, 1),)))


def clip(vision: object, **options: object) -> Built:
    text = {"context_length": 8, "vocab_size": 32, "width": 32, "heads": 2, "layers": 2}
    model = new("open_clip.model:CLIP", embed_dim=16, vision_cfg=vision, text_cfg=text, **options)
    return Built(model, images(32), tokens(8))


def lightly(head: str, *sizes: int) -> Built:
    backbone = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return Built(
        nn.Sequential(backbone, new(f"lightly.models.modules.heads:{head}", *sizes)), images()
    )


def sam() -> Built:
    encoder = new(
        "segment_anything.modeling:ImageEncoderViT",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=2,
        out_chans=16,
        use_rel_pos=True,
        window_size=2,
        global_attn_indexes=(1,),
    )
    return Built(encoder, images(32))


def effdet() -> Built:
    config = new("effdet:get_efficientdet_config", "efficientdet_d0")
    config.image_size = (64, 64)
    config.fpn_channels, config.fpn_cell_repeats, config.box_class_repeats = 16, 1, 1
    config.num_classes = 4
    return Built(new("effdet:EfficientDet", config, pretrained_backbone=False), images(64))


def unet(name: str, **options: object) -> Built:
    model = new(
        f"dynamic_network_architectures.architectures.unet:{name}",
        input_channels=1,
        n_stages=3,
        features_per_stage=(4, 8, 16),
        conv_op=nn.Conv2d,
        kernel_sizes=3,
        strides=(1, 2, 2),
        num_classes=2,
        n_conv_per_stage_decoder=1,
        norm_op=nn.InstanceNorm2d,
        norm_op_kwargs={"affine": True},
        nonlin=nn.LeakyReLU,
        **options,
    )
    return Built(model, images(16, 1))


CASES: dict[str, Build] = {
    **{f"timm/{name}": partial(timm, name) for name in TIMM},
    **{f"timm/{name}": partial(timm_named, full) for name, full in TIMM_NAMES.items()},
    "torchvision/resnet18": partial(torchvision, "resnet18"),
    "torchvision/mobilenet_v3": partial(torchvision, "mobilenet_v3_small", 64, width_mult=0.25),
    "torchvision/shufflenet": partial(torchvision, "shufflenet_v2_x0_5", 64),
    "torchvision/squeezenet": partial(torchvision, "squeezenet1_1", 64, dropout=0.0),
    "torchvision/vit": lambda: Built(
        new("torchvision.models:VisionTransformer", 32, 8, 2, 2, 32, 64, num_classes=4), images()
    ),
    "torchvision/swin": lambda: Built(
        new(
            "torchvision.models:SwinTransformer",
            [2, 2],
            16,
            [1, 1],
            [2, 4],
            [4, 4],
            stochastic_depth_prob=0.0,
            num_classes=4,
        ),
        images(),
    ),
    "torchvision/maxvit": lambda: Built(
        new(
            "torchvision.models:MaxVit",
            input_size=(32, 32),
            stem_channels=8,
            partition_size=2,
            block_channels=[8, 16],
            block_layers=[1, 1],
            head_dim=4,
            stochastic_depth_prob=0.0,
            num_classes=4,
        ),
        images(),
    ),
    "torchvision/mc3": lambda: Built(
        new("torchvision.models.video:mc3_18", weights=None, num_classes=4), rows(3, 4, 16, 16)
    ),
    "torchvision/lraspp": lambda: Built(
        new(
            "torchvision.models.segmentation:lraspp_mobilenet_v3_large",
            weights=None,
            weights_backbone=None,
            num_classes=4,
        ),
        images(32),
    ),
    "segmentation-models-pytorch/unet": partial(segmentation, "Unet", decoder_channels=(32, 16, 8)),
    "segmentation-models-pytorch/fpn": lambda: Built(
        new("segmentation_models_pytorch:FPN", "resnet18", encoder_weights=None, classes=2),
        images(32),
    ),
    "segmentation-models-pytorch/pspnet": partial(segmentation, "PSPNet"),
    "segmentation-models-pytorch/linknet": partial(segmentation, "Linknet"),
    "monai/unet": partial(
        monai,
        "UNet",
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        channels=(4, 8, 16),
        strides=(2, 2),
        num_res_units=1,
    ),
    "monai/unetr": partial(
        monai,
        "UNETR",
        in_channels=1,
        out_channels=2,
        img_size=(32, 32),
        feature_size=4,
        hidden_size=24,
        mlp_dim=32,
        num_heads=2,
        spatial_dims=2,
    ),
    "monai/swin_unetr": partial(
        monai,
        "SwinUNETR",
        images(64, 1),
        in_channels=1,
        out_channels=2,
        feature_size=12,
        depths=(1, 1, 1, 1),
        num_heads=(1, 1, 2, 2),
        spatial_dims=2,
    ),
    "monai/segresnet": partial(
        monai, "SegResNet", spatial_dims=2, init_filters=8, blocks_down=(1, 1), blocks_up=(1,)
    ),
    "monai/dynunet": partial(
        monai,
        "DynUNet",
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[4, 8, 16],
    ),
    "monai/densenet": partial(
        monai,
        "DenseNet",
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        init_features=8,
        growth_rate=4,
        block_config=(2, 2),
    ),
    "monai/autoencoder": partial(
        monai,
        "AutoEncoder",
        spatial_dims=2,
        in_channels=1,
        out_channels=1,
        channels=(4, 8),
        strides=(2, 2),
    ),
    "open_clip_torch/clip": partial(
        clip, {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16}
    ),
    "open_clip_torch/resnet": partial(
        clip, {"image_size": 32, "width": 8, "layers": (1, 1, 1, 1), "head_width": 16}
    ),
    "efficientnet-pytorch/b0": lambda: Built(
        new(
            "efficientnet_pytorch:EfficientNet.from_name",
            "efficientnet-b0",
            depth_coefficient=0.2,
            width_coefficient=0.2,
            num_classes=4,
            image_size=32,
            drop_connect_rate=0.0,
            dropout_rate=0.0,
        ),
        images(32),
    ),
    "pretrainedmodels/senet": lambda: Built(
        new(
            "pretrainedmodels.models.senet:SENet",
            load("pretrainedmodels.models.senet:SEResNeXtBottleneck"),
            [1, 1, 1, 1],
            groups=2,
            reduction=16,
            dropout_p=None,
            inplanes=64,
            input_3x3=False,
            downsample_kernel_size=1,
            downsample_padding=0,
            num_classes=4,
        ),
        images(224),
    ),
    "pytorchcv/pyramidnet": lambda: Built(
        new(
            "pytorchcv.models.pyramidnet_cifar:CIFARPyramidNet",
            [[18], [20]],
            16,
            False,
            num_classes=4,
        ),
        images(16),
    ),
    "kornia/vit": lambda: Built(
        new("kornia.models.vit:VisionTransformer", 32, 8, 3, 32, 2, 2), images(32)
    ),
    "lightly/simclr": partial(lightly, "SimCLRProjectionHead", 8, 16, 8),
    "lightly/dino": partial(lightly, "DINOProjectionHead", 8, 16, 8, 16),
    "lightly/swav": partial(lightly, "SwaVProjectionHead", 8, 16, 8),
    "segment-anything/encoder": sam,
    "effdet/efficientdet": effdet,
    "dynamic-network-architectures/plain_unet": partial(unet, "PlainConvUNet", n_conv_per_stage=1),
    "dynamic-network-architectures/residual_unet": partial(
        unet, "ResidualEncoderUNet", n_blocks_per_stage=1
    ),
    "torchxrayvision/densenet": lambda: Built(
        new(
            "torchxrayvision.models:DenseNet",
            growth_rate=4,
            block_config=(2, 2),
            num_init_features=8,
            num_classes=4,
            apply_sigmoid=True,
        ),
        images(32, 1),
    ),
    "compressai/factorized": lambda: Built(
        new("compressai.models:FactorizedPrior", 8, 16), images(64)
    ),
    "pytorchvideo/x3d": lambda: Built(
        new(
            "pytorchvideo.models.x3d:create_x3d",
            input_clip_length=4,
            input_crop_size=64,
            model_num_class=4,
            width_factor=1.0,
            depth_factor=0.4,
            dropout_rate=0.0,
        ),
        rows(3, 4, 64, 64),
    ),
    "spikingjelly/spiking_net": lambda: Built(
        nn.Sequential(
            nn.Conv2d(3, 8, 3),
            new("spikingjelly.activation_based.neuron:LIFNode"),
            nn.Flatten(),
            nn.Linear(8 * 14 * 14, 4),
        ),
        images(16),
    ),
}

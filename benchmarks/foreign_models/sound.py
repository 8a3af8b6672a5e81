"""Nets for waves and spectra: recognition, separation, codecs."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.foreign_models.build import BATCH, Build, Built, Call, new, rows


def lengths(length: int) -> torch.Tensor:
    return torch.full((BATCH,), length)


def brain(path: str, *args: object, **options: object) -> Built:
    """Return a module of speechbrain that is called with a sequence of features."""
    return Built(new(f"speechbrain.{path}", *args, **options), rows(16, 32))


def braindecode(name: str, **options: object) -> Built:
    sizes = {"n_chans": 4, "n_outputs": 2, "n_times": 256, "sfreq": 64}
    return Built(new(f"braindecode.models:{name}", **(sizes | options)), rows(4, 256))


CASES: dict[str, Build] = {
    "torchaudio/conformer": lambda: Built(
        new("torchaudio.models:Conformer", 32, 2, 64, 2, 5), rows(16, 32), lengths(16)
    ),
    "torchaudio/wav2vec2": lambda: Built(
        new(
            "torchaudio.models:wav2vec2_model",
            extractor_mode="group_norm",
            extractor_conv_layer_config=[(8, 10, 5), (8, 3, 2)],
            extractor_conv_bias=False,
            encoder_embed_dim=32,
            encoder_projection_dropout=0.0,
            encoder_pos_conv_kernel=8,
            encoder_pos_conv_groups=2,
            encoder_num_layers=2,
            encoder_num_heads=2,
            encoder_attention_dropout=0.0,
            encoder_ff_interm_features=64,
            encoder_ff_interm_dropout=0.0,
            encoder_dropout=0.0,
            encoder_layer_norm_first=False,
            encoder_layer_drop=0.0,
            aux_num_out=8,
        ),
        rows(400),
    ),
    "torchaudio/conv_tasnet": lambda: Built(
        new("torchaudio.models:ConvTasNet", 2, 8, 16, 3, 16, 16, 2, 1), rows(1, 128)
    ),
    "torchaudio/deepspeech": lambda: Built(
        new("torchaudio.models:DeepSpeech", 8, n_hidden=16, n_class=8), rows(1, 12, 8)
    ),
    "torchaudio/wavernn": lambda: Built(
        new(
            "torchaudio.models:WaveRNN",
            upsample_scales=[2, 2],
            n_classes=8,
            hop_length=4,
            n_res_block=1,
            n_rnn=16,
            n_fc=16,
            kernel_size=3,
            n_freq=8,
            n_hidden=8,
            n_output=8,
        ),
        rows(1, 16),
        rows(1, 8, 6),
    ),
    "torchaudio/emformer": lambda: Built(
        new("torchaudio.models:Emformer", 32, 2, 64, 1, 4), rows(16, 32), lengths(16)
    ),
    "torchaudio/hdemucs": lambda: Built(
        new(
            "torchaudio.models:HDemucs",
            ["a", "b"],
            audio_channels=1,
            channels=4,
            nfft=256,
            depth=3,
        ),
        rows(1, 2048),
    ),
    "speechbrain/conformer": lambda: Built(
        Call(
            new(
                "speechbrain.lobes.models.transformer.Conformer:ConformerEncoder",
                num_layers=1,
                d_ffn=64,
                nhead=2,
                d_model=32,
                dropout=0.0,
                kernel_size=5,
            ),
            lambda module, x, places: module(x, pos_embs=places)[0],
        ),
        rows(16, 32),
        torch.randn(1, 31, 32),
    ),
    "speechbrain/transformer": lambda: Built(
        Call(
            new(
                "speechbrain.lobes.models.transformer.Transformer:TransformerEncoder",
                num_layers=2,
                nhead=2,
                d_ffn=64,
                d_model=32,
                dropout=0.0,
            ),
            lambda module, x: module(x)[0],
        ),
        rows(16, 32),
    ),
    "speechbrain/ecapa_tdnn": lambda: brain(
        "lobes.models.ECAPA_TDNN:ECAPA_TDNN",
        32,
        lin_neurons=8,
        channels=[16, 16, 16],
        kernel_sizes=[3, 3, 1],
        dilations=[1, 2, 1],
        attention_channels=8,
        groups=[1, 1, 1],
        res2net_scale=4,
        se_channels=8,
    ),
    "speechbrain/crdnn": lambda: brain(
        "lobes.models.CRDNN:CRDNN",
        input_size=32,
        cnn_blocks=1,
        cnn_channels=(8,),
        rnn_layers=1,
        rnn_neurons=16,
        dnn_blocks=1,
        dnn_neurons=16,
        dropout=0.0,
        time_pooling=True,
    ),
    "speechbrain/ligru": lambda: brain(
        "nnet.RNN:LiGRU", hidden_size=16, input_shape=(4, 16, 32), normalization="layernorm"
    ),
    "speechbrain/mask_net": lambda: Built(
        new(
            "speechbrain.lobes.models.conv_tasnet:MaskNet",
            16,
            16,
            16,
            3,
            2,
            1,
            2,
            "gLN",
            False,
            "relu",
        ),
        rows(16, 12),
    ),
    "speechbrain/features": lambda: Built(
        nn.Sequential(
            new("speechbrain.lobes.features:Fbank", n_mels=8, n_fft=128, sample_rate=4000),
            nn.Linear(8, 4),
        ),
        rows(400),
    ),
    "demucs/demucs": lambda: Built(
        new(
            "demucs.demucs:Demucs",
            ["a", "b"],
            audio_channels=1,
            channels=4,
            depth=2,
            lstm_layers=1,
            resample=False,
        ),
        rows(1, 256),
    ),
    "encodec/seanet": lambda: Built(
        nn.Sequential(
            new("encodec.modules:SEANetEncoder", dimension=8, n_filters=4, ratios=[2, 2], lstm=1),
            new("encodec.modules:SEANetDecoder", dimension=8, n_filters=4, ratios=[2, 2], lstm=1),
        ),
        rows(1, 64),
    ),
    "openunmix/open_unmix": lambda: Built(
        new("openunmix.model:OpenUnmix", nb_bins=17, nb_channels=1, hidden_size=8, nb_layers=1),
        rows(1, 17, 8).abs(),
    ),
    "braindecode/eegnet": lambda: braindecode("EEGNet"),
    "braindecode/shallow": lambda: braindecode("ShallowFBCSPNet", final_conv_length="auto"),
    "braindecode/conformer": lambda: braindecode(
        "EEGConformer", num_layers=1, num_heads=2, n_filters_time=8
    ),
    "braindecode/atcnet": lambda: braindecode("ATCNet", input_window_seconds=4.0),
    "conformer/convolution": lambda: Built(
        new("conformer.conformer:ConformerConvModule", dim=32, causal=True, kernel_size=5),
        rows(16, 32),
    ),
}

"""A small zoo: tiny seeded models in float64, each with inputs and a loss.

>>> case = gpt(heads=4, batch=6, fused=True)
>>> loss = case.loss(case.run())

The transformers cases are precise: the places where that library casts to float32 whatever the
model's dtype (logits before the loss, the root-mean-square norm) stay in float64, so that results
can be compared to 1e-9. `precise=False` keeps the library's own code.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100


@dataclass(frozen=True)
class Case:
    """A model with one global batch. The first output is the loss."""

    name: str
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Any:
        return self.model(*self.args, **self.kwargs)

    def loss(self, outputs: Any) -> Tensor:
        """The scalar to differentiate, from what the model returned."""
        if isinstance(outputs, Tensor):
            return outputs
        return outputs["loss"] if isinstance(outputs, dict) else outputs[0]

    def fresh(self) -> Case:
        """The same case with its own copy of the model and no gradients."""
        model = copy.deepcopy(self.model)
        model.zero_grad(set_to_none=True)
        return Case(self.name, model, self.args, self.kwargs)


def _case(name: str, make: Callable[[], nn.Module], args: tuple = (), **kwargs: Any) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().double().train()
        # Freshly made biases are zero and norms one: tests would not see them missing.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return Case(name, model, args, kwargs)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _ids(batch: int, sequence: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, sequence), generator=_random(1))


def _labels(ids: Tensor) -> Tensor:
    """The ids with a few positions ignored, unevenly over the batch."""
    labels = ids.clone()
    labels[0, : ids.shape[1] // 2] = IGNORED
    labels[-1, -1] = IGNORED
    return labels


def padded(case: Case, side: str = "right") -> Case:
    """The case with sentences of several lengths: its mask says what is padding."""
    mask = torch.ones_like(case.kwargs["input_ids"])
    for row, count in enumerate((0, 3, 1, 2) * (len(mask) // 4)):
        places = slice(-count, None) if side == "right" else slice(0, count)
        mask[row, places if count else slice(0)] = 0
    labels = case.kwargs["labels"].masked_fill(mask == 0, IGNORED)
    kwargs = {**case.kwargs, "attention_mask": mask, "labels": labels}
    return Case(f"{case.name}-padded", case.model, case.args, kwargs)


class MLP(nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int, layers: int) -> None:
        super().__init__()
        sizes = [inputs] + [hidden] * (layers - 1)
        self.layers = nn.ModuleList(nn.Linear(m, n) for m, n in itertools.pairwise(sizes))
        self.head = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.mse_loss(self.head(x), target)


def mlp(
    *, batch: int = 8, inputs: int = 16, hidden: int = 32, outputs: int = 8, layers: int = 3
) -> Case:
    """Linear layers, relu and a mean squared error."""
    x = torch.randn(batch, inputs, generator=_random(1), dtype=torch.float64)
    target = torch.randn(batch, outputs, generator=_random(2), dtype=torch.float64)
    return _case("mlp", lambda: MLP(inputs, hidden, outputs, layers), (x, target))


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm (three in a bottleneck), and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        width = outputs // 4 if bottleneck else outputs
        if bottleneck:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        else:
            shapes = [(inputs, outputs, 3, stride), (outputs, outputs, 3, 1)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(m, n, kernel, step, padding=kernel // 2, bias=False)
            for m, n, kernel, step in shapes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for _, n, _, _ in shapes)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.shortcut(x)
        for index, (convolution, norm) in enumerate(zip(self.convolutions, self.norms)):
            x = norm(convolution(x))
            if index < len(self.norms) - 1:
                x = self.relu(x)
        x += shortcut
        return self.relu(x)


class ResNet(nn.Module):
    def __init__(self, width: int, classes: int, blocks: int, bottleneck: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=True)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = [width * 2**index for index in range(blocks)]
        self.blocks = nn.Sequential(
            *(
                ResidualBlock(m, n, 1 if index == 0 else 2, bottleneck)
                for index, (m, n) in enumerate(zip([width, *channels], channels))
            )
        )
        self.average = nn.AdaptiveAvgPool2d((1, 1))
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        x = self.pool(self.relu(self.norm(self.stem(images))))
        x = torch.flatten(self.average(self.blocks(x)), 1)
        return F.cross_entropy(self.head(x), target)


def resnet(
    *,
    batch: int = 8,
    width: int = 8,
    size: int = 8,
    classes: int = 10,
    blocks: int = 2,
    bottleneck: bool = False,
) -> Case:
    """A residual network with batch norm, max pooling and adaptive pooling."""
    images = torch.randn(batch, 3, size, size, generator=_random(1), dtype=torch.float64)
    target = torch.randint(0, classes, (batch,), generator=_random(2))
    name = "resnet-bottleneck" if bottleneck else "resnet"
    return _case(name, lambda: ResNet(width, classes, blocks, bottleneck), (images, target))


class Attention(nn.Module):
    """Causal attention; `fused` projects to heads x 3 x width in one linear layer."""

    attend = staticmethod(F.scaled_dot_product_attention)  # to be annotated

    def __init__(self, hidden: int, heads: int, fused: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.fused, self.dropout = heads, fused, dropout
        if fused:
            self.qkv = nn.Linear(hidden, 3 * hidden)
        else:
            self.q = nn.Linear(hidden, hidden)
            self.k = nn.Linear(hidden, hidden)
            self.v = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        width = hidden // self.heads
        if self.fused:
            qkv = self.qkv(x).view(batch, sequence, self.heads, 3, width)
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        else:
            q, k, v = (
                layer(x).view(batch, sequence, self.heads, width).transpose(1, 2)
                for layer in (self.q, self.k, self.v)
            )
        dropout = self.dropout if self.training else 0.0
        x = self.attend(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(x.transpose(1, 2).reshape(batch, sequence, hidden))


class GPTBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, fused: bool, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, fused, dropout)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(
        self,
        vocabulary: int,
        positions: int,
        hidden: int,
        heads: int,
        layers: int,
        tied: bool,
        fused: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(GPTBlock(hidden, heads, fused, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.3)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(places))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        loss = F.cross_entropy(
            logits.view(-1, logits.shape[-1]), shifted.reshape(-1), ignore_index=IGNORED
        )
        return loss, logits


def gpt(
    *,
    batch: int = 8,
    sequence: int = 8,
    vocabulary: int = 61,
    hidden: int = 32,
    heads: int = 4,
    layers: int = 2,
    tied: bool = True,
    fused: bool = False,
    dropout: float = 0.0,
) -> Case:
    """A small GPT: pre-norm blocks, causal attention, cross-entropy that ignores some targets."""
    ids = _ids(batch, sequence, vocabulary)
    name = "gpt" + ("-fused" if fused else "") + ("" if tied else "-untied")
    shape = (vocabulary, sequence, hidden, heads, layers)
    return _case(name, lambda: GPT(*shape, tied, fused, dropout), (ids, _labels(ids)))


def gpt2(
    *,
    batch: int = 8,
    sequence: int = 8,
    vocabulary: int = 61,
    hidden: int = 32,
    heads: int = 4,
    layers: int = 2,
    precise: bool = True,
    dropout: float = 0.0,
) -> Case:
    """GPT-2 of transformers: fused projections as x @ w, tied head."""
    transformers = _transformers()
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=sequence,
        n_embd=hidden,
        n_head=heads,
        n_layer=layers,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    ids = _ids(batch, sequence, vocabulary)
    return _case(
        "gpt2",
        lambda: made_precise(transformers.GPT2LMHeadModel(config), precise),
        input_ids=ids,
        labels=_labels(ids),
    )


def llama(
    *,
    batch: int = 8,
    sequence: int = 8,
    vocabulary: int = 61,
    hidden: int = 32,
    heads: int = 4,
    key_heads: int = 2,
    layers: int = 2,
    precise: bool = True,
    dropout: float = 0.0,
) -> Case:
    """Llama of transformers: rotary positions, grouped keys and values, gated feed-forward."""
    transformers = _transformers()
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=max(sequence, 32),
        attention_dropout=dropout,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    ids = _ids(batch, sequence, vocabulary)
    return _case(
        "llama",
        lambda: made_precise(transformers.LlamaForCausalLM(config), precise),
        input_ids=ids,
        labels=_labels(ids),
    )


def bert(
    *,
    batch: int = 8,
    sequence: int = 8,
    vocabulary: int = 61,
    hidden: int = 32,
    heads: int = 4,
    layers: int = 2,
    dropout: float = 0.0,
) -> Case:
    """BERT of transformers with its masked language model head."""
    transformers = _transformers()
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=2 * hidden,
        max_position_embeddings=max(sequence, 32),
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        use_cache=False,
    )
    ids = _ids(batch, sequence, vocabulary)
    return _case(
        "bert",
        lambda: transformers.BertForMaskedLM(config),
        input_ids=ids,
        labels=_labels(ids),
    )


def t5(
    *,
    batch: int = 4,
    sequence: int = 8,
    vocabulary: int = 61,
    hidden: int = 32,
    heads: int = 4,
    layers: int = 1,
    dropout: float = 0.0,
) -> Case:
    """T5 of transformers: an encoder and a decoder, with positions as a bias of attention."""
    transformers = _transformers()
    config = transformers.T5Config(
        vocab_size=vocabulary,
        d_model=hidden,
        d_kv=hidden // heads,
        d_ff=2 * hidden,
        num_layers=layers,
        num_heads=heads,
        dropout_rate=dropout,
        use_cache=False,
        decoder_start_token_id=0,
    )
    ids = _ids(batch, sequence, vocabulary)
    return _case(
        "t5",
        lambda: transformers.T5ForConditionalGeneration(config),
        input_ids=ids,
        labels=_labels(ids),
    )


def vit(
    *,
    batch: int = 8,
    size: int = 16,
    patch: int = 4,
    classes: int = 10,
    hidden: int = 32,
    heads: int = 4,
    layers: int = 2,
    dropout: float = 0.0,
) -> Case:
    """The vision transformer of transformers with its classification head."""
    transformers = _transformers()
    config = transformers.ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=2 * hidden,
        image_size=size,
        patch_size=patch,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=classes,
    )
    pixels = torch.randn(batch, 3, size, size, generator=_random(1), dtype=torch.float64)
    target = torch.randint(0, classes, (batch,), generator=_random(2))
    return _case(
        "vit",
        lambda: transformers.ViTForImageClassification(config),
        pixel_values=pixels,
        labels=target,
    )


ZOO: dict[str, Callable[..., Case]] = {
    "mlp": mlp,
    "resnet": resnet,
    "gpt": gpt,
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vit": vit,
}


@cache
def shared(name: str, **sizes: Any) -> Case:
    """One case that all who ask read, and none changes or annotates."""
    return ZOO[name](**sizes)


def _transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers


class RootMeanSquareNorm(nn.Module):
    """The norm of Llama in the dtype of its input."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.epsilon))


def _next_token_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: object) -> Tensor:
    shifted = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, vocab_size), shifted.view(-1), ignore_index=IGNORED)


def made_precise(model: Any, precise: bool = True) -> nn.Module:
    if precise:
        model.loss_function = _next_token_loss
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child).__name__ == "LlamaRMSNorm":
                    norm = RootMeanSquareNorm(child.weight, child.variance_epsilon)
                    setattr(parent, name, norm)
    return model

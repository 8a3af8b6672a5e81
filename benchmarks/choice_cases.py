"""The cases of `benchmarks/choices.py`: models on machines, with the templates of experts.

Among the templates are published configurations, and what was found by hand. They are written down
before the planner is asked, and none is left out for being fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import autopar as ap
from benchmarks import choice_models as models
from benchmarks.choice_templates import Template, ways
from tests.models import Case


@dataclass(frozen=True)
class ChoiceCase:
    """A model on some machines, and the ways in which experts would run it."""

    words: str  # "Mixtral 8x7B on 64 H100"
    make: Callable[..., Case]  # for a batch
    batch: int  # rows of a step
    machines: Callable[[], ap.Cluster]
    ways: Callable[[int], Iterator[Template]]  # for a batch

    @property
    def name(self) -> str:
        """Return the name for the command line."""
        return re.sub("[^a-z0-9]+", "-", self.words.lower().replace(",", ""))

    @property
    def templates(self) -> list[Template]:
        """Return the ways of experts, each once."""
        return list(dict.fromkeys(self.ways(self.batch)))

    def build(self) -> Case:
        """Return the model with its batch, on the meta device."""
        return self.make(batch=self.batch)


def h100(devices: int) -> Callable[[], ap.Cluster]:
    return lambda: ap.Cluster.preset("dgx-h100", nodes=devices // 8)


def a100(devices: int) -> Callable[[], ap.Cluster]:
    return lambda: ap.Cluster.preset("dgx-a100", nodes=devices // 8)


def mixed() -> ap.Cluster:
    """Three nodes of H100, and one of A100, on the network of the slower kind."""
    fast, slow = ap.Cluster.preset("dgx-h100", nodes=3), ap.Cluster.preset("dgx-a100")
    return ap.Cluster((*fast.nodes, *slow.nodes), slow.network, "mixed")


def mixtral(batch: int) -> Iterator[Template]:
    savings = ["zero2 none", "zero2 selective", "zero2 auto", "zero3 selective", "zero3 full"]
    yield from ways(batch, ["dp8 ep8"], savings, rows=(1, 2, 4))
    yield from ways(batch, ["dp8 ep8"], ["zero1 selective", "zero2 selective 256MiB"], rows=(1, 2))
    yield from ways(batch, ["dp4 ep8 tp2"], ["zero2 none", "zero2 selective"], rows=(1, 2))
    yield from ways(batch, ["dp8 tp8", "dp16 tp4"], ["zero1 selective", "zero3 full"], rows=(2,))
    yield from ways(batch, ["pp2 dp4 ep8", "pp4 dp2 ep8"], ["zero1 none", "zero1 selective"])
    yield from ways(batch, ["pp4 dp2 ep8"], ["zero1 selective"], ["interleaved-2", "zb-h1"])
    yield from ways(batch, ["dp64"], ["zero3 selective", "zero3 full"], rows=(1, 4))


def llama3_70b(batch: int) -> Iterator[Template]:
    savings = ["zero3 selective", "zero3 full", "zero3 auto"]
    yield from ways(batch, ["dp64 tp4"], savings, rows=(1, 2, 4))
    yield from ways(batch, ["dp32 tp8"], [*savings, "zero1 full"], rows=(1, 2))
    yield from ways(batch, ["dp64 tp4"], ["zero2 full", "zero3 full 512MiB"], rows=(2,))
    yield from ways(batch, ["dp256", "dp128 tp2"], ["zero3 full", "zero3 full 512MiB"], rows=(1, 2))
    savings = ["zero1 none", "zero1 selective", "zero1 full"]
    yield from ways(batch, ["pp4 dp8 tp8"], savings, ["1f1b", "interleaved-5"])
    yield from ways(batch, ["pp8 dp4 tp8", "pp4 dp16 tp4", "pp2 dp16 tp8"], savings[:2])
    yield from ways(batch, ["pp8 dp4 tp8"], savings[1:2], ["interleaved-2", "zb-v"])


def gpt_1t(batch: int) -> Iterator[Template]:
    savings = ["zero1 selective", "zero1 full", "zero1 auto"]
    yield from ways(batch, ["pp64 dp8 tp8", "pp32 dp16 tp8", "pp16 dp32 tp8"], savings)
    yield from ways(batch, ["pp32 dp16 tp8"], savings[:2], ["interleaved-2", "interleaved-4"])
    yield from ways(batch, ["pp16 dp32 tp8"], savings[:2], ["interleaved-4", "zb-h1"])
    yield from ways(batch, ["pp64 dp16 tp4", "pp8 dp64 tp8"], savings[:2])
    yield from ways(batch, ["pp64 dp8 tp8"], savings[1:2], ["interleaved-2"])
    yield from ways(batch, ["pp64 dp8 tp8", "pp32 dp16 tp8"], savings[1:2], rows=(2,))
    yield from ways(batch, ["pp8 dp64 tp8"], ["zero2 full", "zero3 full"])
    yield from ways(batch, ["dp512 tp8"], ["zero3 full", "zero3 auto"], rows=(1, 2, 3))


def llama3_8b(batch: int) -> Iterator[Template]:
    savings = ["whole none", "zero1 none", "zero1 selective", "zero1 auto"]
    yield from ways(batch, ["dp32 tp2"], savings, rows=(1, 2, 4))
    yield from ways(batch, ["dp64"], ["zero1 none", "zero1 auto", "zero1 full"], rows=(1, 2))
    yield from ways(batch, ["dp64"], ["zero2 selective", "zero3 selective", "8:8:8 selective"])
    yield from ways(batch, ["dp16 tp4"], ["whole none", "zero1 selective"], rows=(1, 2))
    yield from ways(batch, ["dp32 sp2"], ["zero1 none", "zero3 selective"], rows=(1, 2))
    yield from ways(batch, ["dp8 tp8"], ["whole none"], rows=(1, 2))
    yield from ways(batch, ["pp2 dp32", "pp4 dp16"], ["zero1 none", "zero1 selective"])
    yield from ways(batch, ["pp4 dp16"], ["zero1 none"], ["interleaved-4", "zb-h1"])


def gpt3_128(batch: int) -> Iterator[Template]:
    savings = ["zero1 selective", "zero1 full", "zero1 auto"]
    yield from ways(batch, ["pp8 dp4 tp4"], savings, ["1f1b", "interleaved-2", "interleaved-6"])
    yield from ways(batch, ["pp8 dp4 tp4"], savings[1:2], ["interleaved-3", "interleaved-12"])
    yield from ways(batch, ["pp8 dp2 tp8"], savings[:2], ["1f1b", "interleaved-3"], rows=(1, 2))
    yield from ways(batch, ["pp16 dp2 tp4", "pp4 dp4 tp8"], savings, ["1f1b"])
    yield from ways(batch, ["pp16 tp8"], savings[:2], ["1f1b", "interleaved-2"])
    yield from ways(batch, ["dp16 tp8"], ["zero3 full", "zero3 full 512MiB"], rows=(1, 2, 4))


def deepseek_v3(batch: int) -> Iterator[Template]:
    savings = ["zero1 selective", "zero1 full"]
    meshes = ["pp16 dp2 ep64", "pp16 dp4 ep32", "pp16 dp16 ep8", "pp8 dp4 ep64", "pp8 dp32 ep8"]
    yield from ways(batch, meshes, savings)
    yield from ways(batch, meshes[:1], savings, ["interleaved-2", "zb-v", "zb-h1", "dualpipe"])
    yield from ways(batch, meshes[3:4], savings, ["interleaved-2"])
    yield from ways(batch, meshes[:1], ["zero1 none", "zero2 selective", "zero1 auto"])
    yield from ways(batch, ["pp16 dp2 ep64"], ["zero1 full"], rows=(2, 4))
    yield from ways(batch, ["pp4 dp8 ep64", "dp16 ep64 tp2"], ["zero2 full", "zero3 full"])


def llama3_405b(batch: int) -> Iterator[Template]:
    savings = ["zero1 none", "zero1 selective", "zero1 full"]
    yield from ways(batch, ["pp16 dp128 tp8"], savings, ["1f1b", "interleaved-2", "interleaved-8"])
    yield from ways(batch, ["pp16 dp128 tp8"], ["zero2 none", "zero2 selective", "zero1 auto"])
    yield from ways(batch, ["pp8 dp256 tp8"], savings[1:], ["1f1b", "interleaved-4"])
    yield from ways(batch, ["pp32 dp64 tp8"], savings[:2], ["1f1b", "interleaved-2"])
    yield from ways(batch, ["pp16 dp256 tp4"], savings[1:])
    yield from ways(batch, ["pp16 dp128 tp8"], savings[2:], rows=(2,))
    yield from ways(batch, ["pp4 dp512 tp8", "pp8 dp256 tp8"], ["zero3 selective", "zero3 full"])
    yield from ways(batch, ["dp2048 tp8"], ["zero3 selective", "zero3 full"])


def gpt3_1024(batch: int) -> Iterator[Template]:
    savings = ["zero1 selective", "zero1 full", "zero1 auto"]
    yield from ways(batch, ["pp8 dp16 tp8"], savings, ["1f1b", "interleaved-3", "interleaved-6"])
    yield from ways(batch, ["pp8 dp16 tp8"], ["zero1 none"], ["zb-h1"])
    yield from ways(batch, ["pp8 dp16 tp8"], savings[1:2], rows=(2, 4))
    yield from ways(batch, ["pp4 dp32 tp8", "pp16 dp8 tp8"], savings[:2], ["1f1b", "interleaved-2"])
    yield from ways(batch, ["pp8 dp32 tp4", "pp2 dp64 tp8"], savings[:2])
    yield from ways(batch, ["dp128 tp8"], ["zero3 full", "zero3 auto"], rows=(1, 2, 4))


def long_7b(batch: int) -> Iterator[Template]:
    savings = ["zero1 full", "zero3 selective", "zero3 full"]
    yield from ways(batch, ["dp16 sp8", "dp8 sp16", "dp4 sp32", "sp128"], savings)
    yield from ways(batch, ["dp16 tp8", "dp8 sp2 tp8", "dp4 sp4 tp8"], savings)
    yield from ways(batch, ["dp4 sp32", "dp2 sp64"], ["zero1 selective", "zero1 auto"])
    yield from ways(batch, ["dp8 sp16"], ["zero1 full", "zero3 full"], rows=(2,))
    yield from ways(batch, ["dp8 sp16"], ["8:8:8 full", "zero3 full 512MiB"])
    yield from ways(batch, ["pp2 dp4 sp2 tp8", "pp4 dp4 tp8"], ["zero1 selective", "zero1 full"])


def vit_22b(batch: int) -> Iterator[Template]:
    savings = ["zero1 selective", "zero2 selective", "zero3 full"]
    yield from ways(batch, ["dp16 tp4", "dp8 tp8"], savings, rows=(16, 32))
    yield from ways(
        batch, ["dp64", "dp32 tp2"], ["zero3 selective", "zero3 full"], rows=(8, 16, 32)
    )
    yield from ways(batch, ["dp64"], ["zero3 none", "zero3 auto", "zero3 full 512MiB"], rows=(16,))
    yield from ways(
        batch, ["pp2 dp8 tp4", "pp4 dp16"], ["zero1 none", "zero1 selective"], rows=(8,)
    )
    yield from ways(batch, ["pp4 dp16"], ["zero1 full"], ["interleaved-3", "zb-h1"], rows=(8,))


def t5_11b(batch: int) -> Iterator[Template]:
    savings = ["zero2 none", "zero2 selective", "zero3 none", "zero3 selective", "zero3 full"]
    yield from ways(batch, ["dp64"], savings, rows=(4, 8, 16))
    yield from ways(batch, ["dp64"], ["zero2 auto", "zero3 auto", "8:8:8 none"], rows=(8,))
    yield from ways(batch, ["dp32 tp2", "dp16 tp4"], ["zero1 none", "zero1 selective"], rows=(4, 8))
    yield from ways(batch, ["dp8 tp8"], ["whole none", "zero1 selective"], rows=(8, 16))
    yield from ways(batch, ["pp2 dp32", "pp4 dp16"], ["zero1 none"], rows=(4,))


def gpt2_xl(batch: int) -> Iterator[Template]:
    savings = ["whole none", "zero1 none", "zero1 selective", "zero2 none", "zero3 none"]
    yield from ways(batch, ["dp8"], savings, rows=(4, 8, 16))
    yield from ways(batch, ["dp8"], ["zero1 auto", "zero1 full"], rows=(16, 32))
    yield from ways(batch, ["dp4 tp2", "dp2 tp4"], ["whole none", "zero1 selective"], rows=(8, 16))
    yield from ways(batch, ["tp8"], ["whole none"], rows=(16,))
    yield from ways(batch, ["pp2 dp4", "pp4 dp2"], ["whole none", "zero1 none"], rows=(8,))
    yield from ways(batch, ["pp8"], ["whole none"], ["1f1b", "interleaved-2", "zb-h1"], rows=(4,))


def unet(batch: int) -> Iterator[Template]:
    savings = ["whole none", "zero1 none", "zero1 selective", "zero2 none", "zero3 none"]
    yield from ways(batch, ["dp16"], savings, rows=(16, 32, 64))
    yield from ways(batch, ["dp16"], ["whole full", "zero1 auto", "2:2:2 none"], rows=(32, 64))
    yield from ways(batch, ["dp8 tp2", "dp4 tp4", "dp8 sp2"], ["whole none"], rows=(32, 64))
    yield from ways(batch, ["dp2 tp8"], ["whole none", "whole selective"], rows=(64,))
    yield from ways(batch, ["pp2 dp8"], ["whole none", "whole full"], rows=(16,))


def recommender(batch: int) -> Iterator[Template]:
    savings = ["whole none", "zero1 none", "zero2 none", "zero3 none"]
    yield from ways(batch, ["dp8"], savings, rows=(2048, 4096, 8192))
    yield from ways(batch, ["tp8"], ["whole none"], rows=(16384, 32768, 65536))
    yield from ways(batch, ["dp4 tp2", "dp2 tp4"], savings, rows=(batch // 4, batch // 8))
    yield from ways(batch, ["dp8"], ["zero1 full", "zero3 full", "zero1 none 256MiB"], rows=(8192,))
    yield from ways(batch, ["dp2 sp2 tp2"], ["whole none", "zero1 none"], rows=(32768,))


def gpt2_small(batch: int) -> Iterator[Template]:
    savings = ["whole none", "zero1 none", "zero2 none", "zero3 none", "zero1 selective"]
    yield from ways(batch, ["dp8"], savings, rows=(16, 32, 64))
    yield from ways(batch, ["dp8"], ["whole auto", "whole full", "whole none 8MiB"], rows=(32, 64))
    yield from ways(batch, ["dp4 tp2", "dp2 tp4"], ["whole none"], rows=(32, 64, 128))
    yield from ways(batch, ["tp8", "dp2 sp2 tp2"], ["whole none"], rows=(64,))
    yield from ways(batch, ["pp2 dp4", "pp4 dp2"], ["whole none"], rows=(16, 32))


def on_mixed(batch: int) -> Iterator[Template]:
    savings = ["zero1 none", "zero1 selective", "zero1 full"]
    yield from ways(batch, ["dp32", "dp24"], [*savings, "zero1 auto", "zero3 selective"])
    yield from ways(batch, ["dp16 tp2", "dp12 tp2"], savings, rows=(1, 2))
    yield from ways(batch, ["dp4 tp8", "dp3 tp8"], ["whole none", "zero1 selective"], rows=(2,))
    yield from ways(batch, ["pp4 dp8", "pp2 dp16", "pp4 dp4 tp2"], savings[:2])
    yield from ways(batch, ["pp4 dp8"], ["zero1 none"], ["interleaved-2", "zb-h1"])
    yield from ways(batch, ["pp4 tp8", "pp3 dp8"], ["whole none", "zero1 selective"])


def _of_sequence(make: Callable[..., Case], sequence: int) -> Callable[..., Case]:
    return lambda batch: make(batch=batch, sequence=sequence)


LLAMA3_8B = _of_sequence(models.llama3, 8192)
LLAMA3_70B = _of_sequence(models.llama3_70b, 8192)
CASES = {
    case.name: case
    for case in (
        ChoiceCase("Mixtral 8x7B on 64 H100", models.mixtral_8x7b, 256, h100(64), mixtral),
        ChoiceCase("Llama-3 70B on 256 H100", LLAMA3_70B, 512, h100(256), llama3_70b),
        ChoiceCase("GPT 1T on 4,096 A100", models.gpt_1t, 3072, a100(4096), gpt_1t),
        ChoiceCase("Llama-3 8B on 64 H100", LLAMA3_8B, 128, h100(64), llama3_8b),
        ChoiceCase("GPT-3 on 128 A100", models.gpt3, 1536, a100(128), gpt3_128),
        ChoiceCase("DeepSeek-V3 on 2,048 H100", models.deepseek_v3, 15360, h100(2048), deepseek_v3),
        ChoiceCase(
            "Llama-3 405B on 16,384 H100", models.llama3_405b, 2048, h100(16384), llama3_405b
        ),
        ChoiceCase("GPT-3 on 1,024 A100", models.gpt3, 1536, a100(1024), gpt3_1024),
        ChoiceCase("7B with 256k tokens on 128 A100", models.long_7b, 16, a100(128), long_7b),
        ChoiceCase("ViT-22B on 64 H100", models.vit_22b, 4096, h100(64), vit_22b),
        ChoiceCase("T5-11B on 64 A100", models.t5_11b, 2048, a100(64), t5_11b),
        ChoiceCase("GPT-2 XL on 8 H100", models.gpt2_xl, 512, h100(8), gpt2_xl),
        ChoiceCase("U-Net on 16 A100", models.unet, 1024, a100(16), unet),
        ChoiceCase("100 GB of tables on 8 H100", models.recommender, 65536, h100(8), recommender),
        ChoiceCase("12-layer GPT on 8 H100", models.gpt2_small, 512, h100(8), gpt2_small),
        ChoiceCase("Llama-3 8B on 24 H100 and 8 A100", LLAMA3_8B, 96, mixed, on_mixed),
    )
}

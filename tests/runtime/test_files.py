"""Files with something changed: each is refused with a message, or runs and is right."""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.base.schema import read, write
from autopar.capture.fingerprint import fingerprint_of
from autopar.layout import Layout
from autopar.pipeline import load, schedule, simulate, to_csv, to_text
from autopar.plans.plan import SavedPlan
from autopar.runtime.backends.virtual_backend import VirtualBackend
from autopar.runtime.checkpoints.checkpoint_files import Key, metadata_of
from autopar.runtime.checkpoints.checkpoint_folders import INDEX, file_name
from autopar.runtime.checkpoints.checkpoint_writing import Part, divide_parts
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters import weight_files
from autopar.runtime.parameters.placing import narrow_to
from tests.mutations import bytes_of, file_of, sealed

SECONDS = 30  # for one file, before it is called a hang
X = torch.arange(32.0, dtype=torch.float64).reshape(4, 8) / 32
MADE: dict[str, dict[str, Any]] = {
    "searched": {"mesh": ap.Mesh(dp=2, tp=2), "mode": "auto"},
    "pipeline": {"mesh": ap.Mesh(pp=2, dp=2), "mode": "propagate", "microbatches": 2},
}
CLUSTER = """
name = "two kinds"
[device.small]
flops = { bf16 = 100e12, f32 = 10e12 }
memory = 16e9
bandwidth = 0.7e12
[[nodes]]
count = 2
device = "small"
devices = 4
link = { alpha = 3e-6, bandwidth = 100e9 }
[[nodes]]
count = 1
preset = "dgx-a100"
[network]
alpha = 6e-6
bandwidth = 50e9
"""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16).double(), nn.Linear(16, 8).double()
        self.norm = nn.LayerNorm(8).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x)))).square().mul(x).mean()


def expected() -> tuple[Tensor, dict[str, Tensor]]:
    model = Model()
    loss = model(X)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


class Plans:
    """Plans of one model, which is captured once."""

    def __init__(self) -> None:
        plans = {name: ap.plan(Model(), (X,), **made) for name, made in MADE.items()}
        self.data = {name: SavedPlan.of(plan).to_json() for name, plan in plans.items()}
        self.captured = plans["searched"].original
        self.fingerprint = fingerprint_of(self.captured)
        self.loss, self.grads = expected()

        self.checkpoint: Any = None

    def module(self) -> ParallelModule:
        plan = SavedPlan.from_json(self.data["searched"]).attach_captured(self.captured)
        backend = VirtualBackend(plan.program, torch.device("cpu"))
        return ParallelModule(Model(), plan.program, plan, backend)

    def run(self, path: Path, content: bytes) -> None:
        """Load, print, attach, one step: right, or an error."""
        path.write_bytes(content)
        saved = SavedPlan.load(path)
        str(saved)
        saved.require_same(self.fingerprint)
        plan = saved.attach_captured(self.captured)
        model = Model()
        backend = VirtualBackend(plan.program, torch.device("cpu"))
        module = ParallelModule(model, plan.program, plan, backend)
        str(plan)
        loss = module.step(X)
        grads = module.full_grads()
        assert grads.keys() == self.grads.keys()
        torch.testing.assert_close(loss, self.loss, rtol=1e-9, atol=1e-12)
        for name, grad in self.grads.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-9, atol=1e-12)


def a_plan(plans: Plans, path: Path, chance: random.Random) -> None:
    plans.run(path, file_of(plans.data[chance.choice(list(MADE))], chance))


def a_schedule(plans: Plans, path: Path, chance: random.Random) -> None:
    name = chance.choice(("1f1b", "gpipe", "chimera", "zb-h1", "interleaved"))
    made = schedule(name, stages=4, microbatches=4)
    is_csv = chance.random() < 0.5
    path = path.with_suffix(".csv" if is_csv else ".txt")
    text = to_csv(made, header=chance.random() < 0.5) if is_csv else to_text(made)
    path.write_bytes(bytes_of(text, chance))
    simulate(load(path))


def a_cluster(plans: Plans, path: Path, chance: random.Random) -> None:
    path = path.with_suffix(".toml")
    path.write_bytes(bytes_of(CLUSTER, chance))
    cluster = ap.Cluster.load(path)
    str(cluster)
    cluster.axis_links(ap.Mesh(dp=2, tp=2))
    assert read(ap.Cluster, write(cluster)) == cluster


def a_checkpoint(plans: Plans, path: Path, chance: random.Random) -> None:
    """Each of its tensors is in two pieces."""
    if not plans.checkpoint:
        plans.checkpoint = halved(plans.module(), path.parent / "checkpoint")
    module = plans.module()
    expected = module.full_state_dict()
    for value in module.parameters():
        value.detach().zero_()
    optimizer = torch.optim.SGD(module.parameters())
    (path.parent / "checkpoint" / INDEX).write_bytes(sealed(file_of(plans.checkpoint, chance)))
    ap.load(path.parent / "checkpoint", module, optimizer)
    torch.testing.assert_close(module.full_state_dict(), expected, rtol=0, atol=0)
    for name, value in module.named_parameters():
        momentum = optimizer.state[value]["momentum_buffer"]
        torch.testing.assert_close(momentum, expected[name] + 1, rtol=0, atol=0)


def halved(module: ParallelModule, folder: Path) -> Any:
    """The index of a checkpoint as two ranks would have written it."""
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    for value in module.parameters():
        optimizer.state[value]["momentum_buffer"] = value.detach() + 1
    ap.save(folder, module, optimizer)
    named = dict(module.named_parameters())
    held = {Key(name): value for name, value in named.items()}
    for name, value in named.items():
        held[Key(name, "momentum_buffer")] = optimizer.state[value]["momentum_buffer"]
    layout, listed = Layout("d", None), []
    for rank in range(2):
        parts = {}
        for key, value in held.items():
            cut = Layout(*layout.dims[: value.ndim])
            bounds = cut.local_bounds(value.shape, ap.Mesh(d=2), rank)
            parts[Part(key, tuple(value.shape), value.dtype, bounds)] = narrow_to(value, bounds)
        listed.append(parts)
    index = json.loads((folder / INDEX).read_bytes())
    save, beside = index["id"], index["beside"]
    shares, contents = divide_parts([tuple(parts) for parts in listed])
    contents = replace(contents, id=save, beside=beside)
    for rank, share in enumerate(shares):
        kinds = {key: part.held for key, part in share}
        values = (listed[rank][part] for _, part in share)
        with (folder / file_name(rank)).open("wb") as file:
            weight_files.write_safetensors(file, kinds, values, metadata_of(save), has_digests=True)
    return write(contents)


def outcomes(kind: Any, plans: Plans, path: Path, count: int, seed: int) -> Counter[str]:
    """How many changed files ran rightly, were refused, and what else became of them."""
    found: Counter[str] = Counter()
    for number in range(seed, seed + count):
        signal.alarm(SECONDS)
        try:
            kind(plans, path, random.Random(number))
            found["right"] += 1
        except ap.AutoparError:
            found["refused"] += 1
        except BaseException as error:  # an assertion: wrong; the alarm: it hangs; else: raw
            found[f"{number}: {type(error).__name__}: {str(error)[:200]}"] += 1
        finally:
            signal.alarm(0)
    return found


def late(*_: Any) -> None:
    raise TimeoutError("a changed file takes too long")


@pytest.fixture(scope="module")
def plans() -> Plans:
    return Plans()


@pytest.mark.parametrize(
    ("kind", "count"), [(a_plan, 120), (a_schedule, 150), (a_cluster, 150), (a_checkpoint, 60)]
)
def test_changed_files_are_refused_or_right(
    kind: Any, count: int, plans: Plans, tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGALRM, late)
    try:
        found = outcomes(kind, plans, tmp_path / "file.json", count, seed=0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert found["right"] + found["refused"] == count, dict(found)
    assert found["right"]
    assert found["refused"] > count / 3


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("0F0," + "9" * 30 + "F0\n", "a.csv"),
        ("0F0,999999F0\n", "a.csv"),
        ("microbatches: 999999\npipe 0: 0\nrank 0: 0F0 0B0\n", "a.txt"),
        ("microbatches: " + "9" * 5000 + "\npipe 0: 0\nrank 0: 0F0 0B0\n", "a.txt"),
        ("microbatches: 1\noptions: a=nan\npipe 0: 0\nrank 0: 0F0 0B0\n", "a.txt"),
        ("microbatches: 1\noptions: a=1.2.3+4\npipe 0: 0\nrank 0: 0F0 0B0\n", "a.txt"),
        ("microbatches: 1\nrank 0 : 0F0\npipe 0: 0\nrank 0: 0F0 0B0\n", "a.txt"),
        ("0F0,0B0\n\0", "a.csv"),
        ("[[nodes]]\npreset = []\n", "a.toml"),
        ("[[nodes]]\npreset = 'h200'\ncount = 999999999999\n", "a.toml"),
        ("[[nodes]]\npreset = 'h200'\ncount = true\n", "a.toml"),
        (CLUSTER.replace("16e9", "nan"), "a.toml"),
        (CLUSTER.replace("16e9", "inf"), "a.toml"),
        (CLUSTER.replace("two", "\udcff"), "a.toml"),
    ],
)
def test_numbers_kinds_and_bytes_that_no_file_has(text: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ap.InvalidInput):
        ap.Cluster.load(path) if name.endswith("toml") else load(path)


def main(kind: str, count: int, seed: int) -> None:
    """Many more: `python -m tests.runtime.test_files plan 3000 0`."""
    signal.signal(signal.SIGALRM, late)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        kinds = {
            "plan": a_plan,
            "schedule": a_schedule,
            "cluster": a_cluster,
            "checkpoint": a_checkpoint,
        }
        path = Path(folder) / "file.json"
        for what, number in sorted(outcomes(kinds[kind], Plans(), path, count, seed).items()):
            print(number, what)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

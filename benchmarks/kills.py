"""A training that is killed again and again, beside the same one that is left alone.

    python -m benchmarks.kills [--kills 20] [--seed 0]

`examples/hf_finetune.py` on one to four ranks of this machine, in float64 with a loss that does not
round. At random moments of its steps and of its saves all its ranks are killed by SIGKILL, and it
is taken up on another mesh. A life prints a line of JSON, and the last line tells how far what was
measured differs. Ranks are forked from a process that has loaded what they need.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from autopar._torch.export_graph import LOADED_BY_EXPORT
from examples import hf_finetune
from tests.models import made_precise
from tests.programs import Environment, torchrun

WAYS: Mapping[str, tuple[dict[str, int], str]] = {  # meshes and states
    "one": ({"one": 1}, "whole"),
    "tp": ({"dp": 2, "tp": 2}, "whole"),
    "zero3": ({"dp": 4}, "zero3"),
    "pp": ({"pp": 2, "dp": 2}, "whole"),
    "zero1": ({"dp": 2}, "zero1"),
}
PATIENCE = 300.0


@dataclass(frozen=True)
class Death:
    way: str
    first: int  # steps that were done before this life
    steps: int  # and at its end
    in_save: bool


class Killed:
    """One training, until somebody lets it end."""

    def __init__(self, folder: Path, steps: int, seed: int) -> None:
        self.folder, self.steps, self.random = folder, steps, random.Random(seed)
        self.way, self.lives, self._context = "", 0, get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.kills", *LOADED_BY_EXPORT])

    def is_killed(self) -> Death:
        """It lives on another mesh until a random moment, of a step or of a save."""
        moment = self.random.choice(("step", "save"))
        self.way = self.random.choice([name for name in WAYS if name != self.way])
        born, most = time.time_ns(), self.random.randint(1, 2 * hf_finetune.EVERY)
        processes = self._start()
        until = time.monotonic() + PATIENCE
        try:
            while not (self._is_saving(born) if moment == "save" else len(self._said()) >= most):
                assert time.monotonic() < until, f"nothing happens on {self.way}"
                ended = [one.exitcode for one in processes if not one.is_alive()]
                assert not ended, f"ranks ended by themselves: {ended}\n{self._errors()}"
                time.sleep(0.001)
            time.sleep(self.random.uniform(0, 0.2))
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
        said = self._said()
        last = int(said[-1].split()[1].rstrip(":")) if said else 0
        return Death(self.way, last - len(said), last, self._is_saving(born))

    def ends(self, way: str = "one") -> dict[str, dict[str, float]]:
        """What it has measured when nobody kills it."""
        self.way = way
        processes = self._start()
        for process in processes:
            process.join(PATIENCE)
        assert [one.exitcode for one in processes] == [0] * len(processes), self._errors()
        return json.loads((self.folder / "measured").read_text())

    def _start(self) -> list[Any]:
        self.lives += 1
        mesh, _ = WAYS[self.way]
        ranks = math.prod(mesh.values())
        environments: list[Environment] = torchrun(ranks) if ranks > 1 else [{}]
        processes = [
            self._context.Process(
                target=_live, args=(environment, self.way, self.folder, self.steps, self.lives)
            )
            for environment in environments
        ]
        for process in processes:
            process.start()
        return processes

    def _said(self) -> list[str]:
        """Its lines that are whole."""
        file = self.folder / f"said-{self.lives}-0"
        return [] if not file.exists() else file.read_text().split("\n")[:-1]

    def _errors(self) -> str:
        files = sorted(self.folder.glob(f"errors-{self.lives}-*"))
        return "\n".join(file.read_text()[-2000:] for file in files)

    def _is_saving(self, born: int) -> bool:
        """Whether a checkpoint of this life is on its way."""
        for new in self.folder.glob(".last.*.new"):
            try:
                if new.stat().st_ctime_ns > born:
                    return True
            except FileNotFoundError:  # it is whole meanwhile
                pass
        return False


def _live(environment: Environment, way: str, folder: Path, steps: int, life: int) -> None:
    os.environ.update(environment, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    rank = environment.get("RANK", "0")
    for name, stream in (("said", 1), ("errors", 2)):
        os.dup2(os.open(folder / f"{name}-{life}-{rank}", os.O_WRONLY | os.O_CREAT), stream)
    mesh, states = WAYS[way]
    asked = {"mesh": mesh, "states": states, "lora": False, "float64": True}
    build = hf_finetune.build
    with (
        patch.object(hf_finetune, "STEPS", steps),
        patch.object(hf_finetune, "build", lambda lora: made_precise(build(lora))),
    ):
        measured = hf_finetune.train(Namespace(**asked, folder=str(folder / "last")))
    if rank == "0":
        (folder / "measured").write_text(json.dumps(measured))
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    steps = 8 * (options.kills + 1)  # more than it can do before the last of them
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        alone = Killed(Path(other), steps, options.seed).ends()
        run = Killed(Path(folder), steps, options.seed)
        deaths = []
        for _ in range(options.kills):
            deaths.append(run.is_killed())
            print(json.dumps(asdict(deaths[-1])), flush=True)
        found = run.ends("tp")
    assert found.keys() == alone.keys()
    differences = [
        abs(value - alone[step][name]) / abs(alone[step][name] or 1.0)
        for step, those in found.items()
        for name, value in those.items()
    ]
    told = {"kills": len(deaths), "in saves": sum(death.in_save for death in deaths)}
    print(json.dumps(told | {"compared": len(differences), "most": max(differences)}))


if __name__ == "__main__":
    main()

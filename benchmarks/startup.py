"""What a script pays before its second training step, beside torch alone, paired in one run.

    python -m benchmarks.startup [--rounds 5] [--case first_step] [--layers 12] [--hidden 128]

Every sample is a fresh process (for `first_step` one for each of two ranks, which meet over gloo),
and each round takes one sample of each contestant, in turn. Each process computes with one thread.
A case prints one line of JSON: medians of processor seconds, and of the differences or ratios
within a round. Modules come from bytecode files, as they do from the second start of a program on.

    import        `import autopar`, and reading every public name, beside `import torch` and beside
                  importing DTensor, which all parameters of a parallel module are
    help          `autopar --help`, beside `python -c pass`
    first_step    parallelize (or fully_shard) and the first step, after all imports; the slower
                  rank counts
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

IMPORTS = {
    "torch": "import torch",
    "torch and DTensor": "import torch, torch.distributed.tensor",
    "torch and autopar": "import torch, autopar",
    "every public name": "import torch, autopar\nfor n in autopar.__all__: getattr(autopar, n)",
}
HELP = {"nothing": ["-c", "pass"], "autopar --help": ["-m", "autopar", "--help"]}
FIRST_STEP = ("autopar", "fsdp2")
RANKS = 2
Seconds = dict[str, float]  # by what was measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", choices=("import", "help", "first_step"), help="only this case")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rank-of", choices=FIRST_STEP, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        print(json.dumps(first_step(arguments.rank_of, arguments.layers, arguments.hidden)))
        return
    cases: dict[str, Callable[[], Mapping[str, object]]] = {
        "import": lambda: import_line(arguments.rounds),
        "help": lambda: help_line(arguments.rounds),
        "first_step": lambda: step_line(arguments.rounds, arguments.layers, arguments.hidden),
    }
    for name in [arguments.case] if arguments.case else cases:
        print(json.dumps({"case": name, "rounds": arguments.rounds, **cases[name]()}), flush=True)


def import_line(rounds: int) -> Mapping[str, object]:
    code = "import json, time\n{}\nprint(json.dumps({{'cpu': time.process_time()}}))"
    samples = measured(
        {name: partial(run, ["-c", code.format(line)]) for name, line in IMPORTS.items()}, rounds
    )
    beyond = {name: difference(samples, name, "torch") for name in list(IMPORTS)[1:]}
    beyond["every public name, beyond DTensor"] = difference(
        samples, "every public name", "torch and DTensor"
    )
    return {"cpu_seconds": medians(samples), "beyond_torch": beyond}


def help_line(rounds: int) -> Mapping[str, object]:
    samples = measured({name: partial(run_to_end, words) for name, words in HELP.items()}, rounds)
    return {"cpu_seconds": medians(samples)}


def step_line(rounds: int, layers: int, hidden: int) -> Mapping[str, object]:
    samples = measured({n: partial(run_ranks, n, layers, hidden) for n in FIRST_STEP}, rounds)
    return {
        "layers": layers,
        "hidden": hidden,
        "ranks": RANKS,
        "cpu_seconds": medians(samples),
        "wall_seconds": medians(samples, "wall"),
        "import_cpu_seconds": medians(samples, "imports"),
        "autopar_over_fsdp2": statistics.median(
            round(ours["cpu"] / theirs["cpu"], 2)
            for ours, theirs in zip(samples["autopar"], samples["fsdp2"])
        ),
    }


def measured(
    contestants: Mapping[str, Callable[[], Seconds]], rounds: int
) -> dict[str, list[Seconds]]:
    """Return one sample of each contestant a round; a first one, not counted, writes bytecode."""
    samples: dict[str, list[Seconds]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, sample in contestants.items():
            taken = sample()
            if number:
                samples[name].append(taken)
    return samples


def medians(samples: Mapping[str, list[Seconds]], key: str = "cpu") -> Seconds:
    return {n: round(statistics.median(s[key] for s in each), 3) for n, each in samples.items()}


def difference(samples: Mapping[str, list[Seconds]], name: str, other: str) -> float:
    pairs = zip(samples[name], samples[other])
    return round(statistics.median(a["cpu"] - b["cpu"] for a, b in pairs), 3)


def environment(**more: str) -> dict[str, str]:
    """Return the variables of a child, which reads and writes bytecode files."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    cache = os.path.join(tempfile.gettempdir(), "autopar_startup_bytecode")
    return {**variables, "PYTHONPYCACHEPREFIX": cache, "OMP_NUM_THREADS": "1", **more}


def run(words: list[str], **variables: str) -> Seconds:
    """Run Python in a fresh process and return the figures in its last line."""
    command = [sys.executable, *words]
    output = subprocess.run(
        command, env=environment(**variables), check=True, capture_output=True, text=True
    ).stdout
    return json.loads(output.splitlines()[-1])


def run_to_end(words: list[str]) -> Seconds:
    """Return the processor seconds of a fresh Python process, its start and end included."""
    before = os.times()
    subprocess.run(
        [sys.executable, *words], env=environment(), check=True, stdout=subprocess.DEVNULL
    )
    after = os.times()
    user = after.children_user - before.children_user
    return {"cpu": user + after.children_system - before.children_system}


def run_ranks(name: str, layers: int, hidden: int) -> Seconds:
    """Run both ranks of one contestant and return the figures of the slower one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shape = ["--layers", str(layers), "--hidden", str(hidden)]
    words = ["-m", "benchmarks.startup", "--rank-of", name, *shape]

    def run_rank(rank: int) -> Seconds:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        return run(words, **place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

    with ThreadPoolExecutor(RANKS) as pool:
        figures = list(pool.map(run_rank, range(RANKS)))
    return {key: max(rank[key] for rank in figures) for key in figures[0]}


def first_step(name: str, layers: int, hidden: int) -> Seconds:
    """Return what this rank computes to make a parallel GPT of a plain one and to run one step."""
    import torch
    import torch.distributed as dist

    from benchmarks.gpt import Sizes, batch, gpt

    torch.set_num_threads(1)
    sizes = Sizes(hidden=hidden, heads=4, sequence=64, batch=4, layers=layers)
    before = time.process_time()
    if name == "autopar":
        import autopar as ap

        for public in ap.__all__:
            getattr(ap, public)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
    imports = time.process_time() - before
    dist.init_process_group("gloo")
    model = gpt(sizes)
    ids, labels = batch(sizes)
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    if name == "autopar":
        mesh = ap.Mesh(dp=RANKS)
        module = ap.parallelize(model, (ids, labels), mesh=mesh, mode="data", states="zero3")
        module.step(ids, labels)
    else:
        device_mesh = init_device_mesh("cpu", (RANKS,))
        for block in model.blocks:
            fully_shard(block, mesh=device_mesh)
        fully_shard(model, mesh=device_mesh)
        rank = dist.get_rank()
        model(ids.chunk(RANKS)[rank], labels.chunk(RANKS)[rank]).backward()
    seconds = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    dist.destroy_process_group()
    return {"imports": imports, **seconds}


if __name__ == "__main__":
    main()

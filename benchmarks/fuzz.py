"""Fuzz: random programs in random configurations beside the single program, at length.

    python -m benchmarks.fuzz --programs 10000

Prints a line of JSON for everything that is wrong or fails with a raw error, with the numbers that
make it again (`tests.random_runs.run(program, configuration)`), and at the end the figures:
compared (coarse: those with a part in bfloat16), refused by rule, wrong, raw.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.random_runs import Result, run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--configurations", type=int, default=3, help="of each program")
    parser.add_argument("--first", type=int, default=0, help="the first program's number")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    numbers = range(arguments.first, arguments.first + arguments.programs)
    jobs = [(seed, number) for seed in numbers for number in range(arguments.configurations)]
    verdicts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    start = time.perf_counter()
    with ProcessPoolExecutor(
        arguments.processes, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for (seed, number), result in zip(jobs, pool.map(_run, jobs, chunksize=4)):
            verdicts[result.verdict] += 1
            if number == 0 and seed % 100 == 0:
                print(f"program {seed}: {dict(verdicts)}", file=sys.stderr, flush=True)
            if result.verdict == "refused":
                refused[result.reason.partition(" | ")[0]] += 1
            elif result.verdict in ("wrong", "raw"):
                told = {"program": seed, "configuration": number, "verdict": result.verdict}
                print(
                    json.dumps({**told, "of": result.configuration, "why": result.reason[:600]}),
                    flush=True,
                )
    figures = {name: verdicts[name] for name in ("compared", "coarse", "refused", "wrong", "raw")}
    seconds = round(time.perf_counter() - start)
    print(json.dumps({**figures, "by_rule": dict(refused.most_common()), "seconds": seconds}))
    return 1 if verdicts["wrong"] or verdicts["raw"] else 0


def _run(job: tuple[int, int]) -> Result:
    return run(*job)


if __name__ == "__main__":
    sys.exit(main())

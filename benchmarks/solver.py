"""How long the abstract solver takes: chains of L transformer-like blocks; a JSON line per case.

python -m benchmarks.solver [--layers 12 96] [--strategies 40] [--repeat 3]
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from autopar.solver.cost_graph import CostGraph
from autopar.solver.solve import least_memory, solve

# One block: (name, earlier nodes it reads). -1 is what comes in, "mask" is shared by all blocks.
BLOCK: list[tuple[str, list[int | str]]] = [
    ("norm1.weight", []),
    ("norm1", [-1, 0]),
    ("norm1.out", [1]),
    ("q.weight", []),
    ("q", [2, 3]),
    ("k.weight", []),
    ("k", [2, 5]),
    ("v.weight", []),
    ("v", [2, 7]),
    ("q.heads", [4]),
    ("k.heads", [6]),
    ("v.heads", [8]),
    ("attention", [9, 10, 11, "mask"]),
    ("merge", [12]),
    ("o.weight", []),
    ("o", [13, 14]),
    ("dropout1", [15]),
    ("add1", [-1, 16]),
    ("add1.out", [17]),
    ("norm2.weight", []),
    ("norm2", [18, 19]),
    ("up.weight", []),
    ("up", [20, 21]),
    ("up.bias", []),
    ("bias", [22, 23]),
    ("act", [24]),
    ("down.weight", []),
    ("down", [25, 26]),
    ("dropout2", [27]),
    ("add2", [18, 28]),
    ("add2.out", [29]),
]


def transformer(layers: int, strategies: int, seed: int = 0) -> CostGraph:
    """Strategies are points on a plane; edges cost their distance, nodes random numbers."""
    rng = np.random.default_rng(seed)
    place = rng.random((strategies, 2))
    move = np.abs(place[:, None, :] - place[None, :, :]).sum(-1) * 1e-4
    move[move < 4e-5] = 0.0
    weights = {name: (rng.random(strategies) * 1e-4, rng.random(strategies)) for name, _ in BLOCK}
    memory = {name: 1e7 * (2.0 - cost / cost.max()) * w for name, (cost, w) in weights.items()}
    graph = CostGraph()
    mask = graph.add_node(weights["q"][0][:8], name="mask")
    stream = graph.add_node(weights["add2.out"][0], memory["add2.out"], name="embedding")
    mask_move = move[:8].copy()
    for layer in range(layers):
        nodes: list[int] = []
        for name, reads in BLOCK:
            node = graph.add_node(weights[name][0], memory[name], f"layers.{layer}.{name}")
            for read in reads:
                if isinstance(read, str):
                    graph.add_edge(mask, node, mask_move)
                else:
                    graph.add_edge(stream if read < 0 else nodes[read], node, move)
            nodes.append(node)
        stream = nodes[-1]
    head = graph.add_node(weights["up"][0], name="head")
    graph.add_edge(stream, head, move)
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 96])
    parser.add_argument("--strategies", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    for limited in (False, True):
        for layers in options.layers:
            graph = transformer(layers, options.strategies)
            free = solve(graph)
            least, _ = least_memory(graph)
            limit = (free.memory + least) / 2 if limited else None
            seconds, build = [], []
            for _ in range(options.repeat):
                start = time.perf_counter()
                graph = transformer(layers, options.strategies)
                build.append(time.perf_counter() - start)
                start = time.perf_counter()
                solution = solve(graph, memory=limit)
                seconds.append(time.perf_counter() - start)
            case = {
                "case": f"{layers} layers x {len(BLOCK)} nodes x {options.strategies} strategies",
                "memory_limit": limit,
                "build_seconds": round(min(build), 4),
                "solve_seconds": round(min(seconds), 4),
                "objective": solution.objective,
                "memory": solution.memory,
                "gap": solution.gap,
                "sizes": solution.sizes.to_json(),
            }
            print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main()

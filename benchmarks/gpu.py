"""What one GPU can show of autopar: a line of JSON for each case.

    make gpu [PYTHON=...]
    python -m benchmarks.gpu [--device cpu] [--only parity shared speed memory calibration]

parity: a plan on a mesh of one against the plain model, in float64: loss, gradients, and parameters
after two steps of AdamW. shared: the same on several ranks over gloo that share the GPU. speed: a
training step (forward and backward) against the plain model, and against it compiled; every round
runs each, in turning order; medians. memory: the most that the allocator held in a step with AdamW,
against what the plan says. calibration: rates that the device reaches, against those that planning
takes it to have.

With `--device cpu` the sizes are small and there is no peak to measure: it shows that all cases
run.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar as ap
from autopar.cluster.gpus import local_gpu, measure_gpu, median_seconds
from autopar.runtime.launching.launch import launch
from benchmarks.gpt import GPT, Sizes, batch, gpt

SMALL = Sizes(hidden=32, heads=4, sequence=16, batch=8, layers=2, vocabulary=64)
LARGE = Sizes(hidden=2048, heads=16, sequence=1024, batch=8, layers=8, vocabulary=32_000)
SHARED: tuple[dict[str, Any], ...] = (  # meshes of ranks that share a GPU
    {"mesh": ap.Mesh(dp=2)},
    {"mesh": ap.Mesh(tp=2)},
    {"mesh": ap.Mesh(pp=2), "microbatches": 4, "schedule": "chimera"},
)
Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu runs the cases small")
    for name in arguments.only:
        for figures in CASES[name](device, arguments.rounds):
            print(json.dumps({"case": name, "device": name_of(device)} | figures), flush=True)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def one_rank(device: torch.device) -> None:
    """Make this process the only rank of a world."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def annotated(model: GPT) -> GPT:
    """Columns, then rows, over the axis `tp`."""
    for block in model.blocks:
        up, down = block.get_submodule("up"), block.get_submodule("down")
        ap.shard(up, params={"weight": ("tp", None), "bias": ("tp",)})
        ap.shard(down, params={"weight": (None, "tp")})
    return model


def trained(model: nn.Module, step: Callable[[], Tensor]) -> list[Tensor]:
    """Losses and gradients of two steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        found.append(step().detach().cpu())
        optimizer.step()
    return found


def difference(module: ap.ParallelModule, model: nn.Module, inputs: tuple[Tensor, ...]) -> float:
    """Train both: the largest relative difference of losses, gradients and parameters."""

    def plain() -> Tensor:
        loss = model(*inputs)
        loss.backward()
        return loss

    expected = trained(model, plain)
    found = trained(module, lambda: module.step(*inputs))
    pairs = list(zip(found, expected))
    state, grads = module.full_state_dict(), module.full_grads()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        pairs += [(state[name], parameter.detach()), (grads[name], parameter.grad)]
    return max(
        float((one.cpu() - other.cpu()).norm() / other.cpu().norm().clamp(min=1e-12))
        for one, other in pairs
    )


def parity(device: torch.device, rounds: int) -> Iterator[Figures]:
    one_rank(device)
    model = gpt(SMALL).double().to(device)
    inputs = tuple(value.to(device) for value in batch(SMALL))
    with ap.parallelize(
        copy.deepcopy(model), inputs, mesh=ap.Mesh(dp=1), mode="data", backend="torch"
    ) as module:
        yield {"mesh": "dp=1", "relative_difference": difference(module, model, inputs)}


def shared(device: torch.device, rounds: int) -> Iterator[Figures]:
    for options in SHARED:
        found = launch(share, 2, device.type, options, gpus=device.type == "cuda", timeout=300.0)
        mesh = ", ".join(f"{axis}={options['mesh'][axis]}" for axis in options["mesh"])
        yield {"mesh": mesh, "ranks": 2, "relative_difference": max(found)}


def share(say: Callable[[Any], None], kind: str, options: dict[str, Any]) -> float:
    """What each rank of a world over gloo does, its model on the one device."""
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    model = gpt(SMALL).double().to(device)
    inputs = tuple(value.to(device) for value in batch(SMALL))
    cut = copy.deepcopy(model)
    if "tp" in options["mesh"]:
        annotated(cut)
    module = ap.parallelize(cut, inputs, mode="propagate", **options)
    assert {parameter.device.type for parameter in module.parameters()} == {device.type}
    return difference(module, model, inputs)


def speed(device: torch.device, rounds: int) -> Iterator[Figures]:
    one_rank(device)
    sizes, dtype = (LARGE, torch.bfloat16) if device.type == "cuda" else (SMALL, torch.float32)
    model = gpt(sizes).to(device, dtype)
    inputs = tuple(value.to(device) for value in batch(sizes))
    options: dict[str, Any] = {"mesh": ap.Mesh(dp=1), "mode": "data", "backend": "torch"}
    module = ap.parallelize(copy.deepcopy(model), inputs, **options)
    compiled = torch.compile(copy.deepcopy(model))

    def plain(of: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: of(*inputs).backward()

    steps = {
        "autopar": lambda: module.step(*inputs),
        "eager": plain(model),
        "compiled": plain(compiled),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds):
        for name in names[number % 3 :] + names[: number % 3]:
            seconds[name].append(
                median_seconds(steps[name], device, runs=1, warm=3 if number == 0 else 0)
            )
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    yield {
        "model": sizes.name,
        "dtype": str(dtype).removeprefix("torch."),
        **{f"{name}_ms": 1e3 * value for name, value in medians.items()},
        "over_eager": medians["autopar"] / medians["eager"],
        "over_compiled": medians["autopar"] / medians["compiled"],
        "predicted_ms": 1e3 * module.plan.cost.seconds,
    }


def memory(device: torch.device, rounds: int) -> Iterator[Figures]:
    one_rank(device)
    sizes = LARGE if device.type == "cuda" else SMALL
    inputs = tuple(value.to(device) for value in batch(sizes))
    model = gpt(sizes).to(device)
    module = ap.parallelize(model, inputs, mesh=ap.Mesh(dp=1), mode="data", backend="torch")
    said = module.plan.memory
    figures: Figures = {"model": sizes.name, "predicted_gb": said.peak / 1e9}
    if device.type == "cuda":
        other = torch.cuda.memory_allocated(device) - said.parameters
        torch.cuda.reset_peak_memory_stats(device)
        optimizer = torch.optim.AdamW(module.parameters())
        for _ in range(2):
            module.step(*inputs)
            optimizer.step()
            optimizer.zero_grad()
        measured_peak = torch.cuda.max_memory_allocated(device) - other
        figures |= {"measured_gb": measured_peak / 1e9, "ratio": measured_peak / said.peak}
    yield figures


def calibration(device: torch.device, rounds: int) -> Iterator[Figures]:
    found = measure_gpu(device, name_of(device))
    taken = local_gpu(device.index or 0)[0] if device.type == "cuda" else None
    for dtype in found.flops:
        reached = found.peak(dtype)
        line: Figures = {"dtype": dtype, "measured_tflops": reached / 1e12}
        if taken is not None:
            line |= {"taken_tflops": taken.peak(dtype) / 1e12, "ratio": reached / taken.peak(dtype)}
        yield line
    line = {
        "measured_gb_per_s": found.bandwidth / 1e9,
        "measured_overhead_us": found.overhead * 1e6,
    }
    if taken is not None:
        line |= {"taken_gb_per_s": taken.bandwidth / 1e9, "taken_overhead_us": taken.overhead * 1e6}
    yield line


CASES: dict[str, Callable[[torch.device, int], Iterator[Figures]]] = {
    "parity": parity,
    "shared": shared,
    "speed": speed,
    "memory": memory,
    "calibration": calibration,
}

if __name__ == "__main__":
    main()

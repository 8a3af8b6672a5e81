"""Op coverage: torch's own database of operators, each entry cut every way that its rules allow.

    python -m benchmarks.op_coverage --workers 2
    python -m benchmarks.op_coverage --only '^linalg' --samples 8

Each sample is a small module that is captured. Its program is compared with the operator, and each
of its calls under every strategy with the uncut call, forward and backward. An entry is

    exact       a sample's calls can all be cut, and nothing is wrong
    partly      some of the calls can be cut
    whole       there are rules, which cut nothing
    replicated  an operator has no rule
    refused     capture says why not
    wrong       values or gradients differ
    raw error   something fails with another error than autopar's
    no samples  torch has none here

Prints a line of JSON for each entry, and a table at the end. Needs the package `expecttest`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[1]))

from autopar.capture import Captured, capture, run
from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.strategies import rule_of, tensor_inputs
from autopar.strategies.node_info import info
from autopar.verification.captured_draws import DrawsByPlace
from benchmarks.op_groups import GROUPS, group_of
from tests.strategies.rule_law import Case, Reference

MESHES = (Mesh(x=2), Mesh(x=2, y=2), Mesh(x=3))
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.float32, torch.complex64, torch.bool)
STATUSES = ("exact", "partly", "whole", "replicated", "refused", "wrong", "raw error", "no samples")
# Of several samples, what the entry is: the first that any is.
ORDER = ("wrong", "raw error", "exact", "partly", "whole", "replicated", "refused")
STRATEGIES = 200  # of one call on one mesh; of more, so many that are drawn
SECONDS = 240  # for one entry


@dataclass(frozen=True)
class Outcome:
    """What one sample, or one entry, has come to."""

    status: str
    reason: str = ""


class Sample(nn.Module):
    """One call of an operator as a module of its tensors."""

    def __init__(self, operator: Callable[..., Any], sample: Any) -> None:
        super().__init__()
        arguments = (sample.input, tuple(sample.args), dict(sample.kwargs))
        leaves, self.spec = pytree.tree_flatten(arguments)
        self.operator, self.copies = operator, False
        self.held = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def forward(self, *tensors: Tensor) -> list[Any]:
        leaves = list(self.held)
        for place, tensor in zip(self.places, tensors):
            leaves[place] = tensor.clone() if self.copies else tensor
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return pytree.tree_leaves(self.operator(first, *args, **kwargs))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="entries whose name matches")
    parser.add_argument("--group", choices=GROUPS, help="entries of one group")
    parser.add_argument("--samples", type=int, default=4, help="of each entry")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    names = [
        name
        for name in database()
        if re.search(arguments.only, name) and arguments.group in (None, group_of(name))
    ]
    found: dict[str, Counter[str]] = {group: Counter() for group in GROUPS}
    start = time.perf_counter()
    with ProcessPoolExecutor(
        arguments.workers, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        jobs = [(name, arguments.samples) for name in names]
        for name, (outcome, counts) in zip(names, pool.map(entry, jobs, chunksize=2)):
            told = {"entry": name, "group": group_of(name), "status": outcome.status}
            print(json.dumps({**told, "samples": counts, "reason": outcome.reason}), flush=True)
            found[group_of(name)][outcome.status] += 1
    print(table(found), file=sys.stderr)
    print(f"{time.perf_counter() - start:.0f} seconds", file=sys.stderr)
    total = sum(found.values(), Counter())
    return 1 if total["wrong"] or total["raw error"] else 0


def table(found: dict[str, Counter[str]]) -> str:
    """The number of entries of each group, by what they are."""
    rows = [(group, counts) for group, counts in found.items() if counts]
    rows.append(("all", sum(found.values(), Counter())))
    used = [status for status in STATUSES if rows[-1][1][status]]
    lines = [f"| group | entries | {' | '.join(used)} |", "|---|" + "---:|" * (len(used) + 1)]
    for group, counts in rows:
        cells = [str(counts[status] or "") for status in used]
        lines.append(f"| {group} | {sum(counts.values())} | {' | '.join(cells)} |")
    return "\n".join(lines)


@cache
def database() -> dict[str, Any]:
    """Torch's entries by name, that of a variant after a dot."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {info.name + "." * bool(info.variant_test_name) + info.variant_test_name: info
            for info in op_db}  # fmt: skip


def entry(job: tuple[str, int]) -> tuple[Outcome, dict[str, int]]:
    """What one entry of the database comes to, and how many of its samples came to what."""
    name, count = job
    warnings.simplefilter("ignore")
    try:
        samples = samples_of(name, count)
    except Exception as error:
        return Outcome("no samples", line(error)), {}
    outcomes: list[Outcome] = []
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(SECONDS)
    try:
        for sample in samples:
            found = outcome_of(database()[name].op, sample, compared="empty" not in name)
            if found is not None:
                outcomes.append(found)
    except TimeoutError:
        if not outcomes:
            outcomes.append(Outcome("raw error", f"{SECONDS} seconds were not enough"))
    finally:
        signal.alarm(0)
    counts = dict(Counter(outcome.status for outcome in outcomes))
    if not outcomes:
        return Outcome("no samples"), counts
    return min(outcomes, key=lambda outcome: ORDER.index(outcome.status)), counts


def samples_of(name: str, count: int) -> list[Any]:
    """Some samples of an entry, evenly from those that have something to cut, and one of those
    with the most dims."""
    torch.manual_seed(0)
    random.seed(0)
    operator = database()[name]
    supported = operator.supported_dtypes("cpu")
    dtype = next(dtype for dtype in (*DTYPES, *supported) if dtype in supported)
    learns = operator.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    samples = list(operator.sample_inputs("cpu", dtype, requires_grad=learns))
    large = [sample for sample in samples if any(t.numel() > 1 for t in tensors_of(sample))]
    samples = large or samples
    if len(samples) <= count:
        return samples
    most = max(samples, key=lambda sample: max((t.dim() for t in tensors_of(sample)), default=0))
    return [samples[index * len(samples) // count] for index in range(count - 1)] + [most]


def tensors_of(sample: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves((sample.input, tuple(sample.args), dict(sample.kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def outcome_of(
    operator: Callable[..., Any], sample: Any, *, compared: bool = True
) -> Outcome | None:
    """What one sample comes to; None where the operator itself fails.

    What is in fresh memory is not `compared`."""
    model, tensors = Sample(operator, sample), tensors_of(sample)
    try:
        model.copies = changes_inputs(model, tensors)
        expected = plain(model, tensors)
    except Exception:
        return None
    try:
        captured = capture(model, tuple(tensors))
        values, got = executed(captured, tensors)
        if compared:
            compare(got, expected)
        return cut_everywhere(captured, values)
    except TimeoutError:
        raise
    except AutoparError as error:
        return Outcome("refused", line(error))
    except AssertionError as error:
        return Outcome("wrong", line(error))
    except Exception as error:
        return Outcome("raw error", f"{type(error).__name__}: {line(error)}")


def cut_everywhere(captured: Captured, values: dict[fx.Node, Any]) -> Outcome:
    """Every call of a program under every strategy."""
    found: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for node in captured.operators:
        kind = cut_call(node, values)
        found[kind] += 1
        reasons.setdefault(kind, str(node.target))
    if found["replicated"] and not found["cut"]:
        return Outcome("replicated", reasons["replicated"])
    if found["replicated"] or (found["whole"] and found["cut"]):
        return Outcome("partly", reasons.get("replicated", reasons.get("whole", "")))
    return Outcome("whole", reasons["whole"]) if found["whole"] else Outcome("exact")


def cut_call(node: fx.Node, values: dict[fx.Node, Any]) -> str:
    """Whether a call is cut, whole or replicated, or has nothing to cut."""
    sizes = [v.numel() for v in (*map(values.get, tensor_inputs(node)), *info(node).values)
             if isinstance(v, Tensor)]  # fmt: skip
    if max(sizes, default=0) <= 1:
        return "nothing"
    rule = rule_of(node)
    if rule is None:
        return "replicated"
    if "empty" in str(node.target):
        return "cut" if rule.cuttable else "whole"  # what is in fresh memory is not compared
    read = tensor_inputs(node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    constants = tuple(i for i, value in enumerate(read) if not info(value).differentiable)
    case = Case(str(node.target), node.target, args, kwargs, tolerance(node), constants)
    reference = reference_of(case)
    is_cut = False
    for mesh in MESHES:
        strategies = reference.rule.strategies(mesh, ordered=False)
        if len(strategies) > STRATEGIES:
            strategies = random.Random(0).sample(strategies, STRATEGIES)
        for strategy in strategies:
            is_cut |= bool(strategy.cuts)
            try:
                reference.check(strategy, mesh)
            except AssertionError as error:
                told = f"{node.target} under {strategy} on {mesh}: {line(error)}"
                raise AssertionError(told) from error
    return "cut" if is_cut else "whole" if read else "nothing"


def reference_of(case: Case) -> Reference:
    """The uncut call; without gradients where torch refuses them for such outputs."""
    torch.manual_seed(0)
    try:
        return Reference(case)
    except RuntimeError:
        return Reference(replace(case, used=()))


def tolerance(node: fx.Node) -> float:
    """As close as numbers of the coarsest dtype can be."""
    dtypes = [v.dtype for v in info(node).values if isinstance(v, Tensor)]
    dtypes += [info(value).val.dtype for value in tensor_inputs(node)]
    kinds = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return max([1e-9, *(4 * torch.finfo(dtype).eps for dtype in kinds if dtype.itemsize < 16
                        and dtype is not torch.float64)])  # fmt: skip


def changes_inputs(model: Sample, tensors: Sequence[Tensor]) -> bool:
    """Whether a call writes to what it is given."""
    given = [tensor.detach().clone() for tensor in tensors]
    versions = [tensor._version for tensor in given]
    model(*given)
    return any(tensor._version != before for tensor, before in zip(given, versions))


def plain(model: Sample, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Outputs and gradients of the operator, random numbers as the program draws them."""
    leaves = fresh(tensors)
    torch.manual_seed(0)
    with DrawsByPlace():
        outputs = model(*leaves)
    return [*outputs, *slopes(outputs, leaves)]


def executed(
    captured: Captured, tensors: Sequence[Tensor]
) -> tuple[dict[fx.Node, Any], list[Tensor | None]]:
    """The values of all nodes of a program, and its outputs and gradients."""
    leaves, values = fresh(tensors), dict[fx.Node, Any]()

    def note(node: fx.Node, value: Any) -> Any:
        values[node] = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), value)
        return value

    torch.manual_seed(0)
    outputs, _ = run(captured, {}, {}, tuple(leaves), change=note)
    return values, [*outputs, *slopes(outputs, leaves)]


def fresh(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]


def slopes(outputs: Iterable[Any], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients of all leaves for numbers that are drawn; none where torch refuses them."""
    given = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    torch.manual_seed(1)
    # Whatever the order in memory, which copies need not keep.
    seeds = [torch.randn(output.shape, dtype=output.dtype) for output in given]
    if not given or not wanted:
        return [None] * len(wanted)
    try:
        return list(torch.autograd.grad(given, wanted, seeds, allow_unused=True))
    except RuntimeError:
        return []


def compare(got: Sequence[Any], expected: Sequence[Any]) -> None:
    """A program's results and gradients are the operator's."""
    assert len(got) == len(expected), f"{len(got)} results and gradients of {len(expected)}"
    for one, other in zip(got, expected):
        if not isinstance(other, Tensor) or not isinstance(one, Tensor):
            zero = next((v for v in (one, other) if isinstance(v, Tensor)), None)
            assert one == other if zero is None else not zero.any(), f"{one} for {other}"
            continue
        assert (one.shape, one.dtype) == (other.shape, other.dtype), "another shape or dtype"
        torch.testing.assert_close(one, other, equal_nan=True)


def line(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split())[:300]


def _late(*_: object) -> None:
    raise TimeoutError


if __name__ == "__main__":
    sys.exit(main())

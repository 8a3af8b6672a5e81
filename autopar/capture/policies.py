"""Policies: which results a checkpoint saves, operator by operator, as eager torch would ask.

    checkpoint(f, x, use_reentrant=False, context_fn=partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]))

A policy speaks of the operators that run below autograd. A captured call may consist of several:
each call runs on its fake values, in the order of the program, and its result is saved if the
policy saves what an operator in it makes. A policy that counts thus sees what it sees in eager
torch. Answers become facts of the calls, so that a plan needs the policy no more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, noop_context_fn

from autopar._torch.checkpoint_policies import Policy, PolicyMode
from autopar._torch.tensors import memory_of
from autopar.capture.captured import Captured
from autopar.capture.fake import FakeTensor
from autopar.capture.folding import complete_program
from autopar.capture.normalisations.linear import biased
from autopar.capture.origins import is_of_parameters
from autopar.capture.regions import runs
from autopar.errors import InvalidInput
from autopar.strategies.kernels import keyed_draws
from autopar.strategies.node_info import info
from autopar.strategies.registry import is_view
from autopar.strategies.results import maker
from autopar.text.source_lines import caller

NO_POLICY = -1
_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
Context = Callable[[], Any]


class CheckpointPolicies:
    """The `context_fn` of each checkpoint that a forward comes through, equal ones once."""

    def __init__(self) -> None:
        self._contexts: list[Context] = []
        # By number, the modes that have been made of checkpoints which have not decided yet.
        self._modes: defaultdict[int, list[PolicyMode]] = defaultdict(list)

    def number_of(self, context: Context) -> int:
        """Return the number of the policy of a checkpoint, as forward comes to it."""
        if context is noop_context_fn:
            return NO_POLICY
        mode = _mode_of(context, caller())
        equal = (n for n, known in enumerate(self._contexts) if _is_same(known, context))
        number = next(equal, len(self._contexts))
        if number == len(self._contexts):
            self._contexts.append(context)
        self._modes[number].append(mode)
        return number

    def decided(self, captured: Captured) -> Captured:
        """Return a program whose calls in checkpoints with policies know what these decide."""
        numbers = dict[int, int]()  # by checkpoint
        for node in captured.operators:
            policy, checkpoint = node.meta.get("policy", NO_POLICY), info(node).checkpoint
            if checkpoint is not None and policy != NO_POLICY:
                numbers[checkpoint] = policy
        segments = () if captured.program is None else captured.program.segments
        for graph in (captured.graph, *(segment.graph for segment in segments)):
            for node in graph.nodes:
                node.meta.pop("policy", None)
        modes = dict[int, PolicyMode]()
        calls = list[tuple[fx.Node, PolicyMode]]()
        for node in captured.operators:
            checkpoint = info(node).checkpoint
            if checkpoint is None or checkpoint not in numbers:
                continue
            if checkpoint not in modes:
                modes[checkpoint] = self._next_mode(numbers[checkpoint], node)
            calls.append((node, modes[checkpoint]))
        return _with_answers(captured, calls)

    def _next_mode(self, number: int, node: fx.Node) -> PolicyMode:
        """Return the mode of the next checkpoint; forward may have come through an equal one."""
        waiting = self._modes[number]
        return waiting.pop(0) if waiting else _mode_of(self._contexts[number], info(node).source)


def ask_policy(
    captured: Captured, regions: Collection[str], policy: Policy | Iterable[Any]
) -> Captured:
    """Return a program whose calls in these regions know which of their results a policy saves."""
    mode = PolicyMode.of(policy)
    return _with_answers(captured, [(node, mode) for node in _calls_in(captured, regions)])


def keep_answers(captured: Captured, regions: Collection[str], saved: Collection[str]) -> Captured:
    """Return a program whose calls in these regions save the results of those named in `saved`."""
    calls = _calls_in(captured, regions)
    return _with_facts(captured, {node: node.name in saved for node in calls})


def keep_answers_like(captured: Captured, other: Captured) -> Captured:
    """Return a program in which calls save results as calls of the same name do in another."""
    others = {node.name: node for node in other.operators if info(node).policy_saves is not None}
    facts = {
        node: info(others[node.name]).policy_saves
        for node in captured.operators
        if node.name in others and node.target == others[node.name].target
    }
    return _with_facts(captured, facts)


def saved_results(captured: Captured) -> tuple[str, ...]:
    """Return the names of the calls whose results policies save."""
    return tuple(node.name for node in captured.operators if info(node).policy_saves)


def _calls_in(captured: Captured, regions: Collection[str]) -> list[fx.Node]:
    found = runs(captured.graph, regions, partial(is_of_parameters, captured=captured))
    inside = {node for _, nodes in found for node in nodes}
    return [node for node in captured.operators if node in inside]


def _mode_of(context: Context, source: str | None) -> PolicyMode:
    try:
        return PolicyMode(context())
    except TypeError:
        raise InvalidInput(
            "a checkpoint keeps what its function reads, and what a policy saves of operators",
            got=f"torch.utils.checkpoint with context_fn={context!r}",
            remedy="context_fn=functools.partial(create_selective_checkpoint_contexts, policy), "
            'recompute="selective", or a checkpoint around less',
            source=source,
        ) from None


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two functions do the same: equal partials, methods or closures."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, partial):
        words, others = ((f.func, f.args, f.keywords) for f in (one, other))
        leaves = [pytree.tree_flatten(parts) for parts in (words, others)]
        (values, spec), (other_values, other_spec) = leaves
        return spec == other_spec and all(map(_is_same, values, other_values))
    if isinstance(one, MethodType):
        return one == other
    if isinstance(one, FunctionType):
        cells = [[c.cell_contents for c in f.__closure__ or ()] for f in (one, other)]
        facts = [(f.__code__, f.__defaults__, f.__kwdefaults__) for f in (one, other)]
        return facts[0] == facts[1] and all(map(_is_same, *cells))
    return False


def _with_answers(captured: Captured, calls: list[tuple[fx.Node, PolicyMode]]) -> Captured:
    """Return a program whose calls know what the policies of these modes say, in this order."""
    saved, sums = set[fx.Node](), dict[fx.Node, fx.Node]()
    for node, mode in calls:
        if (total := biased(node)) is not None:
            sums[total] = node
        if node not in sums:
            saved |= _saved_by(node, mode)
    facts = {node: node in saved or sums.get(node) in saved for node, _ in calls}
    return _with_facts(captured, facts)


def _with_facts(captured: Captured, facts: Mapping[fx.Node, bool | None]) -> Captured:
    """Write which calls save results; blocks that differ in this stand for each other no more."""
    if not facts:
        return captured
    for node, fact in facts.items():
        info(node).policy_saves = fact
    if captured.program is None:
        return captured
    for node in captured.graph.nodes:
        node.meta.pop("block", None)
    names = [*captured.parameters.values(), *captured.buffers.values()]
    return complete_program(replace(captured, program=None), names, ())


def _saved_by(node: fx.Node, mode: PolicyMode) -> set[fx.Node]:
    """Return the calls whose memory a policy keeps of what one call makes, or looks at."""
    fakes = [leaf for leaf in pytree.tree_leaves(info(node).val) if isinstance(leaf, FakeTensor)]
    if not fakes:
        return set()
    function, args, kwargs = _as_in_torch(node)
    inputs = list[fx.Node]()
    fx.map_arg((args, kwargs), inputs.append)
    given, read, saved = dict[fx.Node, Any](), dict[int, fx.Node](), set[fx.Node]()
    with fakes[0].fake_mode:
        for value in dict.fromkeys(inputs):  # equal calls may share one fake value
            given[value] = _apart(info(value).val, learns=info(value).differentiable)
            if isinstance(given[value], Tensor):
                read[memory_of(given[value])] = value
    args, kwargs = fx.map_arg((args, kwargs), given.__getitem__)

    def note(operator: Any, answer: CheckpointPolicy, results: list[Tensor]) -> None:
        if answer.name.endswith("CPU_OFFLOAD"):
            raise InvalidInput(
                "a policy saves what an operator makes on its device, or has it made again",
                got=f"{answer} for {operator}",
                remedy='MUST_SAVE, or recompute=ap.Recompute("full", keep="host"), which keeps '
                "what a region reads on the host",
                source=info(node).source,
            )
        if answer in _SAVES:
            looked_at = (read.get(memory_of(result)) for result in results)
            saved.update(node if value is None else _maker(value) for value in looked_at)

    with fakes[0].fake_mode, torch.enable_grad(), mode.asking(note):
        function(*args, **kwargs)
    return saved


def _apart(value: Any, *, learns: bool) -> Any:
    """Return a fake value in memory of its own."""
    if not isinstance(value, Tensor):
        return value
    form = value.shape, value.stride()
    made = torch.empty_strided(*form, dtype=value.dtype, device=value.device)
    return made.requires_grad_(learns)


def _as_in_torch(node: fx.Node) -> tuple[Callable[..., Any], Any, Any]:
    """Return the call that torch makes: with a bias, and with random numbers of its own."""
    function: Any = node.target
    if function is torch.ops.aten.linear.default and (total := biased(node)) is not None:
        return function, (*node.args, total.args[1]), {}
    if function is keyed_draws.dropout:
        value, _, _, probability = node.args
        return torch.dropout, (value, probability, True), {}
    return function, node.args, node.kwargs


def _maker(value: fx.Node) -> fx.Node:
    """Return the call in whose memory a value of a captured program lies, or a placeholder."""
    while value.op == "call_function" and is_view(value):
        value = value.all_input_nodes[0]
    return maker(value)

"""Flatten: an exported program becomes one flat graph, a `GraphBuilder`.

Regions without gradients and regions of automatic precision, which export keeps as calls of
sub-graphs, are inlined: what flows into a region without gradients is detached at its border, and
what an operator in an autocast region would have cast is cast by a node of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from autopar._torch.autograd import mapping_begins
from autopar.capture.casts import cast_dtype, cast_parts
from autopar.capture.checkpoints import BORDER
from autopar.capture.effects import KEPT
from autopar.capture.failure import VALUES_REMEDY
from autopar.capture.graph_builder import GraphBuilder, fake_like, is_mutable
from autopar.capture.guards import VALUES
from autopar.capture.hidden import Needed
from autopar.capture.listing import operator_name
from autopar.capture.mapped import (
    FLAT_APPLY,
    FLEX_ATTENTION,
    FlexAttention,
    calls_of,
    is_higher,
    over_all,
    section,
)
from autopar.capture.refused import (
    around_operators,
    no_operator,
    no_tensor,
    require_dense,
)
from autopar.capture.source import of_stack
from autopar.capture.templates import AGAIN, BEGINS, ENDS, Template, templates_of
from autopar.errors import InvalidInput, unforeseen
from autopar.strategies.node_info import info

aten = torch.ops.aten
_HELD = (InputKind.PARAMETER, InputKind.BUFFER)


@dataclass(frozen=True)
class Region:
    """What the user switched on around some operators."""

    gradients: bool = True
    autocast: Callable[[], Any] = nullcontext
    is_autocast: bool = False


def flatten(
    program: ExportedProgram,
    mode: FakeTensorMode,
    names: dict[str, str],
    fakes: dict[str, torch.Tensor],
    read: dict[str, torch.Tensor],
    input_spec: pytree.TreeSpec,
    flat_inputs: list[Any],
) -> GraphBuilder:
    """The flat graph of `program`.

    `fakes`: of every parameter and buffer by its name, in order; `names` leads there from every
    name. `read`: as the program reads them, by every name. Blocks that are left out have none.
    """
    tied = {alias: name for alias, name in names.items() if alias != name}
    builder = GraphBuilder(mode, tied, input_spec, program.call_spec.out_spec)
    builder.shares_values = not _changes_values(program.graph_module)
    values, held = _placeholders(builder, program, names, fakes, read, flat_inputs)
    inliner = _Inliner(builder, held)
    results = inliner.inline(program.graph_module, values, Region())
    constants = {at: one for at, one in enumerate(results) if not isinstance(one, fx.Node)}
    builder.output_constants.update(constants)
    tensors = [result for result in results if isinstance(result, fx.Node)]
    builder.graph.output((*tensors, *inliner.kept))
    return builder


def _changes_values(module: fx.GraphModule) -> bool:
    """Whether some call, of sub-graphs too, changes what it is given."""
    graphs = [one.graph for one in module.modules() if isinstance(one, fx.GraphModule)]
    return any(is_mutable(node.target) for graph in graphs for node in graph.nodes)


def _placeholders(
    builder: GraphBuilder,
    program: ExportedProgram,
    names: dict[str, str],
    fakes: dict[str, torch.Tensor],
    read: dict[str, torch.Tensor],
    flat_inputs: list[Any],
) -> tuple[dict[fx.Node, Any], dict[str, Any]]:
    """Make all placeholders, in order, and map those of the program, and names, to them."""
    made: dict[str, fx.Node] = {}
    for name, fake in fakes.items():
        is_parameter = isinstance(fake, nn.Parameter)
        node = builder.placeholder(f"{'bp'[is_parameter]}_{name.replace('.', '_')}", fake)
        info(node).module, made[name] = name.rpartition(".")[0], node
        (builder.parameters if is_parameter else builder.buffers)[node.name] = name
    placeholders = program.graph.find_nodes(op="placeholder")
    specs = dict(zip(placeholders, program.graph_signature.input_specs))
    values: dict[fx.Node, Any] = {}
    users = []
    for old, spec in specs.items():
        if spec.kind in _HELD:
            continue
        if spec.kind is InputKind.CONSTANT_TENSOR:
            assert spec.target is not None
            value = program.constants[spec.target]
            name = spec.target.rpartition(".")[2]  # behind the path of a module
            if isinstance(value, FakeTensor) and name.startswith("lifted_tensor"):
                raise around_operators(old)
            node = values[old] = builder.placeholder(old.name, fake_like(builder.mode, value))
            # The user's own tensor may change later; a constant is what it was.
            is_held = not isinstance(value, FakeTensor)
            builder.constants[node.name] = value.detach().clone() if is_held else value
        elif spec.kind is InputKind.USER_INPUT:
            users.append(old)
        else:
            raise no_tensor(old, spec, program.constants.get(str(spec.target)))
    inputs: list[str | None] = []
    for index, (old, given) in enumerate(zip(users, flat_inputs, strict=True)):
        if isinstance(given, torch.Tensor):
            node = values[old] = builder.placeholder(old.name, given)
            inputs.append(node.name)
        else:
            values[old] = given
            builder.static_inputs[index] = given
            inputs.append(None)
    builder.inputs = tuple(inputs)
    casts: dict[fx.Node, fx.Node] = {}
    held = {name: _cast(builder, made[names[name]], like, casts) for name, like in read.items()}
    for old, node in values.items():
        if isinstance(node, fx.Node):
            values[old] = _cast(builder, node, info(old).val, casts)
    of_program = {old: str(spec.target) for old, spec in specs.items() if spec.kind in _HELD}
    if any(old.users and name not in held for old, name in of_program.items()):
        raise Needed(None)  # of a block that was left out
    values |= {old: held[name] for old, name in of_program.items() if name in held}
    return values, held


def _cast(
    builder: GraphBuilder, node: fx.Node, like: torch.Tensor, casts: dict[fx.Node, fx.Node]
) -> fx.Node:
    """A placeholder that is kept, or given, in another dtype than the program reads it in, in that:
    one cast for all its names."""
    if info(node).val.dtype == like.dtype:
        return node
    if node not in casts:
        casts[node] = builder.call(node, aten.to.dtype, node, like.dtype)
    return casts[node]


@dataclass
class _Inliner:
    """Copies graphs into one, those inside others too."""

    builder: GraphBuilder
    held: dict[str, Any]  # parameters and buffers by name
    checkpoint: dict[str, int] = field(default_factory=dict)  # that what follows stands in
    checkpoints: int = 0  # until here
    kept: Sequence[fx.Node] = ()  # what forward leaves behind in Python
    blocks: dict[int, Template] = field(default_factory=dict)
    copied: tuple[Template, str, str | None] | None = None  # and for which block, called where

    def inline(
        self, module: fx.GraphModule, values: dict[fx.Node, Any], region: Region
    ) -> list[Any]:
        """Copy the calls of `module`; `values` maps its placeholders. Returns its results."""
        detached: dict[fx.Node, fx.Node] = {}
        if not region.gradients:
            for key, value in values.items():
                if isinstance(value, fx.Node) and not info(value).no_grad:
                    values[key] = self._detach(value, detached)
        results = self._follow([*module.graph.nodes], module, values, region)
        return [_itself(result, detached) for result in results]

    def _follow(
        self,
        nodes: list[fx.Node],
        module: fx.GraphModule,
        values: dict[fx.Node, Any],
        region: Region,
    ) -> list[Any]:
        """Copy these calls of `module`. Returns its results, if they end with them."""
        skipped: set[fx.Node] = set()
        self.blocks.update(templates_of(nodes, module, values))
        for at, node in enumerate(nodes):
            if node.op == "placeholder" or node in skipped or node.target in (BEGINS, ENDS):
                continue
            if node.target is aten.nonzero.default and (counts := _only_counted(node)) is not None:
                skipped |= counts  # a loop over it has been followed (each.py)
                continue
            if node.target is mapping_begins:
                skipped.update(self._mapped(nodes[at:], module, values, region))
                continue
            args: Any = fx.map_arg(node.args, values.__getitem__)
            if node.op == "output":
                return list(args[0])
            if node.target is KEPT:
                self.kept = args[0]
                continue
            if node.target is AGAIN:
                values[node] = self._again(node, args, region)
                continue
            if node.op == "get_attr":
                values[node] = self._attribute(node, getattr(module, str(node.target)))
                continue
            kwargs = fx.map_arg(node.kwargs, values.__getitem__)
            values[node] = self._call(node, args, kwargs, region)
        return []

    def _again(self, node: fx.Node, args: Any, region: Region) -> list[Any]:
        """Copy the calls of an equal block."""
        number, path, *_, given = args
        block = self.blocks[number]
        self.copied = block, path, of_stack(node.meta.get("stack_trace"))
        values = block.inputs(path, given, self.held)
        self._follow(block.nodes, block.module, values, region)
        self.copied = None
        return [values[result] for result in block.results]

    def _origin(self, node: fx.Node) -> tuple[str, str | None]:
        """The path of the module, and the line, that a call comes from."""
        stack = node.meta.get("nn_module_stack") or {}
        module = next(reversed(stack.values()), ("",))[0] if stack else ""
        source = of_stack(node.meta.get("stack_trace"))
        if self.copied is None:
            return module, source
        block, path, line = self.copied
        is_inside = module == block.path or module.startswith(block.path + ".")
        module = path + module.removeprefix(block.path) if is_inside else module
        return module, line if source == block.source else source

    def _attribute(self, node: fx.Node, value: Any) -> Any:
        """Of a module: a graph, or a tensor that forward makes of numbers."""
        if not isinstance(value, torch.Tensor):
            return value
        new = self.builder.constant("number", value, node)
        info(new).update(module="", source=of_stack(node.meta.get("stack_trace")))
        return new

    def _call(self, node: fx.Node, args: Any, kwargs: Any, region: Region) -> Any:
        if node.target is operator.getitem and isinstance(args[0], list | tuple):
            return args[0][args[1]]
        if node.target is aten._assert_tensor_metadata.default:
            return None  # a dtype as export knew it, which autocast may have made another
        if node.target is BORDER:
            here = {"checkpoint": self.checkpoints, "policy": args[2]} if args[1] else {}
            self.checkpoint, self.checkpoints = here, self.checkpoints + args[1]
            return None
        if node.target is FLEX_ATTENTION:
            return self._attention(args, node, region)
        inner, module, operands = self._region(node, args, region)
        if module is not None:
            placeholders = module.graph.find_nodes(op="placeholder")
            return self.inline(module, dict(zip(placeholders, operands)), inner)
        if region.is_autocast:
            parts, *cast = self._in_digits(node, args, kwargs, region)
            if parts is not None:
                return parts
            args, kwargs = cast
        new = self.builder.graph.create_node("call_function", node.target, args, kwargs)
        info(new).module, info(new).source = self._origin(node)
        info(new).no_grad = not region.gradients
        info(new).update(**self.checkpoint)
        try:
            value = self.builder.evaluate(node.target, args, kwargs)  # type: ignore[arg-type]
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            got = f"{operator_name(node.target)}, whose result depends on values"
            source = info(new).source
            raise InvalidInput(VALUES, got=got, remedy=VALUES_REMEDY, source=source) from error
        except Exception as error:
            raise unforeseen("capture follows", new, error) from error
        require_dense(new, value, region.gradients)
        info(new).val = value
        return new

    def _mapped(
        self,
        nodes: Sequence[fx.Node],
        module: fx.GraphModule,
        values: dict[fx.Node, Any],
        region: Region,
    ) -> list[fx.Node]:
        """The first of `nodes` that map something, whose results are `values` then."""
        mapped = section(nodes)
        for node in mapped:
            if node.op == "get_attr":
                values[node] = self._attribute(node, getattr(module, str(node.target)))
            elif is_higher(node) and node.target is not FLAT_APPLY:
                raise no_operator(node)
        reads, gives, run = calls_of([node for node in mapped if node.op == "call_function"])
        others = {node: values[node] for node in reads}
        tensors = [node for node in reads if isinstance(values[node], fx.Node)]
        like = next((node for node in mapped if "stack_trace" in node.meta), nodes[0])

        def function(*given: Any) -> list[Any]:
            return run({**others, **dict(zip(tensors, given))})

        found = self._over_all(function, [values[node] for node in tensors], like, region)
        values.update(zip(gives, found))
        return mapped

    def _attention(self, args: Sequence[Any], node: fx.Node, region: Region) -> list[Any]:
        """The results of FlexAttention, those alone that are asked for. Automatic precision is that
        of what it reads; it adds up in more digits."""
        if region.is_autocast:
            args = [*(self._in_precision(x, node, region) for x in args[:3]), *args[3:]]
            region = replace(region, is_autocast=False)
        call = FlexAttention(*args)
        given = [call.query, call.key, call.value]
        if call.bias is None:
            return self._over_all(call.whole, [*given, *call.others], node, region)
        (mask,) = self._over_all(call.mask, [*given[:2], *call.others], node, region)
        module = call.product(mask, node)
        placeholders = module.graph.find_nodes(op="placeholder")
        return self.inline(module, dict(zip(placeholders, [*given, mask])), region)

    def _in_precision(self, x: fx.Node, node: fx.Node, region: Region) -> fx.Node:
        """A value in the dtype of an autocast."""
        with region.autocast():
            device = info(x).val.device.type
            dtype = torch.get_autocast_dtype(device)
            is_cast = torch.is_autocast_enabled(device) and info(x).val.dtype != torch.float64
        return self._cast_to(x, dtype, node, region) if is_cast else x

    def _over_all(
        self, function: Callable[..., Any], given: Sequence[Any], node: fx.Node, region: Region
    ) -> list[Any]:
        """The results of a function of nodes that maps others."""
        try:
            module = over_all(function, given, self.builder.mode, node)
        except Exception as error:
            info(node).source = of_stack(node.meta.get("stack_trace"))
            raise unforeseen("capture maps", node, error) from error
        placeholders = module.graph.find_nodes(op="placeholder")
        return self.inline(module, dict(zip(placeholders, given)), region)

    def _region(
        self, node: fx.Node, args: Any, region: Region
    ) -> tuple[Region, fx.GraphModule | None, tuple]:
        """The region that `node` opens, its graph and the operands of that."""
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            enabled, module, *operands = args
            return replace(region, gradients=enabled), module, tuple(operands)
        if node.target is torch.ops.higher_order.wrap_with_autocast:
            device, dtype, enabled, cache, module, *operands = args

            def autocast() -> Any:
                return torch.autocast(device, dtype, enabled, cache)

            return replace(region, autocast=autocast, is_autocast=True), module, tuple(operands)
        if is_higher(node):
            raise no_operator(node)
        return region, None, ()

    def _detach(self, value: fx.Node, detached: dict[fx.Node, fx.Node]) -> fx.Node:
        """Cut `value` from its gradient, once for each region."""
        fake = info(value).val
        if not isinstance(fake, torch.Tensor) or not (
            fake.dtype.is_floating_point or fake.dtype.is_complex
        ):
            return value
        if value not in detached:
            detached[value] = self.builder.call(value, aten.detach.default, value)
            info(detached[value]).no_grad = True
        return detached[value]

    def _in_digits(self, node: fx.Node, args: Any, kwargs: Any, region: Region) -> Any:
        """What becomes of a call under autocast: its parts, if these alone are cast; or None, and
        the arguments as they are cast."""
        if (parts := cast_parts(self.builder, node, args, kwargs, region.autocast)) is None:
            dtype = cast_dtype(self.builder, node, args, kwargs, region.autocast)
            if dtype is None:
                return None, args, kwargs
            cast = partial(self._cast_to, dtype=dtype, node=node, region=region)
            return None, *fx.map_arg((args, kwargs), cast)
        module, given = parts
        placeholders = module.graph.find_nodes(op="placeholder")
        inner = replace(region, is_autocast=False)
        found = self.inline(module, dict(zip(placeholders, given)), inner)
        is_one = len(node.target._schema.returns) == 1  # type: ignore[union-attr]
        return found[0] if is_one else found, args, kwargs

    def _cast_to(
        self, value: fx.Node, dtype: torch.dtype, node: fx.Node, region: Region
    ) -> fx.Node:
        """A value in another dtype, for what reads it."""
        fake = info(value).val
        if not fake.is_floating_point() or fake.dtype in (dtype, torch.float64):
            return value
        new = self.builder.call(node, aten.to.dtype, value, dtype)
        info(new).update(
            module=info(value).module,
            source=of_stack(node.meta.get("stack_trace")),
            no_grad=not region.gradients,
            **self.checkpoint,
        )
        return new


def _only_counted(node: fx.Node) -> set[fx.Node] | None:
    """Numbers and checks alone that are made of a value, which nothing else reads."""
    found, waiting = set[fx.Node](), list(node.users)
    for user in waiting:  # which grows meanwhile
        if user.op == "output" or isinstance(user.meta.get("val"), torch.Tensor):
            return None
        found.add(user)
        waiting.extend(user.users)
    return found


def _itself(result: Any, detached: dict[fx.Node, fx.Node]) -> Any:
    """What a region gives: where that is what it was given (a cast to the same dtype gives its
    input, and so does what changes it in place), it has the gradient of that."""
    while isinstance(result, fx.Node) and _gives_first(result):
        result = result.args[0]
    for given, copy in detached.items():
        if isinstance(result, fx.Node) and info(result).val is info(copy).val:
            return given
    return result


def _gives_first(call: fx.Node) -> bool:
    """Whether a call changes its first argument in place, and gives that."""
    if not is_mutable(target := call.target) or "out" in call.kwargs:
        return False
    returns = target._schema.returns  # type: ignore[union-attr]
    return len(returns) == 1 and bool(returns[0].alias_info) and returns[0].alias_info.is_write

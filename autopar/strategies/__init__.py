"""Strategies: what every operator can do, one line an operator.

    register_rule("aten.linear", "... i, o i -> ... o", passes="each", saved="0 1")

    rule = rule_of(node)                    # the line with the sizes of one call; None: replicated
    for strategy in rule.strategies(mesh):  # every way to give the mesh's axes to its factors
        rule.signature(strategy)            # layouts of inputs, gradients and outputs

Reading order: `language.py` reads a line, `rule.py` says what follows from it, `registry.py` keeps
the rules, and each file of `rules/` has the rules of a family of operators: a new operator is one
line there. `observed_rules.py` serves calls without a rule, `local_calls.py` makes one rank's call.
`kernels/` holds the local functions that some cuts need, `kernel_calls.py` says when.
"""

import importlib
import pkgutil

from autopar.strategies import rules
from autopar.strategies.kernel_calls import KernelCall
from autopar.strategies.kernels import KERNELS, Expansion, Kernel
from autopar.strategies.language import Pattern, parse
from autopar.strategies.local_calls import (
    arguments_of_piece,
    joint_arguments,
    localize_arguments,
    piece_call,
    placed_arguments,
)
from autopar.strategies.observed_rules import observed_rule
from autopar.strategies.registry import (
    OperatorCall,
    Traits,
    has_rule,
    origin_of,
    register_derived,
    register_rule,
    registered,
    rule_of,
    tensor_inputs,
    traits_of,
)
from autopar.strategies.rule import Dim, ExtraTensor, LayoutSignature, Rule, Saved
from autopar.strategies.strategy import JointCut, Strategy

# Each family registers its rules.
for _family in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
    importlib.import_module(_family.name)

__all__ = [
    "KERNELS",
    "Dim",
    "Expansion",
    "ExtraTensor",
    "JointCut",
    "Kernel",
    "KernelCall",
    "LayoutSignature",
    "OperatorCall",
    "Pattern",
    "Rule",
    "Saved",
    "Strategy",
    "Traits",
    "arguments_of_piece",
    "has_rule",
    "joint_arguments",
    "localize_arguments",
    "observed_rule",
    "origin_of",
    "parse",
    "piece_call",
    "placed_arguments",
    "register_derived",
    "register_rule",
    "registered",
    "rule_of",
    "tensor_inputs",
    "traits_of",
]

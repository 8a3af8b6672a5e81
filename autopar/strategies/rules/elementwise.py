"""Elementwise operators: dims align from the right, every one can be cut.

Partial sums pass through the linear ones: through all inputs of a sum together, through one factor
of a product at a time, through the dividend but not the divisor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch

from autopar.strategies.language import Options
from autopar.strategies.node_info import info
from autopar.strategies.registry import OperatorCall, Traits, aten, register_rule
from autopar.strategies.rule import Rule, names

SAVES_OUTPUT = aten("exp exp2 sqrt rsqrt tanh sigmoid relu reciprocal expm1 tan special_ndtri")
SAVES_INPUT = aten(
    "log log2 log10 log1p hardtanh gelu silu mish abs cos sin acos asin atan erf square "
    "leaky_relu elu softplus selu celu hardswish hardsigmoid relu6 erfinv nan_to_num softshrink "
    "hardshrink cosh sinh asinh acosh atanh angle erfc lgamma digamma logit i0 sinc special_entr"
)
SAVES_BOTH = aten("sgn special_i0e special_i1 special_i1e special_log_ndtr special_erfcx")
SAVES_NOTHING = aten(
    "sign floor ceil round trunc frac isnan isinf isfinite isposinf isneginf isreal signbit "
    "logical_not bitwise_not special_airy_ai special_spherical_bessel_j0 "
    "special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 "
    "special_modified_bessel_i0 special_modified_bessel_i1 "
    "special_modified_bessel_k0 special_modified_bessel_k1 "
    "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1"
)
LINEAR = aten(
    "neg clone positive contiguous lift_fresh lift_fresh_copy conj_physical resolve_conj "
    "resolve_neg deg2rad rad2deg"
)
VIEWS = aten("alias detach")
COMPARISONS = aten(
    "eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor "
    "bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ floor_divide"
)
# They have no gradients.
POLYNOMIALS = aten(
    "special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
    "special_chebyshev_polynomial_w special_shifted_chebyshev_polynomial_t "
    "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
    "special_shifted_chebyshev_polynomial_w special_hermite_polynomial_h "
    "special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p"
)
DIVISORS = aten("lcm gcd")
PAIRS = aten(
    "maximum minimum max.other min.other atan2 remainder fmod fmax fmin logaddexp logaddexp2 "
    "xlogy special_xlog1py"
)

LEADING = Traits(leading="")


def elementwise(call: OperatorCall, **options: Unpack[Options]) -> Rule:
    """Return a rule by which all tensor inputs are broadcast to the output."""
    count = max(call.slots, default=-1) + 1
    return call.parse(", ".join(["..."] * count) + " -> ...", **options)


def _sum_of_inputs(call: OperatorCall) -> Rule:
    if len(call.shapes) == 2:
        return elementwise(call, passes="all")
    # Each rank would add the number.
    return replace(elementwise(call), added_numbers=frozenset({"other"}))


def _scaled(call: OperatorCall) -> Rule:
    """Return the rule of a division, which is linear in its first input."""
    if len(call.shapes) == 1:
        return elementwise(call, passes=[(0,)])
    rule = elementwise(call, passes=[(0,)], saved="0 1")
    return replace(rule, saved=replace(rule.saved, factors=frozenset({0})))


def _product(call: OperatorCall) -> Rule:
    return elementwise(call, passes="each", saved="0 1" if len(call.shapes) == 2 else "")


def _converted(call: OperatorCall) -> Rule:
    """Return the rule of a conversion: sums pass to a dtype that holds every number of theirs."""
    before, after = info(call.inputs[0]).val.dtype, call.outputs[0].dtype
    passes = [(0,)] if _holds(after, before) else []
    rounds = after.is_floating_point and not (passes or before.is_complex)
    if len(call.shapes) == 1:
        return replace(elementwise(call, passes=passes, cost=0), rounds=rounds)
    # The first input shapes the output, the others (read for their dtype alone) stay whole.
    first, *others = (names(len(s), f"other{i}_" if i else "d") for i, s in enumerate(call.shapes))
    whole = [dim for other in others for dim in other]
    return call.rule([first, *others], first, whole=whole, passes=passes, flops=0.0, rounds=rounds)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return whether `wide` has all numbers of `narrow`; signed integers shall not overflow."""
    if narrow.is_floating_point or narrow.is_complex:
        if not (wide.is_complex or (wide.is_floating_point and not narrow.is_complex)):
            return False
        large, small = torch.finfo(wide), torch.finfo(narrow)  # float8 is promoted to nothing
        return large.eps <= small.eps and large.max >= small.max and large.tiny <= small.tiny
    return narrow.is_signed and wide in (torch.int32, torch.int64, torch.float64, torch.complex128)


def _where(call: OperatorCall) -> Rule:
    values = [call["self"], call["other"]] if "other" in call.arguments else []
    slots = [index for index, node in enumerate(call.inputs) if index > 0]
    constants = [v for v in values if isinstance(v, (int, float))]
    linear = slots and all(value == 0 for value in constants)
    return elementwise(call, passes=[slots] if linear else "", saved="0")


def _is_among(call: OperatorCall) -> Rule:
    """Return the rule of isin: each element is looked for in the whole second input."""
    shapes, first = list(call.shapes), call.inputs[0] is call.get("elements")
    among = [names(len(shape), "among") for shape in shapes[first:]]
    inputs = [*([names(len(shapes[0]))] if first else []), *among]
    return call.rule(inputs, names(len(call.shape)), whole=[dim for dims in among for dim in dims])


def _masked_fill(call: OperatorCall) -> Rule:
    zero = isinstance(call["value"], (int, float)) and call["value"] == 0
    return elementwise(call, passes=[(0,)] if zero else "", saved="1")


register_rule(SAVES_OUTPUT, "... -> ...", saved="output")
register_rule(SAVES_INPUT, "... -> ...", saved="0", traits=LEADING)
register_rule(SAVES_BOTH, "... -> ...", saved="0 output")
register_rule(SAVES_NOTHING, "... -> ...")
register_rule(LINEAR, "... -> ...", passes="all", cost=0)
register_rule(VIEWS, "... -> ...", passes="all", cost=0, traits=Traits(view=True))
register_rule([*COMPARISONS, *POLYNOMIALS, *DIVISORS], "..., ... -> ...")
register_rule(aten("isclose heaviside"), "..., ... -> ...")
register_rule(PAIRS, "..., ... -> ...", saved="0 1")
register_rule("aten.native_dropout_backward", "..., ... -> ...", passes=[(0,)], saved="0 1")
register_rule("aten._prelu_kernel", "..., ... -> ...", saved="0 1")
register_rule(aten("nextafter igamma igammac special_zeta"), "..., ... -> ...", saved="0 1")
register_rule("aten.copysign", "..., ... -> ...", saved="0 output")
register_rule("aten.ldexp", "..., ... -> ...", passes=[(0,)], saved="1 output")
register_rule(aten("polygamma special_polygamma mvlgamma"), "... -> ...", saved="0")
register_rule("aten.frexp", "... -> ..., ...", extra="int32: ...")
register_rule("aten.isin", _is_among)
register_rule("aten.threshold", "... -> ...", saved="0")
register_rule("aten.log_sigmoid", "... -> ...", saved="0", extra="...")
register_rule(aten("real imag"), "... -> ...", passes="all", cost=0)
register_rule("aten.complex", "..., ... -> ...", passes="all", saved="0 1")
register_rule("aten.polar", "..., ... -> ...", saved="output")
register_rule(aten("pow hypot"), "..., ... -> ...", saved="0 1 output")
register_rule("aten.pow.Tensor_Scalar", "... -> ...", saved="0")
register_rule("aten.pow.Scalar", "... -> ...", saved="0 output")
register_rule(aten("add sub rsub"), _sum_of_inputs)
register_rule("aten.mul", _product)
register_rule("aten.div", _scaled)
register_rule("aten.div.Tensor_mode", "..., ... -> ...", saved="0 1")
register_rule("aten.div.Scalar_mode", "... -> ...")
register_rule(aten("to _to_copy type_as"), _converted, traits=LEADING)
register_rule("aten.clamp", "..., ..., ... -> ...", saved="0 1 2")
register_rule(aten("clamp_min clamp_max"), "..., ... -> ...", saved="0 1")
register_rule("aten.addcmul", "..., ..., ... -> ...", saved="1 2")
register_rule("aten.addcdiv", "..., ..., ... -> ...", saved="1 2")
register_rule("aten.lerp", "..., ..., ... -> ...", saved="0 1 2")
register_rule("aten.lerp.Scalar", "..., ... -> ...", passes="all")
register_rule("aten.where", _where)
register_rule("aten.masked_fill", _masked_fill)

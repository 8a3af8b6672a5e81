"""Calls of functions, reductions, matrices and transforms."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.strategies.rules.elementwise import DIVISORS, POLYNOMIALS
from tests.strategies.case_book import case, i, plain, t, u, z


def positive(*shape: int) -> Tensor:
    """Return symmetric matrices with positive eigenvalues, well apart."""
    root = t(*shape)
    eigenvalues = torch.diag_embed(torch.arange(1.0, shape[-1] + 1, dtype=torch.float64))
    return root @ root.mT / 10 + eigenvalues


def square(*shape: int) -> Tensor:
    """Return matrices that have an inverse."""
    return t(*shape) / 4 + 2 * torch.eye(shape[-1], dtype=torch.float64)


# elementwise
for _name in plain(POLYNOMIALS):
    case(f"{_name}.default", u(5, 4), torch.arange(4.0, dtype=torch.float64), constants=(0, 1))
for _name in plain(DIVISORS):
    case(f"{_name}.default", i(9, 5, 4), i(9, 4))
for _name in ("angle", "sgn", "conj_physical", "resolve_conj"):
    case(f"{_name}.default", z(5, 4))
for _name in ("isclose", "heaviside", "nextafter"):
    case(f"{_name}.default", u(5, 4), u(4), constants=(0, 1))
for _name in ("igamma", "igammac", "special_zeta"):
    case(f"{_name}.default", u(5, 4) + 1, u(4), constants=(0,))
case("xlogy.Scalar_Self", 2.0, u(5, 4))
case("special_xlog1py.other_scalar", u(5, 4), 2.0)
case("copysign.Tensor", u(5, 4), t(4))
case("copysign.Scalar", u(5, 4), -2.0)
case("ldexp.Tensor", t(5, 4), i(4, 4))
case("polygamma.default", 1, u(5, 4))
case("special_polygamma.default", 2, u(5, 4))
case("mvlgamma.default", u(5, 4) + 1, 2)
case("frexp.Tensor", t(5, 4), used=(0,))
case("isin.Tensor_Tensor", i(9, 5, 4), i(9, 3))
case("isin.Scalar_Tensor", 3, i(9, 5))
case("isin.Tensor_Scalar", i(9, 5, 4), 3)
case("to.dtype", i(5, 4), torch.float32)

# reductions
case("nansum.default", t(5, 4), [0])
case("count_nonzero.default", i(3, 5, 4), 0)
case("count_nonzero.dim_IntList", t(5, 4), [0, 1])
case("aminmax.default", t(5, 4), dim=0)
for _name in ("median", "nanmedian"):
    case(f"{_name}.default", t(5, 4))
    case(f"{_name}.dim", t(5, 3, 4), 1, used=(0,))
case("mode.default", i(3, 5, 4).double(), 0, used=(0,))
case("kthvalue.default", t(5, 4), 2, 1, True, used=(0,))
for _name in ("var", "std"):
    case(f"{_name}.default", t(5, 4) + 100)
    case(f"{_name}.correction", t(5, 3, 4), [0, 2], correction=0, keepdim=True)
    case(f"{_name}.correction", t(2, 2), [0], correction=2, constants=(0,))
    case(f"{_name}.dim", torch.ones(5, 1, dtype=torch.float64), [0])
for _order in (0, 0.5, 1, 3, -1, float("inf"), float("-inf")):
    case("linalg_vector_norm.default", t(5, 4), _order)
case("linalg_vector_norm.default", i(2, 5, 4).double(), float("inf"), [0])
case("linalg_vector_norm.default", torch.zeros(5, 4, dtype=torch.float64))
_alike = torch.tensor([2.0, 2.0, 0.0, 2.0, 0.0], dtype=torch.float64)
for _value in (_alike, _alike.where(_alike > 0, torch.nan), _alike - torch.inf):
    for _name in ("amax", "amin", "max", "min"):
        case(f"{_name}.default", _value)
for _name in ("amax", "amin"):
    case(f"{_name}.default", i(9, 5, 4), [0], True)
case("logsumexp.default", torch.full((5, 4), -torch.inf, dtype=torch.float64), [0])
case("prod.default", t(5, 4))
case("prod.dim_int", i(3, 5, 4).double(), 0)

# products
case("linalg_cross.default", t(5, 3), t(1, 3))
case("cosine_similarity.default", t(5, 4, 3), t(5, 4, 3), 1)
case("cdist.default", t(3, 5, 4), t(3, 4, 4), 1.0)
case("cdist.default", t(5, 4), t(4, 4))

# matrices
for _name in (
    "linalg_cholesky",
    "cholesky",
    "linalg_cholesky_ex",
    "linalg_eigh",
    "linalg_eigvalsh",
):
    _used = {"linalg_cholesky_ex": (0,), "linalg_eigh": (0,)}.get(_name)
    case(f"{_name}.default", positive(3, 4, 4), used=_used)
for _name in ("linalg_inv", "inverse", "linalg_matrix_exp", "logdet", "det",
              "linalg_det", "linalg_slogdet", "slogdet"):  # fmt: skip
    case(f"{_name}.default", square(3, 4, 4))
case("linalg_inv_ex.default", square(3, 4, 4), used=(0,))
case("linalg_pinv.atol_rtol_tensor", square(3, 4, 4), rtol=u(3), constants=(1,))
case("linalg_pinv.default", t(3, 5, 4), 0.01)
case("linalg_matrix_rank.atol_rtol_float", square(3, 4, 4))
case("cholesky_inverse.default", positive(3, 4, 4).tril())
case("linalg_qr.default", t(3, 5, 4))
case("qr.default", t(3, 5, 4))
case("svd.default", t(3, 5, 4), used=(1,))
case("linalg_svd.default", t(3, 5, 4), False, used=(1,))
case("linalg_svdvals.default", t(3, 5, 4))
case("linalg_eig.default", square(3, 4, 4), used=(0,))
case("linalg_eigvals.default", square(3, 4, 4))
_factors, _pivots = torch.linalg.lu_factor(square(3, 4, 4))
for _name in ("linalg_lu_factor", "linalg_lu_factor_ex", "_lu_with_info"):
    case(f"{_name}.default", square(3, 4, 4), used=(0,))
case("linalg_lu.default", square(3, 4, 4), used=(1, 2))
case("lu_unpack.default", _factors, _pivots, used=(1, 2))
case("lu_solve.default", t(3, 4, 2), _factors, _pivots)
case("linalg_lu_solve.default", _factors, _pivots, t(3, 4, 2))
case("linalg_lu_solve.default", _factors, _pivots, t(3, 2, 4), left=False)
for _name in ("linalg_ldl_factor", "linalg_ldl_factor_ex", "geqrf"):
    case(f"{_name}.default", positive(3, 4, 4), constants=(0,))
case("linalg_ldl_solve.default", *torch.linalg.ldl_factor(positive(3, 4, 4)), t(3, 4, 2),
     constants=(0, 2))  # fmt: skip
_reflectors, _scales = torch.geqrf(t(3, 4, 4))
for _name in ("linalg_householder_product", "orgqr"):
    case(f"{_name}.default", _reflectors, _scales)
case("ormqr.default", _reflectors, _scales, t(3, 4, 2))
case("cholesky_solve.default", t(3, 4, 2), positive(3, 4, 4).tril())
case("triangular_solve.default", t(3, 4, 2), square(3, 4, 4), used=(0,))
case("linalg_solve.default", square(3, 4, 4), t(3, 4, 5))
case("linalg_solve.default", square(3, 4, 4), t(3, 4))
case("linalg_solve.default", square(4, 4), t(3, 5, 4), left=False)
case("linalg_solve_ex.default", square(3, 4, 4), t(3, 4, 2), used=(0,))
case("linalg_solve_triangular.default", square(3, 4, 4), t(3, 4, 2), upper=True)

# transforms
case("_fft_c2c.default", z(5, 4), [1], 0, True)
case("_fft_c2c.default", z(3, 5, 4), [0, 2], 2, False)
case("_fft_r2c.default", t(3, 5, 4), [1, 2], 0, True)
case("_fft_c2r.default", z(5, 4), [1], 2, 7)

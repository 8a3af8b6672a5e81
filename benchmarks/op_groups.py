"""Op groups: to which group each entry of torch's database of operators belongs."""

from __future__ import annotations

import re

_PATTERNS = {  # the first that matches the whole name
    "random": r"cauchy|exponential|geometric|log_normal|normal(\..*)?|uniform|rand.*|multinomial"
    r"|bernoulli|nn\.functional\.(.*dropout.*|rrelu)",
    "nn.functional": r"nn\.functional\..*|native_.*_norm|_native_batch_norm_legit"
    r"|_batch_norm_with_update|_upsample.*|max_pool2d.*|grid_sampler.*|constant_pad_nd"
    r"|torch\.(ops|_scaled).*|softmax.*|_softmax.*|log_softmax.*|native_dropout_backward",
    "linalg": r"linalg\..*|addmm.*|addmv|addbmm|baddbmm|dot|vdot|bmm.*|mv|addr|cdist|cholesky.*"
    r"|corrcoef|cov|cross|geqrf|lu|lu_.*|matmul|matrix_exp|mm|outer|ormqr|qr|triangular_solve|svd.*"
    r"|pca_lowrank|pinverse|kron|inner|tensordot|einsum|logdet|trace|dist|norm.*|renorm"
    r"|__rmatmul__|sparse\..*",
    "fft": r"fft\..*|stft|istft",
    "special": r"special\..*",
    "reductions": r"masked\.(?!scatter).*|max\.r.*|min\.r.*|median|nanmedian|.*var_mean.*"
    r"|.*std_mean.*|quantile|nanquantile|mode|kthvalue|aminmax|cumsum|cumprod|cummax|cummin"
    r"|logcumsumexp|logsumexp|.*trapezoid|trapz|all|any|amax|amin|argmax|argmin|count_nonzero"
    r"|mean|nanmean|std.*|var.*|prod|sum|nansum|hash_tensor|equal|allclose",
    "indexing and scatter": r".*index.*|gather|scatter.*|masked_.*|select.*|slice.*|take.*|put"
    r"|where|nonzero.*|argwhere|__getitem__|as_strided.*|searchsorted|bucketize|narrow.*|unique.*"
    r"|.*scatter|_segment.*|sort|msort|argsort|topk|histc|histogram.*|bincount|nonzero",
    "shapes": r"broadcast_.*|block_diag|combinations|cartesian_prod|chunk|unsafe_chunk|clone"
    r"|contiguous|sum_to_size|expand.*|diag.*|flip.*|.*split.*|meshgrid.*|permute.*|roll|rot90"
    r"|ravel|reshape.*|view|view_as|view_copy|atleast.*|flatten|unflatten|.*stack|_chunk_cat|cat"
    r"|unbind.*|unfold.*|movedim|repeat.*|squeeze.*|resize.*|tile|unsqueeze.*|transpose.*"
    r"|t|t_copy|T|H|mT|mH|tril|triu|alias_copy|diff|gradient|view_as_.*",
    "others": r"arange|linspace.*|logspace.*|.*_like|zeros|ones|full|empty.*|new_.*|eye"
    r"|scalar_tensor|tri.*_.*|signal\..*|jiterator.*|item|to_sparse",
    "pointwise": r".*",
}
GROUPS = tuple(_PATTERNS)


def group_of(name: str) -> str:
    """The group of an entry."""
    return next(group for group, pattern in _PATTERNS.items() if re.fullmatch(pattern, name))

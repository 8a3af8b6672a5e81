"""Key-value caches of transformers, as arguments and outputs of a program.

    cache = DynamicCache()
    output = pm(ids, past_key_values=cache)         # cache has the keys and values of ids then

A `DynamicCache` is a container of tensors: what it holds goes in and comes out. Forward adds to the
cache that it is given, so the caller's own holds afterwards what the one of the output does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch.utils import _pytree as pytree

from autopar.errors import InvalidInput

_LIBRARY = "transformers.cache_utils"
_RULE = "a key-value cache of transformers that a program takes is a DynamicCache"


def register_caches() -> None:
    """Have torch look into the caches of transformers, if that is loaded."""
    library = sys.modules.get(_LIBRARY)
    kind = getattr(library, "DynamicCache", None)
    if kind is not None and kind not in pytree.SUPPORTED_NODES:
        name = f"{kind.__module__}.{kind.__name__}"
        pytree.register_pytree_node(
            kind,
            _flatten,
            _unflatten,
            serialized_type_name=name,
            flatten_with_keys_fn=_flatten_with_keys,
        )


def require_returned(given: pytree.TreeSpec, returned: pytree.TreeSpec) -> None:
    """Refuse a program that adds to a cache which it does not return."""
    if _has_cache(given) and not _has_cache(returned):
        raise InvalidInput(
            "a key-value cache that forward is given is part of what it returns",
            got="a call with past_key_values whose output has none",
            remedy="use_cache=True; or no cache",
        )


def keep_caches(given: tuple[tuple[Any, ...], Mapping[str, Any]], output: Any) -> Any:
    """Return the output of a call with the caller's own cache in it, which holds all now."""
    caches = _caches((given[0], dict(given[1])))
    if not caches:
        return output
    returned = iter(_caches(output))
    for cache in caches:
        if (filled := next(returned, None)) is not None:
            cache.layers = filled.layers
    remaining = iter(caches)
    return pytree.tree_map(
        lambda leaf: next(remaining, leaf) if _is_cache(leaf) else leaf, output, is_leaf=_is_cache
    )


def _is_cache(value: Any) -> bool:
    kind = getattr(sys.modules.get(_LIBRARY), "DynamicCache", None)
    return kind is not None and type(value) is kind


def _caches(values: Any) -> list[Any]:
    if _LIBRARY not in sys.modules:
        return []
    return [leaf for leaf in pytree.tree_leaves(values, is_leaf=_is_cache) if _is_cache(leaf)]


def _has_cache(spec: pytree.TreeSpec) -> bool:
    kind = getattr(sys.modules.get(_LIBRARY), "DynamicCache", None)
    return kind is not None and (spec.type is kind or any(map(_has_cache, spec.children())))


def _flatten(cache: Any) -> tuple[list[Any], Any]:
    layers = [_tensors(layer) for layer in cache.layers]
    if getattr(cache, "offloading", False):
        raise InvalidInput(_RULE, got="one that is offloaded", remedy="DynamicCache()")
    grows = cache.layer_class_to_replicate is not None
    counts = tuple(map(len, layers))
    return [tensor for tensors in layers for tensor in tensors], (grows, counts)


def _flatten_with_keys(cache: Any) -> tuple[list[Any], Any]:
    leaves, context = _flatten(cache)
    return [(pytree.SequenceKey(at), leaf) for at, leaf in enumerate(leaves)], context


def _tensors(layer: Any) -> list[Any]:
    library: Any = sys.modules[_LIBRARY]
    if type(layer) is not library.DynamicLayer:
        raise InvalidInput(
            _RULE,
            got=f"one with a {type(layer).__name__}",
            remedy="set model.config.use_cache = False, or pass use_cache=False",
        )
    return [layer.keys, layer.values] if layer.is_initialized else []


def _unflatten(leaves: Any, context: Any) -> Any:
    library: Any = sys.modules[_LIBRARY]
    grows, counts = context
    cache, tensors = library.DynamicCache(), iter(leaves)
    cache.layer_class_to_replicate = library.DynamicLayer if grows else None
    for count in counts:
        layer = library.DynamicLayer()
        if count:
            layer.keys, layer.values = next(tensors), next(tensors)
            layer.dtype = getattr(layer.keys, "dtype", None)
            layer.device = getattr(layer.keys, "device", None)
            layer.is_initialized = True
        cache.layers.append(layer)
    return cache

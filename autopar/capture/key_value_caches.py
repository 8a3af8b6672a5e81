"""Key-value caches of transformers, as arguments and outputs of a program.

    cache = DynamicCache()
    output = pm(ids, past_key_values=cache)         # cache has the keys and values of ids then

A `DynamicCache` is a container of tensors: what it holds goes in and comes out. Forward adds to the
cache that it is given, so the caller's own holds afterwards what the one of the output does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture.hooks import replaced
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


@dataclass(frozen=True)
class ReturnedCache:
    """Tells which cache forward returns: its number among those that it was given, or None."""

    number: int | None
    is_changed: bool  # since it was given


@contextmanager
def caches_seen(model: nn.Module, seen: list[ReturnedCache]) -> Iterator[None]:
    """While forward is followed, note the caches that it returns, and refuse a call that changes
    one which it does not return."""
    forward, is_running = model.forward, False

    @wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_running
        if is_running:  # it calls itself
            return forward(*args, **kwargs)
        caches = _caches((args, kwargs))
        before = [_flatten(cache)[0] for cache in caches]
        is_running = True
        try:
            output = forward(*args, **kwargs)
        finally:
            is_running = False
        changed = [
            len(now := _flatten(cache)[0]) != len(held)
            or any(a is not b for a, b in zip(now, held))
            for cache, held in zip(caches, before)
        ]
        numbers = returned_caches((args, kwargs), output)
        seen[:] = [ReturnedCache(n, n is not None and changed[n]) for n in numbers]
        if any(is_changed and n not in numbers for n, is_changed in enumerate(changed)):
            raise InvalidInput(
                "a key-value cache that forward adds to is part of what it returns",
                got="a call with past_key_values whose output has none",
                remedy="use_cache=True; or no cache",
            )
        return output

    with replaced(model, "forward", watched):
        yield


def returned_caches(given: Any, output: Any) -> list[int | None]:
    """Return of each cache in an output its number among the given ones, by identity."""
    numbers = {id(cache): number for number, cache in enumerate(_caches(given))}
    return [numbers.get(id(cache)) for cache in _caches(output)]


def keep_caches(given: Any, output: Any, returned: Sequence[ReturnedCache]) -> Any:
    """Return the output of a call with the caller's own caches in it, which hold all now."""
    if not returned:
        return output
    caches, filled = _caches(given), _caches(output)
    results = list[Any]()
    for known, cache in zip(returned, filled, strict=True):
        result = cache if known.number is None else caches[known.number]
        if known.is_changed:
            result.layers = cache.layers
        results.append(result)
    remaining = iter(results)
    return pytree.tree_map(
        lambda leaf: next(remaining) if is_cache(leaf) else leaf, output, is_leaf=is_cache
    )


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache that torch looks into."""
    kind = getattr(sys.modules.get(_LIBRARY), "DynamicCache", None)
    return kind is not None and type(value) is kind


def _caches(values: Any) -> list[Any]:
    if _LIBRARY not in sys.modules:
        return []
    seen = set[int]()  # identities of containers, which may hold themselves

    def is_end(value: Any) -> bool:
        if is_cache(value) or id(value) in seen:
            return True
        if isinstance(value, list | dict):
            seen.add(id(value))
        return False

    return [leaf for leaf in pytree.tree_leaves(values, is_leaf=is_end) if is_cache(leaf)]


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

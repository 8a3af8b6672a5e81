"""Files with something changed by chance: bytes, keys, kinds, numbers, places."""

from __future__ import annotations

import copy
import json
import random
from contextlib import suppress
from typing import Any

from autopar.runtime.parameters.weight_files import digest_of

NUMBERS = (0, -1, 2, 3, 1.5, True, None, "", "3", [], {}, 10**30, 1e308, float("nan"), float("inf"))
ALIEN = (*NUMBERS, [[[]]], {"": 0}, "dp", "f64[8@dp, 4]", "f64[99999999999999999999]", -(2**63))


def places(data: Any, at: tuple = ()) -> list[tuple]:
    """The keys that lead to every value inside of `data`."""
    if isinstance(data, dict):
        inner: list[Any] = list(data)
    else:
        inner = list(range(len(data))) if isinstance(data, list) else []
    return [p for key in inner for p in ((*at, key), *places(data[key], (*at, key)))]


def value_at(data: Any, at: tuple) -> Any:
    for key in at:
        data = data[key]
    return data


def changed(data: Any, chance: random.Random) -> Any:
    """A copy of nested data with one thing changed."""
    data = copy.deepcopy(data)
    every = places(data)
    # Long tables do not hide the rest: a depth first, then a place of that depth.
    depth = chance.choice(sorted({len(at) for at in every}))
    at = chance.choice([at for at in every if len(at) == depth])
    holder, key = value_at(data, at[:-1]), at[-1]
    match chance.choice(("delete", "alien", "number", "move", "rename", "copy", "text")):
        case "delete":
            del holder[key]
        case "alien":
            holder[key] = chance.choice(ALIEN)
        case "number":
            holder[key] = _other_number(holder[key], chance)
        case "move":
            holder[key] = copy.deepcopy(value_at(data, chance.choice(every)))
        case "rename" if isinstance(holder, dict):
            holder[str(chance.choice(every)[-1])] = holder.pop(key)
        case "copy":
            other = value_at(data, chance.choice(every))
            if isinstance(other, dict):
                other["more"] = copy.deepcopy(holder[key])
            elif isinstance(other, list):
                other.append(copy.deepcopy(holder[key]))
        case _:
            if isinstance(holder[key], str):
                holder[key] = flipped(holder[key], chance)
    return data


def _other_number(value: Any, chance: random.Random) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return chance.choice(NUMBERS)
    return chance.choice((value + 1, value - 1, -value, value * 2, value * 10**9, value / 2, 0))


def flipped(text: str, chance: random.Random) -> str:
    """One or two characters, words or lines changed."""
    for _ in range(chance.choice((1, 1, 2))):
        place = chance.randrange(len(text) + 1)
        piece = chance.choice(
            ("", "", "9" * chance.choice((1, 30, 5000)), "-", "@", "dp", " ", "\n", "[", "é", "\0",
             "nan", ",", ":", "=", "F", "0")
        )  # fmt: skip
        text = text[:place] + piece + text[place + chance.choice((0, 1, 1, 5)) :]
        lines = text.split("\n")
        match chance.choice(("", "", "swap", "double", "drop")):
            case "swap":
                chance.shuffle(lines)
            case "double":
                lines.append(chance.choice(lines))
            case "drop":
                lines.pop(chance.randrange(len(lines)))
        text = "\n".join(lines) if chance.random() < 0.5 else text
    return text


def file_of(data: Any, chance: random.Random) -> bytes:
    """JSON with a change in its data, or in its bytes."""
    if chance.random() < 0.8:
        return json.dumps(changed(data, chance)).encode()
    return bytes_of(json.dumps(data), chance)


def sealed(index: bytes) -> bytes:
    """The index of a checkpoint with a digest that is right, so that what it says is looked at."""
    with suppress(ValueError, TypeError, RecursionError):
        data = json.loads(index)
        data.pop("digest", None)
        return json.dumps({**data, "digest": digest_of(data)}).encode()
    return index


def bytes_of(text: str, chance: random.Random) -> bytes:
    """Text with a change, which may be no UTF-8."""
    made = bytearray(flipped(text, chance).encode(errors="replace"))
    if made and chance.random() < 0.2:
        made[chance.randrange(len(made))] = chance.randrange(256)
    return bytes(made)

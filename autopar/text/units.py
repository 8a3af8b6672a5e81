"""Seconds, bytes and numbers of things as a person reads and writes them.

>>> seconds_text(0.0186), bytes_text(3.2e9), share_text(0.0)
('18.6 ms', '3.2 GB', '0%')
>>> counted(1, "node"), counted(2, "node"), counted(1024, "micro-batch")
('1 node', '2 nodes', '1,024 micro-batches')
>>> read_bytes("40GB"), read_bytes("512 MiB"), read_bytes(4e9)
(40000000000.0, 536870912.0, 4000000000.0)
"""

from __future__ import annotations

import math
import re
from numbers import Real

# Characters that no page or picture may hold: most control characters, halves of pairs.
_UNSEEN = re.compile("[^\t\n\r\x20-\x7e\x80-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_PLURALS = {"axis": "axes", "copy": "copies"}
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = {"": 1.0, "B": 1.0} | {f"{name.upper()}B": size for size, name in _PREFIXES}
_BYTES |= {f"{name}IB": 2.0 ** (10 * power) for power, name in enumerate("KMGTP", 1)}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_BITS = re.compile("([kKMGTP]i?)(?:b|bit|bits)")
_EITHER = re.compile("[mgtp]i?b")
LEAST_MEMORY = 1000  # bytes; a smaller number was meant in another unit


def seconds_text(seconds: float) -> str:
    """Return seconds as text: `18.6 ms`."""
    for unit, name in _SECONDS:
        if abs(seconds) >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-6:.3g} µs" if seconds else "0 s"


def bytes_text(count: float, digits: int = 3) -> str:
    """Return bytes as text: `3.2 GB`."""
    return counted(round(count), "byte") if abs(count) < 1e3 else scaled(count, "B", digits)


def counted(number: int, word: str) -> str:
    """Return a number with its word: `1 node`, `2 nodes`, `1,024 micro-batches`."""
    return f"{number:,} {plural(word, number)}"


def plural(word: str, number: int) -> str:
    """Return a word in the form for a number of things: `node`, `nodes`."""
    if number == 1:
        return word
    if word in _PLURALS:
        return _PLURALS[word]
    return word + ("es" if word.endswith(("ch", "s", "x")) else "s")


def read_bytes(amount: object) -> float:
    """Return the bytes of a number, or of a text with a unit; NaN if it is neither."""
    if isinstance(amount, Real) and not isinstance(amount, bool):
        try:
            return float(amount)
        except OverflowError:
            return math.inf
    match = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
    if match is None or _BITS.fullmatch(match[2]):
        return math.nan
    return float(match[1]) * _BYTES.get(match[2].upper(), math.nan)


def read_rate(amount: object) -> float:
    """Return the bytes a second of a number or text; NaN if it is neither, or ambiguous.

    A text gives bytes, as `100GB/s`, or bits, as `400Gb/s` or `400Gbit/s`.
    """
    if not isinstance(amount, str):
        return read_bytes(amount)
    match = _AMOUNT.fullmatch(amount.strip().removesuffix("/s").removesuffix("ps"))
    if match is None or _EITHER.fullmatch(match[2]):
        return math.nan
    bits = _BITS.fullmatch(match[2])
    unit = match[2] if bits is None else f"{bits[1]}B"
    return float(match[1]) * _BYTES.get(unit.upper(), math.nan) / (1 if bits is None else 8)


def scaled(value: float, unit: str, digits: int = 4) -> str:
    """Return a value with a prefix and unit: `312 TFLOP/s`."""
    size, prefix = next((known for known in _PREFIXES if abs(value) >= known[0]), (1.0, ""))
    return f"{value / size:.{digits}g} {prefix}{unit}"


def share_text(part: float) -> str:
    """Return a share of 1 as percent: `0.3%`."""
    if abs(part) < 1e-9:
        return "0%"
    if abs(part) < 1e-4:
        return "< 0.01%" if part > 0 else "> -0.01%"
    return f"{100 * part:.2g}%" if abs(part) < 0.995 else f"{100 * part:.0f}%"


def printable_text(words: str) -> str:
    """Return words with characters that a text file cannot hold as Python escapes them."""
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), words)


def change_text(before: float, after: float) -> str:
    """Return the change of a value as text: `+12%`, `-30%`, `3.3 times`."""
    if not before or after >= 2 * before:
        return f"{after / before:.2g} times" if before else "from nothing"
    change = after / before - 1
    return f"{'+' if change >= 1e-4 else ''}{share_text(change)}"

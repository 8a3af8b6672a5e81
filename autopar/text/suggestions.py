"""Suggestions of names that a user probably meant by one that does not exist.

>>> nearest("h100", ["dgx-h100", "h200"]), nearest("zero", ["whole", "zero1", "zero3"])
(['dgx-h100'], ['zero1', 'zero3'])
>>> nearest("fsdp", ["whole", "zero3"]), nearest("terapipe", ["dualpipe", "gpipe"])
(['zero3'], [])

Meaning comes first: words of other tools stand in a table, and a part of a name stands for it. Then
comes spelling, but not that of codes: an H800 is not a misspelt H200.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

_ALIKE = 0.75  # of `difflib`: a letter wrong in four
_SHORTEST = 3  # characters that say enough to stand for a name that contains them

# Names here by what other tools call it, written without signs between.
_MEANINGS = {
    "torch": "nccl gloo mpi ucc cuda gpu cpu ddp distributed processes",
    "virtual": "simulated simulator fake single local",
    "host": "cpu ram",
    "device": "cuda gpu",
    "zero3": "fsdp fsdp2 fullshard stage3",
    "zero2": "shardgradop stage2",
    "zero1": "stage1 distributedoptimizer",
    "whole": "ddp replicate replicated noshard none",
    "data": "ddp dp",
    "propagate": "gspmd spmd manual",
    "full": "checkpoint checkpointing all block",
    "selective": "attention core sac op",
    "1f1b": "pipedreamflush dapple",
    "pipedream": "weightstashing",
    "pipedream-2bw": "doublebufferedweights doublebuffering 2bw",
    "interleaved": "interleaved1f1b looped loopedbfs virtualpipeline vpp",
    "interleaved-zb": "interleavedzerobubble zbinterleaved",
    "eager-where-it-helps": "eagersyncopt",
    "terapipe": "tokenpipeline sequencepipeline seq1f1b",
    "zb-h1": "zerobubble zb zb1p",
}


def nearest(word: str, known: Sequence[str]) -> list[str]:
    """Return the names of `known` that `word` means or misspells, most likely ones only."""
    plain = _plain(word)
    meant = [name for name in known if plain in _MEANINGS.get(name, "").split()]
    if meant or not plain:
        return meant
    alike = {name: _likeness(plain, _plain(name)) for name in known}
    most = max(alike.values(), default=0.0)
    return [name for name, likeness in alike.items() if likeness == most > 0]


def _plain(word: str) -> str:
    """Return a word in small letters without signs: `cuda:0` as `cuda`, `ZeRO-3` as `zero3`."""
    return re.sub(r"[\W_]", "", word.partition(":")[0].lower())


def _likeness(word: str, known: str) -> float:
    """Return a number up to 1; 0 for two words that share neither meaning nor spelling."""
    likeness = difflib.SequenceMatcher(None, word, known).ratio()
    short, long = sorted((word, known), key=len)
    if len(short) >= _SHORTEST and short in long and _numbers(short) <= _numbers(long):
        return likeness
    is_code = sum(map(str.isalpha, word)) < 2  # a letter and a number: another one is another kind
    return likeness if likeness >= _ALIKE and not is_code else 0.0


def _numbers(word: str) -> set[str]:
    return {*re.findall(r"\d+", word)}

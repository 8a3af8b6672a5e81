"""Same sources: all ranks of a world run one autopar, torch and Python.

Ranks of different sources send what the others do not expect, at which gloo ends the process. So
what each rank runs is the first thing that they exchange, by a function of torch itself.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.errors import InvalidInput

_HOUSE = Path(__file__).parents[1]


@cache
def identity() -> str:
    """Name what this process runs: a digest of autopar's sources, and the versions below it."""
    digest = hashlib.sha256()
    for path in sorted(_HOUSE.rglob("*.py")):
        digest.update(f"{path.relative_to(_HOUSE)}\0".encode() + path.read_bytes() + b"\0")
    sources = digest.hexdigest()[:12]
    return f"autopar {sources}, torch {torch.__version__}, Python {platform.python_version()}"


def require_same_sources() -> None:
    """Refuse, on all ranks of the world alike, that some of them run other sources."""
    everyones: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyones, identity())
    if len(set(everyones)) > 1:
        raise InvalidInput(
            "all ranks of a world run the same autopar, torch and Python",
            got="\n".join(_by_identity(everyones)),
            remedy="install the same versions on all machines; here autopar (by a digest of its "
            f"sources) is that in {_HOUSE}",
        )


def _by_identity(everyones: Sequence[str]) -> list[str]:
    """Say which ranks run what, those of the fewest ranks first."""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(everyones):
        ranks.setdefault(text, []).append(str(rank))
    lines = []
    for text, those in sorted(ranks.items(), key=lambda one: len(one[1])):
        more = f" and {len(those) - 8} more" if len(those) > 8 else ""
        lines.append(f"rank {', '.join(those[:8])}{more}: {text}")
    return lines

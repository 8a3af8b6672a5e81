"""Same sources: all ranks of a world run one autopar, torch and Python.

Ranks of different sources send messages that the others do not expect, and gloo then ends the
process. So the first thing that ranks exchange, by a function of torch itself, is what they run.
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

_LIBRARY = Path(__file__).parents[2]


@cache
def identity() -> str:
    """Name what this process runs: a digest of autopar's sources, and the versions below it."""
    digest = hashlib.sha256()
    for path in sorted(_LIBRARY.rglob("*.py")):
        digest.update(f"{path.relative_to(_LIBRARY)}\0".encode() + path.read_bytes() + b"\0")
    sources = digest.hexdigest()[:12]
    return f"autopar {sources}, torch {torch.__version__}, Python {platform.python_version()}"


def require_same_sources() -> None:
    """Refuse, on all ranks of the world alike, that some of them run other sources."""
    identities: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(identities, identity())
    if len(set(identities)) > 1:
        raise InvalidInput(
            "all ranks of a world run the same autopar, torch and Python",
            got="\n".join(_by_identity(identities)),
            remedy="install the same versions on all machines; here autopar (by a digest of its "
            f"sources) is that in {_LIBRARY}",
        )


def _by_identity(identities: Sequence[str]) -> list[str]:
    """Return a line for each identity with its ranks, the identity of the fewest ranks first."""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(identities):
        ranks.setdefault(text, []).append(str(rank))
    lines = []
    for text, members in sorted(ranks.items(), key=lambda item: len(item[1])):
        more = f" and {len(members) - 8} more" if len(members) > 8 else ""
        lines.append(f"rank {', '.join(members[:8])}{more}: {text}")
    return lines

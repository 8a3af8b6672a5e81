"""Recompute: what a region runs again in backward, and where it keeps what backward reads.

>>> print(Recompute("full", keep="cut"), Recompute.parse("selective"), sep="; ")
full, cut; selective
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from autopar.errors import InvalidInput, require_one_of

Kind = Literal["full", "selective", "policy"] | None
Keep = Literal["device", "cut", "host"]
_WORDS: dict[Kind, str] = {
    "full": "full",
    "selective": "selective",
    "policy": "policy",
    None: "none",
}
_KEPT = {"device": "", "cut": ", kept as pieces", "host": ", kept on the host"}


@dataclass(frozen=True)
class Recompute:
    """A choice of what a region runs again in backward, and of where it keeps the rest.

    Attributes:
        kind: "full" keeps what the region reads, "selective" what is dear to make, None everything.
            A plan has "policy" where a policy says which operators' results are kept.
        keep: "device" keeps values where they are; "cut" keeps a piece on each of the ranks that
            would keep the same (ZeRO-R's Pa); "host" moves these pieces to the host (Pa+cpu).
    """

    kind: Kind = "full"
    keep: Keep = "device"

    def __post_init__(self) -> None:
        if self.kind is not None:
            require_one_of("kind", self.kind, ("full", "selective", "policy"))
        require_one_of("keep", self.keep, get_args(Keep))

    @classmethod
    def of(cls, setting: object) -> Recompute:
        """Read a setting: True is "full", False and None recompute nothing."""
        if "policy" in (setting, getattr(setting, "kind", None)):
            raise InvalidInput(
                "a policy is a function, or a list of operators whose results are kept",
                got=f"recompute={setting!r}",
                remedy='recompute={"policy": [torch.ops.aten.mm.default]} on plan or parallelize',
            )
        if isinstance(setting, Recompute):
            return setting
        if setting is not None and not isinstance(setting, str | bool):
            raise InvalidInput(
                "recompute= is a word, None or a Recompute",
                got=f"{setting!r}, of type {type(setting).__name__}",
                remedy='"full", "selective", or ap.Recompute("full", keep="host")',
            )
        kind: Any = ("full" if setting else None) if isinstance(setting, bool) else setting
        return cls(kind)

    @property
    def is_plain(self) -> bool:
        """Return whether nothing runs again, and all is kept where it is."""
        return self.kind is None and self.keep == "device"

    def __str__(self) -> str:
        return _WORDS[self.kind] + ("" if self.keep == "device" else f", {self.keep}")

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """Return the setting that `str` writes as `text`."""
        for setting in (cls(k, p) for k in _WORDS for p in get_args(Keep)):
            if str(setting) == text:
                return setting
        raise InvalidInput(
            "what is recomputed is one of full, selective and none, and where it is kept",
            got=repr(text),
            remedy="full, or full, cut, or full, host",
        )

    @property
    def words(self) -> str:
        """The setting in words for a person."""
        words: dict[Kind, str] = {
            "full": "in full",
            "selective": "selectively",
            "policy": "by a policy",
            None: "nothing again",
        }
        how = words[self.kind]
        return how + _KEPT[self.keep]


# A user's setting for a module; True is "full", False None.
RecomputeSetting = Literal["full", "selective"] | Recompute | bool | None

PLAIN, SELECTIVE, FULL = Recompute(None), Recompute("selective"), Recompute("full")
POLICY = Recompute("policy")


def summary(decided: Mapping[str, Recompute]) -> str:
    """Return how many regions run again, and how, each way apart: "" if none does."""
    counts = Counter(decided.values())
    return "; ".join(f"{counts[how]} {how.words}" for how in sorted(counts, key=str))

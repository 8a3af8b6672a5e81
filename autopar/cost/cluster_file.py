"""Clusters in TOML files, read with errors that name the key and its line.

name = "two kinds"

[device.small]                      # any number of devices
flops = { bf16 = 100e12, f32 = 10e12 }
memory = 16e9
bandwidth = 0.7e12                  # overhead, efficiency, half_flops, half_bytes as wished

[[nodes]]                           # one or more of these
count = 2
device = "small"
devices = 4
link = { alpha = 3e-6, bandwidth = 100e9 }

[[nodes]]
count = 1
preset = "dgx-a100"

[network]                           # between nodes; bandwidth of a whole node
alpha = 6e-6
bandwidth = 50e9
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from pathlib import Path
from typing import Any

from autopar.cluster import Cluster, Device, Link, Node
from autopar.cost.presets import preset
from autopar.errors import InvalidInput

_DEVICE_KEYS = {field.name for field in dataclasses.fields(Device)} - {"name"}
_DEVICE_NEEDS = {"flops", "memory", "bandwidth"}


def load(path: Path) -> Cluster:
    """The cluster that the file describes."""
    try:
        text = path.read_text()
    except OSError as error:
        raise InvalidInput(
            "a cluster file can be read", got=f"{path}: {error.strerror}", remedy="give its path"
        ) from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        lines = text.splitlines()
        found = re.search(r"line (\d+)", str(error))  # or it is at the end of the document
        number = int(found[1]) if found else len(lines)
        raise InvalidInput(
            "a cluster file is TOML, each key once",
            got=f"{lines[number - 1].strip() if lines else ''!r}: {error}",
            remedy="mend that line",
            source=f"{path}:{number}",
        ) from None
    return _Reader(path, text).cluster(data)


class _Reader:
    """Checks each key, and knows where it stands."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.lines = path, text.splitlines()

    def cluster(self, data: dict[str, Any]) -> Cluster:
        self.keys(data, (), {"name", "device", "nodes", "network"}, {"nodes"})
        devices = {}
        for name, entry in self.table(data.get("device", {}), ("device",)).items():
            devices[name] = self.device(entry, ("device", name))
        entries = data["nodes"]
        if not isinstance(entries, list) or not entries:
            self.fail(("nodes",), "is a list of tables", entries, "write [[nodes]]")
        nodes: list[Node] = []
        network = Link(6e-6, 10e9)
        for index, entry in enumerate(entries):
            count, node, default = self.node(entry, ("nodes", index), devices)
            nodes += [node] * count
            network = default or network
        if "network" in data:
            network = self.link(data["network"], ("network",))
        return Cluster(tuple(nodes), network, str(data.get("name", self.path.stem)))

    def device(self, entry: Any, at: tuple[Any, ...]) -> Device:
        self.keys(entry, at, _DEVICE_KEYS, _DEVICE_NEEDS)
        flops = self.table(entry["flops"], (*at, "flops"))
        rates = {name: self.number(rate, (*at, "flops", name)) for name, rate in flops.items()}
        if "f32" not in rates:
            self.fail((*at, "flops"), "has a rate for f32", flops, "add f32 = ...")
        rest = {k: self.number(v, (*at, k)) for k, v in entry.items() if k != "flops"}
        return Device(name=str(at[-1]), flops=rates, **rest)

    def node(
        self, entry: Any, at: tuple[Any, ...], devices: dict[str, Device]
    ) -> tuple[int, Node, Link | None]:
        known = {"preset"} if "preset" in self.table(entry, at) else {"device", "devices", "link"}
        self.keys(entry, at, known | {"count"}, known)
        count = self.whole(entry.get("count", 1), (*at, "count"))
        if "preset" in entry:
            try:
                node, network = preset(entry["preset"])
            except InvalidInput as error:
                self.fail((*at, "preset"), "is known", entry["preset"], str(error.remedy))
            return count, node, network
        if entry["device"] not in devices:
            remedy = f"one of {', '.join(devices) or 'none: add [device.NAME]'}"
            self.fail((*at, "device"), "names a device of the file", entry["device"], remedy)
        number = self.whole(entry["devices"], (*at, "devices"))
        link = self.link(entry["link"], (*at, "link"))
        return count, Node(devices[entry["device"]], number, link), None

    def link(self, entry: Any, at: tuple[Any, ...]) -> Link:
        self.keys(entry, at, {"alpha", "bandwidth"}, {"alpha", "bandwidth"})
        alpha = self.number(entry["alpha"], (*at, "alpha"), least=0.0)
        return Link(alpha, self.number(entry["bandwidth"], (*at, "bandwidth")))

    def keys(self, entry: Any, at: tuple[Any, ...], known: set[str], needed: set[str]) -> None:
        for key in self.table(entry, at):
            if key not in known:
                close = difflib.get_close_matches(key, known, 1)
                remedy = f"did you mean {close[0]!r}?" if close else f"use {sorted(known)}"
                self.fail((*at, key), "is not a key here", entry[key], remedy)
        for key in sorted(needed - set(entry)):
            self.fail(at, f"needs the key {key!r}", sorted(entry), f"add {key} = ...")

    def table(self, entry: Any, at: tuple[Any, ...]) -> dict[str, Any]:
        if not isinstance(entry, dict):
            self.fail(at, "is a table", entry, "write { key = value, ... }")
        return entry

    def number(self, value: Any, at: tuple[Any, ...], least: float | None = None) -> float:
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if wrong or not (value > 0 if least is None else value >= least):
            limit = "more than 0" if least is None else f"at least {least:g}"
            self.fail(at, f"is a number, {limit}", value, "give it in seconds, bytes or FLOP/s")
        return float(value)

    def whole(self, value: Any, at: tuple[Any, ...]) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.fail(at, "is a whole number, at least 1", value, "give a count")
        return int(value)

    def fail(self, at: tuple[Any, ...], rule: str, got: Any, remedy: str) -> None:
        key = ".".join(map(str, at)) or "the file"
        raise InvalidInput(
            f"in a cluster file, {key} {rule}",
            got=repr(got),
            remedy=remedy,
            source=f"{self.path}:{self.line(at)}",
        )

    def line(self, at: tuple[Any, ...]) -> int:
        """The line where the last part of the key that the file has stands."""
        names = [part for part in at if isinstance(part, str)]
        table = next((part for part in at if isinstance(part, int)), 0)
        header: list[str] = []
        nodes, best, depth = -1, 1, 0
        for number, text in enumerate(self.lines, 1):
            bare = text.split("#")[0].strip()
            if match := re.fullmatch(r"\[+([^\[\]]+)\]+", bare):
                header = [part.strip(" \"'") for part in match[1].split(".")]
                nodes += bare.startswith("[[")
            keys = [] if match else re.findall(r"([\w-]+)\s*=", bare)
            if header[:1] == names[:1] == ["nodes"] and nodes != table:
                continue
            matched = _common(names, header + keys)
            if matched > depth:
                best, depth = number, matched
        return best


def _common(names: list[str], found: list[str]) -> int:
    """How many of `names`, from the first, occur in `found` in order."""
    position = 0
    for part in found:
        if position < len(names) and part == names[position]:
            position += 1
    return position

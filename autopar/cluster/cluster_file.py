"""Clusters in TOML files, read with errors that name the key and its line.

name = "two kinds"

[device.small]                      # any number of devices
flops = { bf16 = 100e12, f32 = 10e12 }
memory = 16e9
bandwidth = 0.7e12                  # overhead, efficiency, bandwidth_efficiency, half_flops,
                                    # half_bytes, near_bytes, far_seconds, overlap,
                                    # reserve
host = { memory = 64e9, copy_bandwidth = 25e9 }   # of each device; the rest as wished

[[nodes]]                           # one or more of these
count = 2
device = "small"
devices = 4
link = { alpha = 3e-6, bandwidth = 100e9 }        # measured = [["all_reduce", 4, 9e-6, 8e10]]
rails = 4                           # ways out, of which a device sends over one; 1: all are one

[[nodes]]
count = 1
preset = "dgx-a100"

[network]                           # between nodes; bandwidth of a whole node
alpha = 6e-6
bandwidth = 50e9

[[levels]]                          # none or more, the smaller groups of nodes first
name = "rack"
nodes = 16
alpha = 8e-6
bandwidth = 400e9                   # of a whole rack

used = [4, 4, 0] at the top says how many devices of each node take ranks; else all do.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from autopar.base.schema import At, Count, Index, Mismatch, read, write
from autopar.cluster.machines import Device, Level, Link, Node
from autopar.cluster.presets import NAMES, preset
from autopar.errors import AutoparError, InvalidInput

SomeCluster = TypeVar("SomeCluster")
_ADD_NODES = 'write [[nodes]], and below it preset = "dgx-h100", or device, devices and link'
_NETWORK = Link(6e-6, 10e9)  # where nothing is said


@dataclass(frozen=True)
class _Nodes:
    device: str
    devices: Count
    link: Link
    rails: Count = 1
    count: Count = 1


@dataclass(frozen=True)
class _Preset:
    preset: str
    count: Count = 1


@dataclass(frozen=True)
class _File:
    nodes: tuple[Mapping[str, Any], ...]
    device: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    network: Link | None = None
    name: str | None = None
    levels: tuple[Level, ...] = ()
    used: tuple[Index, ...] = ()


MakeCluster = Callable[
    [tuple[Node, ...], Link, str, tuple[Level, ...], tuple[int, ...]], SomeCluster
]


def read_cluster(path: Path, make: MakeCluster[SomeCluster]) -> SomeCluster:
    """Return what `make` makes of a cluster file. Raise with the wrong line."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidInput(
            "a cluster file can be read, and is text in UTF-8",
            got=f"{path}: {why}",
            remedy="give the path of such a file",
        ) from None
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        lines = text.splitlines()
        position = re.search(r"line (\d+)", str(error))  # or it is at the end of the document
        number = min(int(position[1]) if position else len(lines), len(lines))
        raise InvalidInput(
            "a cluster file is TOML, each key once",
            got=f"{lines[number - 1].strip() if lines else ''!r}: {error}",
            remedy="mend that line",
            source=f"{path}:{number}",
        ) from None
    try:
        return _cluster(data, path.stem, make)
    except Mismatch as error:
        raise InvalidInput(
            f"in a cluster file, {error.key} {error.rule}",
            got=repr(error.got) if not isinstance(error.got, int) else str(error),
            remedy=error.remedy,
            source=f"{path}:{_line(text, error.at)}",
        ) from None


def cluster_text(
    name: str,
    runs: Sequence[tuple[Node, int]],
    network: Link,
    levels: Sequence[Level],
    used: Sequence[int],
) -> str:
    """Return the file of a cluster; `runs`: nodes, each with how many of it follow one another."""
    names: dict[Device, str] = {}
    for node, _ in runs:
        alike = sum(kind.name == node.device.name for kind in names if kind != node.device)
        names.setdefault(node.device, node.device.name + (f", {alike + 1}" if alike else ""))
    lines = [f"name = {_toml(name)}", *([f"used = {_toml(used)}"] if used else [])]
    for kind, name_in_file in names.items():
        parts = {key: value for key, value in write(kind).items() if key != "name"}
        lines += ["", f"[device.{_toml(name_in_file)}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in parts.items()]
    for node, count in runs:
        entry = {"count": count, "device": names[node.device], "devices": node.devices}
        lines += ["", "[[nodes]]", *(f"{key} = {_toml(value)}" for key, value in entry.items())]
        lines.append(f"link = {_toml(write(node.link))}")
        lines += [f"rails = {node.rails}"] * (node.rails > 1)
    lines += ["", "[network]", *(f"{key} = {_toml(v)}" for key, v in write(network).items())]
    for level in levels:
        lines += ["", "[[levels]]", *(f"{key} = {_toml(v)}" for key, v in write(level).items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _cluster(data: dict[str, Any], name: str, make: MakeCluster[SomeCluster]) -> SomeCluster:
    tables = data.get("nodes")
    if not tables or not isinstance(tables, list):
        got = sorted(data) if tables is None else tables
        raise Mismatch(("nodes",), "are one or more tables [[nodes]]", got, _ADD_NODES)
    file = read(_File, data)
    devices = {key: _device(key, entry) for key, entry in file.device.items()}
    nodes: list[Node] = []
    preset_networks: list[Link] = []
    for index, entry in enumerate(file.nodes):
        count, node, default = _nodes(entry, ("nodes", index), devices)
        nodes += [node] * count
        preset_networks += [default] if default else []
    # Where presets have several, as fast as the slowest.
    network = file.network or min(
        preset_networks, key=lambda link: link.bandwidth, default=_NETWORK
    )
    try:
        cluster_name = name if file.name is None else file.name
        return make(tuple(nodes), network, cluster_name, file.levels, file.used)
    except AutoparError as error:
        rule, remedy = f"are sound ({error.rule})", str(error.remedy)
        raise Mismatch(("nodes",), rule, error.got, remedy) from None


def _device(name: str, entry: Mapping[str, Any]) -> Device:
    at = ("device", name)
    if "name" in entry:
        raise Mismatch((*at, "name"), "is not a key here", entry["name"], f"write [device.{name}]")
    flops = entry.get("flops")
    if isinstance(flops, Mapping) and "f32" not in flops:
        raise Mismatch((*at, "flops"), "has a rate for f32", flops, "add f32 = ...")
    return read(Device, {"name": name, **entry}, at)


class _EqualNodes(NamedTuple):
    nodes: int
    node: Node
    network: Link | None  # of a preset


def _nodes(entry: Mapping[str, Any], at: At, devices: Mapping[str, Device]) -> _EqualNodes:
    if "preset" in entry:
        known = read(_Preset, entry, at)
        if known.preset not in NAMES:
            remedy = f"one of {', '.join(NAMES)}"
            raise Mismatch((*at, "preset"), "is known", known.preset, remedy)
        return _EqualNodes(known.count, *preset(known.preset))
    table = read(_Nodes, entry, at)
    if table.device not in devices:
        remedy = f"one of {', '.join(devices) or 'none: add [device.NAME]'}"
        raise Mismatch((*at, "device"), "names a device of the file", table.device, remedy)
    node = Node(devices[table.device], table.devices, table.link, table.rails)
    return _EqualNodes(table.count, node, None)


def _line(text: str, at: At) -> int:
    """Return the number of the line that has the last part of a key which the file contains."""
    names = [part for part in at if isinstance(part, str)]
    table = next((part for part in at if isinstance(part, int)), 0)
    header: list[str] = []
    tables, best, depth = Counter[str](), 1, 0
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.split("#")[0].strip()
        if match := re.fullmatch(r"\[+([^\[\]]+)\]+", bare):
            header = [part.strip(" \"'") for part in match[1].split(".")]
            tables[header[0]] += bare.startswith("[[")
        keys = [] if match else re.findall(r"([\w-]+)\s*=", bare)
        if header[:1] == names[:1] and tables[header[0]] not in (0, table + 1):
            continue
        matched = 0  # how many of `names`, from the first, occur here in order
        for part in header + keys:
            matched += names[matched : matched + 1] == [part]
        if matched > depth:
            best, depth = number, matched
    return best

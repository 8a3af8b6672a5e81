"""Clusters in TOML files, read with errors that name the key and its line.

name = "two kinds"

[device.small]                      # any number of devices
flops = { bf16 = 100e12, f32 = 10e12 }
memory = 16e9
bandwidth = 0.7e12                  # overhead, efficiency, half_flops, half_bytes, overlap
host = { memory = 64e9, copy_bandwidth = 25e9 }   # of each device; the rest as wished

[[nodes]]                           # one or more of these
count = 2
device = "small"
devices = 4
link = { alpha = 3e-6, bandwidth = 100e9 }        # measured = [["all_reduce", 4, 9e-6, 8e10]]

[[nodes]]
count = 1
preset = "dgx-a100"

[network]                           # between nodes; bandwidth of a whole node
alpha = 6e-6
bandwidth = 50e9
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from autopar.cluster.machines import Device, Link, Node
from autopar.cluster.presets import NAMES, preset
from autopar.errors import AutoparError, InvalidInput
from autopar.schema import At, Count, Mismatch, read, write

Made = TypeVar("Made")


@dataclass(frozen=True)
class _Nodes:
    device: str
    devices: Count
    link: Link
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


def read_cluster(path: Path, make: Callable[[tuple[Node, ...], Link, str], Made]) -> Made:
    """What `make` makes of the nodes, the network and the name in the file."""
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
        found = re.search(r"line (\d+)", str(error))  # or it is at the end of the document
        number = min(int(found[1]) if found else len(lines), len(lines))
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


def cluster_text(name: str, runs: Sequence[tuple[Node, int]], network: Link) -> str:
    """The file of nodes, each with how many of it follow one another."""
    names: dict[Device, str] = {}
    for node, _ in runs:
        alike = sum(kind.name == node.device.name for kind in names if kind != node.device)
        names.setdefault(node.device, node.device.name + (f", {alike + 1}" if alike else ""))
    lines = [f"name = {_toml(name)}"]
    for kind, own in names.items():
        parts = {key: value for key, value in write(kind).items() if key != "name"}
        lines += ["", f"[device.{_toml(own)}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in parts.items()]
    for node, count in runs:
        entry = {"count": count, "device": names[node.device], "devices": node.devices}
        lines += ["", "[[nodes]]", *(f"{key} = {_toml(value)}" for key, value in entry.items())]
        lines.append(f"link = {_toml(write(node.link))}")
    lines += ["", "[network]", *(f"{key} = {_toml(v)}" for key, v in write(network).items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _cluster(
    data: dict[str, Any], name: str, make: Callable[[tuple[Node, ...], Link, str], Made]
) -> Made:
    file = read(_File, data)
    devices = {key: _device(key, entry) for key, entry in file.device.items()}
    nodes: list[Node] = []
    network = Link(6e-6, 10e9)
    for index, entry in enumerate(file.nodes):
        count, node, default = _nodes(entry, ("nodes", index), devices)
        nodes += [node] * count
        network = default or network
    if file.network is not None:
        network = file.network
    try:
        return make(tuple(nodes), network, name if file.name is None else file.name)
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


def _nodes(
    entry: Mapping[str, Any], at: At, devices: Mapping[str, Device]
) -> tuple[int, Node, Link | None]:
    if "preset" in entry:
        known = read(_Preset, entry, at)
        if known.preset not in NAMES:
            remedy = f"one of {', '.join(NAMES)}"
            raise Mismatch((*at, "preset"), "is known", known.preset, remedy)
        return (known.count, *preset(known.preset))
    own = read(_Nodes, entry, at)
    if own.device not in devices:
        remedy = f"one of {', '.join(devices) or 'none: add [device.NAME]'}"
        raise Mismatch((*at, "device"), "names a device of the file", own.device, remedy)
    return own.count, Node(devices[own.device], own.devices, own.link), None


def _line(text: str, at: At) -> int:
    """The line where the last part of the key that the file has stands."""
    names = [part for part in at if isinstance(part, str)]
    table = next((part for part in at if isinstance(part, int)), 0)
    header: list[str] = []
    nodes, best, depth = -1, 1, 0
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.split("#")[0].strip()
        if match := re.fullmatch(r"\[+([^\[\]]+)\]+", bare):
            header = [part.strip(" \"'") for part in match[1].split(".")]
            nodes += bare.startswith("[[")
        keys = [] if match else re.findall(r"([\w-]+)\s*=", bare)
        if header[:1] == names[:1] == ["nodes"] and nodes != table:
            continue
        matched = 0  # how many of `names`, from the first, occur here in order
        for part in header + keys:
            matched += names[matched : matched + 1] == [part]
        if matched > depth:
            best, depth = number, matched
    return best

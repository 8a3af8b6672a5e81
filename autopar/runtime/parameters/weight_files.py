"""Weights: values from safetensors files or a mapping, of which a rank reads its slices alone.

    weights = open_weights("checkpoint/")
    weights.held["head.weight"]                      # its shape and dtype; nothing is read yet
    weights.read("head.weight", ((0, 16), (0, 64)))  # rows 0 to 15, and no other byte

A file is the length of its header (8 bytes), the header (JSON: by name dtype, shape and the first
and last byte of the data) and the data, row-major, without gaps. A file of a checkpoint has digests
in its header, of this and of each tensor.

What an index names lies in its folder, or below it. Links there are followed wherever they lead, as
those of Hugging Face's cache: who has the folder has set them, and anybody may have sent the index.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from autopar.base.files import open_regular
from autopar.errors import InvalidInput
from autopar.runtime.parameters.placing import Bounds, narrow_to

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SUFFIX = ".safetensors"
_LOAD_BY_TORCH = "weights=torch.load(path, weights_only=True) if it was written by torch.save"
DIGEST, DIGESTS = "header crc32", "crc32"  # in what a file says of itself
_SHARD = re.compile(rf".*-\d{{5}}-of-\d{{5}}{re.escape(SUFFIX)}")
INDEX = "model.safetensors.index.json"
CHECKPOINT = "checkpoint.json"  # lies in the folder of a checkpoint
MAX_HEADER_BYTES = 100_000_000  # bytes, as the format has it
# Runs of bytes that are shorter cost more in calls than the bytes between them: whole rows then.
SHORTEST_RUN = 128
MAX_READ_BYTES = 4 * 2**20  # bytes that are read at once so


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that weights hold."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    path: Path | None = None  # of its file
    start: int = 0  # the place of its first byte there

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightSource:
    """Tensors by name, which are read in parts."""

    held: Mapping[str, StoredTensor]

    def read(self, name: str, bounds: Bounds) -> Tensor:
        """A part of a tensor in memory of its own."""
        raise NotImplementedError

    def read_alike(self, names: Sequence[str], bounds: Bounds) -> Tensor:
        """The same of a tensor that is here under several names, with one value."""
        part = self.read(names[0], bounds)
        for name in names[1:]:
            other = self.read(name, bounds).to(part.dtype)
            if not torch.allclose(part, other, rtol=0, atol=0, equal_nan=True):
                raise InvalidInput(
                    "tensors that are tied in the model have one value in its weights",
                    got=f"other values for {names[0]} than for {name}",
                    remedy="leave one of them out, or build a model in which they are not tied",
                )
        return part


class MappedTensors(WeightSource):
    """A mapping of names to tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.held = {name: StoredTensor(tuple(t.shape), t.dtype) for name, t in tensors.items()}

    def read(self, name: str, bounds: Bounds) -> Tensor:
        part = narrow_to(self._tensors[name].detach(), bounds)
        return part.clone(memory_format=torch.contiguous_format)


class SafetensorsFiles(WeightSource):
    """What lies in some files."""

    def __init__(self, paths: list[Path]) -> None:
        found: dict[str, StoredTensor] = {}
        self.metadata: dict[str, Any] = {}  # what the files say of themselves
        self.have_digests = True  # of their headers, which are right
        self._stamps: dict[Path, tuple[int, ...]] = {}
        for path in paths:
            with self._open(path) as file:
                header = _read_header(path, file)
            self.metadata |= header.words
            self.have_digests &= header.words.get(DIGEST) == header.digest
            for name, held in header.held.items():
                if name in found:
                    raise _malformed(path, f"{name}, which is in {found[name].path} too")
                found[name] = held
        self.held = found

    def read(self, name: str, bounds: Bounds) -> Tensor:
        held = self.held[name]
        assert held.path is not None
        shape = [length for _, length in bounds]
        part = torch.empty(shape, dtype=held.dtype, device="cpu")
        if part.numel():
            with self._open(held.path) as file:
                _read_bounds(file.fileno(), held, bounds, part)
        return part

    def digest(self, name: str) -> str:
        """Compute the digest of a tensor's bytes, as they lie in its file now."""
        held, crc = self.held[name], 0
        assert held.path is not None
        with self._open(held.path) as file:
            for start in range(0, held.size, MAX_READ_BYTES):
                size = min(MAX_READ_BYTES, held.size - start)
                block = torch.empty(size, dtype=torch.uint8, device="cpu")
                _read_bytes(file.fileno(), held, held.start + start, block)
                crc = zlib.crc32(block.numpy().data, crc)
        return f"{crc:08x}"

    def _open(self, path: Path) -> BinaryIO:
        """Open the file that was opened first under this path, and no other."""
        file = open_regular(path)
        state = os.fstat(file.fileno())
        stamp = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
        if self._stamps.setdefault(path, stamp) != stamp:
            file.close()
            raise _malformed(path, "it has changed since it was opened")
        return file


def open_weights(given: Any) -> WeightSource:
    """The weights of a path or a mapping; or refuse it."""
    try:
        return _open_source(given)
    except OSError as error:
        raise _not_weights(f"{given}, which cannot be read: {error}") from error


def _open_source(given: Any) -> WeightSource:
    if isinstance(given, Mapping):
        if not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in given.items()):
            raise _not_weights("a mapping with other things than names and tensors")
        if nameless := [name for name, tensor in given.items() if tensor.device.type == "meta"]:
            raise _not_weights(f"{', '.join(nameless[:4])} on the meta device")
        return MappedTensors(given)
    if not isinstance(given, str | os.PathLike):
        raise _not_weights(f"a value of type {type(given).__name__}")
    path = Path(given)
    if not path.exists():
        raise _not_weights(f"{path}, where nothing is")
    if not path.is_dir():
        return SafetensorsFiles([path])
    if (path / CHECKPOINT).is_file():
        raise _not_weights(f"{path}, a checkpoint of ap.save()", "ap.load(path, module)")
    files = sorted(path.glob(f"*{SUFFIX}"))
    if (index := path / INDEX).is_file():
        files = _indexed_files(index)
    elif shard := next((file for file in files if _SHARD.fullmatch(file.name)), None):
        raise _malformed(shard, f"its folder has no {INDEX}: it was copied or saved in part")
    if not files:
        raise _not_weights(f"{path}, a folder without *.safetensors")
    return SafetensorsFiles(files)


def _not_weights(got: str, remedy: str = 'weights="model.safetensors"') -> InvalidInput:
    return InvalidInput(
        "weights are a safetensors file, a folder of them, or a mapping of names to tensors",
        got=got,
        remedy=remedy,
    )


def _malformed(path: Path, why: str) -> InvalidInput:
    return InvalidInput(
        "a safetensors file says where each of its tensors lies, one behind the other",
        got=f"{path}: {why}",
        remedy="copy or save the file again",
    )


def _indexed_files(index: Path) -> list[Path]:
    """The files that an index names."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [index.parent / name for name in names]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _malformed(index, f"no index ({type(error).__name__}: {error})") from None
    for name, file in zip(names, files):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise _malformed(index, f"it names {name}, which is not in its folder")
        if not file.is_file():
            raise _malformed(index, f"it names {name}, which is not there")
    return files


@dataclass(frozen=True)
class _Header:
    """What a file says of its tensors and of itself."""

    held: Mapping[str, StoredTensor]
    words: Mapping[str, Any]
    digest: str


def _read_header(path: Path, file: BinaryIO) -> _Header:
    """Read the header of a file, if it tells of all that is there and nothing else."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little") if size >= 8 else MAX_HEADER_BYTES + 1
    if path.suffix != SUFFIX and file.read(1) != b"{":
        raise _not_weights(f"{path}, which is no safetensors file", _LOAD_BY_TORCH)
    file.seek(8)
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise _malformed(path, "its header ends behind the file")
    text = file.read(length)
    try:
        entries = json.loads(text)
        words = dict(entries.pop("__metadata__", None) or {})
        found = {name: _parse_entry(path, 8 + length, entry) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _malformed(path, f"no header ({type(error).__name__}: {error})") from None
    end = 8 + length
    for name, held in sorted(found.items(), key=lambda item: (item[1].start, item[1].size)):
        if held.start != end:
            raise _malformed(path, f"{name} begins at byte {held.start}, not {end}")
        end += held.size
    if end != size:
        raise _malformed(path, f"{size} bytes, of which the header tells {end}")
    return _Header(found, words, _digest_of_header(entries, words))


def _parse_entry(path: Path, begin: int, entry: Any) -> StoredTensor:
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (first, last, *shape)):
        raise ValueError(f"sizes {shape} from {first} to {last}")
    held = StoredTensor(shape, DTYPES[entry["dtype"]], path, begin + first)
    if held.size != last - first:
        raise ValueError(f"{last - first} bytes for {entry['dtype']} {list(shape)}")
    return held


def _read_bounds(descriptor: int, held: StoredTensor, bounds: Bounds, part: Tensor) -> None:
    """Fill `part` with the elements inside `bounds`: run by run, or where these are short, from
    whole rows."""
    shape, item = held.shape, held.dtype.itemsize
    strides = [item * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = [dim for dim, (_, length) in enumerate(bounds) if length != shape[dim]]
    last = cut[-1] if cut else 0
    run = bounds[last][1] * strides[last] if bounds else item
    rows = last - 1 if run < SHORTEST_RUN and last > 0 else last  # the dim that is read in runs
    into = part.reshape(-1).view(torch.uint8)
    begin = held.start + sum(start * stride for (start, _), stride in zip(bounds, strides))
    outer = [range(length) for _, length in bounds[:rows]]
    for number, place in enumerate(itertools.product(*outer)):
        at = begin + sum(index * stride for index, stride in zip(place, strides))
        if rows == last:
            _read_bytes(descriptor, held, at, into[number * run : (number + 1) * run])
            continue
        count, stride = bounds[rows][1], strides[rows]
        piece = into[number * count * run : (number + 1) * count * run].view(count, run)
        offset = bounds[last][0] * strides[last]
        most = max(1, MAX_READ_BYTES // stride)
        for first in range(0, count, most):
            block = piece[first : first + most]
            whole = torch.empty(len(block), stride, dtype=torch.uint8, device="cpu")
            _read_bytes(descriptor, held, at - offset + first * stride, whole.view(-1))
            block.copy_(whole[:, offset : offset + run])


def _read_bytes(descriptor: int, held: StoredTensor, at: int, into: Tensor) -> None:
    """Read as many bytes as `into` takes, from byte `at` of the file."""
    view, done = memoryview(into.numpy().data), 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], at + done)
        if count == 0:
            assert held.path is not None
            raise _malformed(held.path, "it has become shorter since it was opened")
        done += count


def require_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuse what the format has no name for."""
    if dtype not in NAMES:
        raise InvalidInput(
            "a safetensors file holds tensors of the dtypes that it has names for",
            got=f"{name} of {dtype}",
            remedy=f"use one of {', '.join(str(one) for one in NAMES)}",
        )


def split_shards(
    kinds: Mapping[str, StoredTensor], most: float
) -> dict[str, dict[str, StoredTensor]]:
    """The tensors of each of several files of at most `most` bytes, or of one tensor, by the file's
    name: those that other programs give them."""
    shards: list[dict[str, StoredTensor]] = [{}]
    size = 0
    for name, held in kinds.items():
        if shards[-1] and size + held.size > most:
            shards.append({})
            size = 0
        shards[-1][name] = held
        size += held.size
    count = len(shards)
    if count == 1:
        return {f"model{SUFFIX}": shards[0]}
    return {f"model-{i:05}-of-{count:05}{SUFFIX}": one for i, one in enumerate(shards, 1)}


def require_file(path: Path) -> None:
    """Refuse what a file of weights does not take the place of."""
    if path.is_dir():
        raise InvalidInput(
            "a whole model is one file, or several in a folder",
            got=f"{path}, which is a folder",
            remedy='"model.safetensors", or max_shard_size=5e9 for files in a folder',
        )
    if path.exists():
        open_weights(path)  # anything else does not go away


def require_folder(path: Path, most: Any) -> None:
    """Refuse what shards cannot be written into, or no size of theirs."""
    rule = "shards are files of at most so many bytes, in a folder"
    if not isinstance(most, int | float) or isinstance(most, bool) or not most > 0:
        raise InvalidInput(rule, got=f"max_shard_size={most!r}", remedy="max_shard_size=5e9")
    if path.exists() and not path.is_dir():
        raise InvalidInput(rule, got=f"{path}, which is a file", remedy="give the path of a folder")
    if (path / CHECKPOINT).is_file():
        raise InvalidInput(
            rule,
            got=f"{path}, the folder of a checkpoint, which is replaced as a whole",
            remedy="give another path",
        )


def remove_old_shards(folder: Path, names: Collection[str]) -> None:
    """Take away an earlier model's, but for those that `names` replace."""
    (folder / INDEX).unlink(missing_ok=True)
    for file in folder.glob(f"model*{SUFFIX}"):
        is_shard = re.fullmatch(r"model(-\d{5}-of-\d{5})?", file.stem)
        if is_shard and file.name not in names:
            file.unlink()


def make_index(shards: Mapping[str, Mapping[str, StoredTensor]]) -> bytes:
    """Which tensor is in which file."""
    places = {name: file for file, held in shards.items() for name in held}
    size = sum(one.size for held in shards.values() for one in held.values())
    told = {"metadata": {"total_size": size}, "weight_map": places}
    return json.dumps(told, indent=2, sort_keys=True).encode() + b"\n"


def write_safetensors(
    file: BinaryIO,
    kinds: Mapping[str, StoredTensor],
    values: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    has_digests: bool = False,
) -> None:
    """Write tensors of some kinds, whose `values` come one by one in their order.

    `metadata`: what the file says of itself; with digests, of its header and of each tensor too,
    which take their places when all has been written."""
    entries, end = {}, 0
    for name, held in kinds.items():
        begin, end = end, end + held.size
        entries[name] = {
            "dtype": NAMES[held.dtype],
            "shape": list(held.shape),
            "data_offsets": [begin, end],
        }
    words = {"format": "pt", **(metadata or {})}
    blank = "0" * 8
    digests = [blank] * len(kinds)
    if has_digests:
        words |= {DIGESTS: " ".join(digests), DIGEST: blank}
    _write_header(file, entries, words)
    for number, value in enumerate(values):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        file.write(data)
        if has_digests:
            digests[number] = f"{zlib.crc32(data):08x}"
    if has_digests:
        words[DIGESTS] = " ".join(digests)
        words[DIGEST] = _digest_of_header(entries, words)
        file.seek(0)
        _write_header(file, entries, words)


def _write_header(file: BinaryIO, entries: Mapping[str, Any], words: Mapping[str, str]) -> None:
    text = json.dumps({"__metadata__": words, **entries}).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _digest_of_header(entries: Mapping[str, Any], words: Mapping[str, str]) -> str:
    """Compute the digest of all that a header says but this."""
    return digest_of([entries, {key: word for key, word in words.items() if key != DIGEST}])


def digest_of(data: Any) -> str:
    """Compute the digest of plain data, however it is written as JSON."""
    return f"{zlib.crc32(json.dumps(data, sort_keys=True).encode()):08x}"

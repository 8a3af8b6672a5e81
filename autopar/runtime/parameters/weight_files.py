"""Read weights from safetensors files or a mapping, so that a rank reads its slices alone.

    weights = open_weights("checkpoint/")
    weights.tensors["head.weight"]                   # its shape and dtype; nothing is read yet
    weights.read("head.weight", ((0, 16), (0, 64)))  # rows 0 to 15, and no other byte

A file is the length of its header (8 bytes), the header (JSON: by name dtype, shape and the first
and last byte of the data) and the data, row-major, without gaps. In checkpoints headers have
digests.

The files of an index lie in or below its folder. Links there are followed wherever they lead, as
those of Hugging Face's cache: the owner of the folder set them, but anybody may send an index.
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
DIGEST, DIGESTS = "header crc32", "crc32"  # keys of a file's metadata
_SHARD = re.compile(rf".*-\d{{5}}-of-\d{{5}}{re.escape(SUFFIX)}")
INDEX = "model.safetensors.index.json"
CHECKPOINT = "checkpoint.json"  # lies in the folder of a checkpoint
MAX_HEADER_BYTES = 100_000_000  # bytes, as the format has it
# Runs of bytes that are shorter cost more in calls than the bytes between them: whole rows then.
SHORTEST_RUN = 128
MAX_READ_BYTES = 4 * 2**20  # bytes that are read at once so


@dataclass(frozen=True)
class StoredTensor:
    """The type of a tensor in weights, and its place in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    path: Path | None = None  # of its file; None: it is in memory
    start: int = 0  # the position of its first byte in the file

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightSource:
    """Tensors by name, which are read in parts."""

    tensors: Mapping[str, StoredTensor]

    def read(self, name: str, bounds: Bounds) -> Tensor:
        """Return the part of a tensor inside `bounds`, in memory of its own."""
        raise NotImplementedError

    def read_tied(self, names: Sequence[str], bounds: Bounds) -> Tensor:
        """Read a part of a tensor with several names; refuse names with different values."""
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

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = values
        self.tensors = {name: StoredTensor(tuple(t.shape), t.dtype) for name, t in values.items()}

    def read(self, name: str, bounds: Bounds) -> Tensor:
        part = narrow_to(self._values[name].detach(), bounds)
        return part.clone(memory_format=torch.contiguous_format)


class SafetensorsFiles(WeightSource):
    """The tensors of several safetensors files."""

    def __init__(self, paths: list[Path]) -> None:
        tensors: dict[str, StoredTensor] = {}
        self.metadata: dict[str, Any] = {}  # of all files
        self.have_digests = True  # the headers have digests, and these are right
        self._stamps: dict[Path, tuple[int, ...]] = {}
        for path in paths:
            with self._open(path) as file:
                header = _read_header(path, file)
            self.metadata |= header.metadata
            self.have_digests &= header.metadata.get(DIGEST) == header.digest
            for name, stored in header.tensors.items():
                if name in tensors:
                    raise _malformed(path, f"{name}, which is in {tensors[name].path} too")
                tensors[name] = stored
        self.tensors = tensors

    def read(self, name: str, bounds: Bounds) -> Tensor:
        stored = self.tensors[name]
        assert stored.path is not None
        shape = [length for _, length in bounds]
        part = torch.empty(shape, dtype=stored.dtype, device="cpu")
        if part.numel():
            with self._open(stored.path) as file:
                _read_bounds(file.fileno(), stored, bounds, part)
        return part

    def digest(self, name: str) -> str:
        """Compute the digest of a tensor's bytes, as they lie in its file now."""
        stored, crc = self.tensors[name], 0
        assert stored.path is not None
        with self._open(stored.path) as file:
            for start in range(0, stored.size, MAX_READ_BYTES):
                size = min(MAX_READ_BYTES, stored.size - start)
                block = torch.empty(size, dtype=torch.uint8, device="cpu")
                _read_bytes(file.fileno(), stored, stored.start + start, block)
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


def open_weights(source: Any) -> WeightSource:
    """Open the weights of a path or a mapping, or refuse it."""
    try:
        return _open_source(source)
    except OSError as error:
        raise _not_weights(f"{source}, which cannot be read: {error}") from error


def _open_source(source: Any) -> WeightSource:
    if isinstance(source, Mapping):
        if not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in source.items()):
            raise _not_weights("a mapping with other things than names and tensors")
        if empty := [name for name, tensor in source.items() if tensor.device.type == "meta"]:
            raise _not_weights(f"{', '.join(empty[:4])} on the meta device")
        return MappedTensors(source)
    if not isinstance(source, str | os.PathLike):
        raise _not_weights(f"a value of type {type(source).__name__}")
    path = Path(source)
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
    """Return the files that an index names, or refuse one outside of its folder."""
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
    """The header of a file: its tensors, its metadata, and the digest that belongs to both."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, Any]
    digest: str


def _read_header(path: Path, file: BinaryIO) -> _Header:
    """Read the header of a file, and refuse one that does not cover exactly the file's bytes."""
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
        metadata = dict(entries.pop("__metadata__", None) or {})
        tensors = {name: _parse_entry(path, 8 + length, entry) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _malformed(path, f"no header ({type(error).__name__}: {error})") from None
    end = 8 + length
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if stored.start != end:
            raise _malformed(path, f"{name} begins at byte {stored.start}, not {end}")
        end += stored.size
    if end != size:
        raise _malformed(path, f"{size} bytes, of which the header tells {end}")
    return _Header(tensors, metadata, _digest_of_header(entries, metadata))


def _parse_entry(path: Path, begin: int, entry: Any) -> StoredTensor:
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (first, last, *shape)):
        raise ValueError(f"sizes {shape} from {first} to {last}")
    stored = StoredTensor(shape, DTYPES[entry["dtype"]], path, begin + first)
    if stored.size != last - first:
        raise ValueError(f"{last - first} bytes for {entry['dtype']} {list(shape)}")
    return stored


def _read_bounds(descriptor: int, stored: StoredTensor, bounds: Bounds, part: Tensor) -> None:
    """Fill `part` with the elements inside `bounds`, run by run; short runs from full rows."""
    shape, item = stored.shape, stored.dtype.itemsize
    strides = [item * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = [dim for dim, (_, length) in enumerate(bounds) if length != shape[dim]]
    last = cut[-1] if cut else 0
    run = bounds[last][1] * strides[last] if bounds else item
    rows = last - 1 if run < SHORTEST_RUN and last > 0 else last  # the dim that is read in runs
    into = part.reshape(-1).view(torch.uint8)
    begin = stored.start + sum(start * stride for (start, _), stride in zip(bounds, strides))
    outer = [range(length) for _, length in bounds[:rows]]
    for number, place in enumerate(itertools.product(*outer)):
        at = begin + sum(index * stride for index, stride in zip(place, strides))
        if rows == last:
            _read_bytes(descriptor, stored, at, into[number * run : (number + 1) * run])
            continue
        count, stride = bounds[rows][1], strides[rows]
        piece = into[number * count * run : (number + 1) * count * run].view(count, run)
        offset = bounds[last][0] * strides[last]
        block_rows = max(1, MAX_READ_BYTES // stride)
        for first in range(0, count, block_rows):
            block = piece[first : first + block_rows]
            full = torch.empty(len(block), stride, dtype=torch.uint8, device="cpu")
            _read_bytes(descriptor, stored, at - offset + first * stride, full.view(-1))
            block.copy_(full[:, offset : offset + run])


def _read_bytes(descriptor: int, stored: StoredTensor, at: int, into: Tensor) -> None:
    """Read as many bytes as `into` takes, from byte `at` of the file."""
    view, done = memoryview(into.numpy().data), 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], at + done)
        if count == 0:
            assert stored.path is not None
            raise _malformed(stored.path, "it has become shorter since it was opened")
        done += count


def require_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuse a dtype that the format has no name for."""
    if dtype not in NAMES:
        raise InvalidInput(
            "a safetensors file holds tensors of the dtypes that it has names for",
            got=f"{name} of {dtype}",
            remedy=f"use one of {', '.join(map(str, NAMES))}",
        )


def split_shards(
    tensors: Mapping[str, StoredTensor], max_bytes: float
) -> dict[str, dict[str, StoredTensor]]:
    """Divide tensors among files of at most `max_bytes`, or of one tensor, by the file's name.

    The names are the usual ones of safetensors checkpoints."""
    shards: list[dict[str, StoredTensor]] = [{}]
    size = 0
    for name, stored in tensors.items():
        if shards[-1] and size + stored.size > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = stored
        size += stored.size
    count = len(shards)
    if count == 1:
        return {f"model{SUFFIX}": shards[0]}
    return {f"model-{i:05}-of-{count:05}{SUFFIX}": shard for i, shard in enumerate(shards, 1)}


def require_file(path: Path) -> None:
    """Refuse to write weights over a folder, or over a file that is no weights."""
    if path.is_dir():
        raise InvalidInput(
            "a whole model is one file, or several in a folder",
            got=f"{path}, which is a folder",
            remedy='"model.safetensors", or max_shard_size=5e9 for files in a folder',
        )
    if path.exists():
        open_weights(path)


def require_folder(path: Path, size: Any) -> None:
    """Refuse a path that shards cannot be written into, or a wrong `max_shard_size`."""
    rule = "shards are files of at most so many bytes, in a folder"
    if not isinstance(size, int | float) or isinstance(size, bool) or not size > 0:
        raise InvalidInput(rule, got=f"max_shard_size={size!r}", remedy="max_shard_size=5e9")
    if path.exists() and not path.is_dir():
        raise InvalidInput(rule, got=f"{path}, which is a file", remedy="give the path of a folder")
    if (path / CHECKPOINT).is_file():
        raise InvalidInput(
            rule,
            got=f"{path}, the folder of a checkpoint, which is replaced as a whole",
            remedy="give another path",
        )


def remove_old_shards(folder: Path, names: Collection[str]) -> None:
    """Remove an earlier model's index and shards, but for those that `names` replace."""
    (folder / INDEX).unlink(missing_ok=True)
    for file in folder.glob(f"model*{SUFFIX}"):
        is_shard = re.fullmatch(r"model(-\d{5}-of-\d{5})?", file.stem)
        if is_shard and file.name not in names:
            file.unlink()


def make_index(shards: Mapping[str, Mapping[str, StoredTensor]]) -> bytes:
    """Write the JSON that says in which file each tensor is."""
    places = {name: file for file, tensors in shards.items() for name in tensors}
    size = sum(stored.size for tensors in shards.values() for stored in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


def write_safetensors(
    file: BinaryIO,
    tensors: Mapping[str, StoredTensor],
    values: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    has_digests: bool = False,
) -> None:
    """Write `tensors`, whose `values` come one by one in their order, and `metadata`.

    With `has_digests` the metadata gets those of the header and of each tensor at the end."""
    entries, end = {}, 0
    for name, stored in tensors.items():
        begin, end = end, end + stored.size
        entries[name] = {
            "dtype": NAMES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [begin, end],
        }
    all_metadata = {"format": "pt", **(metadata or {})}
    blank = "0" * 8
    digests = [blank] * len(tensors)
    if has_digests:
        all_metadata |= {DIGESTS: " ".join(digests), DIGEST: blank}
    _write_header(file, entries, all_metadata)
    for number, value in enumerate(values):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        file.write(data)
        if has_digests:
            digests[number] = f"{zlib.crc32(data):08x}"
    if has_digests:
        all_metadata[DIGESTS] = " ".join(digests)
        all_metadata[DIGEST] = _digest_of_header(entries, all_metadata)
        file.seek(0)
        _write_header(file, entries, all_metadata)


def _write_header(file: BinaryIO, entries: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _digest_of_header(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    """Compute the digest of a header's entries and metadata without the digest itself."""
    return digest_of([entries, {key: word for key, word in metadata.items() if key != DIGEST}])


def digest_of(data: Any) -> str:
    """Compute the digest of plain data, however it is written as JSON."""
    return f"{zlib.crc32(json.dumps(data, sort_keys=True).encode()):08x}"

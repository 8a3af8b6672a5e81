"""Writing of files such that each takes the place of an earlier one when it is complete.

    write_file("plan.json", text, "the file of a plan")
    with replacing(path) as file:
        file.write(data)

A file is written as `.name.token.new` and renamed: a full disk, an error or a kill leaves the
earlier file. Links are followed and permissions kept; a device or a pipe is written to directly. A
program locks what it writes, so that the next one deletes files that no program holds any more.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from autopar.errors import InvalidInput

_NAME = 40  # characters of a name that come back in that of a file beside it


def write_file(path: str | Path, data: bytes | str, what: str) -> None:
    """Write a file, and the folders that it stands in; or refuse the path of `what`."""
    if not isinstance(path, str | Path) or "\0" in str(path):
        raise InvalidInput(f"{what} has a path", got=repr(path), remedy='"run/file"')
    content = data.encode(errors="backslashreplace") if isinstance(data, str) else data
    with writing(path, what):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(content)


def append_line(path: str | Path, line: str, what: str) -> None:
    """Append to a file: the whole `line`, or nothing of it where the disk is full."""
    with writing(path, what), open(path, "ab", buffering=0) as file:
        data, size = line.encode(), os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


@contextmanager
def writing(path: str | Path, what: str) -> Iterator[None]:
    """Refuse the path of `what` where the disk refuses what this is around."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(
            f"{what} can be written",
            got=f"{path}: {error.strerror or error}",
            remedy="give another path, or make room there; what was there before still is",
        ) from error


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when the block ends, unless by an error."""
    new = NewFile(path)
    try:
        yield new.file
        new.finish()
        new.take_place()
    except BaseException:
        new.discard()
        raise


class NewFile:
    """A file that is written beside the one whose place it takes."""

    def __init__(self, path: str | Path) -> None:
        self._place = Path(os.path.realpath(path))
        self._path = self._place
        mode = _mode_of(self._place)
        if mode is not None and not stat.S_ISREG(mode):
            self.file: BinaryIO = open(self._place, "wb")  # noqa: SIM115
            return
        name = f".{self._place.name[:_NAME]}.{secrets.token_hex(6)}.new"
        self._path = self._place.with_name(name)
        for unfinished in _unfinished(self._place):
            with suppress(OSError), if_abandoned(unfinished) as is_abandoned:
                if is_abandoned:
                    unfinished.unlink()
        self.file = self._created()
        if mode is not None:
            with suppress(OSError):  # of a disk that knows no permissions
                os.fchmod(self.file.fileno(), stat.S_IMODE(mode))

    def _created(self) -> BinaryIO:
        """Create the file, again where another program took it for abandoned before it was held."""
        while True:
            file = open(self._path, "xb")  # noqa: SIM115
            hold(file.fileno())
            if os.fstat(file.fileno()).st_nlink:
                return file
            file.close()

    def finish(self) -> None:
        """Bring all that was written to the disk."""
        self.file.flush()
        if self._path != self._place:
            os.fsync(self.file.fileno())

    def take_place(self) -> None:
        """Replace the earlier file."""
        if self._path != self._place:
            os.replace(self._path, self._place)
            sync(self._place.parent)
        self.file.close()

    def discard(self) -> None:
        """Delete what was written, if it has not taken its place."""
        with suppress(OSError):
            self.file.close()
        if self._path != self._place:
            self._path.unlink(missing_ok=True)


def _mode_of(place: Path) -> int | None:
    """Return the mode of the file at a place, if it can be written; None if there is none."""
    try:
        mode = place.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return mode


def _unfinished(place: Path) -> list[Path]:
    """Return the files that were written to take a place, and have not."""
    name = re.compile(rf"\.{re.escape(place.name[:_NAME])}\.[0-9a-f]{{12}}\.new")
    return [path for path in place.parent.iterdir() if name.fullmatch(path.name) and path.is_file()]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a folder, or a file that is created where it is missing, while other programs wait.

    Raises `OSError` where the disk knows no locks."""
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def hold(descriptor: int) -> None:
    """Mark a file or folder as in use until it is closed. Wait while `if_abandoned` looks at it."""
    with suppress(OSError):  # of a disk that knows no locks
        fcntl.flock(descriptor, fcntl.LOCK_EX)


@contextmanager
def if_abandoned(path: Path) -> Iterator[bool]:
    """Tell whether no program holds a file or folder, and keep others from holding it meanwhile.

    On a disk without locks every file counts as abandoned.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        yield _is_lockable(descriptor)
    finally:
        os.close(descriptor)


def _is_lockable(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, through links; raise `OSError` for anything else, such as a pipe, at
    which reading would wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb", buffering=0)


def read_regular(path: Path) -> bytes:
    """Read a regular file as `open_regular` opens it."""
    with open_regular(path) as file:
        return file.read()


def sync(folder: Path) -> None:
    """Bring the names in a folder to the disk, where it can do that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)

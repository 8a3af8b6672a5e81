"""Written files: each is there as a whole, or what was there before is, whatever the disk does."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import autopar as ap
from autopar.base.files import NewFile, replacing, write_file
from autopar.cluster.calibration import read_cached
from autopar.pipeline import save, schedule, simulate

X = torch.linspace(-1, 1, 32).view(8, 4)


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """Let files grow to that size, and not beyond."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def module() -> ap.ParallelModule:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return ap.parallelize(
        model, (X,), mesh=ap.Mesh(dp=2), mode="data", cluster=ap.Cluster.preset("dgx-a100")
    )


def recorded(module: ap.ParallelModule, path: Path) -> None:
    recording = module.record(steps=1)
    with torch.no_grad():
        module(X)
    recording.save(path)


WRITERS: dict[str, Callable[[ap.ParallelModule, Path], Any]] = {
    "plan.json": lambda module, path: module.plan.save(path),
    "page.html": lambda module, path: module.plan.report(path),
    "trace.json.gz": lambda module, path: module.plan.trace(path),
    "picture.svg": lambda module, path: module.plan.draw(path),
    "schedule.txt": lambda _, path: save(schedule("1f1b", stages=4, microbatches=8), path),
    "schedule.csv": lambda _, path: save(schedule("1f1b", stages=4, microbatches=8), path),
    "line.svg": lambda _, path: simulate(schedule("1f1b", stages=2, microbatches=2)).save(path),
    "cluster.toml": lambda module, path: module.plan.cluster.save(path),
    "model.safetensors": lambda module, path: ap.save_safetensors(path, module),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_what_was_there(
    name: str, module: ap.ParallelModule, tmp_path: Path
) -> None:
    write, path = WRITERS[name], tmp_path / name
    for folder in (tmp_path, tmp_path / "none"):
        before = sorted(folder.iterdir()) if folder.exists() else []
        with full_after(64), pytest.raises(ap.InvalidInput, match="can be written") as error:
            write(module, folder / name)
        assert "File too large" in str(error.value)
        assert sorted(folder.iterdir()) == before
    (tmp_path / "none").rmdir()
    write(module, path)
    before = path.read_bytes()
    assert len(before) > 64
    path.chmod(0o640)
    with full_after(64), pytest.raises(ap.InvalidInput, match="can be written"):
        write(module, path)
    assert path.read_bytes() == before
    write(module, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [one.name for one in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", [name for name in WRITERS if "model" not in name])
def test_a_place_that_is_none_is_refused(
    name: str, module: ap.ParallelModule, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / name).mkdir()
    for path in (tmp_path / name, tmp_path / "file" / name, tmp_path / ("n" * 300 + name)):
        with pytest.raises(ap.InvalidInput, match="can be written"):
            WRITERS[name](module, path)
    with patch.object(os, "access", return_value=False):  # root may write anything
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / name).touch()
        with pytest.raises(ap.InvalidInput, match="Permission denied"):
            WRITERS[name](module, tmp_path / "other" / name)


@pytest.mark.parametrize("path", [None, 3, "a\0b"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ap.InvalidInput, match="the file of a plan has a path"):
        write_file(path, "text", "the file of a plan")


def test_links_are_followed_and_pipes_are_written_to(tmp_path: Path) -> None:
    for name, target in (("link", "file"), ("dangling", "later"), ("far", "folder/file")):
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(target)
        for text in ("one", "two"):
            write_file(tmp_path / name, text, "a file")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / target).read_text() == "two"
    write_file("/dev/null", "text", "a file")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file(tmp_path / "pipe", "text", "a file")
    assert os.read(reader, 9) == b"text"
    os.close(reader)


def test_two_programs_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    writers = [NewFile(path) for _ in range(2)]
    for number, new in enumerate(writers):
        new.file.write(b"%d" % number)
        new.finish()
    for number, new in enumerate(writers):
        new.take_place()
        assert path.read_text() == str(number)
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_broken_off_is_deleted_by_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    if not (child := os.fork()):
        NewFile(path).file.write(b"half")
        os._exit(1)
    os.waitpid(child, 0)
    (tmp_path / ".file.notes.new").touch()
    assert len(list(tmp_path.iterdir())) == 2
    with suppress(KeyboardInterrupt), replacing(path) as file:
        assert len(list(tmp_path.iterdir())) == 2  # its own, and what is somebody else's
        file.write(b"whole")
        raise KeyboardInterrupt
    assert [one.name for one in tmp_path.iterdir()] == [".file.notes.new"]


def test_a_line_is_appended_as_a_whole(tmp_path: Path) -> None:
    figures = ap.StepFigures(1, 0, 0.5, 1.0, 1.0, 1, None, None)
    lines = ap.JsonLines(tmp_path / "figures")
    lines(figures)
    before = lines.path.read_text()
    with full_after(len(before) + 10), pytest.raises(ap.InvalidInput, match="File too large"):
        lines(figures)
    assert lines.path.read_text() == before
    lines(figures)
    assert lines.path.read_text() == 2 * before


def test_a_cache_that_cannot_be_written_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_cached("numbers", list, lambda: [1, 2]) == [1, 2]
    with full_after(2), pytest.raises(ap.InvalidInput, match="cache of this machine's constants"):
        read_cached("numbers", list, lambda: [3, 4], again=True)
    assert read_cached("numbers", list, lambda: [5, 6]) == [1, 2]

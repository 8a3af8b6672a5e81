"""Checkpoints in odd places, of odd things: what is saved comes back as it was, what would not is
refused before anything is written, and nothing of anybody else's is lost."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar import Mesh
from autopar.runtime.checkpoints import (
    checkpoint_folders,
    checkpoint_writing,
    whole_model_files,
)
from autopar.runtime.checkpoints.checkpoint_files import Checkpoint, Key
from autopar.runtime.checkpoints.checkpoint_writing import Job
from tests.captures import shared_captures

X = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)


class Model(nn.Module):
    """Whose names are texts that a state's could be."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in ("w", "exp_avg of w", '"exp_avg" of w'):
            self.register_parameter(name, nn.Parameter(torch.rand(4, dtype=torch.float64)))
        self.register_buffer("e8", torch.rand(3).to(torch.float8_e8m0fnu))
        self.register_buffer("complex", torch.rand(2, 3, dtype=torch.complex128))
        self.register_buffer("count", torch.tensor(7, dtype=torch.uint16))
        self.register_buffer("none", torch.zeros(0, 2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.w + getattr(self, "exp_avg of w") + getattr(self, '"exp_avg" of w')
        return (x * weight).square().mean()


@pytest.fixture(autouse=True)
def capture_once() -> Iterator[None]:
    with shared_captures():
        yield


def made() -> tuple[ap.ParallelModule, torch.optim.Optimizer]:
    """One that has learned a step."""
    module = ap.parallelize(Model(), (X,), mesh=Mesh(dp=2), mode="data", backend="virtual")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    train(module, optimizer)
    return module, optimizer


def train(module: ap.ParallelModule, optimizer: torch.optim.Optimizer) -> None:
    module.step(X)
    optimizer.step()
    optimizer.zero_grad()


def values(module: ap.ParallelModule) -> dict[str, Any]:
    """Whose equality is that of all bits."""
    state = module.full_state_dict()
    return {name: (v.dtype, v.reshape(-1).view(torch.uint8).tolist()) for name, v in state.items()}


def test_every_name_and_dtype_comes_back(tmp_path: Path) -> None:
    module, optimizer = made()
    kept = optimizer.state[module.get_parameter("w")]
    kept["master"] = torch.full((4,), 1 / 3, dtype=torch.float32)
    kept[""] = torch.full((4,), 5.0, dtype=torch.float64)
    before = values(module)
    ap.save(tmp_path / "a", module, optimizer)
    train(module, optimizer)
    kept.clear()
    with torch.device("meta"), torch.inference_mode():
        ap.load(tmp_path / "a", module, optimizer)
    assert values(module) == before
    kept = optimizer.state[module.get_parameter("w")]
    assert torch.equal(kept["master"], torch.full((4,), 1 / 3, dtype=torch.float32))
    assert torch.equal(kept[""], torch.full((4,), 5.0, dtype=torch.float64))
    train(module, optimizer)


class Counting(torch.optim.SGD):
    """With a state dict of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "counted": 3}


def test_what_is_of_no_parameter_is_not_saved(tmp_path: Path) -> None:
    module, optimizer = made()
    states: dict[Any, Any] = optimizer.state
    for key, value in ((0, torch.ones(4)), (("a", 1), 2)):
        states[module.get_parameter("w")][key] = value
        with pytest.raises(ap.InvalidInput, match="which is no name"):
            ap.save(tmp_path / "a", module, optimizer)
        del states[module.get_parameter("w")][key]
    states["global"] = {"n": 7}
    with pytest.raises(ap.InvalidInput, match="'global', which is no parameter"):
        ap.save(tmp_path / "a", module, optimizer)
    with pytest.raises(ap.InvalidInput, match="counted"):
        ap.save(tmp_path / "a", module, Counting(module.parameters()))
    with pytest.raises(ap.InvalidInput) as error:
        ap.save(tmp_path / "a", module, [optimizer])  # type: ignore[arg-type]
    assert "each" in error.value.remedy
    assert not any(tmp_path.iterdir())


def test_what_cannot_be_taken_up_changes_nothing(tmp_path: Path) -> None:
    module, optimizer = made()
    ap.save(tmp_path / "a", module, optimizer)
    train(module, optimizer)
    before, told = values(module), str(optimizer.state_dict())
    data = torch.load(tmp_path / "a" / "beside.pt")
    whole = (tmp_path / "a" / "beside.pt").read_bytes()
    for spoiled in ({"random": data["random"][:16]}, {"extra": 1}):
        torch.save({**data, **spoiled}, tmp_path / "a" / "beside.pt")
        with pytest.raises(ap.InvalidInput, match="as ap"):
            ap.load(tmp_path / "a", module, optimizer)
    (tmp_path / "a" / "beside.pt").write_bytes(whole)
    with (
        patch.object(type(optimizer), "load_state_dict", side_effect=KeyError("counted")),
        pytest.raises(ap.InvalidInput, match="takes up the states"),
    ):
        ap.load(tmp_path / "a", module, optimizer)
    assert values(module) == before
    assert str(optimizer.state_dict()) == told


def a_newer_index(folder: Path) -> None:
    index = json.loads((folder / "checkpoint.json").read_text())
    (folder / "checkpoint.json").write_text(json.dumps({**index, "version": 2, "more": []}))


def a_newer_file_beside(folder: Path) -> None:
    data = torch.load(folder / "beside.pt")
    torch.save({**data, "version": 2, "more": []}, folder / "beside.pt")


def newer_pieces(folder: Path) -> None:
    file = folder / "rank-0.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"version": "1"', b'"version": "2"'))


@pytest.mark.parametrize("spoil", [a_newer_index, a_newer_file_beside, newer_pieces])
def test_a_newer_one_is_called_newer(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    module, _ = made()
    ap.save(tmp_path / "a", module)
    spoil(tmp_path / "a")
    with pytest.raises(ap.InvalidInput, match="or by a later one"):
        ap.load(tmp_path / "a", module)
    if spoil is a_newer_index:
        with pytest.raises(ap.InvalidInput, match="or by a later one"):
            ap.save(tmp_path / "a", module)


def test_files_of_several_saves_are_no_checkpoint(tmp_path: Path) -> None:
    module, optimizer = made()
    for name in ("a", "b"):
        ap.save(tmp_path / name, module, optimizer)
    for name in ("rank-0.safetensors", "beside.pt"):
        shutil.copytree(tmp_path / "b", tmp_path / "c")
        shutil.copy(tmp_path / "a" / name, tmp_path / "c" / name)
        with pytest.raises(ap.InvalidInput, match=f"{name} is of another checkpoint"):
            ap.load(tmp_path / "c", module, optimizer)
        shutil.rmtree(tmp_path / "c")


def test_a_checkpoint_takes_the_place_of_its_own_files_alone(tmp_path: Path) -> None:
    module, _ = made()
    ap.save(tmp_path / "run", module)
    ap.save(tmp_path / "run" / "best", module, extra="best")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoint.json").write_text("{}")
    (tmp_path / "other" / "thesis").touch()
    (tmp_path / "file").touch()
    for name in ("run", "other", "file"):
        with pytest.raises(ap.InvalidInput, match="takes the place of another"):
            ap.save(tmp_path / name, module)
    assert ap.load(tmp_path / "run" / "best", module) == "best"
    assert (tmp_path / "other" / "thesis").exists()
    ap.save(tmp_path / "late", module)
    write = Job.write

    def while_others_write(job: Job) -> None:
        write(job)
        (tmp_path / "late" / "notes").touch()

    with (
        patch.object(Job, "write", while_others_write),
        pytest.raises(ap.InvalidInput, match="where notes is too"),
    ):
        ap.save(tmp_path / "late", module)
    assert (tmp_path / "late" / "notes").exists()
    assert ap.is_saved(tmp_path / "late")
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".")]


def test_links_lead_to_where_checkpoints_are(tmp_path: Path) -> None:
    module, _ = made()
    for name in ("to a folder", "dangling"):
        link, folder = tmp_path / name, tmp_path / f"{name}'s"
        if name == "to a folder":
            ap.save(folder, module)
        link.symlink_to(folder)
        for count in range(3):
            ap.save(link, module, extra=count)
        assert link.is_symlink()
        assert ap.load(folder, module) == ap.load(link, module) == 2
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "loop", "a\0b", tmp_path / ("n" * 300), tmp_path / ("n" * 252)):
        with pytest.raises(ap.InvalidInput):
            ap.save(path, module)
        with pytest.raises(ap.InvalidInput):
            ap.load(path, module)
    (tmp_path / "empty").mkdir()
    before = Path.cwd()
    os.chdir(tmp_path / "empty")
    try:
        for path in (".", "..", "../empty"):
            with pytest.raises(ap.InvalidInput, match="the working directory"):
                ap.save(path, module)
    finally:
        os.chdir(before)
    ap.save(tmp_path / "empty", module)


def test_what_cannot_be_deleted_is_in_nobodys_way(tmp_path: Path) -> None:
    module, _ = made()
    ap.save(tmp_path / "a", module)
    with patch.object(checkpoint_folders, "_discard", lambda folder: None):
        for count in range(3):
            with pytest.warns(UserWarning, match="deleted and stays at"):
                ap.save(tmp_path / "a", module, extra=count)
    assert len(list(tmp_path.iterdir())) == 4
    assert ap.load(tmp_path / "a", module) == 2
    ap.save(tmp_path / "a", module)
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_is_not_there_has_no_checkpoint_and_stays_away(tmp_path):
    assert not ap.is_saved(tmp_path / "run" / "last")
    assert not (tmp_path / "run").exists()


def test_what_a_killed_save_began_is_deleted(tmp_path: Path) -> None:
    module, _ = made()
    killed = tmp_path / f".a.{12 * '0'}.new"
    killed.mkdir()
    for name in ("checkpoint.json", "beside.pt", "plan.json", "rank-3.safetensors"):
        (killed / name).touch()
        (killed / f".{name}.{12 * 'f'}.new").touch()
    ap.save(tmp_path / "a", module)
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_a_working_directory_that_was_deleted_is_no_obstacle(tmp_path: Path) -> None:
    module, _ = made()
    before = Path.cwd()
    (tmp_path / "work").mkdir()
    os.chdir(tmp_path / "work")
    (tmp_path / "work").rmdir()
    try:
        ap.save(tmp_path / "a", module, extra=1)
        assert ap.load(tmp_path / "a", module) == 1
        with pytest.raises(ap.InvalidInput, match="a checkpoint has a path"):
            ap.save("relative", module)
    finally:
        os.chdir(before)


def test_modules_that_are_saved_to_one_path_do_not_mix(tmp_path: Path) -> None:
    first, second, other = made()[0], made()[0], made()[0]
    for number, module in enumerate((first, second)):
        for parameter in module.parameters():
            nn.init.constant_(parameter, number)
    may_write, write = threading.Event(), Job.write

    def wait_first(job: Job) -> None:
        may_write.wait(60)
        write(job)

    with patch.object(Job, "write", wait_first):
        savings = [ap.save(tmp_path / "a", first, extra=0, asynchronous=True)]
        threading.Timer(0.05, may_write.set).start()
        savings.append(ap.save(tmp_path / "a", second, extra=1, asynchronous=True))
    assert ap.load(tmp_path / "a", other) == 1
    assert values(other) == values(second)
    for saving_ in savings:
        assert saving_ is not None
        saving_.wait()


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    module, _ = made()
    ap.save(tmp_path / "a", module, extra=1)
    plain = ap.parallelize(nn.Linear(4, 4), (torch.ones(2, 4),), mesh=Mesh(one=1), mode="data")
    ap.save_safetensors(tmp_path / "m.safetensors", plain)
    there = sorted(tmp_path.iterdir())
    with (
        patch.object(whole_model_files, "write_safetensors", full),
        pytest.raises(ap.InvalidInput, match="No space"),
    ):
        ap.save_safetensors(tmp_path / "m.safetensors", plain)
    for what in ("write_safetensors", "write_in_folder"):
        with patch.object(checkpoint_writing, what, full):
            with pytest.raises(ap.InvalidInput, match="No space"):
                ap.save(tmp_path / "a", module)
            last = ap.save(tmp_path / "a", module, asynchronous=True)
            assert last is not None
            for _ in range(2):  # each says that there is none
                with pytest.raises(ap.InvalidInput, match="No space"):
                    last.wait()
        assert sorted(tmp_path.iterdir()) == there
    assert ap.load(tmp_path / "a", module) == 1


def test_whole_models_and_checkpoints_are_told_apart(tmp_path: Path) -> None:
    module = ap.parallelize(nn.Linear(4, 4), (torch.ones(2, 4),), mesh=Mesh(one=1), mode="data")
    ap.save(tmp_path / "a", module)
    before = sorted((tmp_path / "a").iterdir())
    for options in ({}, {"max_shard_size": 1e9}):
        with pytest.raises(ap.InvalidInput, match="folder"):
            ap.save_safetensors(tmp_path / "a", module, **options)
    assert sorted((tmp_path / "a").iterdir()) == before
    with pytest.raises(ap.InvalidInput) as error:
        ap.parallelize(
            nn.Linear(4, 4), (torch.ones(2, 4),), mesh=Mesh(one=1), weights=tmp_path / "a"
        )
    assert "ap.load" in error.value.remedy
    module.close()
    for call in (ap.save, ap.load, ap.save_safetensors):
        with pytest.raises(ap.InvalidInput, match="closed module"):
            call(tmp_path / "a", module)


def test_a_changed_bit_is_refused_or_harmless(tmp_path: Path) -> None:
    """In pieces, their headers and the index, at places by chance and those of every kind."""
    module, optimizer = made()
    ap.save(tmp_path / "a", module, optimizer)
    before, chance = values(module), random.Random(0)
    for name, least in (("rank-0.safetensors", 0.95), ("checkpoint.json", 0.95)):
        file = tmp_path / "a" / name
        whole = file.read_bytes()
        places = {*range(16), *range(len(whole) - 8, len(whole))}
        places |= {*chance.sample(range(len(whole)), 80)}
        refused = 0
        for place in sorted(places):
            changed = bytearray(whole)
            changed[place] ^= 1 << chance.randrange(8)
            file.write_bytes(changed)
            for parameter in module.parameters():
                parameter.detach().zero_()
            empty = values(module)
            try:
                ap.load(tmp_path / "a", module, optimizer)
            except ap.InvalidInput:
                assert values(module) == empty
                refused += 1
            else:
                assert values(module) == before, place
        assert refused >= least * len(places)
        file.write_bytes(whole)


def test_ranks_look_at_the_pieces_in_shares(tmp_path: Path) -> None:
    module, optimizer = made()
    ap.save(tmp_path / "a", module, optimizer)
    file = tmp_path / "a" / "rank-0.safetensors"
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(changed)
    saved, accepted = Checkpoint(tmp_path / "a"), 0
    for rank in range(3):
        with suppress(ap.InvalidInput):
            saved.require_unchanged(rank, 3)
            accepted += 1
    assert accepted == 2
    with pytest.raises(ap.InvalidInput, match=r"in rank-0\.safetensors has changed"):
        saved.require_unchanged(0, 1)


def without_digests(folder: Path) -> None:
    index = json.loads((folder / "checkpoint.json").read_text())
    del index["digest"]
    (folder / "checkpoint.json").write_text(json.dumps(index))


def with_a_hole(folder: Path) -> None:
    file = folder / "rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def with_a_pipe(folder: Path) -> None:
    (folder / "rank-0.safetensors").unlink()
    os.mkfifo(folder / "rank-0.safetensors")


def without_pieces(folder: Path) -> None:
    (folder / "rank-0.safetensors").unlink()


def with_half_a_plan(folder: Path) -> None:
    file = folder / "plan.json"
    file.write_bytes(file.read_bytes()[:-20])


SPOILS = [without_digests, with_a_hole, with_a_pipe, without_pieces, with_half_a_plan]


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_damaged_one_is_not_called_saved(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    module, _ = made()
    ap.save(tmp_path / "a", module)
    assert ap.is_saved(tmp_path / "a")
    spoil(tmp_path / "a")
    with pytest.warns(UserWarning, match=r"a checkpoint is as ap.save\(\) wrote it"):
        assert not ap.is_saved(tmp_path / "a")
    with pytest.raises(ap.InvalidInput, match=r"a checkpoint is as ap.save\(\) wrote it"):
        ap.load(tmp_path / "a", module)


def test_digests_are_made_by_the_thread_that_writes(tmp_path: Path) -> None:
    module, _ = made()
    threads, crc32 = set(), zlib.crc32

    def watched(*args: Any) -> int:
        threads.add(threading.current_thread().name)
        return crc32(*args)

    with patch.object(zlib, "crc32", watched):
        saving_ = ap.save(tmp_path / "a", module, asynchronous=True)
        assert saving_ is not None
        saving_.wait()
    assert threads == {"saving"}


def test_programs_save_to_one_path_at_once(tmp_path: Path) -> None:
    """Each checkpoint is whole, and nothing is left beside the last one."""
    module, _ = made()
    path, others = tmp_path / "a", 2
    children = []
    for number in range(others):
        if not (child := os.fork()):
            for _ in range(8):
                ap.save(path, module, extra=number)
            os._exit(0)
        children.append(child)
    loaded = 0
    for _ in range(8):
        ap.save(path, module, extra=others)
        try:
            assert ap.load(path, module) in range(others + 1)
            loaded += 1
        except ap.InvalidInput as error:
            assert error.rule == "a checkpoint stays where it is while it is loaded"  # noqa: PT017
    assert loaded
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * others
    assert ap.load(path, module) in range(others + 1)
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_somebody_deletes_is_told(tmp_path: Path) -> None:
    module, _ = made()
    write = Job.write

    def deleted_first(job: Job) -> None:
        shutil.rmtree(job.folders.new)
        write(job)

    with patch.object(Job, "write", deleted_first):
        with pytest.raises(ap.AutoparError, match="has its folder to itself"):
            ap.save(tmp_path / "a", module)
        last = ap.save(tmp_path / "a", module, asynchronous=True)
        assert last is not None
        with pytest.raises(ap.AutoparError, match="has its folder to itself"):
            last.wait()
    assert not any(tmp_path.iterdir())


def test_one_that_is_replaced_while_it_is_loaded_is_refused(tmp_path: Path) -> None:
    module, _ = made()
    ap.save(tmp_path / "a", module)
    saved = Checkpoint(tmp_path / "a")
    ap.save(tmp_path / "a", module)
    for call in (lambda: saved.require_unchanged(0, 1), lambda: saved.read(Key("w"), ((0, 4),))):
        with pytest.raises(ap.InvalidInput, match="stays where it is while it is loaded"):
            call()


class Odd:
    pass


def itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (Odd(), "extra['a'][1]: a value of type tests.runtime.test_checkpoints.Odd"),
        (defaultdict(int), "extra['a'][1]: a value of type collections.defaultdict"),
        (torch.ones(3).numpy(), "extra['a'][1]: a value of type numpy.ndarray"),
        (itself(), "extra['a'][1][0], which holds itself"),
    ],
)
def test_what_is_no_plain_data_is_named(value: Any, where: str, tmp_path: Path) -> None:
    module, _ = made()
    with pytest.raises(ap.InvalidInput) as error:
        ap.save(tmp_path / "a", module, extra={"a": [1, value]})
    assert error.value.got == where
    assert not any(tmp_path.iterdir())


def test_plain_data_comes_back(tmp_path: Path) -> None:
    module, optimizer = made()
    number = torch.tensor([0.5], dtype=torch.float64).numpy()[0]
    optimizer.param_groups[0]["lr"] = number
    given = {"step": 3, "best": number, 4: (None, {1}, b"a", 1j, torch.float16, X.shape)}
    ap.save(tmp_path / "a", module, optimizer, extra=given)
    found = ap.load(tmp_path / "a", module, optimizer)
    assert found == given
    assert type(found["best"]) is float
    assert type(optimizer.param_groups[0]["lr"]) is float

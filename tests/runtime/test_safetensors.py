"""Each rank reads its slices of safetensors files alone, and wrong files are refused."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar import Mesh
from autopar.layout import Layout
from autopar.runtime.parameters import weight_files
from autopar.runtime.parameters.placing import narrow_to
from autopar.runtime.parameters.weight_files import (
    INDEX,
    SafetensorsFiles,
    StoredTensor,
    open_weights,
    write_safetensors,
)


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    """What the format says, in plain words."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data, end = [], 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": weight_files.NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        data.append(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()))
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


class Tied(nn.Module):
    """Two names of one tensor, of which files hold one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.norm = nn.Embedding(6, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.up(self.table(ids)))).square().mean()


IDS = (torch.arange(8) % 6,)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that are read, call by call."""
    counts: list[int] = []
    original = os.preadv

    def counted(descriptor: int, buffers: list[Any], place: int) -> int:
        counts.append(original(descriptor, buffers, place))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return counts


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", weight_files.NAMES, ids=str)
def test_every_part_of_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    data = torch.randint(0, 2, (5 * 3 * 4 * dtype.itemsize,), dtype=torch.uint8)
    whole = data.view(dtype).view(5, 3, 4)
    save(tmp_path / "a", {"before": torch.ones(3), "whole": whole, "one": whole[1, 2, 3]})
    weights = open_weights(tmp_path / "a")
    parts = [[(0, size), (1, size - 1), (size - 1, 1), (1, 0)] for size in whole.shape]
    for bounds in itertools.product(*parts):
        found = weights.read("whole", bounds)
        assert found.dtype is dtype
        assert found.shape == narrow_to(whole, bounds).shape
        assert torch.equal(bits(found), bits(narrow_to(whole, bounds)))
    assert torch.equal(bits(weights.read("one", ())), bits(whole[1, 2, 3]))


@pytest.mark.parametrize("rows", [weight_files.MAX_READ_BYTES, 32])
def test_short_runs_come_with_their_rows(
    rows: int, tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "MAX_READ_BYTES", rows)
    whole = torch.randn(3, 7, 4)
    save(tmp_path / "a", {"whole": whole})
    bounds = ((1, 2), (2, 4), (1, 2))
    assert torch.equal(open_weights(tmp_path / "a").read("whole", bounds), whole[1:3, 2:6, 1:3])
    assert sum(read) == 2 * 4 * 4 * 4
    assert len(read) == (2 if rows > 64 else 4)


@pytest.mark.parametrize("layout", [Layout("d"), Layout(None, "d"), Layout(("e", "d"), None)])
def test_ranks_read_each_byte_once(layout: Layout, tmp_path: Path, read: list[int]) -> None:
    mesh, whole = Mesh(d=3, e=2), torch.randn(7, 130)
    layout = Layout(*layout.dims, *[None] * (2 - layout.ndim))
    save(tmp_path / "a", {"whole": whole})
    weights = open_weights(tmp_path / "a")
    for rank in range(mesh.size):
        bounds = layout.local_bounds(whole.shape, mesh, rank)
        assert torch.equal(weights.read("whole", bounds), narrow_to(whole, bounds))
    copies = mesh.size // mesh.degree(layout.axes)
    assert sum(read) == whole.nbytes * copies


@pytest.mark.parametrize("form", ["file", "folder", "indexed", "mapping"])
@pytest.mark.parametrize("is_meta", [False, True], ids=["real", "meta"])
def test_models_take_weights(form: str, is_meta: bool, tmp_path: Path, read: list[int]) -> None:
    """Under either name of what is tied, in another dtype."""
    torch.manual_seed(0)
    state = {name: value.detach() for name, value in Tied().state_dict().items()}
    state = {n: v.to(torch.bfloat16) if n.startswith("up") else v for n, v in state.items()}
    del state["table.weight"]
    halves = [dict(list(state.items())[:3]), dict(list(state.items())[3:])]
    given: Any = state
    if form != "mapping":
        for number, half in enumerate(halves):
            save(tmp_path / f"{number}.safetensors", half)
        given = tmp_path
    if form == "file":
        given = str(tmp_path / "all.safetensors")
        save(Path(given), state)
    if form == "indexed":
        index = {name: f"{n}.safetensors" for n, half in enumerate(halves) for name in half}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        save(tmp_path / "other.safetensors", {"other": torch.ones(1)})
    with torch.device("meta" if is_meta else "cpu"):
        model = Tied()
    options = {"mesh": Mesh(d=2), "mode": "propagate"}
    module = ap.parallelize(model, IDS, weights=given, **options)
    found = module.full_state_dict()
    for name, value in state.items():
        assert torch.equal(found[name], value.to(found[name].dtype)), name
    assert torch.equal(found["table.weight"], state["head.weight"])
    assert module.head.weight is module.table.weight
    assert sum(read) == (0 if form == "mapping" else sum(value.nbytes for value in state.values()))


@pytest.mark.parametrize("form", ["file", "mapping"])
def test_what_is_tied_has_one_value(form: str, tmp_path: Path) -> None:
    """Under both names: refused where these differ."""
    state = {name: value.detach() for name, value in Tied().state_dict().items()}
    for change in (0.0, 1.0):
        state["table.weight"] = state["head.weight"] + change
        save(tmp_path / "all.safetensors", state)
        given: Any = state if form == "mapping" else tmp_path / "all.safetensors"
        options = {"mesh": Mesh(d=2), "mode": "propagate", "weights": given}
        if not change:
            module = ap.parallelize(Tied(), IDS, **options)
            assert torch.equal(module.full_state_dict()["head.weight"], state["head.weight"])
            continue
        with pytest.raises(ap.InvalidInput, match=r"for table\.weight than for head\.weight"):
            ap.parallelize(Tied(), IDS, **options)


def test_what_weights_do_not_hold_is_made(tmp_path: Path) -> None:
    """Buffers that are no part of a state, by their modules' initialisers."""

    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("phase", torch.empty(8), persistent=False)
            self.reset_parameters()

        def reset_parameters(self) -> None:
            self.phase.copy_(torch.arange(8.0))

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * self.phase).mean()

    state = Buffered().state_dict()
    save(tmp_path / "a.safetensors", state)
    with torch.device("meta"):
        model = Buffered()
    options = {"mesh": Mesh(d=2), "mode": "propagate", "weights": tmp_path}
    module = ap.parallelize(model, (torch.ones(4, 8),), **options)
    assert torch.equal(module.linear.weight, state["linear.weight"])
    assert torch.equal(module.phase, torch.arange(8.0))


def test_names_that_do_not_fit_are_told_together(tmp_path: Path, read: list[int]) -> None:
    state = {name: value.detach() for name, value in Tied().state_dict().items()}
    del state["up.bias"], state["head.weight"], state["table.weight"]
    state |= {"other": torch.ones(1), "up.weight": torch.ones(8, 6)}
    state["norm.num_batches_tracked"] = torch.ones(())
    save(tmp_path / "a.safetensors", state)
    with pytest.raises(ap.InvalidInput) as error:
        ap.parallelize(Tied(), IDS, mesh=Mesh(d=2), weights=tmp_path)
    for text in (
        "missing: table.weight",
        "missing: up.bias",
        "unexpected: other",
        "misshapen: up.weight [8, 6] float32, not [8, 8] float32",
        "misshapen: norm.num_batches_tracked [] float32, not [] int64",
    ):
        assert text in str(error.value)
    assert not read


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def changed(**words: Any) -> dict[str, Any]:
    return {"a": GOOD["a"] | words}


WRONG: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "its header ends behind the file"),
    "short": (lambda: (99).to_bytes(8, "little") + b"{}", "its header ends behind the file"),
    "no json": (lambda: packed(b"{'a'"), "no header"),
    "no mapping": (lambda: packed(b"[]"), "no header"),
    "nested": (lambda: packed(b"[" * 10**5), "no header"),
    "no offsets": (lambda: packed({"a": {"dtype": "F32", "shape": [2]}}), "no header"),
    "unknown dtype": (lambda: packed(changed(dtype="F31")), "no header"),
    "negative": (lambda: packed(changed(shape=[-2])), "sizes"),
    "other size": (lambda: packed(changed(shape=[3])), "8 bytes for F32 [3]"),
    "gap": (lambda: packed(changed(data_offsets=[4, 12])), "begins at byte"),
    "overlap": (lambda: packed(GOOD | {"b": GOOD["a"]}), "b begins at byte"),
    "longer": (lambda: packed(GOOD) + b"0" * 9, "of which the header tells"),
    "cut off": (lambda: packed(GOOD)[:-1], "of which the header tells"),
}


def packed(header: Any) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + (b"0" * 8 if isinstance(header, dict) else b"")


@pytest.mark.parametrize(("data", "says"), WRONG.values(), ids=WRONG)
def test_files_that_are_none_are_refused(
    data: Callable[[], bytes], says: str, tmp_path: Path
) -> None:
    (tmp_path / "a.safetensors").write_bytes(data())
    with pytest.raises(ap.InvalidInput, match="a safetensors file says where") as error:
        open_weights(tmp_path)
    assert says in str(error.value)


def test_other_weights_are_refused(tmp_path: Path) -> None:
    for given in (3, {"a": 1}, {"a": torch.empty(1, device="meta")}, tmp_path, tmp_path / "no"):
        with pytest.raises(ap.InvalidInput, match="weights are a safetensors file, a folder"):
            open_weights(given)
    for text in ("{", '{"weight_map": {"a": "lost.safetensors"}}', '{"weight_map": 3}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ap.InvalidInput, match="a safetensors file says where"):
            open_weights(tmp_path)


def test_a_file_of_torch_is_said_to_be_another(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(ap.InvalidInput, match=r"x\.pt, which is no safetensors file") as error:
        open_weights(tmp_path / "x.pt")
    assert "torch.load" in str(error.value)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "in/../../x.safetensors"])
def test_an_index_leads_to_its_own_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "in").mkdir(parents=True)
    save(tmp_path / "x.safetensors", {"a": torch.ones(2)})
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ap.InvalidInput, match="a safetensors file says where") as error:
        open_weights(folder)
    assert f"it names {name}, which is not in its folder" in str(error.value)


def test_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    """As Hugging Face's cache has them; and files in folders below."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1a2b"
    for folder in (blobs, snapshot / "below"):
        folder.mkdir(parents=True)
    save(blobs / "c0ffee", {"a": torch.ones(2)})
    save(snapshot / "below" / "b.safetensors", {"b": torch.zeros(2)})
    (snapshot / "a.safetensors").symlink_to("../../blobs/c0ffee")
    index = {"a": "a.safetensors", "b": "below/b.safetensors"}
    (blobs / "1dea").write_text(json.dumps({"weight_map": index}))
    (snapshot / INDEX).symlink_to("../../blobs/1dea")
    weights = open_weights(snapshot)
    assert torch.equal(weights.read("a", ((0, 2),)), torch.ones(2))
    assert torch.equal(weights.read("b", ((0, 2),)), torch.zeros(2))


@pytest.mark.parametrize("form", ["file", "folder", "indexed"])
def test_a_pipe_is_not_waited_for(form: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    if form == "indexed":
        index = {"weight_map": {"a": "a.safetensors"}}
        (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ap.InvalidInput) as error:
        open_weights(tmp_path / "a.safetensors" if form == "file" else tmp_path)
    assert ("no regular file" if form != "indexed" else "not there") in str(error.value)


@pytest.mark.parametrize("form", ["file", "mapping"])
def test_numbers_of_another_kind_are_refused_by_name(form: str, tmp_path: Path) -> None:
    good = {name: value.detach() for name, value in Tied().state_dict().items()}
    for name, dtype in (
        ("up.weight", torch.int64),
        ("up.bias", torch.bool),
        ("norm.weight", torch.complex64),
        ("norm.num_batches_tracked", torch.int32),
    ):
        state: Any = {**good, name: good[name].to(dtype)}
        save(tmp_path / "a.safetensors", state)
        given = state if form == "mapping" else tmp_path
        with pytest.raises(ap.InvalidInput, match="dtypes, but for the precision") as error:
            ap.parallelize(Tied(), IDS, mesh=Mesh(d=2), mode="data", weights=given)
        assert str(error.value.got).startswith(f"misshapen: {name} ")
        assert len(str(error.value.got).splitlines()) == 1


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


class Killed(BaseException):
    pass


def test_a_model_in_shards_is_the_old_or_the_new_one_or_refused(tmp_path: Path) -> None:
    """Whenever what writes it is killed."""
    left, killed = -1, 0
    seen: set[str] = set()
    real = {"replace": os.replace, "unlink": os.unlink}

    def killing(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                raise Killed
            return real[name](*args, **kwargs)

        return call

    modules = [
        ap.parallelize(nn.Linear(4, 4), (torch.ones(2, 4),), mesh=Mesh(one=1), mode="data")
        for _ in range(2)
    ]
    states = [module.full_state_dict() for module in modules]
    ap.save_safetensors(tmp_path, modules[0], max_shard_size=1)
    while True:
        left = killed
        patches = [patch.object(os, name, killing(name)) for name in real]
        for one in patches:
            one.start()
        try:
            ap.save_safetensors(tmp_path, modules[1], max_shard_size=1)
            break
        except Killed:
            killed += 1
        finally:
            for one in patches:
                one.stop()
        if not (tmp_path / INDEX).exists():
            with pytest.raises(ap.InvalidInput, match="a safetensors file says where"):
                open_weights(tmp_path)
            seen.add("refused")
        else:
            weights = open_weights(tmp_path)
            read = {
                n: weights.read(n, tuple((0, s) for s in v.shape)) for n, v in states[0].items()
            }
            seen |= {n for n, state in zip(("old", "new"), states) if same(read, state)}
        ap.save_safetensors(tmp_path, modules[0], max_shard_size=1)
    assert seen == {"old", "new", "refused"}
    assert killed >= 4
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_that_takes_the_place_of_another_is_another(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        save(tmp_path / f"{value}", {"a": torch.full((100,), value)})
    weights = open_weights(tmp_path / "1.0")
    os.replace(tmp_path / "2.0", tmp_path / "1.0")
    with pytest.raises(ap.InvalidInput, match="a safetensors file says where") as error:
        weights.read("a", ((0, 100),))
    assert "it has changed since it was opened" in str(error.value)


def test_a_file_that_becomes_shorter_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", {"a": torch.ones(100)})
    weights = open_weights(tmp_path / "a")
    os.truncate(tmp_path / "a", 150)
    with pytest.raises(ap.InvalidInput, match="a safetensors file says where") as error:
        weights.read("a", ((0, 100),))
    assert "it has changed since it was opened" in str(error.value)


def test_a_header_that_was_changed_has_no_right_digest(tmp_path: Path) -> None:
    path, stored = tmp_path / "x.safetensors", {"x": StoredTensor((4,), torch.float32)}
    with path.open("wb") as file:
        write_safetensors(file, stored, [torch.arange(4.0)], has_digests=True)
    assert SafetensorsFiles([path]).have_digests
    path.write_bytes(path.read_bytes().replace(b'"pt"', b'"pu"'))
    assert not SafetensorsFiles([path]).have_digests

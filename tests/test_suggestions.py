"""Suggestions for a name that does not exist: by its meaning first, then by its letters."""

import pytest
import torch
from torch import nn

import autopar as ap
from autopar.cluster.presets import NAMES as PRESETS
from autopar.errors import InvalidInput
from autopar.pipeline.schedules import known_names
from autopar.pipeline.simulation.synchronization import MODES
from autopar.states import NAMED
from autopar.text.suggestions import nearest


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("h100", PRESETS, ["dgx-h100"]),
        ("H200", PRESETS, ["h200"]),
        ("b200", PRESETS, []),
        ("h20", PRESETS, []),
        ("dgx-h10", PRESETS, ["dgx-h100"]),
        ("dgx", PRESETS, ["dgx-a100", "dgx-h100", "dgx-v100"]),
        ("TokenPipeline", known_names(), ["terapipe"]),
        ("bitpipe", known_names(), []),
        ("Interleaved1F1B", known_names(), ["interleaved"]),
        ("ZeroBubble", known_names(), ["zb-h1"]),
        ("InterleavedZeroBubble", known_names(), ["interleaved-zb"]),
        ("eager-sync-opt", MODES, ["eager-where-it-helps"]),
        ("FSDP", NAMED, ["zero3"]),
        ("zero", NAMED, ["zero1", "zero2", "zero3"]),
        ("zero-2", NAMED, ["zero2"]),
        ("zero4", NAMED, ["zero1", "zero2", "zero3"]),
        ("1f2b", known_names(), ["1f1b"]),
        ("cuda:0", ("host", "device"), ["device"]),
        ("bandwith", ("alpha", "bandwidth"), ["bandwidth"]),
        ("", ("host", "device"), []),
    ],
)
def test_meaning_comes_before_spelling(word, known, meant):
    assert nearest(word, known) == meant


def test_a_backend_of_torch_is_explained_where_it_is_taken_for_one_of_ours():
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with pytest.raises(InvalidInput) as caught:
        ap.parallelize(model, (x,), mesh=ap.Mesh(dp=2), backend="nccl")
    assert caught.value.remedy == "'torch'"
    assert "'torch' (torch.distributed, over NCCL on GPUs" in caught.value.rule


def test_where_nothing_is_meant_nothing_is_guessed():
    with pytest.raises(InvalidInput, match="one of 'dgx-a100', 'dgx-h100'") as caught:
        ap.Cluster.preset("tpu")
    assert (
        caught.value.remedy
        == "choose among these, or Cluster.load of your own TOML file; none of them means 'tpu'"
    )

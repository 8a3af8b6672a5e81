"""Annotations: what shard() wrote on modules, read back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from autopar.capture.marker import Annotation
from autopar.recompute import Recompute

PARAMETERS = "_autopar_parameters"
STAGE = "_autopar_stage"
DEVICE = "_autopar_device"
MARKS = "_autopar_marks"  # the lines that annotate inputs or outputs of a module
RECOMPUTE = "_autopar_recompute"


@dataclass(frozen=True)
class Pin:
    """A module that the user made the start of a stage."""

    stage: int
    module: str
    source: str


@dataclass(frozen=True)
class MarkedRegion:
    """A module of which the user said what is recomputed."""

    how: Recompute
    module: str
    source: str

    @property
    def name(self) -> str:
        return self.module or "the model itself"


def parameter_annotations(model: nn.Module) -> dict[str, list[Annotation]]:
    """Every wish about a parameter, under its name in `model`."""
    found: dict[str, list[Annotation]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, annotation in module.__dict__.get(PARAMETERS, ()):
            found.setdefault(f"{prefix}.{name}" if prefix else name, []).append(annotation)
    return found


def marked_modules(model: nn.Module) -> list[tuple[nn.Module, list[str], str]]:
    """The modules whose inputs or outputs are annotated, their paths in `model`, and the lines."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    return [
        (module, names, source)
        for module, names in paths.items()
        for source in module.__dict__.get(MARKS, ())
    ]


def stage_pins(model: nn.Module) -> list[Pin]:
    """The modules that start a stage, by their paths in `model`."""
    return [
        Pin(module.__dict__[STAGE][0], path, module.__dict__[STAGE][1])
        for path, module in model.named_modules(remove_duplicate=False)
        if STAGE in module.__dict__
    ]


def devices_of(model: nn.Module) -> dict[str, tuple[str, str]]:
    """By the paths of modules that say where they are: "host" or "device", and the user's line."""
    return {
        path: module.__dict__[DEVICE]
        for path, module in model.named_modules(remove_duplicate=False)
        if DEVICE in module.__dict__
    }


def wishes_of(model: nn.Module) -> dict[str, str]:
    """Return what shard() said that the graph of a model does not show, with the lines: layouts of
    parameters, stages and recomputation."""
    wishes = {
        f"{name} cut as {annotation.layout}": annotation.source
        for name, annotations in parameter_annotations(model).items()
        for annotation in annotations
    }
    for pin in stage_pins(model):
        wishes[f"{pin.module or 'the model'} at the start of stage {pin.stage}"] = pin.source
    for region in marked_regions(model):
        wishes[f"recompute={region.how} for {region.name}"] = region.source
    return wishes


def marked_regions(model: nn.Module) -> list[MarkedRegion]:
    """The modules of which shard() said what is recomputed, by their paths in `model`."""
    return [
        MarkedRegion(module.__dict__[RECOMPUTE][0], path, module.__dict__[RECOMPUTE][1])
        for path, module in model.named_modules(remove_duplicate=False)
        if RECOMPUTE in module.__dict__
    ]


def is_annotated(model: nn.Module) -> bool:
    """Whether shard() said something of single modules."""
    return bool(wishes_of(model) or marked_modules(model) or devices_of(model))

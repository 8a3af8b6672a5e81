"""autopar: an ordinary PyTorch model in, the same model as a parallel program out."""

from autopar import nn, pipeline
from autopar.annotate import shard
from autopar.api import parallelize
from autopar.cluster import Cluster
from autopar.errors import AutoparError, ExecutionError, InvalidInput
from autopar.layout import Layout, TensorType
from autopar.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.planning import plan
from autopar.precision import Precision
from autopar.recompute import Recompute
from autopar.runtime.checkpoints.saving import is_saved, load, save, save_safetensors
from autopar.runtime.module.data_loader import shard_loader
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.observation.step_figures import (
    JsonLines,
    ProgressLine,
    StepFigures,
    TensorBoard,
)
from autopar.states import States
from autopar.strategies import register_rule
from autopar.verifying import verify

__version__ = "0.2.0"

__all__ = [
    "AutoparError",
    "Cluster",
    "ExecutionError",
    "InvalidInput",
    "JsonLines",
    "Layout",
    "Mesh",
    "ParallelModule",
    "Plan",
    "Precision",
    "ProgressLine",
    "Recompute",
    "States",
    "StepFigures",
    "TensorBoard",
    "TensorType",
    "is_saved",
    "load",
    "nn",
    "parallelize",
    "pipeline",
    "plan",
    "register_rule",
    "save",
    "save_safetensors",
    "shard",
    "shard_loader",
    "verify",
]

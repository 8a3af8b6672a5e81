"""autopar: an ordinary PyTorch model in, the same model as a parallel program out.

A name is imported when it is read first, so that `import autopar` and the help of the command load
no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar import nn, pipeline
    from autopar.annotate import shard
    from autopar.api import parallelize
    from autopar.cluster import Cluster
    from autopar.eager_region import region
    from autopar.errors import AutoparError, ExecutionError, InvalidInput
    from autopar.layout import Layout
    from autopar.mesh import Mesh
    from autopar.planning import plan
    from autopar.plans.plan import Plan
    from autopar.precision import Precision
    from autopar.recompute import Recompute
    from autopar.runtime.batches.data_loader import shard_loader
    from autopar.runtime.checkpoints.saving import is_saved, load, save
    from autopar.runtime.checkpoints.whole_model_files import save_safetensors
    from autopar.runtime.module.parallel_module import ParallelModule
    from autopar.runtime.observation.step_figures import (
        JsonLines,
        ProgressLine,
        StepFigures,
        TensorBoard,
    )
    from autopar.runtime.optimizers.optimizer import optimizer
    from autopar.states import States
    from autopar.strategies import register_rule
    from autopar.tensor_type import TensorType
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
    "optimizer",
    "parallelize",
    "pipeline",
    "plan",
    "region",
    "register_rule",
    "save",
    "save_safetensors",
    "shard",
    "shard_loader",
    "verify",
]

_NAMES_OF = {
    "annotate": "shard",
    "api": "parallelize",
    "cluster": "Cluster",
    "errors": "AutoparError ExecutionError InvalidInput",
    "layout": "Layout",
    "mesh": "Mesh",
    "planning": "plan",
    "plans.plan": "Plan",
    "precision": "Precision",
    "recompute": "Recompute",
    "eager_region": "region",
    "runtime.checkpoints.saving": "is_saved load save",
    "runtime.checkpoints.whole_model_files": "save_safetensors",
    "runtime.batches.data_loader": "shard_loader",
    "runtime.module.parallel_module": "ParallelModule",
    "runtime.observation.step_figures": "JsonLines ProgressLine StepFigures TensorBoard",
    "runtime.optimizers.optimizer": "optimizer",
    "states": "States",
    "strategies": "register_rule",
    "tensor_type": "TensorType",
    "verifying": "verify",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in ("nn", "pipeline"):
        return import_module(f"autopar.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"autopar.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

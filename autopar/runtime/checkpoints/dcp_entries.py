"""DCP entries: the names under which torch.distributed.checkpoint stores a module's tensors.

    model.blocks.0.weight                        a parameter or buffer
    optimizer.state.blocks.0.weight.exp_avg      an optimizer's state of a parameter
    optimizer.param_groups.0.lr                  an option of a group; `params` are names

They are the entries of `dcp.save({"model": ..., "optimizer": ...})` with the two state dicts that
`torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)` returns.
"""

from __future__ import annotations

from typing import Any

from autopar.runtime.checkpoints.checkpoint_files import Key, SavedOptimizer
from autopar.runtime.checkpoints.checkpoint_folders import DCP_INDEX

METADATA = DCP_INDEX  # torch's index of the other files
MODEL, OPTIMIZER, STATE, GROUPS = "model", "optimizer", "state", "param_groups"
OPTIMIZERS = (OPTIMIZER, "optim")  # names that programs give the second state dict
EntryPath = tuple[str | int, ...]  # the keys of nested state dicts that lead to an entry


def path_of(key: Key) -> EntryPath:
    """Return the path of a tensor."""
    if key.state is None:
        return (MODEL, key.name)
    return (OPTIMIZER, STATE, key.name, key.state)


def entry_name(path: EntryPath) -> str:
    """Return the name of the entry at a path."""
    return ".".join(map(str, path))


def key_of(path: EntryPath, *, is_bare: bool) -> Key | None:
    """Return the tensor that an entry belongs to; None: it is something else.

    `is_bare`: the checkpoint is the state dict of a model alone.
    """
    if is_bare and len(path) == 1:
        return Key(str(path[0]))
    if len(path) == 2 and path[0] == MODEL:
        return Key(str(path[1]))
    if len(path) == 4 and path[0] in OPTIMIZERS and path[1] == STATE:
        return Key(str(path[2]), str(path[3]))
    return None


def other_entries(optimizer: SavedOptimizer | None) -> dict[str, Any]:
    """Return the nested state dict of all that is not a tensor of a parameter."""
    if optimizer is None:
        return {}
    groups = [{**group.options, "params": list(group.names)} for group in optimizer.groups]
    states = {name: dict(values) for name, values in optimizer.others.items()}
    return {OPTIMIZER: {STATE: states, GROUPS: groups}}

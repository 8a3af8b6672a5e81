"""Private facts of selective activation checkpointing: the mode that asks a policy of operators.

Seen in torch 2.11 to 2.13: the first context of `create_selective_checkpoint_contexts` is a
dispatch mode, which holds the policy as `policy_fn`, and calls it after each operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Policy = Callable[..., CheckpointPolicy | bool]
# What a policy says of an operator: it, the policy, and the tensors that it gives.
Answer = Callable[[Any, CheckpointPolicy, list[Tensor]], None]


class PolicyMode:
    """The mode that asks one policy of each operator, and reports its answers."""

    def __init__(self, contexts: Any) -> None:
        """Take what `create_selective_checkpoint_contexts` returns; raise TypeError for others."""
        mode: Any = contexts[0] if isinstance(contexts, tuple | list) and contexts else None
        policy = getattr(mode, "policy_fn", None)
        if not isinstance(mode, TorchDispatchMode) or not callable(policy):
            raise TypeError("not of create_selective_checkpoint_contexts")
        self._mode: Any = mode
        self._policy: Policy = policy

    @classmethod
    def of(cls, policy: Policy | Iterable[Any]) -> PolicyMode:
        """Return the mode of a policy, or of a list of operators to save."""
        of_operators: Any = policy if callable(policy) else [*policy]
        return cls(create_selective_checkpoint_contexts(of_operators))

    def asking(self, answer: Answer) -> AbstractContextManager[Any]:
        """Return a context in which `answer` takes what the policy says of each operator."""

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            decided = self._policy(context, operator, *args, **kwargs)
            if isinstance(decided, bool):
                save, recompute = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
                decided = save if decided else recompute
            results = pytree.tree_leaves(context.op_output)
            answer(operator, decided, [value for value in results if isinstance(value, Tensor)])
            return CheckpointPolicy.PREFER_RECOMPUTE  # the mode itself has nothing to save

        self._mode.policy_fn = policy
        return self._mode

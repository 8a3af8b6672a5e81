"""What ranks check of the groups that they share: first uses, and what many modules cost."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch.distributed as dist

import autopar as ap
from autopar.runtime.backends.world import world
from tests import models
from tests.models import Case

PATIENCE = 60.0  # seconds until a first use counts as hung
FORMS = [
    ("chimera", 4, {}),
    ("chimera", 8, {"pipes": 4}),
    ("chimera", 8, {"scale": "direct"}),
    ("chimera", 8, {"scale": "doubling"}),
    ("chimera", 4, {"scale": "halving"}),
    ("chimera", 8, {"scale": "list"}),
    ("gems", 4, {}),
    ("gpipe", 4, {}),
    ("1f1b", 4, {}),
    ("interleaved", 4, {}),
    ("zb-h1", 4, {}),
    ("zb-v", 8, {}),
    ("dualpipe", 8, {}),
    ("dualpipe-v", 8, {}),
]


def use_lazily() -> None:
    """From now on, the first use of a group waits until all its members are in their first use."""
    used: set[str] = set()

    def meet(group: Any) -> None:
        group = group or dist.group.WORLD
        if group.group_name in used:
            return
        used.add(group.group_name)
        store, key = world().liveness.store, f"first use of {group.group_name}"
        store.add(key, 1)
        deadline = time.monotonic() + PATIENCE
        while store.add(key, 0) < group.size():
            assert time.monotonic() < deadline, f"a group connects in the middle of a step: {key}"
            time.sleep(0.002)

    def lazy(function: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            meet(kwargs["group"] if "group" in kwargs else (*args, *[None] * place)[place])
            return function(*args, **kwargs)

        return call

    for name in ("send", "recv", "isend", "irecv", "all_reduce", "broadcast"):
        setattr(dist, name, lazy(getattr(dist, name), 2))


@cache
def forms() -> list[ap.Plan]:
    """A plan of every form on four ranks; made once for all of these."""
    case = chain()
    return [
        ap.plan(
            case.model,
            case.args,
            mode="propagate",
            mesh=ap.Mesh(pp=4),
            microbatches=microbatches,
            schedule=name,
            schedule_options=options,
        )
        for name, microbatches, options in FORMS
    ]


chain = partial(models.shared, "mlp", layers=8, hidden=16)


def cases() -> list[tuple[Case, None]]:
    """What is captured before the ranks are there."""
    forms()
    return [(models.shared("mlp"), None)]


def runs_with_lazy_communicators(say: Callable[[Any], None]) -> None:
    """Each form makes its groups anew, and takes one step."""
    case = chain()
    expected = case.model(*case.args).item()
    world()
    use_lazily()
    for plan in forms():
        world().groups.clear()
        world().meshes.clear()
        module = ap.parallelize(case.model, plan=plan)
        assert float(module.step(*case.args)) == pytest.approx(expected, rel=1e-12)
        say(plan.pipelining.schedule.name)


def many_modules_share_groups(say: Callable[[Any], None]) -> None:
    """What this process holds open after a few modules, and after many."""
    case = models.shared("mlp")
    plans = [
        ap.plan(case.model, case.args, mode="propagate", **options)
        for options in ({"mesh": ap.Mesh(dp=2)}, {"mesh": ap.Mesh(pp=2), "microbatches": 2})
    ]
    counts = []
    for _ in range(15):
        for plan in plans:
            ap.parallelize(case.model, plan=plan).step(*case.args)
        counts.append([len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")])
    assert counts[1] == counts[-1], counts
    with ap.parallelize(case.model, plan=plans[0]) as module:
        module.step(*case.args)
        backend = weakref.ref(module.backend)
        module.close()
    for use in (lambda: module.step(*case.args), module.full_state_dict):
        with pytest.raises(ap.AutoparError, match="has let go"):
            use()
    assert not list(module.parameters())
    gc.collect()
    assert backend() is None
    say("shared")

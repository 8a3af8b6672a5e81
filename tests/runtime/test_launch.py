"""launch(): results, words on the way, and failures of single ranks."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from autopar.errors import ExecutionError
from autopar.runtime.launching import launch as launching
from autopar.runtime.launching.launch import launch


def _greet(say, word):
    total = torch.tensor(1)
    dist.all_reduce(total)
    say(word)
    return dist.get_rank(), int(total), torch.get_num_threads()


def _fail_on_one(say, how):
    if dist.get_rank() == 1:
        if how == "raise":
            raise ZeroDivisionError("deliberate")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.tensor(1))


def test_ranks_return_and_speak():
    heard = []
    results = launch(_greet, 3, "hello", heard=lambda rank, word: heard.append((rank, word)))
    assert results == [(0, 3, 1), (1, 3, 1), (2, 3, 1)]
    assert sorted(heard) == [(0, "hello"), (1, "hello"), (2, "hello")]


@pytest.mark.parametrize(
    ("how", "named"), [("raise", "ZeroDivisionError: deliberate"), ("kill", "exit code -9")]
)
def test_a_rank_that_fails_is_named_and_ends_the_others(how, named):
    with pytest.raises(ExecutionError, match="rank 1") as caught:
        launch(_fail_on_one, 3, how)
    assert named in str(caught.value)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted there")
def test_every_rank_starts_before_the_store_is_a_thread(monkeypatch):
    """What a thread has locked while a rank is forked stays locked in that rank."""
    context, threads = launching._context(), []
    process = context.Process

    def counted(**options):
        threads.append(len(os.listdir("/proc/self/task")))
        return process(**options)

    monkeypatch.setattr(context, "Process", counted)
    before = len(os.listdir("/proc/self/task"))
    launch(_greet, 3, "hello")
    assert len(threads) == 3
    assert max(threads) <= before

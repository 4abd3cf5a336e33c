"""The kernels' pool of threads: each task once, whoever calls, and after fork; and a process that uses it ends."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hvdcomp import kernels
from tests.kernel_calls import found_inf, python

WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


def parallel(threads: int, tasks: int, work: Callable[[int], None]) -> None:
    """`hvd_parallel` with tasks in Python, which take the interpreter's lock as they need it."""
    library = kernels.library()
    assert library is not None, kernels.why_not()
    callback = WORK(lambda _, task: work(task))
    library.hvd_parallel(threads, tasks, ctypes.cast(callback, ctypes.c_void_p), None)


@pytest.mark.parametrize("tasks", [0, 1, 2, 7, 1000])
@pytest.mark.parametrize("threads", [0, 1, 2, 3, 40])
def test_each_task_is_done_once(threads: int, tasks: int) -> None:
    done: list[int] = []
    parallel(threads, tasks, done.append)
    assert sorted(done) == list(range(tasks))


def test_threads_work_at_the_same_time_and_more_of_them_when_more_are_asked_for() -> None:
    for threads in (2, 5, 3):
        barrier = threading.Barrier(threads, timeout=30)  # broken, and raised below, if they came one by one
        passed: list[int] = []

        def meet(task: int, barrier: threading.Barrier = barrier, passed: list[int] = passed) -> None:
            barrier.wait()
            passed.append(threading.get_ident())

        parallel(threads, threads, meet)
        assert len(set(passed)) == threads


def test_one_thread_is_the_callers() -> None:
    seen: list[int] = []
    parallel(1, 5, lambda _: seen.append(threading.get_ident()))
    assert set(seen) == {threading.get_ident()}


def test_a_task_may_have_tasks_of_its_own() -> None:
    done: list[tuple[int, int]] = []

    def outer(task: int) -> None:
        parallel(4, 3, lambda inner: done.append((task, inner)))

    parallel(4, 6, outer)
    assert sorted(done) == [(task, inner) for task in range(6) for inner in range(3)]


def test_several_callers_at_once_each_get_their_own_answer() -> None:
    def ask(seed: int) -> None:
        numbers = np.zeros(300_000, np.float32)
        places = np.random.default_rng(seed).integers(0, numbers.size, 60)
        for place in places:
            assert found_inf([numbers], 3) == 0
            numbers[place] = np.inf
            assert found_inf([numbers], 3) == 1
            numbers[place] = 0

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))


PROGRAM = """
import os, threading, numpy as np
from tests.kernel_calls import found_inf
numbers = np.zeros(1_000_000, np.float32)
def ask():
    assert found_inf([numbers], 4) == 0
    assert found_inf([numbers, np.full(1, np.nan, np.float32)], 4) == 1
def ask_forever():
    while True:
        ask()
ask()
"""


def test_a_child_has_a_pool_of_its_own() -> None:
    """Forked while the pool rests, and from beside a thread whose job it is doing, of which the child has a copy."""
    fork = """
def fork_and_ask():
    child = os.fork()
    if child == 0:
        ask()
        os._exit(len(os.listdir("/proc/self/task")))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4, "the child made no threads"
fork_and_ask()
ask()
threading.Thread(target=ask_forever, daemon=True).start()
for _ in range(20):
    fork_and_ask()
print("done", flush=True)
"""
    assert python(PROGRAM + fork, OPENBLAS_NUM_THREADS="1") == "done"


@pytest.mark.parametrize(
    "ending", ["", "raise SystemExit", "threading.Thread(target=ask_forever, daemon=True).start()"]
)
def test_a_process_that_used_it_ends(ending: str) -> None:
    assert python(f"{PROGRAM}\nprint('end', flush=True)\n{ending}") == "end"


def test_signals_are_left_to_the_processs_own_threads() -> None:
    """Else Python's handler would run late, when a worker took the signal."""
    blocked = """
import time

def told(task, what):
    return open(f"/proc/self/task/{task}/status").read().partition(f"\\n{what}:")[2].split()[0]

workers = [task for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
# Before a thread has run, the C library itself blocks its signals. A worker that sleeps has run.
end = time.monotonic() + 30
while {told(task, "State") for task in workers} != {"S"}:
    assert time.monotonic() < end
    time.sleep(0.01)
print(len(workers), all(int(told(task, "SigBlk"), 16) >> 1 & 1 for task in workers))  # signal 2 is that of Ctrl-C
"""
    assert python(PROGRAM + blocked, OPENBLAS_NUM_THREADS="1") == "3 True"

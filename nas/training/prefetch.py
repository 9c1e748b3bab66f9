"""Batches made ahead of time by a thread, for a device that would wait for them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")

AHEAD = 2  # batches: one in the making while one waits


class Prefetched(Generic[T]):
    """`make(step)` for rising steps, begun `AHEAD` steps early; an error is raised where its step is asked for."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._begun: dict[int, Future[T]] = {}

    def __call__(self, step: int) -> T:
        for wanted in range(step, step + 1 + AHEAD):
            if wanted not in self._begun:
                self._begun[wanted] = self._thread.submit(self._make, wanted)
        return self._begun.pop(step).result()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

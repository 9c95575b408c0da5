"""Named thread pools for what takes long, with bounded queues that are fair between tenants.

The loop's own pool is left to the store and to what operators start, so that no tenant can fill it.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from gateway.core.errors import Unavailable

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorBounds:
    """Bounds of one executor; of its jobs and their bytes, queued and running, one tenant gets half."""

    threads: int = 2  # one of them is always left to other tenants
    jobs: int = 1024
    job_bytes: int = 256 << 20


@dataclass(slots=True, eq=False)
class _Job:
    tenant: str
    nbytes: int
    call: Callable[[], Any]
    done: asyncio.Future[Any]


class FairExecutor:
    """A thread pool that serves tenants in turn. Belongs to the event loop's thread."""

    def __init__(self, name: str, bounds: ExecutorBounds) -> None:
        self._name = name
        self._bounds = bounds
        self._pool = ThreadPoolExecutor(bounds.threads, thread_name_prefix=name)
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()  # the tenant served next is first
        self._running: Counter[str] = Counter()
        self._jobs: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._closed = False

    def __repr__(self) -> str:
        return f"<FairExecutor {self._name} running={self._running.total()} jobs={self._jobs.total()}>"

    async def run(self, tenant: str, nbytes: int, function: Callable[..., T], *args: object) -> T:
        """Return `function(*args)`, run in a thread; `nbytes` is the size of its input.

        A cancelled call leaves the queue; one that runs goes on to its end. Raises Unavailable if the
        queues are full, or the executor is closed before the job has started.
        """
        self._check(tenant, nbytes)
        done = asyncio.get_running_loop().create_future()
        job = _Job(tenant, nbytes, partial(function, *args), done)
        self._jobs[tenant] += 1
        self._bytes[tenant] += nbytes
        self._queues.setdefault(tenant, deque()).append(job)
        self._start_jobs()
        try:
            return cast(T, await done)
        except asyncio.CancelledError:
            if job in (queue := self._queues.get(tenant, deque())):
                queue.remove(job)
                self._forget(job)
            raise

    def close(self) -> None:
        """Fail the queued jobs and all further ones with Unavailable; those that run go on to their end."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        queued = [job for queue in self._queues.values() for job in queue]
        self._queues.clear()
        for job in queued:
            self._forget(job)
            if not job.done.done():
                job.done.set_exception(self._stopping())

    def _stopping(self) -> Unavailable:
        return Unavailable(f"this gateway is stopping, no further {self._name}: retry", code="draining")

    def _check(self, tenant: str, nbytes: int) -> None:
        bounds = self._bounds
        if self._closed:
            raise self._stopping()
        if self._jobs.total() >= bounds.jobs or self._bytes.total() + nbytes > bounds.job_bytes:
            raise Unavailable(f"too many requests wait for their {self._name}: retry later")
        if self._jobs[tenant] >= bounds.jobs // 2 or self._bytes[tenant] + nbytes > bounds.job_bytes // 2:
            raise Unavailable(f"too many requests of this tenant wait for their {self._name}: retry later")

    def _start_jobs(self) -> None:
        each = max(1, self._bounds.threads - 1)
        while self._running.total() < self._bounds.threads:
            tenant = next((name for name in self._queues if self._running[name] < each), None)
            if tenant is None:
                return
            queue = self._queues[tenant]
            job = queue.popleft()
            self._queues.move_to_end(tenant)
            if not queue:
                del self._queues[tenant]
            self._running[tenant] += 1
            ended = asyncio.get_running_loop().run_in_executor(self._pool, job.call)
            ended.add_done_callback(partial(self._ended, job))

    def _ended(self, job: _Job, ended: asyncio.Future[Any]) -> None:
        self._running[job.tenant] -= 1
        self._forget(job)
        error = None if ended.cancelled() else ended.exception()
        if job.done.done():  # cancelled by its caller
            pass
        elif ended.cancelled():
            job.done.set_exception(self._stopping())
        elif error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(ended.result())
        if not ended.cancelled():
            self._start_jobs()

    def _forget(self, job: _Job) -> None:
        for counts, amount in ((self._jobs, 1), (self._bytes, job.nbytes)):
            counts[job.tenant] -= amount
        if not self._jobs[job.tenant]:
            del self._jobs[job.tenant], self._bytes[job.tenant], self._running[job.tenant]
        if job.tenant in self._queues and not self._queues[job.tenant]:
            del self._queues[job.tenant]


@dataclass(frozen=True, slots=True, kw_only=True)
class Executors:
    """The executors of one gateway. Bytes are those of requests, before they are decoded."""

    text: FairExecutor  # tokenization, chat templates
    images: FairExecutor
    json: FairExecutor

    def close(self) -> None:
        """Close all."""
        for executor in (self.text, self.images, self.json):
            executor.close()


def make_executors() -> Executors:
    """Return the executors of a gateway."""
    return Executors(
        text=FairExecutor("tokenization", ExecutorBounds()),
        # A picture of 50 million pixels takes 300 MB while it is decoded: the threads bound that, too.
        images=FairExecutor("image decoding", ExecutorBounds(jobs=256)),
        json=FairExecutor("JSON decoding", ExecutorBounds(jobs=256)),
    )

"""Ray's actors as threads of this process, which a test can freeze and kill."""

import concurrent.futures
import contextlib
import threading
import types
from collections.abc import Sequence
from typing import Any

from jaxcomm.asynchronous import _ray

Future = concurrent.futures.Future


class Died(Exception):
    """A process has died."""


class Timeout(Exception):
    """A value has not come."""


class Actor:
    """An object whose methods run in threads."""

    def __init__(self, ray: "Threaded", kind: type) -> None:
        self._ray, self._object = ray, kind()
        self._thaw, self._is_dead = threading.Event(), False
        self._asked: set[Future[Any]] = set()
        self._thaw.set()

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(remote=lambda *args: self._call(name, *args))

    def freeze(self) -> None:
        """As of SIGSTOP: nothing is answered."""
        self._thaw.clear()

    def kill(self) -> None:
        self._is_dead = True
        self._thaw.set()
        for future in [*self._asked]:
            self._end(future.set_exception, Died("killed"))

    def _call(self, name: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._asked.add(future)
        if self._is_dead:
            self._end(future.set_exception, Died("dead"))
        else:
            thread = threading.Thread(target=self._run, args=(future, name, args), daemon=True)
            self._ray.threads.append(thread)
            thread.start()
        return future

    def _run(self, future: Future[Any], name: str, args: tuple[Any, ...]) -> None:
        self._ray.here.actor = self
        self._thaw.wait()
        if self._is_dead:
            return
        try:
            value = getattr(self._object, name)(*args)
            self._thaw.wait()
            self._end(future.set_result, value)
        except Exception as error:
            self._end(future.set_exception, error)

    @staticmethod
    def _end(end: Any, value: Any) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            end(value)


class Threaded:
    """What `RayClock` uses of the module."""

    exceptions = types.SimpleNamespace(
        RayActorError=Died, WorkerCrashedError=Died, OutOfMemoryError=Died, ObjectLostError=Died,
        GetTimeoutError=Timeout,
    )  # fmt: skip

    def __init__(self) -> None:
        self.here = threading.local()
        self.actors: list[Actor] = []
        self.threads: list[threading.Thread] = []

    def end(self) -> None:
        """Ends all threads."""
        for actor in self.actors:
            actor.kill()
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()

    def remote(self, **options: Any) -> Any:
        def process(kind: type) -> Any:
            def start() -> Actor:
                self.actors.append(Actor(self, kind))
                return self.actors[-1]

            started = types.SimpleNamespace(remote=start)
            return types.SimpleNamespace(options=lambda **options: started)

        return process

    def wait(
        self, futures: Sequence[Future[Any]], num_returns: int = 1, timeout: float | None = None
    ) -> Any:
        all_of = num_returns == len(futures) and num_returns > 1
        when = concurrent.futures.ALL_COMPLETED if all_of else concurrent.futures.FIRST_COMPLETED
        done, rest = concurrent.futures.wait(futures, timeout, when)
        return [x for x in futures if x in done][: num_returns if not all_of else None], [*rest]

    def get(self, value: Any, timeout: float | None = None) -> Any:
        if not isinstance(value, Future):
            return value
        try:
            return value.result(timeout)
        except concurrent.futures.TimeoutError as error:
            raise Timeout from error

    def put(self, value: Any) -> Any:
        return value

    def kill(self, actor: Actor, no_restart: bool = True) -> None:
        actor.kill()

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(current_actor=self.here.actor)


def clock_of(job: Any, monkeypatch: Any, patience: float = 10.0) -> tuple[Any, Threaded]:
    """A clock whose processes are threads."""
    ray = Threaded()
    monkeypatch.setattr(_ray, "require_ray", lambda: ray)
    return _ray.RayClock([job], job, [{}], patience), ray

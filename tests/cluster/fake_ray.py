"""As much of Ray's interface as `gossamer.cluster.on_ray` uses, within this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """Base of Ray's errors."""


class FakeRay:
    """Actors are objects of this process; `lose` makes one look as if its machine had died."""

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.actors: list[Any] = []
        self.options: list[dict[str, Any]] = []
        self._lost: list[Any] = []
        self._running = False

    def is_initialized(self) -> bool:
        return self._running

    def init(self) -> None:
        self._running = True

    def remote(self, kind: type) -> Any:
        def make(*arguments: Any) -> Any:
            actor = kind(*arguments)
            self.actors.append(actor)
            return _Handle(self, actor)

        def with_options(**given: Any) -> Any:
            self.options.append(given)
            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=with_options)

    def get(self, reference: Any) -> Any:
        return reference()

    def kill(self, handle: Any) -> None:
        self.lose(handle.actor)

    def lose(self, actor: Any) -> None:
        if actor not in self._lost:
            self._lost.append(actor)
            actor.signal(9)
            actor.close()

    def call(self, actor: Any, name: str, arguments: tuple[Any, ...]) -> Any:
        if actor in self._lost:
            raise RayError("the actor died")
        return getattr(actor, name)(*arguments)


class _Handle:
    def __init__(self, ray: FakeRay, actor: Any) -> None:
        self._ray, self.actor = ray, actor

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            if name == "signal":  # which nobody waits for
                self._ray.call(self.actor, name, arguments)
            return lambda: self._ray.call(self.actor, name, arguments)

        return SimpleNamespace(remote=ask)

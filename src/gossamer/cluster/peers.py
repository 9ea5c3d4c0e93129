"""The other workers as a worker's transport has to know them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gossamer.cluster.messages import View


class Reaches(Protocol):
    """What a transport is told of the others; see `gossamer.cluster.transport`."""

    def set_peer(self, worker: int, address: str) -> None:
        """Where it listens."""

    def peer_lost(self, worker: int) -> None:
        """It is gone."""

    def peer_back(self, worker: int) -> None:
        """It is back."""

    def peer_finished(self, worker: int) -> None:
        """It sends nothing more."""


class Peers:
    """Tells a transport what is new in a view.

    Args:
        worker: my own index, which is no peer.
        lost: hears of those that are gone.
    """

    def __init__(self, worker: int, transport: Reaches, lost: Callable[[int], None]) -> None:
        self._worker, self._transport, self._lost = worker, transport, lost
        self._known: dict[int, tuple[int, str]] = {}  # worker: incarnation, address

    def apply(self, view: View) -> None:
        """A newer view of everybody."""
        for peer in view.peers:
            if peer.worker == self._worker:
                continue
            known = self._known.get(peer.worker)
            if peer.phase == "lost":
                if known is not None:
                    self._transport.peer_lost(peer.worker)
                    del self._known[peer.worker]
                    self._lost(peer.worker)
                continue
            now = (peer.incarnation, peer.address)
            if known != now:
                if known is not None:
                    self._transport.peer_lost(peer.worker)
                self._transport.set_peer(peer.worker, peer.address)
                self._transport.peer_back(peer.worker)
                self._known[peer.worker] = now
            if peer.phase == "finished":
                self._transport.peer_finished(peer.worker)

"""What carries messages between workers, whatever the world: the semantics that methods rely on.

Rules that every transport keeps (`gossamer.testing` has the suite that checks them):

- A message is known by (sender, tag). It is delivered once, whole and undamaged, or it fails at
  both ends. Its payload is never interpreted.
- `send` returns at once. From then until delivery the payload belongs to the transfer.
- Delivered means accepted: the receiver's process has the whole payload and has not given it up. A
  receiver that timed out on a tag, or has begun a later round than the tag's, refuses the message,
  and the sender is told (`LinkFailed`).
- `cancel` withdraws what the receiver has not yet taken: it will never take it afterwards.
- A transfer that makes progress is not timed out; one that stalls for the keepalive has failed, and
  both ends are told within two of them, also where nothing of it got through.
- A peer known to be gone fails everything to and from it at once (`PeerLost`); what had been
  delivered before can still be taken.
- A sender's message of a later round or step never overtakes one of an earlier that it has already
  started. Who waits for what the sender has left behind (it has sent something later of the same
  kind, or has ended) is told at once (`OutOfSync`).
- Floating-point payloads that are not `exact` and hold NaN or infinity are refused
  (`PayloadCorrupt`).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gossamer.comm.context import Tag, Transfer


class Transport(Protocol):
    """One worker's end of the message service."""

    def send(self, dst: int, tag: Tag, payload: Tensor, *, exact: bool = False) -> Transfer:
        """Start a transfer; see `Context.send`."""

    async def recv(self, src: int, tag: Tag, timeout_s: float) -> Tensor:
        """One message, in a tensor of the receiver's own; see `Context.recv`."""

    def begin_round(self, round_index: int) -> None:
        """Forget what belongs to earlier rounds, and refuse what still comes of them."""

    def peer_lost(self, worker: int) -> None:
        """The worker's process is known to be gone: fail what is waiting for it."""

    def peer_back(self, worker: int) -> None:
        """The worker is back (perhaps elsewhere), with an empty mailbox."""

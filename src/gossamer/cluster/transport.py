"""gRPC between workers: the real world's `Transport`.

Each message is one stream to the receiver's server (`wire` has the frames). Control messages have a
connection of their own, so that they never queue behind payload. What is received is bounded: a
peer whose messages nobody takes is not read from, and gRPC's flow control holds it back.

A worker knows its peers by their certificates. Without certificates everything stays on loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
from collections.abc import Callable
from typing import Any

import grpc
from grpc import aio
from torch import Tensor

from gossamer.cluster.certs import Credentials, channel_options, place_name
from gossamer.cluster.inbox import CONTROL_BYTES_MAX, Inbox
from gossamer.cluster.letters import Letters, Mailbox
from gossamer.cluster.limits import Limits
from gossamer.cluster.outbox import (
    EAGER_BYTES_MAX,
    MESSAGE,
    SERVICE,
    WITHDRAW,
    Sender,
    Sending,
    Traffic,
)
from gossamer.cluster.pacing import Line
from gossamer.cluster.receiving import Receiver
from gossamer.cluster.wire import CHUNK_BYTES_MAX, HEADER_BYTES_MAX, ID_BYTES, NO_LIFE, Header
from gossamer.comm.context import Tag
from gossamer.comm.letters import Letter
from gossamer.errors import CommError, ConfigError, LinkFailed, PeerLost, check

_RPCS_MAX = 4096
_STREAMS_SLACK = 64  # a sender may start again before its broken streams are noticed
_SERVER_STOP_S = 0.5

Options = list[tuple[str, Any]]


class GrpcTransport:
    """One worker's end of the message service; see `gossamer.comm.transport` for its rules.

    Args:
        worker: my index.
        run_id: of the run; messages of another are refused.
        listen: "host:port" to listen on; port 0 takes a free one.
        credentials: who I am; None only where `listen` and all peers are on loopback.
        limits: what others may ask of me.
        rate: bytes per second each way, to play a thin line; None: as fast as it goes.
        delay_s: one-way delay to play.
        num_workers: of the run; peers with larger indices are syncers. None: all are workers.

    Raises `ConfigError` where plain text would leave this machine. `start` first; everything is
    called in the event loop's thread.
    """

    def __init__(
        self,
        worker: int,
        run_id: str,
        *,
        listen: str,
        credentials: Credentials | None,
        limits: Limits | None = None,
        rate: float | None = None,
        delay_s: float = 0.0,
        num_workers: int | None = None,
    ) -> None:
        if (rate is not None and not rate > 0) or not delay_s >= 0:
            raise ConfigError(f"rate is positive and delay at least 0, got {rate=}, {delay_s=}")
        if credentials is not None and credentials.name != place_name(worker, num_workers):
            named = place_name(worker, num_workers).replace("-", " ")
            raise ConfigError(f"{named} was given the certificate of {credentials.name}")
        self.worker, self.run_id = worker, run_id
        self._listen, self._credentials = listen, credentials
        self._num_workers = num_workers
        self._host = _checked_host(listen, credentials)
        self._limits = limits or Limits()
        self.traffic = Traffic()
        self.life = os.urandom(ID_BYTES)
        self._inbox = Inbox(worker, self._limits)
        self.mailbox = Mailbox(worker, self._limits)
        self.letters = Letters(worker, run_id, self.life, self._start_letter)
        self._delay_s, self._up, self._down = delay_s, Line(rate), Line(rate)
        self._peers: dict[int, _Peer] = {}
        self._sendings: dict[Sending, None] = {}
        self._background: dict[asyncio.Task[None], None] = {}
        self._sender = Sender(
            self._limits.keepalive, delay_s, self._up, self.traffic, self._keep_until_done
        )
        self._server: aio.Server | None = None
        self._lookout: asyncio.Task[None] | None = None
        self._closed = False

    # ------------------------------------------------------------------------------ start and end

    async def start(self) -> str:
        """Listen; returns the address, "host:port". Raises `ConfigError` where it is not free."""
        check(self._server is None, "a transport is started once")
        receiver = Receiver(
            self.worker,
            self.run_id,
            self.life,
            limits=self._limits,
            inbox=self._inbox,
            mailbox=self.mailbox,
            line=self._down,
            delay_s=self._delay_s,
            traffic=self.traffic,
            secure=self._credentials is not None,
            num_workers=self._num_workers,
        )
        server = aio.server(
            options=_server_options(self._limits), maximum_concurrent_rpcs=_RPCS_MAX
        )
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            MESSAGE: grpc.stream_stream_rpc_method_handler(receiver.message),
            WITHDRAW: grpc.unary_unary_rpc_method_handler(receiver.withdraw),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            if self._credentials is None:
                port = server.add_insecure_port(self._listen)
            else:
                port = server.add_secure_port(self._listen, self._credentials.for_server())
        except RuntimeError:
            port = 0
        if port == 0:
            await server.stop(None)
            raise ConfigError(
                f"cannot listen on {self._listen}; is it an address of this machine, and free?"
            )
        await server.start()
        self._server = server
        self._lookout = asyncio.get_running_loop().create_task(self._look_out())
        shown = f"[{self._host}]" if ":" in self._host else self._host
        return f"{shown}:{port}"

    async def close(self, grace_s: float) -> None:
        """Let what is on its way arrive, for at most `grace_s`; then end everything.

        Nobody waits for letters.
        """
        self._closed = True
        self.letters.abandon(LinkFailed(f"worker {self.worker} is shutting down"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.settled()
        for sending in [s for s in self._sendings if not s.is_done]:
            sending.abandon(LinkFailed(f"worker {self.worker} is shutting down"))
        await self.settled()
        self._inbox.close()
        self.mailbox.close()
        if self._lookout is not None:
            self._lookout.cancel()
            await asyncio.wait([self._lookout])
        if self._background:
            await asyncio.wait(list(self._background), timeout=_SERVER_STOP_S)
        for task in list(self._background):
            task.cancel()
        for peer in self._peers.values():
            await peer.close()
        if self._server is not None:
            await self._server.stop(_SERVER_STOP_S)

    async def _look_out(self) -> None:
        """Tell who waits for a worker whom nothing reaches any more, and who sends nothing for it.

        The other end of a broken link hears no failure of a message that never began to come. But
        its own connection to the sender breaks as well, and does not come back.
        """
        loop, keepalive_s = asyncio.get_running_loop(), self._limits.keepalive
        silent_since: dict[int, float] = {}
        while True:
            await asyncio.sleep(keepalive_s / 8)
            awaited = self._inbox.awaited
            silent_since = {w: since for w, since in silent_since.items() if w in awaited}
            for worker in awaited:
                if self._peer(worker).is_connected():
                    silent_since.pop(worker, None)
                    continue
                since = silent_since.setdefault(worker, loop.time())
                if loop.time() - since >= keepalive_s / 4:
                    self._inbox.cut_off(worker, loop.time() - keepalive_s)

    async def settled(self) -> None:
        """Wait until all that was sent has arrived or has failed."""
        for sending in list(self._sendings):
            await sending.settled()

    def set_peer(self, worker: int, address: str) -> None:
        """Where a worker listens, "host:port". Raises `ConfigError` for plain text to elsewhere."""
        _checked_host(address, self._credentials)
        peer = self._peer(worker)
        peer.life = NO_LIFE
        if peer.address != address:
            peer.address = address
            self._spawn(peer.close())

    # --------------------------------------------------------------------------- for the method

    def send(self, dst: int, tag: Tag, payload: Tensor, *, exact: bool = False) -> Sending:
        """See `Transport.send`."""
        check(not self._closed, "a transport that is closed sends nothing")
        check(dst != self.worker, "a worker sends nothing to itself")
        header = Header(
            run_id=self.run_id, sender=self.worker, receiver=dst, tag=tag, dtype=payload.dtype,
            shape=tuple(payload.shape), exact=exact, message_id=os.urandom(ID_BYTES),
            sender_life=self.life,
        )  # fmt: skip
        control = exact and header.num_bytes <= CONTROL_BYTES_MAX
        earlier = [s for s in self._sendings if s.precedes(header)]
        sending = Sending(
            header, payload, self._peer(dst), self._sender, control=control, after=earlier
        )
        if self._inbox.is_lost(dst):
            sending.abandon(PeerLost(f"worker {dst} is gone"))
            return sending
        self._sendings[sending] = None
        sending.when_done(self._forget)
        return sending

    async def recv(self, src: int, tag: Tag, timeout_s: float) -> Tensor:
        """See `Transport.recv`."""
        return await self._inbox.recv(src, tag, timeout_s)

    def begin_round(self, round_index: int) -> None:
        """See `Transport.begin_round`."""
        self._inbox.begin_round(round_index)

    def peer_lost(self, worker: int) -> None:
        """See `Transport.peer_lost`."""
        self._inbox.peer_lost(worker)
        self.mailbox.peer_lost(worker)
        gone = PeerLost(f"worker {worker} is gone")
        self.letters.abandon(gone, worker)
        for sending in [s for s in self._sendings if s.header.receiver == worker]:
            sending.abandon(gone)

    def peer_back(self, worker: int) -> None:
        """See `Transport.peer_back`; `set_peer` as well where it is elsewhere."""
        self._inbox.peer_back(worker)
        self.mailbox.peer_back(worker)
        self._peer(worker).life = NO_LIFE

    def peer_finished(self, worker: int) -> None:
        """The worker has done its last round: who waits for more of it is told (`OutOfSync`)."""
        self._inbox.peer_finished(worker)

    def forsake(self, is_forsaken: Callable[[int, Tag], bool], error: CommError) -> None:
        """Wait no longer for messages that are called so, by sender and tag."""
        self._inbox.forsake(is_forsaken, error)

    def knows_of(self, src: int, tag: Tag) -> bool:
        """Whether some of a message has come that is still to be taken."""
        return self._inbox.knows_of(src, tag)

    def untaken_bytes(self, worker: int) -> int:
        """Bytes of a peer's messages that lie here."""
        return self._inbox.untaken_bytes(worker)

    def post(
        self,
        dst: int,
        kind: str,
        payload: Tensor,
        *,
        step: int,
        part: int = 0,
        note: tuple[int, ...] = (),
        exact: bool = False,
    ) -> None:
        """See `Mail.post`."""
        check(not self._closed, "a transport that is closed sends nothing")
        check(dst != self.worker, "a worker sends nothing to itself")
        if not self._inbox.is_lost(dst):
            self.letters.post(dst, kind, payload, step=step, part=part, note=note, exact=exact)

    def poll(self, src: int, kind: str, part: int = 0) -> Letter | None:
        """See `Mail.poll`."""
        return self.mailbox.poll(src, kind, part)

    async def mail(self, seen: int, timeout: float | None = None) -> int:
        """See `Mail.mail`."""
        return await self.mailbox.mail(seen, timeout)

    def begin_letters(self) -> None:
        """This process takes part anew: letters of its part before count no more."""
        self.mailbox.begin()
        self.letters.abandon(LinkFailed(f"worker {self.worker} has begun anew"))

    # ---------------------------------------------------------------------------------- its tasks

    def _start_letter(self, header: Header, payload: Tensor, control: bool) -> Sending:
        route = self._peer(header.receiver)
        return Sending(header, payload, route, self._sender, control=control)

    def _peer(self, worker: int) -> _Peer:
        if worker not in self._peers:
            name = place_name(worker, self._num_workers)
            self._peers[worker] = _Peer(worker, name, self._credentials, self._limits)
        return self._peers[worker]

    def _forget(self, sending: Sending) -> None:
        self._sendings.pop(sending, None)

    def _spawn(self, work: Any) -> None:
        self._keep_until_done(asyncio.get_running_loop().create_task(work))

    def _keep_until_done(self, task: asyncio.Task[None]) -> None:
        self._background[task] = None
        task.add_done_callback(lambda done: self._background.pop(done, None))


class _Peer:
    """The connections to one worker; implements `Route`."""

    def __init__(
        self, worker: int, name: str, credentials: Credentials | None, limits: Limits
    ) -> None:
        self.worker, self._name = worker, name
        self._credentials, self._limits = credentials, limits
        self.address: str | None = None
        self.life = NO_LIFE
        self.eager_bytes = EAGER_BYTES_MAX
        self.turn = asyncio.Lock()
        self._channels: dict[bool, aio.Channel] = {}
        self._slots = {kind: asyncio.Semaphore(limits.streams_max) for kind in (False, True)}

    def channel(self, control: bool) -> aio.Channel | None:
        """See `Route.channel`."""
        if self.address is None:
            return None
        if control not in self._channels:
            options = _channel_options(self._limits)
            if self._credentials is None:
                channel = aio.insecure_channel(self.address, options)
            else:
                options += channel_options(self._name)
                channel = aio.secure_channel(self.address, self._credentials.for_channel(), options)
            self._channels[control] = channel
        return self._channels[control]

    def is_connected(self) -> bool:
        """Whether the worker is reached, or its address not known yet; asks for a connection."""
        channel = self.channel(True)
        if channel is None:
            return True
        return channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    def slots(self, control: bool) -> asyncio.Semaphore:
        """See `Route.slots`."""
        return self._slots[control]

    async def close(self) -> None:
        """End the connections, and what is on them."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()


def _checked_host(address: str, credentials: Credentials | None) -> str:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"an address is HOST:PORT, such as 10.0.0.5:29400; got {address!r}")
    if credentials is None and not is_loopback(host):
        raise ConfigError(
            f"{address} is not on this machine, and without certificates nothing is sent in plain "
            f"text over a network; make some with `gossamer certs` and give them to every process"
        )
    return host


def is_loopback(host: str) -> bool:
    """Whether what is sent to `host` stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _common_options(limits: Limits) -> Options:
    keepalive_ms = limits.keepalive * 1000
    return [
        ("grpc.keepalive_time_ms", round(keepalive_ms * 4 / 7)),  # 2000 and 1500 of 3500
        ("grpc.keepalive_timeout_ms", round(keepalive_ms * 3 / 7)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", CHUNK_BYTES_MAX + HEADER_BYTES_MAX),
        ("grpc.max_send_message_length", CHUNK_BYTES_MAX + HEADER_BYTES_MAX),
    ]


def _server_options(limits: Limits) -> Options:
    return [
        *_common_options(limits),
        ("grpc.so_reuseport", 0),  # two workers on one port is a mistake to be told
        ("grpc.max_concurrent_streams", limits.streams_max + _STREAMS_SLACK),
        ("grpc.max_allowed_incoming_connections", limits.connections_max),
        ("grpc.server_handshake_timeout_ms", round(limits.header_timeout * 1000)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", round(limits.keepalive * 100)),
        ("grpc.http2.max_ping_strikes", 0),  # our own keepalive must never count as abuse
        ("grpc.max_metadata_size", 8192),
        ("grpc.absolute_max_metadata_size", 16384),
    ]


def _channel_options(limits: Limits) -> Options:
    return [
        *_common_options(limits),
        ("grpc.use_local_subchannel_pool", 1),  # or both channels would share one connection
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),  # retries are ours: a message is delivered once
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", round(limits.keepalive * 1000)),  # to connect within
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]

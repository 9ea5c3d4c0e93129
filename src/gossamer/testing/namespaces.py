"""Hosts on one machine, joined by shaped links: Linux network namespaces, as root.

    with shaped_hosts(4, mbit=100) as hosts:
        subprocess.run([*hosts.inside(0), "python", "worker.py"])   # at 10.77.0.1
        hosts.cut(2)                                                # worker 2's cable is out
        hosts.restore(2)

Each host has its own link to a hub, shaped both ways; the hub is a host too (`hosts.hub`).
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NETWORK = "10.77.0"
HUB_ADDRESS = f"{NETWORK}.254"

_numbers = itertools.count()  # of networks of this process, which may have several at a time
NOBODY = "02:00:00:00:00:00"  # an Ethernet address that no host has


def missing() -> str | None:
    """Why there can be no namespaces here, or None where there can."""
    if os.name != "posix" or not shutil.which("ip") or not shutil.which("tc"):
        return "needs Linux with `ip` and `tc` (iproute2)"
    if os.geteuid() != 0:
        return "needs root"
    name = f"gsm{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode != 0:
        return f"network namespaces are not allowed here: {made.stderr.decode().strip()}"
    _ip("netns", "del", name)
    return None


@dataclass(frozen=True)
class Hosts:
    """`num_hosts` hosts and a hub."""

    num_hosts: int
    prefix: str

    @property
    def hub(self) -> list[str]:
        """The command prefix to run something on the hub."""
        return ["ip", "netns", "exec", self.hub_name]

    @property
    def hub_name(self) -> str:
        """Of its namespace."""
        return f"{self.prefix}hub"

    def inside(self, host: int) -> list[str]:
        """The command prefix to run something on a host."""
        return ["ip", "netns", "exec", self.name(host)]

    def address(self, host: int) -> str:
        """A host's IP address."""
        return f"{NETWORK}.{host + 1}"

    def name(self, host: int) -> str:
        """Of its namespace."""
        return f"{self.prefix}w{host}"

    def cut(self, host: int) -> None:
        """Pull the host's cable."""
        _ip("-n", self.name(host), "link", "set", "eth0", "down")

    def restore(self, host: int) -> None:
        """Put it back."""
        _ip("-n", self.name(host), "link", "set", "eth0", "up")

    def sent_bytes(self, host: int) -> int:
        """All that has left a host through its cable, frames and all."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(subprocess.check_output([*self.inside(host), "cat", path]))

    def part(self, first: int, second: int) -> None:
        """Lose all that the two send each other; their other traffic goes on."""
        for here, there in ((first, second), (second, first)):
            _neighbour(self, here, "replace", there, "lladdr", NOBODY, "nud", "permanent")

    def reunite(self, first: int, second: int) -> None:
        """Let it through again."""
        for here, there in ((first, second), (second, first)):
            _neighbour(self, here, "del", there)


@contextmanager
def shaped_hosts(num_hosts: int, *, mbit: float, mtu: int = 9000) -> Iterator[Hosts]:
    """`num_hosts` hosts on links of `mbit` Mbit/s each way, removed at the end.

    Args:
        mtu: bytes of the largest packet. With 9000 headers take 0.7 % of the line, with Ethernet's
            usual 1500 4.5 %; and a slow start after a rest ends sooner.
    """
    hosts = Hosts(num_hosts, f"g{os.getpid()}n{next(_numbers)}")
    hub = hosts.hub_name
    try:
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "set", "lo", "up")
        _ip("-n", hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", hub, "link", "set", "br0", "up")
        _ip("-n", hub, "addr", "add", f"{HUB_ADDRESS}/24", "dev", "br0")
        for host in range(num_hosts):
            _plug_in(hosts, hub, host, mbit, mtu)
        yield hosts
    finally:
        for name in [*(hosts.name(host) for host in range(num_hosts)), hub]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _plug_in(hosts: Hosts, hub: str, host: int, mbit: float, mtu: int) -> None:
    name, port = hosts.name(host), f"p{host}"
    _ip("netns", "add", name)
    _ip("-n", name, "link", "set", "lo", "up")
    # Where several flows share a link, plain sockets with BBR use 74 % of such a line and with Reno
    # 99 %: what is measured here shall be our transport, and not the kernel's congestion control.
    subprocess.run([*hosts.inside(host), "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno"],
                   check=True)  # fmt: skip
    _ip("link", "add", f"e{host}", "netns", name, "type", "veth", "peer", "name", port,
        "netns", hub)  # fmt: skip
    _ip("-n", hub, "link", "set", port, "master", "br0", "up")
    _ip("-n", name, "link", "set", f"e{host}", "name", "eth0")
    _ip("-n", name, "addr", "add", f"{hosts.address(host)}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "mtu", str(mtu))
    _ip("-n", hub, "link", "set", port, "mtu", str(mtu))
    _ip("-n", name, "link", "set", "eth0", "up")
    rate = f"{mbit}mbit"
    shape = [
        "rate",
        rate,
        "ceil",
        rate,
        "burst",
        "32k",
        "cburst",
        "32k",
        "quantum",
        str(max(3000, mtu)),
    ]
    for inside, device in ((name, "eth0"), (hub, port)):
        on = ["dev", device]
        _tc(inside, "qdisc", "add", *on, "root", "handle", "1:", "htb", "default", "10")
        _tc(inside, "class", "add", *on, "parent", "1:", "classid", "1:10", "htb", *shape)
        queue = ["handle", "10:", "bfifo", "limit", "500kb"]
        _tc(inside, "qdisc", "add", *on, "parent", "1:10", *queue)


def _neighbour(hosts: Hosts, here: int, verb: str, there: int, *more: str) -> None:
    """Say where `here` finds `there` on the wire."""
    _ip("-n", hosts.name(here), "neigh", verb, hosts.address(there), *more, "dev", "eth0")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=True)


def _tc(namespace: str, *words: str) -> None:
    subprocess.run(
        ["ip", "netns", "exec", namespace, "tc", *words], capture_output=True, check=True
    )

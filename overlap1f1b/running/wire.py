"""A wire: real, rate-limited links between ranks of this machine, each in a Linux network namespace of its own.

    with Wire(ranks=2, rate=500e6) as wire:
        status = run_ranks(argv, 2, wire=wire)

Two ranks have one cable, a veth pair. More have a switch: a bridge in a namespace of its own, the hub, and a cable from
each rank to one of its ports. The machine's own interfaces are not touched.

    rank 0 [wire]═════[wire] rank 1            rank r [wire]═════[port r] hub, a bridge

tc limits what leaves an interface, so each direction is limited at the end that sends it: a rank's sending at its own
`wire`, and its receiving at the other rank's `wire` or, behind a hub, at its port there, where the streams of several
senders meet. The parent sets the rate of all ends, or each rank sets its own end and port (`shape`: a rank is root, and
its environment names the hub).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from overlap1f1b.transport.limits import KILL_POLL_S, KILL_S, SHELL_S

INTERFACE = "wire"  # of a rank, in its namespace
HUB = "OVERLAP1F1B_WIRE_HUB"  # in the environment of each of more than two ranks: the hub's namespace ...
PORT = "OVERLAP1F1B_WIRE_PORT"  # ... and the rank's port there

PREFIX = "o1f1b-"
SUBNET = "10.77.0"
MAX_RANKS = 254  # addresses in SUBNET.0/24
PACKET = 16384  # bytes that the kernel handles at once on a wire
SMALL = 1024  # bytes below which a packet is small, a power of two
QUEUE_S = 0.4  # time for which large packets wait before the wire at most
SETTINGS = (
    # Not BBR, which some systems default to: every ten seconds it all but stops for 200 ms to probe the delay.
    "tcp_congestion_control=reno",
    "tcp_slow_start_after_idle=0",
    # A short queue before the wire, as a network card's driver keeps: counts would wait for megabytes of rows.
    f"tcp_limit_output_bytes={4 * PACKET}",
    # Room for whole messages: they travel while no thread of the sender or receiver has a processor.
    "tcp_wmem=4096 8388608 8388608",
    "tcp_rmem=4096 8388608 33554432",
)


def require() -> None:
    """Raise ValueError, which names what is missing, if this process cannot make a wire."""
    if not sys.platform.startswith("linux"):
        raise ValueError(f"--wire needs Linux (network namespaces; this is {sys.platform})")
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if missing:
        raise ValueError(f"--wire needs iproute2 (not on PATH: {', '.join(missing)})")
    if os.geteuid() != 0:
        raise ValueError(f"--wire needs root (it makes network namespaces; this is user {os.geteuid()})")


def shape(rate_bps: float) -> None:
    """Limit a rank's end of the wire in both directions; called in that rank. A further call replaces the rate.

        shape(500e6)

    Every rank has to call it: without a hub, a rank's receiving is limited at the other end. The rate counts Ethernet
    frames, of which TCP's payload is 95.6 %. The first 32 KiB (or millisecond) after a pause pass at once.
    """
    _limit([], INTERFACE, rate_bps)
    if os.environ.get(HUB):
        _limit(["-n", os.environ[HUB]], os.environ[PORT], rate_bps)


class Wire:
    """Network namespaces of `ranks` ranks and the links between them, while its `with` block lasts.

        with Wire(ranks=4) as wire:
            subprocess.run([*wire.prefix(0), "ping", "-c1", wire.address(3)])

    Without `rate` the links are as fast as the kernel. At the end, processes in the namespaces are killed and the
    namespaces removed. A process that is killed leaves them, and the next Wire removes them.
    """

    def __init__(self, ranks: int, rate: float | None = None) -> None:
        require()
        if not 2 <= ranks <= MAX_RANKS:
            raise ValueError(f"--wire needs 2 to {MAX_RANKS} ranks, not {ranks}")
        self.rate = rate
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(2)}"  # the token: a process may have several wires
        self._namespaces = [f"{name}-{rank}" for rank in range(ranks)]
        self._hub = f"{name}-hub" if ranks > 2 else None

    def prefix(self, rank: int) -> list[str]:
        """Return the words to put before a command, so that it runs in the namespace of `rank`.

        The command replaces `ip`, so it keeps the process number. Its /sys is new, without cgroups.
        """
        return ["ip", "netns", "exec", self._namespaces[rank]]

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables for the process of `rank`: gloo's interface, and the variables that `shape` reads."""
        hub = {HUB: self._hub, PORT: f"port{rank}"} if self._hub else {}
        return {"GLOO_SOCKET_IFNAME": INTERFACE} | hub

    def address(self, rank: int) -> str:
        return f"{SUBNET}.{rank + 1}"

    def __enter__(self) -> Wire:
        for line in _run("ip", "netns", "list").splitlines():
            name = line.split()[0]
            match = re.match(rf"{PREFIX}(\d+)-", name)
            if match and not os.path.exists(f"/proc/{match[1]}"):  # of a process that was killed
                _remove(name)
        try:
            self._connect()
            if self.rate is not None:
                ends = [(namespace, INTERFACE) for namespace in self._namespaces]
                ends += [(self._hub, f"port{rank}") for rank in range(len(ends))] if self._hub else []
                for namespace, end in ends:
                    _limit(["-n", namespace], end, self.rate)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Kill the processes in the namespaces and remove the namespaces. Ctrl-C waits until this is done."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            for namespace in filter(None, [*self._namespaces, self._hub]):
                _remove(namespace)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _connect(self) -> None:
        """Make the namespaces, the cables between them, and a hub for more than two."""
        for namespace in self._namespaces:
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            for setting in SETTINGS:
                _run("ip", "netns", "exec", namespace, "sysctl", "-qw", f"net.ipv4.{setting}", check=False)
        if self._hub:
            _run("ip", "netns", "add", self._hub)
            _run("ip", "-n", self._hub, "link", "add", "hub", "type", "bridge", "forward_delay", "0")
            _run("ip", "-n", self._hub, "link", "set", "hub", "up")
            for rank, namespace in enumerate(self._namespaces):
                self._cable(namespace, self._hub, f"port{rank}")
                _run("ip", "-n", self._hub, "link", "set", f"port{rank}", "master", "hub", "up")
        else:
            first, second = self._namespaces
            self._cable(first, second, INTERFACE)
        for rank, namespace in enumerate(self._namespaces):
            _run("ip", "-n", namespace, "address", "add", f"{self.address(rank)}/24", "dev", INTERFACE)
            _run("ip", "-n", namespace, "link", "set", INTERFACE, "up")
        # a kernel without htb fails here, not after the caller has measured for a while
        _limit(["-n", self._namespaces[0]], INTERFACE, 1e9)
        _run("tc", "-n", self._namespaces[0], "qdisc", "delete", "dev", INTERFACE, "root")

    def _cable(self, namespace: str, other: str, port: str) -> None:
        """Make a cable with both ends inside the namespaces, so that no name outside is taken, even for a moment."""
        end, far_end = ["name", INTERFACE, "netns", namespace], ["name", port, "netns", other]
        _run("ip", "link", "add", *end, "type", "veth", "peer", *far_end)
        for space, name in ((namespace, INTERFACE), (other, port)):
            # The kernel would split packets larger than the burst, which takes processor time from the measured work.
            _run("ip", "-n", space, "link", "set", "dev", name, "gso_max_size", str(PACKET))


def _limit(namespace: list[str], interface: str, rate_bps: float) -> None:
    """Limit what leaves an interface. Small packets, as of counts and acknowledgements, go before large ones.

    Queue pairs of a network card take turns, so a few bytes never wait for the megabytes of another queue. In one queue
    they would, behind a hub for up to ``QUEUE_S``.
    """
    if not rate_bps >= MIN_RATE:  # also refuses nan
        raise ValueError(f"a wire's rate must be {MIN_RATE:.0f} bit/s or more, not {rate_bps:g}")
    # The burst passes at once after a pause. It must cover a packet, and a tick of the kernel's timer at that rate.
    burst = max(2 * PACKET, round(rate_bps / 8 * 1e-3))
    tc, on = ["tc", *namespace], ["dev", interface]
    whole = [f"{round(rate_bps)}bit", "burst", f"{burst}b", "cburst", f"{burst}b", "quantum", str(PACKET)]
    _run(*tc, "qdisc", "delete", *on, "root", check=False)  # of an earlier rate
    _run(*tc, "qdisc", "add", *on, "root", "handle", "1:", "htb", "default", "2")
    for child, parent, priority, guaranteed in ((9, "1:", "0", 1.0), (1, "1:9", "0", 0.1), (2, "1:9", "1", 0.9)):
        share = ["rate", f"{round(rate_bps * guaranteed)}bit", "ceil", *whole, "prio", priority]
        _run(*tc, "class", "add", *on, "parent", parent, "classid", f"1:{child}", "htb", *share)
    queue = f"{max(burst, round(rate_bps / 8 * QUEUE_S))}b"
    _run(*tc, "qdisc", "add", *on, "parent", "1:2", "bfifo", "limit", queue)
    small = ["match", "u16", "0", f"0x{0xFFFF & ~(SMALL - 1):04x}", "at", "2"]  # bytes of the whole packet
    _run(*tc, "filter", "add", *on, "parent", "1:", "protocol", "ip", "prio", "1", "u32", *small, "flowid", "1:1")


def _remove(namespace: str) -> None:
    """Kill the processes in `namespace` and delete it. It may be half made or gone, so commands may fail."""
    deadline = time.monotonic() + KILL_S
    while pids := _run("ip", "netns", "pids", namespace, check=False).split():
        for pid in map(int, pids):
            assert pid != os.getpid(), "a wire is closed from outside its namespaces"
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(KILL_POLL_S)
    _run("ip", "netns", "delete", namespace, check=False)


def _run(*command: str, check: bool = True) -> str:
    """Run a command and return its output. Its own session keeps a terminal's Ctrl-C from ending it half way."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SHELL_S, start_new_session=True, check=False
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"--wire: `{' '.join(command)}` took longer than {SHELL_S:g} s") from None
    if check and done.returncode != 0:
        reason = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
        raise ValueError(f"--wire: `{' '.join(command)}` failed: {reason or f'status {done.returncode}'}")
    return done.stdout


UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
MIN_RATE = 1e4  # bits per second; well below it, at 1 kbit/s, the time of a burst overflows tc's 32 bits


@dataclass(frozen=True)
class Balanced:
    """The rate at which exchange takes as long as compute, times ``factor``."""

    factor: float = 1.0


def parse_wire(text: str) -> float | Balanced:
    """Return the rate in bits per second, or :class:`Balanced`.

    >>> parse_wire("2.5gbit"), parse_wire("balanced"), parse_wire("balanced*0.5")
    (2500000000.0, Balanced(factor=1.0), Balanced(factor=0.5))
    """
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text, re.IGNORECASE | re.ASCII):
        if (rate := float(match[1]) * UNITS[match[2].lower()]) >= MIN_RATE:
            return rate
    elif match := re.fullmatch(r"balanced(?:\*(.+))?", text):
        with contextlib.suppress(ValueError):
            if 0 < (factor := float(match[1] or 1)) < float("inf"):
                return Balanced(factor)
    raise ValueError(
        f"--wire {text!r}; allowed: a rate such as 100kbit, 500mbit or 2.5gbit (10kbit or more), balanced, "
        "or balanced*FACTOR with a factor above 0"
    )


def parse_loopback(text: str) -> float | None:
    """Return the gigabytes per second of ``loopback:GB/s``, None for ``loopback``.

    >>> parse_loopback("loopback:12.5"), parse_loopback("loopback")
    (12.5, None)
    """
    name, colon, rate = text.partition(":")
    with contextlib.suppress(ValueError):
        if name == "loopback" and (not colon or 0 < float(rate) < float("inf")):
            return float(rate) if colon else None
    raise ValueError(f"--exchange {text}; allowed: loopback or loopback:GB/s, as loopback:20")

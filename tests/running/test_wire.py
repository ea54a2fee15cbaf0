"""A wire carries bytes at its rate between ranks that can reach each other in no other way, and is removed."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest

from overlap1f1b.running.launch import run_ranks
from overlap1f1b.running.wire import Balanced, Wire, parse_wire, require
from tests.running.run import ROOT, until

WIRE = pytest.mark.usefixtures("wire_or_skip")
FRAME_PER_PAYLOAD = 1514 / 1448  # Ethernet, IP and TCP headers of full segments


@pytest.fixture(scope="module")
def wire_or_skip() -> None:
    try:
        with Wire(2):
            pass
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a script in the place of a command."""

    def put(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return put


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(ValueError, match=r"--wire needs iproute2 \(not on PATH: tc\)"):
        require()
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match="--wire needs root"):
        require()


@WIRE
def test_number_of_ranks() -> None:
    for ranks in (1, 255):
        with pytest.raises(ValueError, match=f"--wire needs 2 to 254 ranks, not {ranks}"):
            Wire(ranks)


def namespaces(pid: int | None = None) -> list[str]:
    """Of `pid`, else of this process; other processes may have wires at the same time."""
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in done.stdout.splitlines() if line.startswith(f"o1f1b-{pid or os.getpid()}-")]


RECEIVE = """
import select, socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connections = [server.accept()[0] for _ in range(int(sys.argv[2]))]
got, marks = 0, []
for end in map(int, sys.argv[3:]):
    while got < end:
        got += sum(len(connection.recv(1 << 16)) for connection in select.select(connections, [], [])[0])
    marks.append(time.perf_counter())
print(marks[1] - marks[0])
"""
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000), timeout=10)
connection.settimeout(20)
connection.sendall(bytes(int(sys.argv[2])))
"""
WARM = 2**21  # bytes before the clock starts: more than the burst


def transfer_s(wire: Wire, senders: Sequence[int], receiver: int, size: int) -> float:
    """Seconds until `receiver` has `size` bytes, after the first WARM, of what all `senders` send it at once."""
    programs: list[subprocess.Popen[str]] = []
    address, total = wire.address(receiver), str(WARM + size)
    receive = [sys.executable, "-c", RECEIVE, address, str(len(senders)), str(WARM), total]
    try:
        server = subprocess.Popen([*wire.prefix(receiver), *receive], stdout=subprocess.PIPE, text=True)
        programs.append(server)
        assert server.stdout.readline() == "ready\n"
        for sender in senders:
            send = [*wire.prefix(sender), sys.executable, "-c", SEND, address, total]
            programs.append(subprocess.Popen(send, stderr=subprocess.DEVNULL, text=True))  # the receiver hangs up first
        return float(server.communicate(timeout=30)[0])
    finally:
        for program in programs:
            program.kill()
            program.wait()


def assert_takes(wire: Wire, senders: Sequence[int], receiver: int, size: int, rate: float) -> None:
    """Never faster than the rate; slower only when this machine is busy, for which there are further attempts."""
    expected = size * 8 * FRAME_PER_PAYLOAD / rate
    for _ in range(4):
        taken = transfer_s(wire, senders, receiver, size)
        assert taken > 0.85 * expected
        if taken < 1.15 * expected:
            return
    pytest.fail(f"{taken:.2f} s instead of {expected:.2f} s")


SHAPE = """
import sys
from overlap1f1b.running.wire import shape
shape(float(sys.argv[1]))
"""


@WIRE
def test_rates_of_two_ranks_both_ways_and_after_a_change() -> None:
    with Wire(2) as wire:
        assert transfer_s(wire, [0], 1, 2**23) < 2**23 * 8 / 1e9  # no limit yet
        for rate, rank in product(("400e6", "100e6"), (0, 1)):
            subprocess.run([*wire.prefix(rank), sys.executable, "-c", SHAPE, rate], cwd=ROOT, check=True)
        assert_takes(wire, [0], 1, 2**22, 100e6)
    with Wire(2, rate=200e6) as wire:
        assert_takes(wire, [1], 0, 2**23, 200e6)


ECHO = """
import socket, sys
connection, _ = socket.create_server((sys.argv[1], 5001)).accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := connection.recv(64):
    connection.sendall(data)
"""
ASK = """
import socket, sys, time
while True:
    try:
        connection = socket.create_connection((sys.argv[1], 5001), timeout=5)
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
taken = []
for _ in range(20):
    begun = time.perf_counter()
    connection.sendall(bytes(64))
    connection.recv(64)
    taken.append(time.perf_counter() - begun)
    time.sleep(0.02)
print(sorted(taken)[10])
"""


@WIRE
def test_behind_a_hub_receiving_is_limited_and_a_few_bytes_do_not_wait_for_many() -> None:
    """Two senders share what a third may receive: in one queue for all, an answer would wait 400 ms for their bytes."""
    with Wire(3, rate=100e6) as wire:
        assert_takes(wire, [0, 1], 2, 2**22, 100e6)
        echo = subprocess.Popen([*wire.prefix(2), sys.executable, "-c", ECHO, wire.address(2)])
        ask = [*wire.prefix(0), sys.executable, "-c", ASK, wire.address(2)]
        asking = subprocess.Popen(ask, stdout=subprocess.PIPE, text=True)
        try:
            transfer_s(wire, [0, 1], 2, 2**23)
            median = float(asking.communicate(timeout=30)[0])
        finally:
            for program in (echo, asking):
                program.kill()
                program.wait()
    assert median < 0.03


@WIRE
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.wide), 3])
def test_ranks_shape_their_own_ends(ranks: int) -> None:
    """Each direction of each link ends up limited, whichever side does it. They know the interface to use."""
    command = (sys.executable, "-c", f"import os\nassert os.environ['GLOO_SOCKET_IFNAME'] == 'wire'\n{SHAPE}")
    with Wire(ranks) as wire:
        environ = dict(os.environ, PYTHONPATH=str(ROOT), GLOO_SOCKET_IFNAME="eth0")  # of the machine: not in there
        assert run_ranks(["150e6"], ranks, wire=wire, environ=environ, command=command) == 0
        limited = []
        for namespace in namespaces():
            for end in ["wire"] if namespace.split("-")[-1].isdigit() else [f"port{rank}" for rank in range(ranks)]:
                tc = ["tc", "-n", namespace, "class", "show", "dev", end]
                out = subprocess.run(tc, capture_output=True, text=True, check=True).stdout
                limited += [end] * len(re.findall(r"class htb 1:9 root rate 150Mbit ceil 150Mbit burst 3\S+b", out))
        assert sorted(limited) == sorted(["wire"] * ranks + [f"port{r}" for r in range(ranks) if ranks > 2])


@WIRE
def test_removed_after_an_exception_with_what_runs_there() -> None:
    def use(wire: Wire) -> None:
        with wire:
            command = [*wire.prefix(1), sys.executable, "-c", "print('runs', flush=True); import time; time.sleep(60)"]
            processes.append(process := subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert process.stdout.readline() == "runs\n"
            assert len(namespaces()) == 4
            raise KeyError

    processes: list[subprocess.Popen[str]] = []
    with pytest.raises(KeyError):
        use(Wire(3))
    assert processes[0].wait(timeout=1) == -signal.SIGKILL
    assert namespaces() == []


@WIRE
def test_removed_when_the_kernel_has_no_htb(command: Callable[[str, str], None]) -> None:
    """The command is named, with its reason, in one line; the half made wire is removed."""
    command("tc", "printf 'Error: Unknown qdisc.\\n  We have an error\\n' >&2\nexit 2")
    wire = Wire(2)
    reason = r"^--wire: `tc -n \S+ qdisc add dev wire .*` failed: Error: Unknown qdisc.; We have an error$"
    with pytest.raises(ValueError, match=reason), wire:
        pytest.fail("it was made")
    assert namespaces() == []


PARENT = r"""
import sys, time
from overlap1f1b.running.launch import run_ranks
from overlap1f1b.running.wire import Wire
with Wire(3) as wire:
    print("made", flush=True)
    if sys.argv[1] == "ranks":
        command = (sys.executable, "-c", "import os, time; os.write(1, b'made\\n'); time.sleep(60)")
        sys.exit(run_ranks([], 3, wire=wire, command=command))
    time.sleep(60)
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Makes processes that have a wire, and with "ranks" also three ranks on it, by the time the call returns."""
    processes: list[subprocess.Popen[str]] = []

    def make(what: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PARENT, what]
        environ = dict(os.environ, TMPDIR=str(tmp_path))  # for the store of a parent that is killed
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        processes.append(process)
        for _ in range(4 if what == "ranks" else 1):
            assert process.stdout.readline() == "made\n"
        assert len(namespaces(process.pid)) == 4
        return process

    yield make
    for process in processes:
        process.kill()
        process.wait()


@WIRE
def test_removed_after_ctrl_c(parent: Callable[[str], subprocess.Popen[str]]) -> None:
    process = parent("ranks")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(timeout=15) == 130
    assert namespaces(process.pid) == []


@WIRE
def test_stale_namespaces_are_removed(parent: Callable[[str], subprocess.Popen[str]]) -> None:
    """Those of a process that is gone, not those of one that is there. Its ranks died with it."""
    stale, other = parent("ranks"), parent("nothing")
    stale.kill()
    stale.wait()
    names = namespaces(stale.pid)
    assert len(names) == 4
    # The ranks, started through `ip netns exec`, do not outlive their parent.
    until(lambda: not any(subprocess.check_output(["ip", "netns", "pids", name]) for name in names), 3)
    with Wire(2):
        assert namespaces(stale.pid) == []
        assert len(namespaces(other.pid)) == 4
    other.send_signal(signal.SIGINT)
    other.wait(timeout=10)
    assert namespaces(other.pid) == []


RATES = {"500mbit": 500e6, "1gbit": 1e9, "2.5gbit": 2.5e9, "100kbit": 1e5, "0.5Mbit": 5e5, "10kbit": 1e4}
NOT_WIRES = [
    "fast",
    "500",
    "500 mbit",
    "500mbit\n",
    "٥mbit",
    "nanmbit",
    "9kbit",
    "500mbit*2",
    "balanced2",
    "balanced*0",
]
NOT_WIRES += ["balanced*nan", "balanced*2*2", "Balanced"]


def test_rates() -> None:
    assert {text: parse_wire(text) for text in RATES} == RATES
    factors = {"balanced": 1.0, "balanced*2": 2.0, "balanced*0.5": 0.5}
    assert {text: parse_wire(text) for text in factors} == {text: Balanced(factors[text]) for text in factors}


@pytest.mark.parametrize("text", NOT_WIRES)
def test_what_is_no_wire(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--wire '.*'; allowed: a rate such as 100kbit, .*balanced\*FACTOR") as error:
        parse_wire(text)
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)

"""Two hosts on one machine, with a link of a chosen speed between them: what a slow network costs, measured.

    with two_hosts("1gbit") as hosts:
        subprocess.Popen([*hosts[0].prefix, "python", "train.py"])    # one rank here
        subprocess.Popen([*hosts[1].prefix, "python", "train.py"])    # one there

Each host is a network namespace of Linux; a pair of virtual Ethernet devices joins them, and a token bucket at both
ends lets no more through than the rate. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PREFIX = "flexnet"
_NETWORK = "10.77.0"  # nothing outside of the two namespaces sees it
_LATENCY = "20ms"
"""Of the token bucket: how long a packet may wait in the queue. More would hold up small messages behind large ones."""
_BURST_SECONDS, _LEAST_BURST_BYTES = 4e-3, 32 * 1024
"""What may pass at once at the speed of memory: what the link carries in this time. It must be more than between two
ticks of the kernel's clock (4 ms at most), and far less than an exchange, which would take no time otherwise."""
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Host:
    """One end of the link."""

    namespace: str
    interface: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """Put it before a command to run that on this host."""
        return ["ip", "netns", "exec", self.namespace]


def why_no_hosts() -> str | None:
    """Why `two_hosts` cannot work on this machine; None when it can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux; this is {sys.platform}"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need iproute2; not found: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with two_hosts("1gbit"):
            return None
    except RuntimeError as error:  # a container without the right, a kernel without the token bucket
        return f"this system allows no network namespaces with a slow link: {error}"


@contextmanager
def two_hosts(rate: str) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a link of `rate` each way between them, for as long as the context lasts.

    They are removed however the context ends, at SIGTERM too. What a killed process has left is removed by the next
    one.

    Args:
        rate: a number and kbit, mbit or gbit, such as "1gbit".

    Raises:
        ValueError: another kind of rate.
        RuntimeError: the system refuses a step; what it said is in the message.
    """
    _remove_left_over()
    pid = os.getpid()
    first, second = hosts = tuple(
        Host(f"{_PREFIX}{pid}{end}", f"flex{pid}{end}", f"{_NETWORK}.{number}") for number, end in ((1, "a"), (2, "b"))
    )
    with _exit_at_sigterm():
        try:
            for host in hosts:
                _ip("netns", "add", host.namespace)
            _ip("link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
            for host in hosts:
                _ip("link", "set", host.interface, "netns", host.namespace)
            for host in hosts:
                inside = ("-n", host.namespace)
                _ip(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
                _ip(*inside, "link", "set", host.interface, "up")
                _ip(*inside, "link", "set", "lo", "up")
                _tc(*inside, *_bucket(host.interface, rate))
            yield first, second
        finally:
            for host in hosts:
                _remove(host.namespace)
            # Still here if it was made and not moved.
            subprocess.run(["ip", "link", "del", first.interface], capture_output=True, check=False)


def sent_bytes(interface: str) -> int:
    """Bytes that this process's host has sent over an interface since it exists, headers of packets included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"this host has no network interface {interface!r}")


def _bucket(interface: str, rate: str) -> tuple[str, ...]:
    burst = str(max(int(_bytes_per_second(rate) * _BURST_SECONDS), _LEAST_BURST_BYTES))
    return ("qdisc", "add", "dev", interface, "root", "tbf", "rate", rate, "burst", burst, "latency", _LATENCY)


def _bytes_per_second(rate: str) -> float:
    """
    Raises:
        ValueError: a rate that is no number and unit.
    """
    for unit, bits in _UNITS.items():
        number = rate.removesuffix(unit)
        if number != rate and number.replace(".", "", 1).isdigit():
            return float(number) * bits / 8
    raise ValueError(f"rate={rate!r} must be a number and one of {', '.join(_UNITS)}, such as '1gbit'")


def _ip(*words: str) -> None:
    _run("ip", *words)


def _tc(*words: str) -> None:
    _run("tc", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")


def _remove(namespace: str) -> None:
    if Path("/run/netns", namespace).exists():
        _ip("netns", "del", namespace)


def _remove_left_over() -> None:
    """Namespaces of processes that are gone."""
    for path in Path("/run/netns").glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX)[:-1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            _remove(path.name)


@contextmanager
def _exit_at_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process as an exception, so that contexts are left in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    earlier = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)

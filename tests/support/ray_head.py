"""A real Ray head with a dashboard and a token, on this machine's loopback."""

import contextlib
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Head:
    """address: of the dashboard; temporary: Ray's directory, with its logs."""

    address: str
    token: str
    temporary: Path


@contextmanager
def ray_head(environment: Mapping[str, str], *options: str) -> Iterator[Head]:
    """Start a head node whose `python` is this one; it is gone at the end of the block.

    Args:
        environment: variables of the node besides this process's.
        options: of `ray start`.
    """
    temporary = Path("/tmp") / f"gtpo-{secrets.token_hex(4)}"  # short: Ray's sockets are in it
    token = secrets.token_hex(32)
    port, dashboard, agent = free_ports(3)
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    node = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "PATH": search, **environment}
    command = (
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *(f"--port={port}", "--node-ip-address=127.0.0.1", f"--temp-dir={temporary}", "--num-cpus=16"),
        *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"),
        # memory that admission counts, whatever other tests leave free of this machine's
        *("--object-store-memory=200000000", f"--memory={32 * 2**30}", *options),
    )
    log = temporary.with_suffix(".log")
    with log.open("w") as output:
        process = psutil.Popen(command, stdout=output, stderr=output, env=node)
    try:
        _wait_for(dashboard, log)
        yield Head(f"http://127.0.0.1:{dashboard}", token, temporary)
    finally:
        family = [process, *process.children(recursive=True)]
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(family, timeout=20)
        shutil.rmtree(temporary, ignore_errors=True)
        log.unlink()


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Free ports below those that the kernel gives to whoever asks, so that they are free still when Ray opens them."""
    ports: set[int] = set()
    while len(ports) < count:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as client:
            if client.connect_ex((host, port)) != 0:
                ports.add(port)
    return list(ports)


def _wait_for(port: int, log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(log.read_text()[-3000:])

"""Starts a Ray node inside its container, and tells whether the cluster counts it as alive.

Standard library alone: the health check runs often, and importing Ray costs more than the question.

    python -m lab.runtimes.node head|worker     becomes `ray start --block`
    python -m lab.runtimes.node alive           exit 0 when the cluster's node list has this node alive
"""

from __future__ import annotations

import json
import os
import socket
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

HEAD = "head"
"""The head's name on the lab network."""
GCS_PORT = 6379
DASHBOARD_PORT = 8265
ASK_S = 5.0
"""Limit for one question to the dashboard, in seconds."""


def own_address(head: str = HEAD) -> str:
    """This container's address on the network that the head is on (a container may be on several).

    Raises:
        OSError: the head's name is not known on this network.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((head, GCS_PORT))
        return str(probe.getsockname()[0])


def start_command(role: str, address: str, environ: Mapping[str, str]) -> list[str]:
    """The `ray start` of a node. Holds no secret: the token comes from the environment.

    Args:
        role: `head` or `worker`; also the value of the label `lab-role`.
        address: this node's own IP address.
        environ: has LAB_NODE_CPUS (logical CPUs) and LAB_OBJECT_STORE_MEMORY (bytes).
    """
    command = [
        "ray",
        "start",
        f"--node-ip-address={address}",
        f"--num-cpus={environ['LAB_NODE_CPUS']}",
        f"--object-store-memory={environ['LAB_OBJECT_STORE_MEMORY']}",
        f"--labels=lab-role={role}",
        "--disable-usage-stats",
        "--block",
    ]
    if role == "head":
        return [
            *command,
            "--head",
            f"--port={GCS_PORT}",
            "--include-dashboard=true",
            "--dashboard-host=0.0.0.0",
            f"--dashboard-port={DASHBOARD_PORT}",
        ]
    return [*command, f"--address={HEAD}:{GCS_PORT}"]


def listed_alive(document: Mapping[str, Any], address: str) -> bool:
    """Whether the dashboard's node list (`GET /api/v0/nodes`) has a living node at `address`."""
    nodes = document["data"]["result"]["result"]
    return any(node["node_ip"] == address and node["state"] == "ALIVE" for node in nodes)


def alive() -> bool:
    """Ask the head whether this node is alive.

    Raises:
        OSError: the head cannot be reached, or answers with an error.
    """
    request = urllib.request.Request(
        f"http://{HEAD}:{DASHBOARD_PORT}/api/v0/nodes?timeout={ASK_S:.0f}",
        headers={"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"},
    )
    with urllib.request.urlopen(request, timeout=ASK_S) as answer:
        return listed_alive(json.load(answer), own_address())


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in ("head", "worker", "alive"):
        print("usage: python -m lab.runtimes.node head|worker|alive", file=sys.stderr)
        return 2
    if arguments[0] != "alive":
        command = start_command(arguments[0], own_address(), os.environ)
        os.execvp(command[0], command)
    try:
        if alive():
            return 0
        print("node: the cluster's node list does not have this node alive", file=sys.stderr)
    except (OSError, KeyError, ValueError) as error:
        print(f"node: asking the head failed: {type(error).__name__}: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

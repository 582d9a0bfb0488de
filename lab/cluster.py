"""What the cluster has, by its dashboard's REST API: the host needs no Ray for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import requests

from lab.errors import EnvironmentBroken, UserError

WRONG_TOKEN = (
    "RAY_AUTH_TOKEN in .env is not the token of the cluster that is up: put the old one back, or stop the cluster "
    "(make down) and start it again (make up)."
)
ROLE_LABEL = "lab-role"


@dataclass(frozen=True)
class Node:
    """One node of the cluster. `cpus` are logical CPUs; `role` is `head`, `worker` or empty."""

    id: str
    ip: str
    role: str
    alive: bool
    cpus: float
    labels: Mapping[str, str] = field(default_factory=dict)


def nodes(dashboard: str, token: str, timeout: float = 3.0) -> list[Node]:
    """The nodes that the cluster knows, the dead ones too, the head first.

    Args:
        dashboard: the dashboard's URL.
        token: `RAY_AUTH_TOKEN`.
        timeout: seconds for connecting and for each answer.

    Raises:
        UserError: the token is not the cluster's.
        EnvironmentBroken: the dashboard does not answer, or not with a list of nodes.
    """
    with requests.Session() as session:
        session.trust_env = False  # a proxy of the user's shell has no business on loopback
        try:
            response = session.get(
                f"{dashboard}/api/v0/nodes",
                params={"detail": "true", "limit": "1000"},
                headers={"Authorization": f"Bearer {token}"},
                timeout=timeout,
            )
            if response.status_code in (401, 403):
                raise UserError(WRONG_TOKEN)
            response.raise_for_status()
            rows = response.json()["data"]["result"]["result"]
            found = [_node(row) for row in rows]
        except requests.RequestException as error:
            raise EnvironmentBroken(
                f"the cluster's dashboard at {dashboard} does not list its nodes ({_reason(error)})."
            ) from None
        except (KeyError, TypeError, ValueError) as error:
            raise EnvironmentBroken(
                f"the cluster's dashboard at {dashboard} answered something else than a list of nodes "
                f"({type(error).__name__})."
            ) from None
    return sorted(found, key=lambda node: (node.role != "head", node.ip, node.id))


def _node(row: Mapping[str, Any]) -> Node:
    labels = {str(key): str(value) for key, value in (row.get("labels") or {}).items()}
    return Node(
        id=str(row["node_id"]),
        ip=str(row["node_ip"]),
        role=labels.get(ROLE_LABEL, ""),
        alive=row["state"] == "ALIVE",
        cpus=float((row.get("resources_total") or {}).get("CPU", 0.0)),
        labels=labels,
    )


def _reason(error: requests.RequestException) -> str:
    return f"HTTP {error.response.status_code}" if error.response is not None else type(error).__name__

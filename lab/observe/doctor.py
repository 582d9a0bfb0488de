"""Facts of every node, for `lab doctor`."""

from __future__ import annotations

from typing import Any

from lab.observe.job import Job, ask_nodes, cluster_facts


def observe(job: Job) -> dict[str, Any]:
    """`{"nodes": [facts of each node alive]}`."""
    return {"nodes": cluster_facts(ask_nodes())}

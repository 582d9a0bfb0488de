"""Do the nodes share a disk? Found out by writing on one and reading on the others."""

from __future__ import annotations

import uuid
from pathlib import Path

from lab.errors import EnvironmentBroken, UserError


def _write(path: str, content: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content)


def _read(path: str) -> str | None:
    return Path(path).read_text() if Path(path).is_file() else None


def nodes_without(folder: str, timeout_s: float = 30.0) -> list[str]:
    """Write a marker below `folder` on this node and look for it on every other.

    Returns:
        Addresses of the nodes that do not see it; empty when all share the folder.

    Raises:
        UserError: this node cannot write there.
        EnvironmentBroken: a node does not answer in time.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    marker, content = f"{folder}/.lab-shared-{uuid.uuid4().hex}", uuid.uuid4().hex
    try:
        _write(marker, content)
    except OSError as error:
        raise UserError(
            f"LAB_STORAGE={folder} cannot be written on the head ({error.strerror}): use another path."
        ) from None
    here = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    remote = ray.remote(num_cpus=0, max_retries=0)(_read)
    try:
        answers = ray.get(
            [
                remote.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                ).remote(marker)
                for node in others
            ],
            timeout=timeout_s,
        )
    except ray.exceptions.GetTimeoutError:
        raise EnvironmentBroken(
            f"not every node looked for a shared file within {timeout_s:.0f} s: see `make status`."
        ) from None
    finally:
        Path(marker).unlink(missing_ok=True)
    return [node["NodeManagerAddress"] for node, seen in zip(others, answers, strict=True) if seen != content]

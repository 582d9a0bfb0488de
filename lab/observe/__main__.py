"""`python -m lab.observe MODULE REQUEST`: the entry point of every job."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
import traceback
from typing import Any

from lab.channel import send
from lab.errors import LabError, UserError
from lab.observe.job import Job, ask_nodes, check_same_everywhere, cluster_facts, environment
from lab.training.defaults import driver_environment


def _write(line: str) -> None:
    sys.stdout.flush()
    os.write(1, line.encode())  # one system call a line: the threads that relay worker output cannot cut it


def _observe(module: str, request: dict[str, Any]) -> dict[str, Any]:
    began = time.time()
    for key, value in driver_environment().items():
        os.environ.setdefault(key, value)
    import ray

    ray.init(address="auto", logging_level=logging.WARNING)
    asked = ask_nodes()
    # torch and Ray Train, while the nodes answer
    observation = importlib.import_module(f"lab.observe.{module}")
    nodes = cluster_facts(asked)
    check_same_everywhere(nodes)
    job = Job(run=request["run"], storage_uri=request["storage"], params=request["params"])
    document: dict[str, Any] = observation.observe(job)
    document["environment"] = environment(nodes)
    document["params"] = dict(request["params"])
    document["run"] = request["run"]
    document["storage"] = request["storage"]
    document["job"] = {"began": began, "seconds": time.time() - began}
    return document


def main() -> int:
    """Observe, send the document, end. An error is a document too."""
    try:
        document = _observe(sys.argv[1], json.loads(sys.argv[2]))
    except LabError as error:
        kind = "user" if isinstance(error, UserError) else "environment"
        document = {"error": {"kind": kind, "message": str(error)}}
    except Exception as error:  # noqa: BLE001 - the boundary: the host shows one sentence, the log has the rest
        traceback.print_exc()
        first = str(error).strip().splitlines()[:1]
        document = {
            "error": {
                "kind": "broken",
                "message": f"the job failed with {type(error).__name__}: {''.join(first)}",
            }
        }
    send(document, _write)
    return 1 if "error" in document else 0


if __name__ == "__main__":
    sys.exit(main())

"""Which training runs are alive, as the cluster itself says: a run's controller is an actor as long as it trains."""

from __future__ import annotations

import gc
import json
import shlex
import signal
import threading
import time
from dataclasses import dataclass

from lab.errors import EnvironmentBroken

CONTROLLER = "TrainController"
LIMIT_S = 20


@dataclass(frozen=True)
class Alive:
    """`runs` are the lab's jobs that train now, by run name; `unknown` counts training runs of other programs."""

    runs: tuple[str, ...]
    unknown: int

    def holds(self, name: str) -> str:
        """Why the folder of run `name` must be left alone now; empty when it need not."""
        for run in self.runs:
            # a lesson that needs several runs names the others run-something
            if name == run or name.startswith(f"{run}-"):
                return f"it belongs to run {run}, which is training now"
        if self.unknown:
            return f"{self.unknown} training run(s) that the lab did not start are alive, and it might be one of them"
        return ""


def live_runs() -> Alive:
    """Ask the cluster for living controllers and for the jobs that they belong to; needs `ray.init` done.

    Raises:
        EnvironmentBroken: the cluster does not answer: then nothing can be said to be dead.
    """
    import ray
    from ray.util.state import list_actors, list_jobs
    from ray.util.state.exception import RayStateApiException

    # without it a rank's process would look for clusters on this machine, and fail where there are several
    address = ray.get_runtime_context().gcs_address
    try:
        actors = list_actors(
            address=address,
            filters=[("class_name", "=", CONTROLLER), ("state", "!=", "DEAD")],
            limit=1000,
            timeout=LIMIT_S,
        )
        jobs = list_jobs(address=address, limit=10000, timeout=LIMIT_S) if actors else []
    except (RayStateApiException, OSError) as error:
        raise EnvironmentBroken(
            f"the cluster does not say which runs are alive ({type(error).__name__}): look at `make status`."
        ) from None
    requests = {str(job.job_id): run_of(str(job.entrypoint or "")) for job in jobs if job.job_id}
    found = [requests.get(str(actor.job_id)) for actor in actors]
    return Alive(tuple(sorted({run for run in found if run})), sum(1 for run in found if not run))


def dead(run: str, limit_s: float = 30.0) -> bool:
    """Let go of the controllers of this job's own fits, and wait until run `run` is not alive any more.

    Ray's handler of Ctrl-C, set by `fit` and never taken back, holds the controller (380 MB) until the driver ends.

    Returns:
        Whether it is dead within the limit.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()
    end = time.monotonic() + limit_s
    while live_runs().holds(run):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def run_of(entrypoint: str) -> str | None:
    """The run's name in the entry point of one of the lab's jobs (`... -m lab.observe MODULE REQUEST`); else None."""
    try:
        words = shlex.split(entrypoint)
        request = json.loads(words[words.index("lab.observe") + 2])
        return str(request["run"])
    except (ValueError, IndexError, KeyError, TypeError):
        return None

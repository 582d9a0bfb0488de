"""What a job's process sets before `import ray`. Ray forwards the `RAY_TRAIN_*` ones to controller and workers."""

from __future__ import annotations

POLL_INTERVAL_S = 0.1
COLLECTIVE_TIMEOUT_S = 30.0
START_TIMEOUT_S = 60.0
TORCH_TIMEOUT_S = 60.0


def driver_environment() -> dict[str, str]:
    """Variables for the driver's process (names checked on Ray 2.60, ray/train/v2/_internal/constants.py).

    A user's own value wins: apply with `os.environ.setdefault`.
    """
    return {
        # a report returns once the controller has polled: 2 s apart by default, so each epoch would cost 2 s
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(POLL_INTERVAL_S),
        # a rank that never reports is named after this long, instead of waited for without end (pitfall F1)
        "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": str(COLLECTIVE_TIMEOUT_S),
        "RAY_TRAIN_COLLECTIVE_WARN_INTERVAL_S": "10",
        # a demand that the cluster cannot meet ends, with controller_failure_limit=0 (pitfall F2)
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(START_TIMEOUT_S),
        # else every line of a rank comes twice, and equal lines of several ranks once (pitfall K7)
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
        "RAY_DEDUP_LOGS": "0",
        # helper actors that the lab does not use; together about 1 s of each start
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_METRICS_ENABLED": "0",
    }

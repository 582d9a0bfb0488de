"""Imports what a node's processes import, so that the image holds byte code for these modules and no others.

Byte code for everything would cost 300 MB; none at all would cost seconds at each start.
"""

import importlib
import pkgutil

# fmt: off
USED = [
    "minio", "pandas", "psutil", "pyarrow.dataset", "pyarrow.fs", "pyarrow.parquet", "pydantic_settings",
    "requests", "rich", "s3fs", "torch", "torch.distributed", "torch.distributed.algorithms.join",
    "torch.nn.parallel", "torch.utils.data", "torch.utils.data.distributed", "torch._dynamo", "ray",
    "ray.data", "ray.train", "ray.train.torch", "ray.train.v2.api.data_parallel_trainer", "ray.tune",
    "ray.tune.integration.ray_train", "ray.job_submission", "ray.scripts.scripts",
    "ray._private.log_monitor", "ray._private.workers.default_worker", "ray._private.workers.setup_worker",
    "ray.autoscaler._private.monitor", "ray.dashboard.agent", "ray.dashboard.dashboard",
    "ray.dashboard.head", "ray._private.runtime_env.agent.main",
    "ray._private.runtime_env.agent.runtime_env_agent", "ray.util.state", "typer", "yaml",
]
# fmt: on

names = [*USED]
for package in ("ray.dashboard.modules", "ray.train.v2._internal"):
    found = pkgutil.walk_packages(
        importlib.import_module(package).__path__, f"{package}.", onerror=lambda _: None
    )
    names += [module.name for module in found if "test" not in module.name]
for name in names:
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an optional module may fail in any way; then no byte code
        print(f"warm: {name} is left out: {type(error).__name__}: {str(error)[:80]}")

"""The reference loop's work in plain torch, for `torchrun`: same data, model, batch, optimizer; no Ray.

    torchrun --nproc-per-node 2 -m lab.experiments.torchrun_script FOLDER EPOCHS

Each rank writes `FOLDER/rank-<r>.json` with `first_step_at` and `finished` (seconds since 1970) and the last `loss`.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lab.training.batch import worker_batch_size
from lab.training.data import digits
from lab.training.models import build_model

GLOBAL_BATCH = 64
SEED = 0
TIMEOUT_S = 60


def main(folder: Path, epochs: int) -> None:
    """Train for `epochs` on this rank and write what it saw."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    dataset = digits("train")
    sampler = DistributedSampler(dataset, seed=SEED)
    loader = DataLoader(dataset, batch_size=worker_batch_size(GLOBAL_BATCH, world_size), sampler=sampler)
    model = DistributedDataParallel(build_model("small-cnn", SEED))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    first_step_at: float | None = None
    last = float("nan")
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y, _ in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if first_step_at is None:
                first_step_at = time.time()
            last = float(loss.detach())
        scheduler.step()
    seen = {"rank": rank, "first_step_at": first_step_at, "finished": time.time(), "loss": last}
    (folder / f"rank-{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""The job of lesson `shards-ray-data`: Ray Data's shards as ranks of Ray Train get them, in three fits."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import ray.data
import ray.train
import torch
import torch.distributed as dist
from ray.data import DataContext, ExecutionOptions, ExecutionResources

from lab.cluster import ROLE_LABEL
from lab.errors import EnvironmentBroken, UserError
from lab.observe.jitter import jitter
from lab.observe.job import Job, say
from lab.observe.training import outcome_json
from lab.storage import Storage
from lab.training.records import read_observations
from lab.training.report import join_run, observe_rank
from lab.training.run import Outcome, fit
from lab.training.steps import plan_steps
from lab.training.streams import agree_on_steps, check_columns, full_batches

FILES = 20
"""Parquet files of the lesson's own data: one block of the stream each."""
EVALUATION_ROWS = 50
SMALL_WORKERS = 3
RAGGED = {"ragged-a": (30, 10), "ragged-b": (7, 7, 7, 7, 12)}
"""Rows of the blocks, repeated once a rank: the two inputs of pitfall D5."""
RAGGED_BATCH = 8


@dataclass(frozen=True)
class Case:
    """How a rank reads one of its data sets.

    `shuffle`: local shuffle with a buffer of one batch. `steps`: full batches to do, None: take what comes.
    """

    name: str
    batch: int
    epochs: int = 1
    shuffle: bool = False
    steps: int | None = None


def observe(job: Job) -> dict[str, Any]:
    """Two runs on `workers` ranks and one on 3; what each rank got from each of its data sets, row by row.

    In the quick form the second and third are the shards alone, without ranks.
    """
    context = DataContext.get_current()
    context.enable_progress_bars = False
    # the new Parquet reader of Ray 2.60 starts 32 actors for footers in every epoch, on any node whatever the labels
    context.use_datasource_v2 = False
    column = str(job.params["column"])
    source, ids, where = _source(job, column)
    rows, workers, batch = len(ids), job.workers, int(job.params["worker_batch"])
    plan = plan_steps(rows, workers, batch, "--rows")
    say(f"{where}: {rows} rows; {plan}")
    rest = _rest(job, rows + 3)
    ragged = {name: _blocks(sizes * workers) for name, sizes in RAGGED.items()}
    plans = {
        "train": plan,
        "rest": plan_steps(rows + 3, workers, batch),
        "odd": plan_steps(17, SMALL_WORKERS, 2),
        **{name: plan_steps(sum(RAGGED[name]) * workers, workers, RAGGED_BATCH) for name in RAGGED},
    }
    steps = {name: None if job.broken("ray-defaults") else plans[name].steps for name in RAGGED}
    cases = [
        Case("train", batch, epochs=2),
        Case("ordered", batch),
        *(Case(name, RAGGED_BATCH, shuffle=True, steps=steps[name]) for name in RAGGED),
        Case("evaluation", batch),
        Case("words", batch),
    ]
    data = {
        "train": source,
        "ordered": source,
        **ragged,
        "evaluation": _blocks((EVALUATION_ROWS,)),
        "words": ray.data.from_arrow(_words()),
    }
    # the quick form starts ranks once: what it asks of the other two runs is how the rows are cut and ordered
    again = _split if job.quick else _run
    runs = [
        _run(job, f"{job.run}-1", workers, cases, data),
        again(
            job,
            f"{job.run}-2",
            workers,
            [Case("ordered", batch), Case("rest", batch)],
            {"ordered": source, "rest": rest},
        ),
    ]
    small = again(
        job,
        f"{job.run}-small",
        SMALL_WORKERS,
        [Case("odd", 2), Case("few", 1)],
        {"odd": _blocks((17,)), "few": _blocks((2,))},
    )
    return {
        "source": {"parquet": where, "ids": ids, "rest": rows + 3},
        "plans": {
            name: {**asdict(one), "steps": one.steps, "left_out": one.left_out} for name, one in plans.items()
        },
        "runs": runs,
        "small": small,
        "refusals": {
            "few": _refusal(lambda: plan_steps(2, SMALL_WORKERS, 1)),
            "words": _refusal(lambda: check_columns(*_schema(data["words"]), ["word"], "--column")),
            "missing": _refusal(lambda: check_columns(*_schema(data["words"]), ["label"], "--column")),
        },
    }


def _data_config(job: Job, used: Iterable[str]) -> ray.train.DataConfig:
    whole = {"evaluation", "words", *(["train"] if job.broken("not-split") else [])}
    # the same jitter that a real pipeline has decides the order of blocks, unless it is preserved
    preserved = set() if job.broken("ray-defaults") else {"ordered"}
    on_head = {"rest", *(["train", "ordered"] if str(job.params["parquet"]).startswith("/") else [])}
    options = {
        key: ExecutionOptions(
            preserve_order=key in preserved or key in RAGGED,
            # two blocks in the making at once: enough to get ahead of the ranks, and few processes to start
            resource_limits=ExecutionResources.for_limits(cpu=2),
            # the pipeline keeps to the nodes that have the files, else to the ranks' own: so a cluster whose ranks
            # take every CPU is refused before its pipeline starves (pitfall D7)
            label_selector={ROLE_LABEL: "head" if key in on_head else "worker"},
        )
        for key in used
    }
    return ray.train.DataConfig(
        datasets_to_split=[key for key in used if key not in whole], execution_options=options
    )


def _run(job: Job, name: str, workers: int, cases: list[Case], data: Mapping[str, Any]) -> dict[str, Any]:
    """One fit that reads `cases`, each from the data set of its name."""
    used = {case.name: data[case.name] for case in cases}
    say(f"{name}: {workers} ranks read {', '.join(used)}")
    storage = job.storage()
    outcome = fit(
        read_shards,
        {"cases": [asdict(case) for case in cases]},
        storage=storage,
        name=name,
        workers=workers,
        role="worker",
        fresh=True,
        datasets=used,
        dataset_config=_data_config(job, used),
        say=lambda line: None,
    )
    if outcome.error:
        raise EnvironmentBroken(f"run {name} ended early: {outcome.error.kind}: {outcome.error.message}")
    return {"outcome": outcome_json(outcome), "ranks": _ranks(storage, outcome)}


def _split(job: Job, name: str, workers: int, cases: list[Case], data: Mapping[str, Any]) -> dict[str, Any]:
    """The same shards without a fit: cut by the `DataConfig` with which Ray Train cuts them, each read by a thread."""
    used = {case.name: data[case.name] for case in cases}
    say(f"{name}: the shards of {workers} ranks, read without them: {', '.join(used)}")
    began = time.monotonic()
    shards = _data_config(job, used).configure(used, workers, None, None)
    # every case has a pipeline of its own, so no rank's thread may wait for another's end of a case
    with ThreadPoolExecutor(workers * len(cases)) as pool:
        reading = [{case.name: pool.submit(_read, own[case.name], case) for case in cases} for own in shards]
        seen = [{name: one.result() for name, one in cases_of.items()} for cases_of in reading]
    return {
        "outcome": {"seconds": round(time.monotonic() - began, 2), "error": None},
        "ranks": [
            {"rank": rank, "world_size": workers, "cases": cases_of} for rank, cases_of in enumerate(seen)
        ],
    }


def _ranks(storage: Storage, outcome: Outcome) -> list[dict[str, Any]]:
    kept = ("rank", "world_size", "cases")
    rows = read_observations(storage, outcome.name, outcome.attempts - 1) if outcome.attempts else []
    return [{key: row[key] for key in kept} for row in rows]


def read_shards(config: dict[str, Any]) -> None:
    """The training function: read every case to its end and hand back which rows came, in which batches."""
    rank = join_run()
    seen: dict[str, Any] = {}
    for values in config["cases"]:
        case = Case(**values)
        shard = ray.train.get_dataset_shard(case.name)
        try:
            seen[case.name] = _read(shard, case)
        except TypeError as error:  # Ray's own answer to a column that cannot become a tensor
            seen[case.name] = {"error": f"{type(error).__name__}: {error}"}
    observe_rank(rank, {"cases": seen})


def _read(shard: Any, case: Case) -> dict[str, Any]:
    options: dict[str, Any] = {"batch_size": case.batch}
    if case.shuffle:
        options |= {"local_shuffle_buffer_size": case.batch, "local_shuffle_seed": 1}
    epochs = [_epoch(shard.iter_torch_batches(**options)) for _ in range(case.epochs)]
    found: dict[str, Any] = {"epochs": epochs}
    if case.shuffle:
        agreed = agree_on_steps(case.steps) if case.steps is not None else []
        batches = shard.iter_torch_batches(**options)
        cut = full_batches(batches, case.batch, case.steps) if case.steps is not None else batches
        found |= {"agreed": agreed, "steps": _epoch(cut, together=case.steps is not None)}
    return found


def _epoch(batches: Iterable[Mapping[str, torch.Tensor]], together: bool = False) -> dict[str, Any]:
    """The rows of one epoch, in order, with the sizes of its batches and when (Unix seconds) the first one came.

    Args:
        together: every step is a collective, as DDP's would be: it hangs unless all ranks do the same steps.
    """
    ids: list[int] = []
    sizes: list[int] = []
    first: float | None = None
    made = 0.0
    for batch in batches:
        first = first or time.time()
        ids += batch["id"].tolist()
        sizes.append(len(batch["id"]))
        if "made" in batch:
            made = max(made, float(batch["made"].max()))
        if together:
            dist.all_reduce(torch.ones(1))
    return {"ids": ids, "sizes": sizes, "first_at": first, "last_made": made or None}


def _source(job: Job, column: str) -> tuple[Any, list[int], str]:
    """The stream, the ids that are in it (read without Ray Data), and where it lies.

    Raises:
        UserError: no Parquet files there, or a column that is missing or no tensor.
    """
    uri = str(job.params["parquet"])
    if not uri:
        uri = f"{job.storage().location}/{job.run}-data"
        storage = job.storage()
        _write(storage, f"{job.run}-data", _table(int(job.params["rows"])), FILES)
        files = [storage.at(entry.path) for entry in storage.files(f"{job.run}-data")]
    else:
        storage, files = _found(job, uri)
    schema = pyarrow.parquet.read_schema(files[0], filesystem=storage.filesystem)
    check_columns(schema.names, schema.types, ["id", column], "--column")
    ids = [
        int(value)
        for file in files
        for value in pyarrow.parquet.read_table(file, columns=["id"], filesystem=storage.filesystem)[
            "id"
        ].to_pylist()
    ]
    stream = _parquet(storage, files, ["id", column])
    return stream.map_batches(jitter, batch_size=None), ids, uri


def _found(job: Job, uri: str) -> tuple[Storage, list[str]]:
    storage = job.storage(uri)
    try:
        files = [storage.at(entry.path) for entry in storage.files() if entry.path.endswith(".parquet")]
    except OSError as error:
        raise UserError(
            f"--parquet={uri} cannot be read ({str(error).splitlines()[0][:120]}): the bucket is missing or not the "
            "lab's; use s3://BUCKET/PREFIX of files that these keys reach."
        ) from None
    if not files:
        raise UserError(f"--parquet={uri} holds no .parquet file: name a folder or prefix that does.")
    return storage, files


def _parquet(storage: Storage, files: list[str], columns: list[str]) -> Any:
    """Read files by the storage's own filesystem, on nodes that have them: local ones are on the driver's disk."""
    here = {ROLE_LABEL: "head" if storage.location.kind == "local" else "worker"}
    # a look into the files comes first, by tasks that know no other label selector than the context's
    DataContext.get_current().execution_options.label_selector = here
    return ray.data.read_parquet(
        files,
        filesystem=storage.filesystem,
        columns=columns,
        override_num_blocks=len(files),
        label_selector=here,
    )


def _rest(job: Job, rows: int) -> Any:
    local = job.storage(f"{job.local_root}/data")
    _write(local, job.run, _table(rows), 5)
    return _parquet(local, [local.at(entry.path) for entry in local.files(job.run)], ["id", "x"])


def _write(storage: Storage, folder: str, table: pyarrow.Table, files: int) -> None:
    size = -(-table.num_rows // files)
    for number, start in enumerate(range(0, table.num_rows, size)):
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(table.slice(start, size), buffer)
        storage.write(f"{folder}/part-{number:03d}.parquet", buffer.getvalue())


def _table(rows: int, start: int = 0) -> pyarrow.Table:
    ids = np.arange(start, start + rows)
    return pyarrow.table({"id": ids, "x": (ids / 1000).astype(np.float32), "word": [f"row {i}" for i in ids]})


def _blocks(sizes: tuple[int, ...]) -> Any:
    """A data set with one block of each size, with consecutive ids."""
    starts = np.cumsum([0, *sizes[:-1]])
    return ray.data.from_arrow(
        [_table(size, int(start)).drop_columns(["word"]) for size, start in zip(sizes, starts, strict=True)]
    )


def _words() -> pyarrow.Table:
    return _table(4)


def _schema(data: Any) -> tuple[list[str], list[Any]]:
    schema = data.schema()
    return list(schema.names), list(schema.types)


def _refusal(attempt: Any) -> dict[str, Any]:
    """What the lab answers, as `lab.lessons.run.Host.refusal` does from the host."""
    began = time.monotonic()
    try:
        attempt()
    except UserError as error:
        return {
            "refused": True,
            "message": str(error),
            "exit": error.exit_code,
            "seconds": time.monotonic() - began,
        }
    return {"refused": False, "message": "", "exit": 0, "seconds": time.monotonic() - began}

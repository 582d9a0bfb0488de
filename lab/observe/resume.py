"""The job of lesson `resume`: six epochs straight against stopped ones; what each part of the state is for."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray.train

from lab.errors import EnvironmentBroken, UserError
from lab.leftovers import SNAPSHOT
from lab.observe.job import Job, role_cpus, say
from lab.observe.own_run import start_clean
from lab.observe.restore import restored as restored_without_ray
from lab.observe.training import outcome_json
from lab.storage import Storage
from lab.training import state as states
from lab.training.checkpoints import own_directory
from lab.training.loop import LoopConfig, Training, restored, train_loop
from lab.training.records import ATTEMPTS, read_epoch_log, read_observations
from lab.training.report import join_run, observe_rank
from lab.training.run import Outcome, delete_run, fit, resume_point

FINGERPRINTS = ("parameters_sha256", "optimizer_sha256", "scheduler_sha256", "rng_sha256")

Said = list[str]


class Unreported(Training):
    """The reference loop without its reports: nothing is saved, nothing is logged."""

    def _report(self, metrics: dict[str, Any], done: int) -> None:
        pass

    def finish(self) -> dict[str, Any]:
        """Train the epochs that are left; returns what is compared."""
        while self.epoch < self.settings.epochs:
            self.do_epoch()
        return compared(self.seen())


def compared(seen: dict[str, Any]) -> dict[str, Any]:
    """What two runs are compared by: digests of all that a rank holds, its metric history, its sample order."""
    return {
        **{name: seen[name] for name in FINGERPRINTS},
        "history": seen["history"],
        "order": [
            {"epoch": one["epoch"], "samples": len(one["ids"]), "sha256": _digest(one["ids"])}
            for one in seen["ids"]
        ],
        "resumed_from": seen["resumed_from"],
        "pid": seen["pid"],
    }


def first_half(config: dict[str, Any]) -> None:
    """The first epochs, reported; then, if asked, all epochs in one go, as the reference."""
    settings = LoopConfig.from_dict(config["loop"])
    start = replace(settings, epochs=config["half"])
    rank = join_run()
    training = Training(start, rank, restored(start))
    training.run()
    seen = compared(training.seen())
    straight = Unreported(settings, rank).finish() if config["straight"] else None
    observe_rank(rank, seen | {"straight": straight})


def second_half(config: dict[str, Any]) -> None:
    """The other epochs; then, if asked, the same again from the same checkpoint without one part of it."""
    settings = LoopConfig.from_dict(config["loop"])
    rank = join_run()
    checkpoint = ray.train.get_checkpoint()
    with tempfile.TemporaryDirectory() as scratch:
        saved = Path(scratch, "saved")
        if checkpoint is not None:
            # now: after the first report, get_checkpoint() is the newer one
            with own_directory(checkpoint) as folder:
                shutil.copytree(folder, saved)
        training = Training(settings, rank, restored(settings))
        training.run()
        seen = compared(training.seen())
        if config["parts"]:
            kept = settings.saved_parts
            seen["parts"] = {
                left_out: _without(
                    settings, rank, saved, [p for p in kept if p != left_out or config["leave_nothing_out"]]
                )
                for left_out in ("nothing", *states.PARTS)
            }
            seen["flipped"] = _flip_a_byte(min(saved.glob("*.pt")), saved)
    observe_rank(rank, seen)


def _without(settings: LoopConfig, rank: Any, saved: Path, kept: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as other:
        states.save(Path(other), states.load(saved, settings.saved_parts), kept)
        state = states.load(Path(other), kept)
    return Unreported(settings, rank, state).finish()


def _flip_a_byte(path: Path, folder: Path) -> str:
    """What `load` answers when one byte of a file has changed and its size has not."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    try:
        states.load(folder, ())
    except states.DamagedCheckpoint as error:
        return str(error).replace(str(folder), "CHECKPOINT")
    return ""


def other_size(config: dict[str, Any]) -> None:
    """Go on with another number of ranks: first with the setting that refuses, then keeping the global batch."""
    settings = LoopConfig.from_dict(config["loop"])
    rank = join_run()
    saved = restored(settings)
    refused = ""
    try:
        Training(replace(settings, other_world_size="refuse"), rank, saved)
    except UserError as error:
        refused = str(error)
    training = Training(settings, rank, saved)
    loaded = states.tensors_sha256(states.bare(training.model).state_dict())
    step = training.step
    training.run()
    seen = compared(training.seen())
    observe_rank(rank, seen | {"refused": refused, "loaded_sha256": loaded, "steps": training.step - step})


def observe(job: Job) -> dict[str, Any]:
    """Two halves and a crash on the run's storage, another world size, damaged copies; two halves elsewhere too."""
    storage = job.storage(client=job.params["s3_client"])
    names = {which: f"{job.run}-{which}" for which in ("crash", "other-size", "damaged")}
    start_clean(storage, job, job.run, *names.values())
    epochs, half = int(job.params["epochs"]), int(job.params["epochs"]) // 2
    left_out = "optimizer" if job.broken("no-optimizer") else job.params["leave_out"]
    loop = LoopConfig(
        epochs=epochs,
        global_batch=int(job.params["global_batch"]),
        seed=job.seed,
        dropout=0.2,  # without it, no random number is drawn while training, and the generators would not matter
        scheduler_step=half - 1,  # not a divisor of half: else a scheduler begun anew would step in time
        record_epochs=epochs,
        saved_parts=tuple(part for part in states.PARTS if part != left_out),
    )
    crash_epoch = epochs - 2
    batches = 1536 // loop.global_batch

    say(f"{half} epochs on {storage.location}, then {epochs} in one go in the same processes")
    first = _first(storage, job, loop, half, straight=True)
    if not first["ranks"] or first["outcome"]["error"]:
        raise EnvironmentBroken("the first half failed, so there is nothing to resume: see the lines above.")
    content = _checkpoints_of(storage, job.run)
    _write_run(storage, names["crash"], content)
    _write_run(storage, names["other-size"], content)

    say("damaged copies of that run")
    damage = _damage(storage, names["damaged"], content, loop, job.workers)

    other_workers = 1 if job.workers > 1 else 2
    crash_said: Said = []

    def crashed() -> Outcome:
        say(f"a crash in the middle of epoch {crash_epoch}, under a name that --fresh clears first")
        return fit(
            train_loop,
            replace(loop, crash_at=(crash_epoch, batches // 2)).to_dict(),
            storage=storage,
            name=names["crash"],
            workers=job.workers,
            role="head",
            fresh=True,
            max_failures=1,
            say=_both(crash_said),
        )

    with ThreadPoolExecutor(1) as beside:  # a fit is mostly start-up: two overlap well
        crashing = beside.submit(crashed)
        if sum(role_cpus("head")) < 2 * job.workers:
            crashing.result()
        say("the other epochs, by the same name; then without each part of the state")
        second = _second(storage, job, loop, parts=True)
        say(f"the saved state of {job.workers} ranks on {other_workers}")
        other = fit(
            other_size,
            {"loop": replace(loop, epochs=half + 1).to_dict()},
            storage=storage,
            name=names["other-size"],
            workers=other_workers,
            role="head",
            say=_both([]),
        )
    crash = crashing.result()
    for outcome in (crash, other):
        _said_if_failed(outcome)
    newest = first["outcome"]["checkpoint"]
    return {
        "half": half,
        "crash_at": [crash_epoch, batches // 2],
        "straight": [rank["straight"] for rank in first["ranks"]],
        "halves": [_halves(storage, job, first, second), *_elsewhere(job, storage, loop, half)],
        "parts": [rank["parts"] for rank in second["ranks"]],
        "flipped": [rank["flipped"] for rank in second["ranks"]],
        "crash": {
            "outcome": outcome_json(crash),
            "ranks": [compared(rank) for rank in read_observations(storage, names["crash"], 1)],
            "log": [[row["attempt"], row["epoch"]] for row in read_epoch_log(storage, names["crash"])],
            "said": crash_said,
        },
        "other_size": {
            "workers": other_workers,
            "outcome": outcome_json(other),
            "ranks": read_observations(storage, names["other-size"]),
        },
        "damage": damage,
        "plain": restored_without_ray(storage, job.run, newest)
        if newest and "model" in loop.saved_parts
        else None,
        "resume_point_after": resume_point(storage, job.run),
    }


def _both(said: Said) -> Callable[[str], None]:
    def speak(line: str) -> None:
        said.append(line)
        say(line)

    return speak


def _first(storage: Storage, job: Job, loop: LoopConfig, half: int, straight: bool) -> dict[str, Any]:
    outcome = fit(
        first_half,
        {"loop": loop.to_dict(), "half": half, "straight": straight},
        storage=storage,
        name=job.run,
        workers=job.workers,
        role="head",
        say=say,
    )
    return {"outcome": outcome_json(outcome), "ranks": _ranks(storage, outcome)}


def _second(storage: Storage, job: Job, loop: LoopConfig, parts: bool) -> dict[str, Any]:
    said: Said = []
    outcome = fit(
        second_half,
        {"loop": loop.to_dict(), "parts": parts, "leave_nothing_out": job.broken("nothing-left-out")},
        storage=storage,
        name=job.run,
        workers=job.workers,
        role="head",
        say=_both(said),
    )
    return {"outcome": outcome_json(outcome), "ranks": _ranks(storage, outcome), "said": said}


def _said_if_failed(outcome: Outcome) -> Outcome:
    if outcome.error:
        say(f"run {outcome.name} failed: {outcome.error.kind}: {outcome.error.message}")
    return outcome


def _ranks(storage: Storage, outcome: Outcome) -> list[dict[str, Any]]:
    newest = _said_if_failed(outcome).attempts - 1
    return read_observations(storage, outcome.name, newest) if newest >= 0 else []


def _halves(storage: Storage, job: Job, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    inner = ("straight", "parts", "flipped")

    def plain(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in rank.items() if key not in inner} for rank in ranks]

    return {
        "storage": str(storage.location),
        "client": type(storage.filesystem).__name__,
        "first": first | {"ranks": plain(first["ranks"])},
        "second": second | {"ranks": plain(second["ranks"])},
        "log": [[row["attempt"], row["epoch"]] for row in read_epoch_log(storage, job.run)],
    }


def _elsewhere(job: Job, own: Storage, loop: LoopConfig, half: int) -> list[dict[str, Any]]:
    """The two halves on the other kinds of storage, when the lesson is asked for all."""
    if not job.params["all_storages"]:
        return []
    s3 = f"s3://{job.bucket}/runs"
    kinds = [
        job.storage(f"{job.local_root}/runs"),
        job.storage(s3, "pyarrow"),
        job.storage(f"{s3}-s3fs", "s3fs"),
    ]
    found = []
    for storage in kinds:
        if type(storage.filesystem) is type(own.filesystem):
            continue
        say(f"the two halves on {storage.location} by {type(storage.filesystem).__name__}")
        start_clean(storage, job, job.run)
        first = _first(storage, job, loop, half, straight=False)
        found.append(_halves(storage, job, first, _second(storage, job, loop, parts=False)))
    return found


def _checkpoints_of(storage: Storage, run: str) -> dict[str, bytes]:
    """The snapshot and every checkpoint's files, by path below the run's folder."""
    paths = [entry.path for entry in storage.files(run)]
    return {
        path.removeprefix(f"{run}/"): storage.read(path)
        for path in paths
        if path == f"{run}/{SNAPSHOT}" or path.startswith(f"{run}/checkpoint_")
    }


def _write_run(storage: Storage, run: str, content: dict[str, bytes]) -> None:
    for path, data in content.items():
        storage.write(f"{run}/{path}", data)


def _damage(
    storage: Storage, run: str, content: dict[str, bytes], loop: LoopConfig, workers: int
) -> list[dict[str, Any]]:
    """What resuming answers to copies of a run that are damaged, each in its own way."""
    latest = json.loads(content[SNAPSHOT])["latest_checkpoint_result"]["checkpoint_dir_name"]
    tensors, manifest = f"{latest}/{loop.saved_parts[0]}.pt", f"{latest}/{states.MANIFEST}"
    progress = f"{latest}/{states.PROGRESS}"

    def less(*gone: str) -> dict[str, bytes]:
        return {path: data for path, data in content.items() if not path.startswith(gone)}

    cases = {
        "the snapshot is cut short": (SNAPSHOT, content | {SNAPSHOT: content[SNAPSHOT][:-40]}),
        "the folder it names is gone": (latest, less(f"{latest}/")),
        "a file is missing": (tensors, less(tensors)),
        "a file is cut short": (progress, content | {progress: content[progress][:-40]}),
        "the manifest is missing": (manifest, less(manifest)),
    }
    answers = []
    for case, (names, copy) in cases.items():
        delete_run(storage, run)
        _write_run(storage, run, copy)
        message = ""
        try:
            fit(
                train_loop,
                loop.to_dict(),
                storage=storage,
                name=run,
                workers=workers,
                role="head",
                say=say,
            )
        except UserError as error:
            message = str(error)
        answers.append(
            {
                "case": case,
                "names": names,
                "message": message,
                "started": len(storage.files(f"{run}/{ATTEMPTS}")),
            }
        )
    delete_run(storage, run)
    return answers


def _digest(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()

"""What can be refused from the settings alone, before anything starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lab.errors import UserError
from lab.lessons.contract import Lesson, Params
from lab.storage import Location, check_name, parse_location


@dataclass(frozen=True)
class Shape:
    """The nodes that a lesson may use: `nodes` of `node_cpus` logical CPUs each, beside the head."""

    nodes: int
    node_cpus: int


def storage_location(lesson: Lesson, params: Params, local_root: str, bucket: str) -> Location:
    """Where the run is kept: what the user set, else the lesson's own default.

    Raises:
        UserError: the setting is malformed.
    """
    if params.storage:
        return parse_location(params.storage)
    default = f"s3://{bucket}/runs" if lesson.default_storage == "s3" else f"{local_root}/runs"
    return parse_location(default)


def check(lesson: Lesson, params: Params, shape: Shape) -> None:
    """Refuse what cannot fit or cannot work.

    Raises:
        UserError: the first thing wrong, in one sentence with setting, value and fix.
    """
    if params.name:
        check_name(params.name)
    if params.fresh and not params.name:
        raise UserError("LAB_FRESH=1 needs the run it shall delete: give --name NAME (LAB_NAME).")
    if params.workers < 1:
        raise UserError(f"LAB_WORKERS={params.workers} is not a world size: use 1 or more.")
    nodes = 1 if lesson.needs.role == "head" else shape.nodes
    if nodes < lesson.needs.nodes:
        raise UserError(
            f"LAB_NODES={shape.nodes} is too few for lesson {lesson.name}: it needs {lesson.needs.nodes} worker nodes; "
            f"`make down`, then NODES={lesson.needs.nodes}."
        )
    have = nodes * shape.node_cpus
    if params.workers > have:
        where = "the head" if lesson.needs.role == "head" else f"{nodes} worker nodes"
        raise UserError(
            f"LAB_WORKERS={params.workers} does not fit: have {have} CPUs on {where}, need {params.workers} "
            f"(one a rank); use at most {have} workers, or more NODE_CPUS."
        )
    spare = lesson.needs.spare_cpus
    if params.workers > have - spare:
        raise UserError(
            f"LAB_WORKERS={params.workers} leaves too few CPUs for the data pipeline: have {have} CPUs, need "
            f"{params.workers + spare} (one a rank, {spare} for Ray Data, which would wait without end); "
            f"use at most {have - spare} workers, or more NODE_CPUS."
        )
    if params.workers < lesson.needs.nodes:
        raise UserError(
            f"LAB_WORKERS={params.workers} cannot be on {lesson.needs.nodes} nodes: use {lesson.needs.nodes} or more."
        )
    lesson.check(params)


def check_storage(lesson: Lesson, params: Params, location: Location, local_root: str, runtime: str) -> None:
    """Refuse a storage path that the lesson's nodes cannot all reach (pitfall S1).

    Raises:
        UserError: a local path for ranks on several nodes, or one outside what the containers keep.
    """
    if location.kind == "s3":
        return
    if lesson.needs.role == "worker" and not getattr(params, "shared_path", False):
        raise UserError(
            f"LAB_STORAGE={location} is a local path, but lesson {lesson.name} runs on several nodes (the head and the "
            f"workers), which share no disk: use s3://BUCKET/PREFIX (S3_ENDPOINT and S3_BUCKET name the store), or "
            "--shared-path if every node mounts that path."
        )
    if runtime == "compose" and not (location.path + "/").startswith(local_root.rstrip("/") + "/"):
        raise UserError(
            f"LAB_STORAGE={location} lies outside {local_root}, the only folder that the containers keep: "
            f"use a path below it, or s3://BUCKET/PREFIX."
        )
    if runtime == "embedded":
        _check_folder(Path(location.path))


def _check_folder(folder: Path) -> None:
    """Raises: UserError: a local path that is no folder of this machine's, nor can become one."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"LAB_STORAGE={folder}: {there} is a file, not a folder: give a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"LAB_STORAGE={folder}: you may not write to {there}: give a folder of yours.")


def warnings(params: Params, cores: int) -> list[str]:
    """What is allowed but worth a word."""
    if params.workers > cores:
        return [
            f"{params.workers} ranks on a host with {cores} cores: slower, still correct "
            "(they take turns on the cores)."
        ]
    return []

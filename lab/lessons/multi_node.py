"""Lesson `multi-node`: ranks on several nodes need storage that all of them reach: S3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import UserError
from lab.lessons.contract import Break, Claim, Document, Finding, Lesson, Needs, Params, not_shown
from lab.lessons.judging import divides, equal, refused
from lab.lessons.run import Host
from lab.report.plots import figure
from lab.store.host import reach, read_checkpoint

QUOTED = "A local path on the head node is not accessible by worker nodes"
"""Of Ray 2.60's own message (`ray.train.v2._internal.execution.storage`)."""
SHARED_DISK = "the nodes share one disk here"
OWN_PATH = "the run's storage is a local path that the nodes share"


@dataclass(frozen=True)
class MultiNode(Params):
    """`epochs` passes over 1,536 images, `global_batch` samples a step over all ranks."""

    epochs: int = field(default=4, metadata={"help": "passes over the training set"})
    global_batch: int = field(default=64, metadata={"help": "samples per step, over all ranks"})
    shared_path: bool = field(
        default=False, metadata={"help": "the nodes share the local storage path (proved first)"}
    )


def _check(params: MultiNode) -> None:
    if params.epochs < 1:
        raise UserError(f"--epochs={params.epochs} trains nothing: use 1 or more.")
    divides(params.global_batch, params.workers)


def _ranks(document: Document, which: str) -> list[Mapping[str, Any]]:
    ranks: list[Mapping[str, Any]] = document[which]["ranks"]
    if not ranks:
        error = document[which]["outcome"]["error"]
        raise ValueError(f"no rank of {which} finished: {error and error['message']}")
    return ranks


def _nodes(document: Document) -> Finding:
    nodes = {rank["node_id"] for rank in _ranks(document, "several")}
    driver = document["driver_node"] in nodes
    return Finding(
        {"nodes": ">= 2", "the driver's": False},
        {"nodes": len(nodes), "the driver's": driver},
        len(nodes) >= 2 and not driver,
    )


def _same_weights(document: Document) -> Finding:
    several = {rank["parameters_sha256"] for rank in _ranks(document, "several")}
    alone = {rank["parameters_sha256"] for rank in _ranks(document, "alone")}
    epochs = [
        rank["history"][-1]["epoch"] for which in ("several", "alone") for rank in _ranks(document, which)
    ]
    return Finding(
        "one digest for both",
        {"several nodes": sorted(d[:12] for d in several), "one node": sorted(d[:12] for d in alone)},
        several == alone and len(several) == 1 and len(set(epochs)) == 1,
    )


def _from_host(document: Document) -> Finding:
    if document["host"]["checkpoint"] is None:
        return not_shown(OWN_PATH)
    found = document["host"]["checkpoint"]
    return Finding(
        "every file as its manifest says",
        found,
        found["files"] >= 5 and found["bytes"] > 0 and not found["wrong"],
    )


def _reach(document: Document) -> Finding:
    if document["host"]["reach"] is None:
        return not_shown(OWN_PATH)
    answers = document["host"]["reach"]
    return equal(
        dict.fromkeys(("list another bucket", "make a bucket", "read another bucket"), "AccessDenied"),
        answers,
    )


def _restored(document: Document) -> Finding:
    found = document["restored"]
    ranks = _ranks(document, "several")
    metrics = document["several"]["outcome"]["metrics"]
    return equal(
        {
            "weights": ranks[0]["parameters_sha256"][:12],
            "accuracy": metrics["accuracy"],
            "epochs": document["params"]["epochs"],
            "without Ray": True,
        },
        {
            "weights": found["parameters_sha256"][:12],
            "accuracy": found["accuracy"],
            "epochs": found["epoch"],
            "without Ray": not found["ray_imported"],
        },
    )


def _local_refused(document: Document) -> Finding:
    return refused(document["host"]["local_path"], "LAB_STORAGE", "S3_ENDPOINT", "the head and the workers")


def _local_fails(document: Document) -> Finding:
    if not document["unshared_nodes"]:
        return not_shown(SHARED_DISK)
    error = document["local_path"]["error"]
    text = " ".join(error["text"].split()) if error else "it ended well"
    at = text.find(QUOTED)
    return Finding(QUOTED, text[at : at + len(QUOTED)] if at >= 0 else text, at >= 0)


def _look(host: Host, document: dict[str, Any]) -> dict[str, Any]:
    outcome = document["several"]["outcome"]
    on_s3 = document["storage"].startswith("s3://")
    readable = on_s3 and outcome["checkpoint"]
    path = f"{document['storage'].removeprefix('s3://')}/{document['run']}/{outcome['checkpoint']}"
    return {
        "checkpoint": read_checkpoint(host.store, path) if readable else None,
        "reach": reach(host.store) if on_s3 else None,
        "local_path": host.refusal(storage=f"{host.access.local_root}/runs", shared_path=False),
    }


def _measurements(document: Document) -> dict[str, Any]:
    return {
        "accuracy": document["several"]["outcome"]["metrics"]["accuracy"],
        "fit_seconds_several_nodes_s3": document["several"]["outcome"]["seconds"],
        "fit_seconds_one_node_local": document["alone"]["outcome"]["seconds"],
        "checkpoint_bytes": sum(
            entry["size"]
            for entry in document["several"]["files"]
            if entry["path"].startswith(f"{document['several']['outcome']['checkpoint']}/")
        ),
    }


def _figures(document: Document, folder: Path) -> list[Path]:
    path = folder / "two-ways.png"
    with figure(path, columns=2) as (left, right):
        for which, style, label in (
            ("several", "o-", "several nodes, S3"),
            ("alone", "x--", "one node, local path"),
        ):
            rows = document[which]["epochs"]
            left.plot(
                [row["epoch"] for row in rows], [row["metrics"]["loss"] for row in rows], style, label=label
            )
        left.set(
            xlabel="epoch", ylabel="training loss (rank 0)", title="The same loss, wherever the ranks are"
        )
        left.xaxis.get_major_locator().set_params(integer=True)
        left.legend()
        nodes = {node["id"]: node for node in document["environment"]["nodes"]}
        names = [f"{node['role']}\n{node['ip']}" for node in nodes.values()]
        for offset, which, label in ((-0.2, "several", "several nodes"), (0.2, "alone", "one node")):
            counts = [sum(rank["node_id"] == node for rank in document[which]["ranks"]) for node in nodes]
            right.bar([index + offset for index in range(len(names))], counts, 0.4, label=label)
        right.set_xticks(range(len(names)), names)
        right.set(ylabel="ranks", title="Where the ranks were")
        right.yaxis.get_major_locator().set_params(integer=True)
        right.legend()
    return [path]


LESSON = Lesson(
    name="multi-node",
    title="ranks on several nodes, one shared store",
    idea=(
        "Ranks on several nodes have no disk in common, so checkpoints go to a store that every node, the driver and "
        "the next driver can reach. Where the ranks are changes nothing in what they compute."
    ),
    needs=Needs("worker", nodes=2),
    observe="multi_node",
    params=MultiNode,
    default_storage="s3",
    check=_check,
    quick={"epochs": 2},
    host=_look,
    claims=(
        Claim("nodes", "the ranks are on at least 2 distinct nodes, none on the driver's", _nodes),
        Claim("same-weights", "the final weights are bit-identical to those of one node", _same_weights),
        Claim(
            "from-host", "the checkpoint can be read from the host with the lab's keys", _from_host, OWN_PATH
        ),
        Claim("reach", "those keys reach the lab's bucket and nothing else", _reach, OWN_PATH),
        Claim("restored", "a fresh process without Ray restores the model from the store", _restored),
        Claim(
            "local-refused", "a local path on these nodes is refused before anything starts", _local_refused
        ),
        Claim(
            "local-fails", "with that check off, Ray fails as the lesson quotes", _local_fails, SHARED_DISK
        ),
    ),
    breaks=(
        Break("one-node", "puts the several-node ranks on the head", ("nodes",)),
        Break("other-seed", "gives the one-node run another seed", ("same-weights",)),
    ),
    measurements=_measurements,
    figures=_figures,
    seconds=(40, 45),
)

"""Lesson `context`: world, local and node rank in each placement, and what `prepare_model` does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.lessons.contract import Break, Claim, Document, Finding, Lesson, Needs
from lab.lessons.judging import equal
from lab.report.plots import COLOURS, figure

Row = tuple[int, int, int, str]
"""World rank, local rank, node rank, node (a letter, by node rank)."""


def expected_table(ranks: int, nodes: int) -> list[Row]:
    """Who each rank is when `ranks` fill `nodes` evenly: world ranks run through one node, then the next."""
    per_node = ranks // nodes
    return [
        (rank, rank % per_node, rank // per_node, "ABCDEFGHIJKLMNOP"[rank // per_node])
        for rank in range(ranks)
    ]


def seen_table(ranks: list[Mapping[str, Any]]) -> list[Row]:
    """The table that the ranks reported; nodes get letters as they first appear, by world rank."""
    in_order = sorted(ranks, key=lambda rank: rank["world_rank"])
    letters: dict[str, str] = {}
    for rank in in_order:
        letters.setdefault(rank["node_id"], "ABCDEFGHIJKLMNOP"[len(letters)])
    return [
        (rank["world_rank"], rank["local_rank"], rank["node_rank"], letters[rank["node_id"]])
        for rank in in_order
    ]


def _ranks(document: Document, placement: str) -> list[Mapping[str, Any]]:
    found = document["placements"][placement]
    ranks: list[Mapping[str, Any]] = found["ranks"]
    if not ranks:
        error = found["outcome"]["error"]
        raise ValueError(f"no rank of {placement} finished: {error and error['message']}")
    return ranks


def _table(document: Document, placement: str) -> Finding:
    ranks = _ranks(document, placement)
    asked = document["placements"][placement]["asked"]
    beside = any(rank["node_id"] == document["driver_node"] for rank in ranks)
    return equal(
        {"table": expected_table(**asked), "on the driver's node": placement == "one-node"},
        {"table": seen_table(ranks), "on the driver's node": beside},
    )


def _one_node(document: Document) -> Finding:
    return _table(document, "one-node")


def _spread(document: Document) -> Finding:
    return _table(document, "spread")


def _two_nodes_full(document: Document) -> Finding:
    return _table(document, "two-nodes-full")


def _driver(document: Document) -> Finding:
    answer = document["driver"]
    measured = f"{answer['raised']}: {answer['message']}" if answer["raised"] else f"gave a {answer['gave']}"
    return Finding("a RuntimeError", measured, answer["raised"] == "RuntimeError")


def _moved(document: Document) -> Finding:
    every = [rank for name in document["placements"] for rank in _ranks(document, name)]
    moved = [rank["moves"] == [rank["device"]] == rank["parameters_on"] for rank in every]
    return Finding(
        f"{len(every)} models asked once to move to their rank's device",
        f"{sum(moved)} models moved, to {', '.join(sorted({move for rank in every for move in rank['moves']})) or 'none'}",
        all(moved),
    )


def _wrapped(document: Document) -> Finding:
    expected = {
        name: ["DistributedDataParallel" if found["asked"]["ranks"] > 1 else None]
        for name, found in document["placements"].items()
    }
    measured = {
        name: sorted({rank["wrapped_in"] for rank in _ranks(document, name)}, key=str) for name in expected
    }
    return Finding(expected, measured, expected == measured and {None} < {v for [v] in expected.values()})


def _keys(document: Document) -> Finding:
    return equal(
        {"1 rank": ["bias", "weight"], "more": ["module.bias", "module.weight"]},
        {"1 rank": _ranks(document, "alone")[0]["keys"], "more": _ranks(document, "one-node")[0]["keys"]},
    )


def _use_gpu(document: Document) -> Finding:
    workers = float(document["params"]["workers"])
    devices = {rank["device"] for name in document["placements"] for rank in _ranks(document, name)}
    backends = {rank["backend"] for rank in _ranks(document, "one-node")}
    return equal(
        {
            "without": {"CPU": workers},
            "with": {"GPU": workers},
            "device": ["cpu"],
            "backend": ["gloo"],
        },
        {
            "without": document["use_gpu"]["without"],
            "with": document["use_gpu"]["with"],
            "device": sorted(devices),
            "backend": sorted(backends),
        },
    )


def _measurements(document: Document) -> dict[str, Any]:
    gpus, workers = document["use_gpu"]["cluster_gpus"], document["params"]["workers"]
    enough = gpus >= workers
    return {
        "gpus": gpus,
        "use_gpu_would": (
            f"give each of the {workers} ranks one of {gpus} GPUs: device cuda, backend nccl"
            if enough
            else f"wait in vain for {workers} GPUs: the cluster has {gpus}"
        ),
        "fit_seconds": {name: found["outcome"]["seconds"] for name, found in document["placements"].items()},
    }


_TITLES = {
    "alone": "One rank",
    "one-node": "One node",
    "spread": "Spread",
    "two-nodes-full": "Two full nodes",
}


def _figures(document: Document, folder: Path) -> list[Path]:
    path = folder / "placements.png"
    nodes = sorted(document["environment"]["nodes"], key=lambda node: (node["role"], node["ip"]))
    tables = {name: _ranks(document, name) for name in _TITLES}
    tallest = max(rank["local_rank"] for ranks in tables.values() for rank in ranks) + 1
    with figure(path, columns=len(_TITLES), size=(3.3, 0.9 + 0.75 * tallest)) as panels:
        for panel, (name, title) in zip(panels, _TITLES.items(), strict=True):
            for rank in tables[name]:
                column = [node["id"] for node in nodes].index(rank["node_id"])
                level = rank["local_rank"]
                colour = COLOURS[rank["node_rank"] % len(COLOURS)]
                panel.scatter(column, level, s=1500, marker="s", color=colour)
                words = f"world {rank['world_rank']}\nlocal {level}\nnode {rank['node_rank']}"
                panel.text(column, level, words, ha="center", va="center", color="white", fontsize=7)
            panel.set_xticks(range(len(nodes)), [f"{node['role']}\n{node['ip']}" for node in nodes])
            panel.set(title=title, xlim=(-0.6, len(nodes) - 0.4), ylim=(-0.6, tallest - 0.4), yticks=[])
            panel.spines["left"].set_visible(False)
    return [path]


LESSON = Lesson(
    name="context",
    title="who a rank is: world, local and node rank, device and wrapping",
    idea=(
        "Each worker learns from get_context() which of all ranks it is, which on its node, and which node that is; "
        "prepare_model moves its model to the rank's device and wraps it in DDP where there is more than one rank. "
        "The same training function so runs in every placement."
    ),
    needs=Needs("worker", nodes=2),
    observe="context",
    default_storage="s3",
    claims=(
        Claim("one-node", "on one node, the local rank is the world rank and the node rank is 0", _one_node),
        Claim(
            "spread",
            "spread one to a node, every local rank is 0 and the node rank is the world rank",
            _spread,
        ),
        Claim(
            "two-nodes-full",
            "four ranks on two nodes: world ranks run through one node first, then the other",
            _two_nodes_full,
        ),
        Claim("driver", "get_context() on the driver raises", _driver),
        Claim("moved", "prepare_model moves each model to its rank's device, once", _moved),
        Claim("wrapped", "prepare_model wraps in DDP above one rank, and not at one", _wrapped),
        Claim("keys", "the wrapping puts `module.` before every key of the state dict", _keys),
        Claim(
            "use-gpu",
            "without use_gpu ranks train on the CPU over gloo; with it a run asks for one GPU a rank and no CPU",
            _use_gpu,
        ),
    ),
    breaks=(
        Break("packed", "packs the ranks that should be spread", ("spread",)),
        Break("no-prepare-model", "leaves out prepare_model", ("moved", "wrapped", "keys")),
    ),
    measurements=_measurements,
    figures=_figures,
    seconds=(30, 40),
)

"""Broken copies of a document of `multi-node`, by claim."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def a_rank_beside_the_driver(document: Document) -> None:
    document["several"]["ranks"][0]["node_id"] = document["driver_node"]


def one_node_learns_otherwise(document: Document) -> None:
    for rank in document["alone"]["ranks"]:
        rank["parameters_sha256"] = "0" * 64


def a_file_differs_from_its_manifest(document: Document) -> None:
    document["host"]["checkpoint"]["wrong"] = ["model.pt"]


def another_bucket_can_be_read(document: Document) -> None:
    document["host"]["reach"]["read another bucket"] = "allowed"


def restored_weights_are_others(document: Document) -> None:
    document["restored"]["parameters_sha256"] = "0" * 64


def refused_too_late(document: Document) -> None:
    document["host"]["local_path"]["seconds"] = 9.0


def an_unshared_path_goes_unnoticed(document: Document) -> None:
    document["local_path"]["error"] = None


TWINS = {
    "nodes": a_rank_beside_the_driver,
    "same-weights": one_node_learns_otherwise,
    "from-host": a_file_differs_from_its_manifest,
    "reach": another_bucket_can_be_read,
    "restored": restored_weights_are_others,
    "local-refused": refused_too_late,
    "local-fails": an_unshared_path_goes_unnoticed,
}

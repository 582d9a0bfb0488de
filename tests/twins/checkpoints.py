"""What breaks each claim of lesson `checkpoints`, in a copy of its document."""

from __future__ import annotations

from typing import Any

Doc = dict[str, Any]


def a_file_is_missing(document: Doc) -> None:
    document["kinds"]["local"]["files"].remove("checkpoint_manager_snapshot.json")


def s3fs_leaves_a_folder_key(document: Doc) -> None:
    document["host"]["s3fs"]["keys"]["checkpoint_epoch-0006_attempt-000/"] = 0


def other_bytes_come_back(document: Doc) -> None:
    content = document["host"]["pyarrow"]["content"]
    content[next(iter(content))] = "0" * 64


def every_rank_uploads(document: Doc) -> None:
    for report in document["kinds"]["s3fs"]["ranks"][0]["reports"]:
        if report["how"] == "rank 0":
            report["stored"]["model.rank-1.bin"] = dict(report["stored"]["model.bin"])


def the_copies_cost_nothing(document: Doc) -> None:
    for report in document["kinds"]["local"]["ranks"][0]["reports"]:
        if report["how"] == "every-rank":
            report["stored"].popitem()


def one_part_overwrites_the_other(document: Doc) -> None:
    for report in document["kinds"]["pyarrow"]["ranks"][0]["reports"]:
        if report["how"] == "sharded":
            report["stored"]["part.rank-0.bin"] = report["stored"]["part.rank-1.bin"]


def both_ranks_files_survive(document: Doc) -> None:
    for report in document["kinds"]["local"]["ranks"][0]["reports"]:
        if report["how"] == "same-names":
            report["stored"]["who-1.txt"] = report["stored"]["who.txt"]
            report["stored"]["model-1.bin"] = report["stored"]["model.bin"]
    for kind in document["kinds"].values():
        for rank in kind["ranks"]:
            for report in rank["reports"]:
                if report["how"] == "same-names":
                    report["saved"] |= {"who-1.txt": "", "model-1.bin": ""}


def the_latest_is_pruned(document: Doc) -> None:
    after = document["kinds"]["local"]["ranks"][0]["after_five"]
    after["stored"] = [name for name in after["stored"] if "0004" not in name]


def the_score_is_not_found(document: Doc) -> None:
    """What remains is then simply the newest."""
    for kind in document["kinds"].values():
        kind["ranks"][0]["after_five"]["ray_says"] = [["checkpoint_epoch-0004_attempt-000", 0.5]]


def the_best_is_the_latest(document: Doc) -> None:
    for kind in document["kinds"].values():
        kind["best"] = [kind["outcome"]["checkpoint"]]


def min_prunes_it_too(document: Doc) -> None:
    kind = document["kinds"]["pyarrow"]
    kind["best"] = [kind["outcome"]["checkpoint"]]
    keys = document["host"]["pyarrow"]["keys"]
    for key in [key for key in keys if key.startswith("checkpoint_no-score/")]:
        del keys[key]


def the_helper_lets_it_through(document: Doc) -> None:
    document["kinds"]["s3fs"]["ranks"][1]["refused"].pop("no score")


def a_pruned_key_stays(document: Doc) -> None:
    document["host"]["s3fs"]["keys"]["checkpoint_epoch-0003_attempt-000/model.bin"] = 65536


def the_log_forgets_an_epoch(document: Doc) -> None:
    document["kinds"]["local"]["log"].pop(2)


TWINS = {
    "tree": a_file_is_missing,
    "keys": s3fs_leaves_a_folder_key,
    "content": other_bytes_come_back,
    "rank-0": every_rank_uploads,
    "cost": the_copies_cost_nothing,
    "sharded": one_part_overwrites_the_other,
    "same-names": both_ranks_files_survive,
    "retained": the_latest_is_pruned,
    "nested": the_score_is_not_found,
    "latest-best": the_best_is_the_latest,
    "no-score": min_prunes_it_too,
    "helper-refuses": the_helper_lets_it_through,
    "pruned": a_pruned_key_stays,
    "log": the_log_forgets_an_epoch,
}

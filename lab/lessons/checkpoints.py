"""Lesson `checkpoints`: what is stored where, what is kept, and whose it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import UserError
from lab.lessons.contract import Break, Claim, Document, Finding, Lesson, Needs, Params, not_shown
from lab.lessons.run import Host
from lab.report.plots import COLOURS, figure
from lab.store.probe import client

SCORES = (0.3, 0.9, 0.8, 0.1, 0.5)
EPOCHS = len(SCORES) + 2
ONE_RANK = "one rank has nobody to overwrite"
NO_SCORE = "checkpoint_no-score"
OF_A_MISSING_SCORE = {"max": "pruned as the worst", "min": "kept as the best"}
"""What Ray 2.60 makes of it: a missing score counts as minus infinity, and the order `min` turns the sign round."""


@dataclass(frozen=True)
class Checkpoints(Params):
    """`kilobytes` a checkpoint; the same training function on a local path and on S3 by each client."""

    kilobytes: int = field(default=1024, metadata={"help": "size of the model file in each checkpoint"})
    s3_client: str = field(
        default="both",
        metadata={"help": "who talks to S3", "choices": ("both", "pyarrow", "s3fs")},
    )


def _check(params: Checkpoints) -> None:
    if not 1 <= params.kilobytes <= 100_000:
        raise UserError(f"--kilobytes={params.kilobytes} is out of range: use 1 to 100000.")


def folder(epoch: int) -> str:
    """The name that the lab gives to a new run's checkpoint."""
    return f"checkpoint_epoch-{epoch:04d}_attempt-000"


def ranked(reports: Sequence[tuple[str, float | None]], order: str) -> list[str]:
    """Checkpoints, worst first; of equals the later one counts as better. No score: as `OF_A_MISSING_SCORE` says."""
    sign = 1.0 if order == "max" else -1.0
    worth = [sign * (float("-inf") if score is None else score) for _, score in reports]
    return [reports[index][0] for index in sorted(range(len(reports)), key=lambda at: (worth[at], at))]


def retained(reports: Sequence[tuple[str, float | None]], keep: int, order: str) -> list[str]:
    """What must remain, sorted by name: the `keep` best, and the latest whatever its score."""
    return sorted({*ranked(reports, order)[-keep:], reports[-1][0]})


FIRST_FIVE = [(folder(epoch), score) for epoch, score in enumerate(SCORES)]
ALL: list[tuple[str, float | None]] = [
    *FIRST_FIVE,
    (folder(5), 0.6),
    ("checkpoint_same-names", 0.7),
    ("checkpoint_every-rank", 0.4),
    (NO_SCORE, None),
    (folder(6), 0.2),
]
"""Every checkpoint that reaches Ray, in time order, with its score."""


def _files_of(name: str) -> list[str]:
    return [f"{name}/model.bin"] if name == NO_SCORE else [f"{name}/model.bin", f"{name}/notes/epoch.txt"]


def expected_tree(keep: int, order: str, workers: int) -> list[str]:
    """Every file of the run's folder once the run has ended, sorted."""
    paths = [".validate_storage_marker", "attempts/attempt-000.json", "checkpoint_manager_snapshot.json"]
    for name in retained(ALL, keep, order):
        paths += _files_of(name)
    paths += [f"epoch-log/attempt-000-epoch-{epoch:04d}.json" for epoch in range(EPOCHS)]
    paths += [f"observations/rank-{rank}-attempt-0.json" for rank in range(workers)]
    return sorted(paths)


def _each(document: Document, judge: Callable[[str, Mapping[str, Any]], tuple[Any, Any, bool]]) -> Finding:
    """Judge every kind of storage and hold only if all do."""
    expected, measured, holds = {}, {}, []
    for kind, one in document["kinds"].items():
        if one["outcome"]["error"]:
            raise ValueError(f"{kind}: {one['outcome']['error']['message']}")
        expected[kind], measured[kind], good = judge(kind, one)
        holds.append(good)
    asked = document["params"]["s3_client"]
    wanted = ["local", "pyarrow", "s3fs"] if asked == "both" else ["local", asked]
    return Finding(expected, measured, all(holds) and list(measured) == wanted)


def _reports(one: Mapping[str, Any], how: str, rank: int = 0) -> list[Mapping[str, Any]]:
    found = [report for report in one["ranks"][rank]["reports"] if report["how"] == how]
    if not found:
        raise ValueError(f"no report {how!r}")
    return found


def _bytes(report: Mapping[str, Any]) -> int:
    return sum(int(entry["size"]) for entry in report["stored"].values())


def _raw(document: Document, kind: str) -> Mapping[str, int]:
    """All keys or files, by another hand than the one that wrote them; folder keys end in a slash."""
    raw: Mapping[str, int] = (
        document["kinds"][kind]["on_disk"] if kind == "local" else document["host"][kind]["keys"]
    )
    return raw


def _difference(expected: Sequence[str], found: Sequence[str]) -> Any:
    missing, surplus = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    return {"missing": missing[:3], "surplus": surplus[:3]} if missing or surplus else f"{len(found)} files"


def _tree(document: Document) -> Finding:
    def one(kind: str, found: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        expected = expected_tree(found["keep"], found["order"], document["params"]["workers"])
        return f"{len(expected)} files", _difference(expected, found["files"]), found["files"] == expected

    return _each(document, one)


def _keys(document: Document) -> Finding:
    def one(kind: str, found: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        expected = expected_tree(found["keep"], found["order"], document["params"]["workers"])
        raw = _raw(document, kind)
        plain = [key for key in raw if not key.endswith("/")]
        folders = [key for key in raw if key.endswith("/")]
        as_expected = not folders if kind == "s3fs" else bool(folders)
        what = {"local": "folders", "pyarrow": "folder keys of 0 bytes", "s3fs": "no folder keys"}[kind]
        return (
            f"{len(expected)} keys and {what}",
            {"keys": _difference(expected, plain), "folder keys": len(folders)},
            sorted(plain) == expected and as_expected and not any(raw[key] for key in folders),
        )

    return _each(document, one)


def _content(document: Document) -> Finding:
    def one(kind: str, found: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        expected = {
            f"{report['folder']}/{name}": digest
            for report in found["ranks"][0]["reports"]
            if report["folder"] in retained(ALL, found["keep"], found["order"])
            for name, digest in report["saved"].items()
        }
        read = [found["content"]] + ([] if kind == "local" else [document["host"][kind]["content"]])
        wrong = sorted(
            {
                path
                for content in read
                for path in {*expected, *content}
                if expected.get(path) != content.get(path)
            }
        )
        good = bool(expected) and not wrong
        return f"{len(expected)} files as saved", wrong or f"{len(read[0])} files as saved", good

    return _each(document, one)


def _rank_0(document: Document) -> Finding:
    def one(kind: str, found: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        size = document["params"]["kilobytes"] * 1024 + len("epoch 0\n")
        stored = [
            {"files": sorted(report["stored"]), "bytes": _bytes(report)}
            for report in _reports(found, "rank 0")
        ]
        expected = {"files": ["model.bin", "notes/epoch.txt"], "bytes": size}
        wrong = [entry for entry in stored if entry != expected]
        return expected, wrong[0] if wrong else stored[0], not wrong and len(stored) == len(SCORES) + 1

    return _each(document, one)


def _cost(document: Document) -> Finding:
    def one(kind: str, found: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        size, workers = document["params"]["kilobytes"] * 1024, document["params"]["workers"]
        expected = {"each rank its part": size, "each rank the whole": workers * size}
        measured = {
            "each rank its part": _bytes(_reports(found, "sharded")[0]),
            "each rank the whole": _bytes(_reports(found, "every-rank")[0]),
        }
        return expected, measured, measured == expected

    return _each(document, one)


def _sharded(document: Document) -> Finding:
    def one(kind: str, found: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        saved: dict[str, str] = {}
        for rank in range(len(found["ranks"])):
            saved |= _reports(found, "sharded", rank)[0]["saved"]
        stored = {name: entry["sha256"] for name, entry in _reports(found, "sharded")[0]["stored"].items()}
        names = [f"part.rank-{rank}.bin" for rank in range(document["params"]["workers"])]
        said = [rank["refused"].get("shared name", "") for rank in found["ranks"]]
        good = (
            sorted(stored) == names
            and stored == saved
            and len(said) == len(names)
            and all(name in sentence for name, sentence in zip(names, said, strict=True))
        )
        return (
            {"files": names, "one name for all": "refused on every rank"},
            {"files": sorted(stored), "one name for all": said},
            good,
        )

    return _each(document, one)


def _same_names(document: Document) -> Finding:
    if document["params"]["workers"] == 1:
        return not_shown(ONE_RANK)

    def one(kind: str, found: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        workers = document["params"]["workers"]
        sent = sum(rank["sent"]["checkpoint_same-names"] for rank in found["ranks"])
        stored = _reports(found, "same-names")[0]["stored"]
        whose = {
            name: [
                rank
                for rank in range(len(found["ranks"]))
                if _reports(found, "same-names", rank)[0]["saved"][name] == entry["sha256"]
            ]
            for name, entry in sorted(stored.items())
        }
        kept = _bytes({"stored": stored})
        good = (
            sorted(whose) == ["model.bin", "who.txt"]
            and all(len(ranks) == 1 for ranks in whose.values())
            and kept * workers == sent
        )
        return (
            f"2 files, each of one rank, and 1/{workers} of the bytes sent",
            {"written last by rank": whose, "bytes sent": sent, "bytes kept": kept},
            good,
        )

    return _each(document, one)


def _retained(document: Document) -> Finding:
    def one(kind: str, found: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        expected = retained(FIRST_FIVE, found["keep"], found["order"])
        after = found["ranks"][0]["after_five"]
        stored, said = sorted(after["stored"]), sorted(name for name, _ in after["ray_says"])
        return (
            f"keep {found['keep']} by {found['order']}: {_short(expected)}",
            {"stored": _short(stored), "Ray's own list": _short(said)},
            stored == expected == said,
        )

    return _each(document, one)


def _short(names: Sequence[str]) -> list[str]:
    return [name.removeprefix("checkpoint_").removesuffix("_attempt-000") for name in names]


def _nested(document: Document) -> Finding:
    def one(kind: str, found: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        best = max(SCORES) if found["order"] == "max" else min(SCORES)
        kept = [score for _, score in found["ranks"][0]["after_five"]["ray_says"]]
        last = found["outcome"]["metrics"].get("eval")
        return (
            {"best kept": best, "result.metrics['eval']": {"score": ALL[-1][1]}},
            {"kept": kept, "result.metrics['eval']": last},
            best in kept and last == {"score": ALL[-1][1]},
        )

    return _each(document, one)


def _latest_best(document: Document) -> Finding:
    def one(kind: str, found: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        best = ranked(ALL, found["order"])[-1]
        expected = {"latest": ALL[-1][0], "best": best}
        measured = {"latest": found["outcome"]["checkpoint"], "best": (found["best"] or [None])[-1]}
        return expected, measured, measured == expected

    return _each(document, one)


def _no_score(document: Document) -> Finding:
    def one(kind: str, found: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        there = any(key.startswith(f"{NO_SCORE}/") for key in _raw(document, kind))
        best = found["best"][-1:] == [NO_SCORE]
        measured = (
            OF_A_MISSING_SCORE["max"]
            if not there and not best
            else OF_A_MISSING_SCORE["min"]
            if there and best
            else f"stored: {there}, the best: {best}"
        )
        expected = OF_A_MISSING_SCORE[found["order"]]
        return f"order {found['order']}: {expected}", measured, measured == expected

    return _each(document, one)


def _helper_refuses(document: Document) -> Finding:
    def one(kind: str, found: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        said = [rank["refused"].get("no score", "") for rank in found["ranks"]]
        # the same epoch is reported once more, with a score: one row, not two
        rows = [epoch for epoch, _ in found["log"]].count(EPOCHS - 1)
        good = bool(said) and all("'eval/score' is missing" in sentence for sentence in said) and rows == 1
        return "every rank refuses, naming 'eval/score'; one row", {"said": said, "rows": rows}, good

    return _each(document, one)


def _pruned(document: Document) -> Finding:
    def one(kind: str, found: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        kept = retained(ALL, found["keep"], found["order"])
        there = sorted(
            {
                key.split("/")[0]
                for key in _raw(document, kind)
                if key.startswith("checkpoint_") and "/" in key
            }
        )
        gone = len({name for name, _ in ALL} - set(there))
        return (
            {"left": _short(kept), "gone": len(ALL) - len(kept)},
            {"left": _short(there), "gone": gone},
            there == kept,
        )

    return _each(document, one)


def _log(document: Document) -> Finding:
    def one(kind: str, found: Mapping[str, Any]) -> tuple[Any, Any, bool]:
        score = dict(ALL)
        expected = {
            "epoch log": list(range(EPOCHS)),
            "dataframe": [score[name] for name in ranked(ALL, found["order"])[-found["keep"] :]],
        }
        times = [time for _, time in found["log"]]
        measured = {"epoch log": [epoch for epoch, _ in found["log"]], "dataframe": found["table"]}
        return expected, measured, measured == expected and times == sorted(times)

    return _each(document, one)


def _look(host: Host, document: dict[str, Any]) -> dict[str, Any]:
    """List and read every key of the S3 runs, from the host, by a third client."""
    minio = client(host.store)
    seen = {}
    for kind, one in document["kinds"].items():
        if kind == "local":
            continue
        bucket, _, prefix = f"{one['location'].removeprefix('s3://')}/{one['name']}/".partition("/")
        keys = {
            str(entry.object_name).removeprefix(prefix): int(entry.size or 0)
            for entry in minio.list_objects(bucket, prefix=prefix, recursive=True)
            if entry.object_name != prefix
        }
        content = {}
        for key in keys:
            if key.startswith("checkpoint_") and "/" in key and not key.endswith("/"):
                response = minio.get_object(bucket, prefix + key)
                try:
                    content[key] = hashlib.sha256(response.read()).hexdigest()
                finally:
                    response.close()
                    response.release_conn()
        seen[kind] = {"keys": keys, "content": content}
    return seen


def _measurements(document: Document) -> dict[str, Any]:
    found = {}
    for kind, one in document["kinds"].items():
        found[kind] = {
            "fit_seconds": one["outcome"]["seconds"],
            "stored_bytes": {
                report["how"]: _bytes(report) for rank in one["ranks"][:1] for report in rank["reports"]
            },
            "keys": len(_raw(document, kind)),
        }
    return found


def _figures(document: Document, folder_: Path) -> list[Path]:
    path = folder_ / "checkpoints.png"
    kinds = list(document["kinds"].items())
    with figure(path, columns=2) as (left, right):
        for row, (_, one) in enumerate(kinds):
            stored = {key.split("/")[0] for key in one["files"]}
            for at, (name, score) in enumerate(ALL):
                kept = name in stored
                left.scatter(
                    at,
                    row,
                    s=420,
                    color=COLOURS[0] if kept else "none",
                    edgecolors=COLOURS[0] if kept else COLOURS[6],
                )
                label = "none" if score is None else f"{score:g}"
                left.text(
                    at, row, label, ha="center", va="center", color="white" if kept else "grey", fontsize=7
                )
        names = [f"{kind}\nkeep {one['keep']}, {one['order']}" for kind, one in kinds]
        left.set_yticks(range(len(kinds)), names)
        left.set_ylim(len(kinds) - 0.5, -0.5)
        left.set_xticks(
            range(len(ALL)),
            [*"01234", "5\nsharded", "same\nnames", "every\nrank", "no\nscore", "6"],
            fontsize=7,
        )
        left.set(xlabel="checkpoint, in time order", title="Its score; filled: left at the end")
        ways = ["rank 0", "sharded", "every-rank", "same-names"]
        one = kinds[-1][1]
        sent, kept_bytes = [], []
        for way in ways:
            reports = [
                report for rank in one["ranks"][:1] for report in rank["reports"] if report["how"] == way
            ]
            sent.append(
                sum(rank["sent"][report["folder"]] for report in reports[:1] for rank in one["ranks"])
            )
            kept_bytes.append(sum(_bytes(report) for report in reports[:1]))
        spots = range(len(ways))
        right.bar(
            [at - 0.2 for at in spots], [value / 1024 for value in sent], 0.4, label="sent by the ranks"
        )
        right.bar(
            [at + 0.2 for at in spots], [value / 1024 for value in kept_bytes], 0.4, label="in the store"
        )
        right.set_xticks(
            list(spots),
            ["rank 0 alone", "each rank\nits part", "each rank\nthe whole", "each rank,\nsame names"],
            fontsize=7,
        )
        right.set(
            ylabel="KiB a checkpoint",
            title=f"{document['params']['workers']} ranks, one model of {document['params']['kilobytes']} KiB",
        )
        right.legend()
    return [path]


LESSON = Lesson(
    name="checkpoints",
    title="what is stored where, what is kept, and whose it is",
    idea=(
        "A checkpoint is a folder that a rank hands to report(). Ray uploads it below the run's name, keeps the best by "
        "one metric and always the latest, and deletes the rest. Each rank that hands one over uploads; rank 0 alone is "
        "enough for DDP, and a sharded model needs names that hold the rank. A local path and S3 give the same tree."
    ),
    needs=Needs("head"),
    observe="kept_checkpoints",
    params=Checkpoints,
    default_storage="s3",
    check=_check,
    quick={"kilobytes": 64},
    host=_look,
    claims=(
        Claim("tree", "a local path, S3 by pyarrow and S3 by s3fs hold exactly the expected files", _tree),
        Claim(
            "keys",
            "listed by another client the keys are the same; pyarrow adds keys of 0 bytes for folders, s3fs none",
            _keys,
        ),
        Claim("content", "every checkpoint left holds the bytes that were saved", _content),
        Claim("rank-0", "with rank 0's folder alone, one copy is stored", _rank_0),
        Claim("cost", "parts cost one copy, every rank's whole model costs one copy a rank", _cost),
        Claim("sharded", "parts named by rank are all there, and one name for all is refused", _sharded),
        Claim(
            "same-names",
            "past the helper, files of the same name overwrite one another: all is sent, one rank's is kept",
            _same_names,
            ONE_RANK,
        ),
        Claim("retained", "of five checkpoints the best num_to_keep and the latest remain", _retained),
        Claim("nested", "a nested metric is a score by its path, 'eval/score'", _nested),
        Claim(
            "latest-best",
            "result.checkpoint is the latest; the best is the last of result.best_checkpoints",
            _latest_best,
        ),
        Claim(
            "no-score",
            "a checkpoint without its score counts as the worst with order max, and as the best with order min",
            _no_score,
        ),
        Claim("helper-refuses", "the lab's helper refuses it before anything is stored", _helper_refuses),
        Claim(
            "pruned", "what was pruned is gone from the disk and from the bucket, every key of it", _pruned
        ),
        Claim(
            "log",
            "metrics_dataframe has the kept checkpoints alone, in score order; the lab's log has every epoch in time order",
            _log,
        ),
    ),
    breaks=(
        Break(
            "careless",
            "every rank uploads a whole copy, and num_to_keep is not set",
            ("rank-0", "retained", "pruned", "tree"),
        ),
    ),
    measurements=_measurements,
    figures=_figures,
    seconds=(40, 45),
)

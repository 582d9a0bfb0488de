"""What breaks each claim of lesson `resume`, in a copy of its document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Doc = dict[str, Any]


def half_loses_a_generator(document: Doc) -> None:
    document["halves"][0]["second"]["ranks"][-1]["rng_sha256"] = "0" * 64


def crash_repeats_an_order(document: Doc) -> None:
    order = document["crash"]["ranks"][0]["order"]
    order[-1]["sha256"] = order[0]["sha256"]


def has_no_effect(part: str) -> Callable[[Doc], None]:
    """The replay without the part gives what the replay with every part gives."""

    def twin(document: Doc) -> None:
        for rank in document["parts"]:
            rank[part] = rank["nothing"]

    return twin


def resumes_silently(document: Doc) -> None:
    document["halves"][0]["second"]["said"] = []


def keeps_the_old_run(document: Doc) -> None:
    document["crash"]["said"] = [f"resuming {document['run']}-crash at epoch {document['half']}"]


def keeps_the_batch_of_each_rank(document: Doc) -> None:
    for rank in document["other_size"]["ranks"]:
        rank["steps"] *= 2


def goes_on_all_the_same(document: Doc) -> None:
    document["other_size"]["ranks"][0]["refused"] = ""


def keys_carry_a_prefix(document: Doc) -> None:
    document["plain"]["keys"] = [f"module.{key}" for key in document["plain"]["keys"]]


def starts_from_random_weights(document: Doc) -> None:
    document["damage"][1] |= {"message": "", "started": 1}


TWINS = {
    "halves": half_loses_a_generator,
    "crash": crash_repeats_an_order,
    **{
        f"without-{part}": has_no_effect(part)
        for part in ("model", "optimizer", "scheduler", "epoch", "rng", "sampler", "history")
    },
    "name": resumes_silently,
    "fresh": keeps_the_old_run,
    "other-size": keeps_the_batch_of_each_rank,
    "other-size-refused": goes_on_all_the_same,
    "plain": keys_carry_a_prefix,
    "damaged": starts_from_random_weights,
}

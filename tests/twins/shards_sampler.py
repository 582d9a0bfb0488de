"""Broken copies of a document of `shards-sampler`, by claim."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def two_ranks_read_one_sample(document: Document) -> None:
    first, second, *_ = (rank["even"][1] for rank in document["ranks"]["ranks"])
    second[7] = first[7]


def another_sample_is_repeated(document: Document) -> None:
    ranks = document["ranks"]["ranks"]
    ranks[-1]["uneven"][-1] = ranks[0]["uneven"][5]


def orders_repeat_with_set_epoch(document: Document) -> None:
    for rank in document["ranks"]["ranks"]:
        rank["even"][2] = list(rank["even"][0])


def one_rank_has_a_distributed_sampler(document: Document) -> None:
    document["one"]["ranks"][0] |= {"sampler": "DistributedSampler", "set_epoch": True}


def stripes_are_blocks(document: Document) -> None:
    ranks = document["ranks"]["ranks"]
    share = document["params"]["rows"] // len(ranks)
    for place, rank in enumerate(ranks):
        rank["striped"] = list(range(place * share, (place + 1) * share))


def drop_last_drops_the_padding_too(document: Document) -> None:
    for rank in document["ranks"]["ranks"]:
        rank["dropped_small"] = []


def padded_samples_are_counted(document: Document) -> None:
    ranks = document["ranks"]["ranks"]
    sums = [sum(rank["padded"][place] for rank in ranks) for place in (0, 1)]
    for rank in ranks:
        rank["exact"] = sums


def prefetching_is_kept(document: Document) -> None:
    for rank in document["ranks"]["ranks"]:
        rank["settings"]["plain"]["after"]["prefetch_factor"] = 5


def generators_decide_the_order(document: Document) -> None:
    for rank in document["ranks"]["ranks"]:
        rank["generators"][1] = list(reversed(rank["generators"][0]))


def an_epoch_with_loader_processes_stops_short(document: Document) -> None:
    for rank in document["ranks"]["ranks"]:
        rank["loader_workers"][0]["reads"][19].pop()


def too_few_samples_are_let_in(document: Document) -> None:
    document["host"]["too_few"] |= {"refused": False, "exit": 0, "message": ""}


TWINS = {
    "even": two_ranks_read_one_sample,
    "uneven": another_sample_is_repeated,
    "set-epoch": orders_repeat_with_set_epoch,
    "one-rank": one_rank_has_a_distributed_sampler,
    "striped": stripes_are_blocks,
    "drop-last": drop_last_drops_the_padding_too,
    "evaluation": padded_samples_are_counted,
    "settings": prefetching_is_kept,
    "generator": generators_decide_the_order,
    "loader-workers": an_epoch_with_loader_processes_stops_short,
    "too-few": too_few_samples_are_let_in,
}

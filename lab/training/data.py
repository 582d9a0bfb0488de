"""The lab's two data sets: real handwritten digits, and the article's linear toy.

Every sample comes as `(x, y, id)`; the id is its place in its split, from 0, so that a lesson can say who saw what.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.utils.data import TensorDataset

Split = Literal["train", "held-out"]

TRAIN_ROWS = 1536
"""Divisible by 1, 2, 3, 4, 6, 8, ... workers; the other 261 of 1,797 are held out."""

_SPLIT_SEED = 20_240_229
_FILE = Path(__file__).with_name("digits.npz")


def digits(split: Split, *, shuffled_labels_seed: int | None = None) -> TensorDataset:
    """Real handwritten digits (UCI, see digits.LICENSE.txt), split by one fixed permutation.

    Args:
        split: "train" (1,536 rows) or "held-out" (261).
        shuffled_labels_seed: permute the labels of the split, so that there is nothing to learn.

    Returns:
        images float32 (n, 1, 8, 8) in [0, 1], labels int64 (n,), ids int64 (n,).
    """
    with np.load(_FILE) as archive:
        images, labels = archive["images"], archive["labels"]
    order = np.random.RandomState(_SPLIT_SEED).permutation(len(labels))
    rows = {"train": order[:TRAIN_ROWS], "held-out": order[TRAIN_ROWS:]}[split]
    chosen = labels[rows]
    if shuffled_labels_seed is not None:
        chosen = np.random.RandomState(shuffled_labels_seed).permutation(chosen)
    return TensorDataset(
        torch.from_numpy(images[rows].astype(np.float32) / 16.0).unsqueeze(1),
        torch.from_numpy(chosen.astype(np.int64)),
        torch.arange(len(rows)),
    )


def linear_toy(rows: int, seed: int) -> TensorDataset:
    """The article's toy: 4 numbers in, 2 out, by one fixed linear map with a little noise.

    Returns:
        x float32 (rows, 4), y float32 (rows, 2), ids int64 (rows,).
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.tensor([[1.0, -2.0, 0.5, 3.0], [-1.0, 0.25, 2.0, -0.5]])
    x = torch.randn(rows, 4, generator=generator)
    y = x @ weights.T + 0.01 * torch.randn(rows, 2, generator=generator)
    return TensorDataset(x, y, torch.arange(rows))

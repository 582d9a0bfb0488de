"""The lab's models. None has batch norm: its running statistics would tie results to the worker batch."""

from __future__ import annotations

import torch
from torch import nn

from lab.errors import UserError


def small_cnn(dropout: float = 0.0) -> nn.Module:
    """(n, 1, 8, 8) -> (n, 10): two convolutions and one linear layer, 9,930 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(32 * 4 * 4, 10),
    )


def linear() -> nn.Module:
    """(n, 4) -> (n, 2): the article's toy."""
    return nn.Linear(4, 2)


def build_model(name: str, seed: int, dropout: float = 0.0) -> nn.Module:
    """A model by name ("small-cnn", "linear") with weights that depend on `seed` alone, the same on every rank.

    Raises:
        UserError: no model has that name.
    """
    # forked, so that making a model does not move the caller's random numbers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "small-cnn":
            return small_cnn(dropout)
        if name == "linear":
            return linear()
    raise UserError(f"model={name!r} is not known: use 'small-cnn' or 'linear'.")

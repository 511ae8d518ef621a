"""What convergence.py learns: scanned digits with an MLP, and the standard library's source with a GPT."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from gpt import GPT, Batch, Corpus, Shape, batches, bits_per_byte


class Learning(Protocol):
    """Data, and a model to learn it."""

    def model(self) -> nn.Module:
        """A fresh model, by torch's seed."""
        ...

    def batches(self, seed: int, rank: int, size: int) -> Iterator[Batch]:
        """Endless batches; each rank has its own."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The training loss."""
        ...

    def validation(self, model: nn.Module) -> float:
        """The loss on data that no rank trains on."""
        ...


class Digits:
    """1,797 scanned digits of 8 x 8 pixels, which scikit-learn brings along; a third is held out.

    Each pixel is standardised: those that are seldom other than 0 have a variance so small beside the mean
    magnitude of the momentum that onebit_adam's steps grow without bound there (docs/algorithms.md).
    """

    HELD_OUT = 599

    def __init__(self) -> None:
        pixels, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))
        inputs, targets = torch.tensor(pixels[order], dtype=torch.float32), torch.tensor(labels[order])
        spread, mean = torch.std_mean(inputs[self.HELD_OUT :], dim=0)
        inputs = (inputs - mean) / torch.where(spread > 0, spread, 1.0)
        self._held_out = inputs[: self.HELD_OUT], targets[: self.HELD_OUT]
        self._inputs, self._targets = inputs[self.HELD_OUT :], targets[self.HELD_OUT :]

    def model(self) -> nn.Module:
        """An MLP of 27,000 parameters."""
        return nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def batches(self, seed: int, rank: int, size: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed * 10_007 + rank)
        while True:
            chosen = torch.randint(len(self._targets), (size,), generator=generator)
            yield self._inputs[chosen], self._targets[chosen]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    @torch.no_grad()
    def validation(self, model: nn.Module) -> float:
        """Cross-entropy in nats per digit."""
        return float(self.loss(model, self._held_out))


class Text:
    """The source of Python's standard library, of which every sixteenth file is held out."""

    CONTEXT = 64
    BYTES = 4_000_000
    WINDOWS = 256

    def __init__(self) -> None:
        self._corpus = Corpus.from_standard_library(self.BYTES)

    def model(self) -> nn.Module:
        """A GPT of 0.1 million parameters."""
        return GPT(Shape(layers=2, width=64, heads=2, context=self.CONTEXT))

    def batches(self, seed: int, rank: int, size: int) -> Iterator[Batch]:
        return batches(self._corpus.train, self.CONTEXT, size, seed=seed, rank=rank)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(*batch)
        return loss

    def validation(self, model: nn.Module) -> float:
        """Cross-entropy in nats per byte."""
        if not isinstance(model, GPT):
            raise TypeError(f"expected a GPT, got {type(model).__name__}")
        bits = bits_per_byte(model, self._corpus.validation, windows=self.WINDOWS, batch_size=64)
        return bits * math.log(2)


@dataclass(frozen=True)
class Task:
    """A task and how long it is trained.

    Attributes:
        title: For the plot and the table.
        open: Reads the data.
        steps: Optimizer steps.
        batch_size: Examples per rank and step.
        lr: Peak learning rate.
        weight_decay: AdamW's; enough that the validation loss has not begun to rise.
        switch_share: Share of the steps that average gradients, before algorithms without a warm-up of their
            own whose ranks differ, or whose gradients are of low rank, are switched to.
        powersgd_rank: The columns that PowerSGD needs to keep within its bar.
    """

    title: str
    open: Callable[[], Learning]
    steps: int
    batch_size: int
    lr: float
    weight_decay: float
    switch_share: float
    powersgd_rank: int


TASKS = {
    "digits": Task(
        "scikit-learn's digits, an MLP",
        Digits,
        steps=600,
        batch_size=64,
        lr=2e-3,
        weight_decay=0.3,
        switch_share=0.0,
        powersgd_rank=4,
    ),
    "gpt": Task(
        "the standard library's source, a byte-level GPT",
        Text,
        steps=600,
        batch_size=32,
        lr=3e-3,
        weight_decay=0.01,
        switch_share=0.3,
        powersgd_rank=16,
    ),
}

"""What train_gpt.py trains and on what: a small GPT over bytes, and Python's own standard library as text."""

from __future__ import annotations

import math
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # a token is a byte

Batch = tuple[Tensor, Tensor]  # tokens, and for each the one that follows: both [batch, context]


@dataclass(frozen=True)
class Shape:
    """Size of a `GPT`; the default has 2.7 million parameters.

    Attributes:
        layers: Number of transformer blocks.
        width: Numbers per token between the blocks.
        heads: Attention heads per block; `width` is a multiple of it.
        context: Tokens that the model sees at once.
    """

    layers: int = 3
    width: int = 256
    heads: int = 4
    context: int = 128


class Block(nn.Module):
    """One pre-norm transformer block: attention, then an MLP, each added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.project = nn.Linear(shape.width, shape.width, bias=False)
        self.norm_mlp = nn.LayerNorm(shape.width)
        self.expand = nn.Linear(shape.width, 4 * shape.width)
        self.contract = nn.Linear(4 * shape.width, shape.width)

    def attention(self, x: Tensor) -> Tensor:
        """Causal self-attention."""
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same shape."""
        x = x + self.attention(self.norm_attention(x))
        out: Tensor = x + self.contract(functional.gelu(self.expand(self.norm_mlp(x)), approximate="tanh"))
        return out


class Neighbours(nn.Module):
    """Mixes each token's embedding with those of the three before it.

    It makes n-grams visible to the first block, which would need minutes to find them by attention.
    """

    def __init__(self, width: int, reach: int = 4) -> None:
        super().__init__()
        self.reach = reach
        self.mix = nn.Linear(reach * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same shape."""
        padded = functional.pad(x, (0, 0, self.reach - 1, 0))
        shifted = [padded[:, i : i + x.shape[1]] for i in range(self.reach)]
        out: Tensor = x + self.mix(torch.cat(shifted, dim=-1))
        return out


class GPT(nn.Module):
    """A decoder-only transformer that predicts the next byte; input and output share the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Parameter(torch.zeros(shape.context, shape.width))
        self.neighbours = Neighbours(shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self._initialise()

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.position.device

    def _initialise(self) -> None:
        """GPT-2's initialisation: small normals, smaller still where a block adds to its input."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                adds = name.endswith(("project.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.shape.layers) if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte of `targets`, given `tokens` (both ``[batch, length]``)."""
        return functional.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())

    def logits(self, tokens: Tensor) -> Tensor:
        """``[batch, length]`` tokens to ``[batch, length, 256]`` scores of the byte that follows each."""
        x = self.neighbours(self.embed(tokens)) + self.position[: tokens.shape[1]]
        out: Tensor = self.head(self.norm(self.blocks(x)))
        return out

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, *, temperature: float, seed: int) -> bytes:
        """Sample `count` bytes that go on from `prompt`."""
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        for _ in range(count):
            window = torch.tensor([tokens[-self.shape.context :]], device=self.device)
            scores = self.logits(window)[0, -1].float().cpu() / temperature
            tokens.append(int(torch.multinomial(scores.softmax(0), 1, generator=generator)))
        return bytes(tokens[len(prompt) :])


@dataclass(frozen=True)
class Corpus:
    """The standard library's source as two long byte strings."""

    train: Tensor
    validation: Tensor

    @classmethod
    def from_standard_library(cls, limit_bytes: int) -> Corpus:
        """Read ``*.py`` in sorted order up to `limit_bytes`; about every sixteenth file is held out.

        Which files are held out depends on their names alone, so every rank and every run agrees.
        """
        root = Path(sysconfig.get_path("stdlib"))
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        room = limit_bytes
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            if {"site-packages", "dist-packages", "test", "tests"} & set(name.parts):
                continue
            text = path.read_bytes()[:room]
            room -= len(text)
            parts[zlib.crc32(name.as_posix().encode()) % 16 == 0].append(text)
        train, validation = (
            torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts
        )
        return cls(train, validation)


def batches(text: Tensor, context: int, batch_size: int, *, seed: int, rank: int) -> Iterator[Batch]:
    """Endless random ``(tokens, targets)``; each rank draws its own windows."""
    generator = torch.Generator().manual_seed(seed * 10_007 + rank)
    while True:
        starts = torch.randint(len(text) - context, (batch_size, 1), generator=generator)
        window = text[starts + torch.arange(context + 1)].long()
        yield window[:, :-1], window[:, 1:]


@torch.no_grad()
def bits_per_byte(model: GPT, text: Tensor, *, windows: int, batch_size: int) -> float:
    """Cross-entropy on `windows` windows spread evenly over `text`, in bits per byte."""
    context = model.shape.context
    starts = torch.linspace(0, len(text) - context - 1, windows).long().unsqueeze(1)
    window = text[starts + torch.arange(context + 1)].long().to(model.device)
    model.eval()
    losses = [model(part[:, :-1], part[:, 1:]) * len(part) for part in window.split(batch_size)]
    model.train()
    return float(torch.stack(losses).sum()) / windows / math.log(2)

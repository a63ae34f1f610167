"""The demo's training run: where it reads, what it has learnt, and how it goes on from a saved state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from checkrun_format.cli._demo.corpus import Corpus, Ids
from checkrun_format.cli._demo.skipgram import Embedding, Floats, gradients, windows

DIM = 64
_BATCH = 48  # positions read by one step
_REACH = 5  # words on either side, at most
_NEGATIVES = 32  # drawn once a step and shared by its pairs
_PER_PAIR = 5.0  # weight of the negatives of one pair
_RATE = 0.15
_PROJECTION_RATE = 0.01
_FREQUENT = 1e-3  # words above this share of the text are thinned out
_EVALUATED = 4096  # positions that `loss` looks at


@dataclass(slots=True)
class Reader:
    """The next position of the text, and how often the text has been read to its end."""

    position: int = 0
    epoch: int = 0

    def take(self, count: int, length: int) -> Ids:
        """The next `count` positions of a text of `length`; fewer at its end."""
        taken = np.arange(self.position, min(self.position + count, length))
        self.position += len(taken)
        if self.position == length:
            self.position, self.epoch = 0, self.epoch + 1
        return taken


class Trainer:
    """Learns vectors of words and word pairs from a corpus.

    A position is read as the mean of its word's and its pair's row of `inputs`, times `projection`; the words around
    it are predicted with `outputs`.
    """

    def __init__(self, corpus: Corpus, seed: int = 2022) -> None:
        self.corpus = corpus
        self.reader = Reader()
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.step = 0
        spread = (self.random.random((len(corpus.names), DIM), np.float32) - np.float32(0.5)) / np.float32(DIM)
        self.inputs = Embedding(spread, np.zeros(len(corpus.names), np.float32))
        self.outputs = Embedding(np.zeros((corpus.words, DIM), np.float32), np.zeros(corpus.words, np.float32))
        self.projection: Floats = np.eye(DIM, dtype=np.float32)
        self.projection_sum: Floats = np.zeros((DIM, DIM), np.float32)
        share = corpus.counts / corpus.counts.sum()
        self._kept = np.minimum(1, np.sqrt(_FREQUENT / share))
        self._noise = np.cumsum(corpus.counts**0.75) / np.sum(corpus.counts**0.75)

    def train(self) -> float:
        """One step over the next positions of the text; returns its loss per pair."""
        corpus, random = self.corpus, self.random
        centers = self.reader.take(_BATCH, len(corpus.word_at))
        contexts, used = self._contexts(centers, random)
        negatives = self._negatives(random, _NEGATIVES)
        mean = self._mean(centers)
        found = gradients(
            mean @ self.projection,
            self.outputs.weight[contexts],
            used,
            self.outputs.weight[negatives],
            per_pair=_PER_PAIR,
        )
        rows = np.concatenate([contexts[used], negatives])
        self.outputs.descend(rows, np.concatenate([found.contexts, found.negatives]), _RATE)
        self._descend_inputs(centers, mean, found.hidden)
        self.step += 1
        return found.loss / max(1, int(used.sum()))

    def loss(self) -> float:
        """Mean loss per pair over positions spread over the whole text; the same ones whenever it is asked."""
        random = np.random.Generator(np.random.PCG64(7))
        centers = np.sort(random.permutation(len(self.corpus.word_at))[:_EVALUATED])
        contexts, used = self._contexts(centers, random)
        negatives = self.outputs.weight[self._negatives(random, 16 * _NEGATIVES)]
        hidden = self._mean(centers) @ self.projection
        found = gradients(hidden, self.outputs.weight[contexts], used, negatives, per_pair=_PER_PAIR)
        return found.loss / int(used.sum())

    def position(self) -> dict[str, Any]:
        """Where the reader and the random numbers stand, as JSON; with the arrays it is all that training needs."""
        state: Any = self.random.bit_generator.state
        return {
            "step": self.step,
            "reader": {"position": self.reader.position, "epoch": self.reader.epoch},
            "random": {
                "kind": state["bit_generator"],
                "state": hex(state["state"]["state"]),  # 128 bits: more than many JSON readers keep in a number
                "inc": hex(state["state"]["inc"]),
                "has_uint32": state["has_uint32"],
                "uinteger": state["uinteger"],
            },
        }

    def go_to(self, position: dict[str, Any]) -> None:
        """Continue reading and drawing where `position` was taken."""
        random = position["random"]
        self.step = position["step"]
        self.reader = Reader(**position["reader"])
        self.random.bit_generator.state = {
            "bit_generator": random["kind"],
            "state": {"state": int(random["state"], 16), "inc": int(random["inc"], 16)},
            "has_uint32": random["has_uint32"],
            "uinteger": random["uinteger"],
        }

    def _contexts(self, centers: Ids, random: np.random.Generator) -> tuple[Ids, Any]:
        """Words around each center, and which of them count: within a random reach, frequent words thinned out."""
        word_at = self.corpus.word_at
        reaches = random.integers(1, _REACH + 1, len(centers))
        around = windows(self.corpus.topic_at, centers, reaches, most=_REACH)
        words = word_at[around.contexts]
        kept = self._kept[words] * self._kept[word_at[centers]][:, None]
        return words, around.used & (random.random(words.shape) < kept)

    def _negatives(self, random: np.random.Generator, count: int) -> Ids:
        return np.searchsorted(self._noise, random.random(count), side="right")

    def _mean(self, centers: Ids) -> Floats:
        weight = self.inputs.weight
        return np.float32(0.5) * (weight[self.corpus.word_at[centers]] + weight[self.corpus.pair_at[centers]])

    def _descend_inputs(self, centers: Ids, mean: Floats, hidden: Floats) -> None:
        seen = hidden.any(axis=1)
        rows = np.concatenate([self.corpus.word_at[centers][seen], self.corpus.pair_at[centers][seen]])
        half = np.float32(0.5) * (hidden @ self.projection.T)[seen]
        self.inputs.descend(rows, np.concatenate([half, half]), _RATE)
        gradient = mean.T @ hidden
        self.projection_sum += np.square(gradient)
        self.projection -= np.float32(_PROJECTION_RATE) * gradient / np.sqrt(self.projection_sum + np.float32(1e-10))

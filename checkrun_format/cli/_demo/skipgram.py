"""Skip-gram with negative sampling in plain numpy: windows, tables with row-wise Adagrad, one step's gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from checkrun_format.cli._demo.corpus import Ids

Floats: TypeAlias = npt.NDArray[np.float32]
Mask: TypeAlias = npt.NDArray[np.bool_]


class Embedding:
    """A table of vectors with one optimizer sum per row (row-wise Adagrad), and the rows changed since `take_changed`.

    Attributes
    ----------
    weight : (rows, dim) float32
    sum : (rows,) float32
        Sum over the steps of the mean squared gradient of the row.
    changed : (rows,) bool
    """

    def __init__(self, weight: Floats, total: Floats) -> None:
        self.weight = weight
        self.sum = total
        self.changed: Mask = np.zeros(len(weight), np.bool_)

    def take_changed(self) -> Mask:
        """The rows changed since the last call; from now on none is."""
        taken, self.changed = self.changed, np.zeros_like(self.changed)
        return taken

    def descend(self, rows: Ids, gradients: Floats, rate: float) -> None:
        """One Adagrad step; the gradients of a row that occurs more than once are added up first."""
        order = np.argsort(rows, kind="stable")
        ranked = rows[order]
        first = np.flatnonzero(np.diff(ranked, prepend=-1))
        unique, gradient = ranked[first], np.add.reduceat(gradients[order], first, axis=0)
        self.sum[unique] += np.square(gradient).mean(axis=1)
        self.weight[unique] -= rate * gradient / np.sqrt(self.sum[unique] + 1e-10)[:, None]
        self.changed[unique] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The contexts of b positions that follow each other: `used` marks which of the (b, 2 * reach) `contexts` count."""

    contexts: Ids
    used: Mask


def windows(topic_at: Ids, centers: Ids, reaches: Ids, *, most: int) -> Windows:
    """Positions at distance 1..reach around each center, in its own topic.

    A center stands for the pair of its word and the word before it, so distances on the left count from that one:
    the contexts of position p are p-1-reach .. p-2 and p+1 .. p+reach.
    """
    distance = np.arange(1, most + 1)
    offsets = np.concatenate([-1 - distance[::-1], distance])
    contexts = centers[:, None] + offsets
    inside = (contexts >= 0) & (contexts < len(topic_at))
    contexts = np.where(inside, contexts, 0)
    near = np.concatenate([distance[::-1], distance]) <= reaches[:, None]
    return Windows(contexts=contexts, used=inside & near & (topic_at[contexts] == topic_at[centers][:, None]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Loss of a batch (summed over its pairs) and its gradients by hidden vector, context and negative."""

    loss: float
    hidden: Floats
    contexts: Floats
    negatives: Floats


def gradients(hidden: Floats, contexts: Floats, used: Mask, negatives: Floats, *, per_pair: float) -> Gradients:
    """-log s(h.c) for each used pair, and -log s(-h.n) over the shared negatives, weighed as `per_pair` a pair.

    Parameters
    ----------
    hidden : (b, dim)
    contexts : (b, k, dim)
    used : (b, k)
    negatives : (m, dim)
    """
    near = np.einsum("bd,bkd->bk", hidden, contexts)
    far = hidden @ negatives.T
    weight = (used.sum(axis=1) * (per_pair / len(negatives))).astype(np.float32)[:, None]
    pull = np.where(used, sigmoid(near) - 1, 0).astype(np.float32)
    push = sigmoid(far) * weight
    loss = float((np.logaddexp(0, -near) * used).sum() + (np.logaddexp(0, far) * weight).sum())
    return Gradients(
        loss=loss,
        hidden=np.einsum("bk,bkd->bd", pull, contexts) + push @ negatives,
        contexts=(pull[:, :, None] * hidden[:, None, :])[used],
        negatives=push.T @ hidden,
    )


def sigmoid(x: npt.NDArray[Any]) -> Floats:
    return (0.5 * (1 + np.tanh(0.5 * x))).astype(np.float32)

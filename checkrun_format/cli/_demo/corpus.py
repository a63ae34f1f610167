"""The English text that every Python carries (`pydoc_data.topics`), as numbers."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int64]

_WORD = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A text of n words, topic after topic.

    Attributes
    ----------
    names : tuple of str
        What each input row stands for: first every word, then every word pair, each most frequent first.
    words : int
        How many of the names are words.
    counts : (words,) int64
        How often each word occurs.
    word_at, pair_at, topic_at : (n,) int64
        For each position: the row of its word; the row of the pair that the word before it and its word make (of the
        word alone at the start of a topic); the number of its topic.
    """

    names: tuple[str, ...]
    words: int
    counts: Ids
    word_at: Ids
    pair_at: Ids
    topic_at: Ids

    def digest(self) -> str:
        """SHA-256 of the numbered text: two Pythons with different texts differ here."""
        digest = hashlib.sha256("\n".join(self.names).encode())
        for array in (self.word_at, self.pair_at, self.topic_at):
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()


def read_corpus(topics: Mapping[str, str] | None = None) -> Corpus:
    """Number the words of `topics`, by default those of this Python's `pydoc_data.topics`.

    Raises
    ------
    ImportError
        If this Python was installed without `pydoc_data`.
    """
    topics = _topics() if topics is None else topics
    texts = [found for name in sorted(topics) if (found := _WORD.findall(topics[name].lower()))]
    pairs = [pair for text in texts for pair in [text[0], *map(" ".join, pairwise(text))]]
    words = [word for text in texts for word in text]
    word_names, word_at, counts = _number(words)
    pair_names, pair_at, _ = _number(pairs)
    return Corpus(
        names=(*word_names, *pair_names),
        words=len(word_names),
        counts=counts,
        word_at=word_at,
        pair_at=pair_at + len(word_names),
        topic_at=np.repeat(np.arange(len(texts)), [len(text) for text in texts]),
    )


def _topics() -> Mapping[str, str]:
    from pydoc_data.topics import topics

    return topics


def _number(tokens: list[str]) -> tuple[list[str], Ids, Ids]:
    """Names by falling frequency (ties in order of appearance), the number of each token, and the counts."""
    ranked = Counter(tokens).most_common()
    names = [name for name, _ in ranked]
    number = {name: i for i, name in enumerate(names)}
    counts = np.array([count for _, count in ranked], np.int64)
    return names, np.array([number[token] for token in tokens], np.int64), counts

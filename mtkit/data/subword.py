"""Subword regularization (Kudo 2018): another segmentation of the same text in each epoch, drawn on the fly from stored ids.

A unigram model gives a segmentation x = x_1 ... x_M of a text the probability prod p(x_m). Kudo, section 3.3, trains on segmentations drawn from
P(x)^alpha / sum_x' P(x')^alpha over all segmentations of the text. No piece crosses a space, so the words of a sentence are independent, and the
lattice of each distinct word is made once. Drawing is forward-filtering backward-sampling (the same section, l = infinity), here from the left: with

    beta(i) = log sum over the segmentations of word[i:] of exp(alpha * score),    beta(end) = 0

the piece word[i:j] follows a boundary at i with probability exp(alpha * score(word[i:j]) + beta(j) - beta(i)), which is exact.

Nothing is drawn from a generator with a state: draw number n of a word is a hash of (seed, epoch, side, pair number, number of the word, n).
"""

import dataclasses
import hashlib
import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtkit.data.pools import Pool, PoolSource
from mtkit.data.tokenizer import SIDES, SPACE_MARK, Side, Tokenizer
from mtkit.errors import ConfigError

Int64s = NDArray[np.int64]
UInt64s = NDArray[np.uint64]

MAX_ALPHA = 1000.0
"""Far above what is of use: only segmentations as probable as the best are drawn. Much larger numbers overflow."""

MAX_STATES = 4_000_000
"""Boundaries that are remembered, of about 8 in a word and 50 bytes each; above it the lattices are made anew. It never changes what is drawn."""

_END = -1
_GOLDEN = 0x9E3779B97F4A7C15


def require_unigram(tokenizer: Tokenizer, *, alpha: float) -> None:
    """Refuse a tokenizer that has no probabilities to draw by.

    Raises:
        ConfigError: It is of another type.
    """
    if tokenizer.config.type != "unigram":
        raise ConfigError(
            f"training.subword_alpha is {alpha}, which needs a unigram tokenizer, but this one is of type {tokenizer.config.type}",
            hint="Leave training.subword_alpha out, or make the data anew with tokenizer.type = unigram.",
        )


class SubwordSampler:
    """Segments stored sentences anew.

    Words that hold an unknown, a byte or a user-defined piece keep their segmentation. The text stays the same.

    Args:
        tokenizer: What the ids were made with, of type unigram.
        alpha: Smoothing of the distribution, above 0, at most `MAX_ALPHA`: 1 draws as the model has it, less is flatter, and the larger, the rarer
            is a segmentation other than the best. Kudo uses 0.1 to 0.5.

    Raises:
        ConfigError: The tokenizer is of another type, or alpha is out of range.
    """

    def __init__(self, tokenizer: Tokenizer, *, alpha: float) -> None:
        require_unigram(tokenizer, alpha=alpha)
        if not 0 < alpha <= MAX_ALPHA:
            raise ConfigError(f"subword_alpha must be above 0 and at most {MAX_ALPHA:g}, but is {alpha}")
        first = _Lattices(tokenizer, "src", alpha)
        self._lock = threading.Lock()
        self._lattices: dict[Side, _Lattices] = {"src": first, "tgt": first if tokenizer.joint else _Lattices(tokenizer, "tgt", alpha)}

    def sample(self, ids: NDArray[Any], offsets: Int64s, pair_numbers: Int64s, *, side: Side, seed: int, epoch: int) -> tuple[NDArray[Any], Int64s]:
        """Draw a segmentation of each sentence.

        The result of a sentence depends on its ids, its pair number and the keyword arguments only, not on its neighbours.

        Args:
            ids: Ids of all sentences, one after the other, without BOS and EOS.
            offsets: Sentence i is ids[offsets[i]:offsets[i + 1]]; begins with 0 and ends with len(ids).
            pair_numbers: What tells the sentences apart, one for each.
            side: Which side they belong to.
            seed: Of the run.
            epoch: From 0.

        Returns:
            New ids, of the type of the old, and their offsets.
        """
        lattices = self._lattices[side]
        words = _split(ids, offsets, lattices.begins_word)
        base = int.from_bytes(hashlib.blake2b(repr((seed, epoch, SIDES.index(side))).encode(), digest_size=8).digest(), "little")
        sentence_keys = _mix(pair_numbers.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(base))
        word_keys = _mix(sentence_keys[words.sentences] + words.numbers.astype(np.uint64) * np.uint64(_GOLDEN))
        with self._lock:  # a thread that works ahead may meet the main one here
            drawn, ends = lattices.draw(lattices.find(ids, words.starts), word_keys)
        return drawn.astype(ids.dtype), ends[words.first_words]


class SampledPools:
    """The pools of another source, each sentence with a segmentation that is drawn for its epoch. For training only.

    Args:
        source: Where the pools come from.
        sampler: Draws.
        seed: Of the run.
    """

    def __init__(self, source: PoolSource, sampler: SubwordSampler, *, seed: int) -> None:
        self._source = source
        self._sampler = sampler
        self._seed = seed

    @property
    def num_pairs(self) -> int | None:
        """Pairs of an epoch; None = not known."""
        return self._source.num_pairs

    @property
    def num_epochs(self) -> int | None:
        """How often the data can be read; None = any number of times."""
        return self._source.num_epochs

    @property
    def longest(self) -> int:
        """Tokens, without EOS, that a sentence may have, where a drawn segmentation is not more than twice as long as the stored one."""
        return 2 * self._source.longest

    def read(self, epoch: int, number: int) -> Pool:
        """Read a pool and draw; the same arguments give the same pool.

        Raises:
            ArtefactError: The data is damaged.
        """
        pool = self._source.read(epoch, number)
        numbers = _draw_numbers(pool.indices, pool.number)
        src_ids, src_offsets = self._sampler.sample(pool.src_ids, pool.src_offsets, numbers, side="src", seed=self._seed, epoch=epoch)
        tgt_ids, tgt_offsets = self._sampler.sample(pool.tgt_ids, pool.tgt_offsets, numbers, side="tgt", seed=self._seed, epoch=epoch)
        return dataclasses.replace(pool, src_ids=src_ids, src_offsets=src_offsets, tgt_ids=tgt_ids, tgt_offsets=tgt_offsets)

    def close(self) -> None:
        """End a read that is going on in another thread."""
        self._source.close()


def _draw_numbers(indices: Int64s, pool: int) -> Int64s:
    """A number for each pair of a pool by which it differs from all others of the epoch, and from itself where it comes again: pairs of a corpus that
    is drawn more often than it is large.

    Args:
        indices: Numbers of the pairs in the corpus.
        pool: Number of the pool in the epoch.
    """
    order = np.argsort(indices, kind="stable")
    is_first = np.diff(indices[order], prepend=-1) != 0
    starts = np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))
    times = np.empty(len(order), dtype=np.int64)
    times[order] = np.arange(len(order)) - starts
    return _mix((times + (pool << 24)).astype(np.uint64)).view(np.int64) ^ indices


@dataclass(frozen=True, kw_only=True, slots=True)
class _Words:
    """Where the words are.

    Attributes:
        starts: Where each word begins in the ids, and the end.
        sentences: Which sentence each belongs to.
        numbers: Its number in the sentence, from 0.
        first_words: The first word of each sentence, and the number of words.
    """

    starts: Int64s
    sentences: Int64s
    numbers: Int64s
    first_words: Int64s


def _split(ids: NDArray[Any], offsets: Int64s, begins_word: NDArray[np.bool_]) -> _Words:
    """Find the words: a word begins with the mark of a space, or where the sentence begins."""
    is_start = begins_word[ids]
    is_start[offsets[:-1][offsets[:-1] < offsets[1:]]] = True
    starts = np.flatnonzero(is_start)
    first_words = np.searchsorted(starts, offsets)
    num_words = np.diff(first_words)
    return _Words(
        starts=np.append(starts, len(ids)),
        sentences=np.repeat(np.arange(len(num_words)), num_words),
        numbers=np.arange(len(starts)) - np.repeat(first_words[:-1], num_words),
        first_words=first_words,
    )


class _Lattices:
    """The lattices of the words met so far, of one vocabulary.

    A lattice is a row of states, the boundaries at which a piece may begin. The edges of a state, likeliest first, are pieces with their cumulated
    probability and the state that follows; `_END` follows the last piece.

    Attributes:
        begins_word: Whether a piece begins with the mark of a space.
    """

    def __init__(self, tokenizer: Tokenizer, side: Side, alpha: float) -> None:
        scores = tokenizer.piece_scores(side)
        self._surfaces = tokenizer.pieces(range(len(scores)), side)
        self.begins_word = np.array([surface.startswith(SPACE_MARK) for surface in self._surfaces])
        self._is_fixed = np.array([score is None or SPACE_MARK in self._surfaces[index][1:] for index, score in enumerate(scores)])
        self._entries = {
            surface: (index, alpha * score)
            for index, (surface, score) in enumerate(zip(self._surfaces, scores, strict=True))
            if score is not None and not self._is_fixed[index]
        }
        self._max_chars = max(map(len, self._entries), default=1)
        self._clear()

    def _clear(self) -> None:
        self._table = _HashTable()
        self._first_states: Int64s = np.empty(0, dtype=np.int64)
        self._first_edges: Int64s = np.empty(0, dtype=np.int64)
        self._cumulated: NDArray[np.float64] = np.empty(0)
        self._pieces: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._next_states: NDArray[np.int32] = np.empty(0, dtype=np.int32)

    def find(self, ids: NDArray[Any], starts: Int64s) -> Int64s:
        """The first state of each word, ids[starts[i]:starts[i + 1]]; new words get their lattices."""
        if len(self._first_edges) > MAX_STATES:
            self._clear()
        lengths = np.diff(starts)
        positions = np.arange(len(ids)) - np.repeat(starts[:-1], lengths)
        # 64 bits tell a million words apart but for one chance in 30 million.
        keys = np.add.reduceat(_mix(ids.astype(np.uint64) + positions.astype(np.uint64) * np.uint64(_GOLDEN)), starts[:-1])
        words = self._table.find(keys)
        if (unknown := np.flatnonzero(words < 0)).size:
            new_keys, first = np.unique(keys[unknown], return_index=True)
            places = unknown[first]
            self._add([ids[starts[place] : starts[place + 1]].tolist() for place in places.tolist()])
            self._table.add(new_keys)
            words[unknown] = self._table.find(keys[unknown])
        return self._first_states[words]

    def _add(self, words: list[list[int]]) -> None:
        """Append the lattices of words that are given as the ids of one segmentation."""
        first_states: list[int] = []
        num_edges: list[int] = []
        cumulated: list[float] = []
        pieces: list[int] = []
        next_states: list[int] = []
        num_states = len(self._first_edges)
        for word in words:
            first_states.append(num_states)
            states = [[(1.0, index, position + 1)] for position, index in enumerate(word)] if self._is_fixed[word].any() else self._lattice(word)
            for edges in states:
                num_edges.append(len(edges))
                for probability, index, state in edges:
                    cumulated.append(probability)
                    pieces.append(index)
                    next_states.append(num_states + state if state < len(states) else _END)
            num_states += len(states)
        first_edges = len(self._pieces) + np.cumsum([0, *num_edges[:-1]])
        self._first_states = np.append(self._first_states, first_states)
        self._first_edges = np.append(self._first_edges, first_edges)
        self._cumulated = np.append(self._cumulated, cumulated)
        self._pieces = np.append(self._pieces, np.array(pieces, dtype=np.int32))
        self._next_states = np.append(self._next_states, np.array(next_states, dtype=np.int32))

    def _lattice(self, word: list[int]) -> list[list[tuple[float, int, int]]]:
        """The edges at each boundary of a word: cumulated probability, piece, next boundary. From some boundaries no path leads to the end."""
        surface = "".join(map(self._surfaces.__getitem__, word))
        entry_of, end, max_chars = self._entries.get, len(surface), self._max_chars
        beta = [-math.inf] * end + [0.0]
        states: list[list[tuple[float, int, int]]] = [[] for _ in range(end)]
        for start in range(end - 1, -1, -1):
            stops = range(start + 1, min(start + max_chars, end) + 1)
            found = [
                (entry[1] + beta[stop], entry[0], stop)
                for stop in stops
                if (entry := entry_of(surface[start:stop])) is not None and beta[stop] > -math.inf
            ]
            if found:
                found.sort(reverse=True)
                largest = found[0][0]
                weights = [math.exp(edge[0] - largest) for edge in found]
                total, cumulated = math.fsum(weights), 0.0
                beta[start] = largest + math.log(total)
                for weight, (_, index, stop) in zip(weights, found, strict=True):
                    cumulated += weight / total
                    states[start].append((cumulated, index, stop))
                states[start][-1] = (1.0, *states[start][-1][1:])
        return states

    def draw(self, states: Int64s, keys: UInt64s) -> tuple[NDArray[np.int32], Int64s]:
        """Draw a path through the lattice of each word.

        Args:
            states: First state of each word.
            keys: What the draws of each word are made from.

        Returns:
            The pieces of all words, and where each word begins in them, and the end.
        """
        lengths = np.zeros(len(states), dtype=np.int64)
        steps: list[tuple[Int64s, NDArray[np.int32]]] = []
        words = np.arange(len(states))
        while words.size:
            keys = keys + np.uint64(_GOLDEN)
            uniform = (_mix(keys) >> np.uint64(11)) * 2.0**-53
            edges = self._first_edges[states]
            is_later = uniform >= self._cumulated[edges]
            behind = np.flatnonzero(is_later)
            while behind.size:  # the last edge of a state has 1.0
                edges[behind] += 1
                behind = behind[uniform[behind] >= self._cumulated[edges[behind]]]
            steps.append((words, self._pieces[edges]))
            lengths[words] += 1
            next_states = self._next_states[edges]
            goes_on = np.flatnonzero(next_states != _END)
            words, keys, states = words[goes_on], keys[goes_on], next_states[goes_on].astype(np.int64)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        drawn = np.empty(starts[-1], dtype=np.int32)
        for number, (step_words, step_pieces) in enumerate(steps):
            drawn[starts[step_words] + number] = step_pieces
        return drawn, starts


class _HashTable:
    """Numbers 0, 1, ... of 64-bit keys in the order of their addition: open addressing with linear probing, searched for many keys at once."""

    def __init__(self) -> None:
        self._num_keys = 0
        self._bits = 12
        self._keys: UInt64s = np.zeros(1 << self._bits, dtype=np.uint64)
        self._values = np.full(1 << self._bits, -1, dtype=np.int32)

    def find(self, keys: UInt64s) -> Int64s:
        """The number of each key; -1 for one that was never added."""
        places = self._places(keys)
        values = self._values[places].astype(np.int64)
        pending = np.flatnonzero((values >= 0) & (self._keys[places] != keys))
        while pending.size:
            places[pending] = (places[pending] + 1) & (len(self._keys) - 1)
            found = places[pending]
            values[pending] = self._values[found]
            pending = pending[(self._values[found] >= 0) & (self._keys[found] != keys[pending])]
        return values

    def add(self, keys: UInt64s) -> None:
        """Number keys that differ from each other and from all that are here."""
        if 2 * (self._num_keys + len(keys)) > len(self._keys):
            old = self._values >= 0
            old_keys, old_values = self._keys[old], self._values[old]
            self._bits = (4 * (self._num_keys + len(keys))).bit_length()
            self._keys = np.zeros(1 << self._bits, dtype=np.uint64)
            self._values = np.full(1 << self._bits, -1, dtype=np.int32)
            self._insert(old_keys, old_values)
        self._insert(keys, np.arange(self._num_keys, self._num_keys + len(keys), dtype=np.int32))
        self._num_keys += len(keys)

    def _insert(self, keys: UInt64s, values: NDArray[np.int32]) -> None:
        places = self._places(keys)
        while keys.size:
            free = self._values[places] < 0
            self._values[places[free]] = values[free]  # of several keys at one place the last one gets it
            self._keys[places[free]] = keys[free]
            waits = ~free | (self._values[places] != values)
            keys, values, places = keys[waits], values[waits], (places[waits] + 1) & (len(self._keys) - 1)

    def _places(self, keys: UInt64s) -> Int64s:
        return (_mix(keys) >> np.uint64(64 - self._bits)).astype(np.int64)


def _mix(values: UInt64s) -> UInt64s:
    """The finalizer of SplitMix64 (Steele et al. 2014): 64 bits that look independent for inputs that differ."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values

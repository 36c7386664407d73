"""Pools from raw text, encoded while training goes on, without shards: for text that is too large to be stored twice, or that comes through a pipe.

Rows of the text, empty and unfit ones too, are cut into pools of `order.POOL_PAIRS` rows in the order in which they come. A pool is in random order
when it is used, but what is far apart in the text never meets: text that is sorted has to be shuffled before. The filters are those of
`preprocess.py`, but duplicates are found within a pool only.
"""

import hashlib
import json
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mtkit.config import to_dict
from mtkit.data import order
from mtkit.data.blocks import BlockEncoder, EncodedBlock, split_blocks
from mtkit.data.corpus import Corpus, TextPair
from mtkit.data.filters import DUPLICATE, FilterConfig, SeenHashes, describe_drops
from mtkit.data.pools import Pool
from mtkit.data.sources import Skip
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import DataError

HEAD_ROWS = 1000
"""Rows at the beginning of the text by which it is known again."""


class StreamPools:
    """The pools of raw text.

    Reading goes forward: the next pool costs its own rows only, a later one passes over the rows between, and an earlier one begins the text anew,
    which a pipe cannot. The pool that was read last is kept and can be had again.

    Args:
        corpus: The text.
        tokenizer: Encodes both sides.
        filters: Which pairs are dropped.

    Attributes:
        num_pairs: None: only the end of the text will tell.
        num_epochs: How often the text can be read: once if it comes through a pipe, else None = any number of times.
        longest: Tokens, without EOS, that a sentence may have; 0 = any number.
        fingerprint: sha256 that stands for the data: the first `HEAD_ROWS` rows, the sizes of the files, the tokenizer and the filters.

    Raises:
        DataError: A file is missing or not what its name says.
    """

    num_pairs = None

    def __init__(self, corpus: Corpus, *, tokenizer: Tokenizer, filters: FilterConfig) -> None:
        corpus.check_start()
        self.num_epochs = 1 if corpus.is_pipe else None
        self.longest = filters.max_length or 0
        self._corpus = corpus
        self._encoder = BlockEncoder(tokenizer, filters)
        self._pool_rows = order.POOL_PAIRS
        self._is_closed = threading.Event()
        self._epoch = 0
        self._rows = _Rows(corpus)
        self._blocks = self._encode(self._rows)
        self._ahead: _Placed | None = None  # the first pair of a later pool: its being there tells that the epoch goes on
        self._asked = 0
        self._pool: Pool | None = None
        sizes = [] if corpus.is_pipe else [Path(path).stat().st_size for source in corpus.sources for path in source.paths]
        parts = [tokenizer.fingerprint, to_dict(filters), sizes, self._pool_rows, self._rows.head(HEAD_ROWS)]
        self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def read(self, epoch: int, number: int) -> Pool:
        """Read a pool into memory; if no pair of it is fit for training, the first one after it of which some are.

        Args:
            epoch: From 0.
            number: Of the pool in the epoch, from 0.

        Raises:
            DataError: The text is damaged, ends before, or holds no pair that is fit.
            ValueError: `close` was called, or a pipe would have to be read again.
        """
        if self._pool is not None and epoch == self._epoch and self._asked <= number <= self._pool.number:
            return self._pool
        self._go_to(epoch, number)
        self._pool = self._read(number)
        self._asked = number
        return self._pool

    def close(self) -> None:
        """End a read that is going on in another thread. Nothing can be read afterwards."""
        self._is_closed.set()

    def _go_to(self, epoch: int, number: int) -> None:
        """Make the next block the first one of a pool, or of one after it where nothing lies between."""
        row = number * self._pool_rows
        is_forward = epoch == self._epoch and (self._pool is None or number > self._pool.number)
        if is_forward and self._ahead is not None and self._ahead.row >= row:
            return
        self._ahead = None
        self._blocks.close()
        if not (is_forward and self._rows.number <= row):
            if self.num_epochs is not None:
                raise ValueError(f"pool {number} of epoch {epoch} lies before what was read from a pipe")
            self._rows.close()
            self._rows = _Rows(self._corpus)
            self._epoch, self._pool = epoch, None
        self._rows.skip(row - self._rows.number)
        self._blocks = self._encode(self._rows)

    def _read(self, number: int) -> Pool:
        parts: list[_Placed] = []
        seen = SeenHashes()
        dropped: Counter[str] = Counter()
        while (placed := self._next_block()) is not None:
            dropped.update(placed.block.dropped)
            if not len(placed.block):
                continue
            if parts and placed.row // self._pool_rows != parts[0].row // self._pool_rows:
                self._ahead = placed
                break
            block = placed.block
            parts.append(placed if block.hashes_N is None else _Placed(placed.row, block.select(seen.add(block.hashes_N), reason=DUPLICATE)))
        if not parts:
            raise self._nothing(number, dropped)
        blocks = [part.block for part in parts]
        return Pool(
            epoch=self._epoch,
            number=parts[0].row // self._pool_rows,
            is_last=self._ahead is None,
            indices=np.concatenate([part.row + part.block.rows_N.astype(np.int64) for part in parts]),
            src_ids=np.concatenate([block.src_ids for block in blocks]),
            src_offsets=np.cumsum(np.concatenate([[0], *(block.src_lengths_N for block in blocks)]), dtype=np.int64),
            tgt_ids=np.concatenate([block.tgt_ids for block in blocks]),
            tgt_offsets=np.cumsum(np.concatenate([[0], *(block.tgt_lengths_N for block in blocks)]), dtype=np.int64),
        )

    def _next_block(self) -> "_Placed | None":
        placed, self._ahead = self._ahead, None
        return next(self._blocks, None) if placed is None else placed

    def _encode(self, rows: "_Rows") -> Generator["_Placed", None, None]:
        """The blocks from where the rows are; none reaches across two pools."""
        row = rows.number
        for pairs in split_blocks(rows, shard_pairs=self._pool_rows, num_before=row):
            if self._is_closed.is_set():
                raise ValueError("the stream was closed")
            yield _Placed(row, self._encoder.encode(pairs))
            row += len(pairs)

    def _nothing(self, number: int, dropped: Counter[str]) -> DataError:
        name, num_read = self._corpus.name, self._rows.number
        if number:
            return DataError(
                f"{name}: ends before pair {number * self._pool_rows + 1:,}, where the run goes on, or none after it is fit for training",
                hint="Give the whole text that the run was started with.",
            )
        if not num_read:
            return DataError(f"{name}: is empty")
        counts, hint = describe_drops(dropped)
        return DataError(f"{name}: none of {num_read} pairs is left after filtering ({counts})", hint=hint)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A block, and the number of its first row in the text."""

    row: int
    block: EncodedBlock


class _Rows(Iterator[TextPair]):
    """The rows of a text, once through.

    Attributes:
        number: Of the next row, from 0.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.number = 0
        self._skip = Skip()
        self._pairs = corpus.pairs(skip=self._skip)
        self._head: deque[TextPair] = deque()

    def __next__(self) -> TextPair:
        pair = self._head.popleft() if self._head else next(self._pairs)
        self.number += 1
        return pair

    def head(self, count: int) -> list[TextPair]:
        """The next rows, which stay."""
        self._head.extend(pair for _, pair in zip(range(count - len(self._head)), self._pairs, strict=False))
        return list(self._head)

    def skip(self, count: int) -> None:
        """Pass over rows, or go to the end if there are not so many."""
        self.number += count
        while count and self._head:
            self._head.popleft()
            count -= 1
        self._skip.num_left += count

    def close(self) -> None:
        """Close the files."""
        self._pairs.close()

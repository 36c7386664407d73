"""Blocks of text pairs to blocks of token ids, in this process or in several, always in the same order and with the same result."""

import contextlib
import itertools
import multiprocessing
import signal
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtkit.data.filters import FilterConfig, hash_pairs, text_reason, token_reasons
from mtkit.data.sources import TextPair
from mtkit.data.token_file import Ids, id_dtype
from mtkit.data.tokenizer import Side, Tokenizer
from mtkit.errors import MTKitError

BLOCK_PAIRS = 2048
BLOCK_CHARACTERS = 1 << 20
SERIAL_BLOCKS = 10
"""A corpus that fits into this many blocks is done before other processes would have started."""

_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedBlock:
    """The pairs of a block that passed the filters. N counts these pairs.

    Attributes:
        num_read: Pairs that the block had.
        src_ids: Source ids of all pairs, one after the other, without EOS.
        src_lengths_N: Source ids of each pair.
        tgt_ids: Target ids likewise.
        tgt_lengths_N: Target ids of each pair.
        hashes_N: 64-bit hash of each pair's text, or None when duplicates are not looked for.
        dropped: Reason -> number of pairs dropped for it.
        rows_N: Number of each pair in the block, from 0, ascending.
        source: Number of the source in the corpus that they come from, from 0.
    """

    num_read: int
    src_ids: Ids
    src_lengths_N: NDArray[np.int32]
    tgt_ids: Ids
    tgt_lengths_N: NDArray[np.int32]
    hashes_N: NDArray[np.uint64] | None
    dropped: dict[str, int]
    rows_N: NDArray[np.int32]
    source: int = 0

    def __len__(self) -> int:
        """Number of pairs that passed."""
        return len(self.rows_N)

    def select(self, is_kept_N: NDArray[np.bool_], *, reason: str) -> "EncodedBlock":
        """The block without the pairs that are not kept, which are counted as dropped for `reason`."""
        if is_kept_N.all():
            return self
        return EncodedBlock(
            num_read=self.num_read,
            src_ids=self.src_ids[np.repeat(is_kept_N, self.src_lengths_N)],
            src_lengths_N=self.src_lengths_N[is_kept_N],
            tgt_ids=self.tgt_ids[np.repeat(is_kept_N, self.tgt_lengths_N)],
            tgt_lengths_N=self.tgt_lengths_N[is_kept_N],
            hashes_N=None if self.hashes_N is None else self.hashes_N[is_kept_N],
            dropped=_add_count(self.dropped, reason, int(np.count_nonzero(~is_kept_N))),
            rows_N=self.rows_N[is_kept_N],
            source=self.source,
        )


def split_blocks(pairs: Iterator[TextPair], *, shard_pairs: int, num_before: int = 0) -> Iterator[list[TextPair]]:
    """Gather pairs into blocks of bounded size.

    Args:
        pairs: The text.
        shard_pairs: No block reaches across a multiple of this number of pairs.
        num_before: Pairs that came before these.
    """
    block: list[TextPair] = []
    num_characters = 0
    for number, pair in enumerate(pairs, start=num_before + 1):
        block.append(pair)
        num_characters += len(pair[0]) + len(pair[1])
        if len(block) == BLOCK_PAIRS or num_characters >= BLOCK_CHARACTERS or number % shard_pairs == 0:
            yield block
            block, num_characters = [], 0
    if block:
        yield block


class BlockEncoder:
    """Filters and encodes blocks.

    Args:
        tokenizer: Encodes both sides.
        filters: What is dropped; duplicates are only hashed here, because finding them takes all blocks.
    """

    def __init__(self, tokenizer: Tokenizer, filters: FilterConfig) -> None:
        self._tokenizer = tokenizer
        self._filters = filters

    def encode(self, pairs: list[TextPair]) -> EncodedBlock:
        """Filter and encode a block."""
        dropped: dict[str, int] = {}
        fit, rows = [], []
        for row, pair in enumerate(pairs):
            reason = text_reason(*pair, self._filters)
            if reason is None:
                fit.append(pair)
                rows.append(row)
            else:
                dropped = _add_count(dropped, reason, 1)
        src_ids, src_lengths_N = self._encode_side([src for src, _ in fit], "src")
        tgt_ids, tgt_lengths_N = self._encode_side([tgt for _, tgt in fit], "tgt")
        block = EncodedBlock(
            num_read=len(pairs),
            src_ids=src_ids,
            src_lengths_N=src_lengths_N,
            tgt_ids=tgt_ids,
            tgt_lengths_N=tgt_lengths_N,
            hashes_N=hash_pairs(fit) if self._filters.drop_duplicates else None,
            dropped=dropped,
            rows_N=np.asarray(rows, dtype=np.int32),
        )
        is_fit_N = np.ones(len(fit), dtype=np.bool_)
        for reason, mask_N in token_reasons(src_lengths_N, tgt_lengths_N, self._filters).items():
            block = block.select(~mask_N[is_fit_N], reason=reason)
            is_fit_N &= ~mask_N
        return block

    def _encode_side(self, lines: list[str], side: Side) -> tuple[Ids, NDArray[np.int32]]:
        rows = self._tokenizer.encode(lines, side)
        vocab_size = self._tokenizer.src_vocab_size if side == "src" else self._tokenizer.tgt_vocab_size
        lengths_N = np.fromiter(map(len, rows), dtype=np.int32, count=len(rows))
        return np.fromiter(chain.from_iterable(rows), dtype=id_dtype(vocab_size), count=int(lengths_N.sum())), lengths_N


def encode_blocks(
    blocks: Iterator[list[TextPair]], *, tokenizer: Tokenizer, tokenizer_directory: Path, filters: FilterConfig, num_workers: int
) -> Generator[EncodedBlock, None, None]:
    """Filter and encode blocks, in order. Closing the generator ends the worker processes.

    Args:
        blocks: See `split_blocks`.
        tokenizer: Encodes in this process.
        tokenizer_directory: Where the files of the same tokenizer are, for other processes to load.
        filters: What is dropped.
        num_workers: 1 encodes in this process; more start that many others, unless the corpus is too small to be worth it.

    Raises:
        MTKitError: A worker process ended unexpectedly.
    """
    if num_workers > 1:
        head = list(itertools.islice(blocks, SERIAL_BLOCKS + 1))
        blocks = chain(head, blocks)
        if len(head) > SERIAL_BLOCKS:
            yield from _encode_in_processes(blocks, directory=tokenizer_directory, filters=filters, num_workers=num_workers)
            return
    encoder = BlockEncoder(tokenizer, filters)
    yield from map(encoder.encode, blocks)


class _Worker:
    """A process that encodes one block at a time.

    It is spawned, not forked, so that it is safe beside the threads of torch. It holds only its own end of a pipe: when this process ends, in
    whatever way, the worker reads the end of the pipe and ends too.
    """

    def __init__(self, directory: Path, filters: FilterConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other_end = context.Pipe()
        self._process = context.Process(target=_work, args=(other_end, directory, filters), daemon=True)
        self._process.start()
        other_end.close()

    def send(self, block: list[TextPair]) -> None:
        with self._explain():
            self._connection.send(block)

    def receive(self) -> EncodedBlock:
        with self._explain():
            result: EncodedBlock | BaseException = self._connection.recv()
        if isinstance(result, BaseException):
            raise result
        return result

    def stop(self) -> None:
        self._connection.close()
        self._process.join(_STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    @contextlib.contextmanager
    def _explain(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            self._process.join(_STOP_TIMEOUT_S)
            raise MTKitError(
                f"a worker process ended unexpectedly (exit code {self._process.exitcode})",
                hint="It may have been killed for want of memory; use fewer workers. What is finished is kept, so running the command again goes on.",
            ) from error


def _work(connection: "Connection[Any, Any]", directory: Path, filters: FilterConfig) -> None:
    """The life of a worker process: Ctrl-C is left to the parent, and the end of the pipe is the end of work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    encoder = BlockEncoder(Tokenizer.read_files(directory), filters)
    with contextlib.suppress(EOFError, OSError):
        while True:
            block = connection.recv()
            try:
                connection.send(encoder.encode(block))
            except (RuntimeError, ValueError, TypeError, MemoryError) as error:
                connection.send(error)


def _encode_in_processes(blocks: Iterator[list[TextPair]], *, directory: Path, filters: FilterConfig, num_workers: int) -> Iterator[EncodedBlock]:
    """Give each worker one block at a time and take the results in order.

    A worker is sent a block only when it has nothing else to do, so that neither side ever waits for the other to empty a full pipe.
    """
    with contextlib.ExitStack() as stack:
        busy: deque[_Worker] = deque()
        for block in itertools.islice(blocks, num_workers):
            worker = _Worker(directory, filters)
            stack.callback(worker.stop)
            worker.send(block)
            busy.append(worker)
        waiting = next(blocks, None)
        while busy:
            worker = busy.popleft()
            result = worker.receive()
            if waiting is not None:
                worker.send(waiting)
                busy.append(worker)
                waiting = next(blocks, None)
            yield result


def _add_count(counts: dict[str, int], reason: str, number: int) -> dict[str, int]:
    return {**counts, reason: counts.get(reason, 0) + number} if number else counts

"""From pair numbers to tensors.

Shape letters: B sentences, S source positions, T target positions; M and N those of packed batches.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtkit.data.packing import PackedShape, pack_side
from mtkit.data.tokenizer import BOS_ID, EOS_ID, PAD_ID

T = TypeVar("T")

CLOSE_TIMEOUT_S = 5.0


class Pairs(Protocol):
    """What batches are made of: token ids by pair number. A `Pool` is one."""

    def src(self, index: int) -> NDArray[Any]:
        """Source ids of a pair, without EOS."""

    def tgt(self, index: int) -> NDArray[Any]:
        """Target ids of a pair, without EOS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Sentence pairs as tensors, padded to the longest of each side.

    Attributes:
        src_BS: Source ids and EOS, int64; `PAD_ID` where padded.
        src_mask_BS: True at real tokens.
        tgt_in_BT: What the decoder reads: BOS and the target ids.
        tgt_out_BT: What it has to predict at the same positions: the target ids and EOS.
        tgt_mask_BT: True at real tokens.
        num_tgt_tokens: Real target tokens, EOS included.
        num_src_tokens: Real source tokens, EOS included.
    """

    src_BS: Tensor
    src_mask_BS: Tensor
    tgt_in_BT: Tensor
    tgt_out_BT: Tensor
    tgt_mask_BT: Tensor
    num_tgt_tokens: int
    num_src_tokens: int

    def to(self, device: torch.device) -> Self:
        """The same batch on a device; the copy to a GPU does not block."""
        if device.type == "cpu":
            return self
        return type(self)(
            src_BS=move(self.src_BS, device),
            src_mask_BS=move(self.src_mask_BS, device),
            tgt_in_BT=move(self.tgt_in_BT, device),
            tgt_out_BT=move(self.tgt_out_BT, device),
            tgt_mask_BT=move(self.tgt_mask_BT, device),
            num_tgt_tokens=self.num_tgt_tokens,
            num_src_tokens=self.num_src_tokens,
        )


def collate(src: Sequence[Sequence[int] | NDArray[Any]], tgt: Sequence[Sequence[int] | NDArray[Any]]) -> Batch:
    """Make a batch of token ids given without BOS and EOS, one sequence per sentence and side."""
    src_BS, src_lengths = _pad(src, extra=1)
    tgt_in_BT, tgt_lengths = _pad(tgt, extra=1, offset=1)
    rows = np.arange(len(src))
    src_BS[rows, src_lengths - 1] = EOS_ID
    tgt_in_BT[:, 0] = BOS_ID
    tgt_out_BT = np.full_like(tgt_in_BT, PAD_ID)
    tgt_out_BT[:, :-1] = tgt_in_BT[:, 1:]
    tgt_out_BT[rows, tgt_lengths - 1] = EOS_ID
    return Batch(
        src_BS=torch.from_numpy(src_BS),
        src_mask_BS=torch.from_numpy(np.arange(src_BS.shape[1]) < src_lengths[:, None]),
        tgt_in_BT=torch.from_numpy(tgt_in_BT),
        tgt_out_BT=torch.from_numpy(tgt_out_BT),
        tgt_mask_BT=torch.from_numpy(np.arange(tgt_in_BT.shape[1]) < tgt_lengths[:, None]),
        num_tgt_tokens=int(tgt_lengths.sum()),
        num_src_tokens=int(src_lengths.sum()),
    )


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the sentences of a packed sequence lie.

    Attributes:
        starts: int32 [B + 1], the first position of each sentence, and the end. Sentences may be empty.
        positions_N: int64, the position of each token in its sentence.
        max_length: At least the length of the longest sentence.
    """

    starts: Tensor
    positions_N: Tensor
    max_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """Sentence pairs without padding between them; a `PackedShape` gives the sizes of all tensors.

    Attributes:
        src_M: Source ids, each sentence with EOS, int64; `PAD_ID` in unused positions, here and below.
        src: Where the source sentences lie.
        tgt_in_N: What the decoder reads: BOS and the target ids of each sentence.
        tgt_out_N: What it has to predict at the same positions: the target ids and EOS.
        tgt: Where the target sentences lie.
        num_tgt_tokens: Real target tokens, EOS included.
        num_src_tokens: Real source tokens, EOS included.
    """

    src_M: Tensor
    src: Packing
    tgt_in_N: Tensor
    tgt_out_N: Tensor
    tgt: Packing
    num_tgt_tokens: int
    num_src_tokens: int

    def to(self, device: torch.device) -> Self:
        """The same batch on a device; the copy to a GPU does not block."""
        if device.type == "cpu":
            return self
        src, tgt = (
            Packing(starts=move(side.starts, device), positions_N=move(side.positions_N, device), max_length=side.max_length)
            for side in (self.src, self.tgt)
        )
        return type(self)(
            src_M=move(self.src_M, device),
            src=src,
            tgt_in_N=move(self.tgt_in_N, device),
            tgt_out_N=move(self.tgt_out_N, device),
            tgt=tgt,
            num_tgt_tokens=self.num_tgt_tokens,
            num_src_tokens=self.num_src_tokens,
        )

    def tensors(self) -> list[Tensor]:
        """All that a recorded step reads, in a fixed order."""
        return [self.src_M, self.src.starts, self.src.positions_N, self.tgt_in_N, self.tgt_out_N, self.tgt.starts, self.tgt.positions_N]


def pack(src: Sequence[Sequence[int] | NDArray[Any]], tgt: Sequence[Sequence[int] | NDArray[Any]], shape: PackedShape) -> PackedBatch:
    """Make a packed batch of token ids given without BOS and EOS, one sequence per sentence and side."""

    def side(ids: NDArray[np.int64], lengths: NDArray[np.int64], tokens: int) -> tuple[Tensor, Packing]:
        packed, positions, starts = pack_side(ids, lengths + 1, tokens=tokens, num_slots=shape.num_slots, max_length=shape.max_length, pad=PAD_ID)
        return torch.from_numpy(packed), Packing(torch.from_numpy(starts), torch.from_numpy(positions), shape.max_length)

    (src_ids, src_lengths), (tgt_ids, tgt_lengths) = _flat(src), _flat(tgt)
    src_ends, tgt_ends = np.cumsum(src_lengths), np.cumsum(tgt_lengths)
    src_M, src_packing = side(np.insert(src_ids, src_ends, EOS_ID), src_lengths, shape.src_tokens)
    tgt_in_N, tgt_packing = side(np.insert(tgt_ids, tgt_ends - tgt_lengths, BOS_ID), tgt_lengths, shape.tgt_tokens)
    tgt_out_N = torch.full_like(tgt_in_N, PAD_ID)
    tgt_out_N[: len(tgt_ids) + len(tgt)] = torch.from_numpy(np.insert(tgt_ids, tgt_ends, EOS_ID))
    return PackedBatch(
        src_M=src_M,
        src=src_packing,
        tgt_in_N=tgt_in_N,
        tgt_out_N=tgt_out_N,
        tgt=tgt_packing,
        num_tgt_tokens=len(tgt_ids) + len(tgt),
        num_src_tokens=len(src_ids) + len(src),
    )


def _flat(rows: Sequence[Sequence[int] | NDArray[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows one after the other, and the length of each."""
    return np.concatenate(rows, dtype=np.int64, casting="unsafe"), np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))


def load_batch(pairs: Pairs, indices: NDArray[np.int64], shape: PackedShape | None = None) -> Batch | PackedBatch:
    """Read the pairs with the given numbers into a batch: a packed one of the given shape, or else a padded one."""
    numbers = indices.tolist()
    src, tgt = [pairs.src(number) for number in numbers], [pairs.tgt(number) for number in numbers]
    return collate(src, tgt) if shape is None else pack(src, tgt, shape)


class Prefetcher(Iterator[T]):
    """Computes the items of an iterator in one thread, a few ahead of their use. Close it, or use it in a `with` block.

    The order is the iterator's, and an error in it is raised where its item is asked for.
    """

    def __init__(self, items: Iterator[T], *, depth: int = 4) -> None:
        self._queue: queue.Queue[Callable[[], T] | None] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(items,), name="mtkit-prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        get = self._queue.get()
        if get is None:
            self._put_end()
            raise StopIteration
        return get()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the thread; items already computed are dropped, and there are no more.

        A thread that does not end in time is left behind: it waits for input which may never come.

        Args:
            timeout_s: Seconds it has.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        deadline = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
            self._thread.join(timeout=0.01)
        self._put_end()  # for another thread that waits here

    def _put_end(self) -> None:
        with contextlib.suppress(queue.Full):  # there is one already
            self._queue.put_nowait(None)

    def _work(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                self._put(lambda item=item: item)  # type: ignore[misc]
                if self._closed.is_set():
                    return
        except BaseException as error:
            self._put(_raiser(error))
        self._put(None)

    def _put(self, get: Callable[[], T] | None) -> None:
        if not self._closed.is_set():  # else nobody may be there any more to make room
            self._queue.put(get)


def _raiser(error: BaseException) -> Callable[[], Any]:
    def raise_error() -> Any:
        raise error

    return raise_error


def _pad(rows: Sequence[Sequence[int] | NDArray[Any]], *, extra: int, offset: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Copy rows into a padded matrix with `extra` more columns, from column `offset` on; returns it and the lengths with `extra` added."""
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows)) + extra
    matrix = np.full((len(rows), int(lengths.max())), PAD_ID, dtype=np.int64)
    for row, values in enumerate(rows):
        matrix[row, offset : offset + len(values)] = values
    return matrix, lengths


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; the copy to a GPU does not block."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

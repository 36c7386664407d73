"""One side of one shard on disk: a file of token ids, memory-mapped.

All numbers are little-endian:

    header    64 bytes: magic, version, bytes per id, number of rows, number of ids, CRC-32 of the ids, of the offsets, and of the header itself
    ids       uint16 or uint32 each, row after row, then zeros up to a multiple of 8 bytes
    offsets   int64 each, number of rows + 1: row i is ids[offsets[i]:offsets[i + 1]]

Nothing of a file is held in memory but what is asked for, so that a file may be larger than the memory.
"""

import errno
import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mtkit.errors import ArtefactError, ResourceError

MAGIC = b"MTKITIDS"
TOKEN_FILE_VERSION = 1
HEADER_SIZE = 64
_HEADER = struct.Struct("<8sHH4xQQII20x")  # followed by its own CRC-32
_CRC = struct.Struct("<I")

_ROWS_AT_ONCE = 1 << 14  # of a copy: bounds its temporary arrays

DAMAGED_HINT = "The file is damaged: copy it anew, or run `mtkit preprocess` again."

Ids = NDArray[np.unsignedinteger[Any]]
Int64s = NDArray[np.int64]


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest type that holds every id of a vocabulary: uint16 up to 65,536 pieces, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class TokenFileWriter:
    """Writes rows of token ids to a seekable stream; memory grows by 8 bytes per row.

    Args:
        stream: An empty file, open for writing at its start.
        dtype: Type of the ids, see `id_dtype`.
    """

    def __init__(self, stream: BinaryIO, *, dtype: np.dtype[Any]) -> None:
        self.num_ids = 0
        self._stream = stream
        self._dtype = dtype
        self._offsets: list[NDArray[np.int64]] = [np.zeros(1, dtype=np.int64)]
        self._crc = 0
        stream.write(bytes(HEADER_SIZE))

    def write(self, ids: Ids, lengths_N: NDArray[np.integer[Any]]) -> None:
        """Append rows.

        Args:
            ids: The ids of all rows, one after the other.
            lengths_N: Ids in each row; their sum is the length of `ids`.
        """
        data = ids.astype(self._dtype, copy=False).tobytes()
        self._stream.write(data)
        self._crc = zlib.crc32(data, self._crc)
        offsets_N = self.num_ids + np.cumsum(lengths_N, dtype=np.int64)
        if len(offsets_N):
            self._offsets.append(offsets_N)
        self.num_ids += len(ids)

    def finish(self) -> None:
        """Write the offsets and the header; the caller closes the stream."""
        offsets = np.concatenate(self._offsets).astype("<i8", copy=False)
        if offsets[-1] != self.num_ids:
            raise ValueError(f"rows of {offsets[-1]} ids in all, but {self.num_ids} ids were written")
        data = offsets.tobytes()
        self._stream.write(bytes(-self.num_ids * self._dtype.itemsize % 8) + data)
        self._stream.seek(0)
        self._stream.write(
            pack_header(
                itemsize=self._dtype.itemsize, num_rows=len(offsets) - 1, num_ids=self.num_ids, ids_crc=self._crc, offsets_crc=zlib.crc32(data)
            )
        )


def pack_header(*, itemsize: int, num_rows: int, num_ids: int, ids_crc: int, offsets_crc: int) -> bytes:
    """The first 64 bytes of a token file."""
    header = _HEADER.pack(MAGIC, TOKEN_FILE_VERSION, itemsize, num_rows, num_ids, ids_crc, offsets_crc)
    return header + _CRC.pack(zlib.crc32(header))


def offsets_position(*, itemsize: int, num_ids: int) -> int:
    """Byte at which the offsets begin."""
    return HEADER_SIZE + -(-num_ids * itemsize // 8) * 8


class TokenFile:
    """A token file, memory-mapped.

    Attributes:
        path: The file.
        num_rows: Number of rows.
        num_ids: Number of ids in all rows.
    """

    def __init__(self, path: Path, *, vocab_size: int | None = None, read_offsets: bool = True) -> None:
        """Map a file and check its header, its size and the ends of its offsets.

        Args:
            path: The file.
            vocab_size: What the ids of a row are checked against; None does not check them.
            read_offsets: Check all offsets too, which reads them.

        Raises:
            ArtefactError: It is missing, not a token file, or damaged.
        """
        self.path = path
        try:
            with open(path, "rb", buffering=0) as stream:
                size = os.fstat(stream.fileno()).st_size
                dtype, self._ids_crc, self._offsets_crc = self._parse_header(stream.read(HEADER_SIZE), size=size)
                start = offsets_position(itemsize=dtype.itemsize, num_ids=self.num_ids)
                ends = [os.pread(stream.fileno(), 8, position) for position in (start, size - 8)]
                self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise ResourceError(
                    f"{path}: cannot be opened, for this process has as many files open as it may have",
                    hint="Raise the limit with `ulimit -n`, or make fewer and larger shards with `mtkit preprocess --set shard_pairs=...`.",
                ) from error
            raise ArtefactError(f"{path}: cannot be read: {error.strerror or error}") from error
        if not read_offsets:
            self._advise("MADV_RANDOM")  # no more is read than is asked for
        self._vocab_size = vocab_size
        self._ids: Ids = np.frombuffer(self._data, dtype=dtype, count=self.num_ids, offset=HEADER_SIZE)
        self._offsets_start = start
        self._offsets: Int64s = np.frombuffer(self._data, dtype="<i8", count=self.num_rows + 1, offset=self._offsets_start)
        if read_offsets:
            self._check_offsets()
        if [int.from_bytes(end, "little") for end in ends] != [0, self.num_ids]:
            raise self._not_rising()

    def _parse_header(self, header: bytes, *, size: int) -> tuple[np.dtype[Any], int, int]:
        if len(header) < HEADER_SIZE or header[: len(MAGIC)] != MAGIC:
            raise ArtefactError(f"{self.path}: is not a token file of mtkit: it does not begin with {MAGIC!r}", hint=DAMAGED_HINT)
        _, version, itemsize, self.num_rows, self.num_ids, ids_crc, offsets_crc = _HEADER.unpack_from(header)
        if _CRC.unpack_from(header, _HEADER.size)[0] != zlib.crc32(header[: _HEADER.size]):
            raise ArtefactError(f"{self.path}: the header (bytes 0 to 63) does not have its checksum", hint=DAMAGED_HINT)
        if version != TOKEN_FILE_VERSION or itemsize not in (2, 4):
            raise ArtefactError(
                f"{self.path}: has version {version} with {itemsize} bytes per id; this mtkit reads version {TOKEN_FILE_VERSION} with 2 or 4"
            )
        expected = offsets_position(itemsize=itemsize, num_ids=self.num_ids) + 8 * (self.num_rows + 1)
        if size != expected:
            raise ArtefactError(f"{self.path}: has {size} bytes, its header says {expected}", hint=DAMAGED_HINT)
        return np.dtype(f"<u{itemsize}"), ids_crc, offsets_crc

    def _check_offsets(self) -> None:
        if zlib.crc32(self._offsets.data) != self._offsets_crc:
            raise ArtefactError(
                f"{self.path}: the offsets at byte {self._offsets_start} do not have the checksum that the header gives", hint=DAMAGED_HINT
            )
        if self.num_rows and int(np.diff(self._offsets).min()) < 0:
            raise self._not_rising()

    def _not_rising(self) -> ArtefactError:
        return ArtefactError(f"{self.path}: the offsets at byte {self._offsets_start} do not rise from 0 to {self.num_ids}", hint=DAMAGED_HINT)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self._data)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the ids."""
        return self._ids.dtype

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Ids in each row: reads all offsets."""
        return np.diff(self._offsets).astype(np.int32)

    def row(self, index: int) -> Ids:
        """The ids of a row: a view of the file, read-only.

        Raises:
            ArtefactError: The row is damaged.
        """
        start, stop = self._bounds(np.asarray([index]))
        ids = self._ids[start[0] : stop[0]]
        self._check_range(ids, np.asarray([index]), stop - start)
        return ids

    def row_lengths(self, rows_N: Int64s) -> Int64s:
        """Ids in some rows, (N,).

        Raises:
            ArtefactError: The offsets of one are impossible.
        """
        start_N, stop_N = self._bounds(rows_N)
        return stop_N - start_N

    def copy_rows(self, rows_N: Int64s, *, into: Ids, at_N: Int64s) -> None:
        """Copy rows into a flat array.

        Args:
            rows_N: Their numbers.
            into: Where to.
            at_N: Where each row begins there.

        Raises:
            ArtefactError: One of the rows is damaged.
        """
        for first in range(0, len(rows_N), _ROWS_AT_ONCE):
            rows, at = rows_N[first : first + _ROWS_AT_ONCE], at_N[first : first + _ROWS_AT_ONCE]
            start, stop = self._bounds(rows)
            lengths = stop - start
            within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            ids = self._ids[np.repeat(start, lengths) + within]
            self._check_range(ids, rows, lengths)
            into[np.repeat(at, lengths) + within] = ids

    def _bounds(self, rows_N: Int64s) -> tuple[Int64s, Int64s]:
        """Where rows begin and end in the ids."""
        start_N, stop_N = self._offsets[rows_N], self._offsets[rows_N + 1]
        is_wrong_N = (start_N < 0) | (start_N > stop_N) | (stop_N > self.num_ids)
        if is_wrong_N.any():
            row = int(rows_N[int(is_wrong_N.argmax())])
            raise ArtefactError(
                f"{self.path}: the offsets at byte {self._offsets_start + 8 * row}, of row {row}, do not rise within 0 to {self.num_ids}",
                hint=DAMAGED_HINT,
            )
        return start_N, stop_N

    def _check_range(self, ids: Ids, rows_N: Int64s, lengths_N: Int64s) -> None:
        """Refuse ids, of some rows one after the other, that the vocabulary does not have."""
        if self._vocab_size is None or not len(ids) or int(ids.max()) < self._vocab_size:
            return
        place = int((ids >= self._vocab_size).argmax())
        row = int(rows_N[int(np.searchsorted(np.cumsum(lengths_N), place, side="right"))])
        start = HEADER_SIZE + int(self._offsets[row]) * self.dtype.itemsize
        raise ArtefactError(
            f"{self.path}: row {row}, whose ids begin at byte {start}, has the id {ids[place]}, but the vocabulary has {self._vocab_size} pieces",
            hint=DAMAGED_HINT,
        )

    def check_ids(self) -> None:
        """Read all ids and compare their checksum.

        Raises:
            ArtefactError: They are not those that were written.
        """
        if zlib.crc32(self._ids.data) != self._ids_crc:
            end = HEADER_SIZE + self._ids.nbytes
            raise ArtefactError(f"{self.path}: the ids in bytes {HEADER_SIZE} to {end} do not have the checksum of the header", hint=DAMAGED_HINT)

    # --- memory -------------------------------------------------------------------------------------------------------------------------

    def prefetch_offsets(self, rows_N: Int64s) -> None:
        """Let the system begin to read the offsets of some rows, ascending, without waiting for them."""
        self._prefetch(self._offsets_start + 8 * rows_N, self._offsets_start + 8 * (rows_N + 2))

    def prefetch_ids(self, rows_N: Int64s) -> None:
        """The same for their ids; reads their offsets."""
        start_N, stop_N = self._bounds(rows_N)
        self._prefetch(HEADER_SIZE + self.dtype.itemsize * start_N, HEADER_SIZE + self.dtype.itemsize * stop_N)

    def release(self) -> None:
        """Let go of the pages that were read; they are read again when they are asked for."""
        self._advise("MADV_DONTNEED")

    def _prefetch(self, begin_N: Int64s, end_N: Int64s) -> None:
        """Announce ranges of bytes, ascending; those on neighbouring pages become one."""
        first_N, last_N = begin_N // mmap.PAGESIZE, np.maximum(begin_N, end_N - 1) // mmap.PAGESIZE
        heads = np.flatnonzero(np.concatenate(([True], first_N[1:] > last_N[:-1] + 1)))
        tails = np.concatenate((heads[1:] - 1, [len(first_N) - 1]))
        for first, last in zip(first_N[heads].tolist(), last_N[tails].tolist(), strict=True):
            start = first * mmap.PAGESIZE
            self._advise("MADV_WILLNEED", start, min((last + 1) * mmap.PAGESIZE, self.num_bytes) - start)

    def _advise(self, name: str, *place: int) -> None:
        advice = getattr(mmap, name, None)  # not every system has it, and none needs it
        if advice is not None:
            self._data.madvise(advice, *place)

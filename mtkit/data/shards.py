"""Token ids on disk, memory-mapped: the file of one side of one shard, and the directory of all of them.

A token file, little-endian throughout:

    header    64 bytes: magic, version, bytes per id, number of rows, number of ids, CRC-32 of the ids, of the offsets, and of the header itself
    ids       uint16 or uint32 each, row after row, then zeros up to a multiple of 8 bytes
    offsets   int64 each, number of rows + 1: row i is ids[offsets[i]:offsets[i + 1]]

Opening a file checks its header, size and offsets; the ids are checked when the shard is first touched, so that a damaged file never yields tokens.
"""

import mmap
import struct
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from mtkit.config import from_dict
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import ArtefactError, ConfigError
from mtkit.files import Manifest, Verify, read_json, read_lines, verify_directory

KIND = "shards"
META_NAME = "shards.json"
REPORT_NAME = "report.json"
TOKENIZER_DIRECTORY = "tokenizer"
HELD_OUT_DIRECTORY = "held_out"
SHARDS_FORMAT = 1

MAGIC = b"MTKITIDS"
TOKEN_FILE_VERSION = 1
HEADER_SIZE = 64
_HEADER = struct.Struct("<8sHH4xQQII20x")  # followed by its own CRC-32
_CRC = struct.Struct("<I")

_REMEDY = "The file is damaged: copy it anew, or run `mtkit preprocess` again."

Ids = NDArray[np.unsignedinteger[Any]]


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest type that holds every id of a vocabulary: uint16 up to 65,536 pieces, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


# --- one token file -------------------------------------------------------------------------------------------------------------------


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
        lengths: Ids in each row, int32.
    """

    def __init__(self, path: Path) -> None:
        """Map a file and check its header, size and offsets.

        Raises:
            ArtefactError: It is missing, not a token file, or damaged.
        """
        self.path = path
        try:
            with open(path, "rb") as stream:
                self._data: mmap.mmap | bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            self._data = b""
        except OSError as error:
            raise ArtefactError(f"{path}: cannot be read: {error.strerror or error}") from error
        dtype, self._ids_crc, offsets_crc = self._read_header()
        self._ids: Ids = np.frombuffer(self._data, dtype=dtype, count=self.num_ids, offset=HEADER_SIZE)
        start = offsets_position(itemsize=dtype.itemsize, num_ids=self.num_ids)
        self._offsets: NDArray[np.int64] = np.frombuffer(self._data, dtype="<i8", count=self.num_rows + 1, offset=start)
        if zlib.crc32(self._offsets.data) != offsets_crc:
            raise ArtefactError(f"{path}: the offsets at byte {start} do not have the checksum that the header gives", hint=_REMEDY)
        lengths = np.diff(self._offsets)
        if self._offsets[0] != 0 or self._offsets[-1] != self.num_ids or (len(lengths) and lengths.min() < 0):
            raise ArtefactError(f"{path}: the offsets at byte {start} do not rise from 0 to {self.num_ids}", hint=_REMEDY)
        self.lengths: NDArray[np.int32] = lengths.astype(np.int32)

    def _read_header(self) -> tuple[np.dtype[Any], int, int]:
        header = self._data[:HEADER_SIZE]
        if len(header) < HEADER_SIZE or header[: len(MAGIC)] != MAGIC:
            raise ArtefactError(f"{self.path}: is not a token file of mtkit: it does not begin with {MAGIC!r}", hint=_REMEDY)
        _, version, itemsize, self.num_rows, self.num_ids, ids_crc, offsets_crc = _HEADER.unpack_from(header)
        if _CRC.unpack_from(header, _HEADER.size)[0] != zlib.crc32(header[: _HEADER.size]):
            raise ArtefactError(f"{self.path}: the header (bytes 0 to 63) does not have its checksum", hint=_REMEDY)
        if version != TOKEN_FILE_VERSION or itemsize not in (2, 4):
            raise ArtefactError(
                f"{self.path}: has version {version} with {itemsize} bytes per id; this mtkit reads version {TOKEN_FILE_VERSION} with 2 or 4"
            )
        size = offsets_position(itemsize=itemsize, num_ids=self.num_ids) + 8 * (self.num_rows + 1)
        if len(self._data) != size:
            raise ArtefactError(f"{self.path}: has {len(self._data)} bytes, its header says {size}", hint=_REMEDY)
        return np.dtype(f"<u{itemsize}"), ids_crc, offsets_crc

    def row(self, index: int) -> Ids:
        """The ids of a row: a view of the file, read-only."""
        return self._ids[self._offsets[index] : self._offsets[index + 1]]

    def check_ids(self) -> None:
        """Read all ids and compare their checksum.

        Raises:
            ArtefactError: They are not those that were written.
        """
        if zlib.crc32(self._ids.data) != self._ids_crc:
            end = HEADER_SIZE + self._ids.nbytes
            raise ArtefactError(f"{self.path}: the ids in bytes {HEADER_SIZE} to {end} do not have the checksum of the header", hint=_REMEDY)


# --- a shard set ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardMeta:
    """What `shards.json` says of one shard; its files are `<name>.src` and `<name>.tgt`."""

    name: str
    num_pairs: int
    num_src_tokens: int
    num_tgt_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSetMeta:
    """The content of `shards.json`."""

    format: int = SHARDS_FORMAT
    """Version of the layout of the directory."""

    tokenizer: str
    """Fingerprint of the tokenizer that made the ids."""

    shards: tuple[ShardMeta, ...]
    """The shards in the order of the corpus."""

    held_out: tuple[str, ...] = ()
    """Names of the dev and test sets; the text is in `held_out/<name>.src` and `.tgt`."""


class ShardSet:
    """The training pairs that `preprocess` wrote, as ids, with the tokenizer that made them and the raw text of the dev and test sets.

    Attributes:
        directory: Where it is.
        manifest: What it was made from, and how.
        meta: The content of `shards.json`.
        tokenizer: The bundled tokenizer.
        num_pairs: Training pairs.
        src_lengths: Source tokens of each pair without EOS, int32.
        tgt_lengths: Target tokens of each pair without EOS, int32.
    """

    def __init__(
        self, directory: Path, *, manifest: Manifest, meta: ShardSetMeta, tokenizer: Tokenizer, shards: Sequence[tuple[TokenFile, TokenFile]]
    ):
        self.directory = directory
        self.manifest = manifest
        self.meta = meta
        self.tokenizer = tokenizer
        self._shards = shards
        self._is_checked = [False] * len(shards)
        starts = np.cumsum([0, *(src.num_rows for src, _ in shards)])
        self._starts: list[int] = starts[:-1].tolist()
        self.num_pairs = int(starts[-1])
        empty = np.zeros(0, dtype=np.int32)
        self.src_lengths: NDArray[np.int32] = np.concatenate([empty, *(src.lengths for src, _ in shards)])
        self.tgt_lengths: NDArray[np.int32] = np.concatenate([empty, *(tgt.lengths for _, tgt in shards)])

    @classmethod
    def open(cls, directory: Path, *, verify: Verify = "fast") -> Self:
        """Open a shard set.

        Args:
            directory: An artefact of kind `shards`.
            verify: `fast` checks sizes, headers and offsets now and the ids of each shard when it is first touched; `full` checks the sha256 of
                every file now.

        Raises:
            ArtefactError: It is no shard set, incomplete, damaged, or its parts do not belong together; the message names the file.
        """
        manifest = verify_directory(directory, kind=KIND, level=verify)
        meta = _read_meta(directory / META_NAME)
        tokenizer = Tokenizer.read_files(directory / TOKENIZER_DIRECTORY)
        if tokenizer.fingerprint != meta.tokenizer:
            raise ArtefactError(
                f"{directory}: the bundled tokenizer has the fingerprint {tokenizer.fingerprint}, but the shards were made with {meta.tokenizer}",
                hint=_REMEDY,
            )
        shards = [(TokenFile(directory / f"{shard.name}.src"), TokenFile(directory / f"{shard.name}.tgt")) for shard in meta.shards]
        for shard, (src, tgt) in zip(meta.shards, shards, strict=True):
            _check_counts(shard, src=src, tgt=tgt, where=directory / META_NAME)
        return cls(directory, manifest=manifest, meta=meta, tokenizer=tokenizer, shards=shards)

    @property
    def fingerprint(self) -> str:
        """sha256 over names and contents of all files: equal for equal shard sets."""
        return self.manifest.fingerprint

    def require_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse to go on with another tokenizer than the one that made the ids.

        Raises:
            ArtefactError: It is another one; the message names both fingerprints.
        """
        if tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise ArtefactError(
                f"{self.directory}: was made with the tokenizer {self.tokenizer.fingerprint}, not with {tokenizer.fingerprint}",
                hint=f"Use the tokenizer in {self.directory / TOKENIZER_DIRECTORY}, or run `mtkit preprocess` again with the other one.",
            )

    def src(self, index: int) -> Ids:
        """Source ids of a pair without EOS: a read-only view of the file.

        Raises:
            ArtefactError: The shard is damaged.
        """
        shard, row = self._locate(index)
        return self._shards[shard][0].row(row)

    def tgt(self, index: int) -> Ids:
        """Target ids of a pair without EOS: a read-only view of the file.

        Raises:
            ArtefactError: The shard is damaged.
        """
        shard, row = self._locate(index)
        return self._shards[shard][1].row(row)

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.num_pairs:
            raise IndexError(f"pair {index} of {self.num_pairs}")
        shard = bisect_right(self._starts, index) - 1
        if not self._is_checked[shard]:
            for token_file in self._shards[shard]:
                token_file.check_ids()
            self._is_checked[shard] = True
        return shard, index - self._starts[shard]

    @property
    def held_out_names(self) -> tuple[str, ...]:
        """Names of the dev and test sets."""
        return self.meta.held_out

    def held_out(self, name: str) -> tuple[list[str], list[str]]:
        """The raw source and target lines of a dev or test set; blank lines are still there.

        Raises:
            ArtefactError: There is no such set.
        """
        if name not in self.meta.held_out:
            raise ArtefactError(f"{self.directory}: holds no set named {name!r}", hint=f"It holds: {', '.join(self.meta.held_out) or 'none'}")
        src, tgt = held_out_paths(self.directory, name)
        src_lines, tgt_lines = read_lines(src), read_lines(tgt)
        if len(src_lines) != len(tgt_lines):
            raise ArtefactError(f"{src} has {len(src_lines)} lines, {tgt} has {len(tgt_lines)}", hint=_REMEDY)
        return src_lines, tgt_lines


def held_out_paths(directory: Path, name: str) -> tuple[Path, Path]:
    """Where a shard set keeps the two sides of a dev or test set."""
    return directory / HELD_OUT_DIRECTORY / f"{name}.src", directory / HELD_OUT_DIRECTORY / f"{name}.tgt"


def _read_meta(path: Path) -> ShardSetMeta:
    try:
        meta = from_dict(ShardSetMeta, read_json(path))
    except ConfigError as error:
        raise ArtefactError(f"{path}: {error.message}", hint=_REMEDY) from error
    if meta.format != SHARDS_FORMAT:
        raise ArtefactError(f"{path}: has format {meta.format}, this mtkit reads format {SHARDS_FORMAT}", hint="Run `mtkit preprocess` again.")
    return meta


def _check_counts(shard: ShardMeta, *, src: TokenFile, tgt: TokenFile, where: Path) -> None:
    for token_file, num_tokens in ((src, shard.num_src_tokens), (tgt, shard.num_tgt_tokens)):
        if (token_file.num_rows, token_file.num_ids) != (shard.num_pairs, num_tokens):
            raise ArtefactError(
                f"{token_file.path}: has {token_file.num_rows} rows and {token_file.num_ids} ids; {where} says {shard.num_pairs} and {num_tokens}",
                hint=_REMEDY,
            )

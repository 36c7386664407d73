"""The directory of a corpus as token ids: token files (`token_file.py`), the tokenizer that made them, the raw text of dev and test sets.

What is checked, and when: opening compares the sizes of all files with the manifest and reads the header of each. Of a set of up to
`CHECKED_BYTES` the offsets are then checked too, and the ids of a shard when it is first touched, by their checksums, so that a damaged file never
yields tokens. A larger set is not read as a whole: of each pair that is read, the offsets must rise inside the file and the ids be in the vocabulary,
which finds most damage but not an id that was changed for another. `mtkit inspect --verify full` compares the sha256 of every file.
"""

import itertools
import resource
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mtkit.artefacts import Manifest, Verify, verify_directory
from mtkit.config import from_dict
from mtkit.data.token_file import DAMAGED_HINT, Ids, Int64s, TokenFile
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import ArtefactError, ConfigError
from mtkit.files import read_json, read_lines

KIND = "shards"
META_NAME = "shards.json"
REPORT_NAME = "report.json"
TOKENIZER_DIRECTORY = "tokenizer"
HELD_OUT_DIRECTORY = "held_out"
SHARDS_FORMAT = 1

CHECKED_BYTES = 512 << 20
"""Token files of up to this many bytes in all are read as a whole to compare their checksums. It takes a fraction of a second."""


_OTHER_FILES = 256


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

    corpora: tuple[int, ...] = ()
    """Pairs of each corpus, in their order: so many of the first pairs are from the first corpus, and so on. Empty = all from one."""

    held_out: tuple[str, ...] = ()
    """Names of the dev and test sets; the text is in `held_out/<name>.src` and `.tgt`."""


def _is_read_whole(meta: ShardSetMeta) -> bool:
    """Whether the set is small enough to compare the checksums of all that is read, by the bytes that it takes with 2 for each id."""
    num_tokens = sum(shard.num_src_tokens + shard.num_tgt_tokens for shard in meta.shards)
    return 2 * num_tokens + 16 * sum(shard.num_pairs for shard in meta.shards) <= CHECKED_BYTES


def _allow_open_files(count: int) -> None:
    """Let this process have so many files open, and those that it has besides, as far as it may be allowed to: each mapped file is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES if hard == resource.RLIM_INFINITY else min(count + _OTHER_FILES, hard)
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """The pairs of one shard among those asked for.

    Attributes:
        files: Source and target file.
        rows_N: Their rows, ascending.
        place_N: Which ones of those asked for they are.
    """

    files: tuple[TokenFile, TokenFile]
    rows_N: Int64s
    place_N: Int64s


class ShardSet:
    """The training pairs that `preprocess` wrote, as ids, with the tokenizer that made them and the raw text of the dev and test sets.

    Attributes:
        directory: Where it is.
        manifest: What it was made from, and how.
        meta: The content of `shards.json`.
        tokenizer: The bundled tokenizer.
        num_pairs: Training pairs.
    """

    def __init__(
        self, directory: Path, *, manifest: Manifest, meta: ShardSetMeta, tokenizer: Tokenizer, shards: Sequence[tuple[TokenFile, TokenFile]]
    ):
        self.directory = directory
        self.manifest = manifest
        self.meta = meta
        self.tokenizer = tokenizer
        self._shards = shards
        self._is_large = not _is_read_whole(meta)
        self._is_checked = [self._is_large] * len(shards)
        starts = np.cumsum([0, *(src.num_rows for src, _ in shards)])
        self._starts: list[int] = starts[:-1].tolist()
        self.num_pairs = int(starts[-1])

    @classmethod
    def open(cls, directory: Path, *, verify: Verify = "fast") -> Self:
        """Open a shard set.

        Args:
            directory: An artefact of kind `shards`.
            verify: `fast` checks sizes and headers now and the rest when it is touched, see the module; `full` checks the sha256 of every file now.

        Raises:
            ArtefactError: It is no shard set, incomplete, damaged, or its parts do not belong together; the message names the file.
            ResourceError: It has more files than this process may have open.
        """
        manifest = verify_directory(directory, kind=KIND, level=verify)
        meta = _read_meta(directory / META_NAME)
        tokenizer = Tokenizer.read_files(directory / TOKENIZER_DIRECTORY)
        _allow_open_files(2 * len(meta.shards))
        if tokenizer.fingerprint != meta.tokenizer:
            raise ArtefactError(
                f"{directory}: the bundled tokenizer has the fingerprint {tokenizer.fingerprint}, but the shards were made with {meta.tokenizer}",
                hint=DAMAGED_HINT,
            )
        _require_listed(meta, manifest, directory)
        read_offsets = _is_read_whole(meta)
        shards = [
            (
                TokenFile(directory / f"{shard.name}.src", vocab_size=tokenizer.src_vocab_size, read_offsets=read_offsets),
                TokenFile(directory / f"{shard.name}.tgt", vocab_size=tokenizer.tgt_vocab_size, read_offsets=read_offsets),
            )
            for shard in meta.shards
        ]
        for shard, (src, tgt) in zip(meta.shards, shards, strict=True):
            _check_counts(shard, src=src, tgt=tgt, where=directory / META_NAME)
        return cls(directory, manifest=manifest, meta=meta, tokenizer=tokenizer, shards=shards)

    @property
    def fingerprint(self) -> str:
        """sha256 over names and contents of all files: equal for equal shard sets."""
        return self.manifest.fingerprint

    @property
    def corpora(self) -> tuple[int, ...]:
        """Pairs of each corpus, in their order: the first corpus has the first pairs."""
        return self.meta.corpora or (self.num_pairs,)

    @cached_property
    def src_lengths(self) -> NDArray[np.int32]:
        """Source tokens of each pair without EOS: reads the offsets of all files, and takes 4 bytes per pair."""
        return np.concatenate([np.zeros(0, dtype=np.int32), *(src.lengths for src, _ in self._shards)])

    @cached_property
    def tgt_lengths(self) -> NDArray[np.int32]:
        """The same of the targets."""
        return np.concatenate([np.zeros(0, dtype=np.int32), *(tgt.lengths for _, tgt in self._shards)])

    @property
    def length_limit(self) -> int:
        """Tokens, without EOS, above which `preprocess` dropped a pair; 0 = none was dropped for its length."""
        filters = self.manifest.config.get("filters")
        limit = filters.get("max_length") if isinstance(filters, dict) else None
        return limit if isinstance(limit, int) else 0

    def max_lengths(self) -> tuple[int, int]:
        """Tokens of the longest source and of the longest target, 0 if there is no pair; one file at a time is in memory."""
        longest = [0, 0]
        for files in self._shards:
            for side, token_file in enumerate(files):
                longest[side] = max(longest[side], int(token_file.lengths.max(initial=0)))
                token_file.release()
        return longest[0], longest[1]

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

    def gather(self, indices_N: NDArray[np.int64]) -> tuple[tuple[Ids, NDArray[np.int64]], tuple[Ids, NDArray[np.int64]]]:
        """Copy many pairs into memory; ascending numbers read the files from front to back.

        Args:
            indices_N: Numbers of the pairs.

        Returns:
            For the sources and for the targets: the ids of all pairs, one after the other, and where each pair's begin, with the end, (N + 1,).

        Raises:
            ArtefactError: A shard is damaged.
        """
        if len(indices_N) and not 0 <= indices_N.min() <= indices_N.max() < self.num_pairs:
            raise IndexError(f"pairs {indices_N.min()} to {indices_N.max()} of {self.num_pairs}")
        order_N = np.argsort(indices_N, kind="stable")
        bounds = np.searchsorted(indices_N[order_N], [*self._starts, self.num_pairs]).tolist()
        parts = []
        for shard, (first, last) in enumerate(itertools.pairwise(bounds)):
            if first < last:
                self._check(shard)
                place = order_N[first:last]
                parts.append(_Part(files=self._shards[shard], rows_N=indices_N[place] - self._starts[shard], place_N=place))
        if self._is_large:
            for part, side in itertools.product(parts, (0, 1)):
                part.files[side].prefetch_offsets(part.rows_N)
        offsets = [self._gather_offsets(parts, side, len(indices_N)) for side in (0, 1)]
        src_ids, tgt_ids = (self._gather_ids(parts, side, offsets[side]) for side in (0, 1))
        return (src_ids, offsets[0]), (tgt_ids, offsets[1])

    def _gather_offsets(self, parts: list["_Part"], side: int, num_pairs: int) -> Int64s:
        offsets = np.zeros(num_pairs + 1, dtype=np.int64)
        for part in parts:
            offsets[part.place_N + 1] = part.files[side].row_lengths(part.rows_N)
            if self._is_large:
                part.files[side].prefetch_ids(part.rows_N)
                part.files[side].release()  # or the pages of all files would be in memory at once
        return np.cumsum(offsets, out=offsets)

    def _gather_ids(self, parts: list["_Part"], side: int, offsets: Int64s) -> Ids:
        ids: Ids = np.empty(offsets[-1], dtype=max((part.files[side].dtype for part in parts), default=np.dtype("<u2")))
        for part in parts:
            part.files[side].copy_rows(part.rows_N, into=ids, at_N=offsets[part.place_N])
            if self._is_large:
                part.files[side].release()
        return ids

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.num_pairs:
            raise IndexError(f"pair {index} of {self.num_pairs}")
        shard = bisect_right(self._starts, index) - 1
        self._check(shard)
        return shard, index - self._starts[shard]

    def _check(self, shard: int) -> None:
        """Compare the checksums of a shard's ids when it is first touched, unless the set is large."""
        if not self._is_checked[shard]:
            for token_file in self._shards[shard]:
                token_file.check_ids()
            self._is_checked[shard] = True

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
            raise ArtefactError(f"{src} has {len(src_lines)} lines, {tgt} has {len(tgt_lines)}", hint=DAMAGED_HINT)
        return src_lines, tgt_lines


def held_out_paths(directory: Path, name: str) -> tuple[Path, Path]:
    """Where a shard set keeps the two sides of a dev or test set."""
    return directory / HELD_OUT_DIRECTORY / f"{name}.src", directory / HELD_OUT_DIRECTORY / f"{name}.tgt"


def _read_meta(path: Path) -> ShardSetMeta:
    try:
        meta = from_dict(ShardSetMeta, read_json(path))
    except ConfigError as error:
        raise ArtefactError(f"{path}: {error.message}", hint=DAMAGED_HINT) from error
    if meta.corpora and sum(meta.corpora) != sum(shard.num_pairs for shard in meta.shards):
        raise ArtefactError(f"{path}: the pairs of the corpora are not as many as those of the shards", hint=DAMAGED_HINT)
    if meta.format != SHARDS_FORMAT:
        raise ArtefactError(f"{path}: has format {meta.format}, this mtkit reads format {SHARDS_FORMAT}", hint="Run `mtkit preprocess` again.")
    return meta


def _require_listed(meta: ShardSetMeta, manifest: Manifest, directory: Path) -> None:
    """Refuse names that lead to files which are no part of the set, such as those of another directory."""
    names = [f"{shard.name}.{side}" for shard in meta.shards for side in ("src", "tgt")]
    names += [f"{HELD_OUT_DIRECTORY}/{name}.{side}" for name in meta.held_out for side in ("src", "tgt")]
    for name in names:
        if name not in manifest.files:
            raise ArtefactError(f"{directory / META_NAME}: names the file {name!r}, which the manifest does not list", hint=DAMAGED_HINT)


def _check_counts(shard: ShardMeta, *, src: TokenFile, tgt: TokenFile, where: Path) -> None:
    for token_file, num_tokens in ((src, shard.num_src_tokens), (tgt, shard.num_tgt_tokens)):
        if (token_file.num_rows, token_file.num_ids) != (shard.num_pairs, num_tokens):
            raise ArtefactError(
                f"{token_file.path}: has {token_file.num_rows} rows and {token_file.num_ids} ids; {where} says {shard.num_pairs} and {num_tokens}",
                hint=DAMAGED_HINT,
            )

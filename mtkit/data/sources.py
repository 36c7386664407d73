"""Where pairs come from: two text files, or a TSV file; in `records.py` a file of records, or a Hugging Face data set.

Each is a small frozen class with the same parts: `name` for messages, `paths`, its local files; `check()`, which looks through the source once
before any work begins, or `check_start()`, which looks at its beginning only; and `read(counts, skip)`, which yields its pairs one by one in bounded
memory. The text rules of `mtkit.files` hold for all of them.
"""

import hashlib
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mtkit.errors import DataError
from mtkit.files import READ_ERRORS, STDIO, LineReader, open_bytes, open_lines, require_text

TextPair = tuple[str, str]
"""A source sentence and its translation, both without a line break."""

_CHUNK_BYTES = 1 << 20
_MARKUP_BYTES = 200
_MARKUP = re.compile(r"\s*<(?:\?xml|!doctype|refset|srcset|tstset|mteval|dataset)\b", re.IGNORECASE)


@dataclass(kw_only=True, slots=True)
class ReadCounts:
    """What went wrong while reading, and was mended.

    Attributes:
        num_bad_utf8: Lines with bytes that are not UTF-8, replaced by U+FFFD.
        num_cut: Lines cut at `MAX_LINE_BYTES`.
    """

    num_bad_utf8: int = 0
    num_cut: int = 0

    def add(self, *readers: LineReader) -> None:
        """Add what line readers have counted."""
        self.num_bad_utf8 += sum(reader.num_bad_utf8 for reader in readers)
        self.num_cut += sum(reader.num_cut for reader in readers)


@dataclass(kw_only=True, slots=True)
class Skip:
    """Pairs to pass over before the next one that is given; may be set between any two pairs.

    Attributes:
        num_left: So many. What a source is too short for is left to the next source.
    """

    num_left: int = 0

    def lines(self, *readers: LineReader) -> None:
        """Pass over lines, of all readers alike."""
        if self.num_left:
            self.num_left -= min([reader.skip(self.num_left) for reader in readers])


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRecord:
    """What is known of a source before its pairs are read.

    Attributes:
        name: Where it is.
        num_pairs: How many pairs it holds, or None if only reading it will tell.
        fingerprint: sha256 that stands for the content, or None for a pipe, which can be read only once.
    """

    name: str
    num_pairs: int | None
    fingerprint: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedFiles:
    """Two plain or gzip files; line i of one is the translation of line i of the other. Either may be a pipe, one of them stdin (`-`)."""

    src: str
    tgt: str

    @property
    def name(self) -> str:
        """Both paths."""
        return f"{self.src} {self.tgt}"

    @property
    def paths(self) -> tuple[str, ...]:
        """The local files."""
        return self.src, self.tgt

    def check_start(self) -> None:
        """See that the files are there and look like text.

        Raises:
            DataError: They are not, or do not.
        """
        check_start_of(*self.paths)

    def check(self) -> SourceRecord:
        """Count the lines of both files.

        Raises:
            DataError: The counts differ, or a file cannot be read.
        """
        if is_pipe(*self.paths):
            return SourceRecord(name=self.name, num_pairs=None, fingerprint=None)
        src_hash, num_src = scan(self.src)
        tgt_hash, num_tgt = scan(self.tgt)
        if num_src != num_tgt:
            raise self._unequal(num_src, num_tgt)
        return SourceRecord(name=self.name, num_pairs=num_src, fingerprint=fingerprint("pair", src_hash, tgt_hash))

    def read(self, counts: ReadCounts, skip: Skip) -> Iterator[TextPair]:
        """Yield the pairs.

        Raises:
            DataError: One file has more lines than the other; known only at the end.
        """
        with open_lines(self.src) as src_lines, open_lines(self.tgt) as tgt_lines:
            try:
                skip.lines(src_lines, tgt_lines)
                for src in src_lines:
                    tgt = next(tgt_lines, None)
                    if tgt is None:
                        break
                    yield src, tgt
                    skip.lines(src_lines, tgt_lines)
                num_src = src_lines.num_lines + sum(1 for _ in src_lines)
                num_tgt = tgt_lines.num_lines + sum(1 for _ in tgt_lines)
                if num_src != num_tgt:
                    raise self._unequal(num_src, num_tgt)
            finally:
                counts.add(src_lines, tgt_lines)

    def _unequal(self, num_src: int, num_tgt: int) -> DataError:
        return DataError(
            f"{self.src} has {num_src} lines and {self.tgt} has {num_tgt}; line i of one must be the translation of line i of the other",
            hint="Was one of them filtered alone, cut off, or split at something else than line feeds?",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TsvFile:
    """A plain or gzip file, or stdin (`-`), with one pair per line: source, tab, target. More or fewer columns are refused, as a stray tab would cut
    a sentence."""

    path: str

    @property
    def name(self) -> str:
        """The path, or `stdin`."""
        return "stdin" if self.path == STDIO else self.path

    @property
    def paths(self) -> tuple[str, ...]:
        """The local files."""
        return (self.path,)

    def check_start(self) -> None:
        """See that the file is there and looks like text.

        Raises:
            DataError: It is not, or does not.
        """
        check_start_of(*self.paths)

    def check(self) -> SourceRecord:
        """Count the lines.

        Raises:
            DataError: The file cannot be read.
        """
        if is_pipe(*self.paths):
            return SourceRecord(name=self.name, num_pairs=None, fingerprint=None)
        digest, num_lines = scan(self.path)
        return SourceRecord(name=self.name, num_pairs=num_lines, fingerprint=fingerprint("tsv", digest))

    def read(self, counts: ReadCounts, skip: Skip) -> Iterator[TextPair]:
        """Yield the pairs; an empty line is a pair of two empty sides.

        Raises:
            DataError: A line does not have two columns.
        """
        with open_lines(self.path) as lines:
            try:
                skip.lines(lines)
                for line in lines:
                    src, tab, tgt = line.partition("\t")
                    if "\t" in tgt or (line and not tab):
                        num_tabs = line.count("\t")
                        what = f"has {num_tabs + 1} columns" if num_tabs else "has no tab"
                        raise DataError(
                            f"{self.name}:{lines.num_lines}: {what}, but must be a source and a target with a tab between",
                            hint="Choose two columns, for example: cut -f1,2 all.tsv > pairs.tsv" if num_tabs else None,
                        )
                    yield src, tgt
                    skip.lines(lines)
            finally:
                counts.add(lines)


def is_markup(line: str) -> bool:
    """Whether a line is how the SGML and XML files that test sets come in begin."""
    return _MARKUP.match(line) is not None


def is_pipe(*paths: str) -> bool:
    """Whether one of some paths can be read only once: stdin, a named pipe, the shell's `<(...)`.

    Raises:
        DataError: There is no such file.
    """
    found = [_is_pipe(path) for path in paths]  # of all, so that a missing one is noticed
    return any(found)


def _is_pipe(path: str) -> bool:
    if path == STDIO:
        return True
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def check_start_of(*paths: str) -> None:
    """Look at the beginning of files; pipes are left alone.

    Raises:
        DataError: One is not there, cannot be read, or is not plain text.
    """
    for path in paths:
        if not _is_pipe(path):
            with open_bytes(path) as stream:
                try:
                    _require_plain_text(path, stream.read(_CHUNK_BYTES))
                except READ_ERRORS as error:
                    raise DataError(f"{path}: reading failed: {error}", hint="The file is damaged; copy it anew.") from error


def _require_plain_text(path: str, chunk: bytes) -> None:
    """Refuse a file that begins like something packed, like text in another encoding or like markup."""
    require_text(path, chunk)
    if is_markup(chunk[:_MARKUP_BYTES].decode("utf-8-sig", "replace")) and b"<seg" in chunk:
        hint = "Extract one sentence per line; for a public test set: sacrebleu -t wmt14/full -l en-de --echo src > test.en"
        raise DataError(f"{path}: is SGML or XML, not plain text", hint=hint)


def scan(path: str) -> tuple[str, int]:
    """sha256 of the unpacked bytes of a file and the number of lines that `open_lines` will give."""
    digest = hashlib.sha256()
    num_lines, last = 0, b"\n"
    with open_bytes(path) as stream:
        try:
            chunk = stream.read(_CHUNK_BYTES)
            _require_plain_text(path, chunk)
            while chunk:
                digest.update(chunk)
                num_lines += chunk.count(b"\n")
                last = chunk[-1:]
                chunk = stream.read(_CHUNK_BYTES)
        except READ_ERRORS as error:
            raise DataError(f"{path}: reading failed: {error}", hint="The file is damaged; copy it anew.") from error
    return digest.hexdigest(), num_lines + (last != b"\n")


def fingerprint(*parts: str) -> str:
    """sha256 over some strings, in hex."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()

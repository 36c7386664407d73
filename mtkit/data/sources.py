"""The four places that pairs come from: two text files, a TSV file, a file of `{"translation": {...}}` records, a Hugging Face data set.

Each is a small frozen class with the same three parts: `name` for messages, `check()`, which looks through the source once before any work begins,
and `read(counts)`, which yields its pairs one by one in bounded memory. The text rules of `mtkit.files` hold for all of them; inside a record, where
a text may hold line feeds, each becomes a space.
"""

import hashlib
import io
import json
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtkit.errors import DataError, MTKitError
from mtkit.files import MAX_LINE_BYTES, READ_ERRORS, STDIO, LineReader, decode_line, open_bytes, open_lines, sha256_file

TextPair = tuple[str, str]
"""A source sentence and its translation, both without a line break."""

_CHUNK_BYTES = 1 << 20
_BATCH_ROWS = 4096
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_UTF16_BYTES = 16
_MARKUP_BYTES = 200
_MARKUP = re.compile(r"\s*<(?:\?xml|!doctype|refset|srcset|tstset|mteval|dataset)\b", re.IGNORECASE)
_SCHEMA_HINT = 'Records must look like {"translation": {"de": "...", "en": "..."}}.'


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

    def check(self) -> SourceRecord:
        """Count the lines of both files.

        Raises:
            DataError: The counts differ, or a file cannot be read.
        """
        if _is_pipe(self.src) or _is_pipe(self.tgt):
            return SourceRecord(name=self.name, num_pairs=None, fingerprint=None)
        src_hash, num_src = _scan(self.src)
        tgt_hash, num_tgt = _scan(self.tgt)
        if num_src != num_tgt:
            raise self._unequal(num_src, num_tgt)
        return SourceRecord(name=self.name, num_pairs=num_src, fingerprint=_fingerprint("pair", src_hash, tgt_hash))

    def read(self, counts: ReadCounts) -> Iterator[TextPair]:
        """Yield the pairs.

        Raises:
            DataError: One file has more lines than the other; known only at the end.
        """
        with open_lines(self.src) as src_lines, open_lines(self.tgt) as tgt_lines:
            try:
                for src in src_lines:
                    tgt = next(tgt_lines, None)
                    if tgt is None:
                        break
                    yield src, tgt
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
    """A plain or gzip file with one pair per line: source, tab, target. More or fewer columns are refused, as a stray tab would cut a sentence."""

    path: str

    @property
    def name(self) -> str:
        """The path."""
        return self.path

    def check(self) -> SourceRecord:
        """Count the lines.

        Raises:
            DataError: The file cannot be read.
        """
        if _is_pipe(self.path):
            return SourceRecord(name=self.name, num_pairs=None, fingerprint=None)
        digest, num_lines = _scan(self.path)
        return SourceRecord(name=self.name, num_pairs=num_lines, fingerprint=_fingerprint("tsv", digest))

    def read(self, counts: ReadCounts) -> Iterator[TextPair]:
        """Yield the pairs; an empty line is a pair of two empty sides.

        Raises:
            DataError: A line does not have two columns.
        """
        with open_lines(self.path) as lines:
            try:
                for line in lines:
                    src, tab, tgt = line.partition("\t")
                    if "\t" in tgt or (line and not tab):
                        raise DataError(
                            f"{self.path}:{lines.num_lines}: has {line.count(chr(9)) + 1} columns, but must have 2: source and target",
                            hint="Choose two columns, for example: cut -f1,2 all.tsv > pairs.tsv",
                        )
                    yield src, tgt
            finally:
                counts.add(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordFile:
    """A `.parquet` or JSON-lines file (plain or gzip) of records like `{"translation": {"de": "...", "en": "..."}}`, the schema of the hub."""

    path: str
    src_lang: str
    tgt_lang: str

    @property
    def name(self) -> str:
        """The path."""
        return self.path

    @property
    def is_parquet(self) -> bool:
        """Whether it is read as parquet, not as JSON lines."""
        return self.path.endswith(".parquet")

    def check(self) -> SourceRecord:
        """Count the records.

        Raises:
            DataError: The file cannot be read.
        """
        if _is_pipe(self.path) and not self.is_parquet:
            return SourceRecord(name=self.name, num_pairs=None, fingerprint=None)
        if self.is_parquet:
            num_pairs = self._open_parquet().metadata.num_rows
            digest = sha256_file(Path(self.path))
        else:
            digest, num_pairs = _scan(self.path)
        return SourceRecord(name=self.name, num_pairs=num_pairs, fingerprint=_fingerprint("records", digest, self.src_lang, self.tgt_lang))

    def read(self, counts: ReadCounts) -> Iterator[TextPair]:
        """Yield the pairs; a missing (null) text is an empty one.

        Raises:
            DataError: A record does not have the schema or lacks one of the languages.
        """
        return self._read_parquet(counts) if self.is_parquet else self._read_json_lines(counts)

    def _read_json_lines(self, counts: ReadCounts) -> Iterator[TextPair]:
        with open_lines(self.path) as lines:
            try:
                for line in lines:
                    if line.strip():
                        src, tgt = self._parse(line, where=f"{self.path}:{lines.num_lines}")
                        yield clean_text(src, counts), clean_text(tgt, counts)
            finally:
                counts.add(lines)

    def _parse(self, line: str, *, where: str) -> tuple[str | None, str | None]:
        try:
            texts = json.loads(line)["translation"]
            src, tgt = texts[self.src_lang], texts[self.tgt_lang]
        except KeyError as error:
            raise DataError(f"{where}: has no {error}", hint=_SCHEMA_HINT) from error
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(f"{where}: is not a JSON record with a translation: {error}", hint=_SCHEMA_HINT) from error
        if not isinstance(src, str | None) or not isinstance(tgt, str | None):
            raise DataError(f"{where}: the translation holds something else than text", hint=_SCHEMA_HINT)
        return src, tgt

    def _open_parquet(self) -> Any:
        import pyarrow as pa
        from pyarrow import parquet

        try:
            return parquet.ParquetFile(self.path)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self.path}: cannot be read as parquet: {error}") from error

    def _read_parquet(self, counts: ReadCounts) -> Iterator[TextPair]:
        import pyarrow as pa

        file = self._open_parquet()
        with file:
            if "translation" not in file.schema_arrow.names:
                raise DataError(f"{self.path}: has no column 'translation', but {file.schema_arrow.names}", hint=_SCHEMA_HINT)
            try:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=["translation"]):
                    yield from _arrow_pairs(batch.column(0), self, counts)
            except (OSError, pa.ArrowException) as error:
                raise DataError(f"{self.path}: reading failed: {error}", hint="The file is damaged.") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class HubDataset:
    """A data set of the Hugging Face hub, or a local directory in its layout, with `{"translation": {"de": "...", "en": "..."}}` records.

    Attributes:
        dataset: Name on the hub, for example `wmt/wmt14`, or a local path.
        config: Name of the configuration, for example `de-en`, or None for the only one.
        split: For example `train` or `validation`.
        revision: Commit, tag or branch to pin it to; None takes the newest.
        src_lang: Key of the source text in `translation`.
        tgt_lang: Key of the target text.
    """

    dataset: str
    config: str | None
    split: str
    revision: str | None
    src_lang: str
    tgt_lang: str

    @property
    def name(self) -> str:
        """The data set as it is written on the command line."""
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"hf:{self.dataset}:{self.config or ''}:{self.split}{revision}"

    def check(self) -> SourceRecord:
        """Download the data set unless it is in the cache.

        Raises:
            DataError: There is no such data set, configuration, revision or split, or it lacks the languages.
            MTKitError: The hub cannot be reached.
        """
        dataset = self._load()
        # The directory of a data set in the cache is named by the commit that it comes from, or by a hash of the files where there is none.
        files = dataset.cache_files
        version = Path(files[0]["filename"]).parent.name if files else dataset._fingerprint
        return SourceRecord(
            name=self.name, num_pairs=dataset.num_rows, fingerprint=_fingerprint("hub", version, self.name, self.src_lang, self.tgt_lang)
        )

    def read(self, counts: ReadCounts) -> Iterator[TextPair]:
        """Yield the pairs; a missing (null) text is an empty one.

        Raises:
            DataError: See `check`.
        """
        for table in self._load().with_format("arrow").iter(batch_size=_BATCH_ROWS):
            yield from _arrow_pairs(table.column("translation"), self, counts)

    def _load(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise MTKitError(f"{self.name}: needs the package datasets, which is not installed", hint="pip install datasets") from error
        try:
            dataset = datasets.load_dataset(self.dataset, self.config, split=self.split, revision=self.revision)
        except ConnectionError as error:
            raise MTKitError(
                f"{self.name}: the hub cannot be reached and the data set is not in the cache {datasets.config.HF_DATASETS_CACHE}: {error}",
                hint="Check the network, or download the data set elsewhere and copy that directory.",
            ) from error
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise DataError(f"{self.name}: cannot be loaded: {error}", hint="The form is hf:NAME[:CONFIG[:SPLIT]][@REVISION].") from error
        if "translation" not in dataset.column_names:
            raise DataError(f"{self.name}: has no column 'translation', but {dataset.column_names}", hint=_SCHEMA_HINT)
        return dataset


def is_markup(line: str) -> bool:
    """Whether a line is how the SGML and XML files that test sets come in begin."""
    return _MARKUP.match(line) is not None


Source = PairedFiles | TsvFile | RecordFile | HubDataset


def clean_text(text: str | None, counts: ReadCounts) -> str:
    """Put a text that did not come from a line of a file under the text rules of `mtkit.files`; None is an empty text."""
    if text is None:
        return ""
    raw = text.encode("utf-8", "surrogatepass")  # JSON can hold half a surrogate pair, which is not UTF-8
    if b"\n" in raw:
        raw = raw.removesuffix(b"\n").replace(b"\r\n", b" ").replace(b"\n", b" ")
    if len(raw) > MAX_LINE_BYTES:
        reader = LineReader(io.BytesIO(raw), name="")
        text = next(reader)
        counts.add(reader)
        return text
    text, is_bad = decode_line(raw)
    counts.num_bad_utf8 += is_bad
    return text


def _arrow_pairs(column: Any, source: RecordFile | HubDataset, counts: ReadCounts) -> Iterator[TextPair]:
    """The pairs in an Arrow column of structs that have one string per language."""
    from pyarrow import compute, types

    kind = column.type
    languages = [field.name for field in kind] if types.is_struct(kind) else []
    for language in (source.src_lang, source.tgt_lang):
        if language not in languages:
            raise DataError(f"{source.name}: has no language {language!r}; it has {', '.join(languages) or 'none'}", hint=_SCHEMA_HINT)
        text_type = kind.field(language).type
        if not (types.is_string(text_type) or types.is_large_string(text_type)):
            raise DataError(f"{source.name}: {language!r} holds {text_type}, not text", hint=_SCHEMA_HINT)
    src_texts = compute.struct_field(column, source.src_lang).to_pylist()
    tgt_texts = compute.struct_field(column, source.tgt_lang).to_pylist()
    for src, tgt in zip(src_texts, tgt_texts, strict=True):
        yield clean_text(src, counts), clean_text(tgt, counts)


def _is_pipe(path: str) -> bool:
    """Whether a path can be read only once: stdin, a named pipe, the shell's `<(...)`."""
    if path == STDIO:
        return True
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _scan(path: str) -> tuple[str, int]:
    """sha256 of the unpacked bytes of a file and the number of lines that `open_lines` will give."""
    digest = hashlib.sha256()
    num_lines, last = 0, b"\n"
    with open_bytes(path) as stream:
        try:
            chunk = stream.read(_CHUNK_BYTES)
            if chunk[:2] in _UTF16_MARKS and len(chunk) >= _UTF16_BYTES and chunk.count(0) >= len(chunk) // 4:
                raise DataError(f"{path}: is UTF-16, but text must be UTF-8", hint=f"iconv -f UTF-16 -t UTF-8 {path} > utf8.txt")
            if is_markup(chunk[:_MARKUP_BYTES].decode("utf-8-sig", "replace")) and b"<seg" in chunk:
                hint = "Extract one sentence per line; for a public test set: sacrebleu -t wmt14/full -l en-de --echo src > test.en"
                raise DataError(f"{path}: is SGML or XML, not plain text", hint=hint)
            while chunk:
                digest.update(chunk)
                num_lines += chunk.count(b"\n")
                last = chunk[-1:]
                chunk = stream.read(_CHUNK_BYTES)
        except READ_ERRORS as error:
            raise DataError(f"{path}: reading failed: {error}", hint="The file is damaged; copy it anew.") from error
    return digest.hexdigest(), num_lines + (last != b"\n")


def _fingerprint(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()

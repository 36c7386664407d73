"""Where pairs come from, as records with one text for each language: a file of `{"translation": {...}}` records, or a Hugging Face data set.

They have the parts that `sources.py` describes. Inside a record, where a text may hold line feeds, each becomes a space.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtkit.data.sources import ReadCounts, Skip, SourceRecord, TextPair, check_start_of, fingerprint, is_pipe, scan
from mtkit.errors import DataError, MTKitError
from mtkit.files import MAX_LINE_BYTES, LineReader, decode_line, open_lines, sha256_file

_BATCH_ROWS = 4096
_SCHEMA_HINT = 'Records must look like {"translation": {"de": "...", "en": "..."}}.'


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
    def paths(self) -> tuple[str, ...]:
        """The local files."""
        return (self.path,)

    @property
    def is_parquet(self) -> bool:
        """Whether it is read as parquet, not as JSON lines."""
        return self.path.endswith(".parquet")

    def check_start(self) -> None:
        """See that the file is there and looks like records.

        Raises:
            DataError: It is not, or does not.
        """
        if self.is_parquet:
            self._open_parquet().close()
        else:
            check_start_of(*self.paths)

    def check(self) -> SourceRecord:
        """Count the records.

        Raises:
            DataError: The file cannot be read.
        """
        if not self.is_parquet and is_pipe(*self.paths):
            return SourceRecord(name=self.name, num_pairs=None, fingerprint=None)
        if self.is_parquet:
            num_pairs = self._open_parquet().metadata.num_rows
            digest = sha256_file(Path(self.path))
        else:
            digest, num_pairs = scan(self.path)
        return SourceRecord(name=self.name, num_pairs=num_pairs, fingerprint=fingerprint("records", digest, self.src_lang, self.tgt_lang))

    def read(self, counts: ReadCounts, skip: Skip) -> Iterator[TextPair]:
        """Yield the pairs; a missing (null) text is an empty one.

        Raises:
            DataError: A record does not have the schema or lacks one of the languages.
        """
        return self._read_parquet(counts, skip) if self.is_parquet else self._read_json_lines(counts, skip)

    def _read_json_lines(self, counts: ReadCounts, skip: Skip) -> Iterator[TextPair]:
        with open_lines(self.path) as lines:
            try:
                for line in lines:
                    if lines.num_cut:
                        where = f"{self.path}:{lines.num_lines}"
                        raise DataError(f"{where}: is longer than {MAX_LINE_BYTES} bytes", hint="Split it, or leave it out: no sentence is so long.")
                    if line.strip():
                        if skip.num_left:
                            skip.num_left -= 1
                            continue
                        src, tgt = self._parse(line, where=f"{self.path}:{lines.num_lines}")
                        yield clean_text(src, counts), clean_text(tgt, counts)
            finally:
                counts.add(lines)

    def _parse(self, line: str, *, where: str) -> tuple[str | None, str | None]:
        try:
            texts = json.loads(line)["translation"]
            if texts is None:
                raise DataError(f"{where}: its translation is null", hint=_SCHEMA_HINT)
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

    def _read_parquet(self, counts: ReadCounts, skip: Skip) -> Iterator[TextPair]:
        import pyarrow as pa

        file = self._open_parquet()
        with file:
            if "translation" not in file.schema_arrow.names:
                raise DataError(f"{self.path}: has no column 'translation', but {file.schema_arrow.names}", hint=_SCHEMA_HINT)
            try:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=["translation"]):
                    yield from _arrow_pairs(batch.column(0), self, counts, skip)
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
        is_streamed: Read it from where it is instead of downloading it first.
    """

    dataset: str
    config: str | None
    split: str
    revision: str | None
    src_lang: str
    tgt_lang: str
    is_streamed: bool = False

    @property
    def name(self) -> str:
        """The data set as it is written on the command line."""
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"hf:{self.dataset}:{self.config or ''}:{self.split}{revision}"

    @property
    def paths(self) -> tuple[str, ...]:
        """The local files: none is known."""
        return ()

    def check_start(self) -> None:
        """See that the data set can be opened.

        Raises:
            DataError: See `check`.
            MTKitError: See `check`.
        """
        self._load()

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
            name=self.name, num_pairs=dataset.num_rows, fingerprint=fingerprint("hub", version, self.name, self.src_lang, self.tgt_lang)
        )

    def read(self, counts: ReadCounts, skip: Skip) -> Iterator[TextPair]:
        """Yield the pairs; a missing (null) text is an empty one.

        Raises:
            DataError: See `check`.
            MTKitError: The hub cannot be reached any more.
        """
        try:
            # What is skipped is read too: `skip` of a streamed data set would do no less, and would not tell where its end is.
            for table in self._load().with_format("arrow").iter(batch_size=_BATCH_ROWS):
                if "translation" not in table.column_names:
                    raise self._without_translation(table.column_names)
                yield from _arrow_pairs(table.column("translation"), self, counts, skip)
        except OSError as error:
            raise MTKitError(f"{self.name}: reading failed: {error}", hint="Check the network and the disk; the same command goes on.") from error

    def _load(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise MTKitError(f"{self.name}: needs the package datasets, which is not installed", hint="pip install datasets") from error
        try:
            streaming = {"streaming": True} if self.is_streamed else {}
            dataset = datasets.load_dataset(self.dataset, self.config, split=self.split, revision=self.revision, **streaming)
        except ConnectionError as error:
            raise MTKitError(
                f"{self.name}: the hub cannot be reached and the data set is not in the cache {datasets.config.HF_DATASETS_CACHE}: {error}",
                hint="Check the network, or download the data set elsewhere and copy that directory.",
            ) from error
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise DataError(f"{self.name}: cannot be loaded: {error}", hint="The form is hf:NAME[:CONFIG[:SPLIT]][@REVISION].") from error
        columns = dataset.column_names  # of a streamed data set they may be known only from its rows
        if columns is not None and "translation" not in columns:
            raise self._without_translation(columns)
        return dataset

    def _without_translation(self, columns: list[str]) -> DataError:
        return DataError(f"{self.name}: has no column 'translation', but {columns}", hint=_SCHEMA_HINT)


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


def _arrow_pairs(column: Any, source: RecordFile | HubDataset, counts: ReadCounts, skip: Skip) -> Iterator[TextPair]:
    """The pairs in an Arrow column of structs that have one string per language."""
    from pyarrow import compute, types

    num_skipped = min(skip.num_left, len(column))
    skip.num_left -= num_skipped
    column = column.slice(num_skipped)
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
        if skip.num_left:
            skip.num_left -= 1
            continue
        yield clean_text(src, counts), clean_text(tgt, counts)

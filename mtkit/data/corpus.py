"""Parallel text as one stream of pairs, and the words that name it on the command line."""

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from mtkit.data.records import HubDataset, RecordFile
from mtkit.data.sources import PairedFiles, ReadCounts, Skip, SourceRecord, TextPair, TsvFile, is_pipe
from mtkit.errors import UsageError
from mtkit.files import STDIO

__all__ = ["Corpus", "ReadCounts", "Source", "SourceRecord", "TextPair", "check_directions", "holds_both_sides", "parse_corpus", "side_suffixes"]

Source = PairedFiles | TsvFile | RecordFile | HubDataset

HUB_PREFIX = "hf:"
_PARTNER_HINT = (
    "Text files come in twos: source sentences, then their translations. A file with both in two columns, with a tab between, must be named *.tsv."
)
_TSV_SUFFIXES = (".tsv", ".tsv.gz")
_RECORD_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Pairs of sentences from one or more sources, which are read one after the other.

    Attributes:
        sources: Where the pairs come from; at least one.
    """

    sources: tuple[Source, ...]

    @property
    def name(self) -> str:
        """The names of all sources, for messages."""
        return ", ".join(source.name for source in self.sources)

    def check(self) -> tuple[SourceRecord, ...]:
        """Look through all sources before work begins: that they exist, how many pairs they hold, that both sides have as many lines.

        Raises:
            DataError: A source cannot be used.
        """
        return tuple(source.check() for source in self.sources)

    def check_start(self) -> None:
        """Look at the beginning of all sources: that they are there, and are what their names say.

        Raises:
            DataError: A source cannot be used.
        """
        for source in self.sources:
            source.check_start()

    @property
    def is_pipe(self) -> bool:
        """Whether a part of it can be read only once.

        Raises:
            DataError: A file is not there.
        """
        return is_pipe(*(path for source in self.sources for path in source.paths))

    def pairs(self, *, counts: ReadCounts | None = None, skip: Skip | None = None) -> Generator[TextPair, None, None]:
        """Stream the pairs in order. No pair is left out: a blank line is an empty text.

        Args:
            counts: Receives the numbers of mended lines; complete when the last pair has been read.
            skip: Pairs to pass over, now or later.

        Raises:
            DataError: A source is damaged or its two sides differ in length.
        """
        counts = ReadCounts() if counts is None else counts
        skip = Skip() if skip is None else skip
        for source in self.sources:
            yield from source.read(counts, skip)


def parse_corpus(
    specs: Sequence[str], *, src_lang: str | None = None, tgt_lang: str | None = None, split: str = "train", stream: bool = False
) -> Corpus:
    """Turn the words of the command line into a corpus.

    A word is a data set of the hub (`hf:NAME[:CONFIG[:SPLIT]][@REVISION]`), a `.tsv` file, or a `.parquet` or `.jsonl` file of
    `{"translation": ...}` records; any other word is a text file of source sentences, and the word after it the file of their translations. A `-`
    without such a word after it is TSV on stdin.

    Args:
        specs: The words, at least one.
        src_lang: Key of the source text in records, for example `en`. Needed for records and the hub, else used to notice swapped files.
        tgt_lang: Key of the target text.
        split: The split of a hub data set that names none.
        stream: Read data sets of the hub without downloading them.

    Raises:
        UsageError: A file lacks its partner, a language is missing, or the two files are in the wrong order.
    """
    sources: list[Source] = []
    words = deque(specs)
    while words:
        word = words.popleft()
        if word.startswith(HUB_PREFIX):
            sources.append(_parse_hub(word, src_lang=src_lang, tgt_lang=tgt_lang, split=split, stream=stream))
        elif word.endswith(_RECORD_SUFFIXES):
            src_key, tgt_key = _need_languages(word, src_lang=src_lang, tgt_lang=tgt_lang)
            sources.append(RecordFile(path=word, src_lang=src_key, tgt_lang=tgt_key))
        elif word.endswith(_TSV_SUFFIXES) or (word == STDIO and (not words or holds_both_sides(words[0]))):
            sources.append(TsvFile(path=word))
        elif not words:
            raise UsageError(f"{word} has no partner", hint=_PARTNER_HINT)
        else:
            sources.append(_pair_files(word, words.popleft(), src_lang=src_lang, tgt_lang=tgt_lang))
    if not sources:
        raise UsageError("no corpus was given", hint="Name two text files, a .tsv file, a .parquet or .jsonl file, or hf:NAME:CONFIG.")
    return Corpus(sources=tuple(sources))


def check_directions(corpora: Mapping[str, Corpus]) -> None:
    """Refuse corpora whose file names say that one goes from language A to B and another from B to A.

    Args:
        corpora: Role (for messages) -> corpus.

    Raises:
        UsageError: Two file pairs are in opposite order; the message names both.
    """
    seen: dict[tuple[str, str], str] = {}
    for role, corpus in corpora.items():
        for source in corpus.sources:
            if not isinstance(source, PairedFiles):
                continue
            src, tgt = side_suffixes(source)
            if src != tgt and (tgt, src) in seen:
                raise UsageError(
                    f"{role} goes from {src} to {tgt} ({source.name}), but {seen[tgt, src]}",
                    hint="The source file comes first; swap one of the pairs.",
                )
            seen.setdefault((src, tgt), f"{role} goes from {src} to {tgt} ({source.name})")


def side_suffixes(source: PairedFiles) -> tuple[str, str]:
    """The last part of both file names, `.gz` aside, which mostly names the language: `.en` and `.de`."""
    return _suffix(source.src), _suffix(source.tgt)


def _suffix(path: str) -> str:
    return PurePath(path.removesuffix(".gz")).suffix


def holds_both_sides(word: str) -> bool:
    """Whether a word of the command line is a whole corpus, see `parse_corpus`, and no text file."""
    return word.startswith(HUB_PREFIX) or word.endswith((*_RECORD_SUFFIXES, *_TSV_SUFFIXES))


def _pair_files(src: str, tgt: str, *, src_lang: str | None, tgt_lang: str | None) -> PairedFiles:
    if holds_both_sides(tgt):
        raise UsageError(f"{src} has no partner: {tgt}, which follows it, holds both sides", hint=_PARTNER_HINT)
    if src == tgt == STDIO:
        raise UsageError("stdin cannot be both sides of a corpus")
    if src_lang and tgt_lang and src_lang != tgt_lang and _suffix(src) == f".{tgt_lang}" and _suffix(tgt) == f".{src_lang}":
        raise UsageError(f"{src} {tgt}: by their names, the files are in the wrong order for {src_lang} to {tgt_lang}", hint="Swap the two files.")
    return PairedFiles(src=src, tgt=tgt)


def _parse_hub(word: str, *, src_lang: str | None, tgt_lang: str | None, split: str, stream: bool) -> HubDataset:
    place, at, revision = word.removeprefix(HUB_PREFIX).partition("@")
    dataset, config, own_split = [*place.split(":", 2), "", ""][:3]
    if not dataset or (at and not revision):
        raise UsageError(f"{word} does not name a data set", hint="The form is hf:NAME[:CONFIG[:SPLIT]][@REVISION], for example hf:wmt/wmt14:de-en")
    src_key, tgt_key = _need_languages(word, src_lang=src_lang, tgt_lang=tgt_lang)
    return HubDataset(
        dataset=dataset,
        config=config or None,
        split=own_split or split,
        revision=revision or None,
        src_lang=src_key,
        tgt_lang=tgt_key,
        is_streamed=stream,
    )


def _need_languages(word: str, *, src_lang: str | None, tgt_lang: str | None) -> tuple[str, str]:
    if not src_lang or not tgt_lang:
        raise UsageError(f"{word} holds texts by language, and it was not said which is the source", hint="Add --src-lang en --tgt-lang de")
    if src_lang == tgt_lang:
        raise UsageError(f"the source and the target language are both {src_lang!r}")
    return src_lang, tgt_lang

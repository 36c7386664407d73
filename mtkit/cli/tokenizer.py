"""`mtkit tokenizer train | encode | decode`."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mtkit.artefacts import require_free
from mtkit.cli import console
from mtkit.cli.corpora import require_one_stdin
from mtkit.cli.settings import part_layers
from mtkit.config import Layer, Tree, resolve
from mtkit.data.corpus import Corpus, holds_both_sides, parse_corpus
from mtkit.data.sources import ReadCounts, check_start_of
from mtkit.decoding.windows import open_windows
from mtkit.errors import DataError, UsageError
from mtkit.files import MAX_LINE_BYTES, STDIO, LineReader, one_line, open_lines, open_output

if TYPE_CHECKING:
    from mtkit.data.tokenizer import Side, Tokenizer, TokenizerConfig

_WINDOW_LINES = 1000
_COLUMNED_SHARE = 0.9
"""Of the lines of a text: with more of them in two columns it is a table."""

ModelArgument = Annotated[
    Path, typer.Argument(help="A tokenizer directory, or a model, checkpoint, shard set or run that holds one.", metavar="TOKENIZER")
]
SideOption = Annotated[Literal["src", "tgt"] | None, typer.Option("--side", help="Whose vocabulary to use; needed if each side has its own.")]
InputOption = Annotated[str, typer.Option("--input", "-i", help="Lines to read; - is stdin.", metavar="FILE")]
OutputOption = Annotated[str, typer.Option("--output", "-o", help="File to write, packed if named *.gz; - is stdout.", metavar="FILE")]


def register(app: typer.Typer) -> None:
    """Add the `tokenizer` commands to the application."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Train a tokenizer, or turn text into pieces and back.",
        epilog="Example: mtkit tokenizer train train.en train.de --vocab-size 8000 --output tokenizer",
    )
    group.command("train", epilog="Example: mtkit tokenizer train train.en train.de.gz --vocab-size 8000 --output tokenizer")(train)
    group.command("encode", epilog="Example: mtkit tokenizer encode tokenizer < test.en > test.pieces.en")(encode)
    group.command("decode", epilog="Example: mtkit tokenizer decode tokenizer --ids < test.ids > test.en")(decode)
    app.add_typer(group, name="tokenizer")


# --- train ----------------------------------------------------------------------------------------------------------------------------


def train(
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to make.", metavar="DIR", show_default=False)],
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help="Text for a joint vocabulary, plain or gzip, - is stdin; or, for either kind, what holds both sides: TSV, parquet, JSON lines or "
            "hf:NAME:CONFIG.",
            metavar="FILE",
        ),
    ] = None,
    src: Annotated[list[str] | None, typer.Option("--src", help="Text of the source side; may be given again.", metavar="FILE")] = None,
    tgt: Annotated[list[str] | None, typer.Option("--tgt", help="Text of the target side; may be given again.", metavar="FILE")] = None,
    src_lang: Annotated[str | None, typer.Option("--src-lang", metavar="LANG", help="Key of the source text in records, such as en.")] = None,
    tgt_lang: Annotated[str | None, typer.Option("--tgt-lang", metavar="LANG", help="Key of the target text in records, such as de.")] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="TOML file with the settings, at its top level or in a table named tokenizer.", metavar="FILE"),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="A setting, for example seed=7; may be given again.", metavar="KEY=VALUE")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option("--vocab-size", help="Number of pieces, of each side if separate.", metavar="N")] = None,
    type_: Annotated[str | None, typer.Option("--type", help="unigram or bpe.", metavar="TYPE")] = None,
    joint: Annotated[
        bool | None, typer.Option("--joint/--separate", help="One vocabulary for both sides, or one for each.", show_default=False)
    ] = None,
    quiet: console.QuietOption = False,
    json_output: console.JsonOption = False,
) -> None:
    """Train a sentencepiece tokenizer on text.

    One vocabulary for both sides takes any number of files. One for each (--separate) needs to know which text is which: --src and --tgt, or what
    holds both.
    """
    flags = {"--vocab-size": ("vocab_size", vocab_size), "--type": ("type", type_), "--joint/--separate": ("joint", joint)}
    settings = _resolve(config, overrides or [], flags={name: {key: value} for name, (key, value) in flags.items() if value is not None})
    require_free(output)
    require_one_stdin([*(files or []), *(src or []), *(tgt or [])])
    texts = _texts(files or [], src or [], tgt or [], joint=settings.joint)
    corpora = [parse_corpus([file], src_lang=src_lang, tgt_lang=tgt_lang) for file in files or [] if holds_both_sides(file)]
    for corpus in corpora:
        corpus.check_start()

    from mtkit.data.tokenizer import train_on_lines

    tokenizer = train_on_lines(_read(texts, corpora), settings)
    tokenizer.save(output)
    for name, text in tokenizer.trained_on.items():
        size = tokenizer.tgt_vocab_size if name == "tgt.model" else tokenizer.src_vocab_size
        console.say(f"{output / name}: {size} pieces ({settings.type}) from {text.num_sentences} of {text.num_lines} lines", quiet=quiet)
    if json_output:
        sizes = {"src_vocab_size": tokenizer.src_vocab_size, "tgt_vocab_size": tokenizer.tgt_vocab_size}
        console.print_json({"output": str(output), "fingerprint": tokenizer.fingerprint, "joint": tokenizer.joint, **sizes})


def _resolve(file: Path | None, overrides: Sequence[str], *, flags: dict[str, Tree]) -> "TokenizerConfig":
    from mtkit.data.tokenizer import TokenizerConfig

    layers = part_layers(file, overrides, TokenizerConfig, table="tokenizer")
    layers += [Layer(name=name, data=data) for name, data in flags.items()]
    return resolve(TokenizerConfig, layers).config


def _texts(files: Sequence[str], src: Sequence[str], tgt: Sequence[str], *, joint: bool) -> list[tuple["Side", str]]:
    """Each file of one side with that side; for a joint vocabulary the side means nothing."""
    plain = [file for file in files if not holds_both_sides(file)]
    if not joint and (plain or not (len(files) > len(plain) or (src and tgt))):
        raise UsageError(
            "a separate vocabulary for each side needs to know which file is which",
            hint="Give the text as --src FILE --tgt FILE, and no other files but such as hold both sides.",
        )
    texts: list[tuple[Side, str]] = [("src", file) for file in (*plain, *src)]
    texts += [("tgt", file) for file in tgt]
    if not texts and not files:
        raise UsageError("no text is given", hint="Name the files to train on, or - for stdin.")
    for _, file in texts:
        if holds_both_sides(file):
            raise UsageError(f"{file}: holds both sides", hint="Name it without --src or --tgt before it.")
        if file != STDIO and not Path(file).exists():
            raise DataError(f"{file}: there is no such file")
        check_start_of(file)
    return texts


def _read(texts: Sequence[tuple["Side", str]], corpora: Sequence[Corpus]) -> Iterator[tuple["Side", str]]:
    for side, file in texts:
        num_columned = 0
        with open_lines(file) as lines:
            for line in lines:
                num_columned += line.count("\t") == 1
                yield side, line
            _warn_of_repairs(lines, lines.name)
        if num_columned > _COLUMNED_SHARE * lines.num_lines:
            console.warn(
                f"{lines.name}: {num_columned} of {lines.num_lines} lines hold one tab, and were taken for text, tab and all. "
                "A table of source and target is read as such from a file named *.tsv"
            )
    for corpus in corpora:
        counts = ReadCounts()
        for src, tgt in corpus.pairs(counts=counts):
            yield "src", src
            yield "tgt", tgt
        _warn_of_repairs(counts, corpus.name)


# --- encode and decode ------------------------------------------------------------------------------------------------------------------


def encode(
    model: ModelArgument,
    side: SideOption = None,
    ids: Annotated[bool, typer.Option("--ids", help="Write ids instead of pieces.")] = False,
    input_: InputOption = STDIO,
    output: OutputOption = STDIO,
) -> None:
    """Turn each line of text into a line of pieces, or ids, with spaces between them. A piece may hold U+2028 and the like, but never a line feed."""
    tokenizer, side_ = _open_tokenizer(model, side)

    def convert(lines: list[str], _first: int) -> list[str]:
        rows = tokenizer.encode(lines, side_)
        return [" ".join(map(str, row) if ids else tokenizer.pieces(row, side_)) for row in rows]

    _filter(input_, output, convert)


def decode(
    model: ModelArgument,
    side: SideOption = None,
    ids: Annotated[bool, typer.Option("--ids", help="Read ids instead of pieces.")] = False,
    input_: InputOption = STDIO,
    output: OutputOption = STDIO,
) -> None:
    """Turn each line of pieces, or ids, into a line of text."""
    tokenizer, side_ = _open_tokenizer(model, side)

    def convert(lines: list[str], first: int) -> list[str]:
        texts: list[str] = []
        for number, line in enumerate(lines, start=first):
            words = [word for word in line.split(" ") if word]
            try:
                row = [_parse_id(word) for word in words] if ids else tokenizer.piece_ids(words, side_)
                texts += map(one_line, tokenizer.decode([row], side_))
            except ValueError as error:
                name = "stdin" if input_ == STDIO else input_
                raise DataError(f"{name}:{number}: {error}", hint="Was it made by another tokenizer, or for the other side?") from error
        return texts

    _filter(input_, output, convert)


def _parse_id(word: str) -> int:
    if not (word.isascii() and word.isdigit() and len(word) <= 10):
        raise ValueError(f"{word[:40]!r} is not a token id")
    return int(word)


def _open_tokenizer(path: Path, side: "Side | None") -> "tuple[Tokenizer, Side]":
    from mtkit.checkpoint.layout import load_tokenizer

    tokenizer = load_tokenizer(path)
    if side is None and not tokenizer.joint:
        raise UsageError(f"{path}: has a vocabulary for each side", hint="Say --side src or --side tgt.")
    return tokenizer, side or "src"


def _filter(input_: str, output: str, convert: Callable[[list[str], int], list[str]]) -> None:
    """Write one line for each line read. What has arrived is answered before more is waited for.

    Args:
        input_: Path or `-`.
        output: Path or `-`.
        convert: Gets some lines and the number of the first; returns as many.
    """
    with open_windows(input_, size=_WINDOW_LINES) as windows, open_output(output) as writer:
        first = 1
        for lines in windows:
            for text in convert(lines, first):
                writer.write(text)
            writer.flush()
            first += len(lines)
        _warn_of_repairs(windows.reader, windows.reader.name)


def _warn_of_repairs(counts: LineReader | ReadCounts, name: str) -> None:
    if counts.num_bad_utf8:
        console.warn(f"{name}: {counts.num_bad_utf8} lines hold bytes that are not UTF-8; U+FFFD stands for them")
    if counts.num_cut:
        console.warn(f"{name}: {counts.num_cut} lines are longer than {MAX_LINE_BYTES} bytes and were cut there")

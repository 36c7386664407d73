"""How the commands take corpora: `--train train.en train.de --train more.en more.de`, and names for test sets."""

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from typer.core import TyperCommand

from mtkit.data.corpus import Corpus, Source, parse_corpus
from mtkit.data.records import HubDataset
from mtkit.data.sources import PairedFiles
from mtkit.errors import UsageError
from mtkit.files import STDIO

CORPUS_OPTIONS = ("--train", "--dev", "--test")
"""The options that take several words."""

_NAMED = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]*)=(.+)", re.DOTALL)


def require_one_stdin(words: Sequence[str]) -> None:
    """Refuse to read stdin more than once: the second time it is empty.

    Raises:
        UsageError: `-` is among the names of texts more than once.
    """
    if list(words).count(STDIO) > 1:
        raise UsageError("stdin (-) can stand for one text only")


class MultiValueCommand(TyperCommand):
    """A command whose `CORPUS_OPTIONS` take all words up to the next option; the function gets them as one list."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each of its words, which is the form that typer understands."""
        return super().parse_args(ctx, repeat_options(args, CORPUS_OPTIONS))


def repeat_options(args: Sequence[str], options: Sequence[str]) -> list[str]:
    """Turn `--train a b` and `--train=a b` into `--train=a --train=b`.

    Args:
        args: The words of the command line.
        options: The options that take several words. A word ends the list if it begins with a dash and is not `-` alone.

    Raises:
        UsageError: One of the options has no word.
    """
    result: list[str] = []
    option, is_waiting = None, False
    for position, arg in enumerate(args):
        if option is not None and (arg == "-" or not arg.startswith("-")):
            result.append(f"{option}={arg}")
            is_waiting = False
            continue
        if is_waiting:
            break
        if arg == "--":
            return result + list(args[position:])
        name, equals, _ = arg.partition("=")
        option = name if name in options else None
        if option is None or equals:
            result.append(arg)
        is_waiting = option is not None and not equals
    if is_waiting:
        raise UsageError(f"{option} needs a corpus after it", hint=f"For example: {option} FILE.en FILE.de")
    return result


def parse_test_sets(specs: Sequence[str], *, src_lang: str | None, tgt_lang: str | None) -> dict[str, Corpus]:
    """Turn the words of `--test` into test sets, each with a name.

    Args:
        specs: Words as for `parse_corpus`, but each file pair, file or data set is a test set of its own. `NAME=` before its first word names it;
            else the name is that of the file without the language, or the split of a data set.
        src_lang: See `parse_corpus`.
        tgt_lang: See `parse_corpus`.

    Raises:
        UsageError: Two sets have the same name, or the words are wrong.
    """
    words: list[str] = []
    names: dict[int, str] = {}
    for spec in specs:
        if (match := _NAMED.fullmatch(spec)) and not os.path.lexists(spec):
            names[len(words)] = match[1]
            spec = match[2]
        words.append(spec)
    test_sets: dict[str, Corpus] = {}
    position = 0
    for source in parse_corpus(words, src_lang=src_lang, tgt_lang=tgt_lang, split="test").sources if words else ():
        name = names.pop(position, None) or default_name(source)
        if name in test_sets or name == "dev":
            raise UsageError(f"two held-out sets would be named {name!r}", hint=f"Name this one: --test NAME={words[position]} ...")
        test_sets[name] = Corpus(sources=(source,))
        position += 2 if isinstance(source, PairedFiles) else 1
    if names:
        raise UsageError(
            f"the name {next(iter(names.values()))!r} stands before the second file of a pair", hint="Name the set before the first file."
        )
    return test_sets


def default_name(source: Source) -> str:
    """A name for a test set: `newstest2014` for `newstest2014.en newstest2014.de`, `test` where nothing better is known."""
    if isinstance(source, HubDataset):
        name = source.split
    elif isinstance(source, PairedFiles):
        stems = [PurePath(path.removesuffix(".gz")).stem for path in (source.src, source.tgt)]
        name = "".join(left for left, _ in itertools.takewhile(lambda both: both[0] == both[1], zip(*stems, strict=False)))
    else:
        name = PurePath(source.path.removesuffix(".gz")).stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-") or "test"

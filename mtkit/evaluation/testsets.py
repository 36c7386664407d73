"""Public test sets by name, as sacreBLEU knows and downloads them.

sacreBLEU keeps them below `~/.sacrebleu`, or where the environment variable SACREBLEU points.
"""

from dataclasses import dataclass

import sacrebleu.utils
from sacrebleu.dataset import DATASETS

from mtkit.errors import MTKitError, UsageError
from mtkit.evaluation.checks import NamedLines
from mtkit.files import read_lines


@dataclass(frozen=True, kw_only=True, slots=True)
class TestSet:
    """A test set in one direction.

    Attributes:
        name: Such as `wmt14/full`.
        lang_pair: Such as `en-de`.
        source: The lines to translate.
        references: One or more sets of reference lines.
    """

    __test__ = False  # not a test for pytest

    name: str
    lang_pair: str
    source: NamedLines
    references: list[NamedLines]


def load_test_set(name: str, lang_pair: str) -> TestSet:
    """Load a public test set, downloading it the first time.

    Args:
        name: sacreBLEU's name, such as `wmt14/full`.
        lang_pair: Source and target language, such as `en-de`.

    Raises:
        UsageError: There is no such test set, or it lacks the language pair.
        MTKitError: It is not here and cannot be downloaded, or its files are damaged.
    """
    if name not in DATASETS:
        near = [other for other in DATASETS if name in other or other in name]
        raise UsageError(
            f"sacreBLEU knows no test set {name!r}", hint=f"Did you mean one of {', '.join(near)}?" if near else "`sacrebleu --list` shows all."
        )
    dataset = DATASETS[name]
    if lang_pair not in dataset.langpairs:
        raise UsageError(f"the test set {name} has no language pair {lang_pair!r}", hint=f"It has {', '.join(sorted(dataset.langpairs))}.")
    directory = f"{sacrebleu.utils.SACREBLEU_DIR}/{name}"
    try:
        source_path: str = sacrebleu.utils.get_source_file(name, lang_pair)
        reference_paths: list[str] = sacrebleu.utils.get_reference_files(name, lang_pair)
        source = NamedLines(name=f"source of {name} {lang_pair}", lines=read_lines(source_path))
        references = [
            NamedLines(name=f"reference {number} of {name} {lang_pair}", lines=read_lines(path))
            for number, path in enumerate(reference_paths, start=1)
        ]
    except (Exception, SystemExit) as error:
        # Network, TLS, checksum, lock and parse errors arrive in many types, and sacreBLEU ends the process for some of them.
        message = " ".join(str(error).split()) or type(error).__name__
        raise MTKitError(
            f"the test set {name} {lang_pair} cannot be loaded: {message}",
            hint=f"It is downloaded at first use, so check the network. A download that broke off leaves {directory}: remove it and try again. "
            "Without a network, copy that directory from another machine.",
        ) from error
    counts = {len(text.lines) for text in [source, *references]}
    if len(counts) != 1 or counts == {0}:
        raise MTKitError(
            f"the files of the test set {name} {lang_pair} have {', '.join(str(count) for count in sorted(counts))} lines",
            hint=f"They are damaged; remove {directory} and try again.",
        )
    return TestSet(name=name, lang_pair=lang_pair, source=source, references=references)

"""Finds texts that cannot be scored as they are: tokenized or subword-marked, SGML, the wrong file, a lower-cased side.

Each of these gives a number that looks fine and is several points off. What is certainly wrong is told apart from what is probably wrong, so
that the caller can refuse the one and warn of the other. A share of lines is evidence; with few lines it is never certain.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mtkit.errors import DataError
from mtkit.files import is_blank

_SAMPLE_LINES = 2000
"""Words and scripts are compared on about this many lines, spread over the text."""

_MIN_CERTAIN_LINES = 10
"""Evidence in fewer lines than this is a warning, not a refusal."""

_MIN_ALIGNMENT_LINES = 50
"""Whether lines belong together is only asked of texts with at least as many."""

_MIN_ALIGNMENT_GAIN = 0.08
"""Of the words that a line does not share with unrelated lines, it shares at least this part with its own reference. It is 0.06 for English
against German, 0.5 to 0.6 for good systems, and 0 for shuffled lines."""

_SUBWORD_SHARE = 0.05
_ENTITY_SHARE = 0.05
_TOKENIZED_SHARE = 0.5
_SEG_SHARE = 0.1
_RECORD_SHARE = 0.5
_COLUMNS_SHARE = 0.5
_LENGTH_RATIOS = (0.6, 1.7)
"""Characters of a translation for each of its reference: beyond this it is hardly one, or too little or too much is in the file."""
_LOWERCASED_SHARE = 0.1
"""Lines with a capital in a lower-cased text: `tr A-Z a-z` leaves those in Ä and É."""

_SUBWORD = re.compile(r"\S@@(?: |$)|▁|￭|<0x[0-9A-F]{2}>")
_CONTROL = re.compile(r"<(?:unk|pad|s|/s)>")
_ENTITY = re.compile(r"&(?:amp|lt|gt|quot|apos|nbsp|#\d+|#x[0-9a-fA-F]+);")
_SGML_ROOT = re.compile(r"<(?:refset|srcset|tstset|mteval|dataset)\b", re.IGNORECASE)
_LINES_BEFORE_ROOT = 20
"""A file that is SGML or XML has its root in one of so many first lines; further on, such a tag is part of a sentence."""
_SEG = re.compile(r"<seg\b", re.IGNORECASE)
_RECORD = re.compile(r"\d+\t\d+\t[-\d.]*\t|\d+ \|\|\| |[STHDP]-\d+\t|\{\"")
"""How the lines of n-best lists (of mtkit, Moses and Marian, fairseq) and of JSON begin."""
_SPACED_PUNCTUATION = re.compile(r"\w [.,。，、।؟،](?= |$)|\S @-@ \S")
_ATTACHED_PUNCTUATION = re.compile(r"\w[.,。，、।؟،](?= |$)")

_UNSPACED_SCRIPTS = {"CJK", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"}
_WORD_TOKENIZERS = {"13a", "intl", "none"}


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedLines:
    """The lines of a text and the name by which a person knows it."""

    name: str
    lines: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A mistake found in the texts: what and where, what to do, and whether it is certain or only probable."""

    message: str
    hint: str
    is_certain: bool


def check_line_counts(texts: Sequence[NamedLines]) -> None:
    """Check that texts have the same number of lines, and at least one.

    Raises:
        DataError: They have not; names both texts and both counts, or the one that is no plain text.
    """
    first = texts[0]
    for text in texts:
        if not text.lines:
            raise DataError(f"{text.name}: is empty", hint="It needs one line per sentence.")
        if len(text.lines) != len(first.lines):
            for found in filter(None, (find(side) for side in (first, text) for find in (find_markup, find_records))):  # says more than the counts do
                raise DataError(found.message, hint=found.hint)
            raise DataError(
                f"{text.name} has {len(text.lines)} lines, {first.name} has {len(first.lines)}",
                hint="Line n of every file must belong to the same sentence; a line ends at LF only.",
            )


def find_markup(text: NamedLines) -> Finding | None:
    """Look whether a text is one of the SGML and XML files that test sets come in."""
    num_seg = _count(_SEG, text.lines)
    if not (num_seg >= _SEG_SHARE * len(text.lines) > 0 or any(_SGML_ROOT.match(line.lstrip()) for line in text.lines[:_LINES_BEFORE_ROOT])):
        return None
    hint = "Extract one sentence per line, or name the test set: --test-set wmt14/full -l en-de."
    return Finding(message=f"{text.name}: is SGML or XML, not plain text", hint=hint, is_certain=True)


def find_records(text: NamedLines) -> Finding | None:
    """Look whether the lines of a text are records that hold sentences among other things: an n-best list, or JSON."""
    num_records = sum(bool(_RECORD.match(line)) for line in text.lines)
    if not num_records >= _RECORD_SHARE * len(text.lines) > 0:
        return None
    return Finding(
        message=f"{text.name}: {num_records} of {len(text.lines)} lines are entries of an n-best list or JSON, not plain text",
        hint="Score the best translations alone, one per line: translate without --n-best and --json.",
        is_certain=True,
    )


def find_columns(text: NamedLines) -> Finding | None:
    """Look whether a text is a table, such as source and translation, or several references, side by side."""
    num_columned = sum("\t" in line for line in text.lines)
    if not num_columned >= _COLUMNS_SHARE * len(text.lines) > 0:
        return None
    return Finding(
        message=f"{text.name}: {num_columned} of {len(text.lines)} lines hold a tab, as if it had columns",
        hint="Score one column: `cut -f1` takes the first. Several references are several files, each with --ref.",
        is_certain=num_columned >= _MIN_CERTAIN_LINES,
    )


def find_mistakes(
    hyps: Sequence[NamedLines],
    refs: Sequence[NamedLines],
    *,
    source: NamedLines | None = None,
    tokenize: str = "13a",
    lowercase: bool = False,
) -> list[Finding]:
    """Look for texts that should not be scored as they are.

    Args:
        hyps: The texts of the systems.
        refs: The references; all texts have the same number of lines.
        source: What was translated, if known.
        tokenize: The tokenizer that BLEU will use; texts tokenized before are right for `none` alone.
        lowercase: Whether case will be ignored.
    """
    hyp_profiles = [_Profile(text) for text in hyps]
    ref_profiles = [_Profile(text) for text in refs]
    findings: list[Finding] = []
    for profile in [*hyp_profiles, *ref_profiles]:
        findings += _check_one(profile)
    for ref in ref_profiles:
        findings += _check_script(ref, tokenize=tokenize)
        for hyp in hyp_profiles:
            findings += _check_pair(hyp, ref, tokenize=tokenize, lowercase=lowercase)
    for hyp in hyp_profiles:
        findings += _check_alignment(hyp, ref_profiles, _Profile(source) if source else None)
    return findings


def refuse(findings: Sequence[Finding]) -> None:
    """Raise the certain ones among the findings, all of them at once.

    Raises:
        DataError: At least one finding is certain.
    """
    certain = [finding for finding in findings if finding.is_certain]
    if certain:
        hints = list(dict.fromkeys(finding.hint for finding in certain))
        raise DataError("\n".join(finding.message for finding in certain), hint="\n".join([*hints, "To score it all the same, give --force."]))


class _Profile:
    """What a text looks like: lines of each kind, its script, and a sample of its words."""

    def __init__(self, text: NamedLines) -> None:
        lines = text.lines
        self.name = text.name
        self.lines = lines
        self.num_lines = len(lines)
        self.num_blank = sum(map(is_blank, lines))
        self.num_subword = _count(_SUBWORD, lines)
        self.num_control = _count(_CONTROL, lines)
        self.num_entities = _count(_ENTITY, lines)
        self.formats = list(filter(None, (find_markup(text), find_records(text) or find_columns(text))))
        self.num_characters = sum(map(len, lines))
        self.num_spaced = _count(_SPACED_PUNCTUATION, lines)
        self.num_attached = sum(bool(_ATTACHED_PUNCTUATION.search(line)) and not _SPACED_PUNCTUATION.search(line) for line in lines)
        self.num_cased = sum(line.lower() != line.upper() for line in lines)
        self.num_with_upper = sum(line.lower() != line for line in lines)
        self.stride = _stride(lines)
        self.script = _main_script(lines[:: self.stride])

    @property
    def is_tokenized(self) -> bool:
        return self.num_spaced > 0 and self.num_spaced >= _TOKENIZED_SHARE * (self.num_spaced + self.num_attached)

    @property
    def is_lowercased(self) -> bool:
        return self.num_cased > 0 and self.num_with_upper <= _LOWERCASED_SHARE * self.num_cased

    def bags(self, *, shift: int = 0) -> Iterator[Counter[str]]:
        """The words of the sampled lines; the characters where a script has no spaces. `shift` takes the lines that many further on."""
        for index in range(0, self.num_lines, self.stride):
            line = self.lines[(index + shift) % self.num_lines].lower()
            yield Counter(line if self.script in _UNSPACED_SCRIPTS else line.split())


def _check_one(text: _Profile) -> list[Finding]:
    findings = []

    def add(message: str, hint: str, *, is_certain: bool) -> None:
        findings.append(Finding(message=f"{text.name}: {message}", hint=hint, is_certain=is_certain))

    if text.num_blank == text.num_lines:
        add("all lines are blank", "Give the file that holds the text.", is_certain=True)
    elif text.num_blank:
        add(f"{text.num_blank} of {text.num_lines} lines are blank", "Each counts as an empty sentence.", is_certain=False)
    findings += text.formats
    if text.num_subword:
        add(
            f"{text.num_subword} of {text.num_lines} lines hold subword marks (@@, ▁, ￭ or <0x..>)",
            "Score plain text: undo the subwords with `mtkit tokenizer decode` or the tool that made them.",
            is_certain=text.num_subword >= _SUBWORD_SHARE * text.num_lines,
        )
    if text.num_control:
        add(f"{text.num_control} of {text.num_lines} lines hold <unk>, <pad>, <s> or </s>", "They are scored as text.", is_certain=False)
    return findings


def is_in_subwords(lines: Sequence[str]) -> bool:
    """Whether a text was segmented before: too many of its lines hold the marks of subword tools."""
    return _count(_SUBWORD, lines) >= max(1.0, _SUBWORD_SHARE * len(lines))


def is_escaped(lines: Sequence[str]) -> bool:
    """Whether a text holds characters as HTML entities, as Moses' tokenizer leaves them: `&quot;`, `&apos;`."""
    return _count(_ENTITY, lines) >= max(1.0, _ENTITY_SHARE * len(lines))


def takes_sentences_for_words(lines: Sequence[str], *, tokenize: str) -> bool:
    """Whether a text is written without spaces, as Chinese is, and this tokenizer of BLEU splits at spaces."""
    return _joins_words(_main_script(lines[:: _stride(lines)]), tokenize)


def _stride(lines: Sequence[str]) -> int:
    """One of so many lines is in the sample."""
    return max(1, len(lines) // _SAMPLE_LINES)


def _joins_words(script: str | None, tokenize: str) -> bool:
    return script in _UNSPACED_SCRIPTS and tokenize in _WORD_TOKENIZERS


def _check_script(ref: _Profile, *, tokenize: str) -> list[Finding]:
    if not _joins_words(ref.script, tokenize):
        return []
    return [
        Finding(
            message=f"{ref.name}: is written without spaces, and BLEU's tokenizer {tokenize} splits at spaces",
            hint="Name the language (--tgt-lang zh, ja) or a tokenizer (--tokenize zh, ja-mecab, flores200, char), or go by chrF.",
            is_certain=False,
        )
    ]


def _check_pair(hyp: _Profile, ref: _Profile, *, tokenize: str, lowercase: bool) -> list[Finding]:
    """Compare the looks of a hypothesis file and a reference file."""
    findings = []
    if hyp.is_tokenized != ref.is_tokenized:
        tokenized, other = (hyp, ref) if hyp.is_tokenized else (ref, hyp)
        findings.append(
            Finding(
                message=f"{tokenized.name}: looks tokenized ({tokenized.num_spaced} lines have spaces before punctuation), {other.name} does not",
                hint="Score detokenized text against raw references.",
                is_certain=min(tokenized.num_spaced, other.num_attached) >= _MIN_CERTAIN_LINES,
            )
        )
    elif hyp.is_tokenized and tokenize != "none":
        findings.append(
            Finding(
                message=f"{hyp.name} and {ref.name}: look tokenized, and BLEU tokenizes again ({tokenize}): comparable with nothing published",
                hint="Score raw text, or give --tokenize none for BLEU on tokenized text.",
                is_certain=False,
            )
        )
    for escaped, other in ((hyp, ref), (ref, hyp)):
        if escaped.num_entities and not other.num_entities:
            findings.append(
                Finding(
                    message=f"{escaped.name}: {escaped.num_entities} of {escaped.num_lines} lines hold HTML entities, {other.name} has none",
                    hint="Turn &quot; and the like into the characters first.",
                    is_certain=escaped.num_entities >= max(_MIN_CERTAIN_LINES, _ENTITY_SHARE * escaped.num_lines),
                )
            )
        if not lowercase and escaped.is_lowercased and other.num_with_upper >= 0.5 * other.num_cased > 0:
            findings.append(
                Finding(
                    message=f"{escaped.name}: is lower-cased, {other.name} is not",
                    hint="Score true-cased text, or ignore case with --lowercase.",
                    is_certain=min(escaped.num_cased, other.num_with_upper) >= _MIN_CERTAIN_LINES,
                )
            )
    ratio = hyp.num_characters / max(1, ref.num_characters)
    if hyp.num_lines >= _MIN_CERTAIN_LINES and not _LENGTH_RATIOS[0] <= ratio <= _LENGTH_RATIOS[1]:
        findings.append(
            Finding(
                message=f"{hyp.name}: has {ratio:.2f} times the characters of {ref.name}",
                hint="Was a part of it not translated, or does it hold more than the translation?",
                is_certain=False,
            )
        )
    if hyp.script and ref.script and hyp.script != ref.script:
        findings.append(
            Finding(
                message=f"{hyp.name}: is in {hyp.script.capitalize()} script, {ref.name} in {ref.script.capitalize()}",
                hint="Is it the right file, or were source and target swapped?",
                is_certain=False,
            )
        )
    return findings


def _check_alignment(hyp: _Profile, refs: Sequence[_Profile], source: _Profile | None) -> list[Finding]:
    """Compare the words: is each text in the language and in the order that it should be?"""
    findings = []
    to_refs = [_overlap(hyp, ref) for ref in refs]
    if source is not None:
        suspects = [(hyp, _overlap(hyp, source), max(to_refs))]
        suspects += [(ref, _overlap(ref, source), to_ref) for ref, to_ref in zip(refs, to_refs, strict=True)]
        for text, to_source, to_other in suspects:
            if to_source >= 0.5 and to_source > to_other:
                findings.append(
                    Finding(
                        message=f"{text.name}: shares {to_source:.0%} of its words with the source {source.name}",
                        hint="Is it untranslated, or is it the wrong file?",
                        is_certain=to_source >= 0.9,
                    )
                )
    if hyp.num_lines >= _MIN_ALIGNMENT_LINES:
        for ref, to_ref in zip(refs, to_refs, strict=True):
            to_other_lines = _overlap(hyp, ref, shift=ref.num_lines // 2)
            if to_ref - to_other_lines < _MIN_ALIGNMENT_GAIN * (1 - to_other_lines):
                findings.append(
                    Finding(
                        message=f"{hyp.name}: shares {to_ref:.0%} of its words with the same lines of {ref.name}, {to_other_lines:.0%} with others",
                        hint="Are both files of the same test set, in the same language and the same order?",
                        is_certain=False,
                    )
                )
    if any(list(hyp.lines) == list(ref.lines) for ref in refs):
        findings.append(
            Finding(message=f"{hyp.name}: is identical to a reference", hint="Was a reference given in place of the translation?", is_certain=False)
        )
    return findings


def _count(pattern: re.Pattern[str], lines: Sequence[str]) -> int:
    return sum(bool(pattern.search(line)) for line in lines)


def _main_script(lines: Sequence[str]) -> str | None:
    """The script of at least 70 % of the letters, by its Unicode name, or None. Kana count as CJK."""
    scripts: Counter[str] = Counter()
    for character, count in Counter(character for line in lines for character in line if character.isalpha()).items():
        script = unicodedata.name(character, "?").replace("-", " ").split()[0]
        scripts["CJK" if script in ("HIRAGANA", "KATAKANA") else script] += count
    if not scripts:
        return None
    script, count = scripts.most_common(1)[0]
    return script if count >= 0.7 * scripts.total() else None


def _overlap(first: _Profile, second: _Profile, *, shift: int = 0) -> float:
    """Share of words that two texts have in common line by line: 2 x common / (words of both), from 0 to 1."""
    common = total = 0
    for first_bag, second_bag in zip(first.bags(), second.bags(shift=shift), strict=True):
        common += (first_bag & second_bag).total()
        total += first_bag.total() + second_bag.total()
    return 2 * common / total if total else 0.0

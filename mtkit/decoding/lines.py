"""Lines of text in, one translation for each out, whatever engine does the search: what is asked for, what comes out, and all that lies between.

Lines are segmented, sorted by length inside a window, searched in batches, and handed over in their own order.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mtkit.data.batching import batches_by_length
from mtkit.data.tokenizer import UNK_ID, Tokenizer
from mtkit.decoding.scoring import PenaltyKind
from mtkit.decoding.search import Hypothesis
from mtkit.decoding.steps import MAX_SOURCE_LENGTH
from mtkit.errors import ConfigError, DataError, UsageError
from mtkit.files import is_blank, one_line

BATCH_TOKENS = 2048
"""Source positions of a batch, padding included, by default."""

WINDOW_LINES = 2000
"""Lines that are sorted by length together, by default."""

_BEAM_SIZE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchConfig:
    """How translations are searched for. The defaults are the paper's (Vaswani et al. 2017, section 6.1)."""

    method: Literal["beam", "sample"] = "beam"
    """`beam` searches for the most probable translation, `sample` draws one at random from the model's distribution."""
    beam_size: int = _BEAM_SIZE
    """Live hypotheses per sentence, 1 to 1,000; 1 is greedy search. For `beam`."""
    length_penalty: float = 0.6
    """Exponent alpha of the length penalty, 0 to 10: the larger, the longer the translations. 0 ranks by plain log-probability."""
    penalty: PenaltyKind = "gnmt"
    """`gnmt` divides the log-probability by ((5 + n) / 6)^alpha, `power` by n^alpha, for n tokens, end of sentence included."""
    n_best: int = 1
    """Hypotheses per sentence, 1 to 10,000; at most `beam_size` for `beam`. Two may have one text, in other pieces."""
    max_length_ratio: float = 1.0
    """A translation has at most max_length_ratio * (source tokens) + max_length_constant tokens, end of sentence included; 0 to 100."""
    max_length_constant: int = 50
    """See `max_length_ratio`; tokens, 0 to 100,000. The cap is never below 1."""
    max_source_length: int = MAX_SOURCE_LENGTH
    """A source longer than so many tokens is cut there, with a warning; 1 to 100,000."""
    temperature: float = 1.0
    """For `sample`: divides the log-probabilities, above 0; below 1 sharpens the distribution."""
    top_k: int | None = None
    """For `sample`: draw from so many most probable pieces only, at least 1; None = all."""
    top_p: float | None = None
    """For `sample`: draw from the fewest pieces that together have this probability, above 0, at most 1; None = all."""
    seed: int = 1
    """For `sample`: seed of the random numbers, at least 0. Line i always gets the same ones."""

    def __post_init__(self) -> None:
        ranges = {
            "beam_size": (1, 1000),
            "n_best": (1, 10_000),
            "max_length_constant": (0, 100_000),
            "max_source_length": (1, 100_000),
            "seed": (0, math.inf),
            "length_penalty": (0, 10),
            "max_length_ratio": (0, 100),
        }
        for key, (least, most) in ranges.items():
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= least):
                raise ConfigError(f"{key} must be at least {least}, but is {value}")
            if value > most:
                raise ConfigError(f"{key} must be at most {most}, but is {value}")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"temperature must be above 0, but is {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be at least 1 or none, but is {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, or none, but is {self.top_p}")
        if self.method == "sample" and self.beam_size != _BEAM_SIZE:
            raise ConfigError("beam_size is for method beam, but method is sample", hint="Leave out --beam-size, or --sample.")
        if self.method == "beam":
            if self.n_best > self.beam_size:
                raise ConfigError(f"n_best must be at most beam_size, but is {self.n_best} with beam_size {self.beam_size}")
            for key, unset in (("temperature", 1.0), ("top_k", None), ("top_p", None), ("seed", 1)):
                if getattr(self, key) != unset:
                    raise ConfigError(f"{key} is for method sample, but method is beam", hint="Draw translations with --sample, or leave it out.")

    def max_length(self, num_src_tokens: int) -> int:
        """The largest number of target tokens, EOS included, for a source of so many tokens without EOS."""
        return max(1, int(self.max_length_ratio * num_src_tokens) + self.max_length_constant)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedText:
    """One hypothesis as text.

    Attributes:
        text: One line of text.
        tokens: The target ids that it is made of, without EOS.
        score: What it is ranked by: `log_prob` divided by the length penalty.
        log_prob: Sum of the natural log-probabilities of the tokens, and of EOS if finished.
        finished: Whether the model ended it; False means that the length cap cut it.
    """

    text: str
    tokens: tuple[int, ...]
    score: float
    log_prob: float
    finished: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """What became of one input line.

    Attributes:
        line: Its number, from 1.
        text: The best hypothesis, one line; empty for a line without content.
        hypotheses: At most `n_best`, the best first; none for a line without content, and fewer than `n_best` only where no more exist.
        is_source_cut: Whether the source was longer than the limit.
        warning: What a person should know about this line, or None.
    """

    line: int
    text: str
    hypotheses: tuple[RankedText, ...] = ()
    is_source_cut: bool = False
    warning: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentence:
    """What is searched for one line.

    Attributes:
        source: Its token ids, without EOS; some, and not more than the limit.
        prefix: Token ids with which the translation has to begin.
        line: Its number, from 1, for messages and random numbers.
    """

    source: Sequence[int]
    prefix: Sequence[int]
    line: int


class LineTranslator(ABC):
    """Translates lines of text: all but the search itself, which is for the engine that a subclass stands for.

    A line's translation depends on nothing but the line, and for sampling its number: not on the other lines, the window or the batch. (On a GPU, and
    in half precision or int8 without kernels, rounding differs with the batch, and close calls may fall the other way.)

    Args:
        tokenizer: Of the model.
        search: How to search.
        batch_tokens: Source positions of a batch, padding included.
        window_lines: Lines that are sorted by length together.
        description: What computes, for a person.

    Attributes:
        search: As above.
        window_lines: As above.
        description: As above.
        takes_prefixes: Whether translations can be made to begin with given words.
    """

    takes_prefixes = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        search: SearchConfig | None = None,
        batch_tokens: int = BATCH_TOKENS,
        window_lines: int = WINDOW_LINES,
        description: str = "",
    ) -> None:
        self.search = search or SearchConfig()
        self._tokenizer = tokenizer
        self._batch_tokens = batch_tokens
        self.window_lines = window_lines
        self.description = description
        self._forbidden_ids = tokenizer.forbidden_ids("tgt")

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Which sources are searched together, as indices; `lengths` are their positions. Samples of a source take as much room as other sources."""
        num_samples = self.search.n_best if self.search.method == "sample" else 1
        return batches_by_length(lengths, max_tokens=max(1, self._batch_tokens // num_samples))

    def _search_all(self, batches: Sequence[Sequence[Sentence]]) -> Iterator[list[list[Hypothesis]]]:
        """What `_search` gives for each batch, in their order."""
        for batch in batches:
            yield self._search(batch)

    @abstractmethod
    def _search(self, batch: Sequence[Sentence]) -> list[list[Hypothesis]]:
        """The hypotheses of some sentences."""

    def translate(self, lines: Iterable[str], *, prefixes: Iterable[str] | None = None) -> Iterator[Translation]:
        """Translate lines, lazily: one result per line, in order. Waits for full windows; see `translate_windows` for slow input.

        Args:
            lines: Source text.
            prefixes: See `translate_windows`.

        Raises:
            TypeError: A text was given instead of lines.
            MTKitError: The model gave NaN.
            ResourceError: A batch does not fit into the memory of the GPU.
        """
        if isinstance(lines, str):
            raise TypeError("translate takes lines, such as [text] or text.split('\\n'), not one text")
        return self._translate(iter(lines), prefixes)

    def _translate(self, remaining: Iterator[str], prefixes: Iterable[str] | None) -> Iterator[Translation]:
        windows = iter(lambda: list(itertools.islice(remaining, self.window_lines)), [])
        for translations in self.translate_windows(windows, prefixes=prefixes):
            yield from translations

    def translate_windows(self, windows: Iterable[Sequence[str]], *, prefixes: Iterable[str] | None = None) -> Iterator[list[Translation]]:
        """Translate windows of lines as they come, and hand over what is ready, in order, after every batch.

        Args:
            windows: Lists of lines, such as `mtkit.decoding.windows.LineWindows`; no window is asked for before the one before it is done.
            prefixes: With what the translation of each line has to begin, blank for anything; its last word may go on. The cap of the length is that
                many tokens higher. The translation of a blank line stays blank. None = anything for all.

        Raises:
            UsageError: There are prefixes, and this engine cannot take them.
            DataError: There are not as many prefixes as lines.
            MTKitError: The model gave NaN.
            ResourceError: A batch does not fit into the memory of the GPU.
        """
        if prefixes is not None and not self.takes_prefixes:
            raise UsageError("translations cannot be made to begin with given words by this engine", hint="Leave out --engine.")
        first_line, remaining = 1, None if prefixes is None else iter(prefixes)
        for window in windows:
            beginnings = None if remaining is None else list(itertools.islice(remaining, len(window)))
            if beginnings is not None and len(beginnings) < len(window):
                raise DataError(f"there are {first_line - 1 + len(beginnings)} prefixes, and more lines to translate")
            yield from self._translate_window(window, first_line, beginnings)
            first_line += len(window)
        if remaining is not None and next(remaining, None) is not None:
            raise DataError(f"there are more prefixes than the {first_line - 1} lines to translate")

    def _translate_window(self, lines: Sequence[str], first_line: int, prefixes: Sequence[str] | None) -> Iterator[list[Translation]]:
        limit = self.search.max_source_length
        sources = self._tokenizer.encode(lines, "src")
        with_content = [index for index, ids in enumerate(sources) if ids]
        results: list[Translation | None] = [Translation(line=first_line + index, text="") for index in range(len(lines))]
        for index in with_content:
            results[index] = None
        lengths = [min(len(sources[index]), limit) + 1 for index in with_content]
        batches = [[with_content[place] for place in batch] for batch in self._batches(lengths)]
        # The batch with the first line comes first: what cannot be handed over yet waits for the lines before it. Blank lines wait for none.
        batches.sort(key=min)
        wanted = [[] for _ in lines] if prefixes is None else self._tokenizer.encode(prefixes, "tgt")
        beginnings = [list(itertools.takewhile(lambda piece: piece not in self._forbidden_ids and piece != UNK_ID, ids)) for ids in wanted]
        searches = self._search_all(
            [[Sentence(source=sources[index][:limit], prefix=beginnings[index], line=first_line + index) for index in batch] for batch in batches]
        )
        num_handed_over = 0
        for batch, found in itertools.chain([([], [])], zip(batches, searches, strict=True)):
            for index, hypotheses in zip(batch, found, strict=True):
                is_prefix_cut = len(beginnings[index]) < len(wanted[index])
                results[index] = self._translation(first_line + index, hypotheses, num_src_tokens=len(sources[index]), is_prefix_cut=is_prefix_cut)
            ready = list(itertools.takewhile(lambda result: result is not None, results[num_handed_over:]))
            num_handed_over += len(ready)
            if ready:
                yield [result for result in ready if result is not None]

    def _translation(self, line: int, hypotheses: Sequence[Hypothesis], *, num_src_tokens: int, is_prefix_cut: bool) -> Translation:
        limit = self.search.max_source_length
        texts = self._tokenizer.decode([hypothesis.tokens for hypothesis in hypotheses], "tgt")
        ranked = tuple(
            RankedText(
                text=one_line(text), tokens=hypothesis.tokens, score=hypothesis.score, log_prob=hypothesis.log_prob, finished=hypothesis.finished
            )
            for text, hypothesis in zip(texts, hypotheses, strict=True)
        )
        warnings = []
        if num_src_tokens > limit:
            warnings.append(f"the source has {num_src_tokens} tokens, only the first {limit} were translated")
        if is_prefix_cut:
            warnings.append("the prefix holds what the model has no piece for, and counts up to there")
        if ranked and not ranked[0].finished:
            warnings.append(f"the translation was cut at {len(ranked[0].tokens)} tokens, the model did not end it")
        if ranked and is_blank(ranked[0].text):
            warnings.append("the translation is blank")
        return Translation(
            line=line,
            text=ranked[0].text if ranked else "",
            hypotheses=ranked,
            is_source_cut=num_src_tokens > limit,
            warning="; ".join(warnings) or None,
        )


def named_lines(batch: Sequence[Sentence]) -> str:
    """Between which lines of the input a batch is, for a message."""
    numbers = [sentence.line for sentence in batch]
    return f"lines {min(numbers)} to {max(numbers)}"

"""BLEU, chrF and TER through sacreBLEU, with signatures, 95 % intervals and paired significance.

Every number is sacreBLEU's own: its classes turn each sentence into a row of counts and a sum of rows into a score. What is added here is the
check of the shapes, which sacreBLEU leaves to the caller (it truncates in silence where a list is transposed or too short), and resampling that
takes the seed as an argument, needs the rows of each system only once, and keeps memory independent of the number of resamples. Interval and
p-value are those of sacreBLEU's paired bootstrap for the same seed, but for ties, see `system_scores`.

Texts are raw: detokenized, true-cased, exactly as a person would read them. The metrics tokenize by themselves and say so in the signature.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from mtkit.errors import DataError, MTKitError, UsageError

MetricName = Literal["bleu", "chrf", "chrf++", "ter"]
METRIC_NAMES: tuple[MetricName, ...] = get_args(MetricName)
DEFAULT_METRICS: tuple[MetricName, ...] = ("bleu", "chrf")

DEFAULT_SEED = 12345
"""sacreBLEU's own, so that its command line gives the same intervals."""

MIN_BOOTSTRAP = 40
"""Fewer resamples have no outer 2.5 % to be cut off at either end, and so no 95 % interval."""

DISPLAY_NAMES: Mapping[MetricName, str] = {"bleu": "BLEU", "chrf": "chrF", "chrf++": "chrF++", "ter": "TER"}
"""chrF is chrF2 in sacreBLEU's output: recall counts twice as much as precision (beta = 2)."""

BLEU_TOKENIZERS: tuple[str, ...] = tuple(name for name in BLEU.TOKENIZERS if name != "spm")
"""`spm` is an old name of `flores101` that sacreBLEU warns of."""

_TOKENIZER_BY_LANG = {
    "zh": "zh", "zho": "zh", "cmn": "zh", "yue": "zh",
    "ja": "ja-mecab", "jpn": "ja-mecab",
    "ko": "ko-mecab", "kor": "ko-mecab",
}  # fmt: skip
_TOKENIZER_HINTS = {
    "ja-mecab": "Install it with `pip install 'sacrebleu[ja]'`, or choose another: --tokenize char.",
    "ko-mecab": "Install it with `pip install 'sacrebleu[ko]'`, or choose another: --tokenize char.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One metric over one text.

    Attributes:
        metric: How the metric is asked for, such as `bleu`.
        name: How it is shown, such as `BLEU`.
        value: In percent. Higher is better, except for TER.
        signature: Everything that the number depends on, as sacreBLEU writes it.
        num_sentences: Sentences that were scored.
        low: Lower end of the 95 % bootstrap interval, or None without resampling.
        high: Upper end.
        p_value: Probability of a difference to the first system at least this large by chance (two-sided paired bootstrap); None for the
            first system and without resampling.
        details: What the metric is made of. BLEU: `precisions`, `brevity_penalty`, `hyp_length`, `ref_length`; TER: `num_edits`, `ref_length`.
    """

    metric: MetricName
    name: str
    value: float
    signature: str
    num_sentences: int
    low: float | None
    high: float | None
    p_value: float | None
    details: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceScores:
    """One metric for each sentence by itself: `metric`, `name` and `signature` as in `Score`, and one value per sentence."""

    metric: MetricName
    name: str
    values: list[float]
    signature: str


def corpus_scores(
    hyps: Sequence[str],
    refs: Sequence[Sequence[str]],
    *,
    metrics: Sequence[MetricName] = DEFAULT_METRICS,
    tokenize: str | None = None,
    lowercase: bool = False,
    target_lang: str | None = None,
    num_bootstrap: int = 0,
    seed: int = DEFAULT_SEED,
    signature_items: Mapping[str, str] | None = None,
) -> list[Score]:
    """Score one system.

    Args:
        hyps: Its translations, raw text, one per sentence.
        refs: Sets of references, each as long as `hyps`. One reference per sentence is `[refs]`.
        metrics: Which, in the order of the result.
        tokenize: BLEU's tokenizer, one of `BLEU_TOKENIZERS`; None for the one that fits `target_lang`.
        lowercase: Ignore case in BLEU and chrF. TER always does, as sacreBLEU's default.
        target_lang: Language code of the texts, such as `de` or `zh-CN`, or None if unknown.
        num_bootstrap: Resamples for the interval, at least `MIN_BOOTSTRAP`, or 0 for none.
        seed: Of the resampling.
        signature_items: Further entries of the signature, such as `{"test": "wmt14/full", "lang": "en-de"}`.

    Returns:
        One score per metric.

    Raises:
        TypeError: `hyps` or a reference set is a bare string, or holds something else than strings.
        DataError: The counts of lines differ, or there are none.
        ValueError: There is no such metric.
        UsageError: There is no such tokenizer.
        MTKitError: The tokenizer needs a package or file that is not there.
    """
    systems = system_scores(
        [hyps],
        refs,
        metrics=metrics,
        tokenize=tokenize,
        lowercase=lowercase,
        target_lang=target_lang,
        num_bootstrap=num_bootstrap,
        seed=seed,
        signature_items=signature_items,
    )
    return systems[0]


def system_scores(
    systems: Sequence[Sequence[str]],
    refs: Sequence[Sequence[str]],
    *,
    metrics: Sequence[MetricName] = DEFAULT_METRICS,
    tokenize: str | None = None,
    lowercase: bool = False,
    target_lang: str | None = None,
    num_bootstrap: int = 0,
    seed: int = DEFAULT_SEED,
    signature_items: Mapping[str, str] | None = None,
) -> list[list[Score]]:
    """Score several systems on the same references, and each against the first by paired bootstrap resampling.

    The p-value is that of Koehn (2004), "Statistical Significance Tests for Machine Translation Evaluation", two-sided as in sacreBLEU: with
    d_b the absolute difference of the two scores on resample b and d the one on the whole text, p = (#{b: d_b - mean(d_b) >= d} + 1) / (B + 1).
    (sacreBLEU has > for >=, which calls two identical outputs significantly different.)

    Args:
        systems: The translations of each system; the first is the baseline.
        refs: As in `corpus_scores`, like all other arguments.

    Returns:
        For each system one score per metric.

    Raises:
        TypeError, ValueError, DataError, UsageError, MTKitError: As `corpus_scores`.
    """
    if num_bootstrap < 0 or 0 < num_bootstrap < MIN_BOOTSTRAP:
        raise UsageError(f"the number of bootstrap resamples must be 0 or at least {MIN_BOOTSTRAP}, but is {num_bootstrap}")
    for hyps in systems:
        check_shapes(hyps, refs)
    table: list[list[Score]] = [[] for _ in systems]
    for name in metrics:
        metric = _make_metric(name, refs, tokenize=tokenize, lowercase=lowercase, target_lang=target_lang)
        if num_bootstrap:
            metric.n_bootstrap, metric.seed = num_bootstrap, str(seed)
        signature = _signature(metric, signature_items)
        baseline: tuple[float, np.ndarray] | None = None
        for column, hyps in zip(table, systems, strict=True):
            rows = _sentence_statistics(metric, hyps)
            result = metric._aggregate_and_compute(rows)
            low = high = p_value = None
            if num_bootstrap:
                resampled = _resample(metric, rows, num_samples=num_bootstrap, seed=seed)
                low, high = _interval(resampled)
                if baseline is None:
                    baseline = result.score, resampled
                else:
                    p_value = _paired_p_value(baseline, (result.score, resampled))
            column.append(
                Score(
                    metric=name,
                    name=DISPLAY_NAMES[name],
                    value=float(result.score),
                    signature=signature,
                    num_sentences=len(rows),
                    low=low,
                    high=high,
                    p_value=p_value,
                    details=_details(name, result),
                )
            )
    return table


def sentence_scores(
    hyps: Sequence[str],
    refs: Sequence[Sequence[str]],
    *,
    metrics: Sequence[MetricName] = DEFAULT_METRICS,
    tokenize: str | None = None,
    lowercase: bool = False,
    target_lang: str | None = None,
    signature_items: Mapping[str, str] | None = None,
) -> list[SentenceScores]:
    """Score each sentence by itself. BLEU stops at the longest n-gram that a short sentence has (`eff:yes` in the signature).

    Args:
        hyps: As in `corpus_scores`, like all other arguments.

    Returns:
        For each metric as many values as there are sentences.

    Raises:
        TypeError, ValueError, DataError, UsageError, MTKitError: As `corpus_scores`.
    """
    check_shapes(hyps, refs)
    results = []
    for name in metrics:
        metric = _make_metric(name, refs, tokenize=tokenize, lowercase=lowercase, target_lang=target_lang, effective_order=True)
        values = [float(metric._compute_score_from_stats(row).score) for row in _sentence_statistics(metric, hyps)]
        results.append(SentenceScores(metric=name, name=DISPLAY_NAMES[name], values=values, signature=_signature(metric, signature_items)))
    return results


def parse_metrics(text: str) -> tuple[MetricName, ...]:
    """The metrics that a text such as `bleu,chrf` names.

    Raises:
        UsageError: It names none, one that does not exist, or one twice.
    """
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    known = {str(name): name for name in METRIC_NAMES}
    for name in names:
        if name not in known:
            raise UsageError(f"there is no metric {name!r}", hint=f"Choose among {', '.join(METRIC_NAMES)}.")
    if not names or len(set(names)) < len(names):
        raise UsageError(f"the metrics {text!r} must be one or more different names", hint=f"Choose among {', '.join(METRIC_NAMES)}.")
    return tuple(known[name] for name in names)


def tokenizer_for(target_lang: str | None) -> str:
    """BLEU's tokenizer for a language: `zh`, `ja-mecab` and `ko-mecab` for theirs, else `13a`.

    Args:
        target_lang: A code such as `zh`, `zh-TW` or `zho_Hans`, or None.
    """
    if target_lang is None:
        return "13a"
    return _TOKENIZER_BY_LANG.get(_base_lang(target_lang), "13a")


def target_language(lang_pair: str) -> str:
    """The target of a language pair: `de` of `en-de`, `zh-CN` of `en-zh-CN`. A region or script, with a capital, belongs to the language before it.

    Raises:
        UsageError: It is not of the form SRC-TGT.
    """
    parts = lang_pair.split("-")
    start = next((place for place in reversed(range(len(parts))) if parts[place][:1].islower()), 0)
    if start == 0 or not all(parts):
        raise UsageError(f"the language pair {lang_pair!r} must be of the form SRC-TGT", hint="For example: -l en-de.")
    return "-".join(parts[start:])


def check_shapes(hyps: Sequence[str], refs: Sequence[Sequence[str]]) -> None:
    """Check that `refs` are sets of references for exactly the sentences of `hyps`.

    Raises:
        TypeError: A bare string, or something that is not a string, stands where lines are needed.
        DataError: The counts differ or are 0.
    """
    _check_lines(hyps, "hyps")
    if isinstance(refs, str) or not isinstance(refs, Sequence):
        raise TypeError(f"refs must be a list of reference sets, each a list of strings, but is {type(refs).__name__}")
    if refs and isinstance(refs[0], str):
        raise TypeError("refs must be a list of reference sets, but is a list of strings; one reference per sentence is [refs]")
    if not refs:
        raise DataError("there are no references")
    if not hyps:
        raise DataError("there are no sentences to score")
    for number, lines in enumerate(refs, start=1):
        _check_lines(lines, f"reference set {number}")
        if len(lines) != len(hyps):
            transposed = len(refs) == len(hyps) and all(len(lines) == len(refs[0]) for lines in refs)
            raise DataError(
                f"reference set {number} has {len(lines)} lines, the hypotheses have {len(hyps)}",
                hint="The references look transposed: give one list per reference set, not one per sentence." if transposed else None,
            )


def _check_lines(lines: Sequence[str], name: str) -> None:
    if isinstance(lines, str) or not isinstance(lines, Sequence):
        raise TypeError(f"{name} must be a list of strings, but is {type(lines).__name__}")
    for index, line in enumerate(lines):
        if not isinstance(line, str):
            raise TypeError(f"{name} must hold strings only, but item {index} is {type(line).__name__}")


def _make_metric(
    name: MetricName,
    refs: Sequence[Sequence[str]],
    *,
    tokenize: str | None,
    lowercase: bool,
    target_lang: str | None,
    effective_order: bool = False,
) -> Metric:
    """The sacreBLEU object of a metric, with the references counted once for all systems."""
    if name == "bleu":
        tokenizer = tokenizer_for(target_lang) if tokenize is None else tokenize
        if tokenizer not in BLEU_TOKENIZERS:
            raise UsageError(f"BLEU has no tokenizer {tokenizer!r}", hint=f"Choose one of {', '.join(BLEU_TOKENIZERS)}.")
        return _make_bleu(refs, tokenizer=tokenizer, lowercase=lowercase, effective_order=effective_order)
    if name == "chrf":
        return CHRF(lowercase=lowercase, references=refs)
    if name == "chrf++":
        return CHRF(word_order=2, lowercase=lowercase, references=refs)
    if name == "ter":
        # Tercom counts words; without its rules for Asian scripts a Chinese or Japanese sentence would be a single one.
        is_unspaced = target_lang is not None and tokenizer_for(target_lang) in ("zh", "ja-mecab")
        return TER(normalized=is_unspaced, asian_support=is_unspaced, references=refs)
    raise ValueError(f"there is no metric {name!r}")


def _make_bleu(refs: Sequence[Sequence[str]], *, tokenizer: str, lowercase: bool, effective_order: bool) -> BLEU:
    try:
        # force=True leaves out sacreBLEU's own warning; mtkit.evaluation.checks looks for more and knows the file names.
        return BLEU(tokenize=tokenizer, lowercase=lowercase, effective_order=effective_order, force=True, references=refs)
    except (ImportError, RuntimeError, OSError, SystemExit) as error:
        # Missing MeCab, or a sentencepiece model that could not be downloaded; sacreBLEU ends the process for some of these.
        message = " ".join(str(error).split())
        raise MTKitError(
            f"BLEU's tokenizer {tokenizer} cannot be used: {message}",
            hint=_TOKENIZER_HINTS.get(tokenizer, "It is downloaded at first use; connect to the network or choose another with --tokenize."),
        ) from error


def _sentence_statistics(metric: Metric, hyps: Sequence[str]) -> list[list[float]]:
    """One row of counts per sentence, against the references that the metric holds."""
    rows: list[list[float]] = metric._extract_corpus_statistics(hyps, None)
    if len(rows) != len(hyps):
        raise AssertionError(f"sacreBLEU scored {len(rows)} of {len(hyps)} sentences")
    return rows


def _resample(metric: Metric, rows: list[list[float]], *, num_samples: int, seed: int) -> np.ndarray:
    """Scores of `num_samples` texts of the same size drawn with replacement.

    Draws one resample at a time, which gives the same random numbers as drawing all at once, in memory that does not grow with their number.
    The same seed and number of sentences give the same draws, so that two systems are paired.
    """
    statistics = np.asarray(rows, dtype=np.float64)
    num_sentences = len(rows)
    generator = np.random.default_rng(seed)
    scores = np.empty(num_samples)
    for sample in range(num_samples):
        drawn = generator.choice(num_sentences, size=num_sentences, replace=True)
        times_drawn = np.bincount(drawn, minlength=num_sentences)
        scores[sample] = metric._compute_score_from_stats((times_drawn @ statistics).tolist()).score
    return scores


def _interval(resampled: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of the resampled scores; half its width is the +- of sacreBLEU."""
    ordered = np.sort(resampled)
    cut = len(ordered) // 40
    return float(ordered[cut]), float(ordered[-cut - 1])


def _paired_p_value(baseline: tuple[float, np.ndarray], system: tuple[float, np.ndarray]) -> float:
    differences = np.abs(system[1] - baseline[1])
    num_larger = int(np.sum(differences - differences.mean() >= abs(system[0] - baseline[0])))
    return (num_larger + 1) / (len(differences) + 1)


def _signature(metric: Metric, items: Mapping[str, str] | None) -> str:
    signature = metric.get_signature()
    for key, value in (items or {}).items():
        signature.update(key, value)
    return str(signature)


def _details(name: MetricName, result: Any) -> dict[str, Any]:
    if name == "bleu":
        return {
            "precisions": [float(precision) for precision in result.precisions],
            "brevity_penalty": float(result.bp),
            "hyp_length": int(result.sys_len),
            "ref_length": int(result.ref_len),
        }
    if name == "ter":
        return {"num_edits": int(result.num_edits), "ref_length": float(result.ref_length)}
    return {}


def _base_lang(lang: str) -> str:
    return lang.replace("_", "-").split("-")[0].lower()

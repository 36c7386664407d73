"""Validation: loss and perplexity on the dev set, and BLEU and chrF of its real translation against the raw references."""

import json
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch

from mtkit import faults
from mtkit.data.batching import batches_by_length
from mtkit.data.loader import collate
from mtkit.data.tokenizer import Tokenizer
from mtkit.decoding.lines import SearchConfig
from mtkit.decoding.steps import MAX_SOURCE_LENGTH
from mtkit.decoding.translator import Translator
from mtkit.distributed import World, all_gather_lines, all_reduce_sums
from mtkit.errors import MTKitError
from mtkit.evaluation.checks import is_escaped, is_in_subwords, takes_sentences_for_words
from mtkit.evaluation.metrics import corpus_scores, tokenizer_for
from mtkit.files import is_blank
from mtkit.model.transformer import Transformer
from mtkit.training.objective import Objective
from mtkit.training.progress import perplexity
from mtkit.training.signals import StopRequest

T = TypeVar("T")


class ValidationStoppedError(Exception):
    """A signal came; nothing was measured."""


class ValidationFailedError(Exception):
    """Something went wrong in this process or another, and no process has a result.

    Args:
        reason: One line.
        trace: The traceback of the process where it happened.
    """

    def __init__(self, reason: str, trace: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.trace = trace


@dataclass(frozen=True, kw_only=True, slots=True)
class DevSet:
    """The dev set as raw lines; pairs with an empty side are left out, both sides together."""

    src_lines: Sequence[str]
    tgt_lines: Sequence[str]
    num_left_out: int = 0

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> Self:
        """The dev set of some pairs of lines, without those of which a side is blank."""
        given = list(pairs)
        kept = [(src, tgt) for src, tgt in given if not is_blank(src) and not is_blank(tgt)]
        return cls(src_lines=[src for src, _ in kept], tgt_lines=[tgt for _, tgt in kept], num_left_out=len(given) - len(kept))

    def share(self, world: World) -> "DevSet":
        """Every world.size-th pair, from the rank on: what this process works on."""
        return DevSet(src_lines=self.src_lines[world.rank :: world.size], tgt_lines=self.tgt_lines[world.rank :: world.size])


def require_bleu(tgt_lang: str | None) -> None:
    """See before any training that BLEU can be computed for a language: the tokenizers of some are packages of their own.

    Raises:
        MTKitError: It cannot.
    """
    try:
        corpus_scores(["x"], [["x"]], metrics=("bleu",), target_lang=tgt_lang)
    except MTKitError as error:
        extra = (tgt_lang or "")[:2]
        raise MTKitError(
            f"no validation could be scored: {error.message}",
            hint=f"pip install 'sacrebleu[{extra}]', or leave out --tgt-lang {tgt_lang} and go by chrF: --set validation.metric=chrf",
        ) from error


def dev_set_warnings(dev: DevSet, tokenizer: Tokenizer) -> list[str]:
    """In what the results of a validation are not those of the dev set as it was given."""
    warnings = []
    if dev.num_left_out:
        total = dev.num_left_out + len(dev.src_lines)
        warnings.append(f"{dev.num_left_out} of the {total} pairs of the dev set have a blank side and are left out: scores are of the others")
    num_long = sum(max(len(src), len(tgt)) > MAX_SOURCE_LENGTH for src, tgt in zip(*_encode(dev, tokenizer), strict=True))
    if num_long:
        warnings.append(
            f"{num_long} pairs of the dev set have more than {MAX_SOURCE_LENGTH} tokens on a side: the loss is of so many, from the first on"
        )
    return warnings


def _encode(dev: DevSet, tokenizer: Tokenizer) -> tuple[list[list[int]], list[list[int]]]:
    return tokenizer.encode(dev.src_lines, "src"), tokenizer.encode(dev.tgt_lines, "tgt")


def scoring_warnings(dev: DevSet, *, tgt_lang: str | None) -> list[str]:
    """What makes BLEU on the dev set say little."""
    warnings = []
    if is_in_subwords(dev.tgt_lines):
        what = "the dev set's target side holds subword marks (@@, ▁, ￭ or <0x..>)"
        warnings.append(f"{what}. Give raw text, here and for training: it is segmented by mtkit, and translations come out as such text is written.")
    if is_escaped(dev.tgt_lines):
        what = "the dev set's target side holds HTML entities such as &quot;"
        warnings.append(f"{what}. Undo them in all text, or translations will hold them too and BLEU is comparable with nothing published.")
    tokenize = tokenizer_for(tgt_lang)
    if takes_sentences_for_words(dev.tgt_lines, tokenize=tokenize):
        what = f"the dev set's target side is written without spaces, and BLEU's tokenizer {tokenize} takes its sentences for words"
        warnings.append(f"{what}. Name the language, such as --tgt-lang zh, or go by chrF: --set validation.metric=chrf")
    return warnings


@torch.inference_mode()
def dev_loss(
    model: Transformer, tokenizer: Tokenizer, dev: DevSet, *, device: torch.device, max_tokens: int, stop: StopRequest | None = None
) -> tuple[float, int]:
    """Negative log-likelihood of the dev set without label smoothing, in fp32, of `MAX_SOURCE_LENGTH` tokens of a side at most.

    Returns:
        The sum over target tokens, and their number, EOS included; of a part of the dev set when somebody asked the run to stop.
    """
    objective = Objective(model, label_smoothing=0.0)
    src, tgt = ([ids[:MAX_SOURCE_LENGTH] for ids in side] for side in _encode(dev, tokenizer))
    nll_sum, num_tokens = 0.0, 0
    lengths = [max(len(left), len(right)) + 1 for left, right in zip(src, tgt, strict=True)]
    for indices in batches_by_length(lengths, max_tokens=max_tokens):
        if stop is not None and stop.requested:
            break
        batch = collate([src[index] for index in indices], [tgt[index] for index in indices]).to(device)
        _, nll = objective(batch)
        nll_sum += float(nll)
        num_tokens += batch.num_tgt_tokens
    return nll_sum, num_tokens


def validate(
    model: Transformer,
    tokenizer: Tokenizer,
    dev: DevSet,
    *,
    search: SearchConfig | None,
    device: torch.device,
    world: World,
    max_tokens: int,
    tgt_lang: str | None,
    stop: StopRequest,
) -> dict[str, float]:
    """Measure a model on the dev set; the processes share the work and all get the result, or the same error.

    A request to stop is heard between two batches. It usually reaches all processes; one that it does not reach first completes its share.

    Args:
        model: In eval mode.
        tokenizer: The model's.
        dev: The whole dev set, the same on every process.
        search: How to translate, as `mtkit translate` does; None = only loss and perplexity.
        device: Where the model is.
        world: This process among all.
        max_tokens: Positions of a batch.
        tgt_lang: Chooses the tokenizer of BLEU.
        stop: Tells whether a signal asked the run to stop.

    Returns:
        `loss` and `ppl`, and with `search` `bleu` and `chrf`.

    Raises:
        ValidationStoppedError: A process was asked to stop.
        ValidationFailedError: An error of whatever kind, out of memory or one of our own mistakes, in any process.
    """
    share = dev.share(world)

    def measure_loss() -> tuple[float, int]:
        faults.reach("valid")
        return dev_loss(model, tokenizer, share, device=device, max_tokens=max_tokens, stop=stop)

    def translate(search: SearchConfig) -> list[str]:
        faults.reach("valid.translate")
        texts: list[str] = []
        for translation in Translator([model], tokenizer, search=search, device=device).translate(share.src_lines):
            if stop.requested:
                break
            texts.append(translation.text)
        return texts

    def score(by_rank: list[list[str]]) -> dict[str, float]:
        lines = [by_rank[index % world.size][index // world.size] for index in range(len(dev.src_lines))]
        scores = corpus_scores(lines, [dev.tgt_lines], metrics=("bleu", "chrf"), target_lang=tgt_lang)
        return {score.name.lower(): score.value for score in scores}

    sums = all_reduce_sums(_together(measure_loss, world=world, device=device, stop=stop), world, device)
    loss = sums[0] / sums[1]
    scores = {"loss": loss, "ppl": perplexity(loss)}
    if search is not None:
        by_rank = all_gather_lines(_together(lambda: translate(search), world=world, device=device, stop=stop), world, device)
        scores |= _together(lambda: score(by_rank), world=world, device=device, stop=stop)
    return scores


def _together(work: Callable[[], T], *, world: World, device: torch.device, stop: StopRequest) -> T:
    """Do this process's part, then hear how the others fared: one that fails must not leave them waiting for what it has not done.

    Args:
        work: Exchanges nothing with other processes.
        world: This process among all.
        device: Where the collective operations of the group take their tensors.
        stop: See `validate`; afterwards it is the same for all processes.
    """
    results, report = [], ["", ""]
    try:
        results.append(work())
    except Exception as error:  # whatever it is, the weights are as they were
        report = [f"{type(error).__name__}: {error}".partition("\n")[0], traceback.format_exc()]
    num_failed, requested, interrupted = all_reduce_sums([float(not results), float(stop.requested), float(stop.interrupted)], world, device)
    if num_failed:
        reports = all_gather_lines([json.dumps(report)], world, device)
        reason, trace = next(filter(any, (json.loads(lines[0]) for lines in reports)))
        raise ValidationFailedError(reason, trace)
    if requested:
        stop.request(interrupted=bool(interrupted))
        raise ValidationStoppedError
    return results[0]

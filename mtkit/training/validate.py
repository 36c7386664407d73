"""Validation: loss and perplexity on the dev set, and BLEU and chrF of its real translation against the raw references."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from mtkit.data.batching import batches_by_length
from mtkit.data.loader import collate
from mtkit.data.tokenizer import Tokenizer
from mtkit.decoding.translator import SearchConfig, Translator
from mtkit.distributed import World, all_gather_lines, all_reduce_sums
from mtkit.evaluation.metrics import corpus_scores
from mtkit.model.transformer import Transformer
from mtkit.training.loss import Objective
from mtkit.training.progress import perplexity


@dataclass(frozen=True, kw_only=True, slots=True)
class DevSet:
    """The dev set as raw lines; pairs with an empty side are left out, both sides together."""

    src_lines: Sequence[str]
    tgt_lines: Sequence[str]

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> Self:
        """The dev set of some pairs of lines."""
        kept = [(src, tgt) for src, tgt in pairs if src.strip() and tgt.strip()]
        return cls(src_lines=[src for src, _ in kept], tgt_lines=[tgt for _, tgt in kept])

    def share(self, world: World) -> "DevSet":
        """Every world.size-th pair, from the rank on: what this process works on."""
        return DevSet(src_lines=self.src_lines[world.rank :: world.size], tgt_lines=self.tgt_lines[world.rank :: world.size])


@torch.inference_mode()
def dev_loss(model: Transformer, tokenizer: Tokenizer, dev: DevSet, *, device: torch.device, max_tokens: int) -> tuple[float, int]:
    """Negative log-likelihood of the dev set without label smoothing, in fp32.

    Returns:
        The sum over target tokens, and their number, EOS included.
    """
    objective = Objective(model, label_smoothing=0.0)
    src, tgt = tokenizer.encode(dev.src_lines, "src"), tokenizer.encode(dev.tgt_lines, "tgt")
    nll_sum, num_tokens = 0.0, 0
    lengths = [max(len(left), len(right)) + 1 for left, right in zip(src, tgt, strict=True)]
    for indices in batches_by_length(lengths, max_tokens=max_tokens):
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
) -> dict[str, float]:
    """Measure a model on the dev set; the processes share the work and all get the result.

    Args:
        model: In eval mode.
        tokenizer: The model's.
        dev: The whole dev set, the same on every process.
        search: How to translate, as `mtkit translate` does; None = only loss and perplexity.
        device: Where the model is.
        world: This process among all.
        max_tokens: Positions of a batch.
        tgt_lang: Chooses the tokenizer of BLEU.

    Returns:
        `loss` and `ppl`, and with `search` `bleu` and `chrf`.
    """
    share = dev.share(world)
    sums = all_reduce_sums(dev_loss(model, tokenizer, share, device=device, max_tokens=max_tokens), world, device)
    loss = sums[0] / sums[1]
    scores = {"loss": loss, "ppl": perplexity(loss)}
    if search is not None:
        translator = Translator([model], tokenizer, search=search, device=device)
        translations = [translation.text for translation in translator.translate(share.src_lines)]
        by_rank = all_gather_lines(translations, world, device)
        lines = [by_rank[index % world.size][index // world.size] for index in range(len(dev.src_lines))]
        for score in corpus_scores(lines, [dev.tgt_lines], metrics=("bleu", "chrf"), target_lang=tgt_lang):
            scores[score.name.lower()] = score.value
    return scores

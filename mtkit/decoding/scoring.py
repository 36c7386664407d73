"""How translations are scored: the length penalty, and the log-probability of given pairs by teacher forcing.

One definition of each, shared by the search and by `mtkit score`, so that the score which `translate` reports is the one that scoring the pair gives.
Both take the softmax over the whole target vocabulary; that some ids are forbidden to the decoder changes no probability.

Shapes: B sentences, S source positions, T target positions, N real target tokens of a batch, D model width, V target pieces.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, overload

import torch
from torch import Tensor

from mtkit.data.batching import batches_by_length
from mtkit.data.loader import collate
from mtkit.data.tokenizer import Tokenizer
from mtkit.decoding.steps import MAX_SOURCE_LENGTH, inference
from mtkit.errors import DataError, MTKitError
from mtkit.model.transformer import Transformer

PenaltyKind = Literal["gnmt", "power"]
"""`gnmt` is ((5 + n) / 6)^alpha (Wu et al. 2016, equation 14; used by Vaswani et al. 2017), `power` is n^alpha (alpha 1: mean log-probability)."""

MAX_TARGET_LENGTH = 4096
"""Tokens of a target that are scored by default. The memory of attention grows with their square: a line of 40,000 would take 8 GB."""

_LOGIT_ROWS = 1024
"""Target tokens whose logits are held at once: bounds the memory of the N x V matrix."""


@overload
def length_penalty(length: float, alpha: float, kind: PenaltyKind) -> float: ...
@overload
def length_penalty(length: Tensor, alpha: float, kind: PenaltyKind) -> Tensor: ...
def length_penalty(length: float | Tensor, alpha: float, kind: PenaltyKind) -> float | Tensor:
    """What a log-probability is divided by to give a score.

    Args:
        length: Number of target tokens, EOS included, at least 1. A tensor must be of a floating dtype.
        alpha: Exponent, >= 0; 0 gives 1.
        kind: Which formula.

    Returns:
        The penalty, at least 1; a tensor if `length` is one.
    """
    base = (5.0 + length) / 6.0 if kind == "gnmt" else length
    return base**alpha


@dataclass(frozen=True, kw_only=True, slots=True)
class PairScore:
    """How probable a model finds a target, given its source.

    Attributes:
        log_prob: Sum over the target tokens and EOS of their natural log-probabilities.
        num_tokens: Number of target tokens, EOS included; at least 1.
        is_source_cut: Whether the source was longer than the limit, and the rest of it is not accounted for.
        is_target_cut: The same of the target.
    """

    log_prob: float
    num_tokens: int
    is_source_cut: bool = False
    is_target_cut: bool = False


def score_pairs(
    model: Transformer,
    tokenizer: Tokenizer,
    src_lines: Sequence[str],
    tgt_lines: Sequence[str],
    *,
    max_source_length: int = MAX_SOURCE_LENGTH,
    max_target_length: int = MAX_TARGET_LENGTH,
    batch_tokens: int = 4096,
) -> list[PairScore]:
    """The log-probability of each target line given its source line. A blank target is EOS alone.

    A translation's text may be segmented otherwise than the decoder spelled it, and then it is another token sequence with another probability;
    `score_token_pairs` scores exactly the tokens that the decoder chose.

    Args:
        model: The model, in any mode; it scores without dropout.
        tokenizer: The model's.
        src_lines: Source text.
        tgt_lines: Target text, as many lines.
        max_source_length: Longer sources are cut to so many tokens, as `translate` does.
        max_target_length: And so are longer targets.
        batch_tokens: Positions of a batch, padding included. Does not change the result.

    Raises:
        DataError: The line counts differ.
    """
    if len(src_lines) != len(tgt_lines):
        raise DataError(f"the source has {len(src_lines)} lines and the target {len(tgt_lines)}: line i of one must belong to line i of the other")
    sources = tokenizer.encode(src_lines, "src")
    targets = tokenizer.encode(tgt_lines, "tgt")
    cut = [[ids[:limit] for ids in side] for side, limit in ((sources, max_source_length), (targets, max_target_length))]
    scores = score_token_pairs(model, *cut, batch_tokens=batch_tokens)
    return [
        dataclasses.replace(score, is_source_cut=len(src) > max_source_length, is_target_cut=len(tgt) > max_target_length)
        for score, src, tgt in zip(scores, sources, targets, strict=True)
    ]


def score_token_pairs(
    model: Transformer, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], *, batch_tokens: int = 4096
) -> list[PairScore]:
    """The log-probability of each target given its source, both as token ids without BOS and EOS.

    Args:
        model: The model, in any mode; it scores without dropout.
        sources: Source ids.
        targets: Target ids, as many.
        batch_tokens: Positions of a batch, padding included. Does not change the result.

    Raises:
        MTKitError: The model gave NaN.
    """
    device = next(model.parameters()).device
    scores: dict[int, PairScore] = {}
    lengths = [max(len(src), len(tgt)) + 1 for src, tgt in zip(sources, targets, strict=True)]
    with inference([model]):
        for indices in batches_by_length(lengths, max_tokens=batch_tokens):
            batch = collate([sources[index] for index in indices], [targets[index] for index in indices]).to(device)
            memory_BSD = model.encode(batch.src_BS, batch.src_mask_BS)
            hidden_BTD = model.decode(batch.tgt_in_BT, memory_BSD, batch.src_mask_BS, batch.tgt_mask_BT)
            real_BT = batch.tgt_mask_BT
            log_probs_N = _log_probs(model, hidden_BTD[real_BT], batch.tgt_out_BT[real_BT])
            sums_B = torch.zeros(len(indices), dtype=torch.float64, device=device).index_add_(0, real_BT.nonzero()[:, 0], log_probs_N.double())
            if not bool(sums_B.isfinite().all()):
                refuse_nan()
            for index, log_prob in zip(indices, sums_B.tolist(), strict=True):
                scores[index] = PairScore(log_prob=log_prob, num_tokens=len(targets[index]) + 1)
    return [scores[index] for index in range(len(lengths))]


def _log_probs(model: Transformer, hidden_ND: Tensor, target_N: Tensor) -> Tensor:
    """Log-probabilities of the targets, fp32, a block of rows at a time."""
    blocks = zip(torch.split(hidden_ND, _LOGIT_ROWS), torch.split(target_N, _LOGIT_ROWS), strict=True)
    return torch.cat([model.logits(hidden).float().log_softmax(dim=-1).gather(1, target.unsqueeze(1)).squeeze(1) for hidden, target in blocks])


def refuse_nan() -> NoReturn:
    """Fail because a model gave NaN.

    Raises:
        MTKitError: Always.
    """
    raise MTKitError(
        "the model gave NaN: its weights are damaged, or its numbers exceed the range of the precision",
        hint="Try --precision fp32; if that does not help, translate with another checkpoint.",
    )

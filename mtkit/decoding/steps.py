"""How a model takes part in the search: sentences in, a step function out.

Shapes: B sentences, S source positions, R rows of a step, D model width, V target pieces.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtkit.data.tokenizer import EOS_ID, PAD_ID
from mtkit.model.transformer import Transformer

if TYPE_CHECKING:
    from mtkit.decoding.search import StepFn

MAX_SOURCE_LENGTH = 1024
"""Tokens of a source that are translated or scored by default; what follows is cut off."""


def pad_sources(sources: Sequence[Sequence[int]], *, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Make a batch of sources.

    Args:
        sources: Token ids of each sentence, without EOS.
        device: Where the tensors go.

    Returns:
        src_BS: The ids and EOS, int64, `PAD_ID` where padded. A sentence without ids is EOS alone, so that no row is fully masked.
        src_mask_BS: True at real tokens.
    """
    length = max(map(len, sources)) + 1
    rows = [[*ids, EOS_ID, *[PAD_ID] * (length - len(ids) - 1)] for ids in sources]
    lengths_B = torch.tensor([len(ids) + 1 for ids in sources])
    src_mask_BS = torch.arange(length) < lengths_B.unsqueeze(1)
    return torch.tensor(rows, dtype=torch.int64).to(device), src_mask_BS.to(device)


def model_step(models: Sequence[Transformer], src_BS: Tensor, src_mask_BS: Tensor) -> "StepFn":
    """The step function of one model, or of several as an ensemble, for a batch of sources.

    An ensemble averages probabilities: log p = log(1/M sum_m p_m). The models share the target vocabulary; everything else may differ.

    Args:
        models: At least one, in eval mode.
        src_BS: Source ids and EOS.
        src_mask_BS: True at real tokens.
    """
    caches = [model.start_cache(model.encode(src_BS, src_mask_BS), src_mask_BS) for model in models]

    def step(tokens_R: Tensor, parents_R: Tensor) -> Tensor:
        log_probs = []
        for model, cache in zip(models, caches, strict=True):
            cache.reorder(parents_R)
            log_probs.append(model.logits(model.decode_step(tokens_R, cache)).float().log_softmax(dim=-1))
        return log_probs[0] if len(log_probs) == 1 else torch.stack(log_probs).logsumexp(dim=0) - math.log(len(log_probs))

    return step


@contextlib.contextmanager
def in_eval_mode(models: Sequence[Transformer]) -> Iterator[None]:
    """A block without dropout; afterwards the models are in the mode they were in."""
    modes = [model.training for model in models]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)


@contextlib.contextmanager
def inference(models: Sequence[Transformer]) -> Iterator[None]:
    """A block without dropout and gradients, for this thread."""
    with in_eval_mode(models), torch.inference_mode():
        yield

"""Translations that have to begin with given pieces.

Shapes: B sentences, R rows of a step, V pieces of the vocabulary, T pieces of the longest prefix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mtkit.decoding.search import NEG_INF, StepFn

_ANY = -1
"""Stands for the piece that a row must take where it may take any."""


class Prefixes:
    """How translations have to begin: which piece each row of a step must take.

    Args:
        prefixes: Of each sentence the first pieces, none of them EOS; empty = it may begin with any.
        device: Where the step function's tensors live.
    """

    def __init__(self, prefixes: Sequence[Sequence[int]], *, device: torch.device | str = "cpu") -> None:
        self._longest = max(map(len, prefixes), default=0)
        rows = [[*prefix, *[_ANY] * (self._longest - len(prefix))] for prefix in prefixes]
        self._forced_BT = torch.tensor(rows, dtype=torch.int64, device=device).view(len(prefixes), self._longest)
        self._sentence_R = torch.arange(len(prefixes), device=device)
        self._num_steps = 0

    def next(self, parents_R: Tensor) -> Tensor | None:
        """What the rows of the next step must take, `_ANY` where there is no such piece, int64 [R]; None once all may take any.

        Args:
            parents_R: As a `StepFn` gets them.
        """
        if self._num_steps == self._longest:
            return None
        self._sentence_R = self._sentence_R[parents_R]
        self._num_steps += 1
        return self._forced_BT[self._sentence_R, self._num_steps - 1]


def with_prefixes(step: StepFn, prefixes: Prefixes) -> StepFn:
    """A step function whose rows give nothing but the piece that they must take a probability. It is the model's own."""

    def forced_step(tokens_R: Tensor, parents_R: Tensor) -> Tensor:
        log_probs_RV = step(tokens_R, parents_R)
        forced_R = prefixes.next(parents_R)
        if forced_R is not None:
            (rows,) = (forced_R != _ANY).nonzero(as_tuple=True)
            pieces, kept = forced_R[rows], log_probs_RV[rows, forced_R[rows]]
            log_probs_RV[rows] = NEG_INF
            log_probs_RV[rows, pieces] = kept
        return log_probs_RV

    return forced_step

"""Step functions whose "model" is a table of probabilities: the searches are tested with these. Vocabulary of 4: pieces 0, 1, 2 and EOS = 3."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from mtkit.data.tokenizer import BOS_ID
from mtkit.decoding.search import Hypothesis

VOCAB_SIZE = 4
Prefix = tuple[int, ...]
Table = Callable[[Prefix], Tensor]
"""Prefix -> log-probabilities of the next piece, shape (V,)."""


class TableStep:
    """A step function whose "model" is one table per sentence; it follows the prefixes through `parents_R`."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tables
        self.rows: list[tuple[int, Prefix]] = []
        self.num_calls = 0
        self.rows_seen: list[int] = []

    def __call__(self, tokens_R: Tensor, parents_R: Tensor) -> Tensor:
        if self.num_calls == 0:
            assert tokens_R.tolist() == [BOS_ID] * len(self.tables)
            assert parents_R.tolist() == list(range(len(self.tables)))
            self.rows = [(sentence, ()) for sentence in range(len(self.tables))]
        else:
            pairs = zip(tokens_R.tolist(), parents_R.tolist(), strict=True)
            self.rows = [(self.rows[parent][0], (*self.rows[parent][1], token)) for token, parent in pairs]
        self.num_calls += 1
        self.rows_seen.append(len(self.rows))
        return torch.stack([self.tables[sentence](prefix) for sentence, prefix in self.rows])


def random_table(seed: int, *, vocab_size: int = VOCAB_SIZE, sharpness: float = 1.5) -> Table:
    """A model that gives every prefix its own random distribution."""
    known: dict[Prefix, Tensor] = {}

    def table(prefix: Prefix) -> Tensor:
        if prefix not in known:
            generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**63)
            known[prefix] = (sharpness * torch.randn(vocab_size, generator=generator)).log_softmax(0)
        return known[prefix].clone()

    return table


def fixed_table(rows: dict[Prefix, Sequence[float]], *, default: Sequence[float]) -> Table:
    """A model given as prefix -> probabilities, written out by hand."""

    def table(prefix: Prefix) -> Tensor:
        return torch.tensor(rows.get(prefix, default)).log()

    return table


def assert_same(found: Sequence[Hypothesis], expected: Sequence[Hypothesis]) -> None:
    assert [h.tokens for h in found] == [h.tokens for h in expected]
    assert [h.finished for h in found] == [h.finished for h in expected]
    assert [h.score for h in found] == pytest.approx([h.score for h in expected], abs=1e-5)
    assert [h.log_prob for h in found] == pytest.approx([h.log_prob for h in expected], abs=1e-5)


# "0" ends at once with 0.5 * 0.8; "1 2" takes one step more with 0.4 * 0.9 * 0.9.
TWO_PATHS = fixed_table(
    {
        (): [0.5, 0.4, 0.05, 0.05],
        (0,): [0.1, 0.05, 0.05, 0.8],
        (1,): [0.02, 0.03, 0.9, 0.05],
        (1, 2): [0.03, 0.03, 0.04, 0.9],
    },
    default=[0.25, 0.25, 0.25, 0.25],
)

"""What the decoder remembers between the steps of incremental decoding.

Shapes: B sentences, G places for hypotheses in a sentence, R rows (the hypotheses there are), S source tokens, T target tokens so far, H heads, C
channels of a head, D = d_model = H C, E = 2 D (keys beside values), N = T G. A mask value of True marks what is attended to.

All hypotheses of a sentence attend together, as so many queries of one product: to the source, and to *all* that was stored for the sentence, with a
mask that leaves of every position the one entry from which the hypothesis descends. So a beam search that drops, keeps and doubles hypotheses never
copies keys and values; it changes a table of small integers. The extra products cost less than the copies would.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

FIRST_CAPACITY = 32
"""Target positions that the self-attention buffers hold at first; they double when full."""

LARGEST_WASTE = 0.25
"""Share of sentences without rows that is kept in the buffers: dropping them copies the others."""


class StepCache(Protocol):
    """What a step of the decoder asks of a cache; the shapes are those above."""

    cross_kv: list[Tensor]
    src_mask_BS: Tensor

    @property
    def num_rows(self) -> int:
        """Number of hypotheses, R."""

    @property
    def num_positions(self) -> int:
        """Positions that a row may be at, from 0."""

    def row_positions(self) -> Tensor | int:
        """The position of the token that each row takes next: int64 [R], or one for all."""

    def group(self, x_RD: Tensor) -> Tensor:
        """The rows of a sentence beside each other: x_BGD."""

    def ungroup(self, x_BGD: Tensor) -> Tensor:
        """Undo `group`: x_RD."""

    def append(self, layer: int, kv_BGE: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values of this position; returns keys_BHNC and values_BHNC of all so far."""

    def visible(self) -> Tensor | None:
        """Which stored entries each hypothesis attends to, bool [B, 1, G, N]; None = all."""

    def advance(self) -> None:
        """Move on to the next position."""


class DecoderCache:
    """Keys and values of all decoder layers for the rows under search. `Transformer.start_cache` makes one: one row per sentence, no tokens yet.

    Attributes:
        self_kv: Per layer, [2, B, H, capacity, G, C]: keys and values of the tokens so far, of which the first `length` positions are filled.
        cross_kv: Per layer, [2, B, H, S, C]: keys and values of the source.
        src_mask_BS: Which source tokens are real.
        length: Number of target positions that have been decoded.
    """

    def __init__(self, cross_kv: Sequence[Tensor], src_mask_BS: Tensor) -> None:
        _, num_sentences, num_heads, _, head_dim = cross_kv[0].shape
        device = src_mask_BS.device
        self.cross_kv = list(cross_kv)
        self.src_mask_BS = src_mask_BS
        self.self_kv = [kv.new_empty(2, num_sentences, num_heads, FIRST_CAPACITY, 1, head_dim) for kv in cross_kv]
        self.length = 0
        # The place of each row, counted through all sentences: sentence * G + place in the sentence.
        self._place_R = torch.arange(num_sentences, device=device)
        self._fills_all_places = True
        # For each place and position the place in the sentence that its hypothesis held there: [B, G, capacity].
        self._ancestor_BGT = torch.zeros(num_sentences, 1, FIRST_CAPACITY, dtype=torch.int64, device=device)
        self._visible_BGN: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of hypotheses, R."""
        return self._place_R.shape[0]

    @property
    def num_positions(self) -> int:
        """Positions that a row may be at, from 0."""
        return self.length + 1

    def row_positions(self) -> int:
        """The position of the token that every row takes next."""
        return self.length

    @property
    def _num_places(self) -> int:
        """G."""
        return self._ancestor_BGT.shape[1]

    def append(self, layer: int, kv_BGE: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's keys and values of the current position.

        Returns:
            keys_BHNC and values_BHNC of all positions so far, this one included: views of the buffer.
        """
        buffer = self.self_kv[layer]
        if self.length == buffer.shape[3]:
            grown = buffer.new_empty(*buffer.shape[:3], 2 * self.length, *buffer.shape[4:])
            grown[:, :, :, : self.length] = buffer
            buffer = self.self_kv[layer] = grown
        _, num_sentences, num_heads, _, num_places, head_dim = buffer.shape
        buffer[:, :, :, self.length] = kv_BGE.view(num_sentences, num_places, 2, num_heads, head_dim).permute(2, 0, 3, 1, 4)
        keys_BHNC, values_BHNC = buffer[:, :, :, : self.length + 1].flatten(3, 4).unbind()
        return keys_BHNC, values_BHNC

    def visible(self) -> Tensor | None:
        """Which of the N stored entries each hypothesis descends from, bool [B, 1, G, N], for any head; None where that is all of them."""
        num_places = self._num_places
        if num_places == 1:
            return None
        if self._visible_BGN is None:
            places = torch.arange(num_places, device=self._ancestor_BGT.device)
            self._ancestor_BGT[:, :, self.length] = places
            self._visible_BGN = (self._ancestor_BGT[:, :, : self.length + 1, None] == places).flatten(2)
        return self._visible_BGN.unsqueeze(1)

    def advance(self) -> None:
        """Move on to the next position, after every layer has stored this one."""
        self.length += 1
        self._visible_BGN = None
        if self.length == self._ancestor_BGT.shape[2]:
            self._ancestor_BGT = torch.cat((self._ancestor_BGT, torch.zeros_like(self._ancestor_BGT)), dim=2)

    @torch.no_grad()
    def reorder(self, parents_R: Tensor) -> None:
        """Let row i continue what was row `parents_R[i]`. There may be more or fewer rows than before.

        Args:
            parents_R: int64 [new R], indices of the present rows, in any order, with or without repetition.
        """
        if parents_R.shape[0] == self.num_rows and torch.equal(parents_R, torch.arange(self.num_rows, device=parents_R.device)):
            return
        parent_R = self._place_R[parents_R]
        sentence_R = parent_R // self._num_places
        if parents_R.shape[0] != self.num_rows or not torch.equal(sentence_R, self._place_R // self._num_places):
            parent_R = self._assign_places(parent_R)
        ancestor_PT = self._ancestor_BGT.flatten(0, 1)[:, : self.length]
        ancestor_PT.index_copy_(0, self._place_R, ancestor_PT.index_select(0, parent_R))
        self._visible_BGN = None

    def _assign_places(self, parent_R: Tensor) -> Tensor:
        """Give each row a place in its sentence; sentences and places may go and come. Returns the places of the parents as they then are."""
        num_places, num_sentences = self._num_places, self.src_mask_BS.shape[0]
        sentence_R, old_place_R = parent_R // num_places, parent_R % num_places
        rows_B = torch.bincount(sentence_R, minlength=num_sentences)
        is_kept_B = rows_B > 0
        num_kept, most_rows = torch.stack((is_kept_B.sum(), rows_B.max())).tolist()
        if num_sentences - num_kept > LARGEST_WASTE * num_sentences:
            self._keep_sentences(is_kept_B.nonzero().flatten())
            sentence_R, rows_B, num_sentences = (is_kept_B.cumsum(0) - 1)[sentence_R], rows_B[is_kept_B], num_kept
        if most_rows > num_places:
            self._add_places(most_rows - num_places)
            num_places = most_rows
        # A row's place is its rank among the rows of its sentence.
        sorted_sentence_R, order_R = torch.sort(sentence_R, stable=True)
        rank_R = torch.arange(len(order_R), device=order_R.device) - (rows_B.cumsum(0) - rows_B)[sorted_sentence_R]
        self._place_R = torch.empty_like(order_R)
        self._place_R[order_R] = sorted_sentence_R * num_places + rank_R
        self._fills_all_places = torch.equal(self._place_R, torch.arange(num_sentences * num_places, device=order_R.device))
        return sentence_R * num_places + old_place_R

    def _keep_sentences(self, kept_B: Tensor) -> None:
        self.cross_kv = [kv.index_select(1, kept_B) for kv in self.cross_kv]
        for layer, old in enumerate(self.self_kv):
            self.self_kv[layer] = old.new_empty(2, len(kept_B), *old.shape[2:])
            torch.index_select(old, 1, kept_B, out=self.self_kv[layer])
        self.src_mask_BS = self.src_mask_BS.index_select(0, kept_B)
        self._ancestor_BGT = self._ancestor_BGT.index_select(0, kept_B)

    def _add_places(self, count: int) -> None:
        """More hypotheses per sentence. What they hold at the positions so far is zero: masked, but to be multiplied with."""
        self.self_kv = [torch.nn.functional.pad(kv, (0, 0, 0, count)) for kv in self.self_kv]
        self._ancestor_BGT = torch.nn.functional.pad(self._ancestor_BGT, (0, 0, 0, count))

    def group(self, x_RD: Tensor) -> Tensor:
        """Put the rows of a sentence beside each other: x_BGD. Places without a row hold zeros; where there are none it is a view."""
        grid_shape = (self.src_mask_BS.shape[0], self._num_places, x_RD.shape[1])
        if self._fills_all_places:
            return x_RD.view(grid_shape)
        grid = x_RD.new_zeros(grid_shape)
        grid.view(-1, x_RD.shape[1]).index_copy_(0, self._place_R, x_RD)
        return grid

    def ungroup(self, x_BGD: Tensor) -> Tensor:
        """Undo `group`: x_RD."""
        x_RD = x_BGD.reshape(-1, x_BGD.shape[2])
        return x_RD if self._fills_all_places else x_RD.index_select(0, self._place_R)

"""What the decoder remembers between the steps of incremental decoding.

Shapes: B sentences, R rows (hypotheses), S source tokens, T target tokens so far, H heads, C channels of a head, D = d_model = H C, E = 2 D (keys
beside values), G = most rows that any one sentence has. A mask value of True marks a real token.

Self-attention keys and values belong to a row and grow by one position per step. Cross-attention keys and values belong to a sentence, are computed
once, and are never copied for its rows: all rows of a sentence attend to them together, as so many queries.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

FIRST_CAPACITY = 32
"""Target positions that the self-attention buffers hold at first; they double when full."""


class DecoderCache:
    """Keys and values of all decoder layers for the rows under search. `Transformer.start_cache` makes one: one row per sentence, no tokens yet.

    Everything that depends on rows or sentences is in these attributes, so that `reorder` can be checked against this list:

    Attributes:
        self_kv: Per layer, [2, capacity, R, D]: keys and values of the tokens so far, of which the first `length` positions are filled. Positions
            come before rows, so that a step is written, and rows are selected, in contiguous pieces.
        cross_kv: Per layer, [2, B, H, S, C]: keys and values of the source.
        src_mask_BS: Which source tokens are real.
        sentence_R: The sentence of each row, an index into `cross_kv`.
        length: Number of target positions that have been decoded.
    """

    def __init__(self, cross_kv: Sequence[Tensor], src_mask_BS: Tensor) -> None:
        _, num_sentences, num_heads, _, head_dim = cross_kv[0].shape
        self.cross_kv = list(cross_kv)
        self.src_mask_BS = src_mask_BS
        self.self_kv = [kv.new_empty(2, FIRST_CAPACITY, num_sentences, num_heads * head_dim) for kv in cross_kv]
        self.sentence_R = torch.arange(num_sentences, device=src_mask_BS.device)
        self.length = 0
        self._rows_per_sentence = 1
        self._slot_R: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of hypotheses, R."""
        return self.sentence_R.shape[0]

    @property
    def num_sentences(self) -> int:
        """Number of sentences that still have rows, B."""
        return self.src_mask_BS.shape[0]

    def append(self, layer: int, kv_RE: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's keys and values of the current position.

        Returns:
            keys_TRD and values_TRD of all positions so far, this one included: views of the buffer.
        """
        buffer = self.self_kv[layer]
        if self.length == buffer.shape[1]:
            grown = buffer.new_empty(2, 2 * self.length, *buffer.shape[2:])
            grown[:, : self.length] = buffer
            buffer = self.self_kv[layer] = grown
        keys_TRD, values_TRD = buffer[:, : self.length + 1].unbind()
        keys_TRD[self.length], values_TRD[self.length] = kv_RE.chunk(2, dim=1)
        return keys_TRD, values_TRD

    def advance(self) -> None:
        """Move on to the next position, after every layer has stored this one."""
        self.length += 1

    @torch.no_grad()
    def reorder(self, parents_R: Tensor) -> None:
        """Let row i continue what was row `parents_R[i]`. There may be more or fewer rows than before; a sentence that has none left is dropped.

        Args:
            parents_R: int64 [new R], indices of the present rows, in any order, with or without repetition.
        """
        is_identity = parents_R.shape[0] == self.num_rows and torch.equal(parents_R, torch.arange(self.num_rows, device=parents_R.device))
        if is_identity:
            return
        for layer, buffer in enumerate(self.self_kv):
            selected = buffer.new_empty(*buffer.shape[:2], parents_R.shape[0], buffer.shape[3])
            for old_TRD, new_TRD in zip(buffer, selected, strict=True):
                torch.index_select(old_TRD[: self.length], 1, parents_R, out=new_TRD[: self.length])
            self.self_kv[layer] = selected
        sentence_R = self.sentence_R[parents_R]
        if not torch.equal(sentence_R, self.sentence_R):
            self._assign_rows(sentence_R)

    def _assign_rows(self, sentence_R: Tensor) -> None:
        """Drop the sentences without rows, number the others anew, and give each row a place in the [B, G] grid that `group` fills."""
        kept_B, self.sentence_R, rows_B = torch.unique(sentence_R, return_inverse=True, return_counts=True)
        if kept_B.shape[0] < self.num_sentences:
            self.cross_kv = [kv.index_select(1, kept_B) for kv in self.cross_kv]
            self.src_mask_BS = self.src_mask_BS.index_select(0, kept_B)
        self._rows_per_sentence = int(rows_B.max()) if rows_B.numel() else 0
        # A row's place is the first one of its sentence plus its rank among the sentence's rows.
        sorted_sentence_R, order_R = torch.sort(self.sentence_R, stable=True)
        rank_R = torch.arange(self.num_rows, device=order_R.device) - (rows_B.cumsum(0) - rows_B)[sorted_sentence_R]
        slot_R = torch.empty_like(order_R)
        slot_R[order_R] = sorted_sentence_R * self._rows_per_sentence + rank_R
        rows_fill_grid_in_order = torch.equal(slot_R, torch.arange(self.num_sentences * self._rows_per_sentence, device=slot_R.device))
        self._slot_R = None if rows_fill_grid_in_order else slot_R

    def group(self, x_RD: Tensor) -> Tensor:
        """Put the rows of a sentence beside each other: x_BGD. Places without a row hold zeros. A view where every sentence has G rows, in order."""
        grid_shape = (self.num_sentences, self._rows_per_sentence, x_RD.shape[1])
        if self._slot_R is None:
            return x_RD.view(grid_shape)
        grid = x_RD.new_zeros(grid_shape)
        grid.view(-1, x_RD.shape[1]).index_copy_(0, self._slot_R, x_RD)
        return grid

    def ungroup(self, x_BGD: Tensor) -> Tensor:
        """Undo `group`: x_RD."""
        x_RD = x_BGD.reshape(-1, x_BGD.shape[2])
        return x_RD if self._slot_R is None else x_RD.index_select(0, self._slot_R)

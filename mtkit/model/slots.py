"""What the decoder remembers in slots of fixed size, each of which holds a sentence of its own age: the cache of search on a GPU.

No shape depends on what is searched, and nothing asks the device for a value, so a step can be recorded once as a CUDA graph and then repeated.
A sentence whose search has ended makes room for the next one, while the others go on.

Shapes: B slots, G hypotheses of a sentence, R = B G rows, T capacity in target positions, S in source positions, F slots that are filled anew,
H heads, C channels of a head, D = d_model = H C, E = 2 D (keys beside values), N = T G. A mask value of True marks what is attended to.

As in `mtkit.model.cache`, the hypotheses of a sentence attend to all that is stored for it, under a mask that leaves their own ancestors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mtkit.model.config import ModelConfig


class SlotCache:
    """Keys and values of all decoder layers for a fixed number of slots. All slots are empty at first, which computes harmless numbers.

    Attributes:
        cross_kv: Per layer, [2, B, H, S, C]: keys and values of the source.
        src_mask_BS: Which source positions are real; the first of an empty slot counts as real.
        length_B: Number of target positions that have been decoded, int64.

    Args:
        config: Of the model.
        num_slots: B.
        num_places: G.
        src_capacity: S, the longest source, EOS included.
        tgt_capacity: T, the most steps of a sentence.
        dtype: Of the model.
        device: Of the model.
    """

    def __init__(
        self, config: ModelConfig, *, num_slots: int, num_places: int, src_capacity: int, tgt_capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        heads, layers = (config.num_heads, config.head_dim), range(config.num_decoder_layers)
        cross_shape, self_shape = (2, num_slots, heads[0], src_capacity, heads[1]), (2, num_slots, heads[0], tgt_capacity, num_places, heads[1])
        self.cross_kv = [torch.zeros(cross_shape, dtype=dtype, device=device) for _ in layers]
        self._self_kv = [torch.zeros(self_shape, dtype=dtype, device=device) for _ in layers]
        self.src_mask_BS = torch.zeros(num_slots, src_capacity, dtype=torch.bool, device=device)
        self.src_mask_BS[:, 0] = True
        self.length_B = torch.zeros(num_slots, dtype=torch.int64, device=device)
        # For each hypothesis and position the place that its ancestor held there: [B, G, T].
        self._ancestor_BGT = torch.zeros(num_slots, num_places, tgt_capacity, dtype=torch.int64, device=device)
        self._slot_B = torch.arange(num_slots, device=device)
        self._place_G = torch.arange(num_places, device=device)
        self._position_T = torch.arange(tgt_capacity, device=device)
        self._visible_BGN: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of hypotheses, R."""
        return self._ancestor_BGT.shape[0] * self._ancestor_BGT.shape[1]

    @property
    def num_positions(self) -> int:
        """Positions that a row may be at, T."""
        return self._position_T.shape[0]

    def fill(self, slots_F: Tensor, cross_kv: Sequence[Tensor], src_mask_FS: Tensor) -> None:
        """Begin with new sentences.

        Args:
            slots_F: Where, int64.
            cross_kv: Per layer, [2, F, H, S', C] for S' up to S: keys and values of their sources.
            src_mask_FS: Which source positions are real, [F, S'].
        """
        length = src_mask_FS.shape[1]
        for slab, kv in zip(self.cross_kv, cross_kv, strict=True):
            slab[:, slots_F, :, :length] = kv
        self.src_mask_BS[slots_F] = torch.nn.functional.pad(src_mask_FS, (0, self.src_mask_BS.shape[1] - length))
        self.length_B[slots_F] = 0

    def row_positions(self) -> Tensor:
        """The position of the token that each row takes next, int64 [R]."""
        return self.length_B.repeat_interleave(self._place_G.shape[0], output_size=self.num_rows)

    def append(self, layer: int, kv_BGE: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's keys and values of the current positions; returns keys_BHNC and values_BHNC of all positions, views of the buffer."""
        slab = self._self_kv[layer]
        num_slots, num_places = kv_BGE.shape[:2]
        slab[:, self._slot_B, :, self.length_B] = kv_BGE.view(num_slots, num_places, 2, slab.shape[2], -1).permute(0, 2, 3, 1, 4)
        keys_BHNC, values_BHNC = slab.flatten(3, 4).unbind()
        return keys_BHNC, values_BHNC

    def visible(self) -> Tensor:
        """Which of the N stored entries each hypothesis descends from, bool [B, 1, G, N], for any head."""
        if self._visible_BGN is None:
            self._ancestor_BGT[self._slot_B, :, self.length_B] = self._place_G
            is_past_BT = self._position_T <= self.length_B[:, None]
            self._visible_BGN = ((self._ancestor_BGT[..., None] == self._place_G) & is_past_BT[:, None, :, None]).flatten(2)
        return self._visible_BGN.unsqueeze(1)

    def advance(self) -> None:
        """Move on to the next position, after every layer has stored this one. What has reached the capacity stays at its end."""
        self.length_B.add_(1).clamp_(max=self.num_positions - 1)
        self._visible_BGN = None

    def reorder(self, parents_BG: Tensor) -> None:
        """Let each hypothesis continue what was hypothesis `parents_BG` of its sentence, int64."""
        self._ancestor_BGT.copy_(self._ancestor_BGT.gather(1, parents_BG[:, :, None].expand_as(self._ancestor_BGT)))

    def group(self, x_RD: Tensor) -> Tensor:
        """The rows of a sentence beside each other: x_BGD."""
        return x_RD.view(-1, self._place_G.shape[0], x_RD.shape[1])

    def ungroup(self, x_BGD: Tensor) -> Tensor:
        """Undo `group`: x_RD."""
        return x_BGD.flatten(0, 1)

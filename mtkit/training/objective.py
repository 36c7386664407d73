"""The model together with its loss, as one module."""

from torch import Tensor, nn

from mtkit.data.loader import Batch, PackedBatch
from mtkit.model.transformer import Transformer
from mtkit.training.loss import smoothed_cross_entropy
from mtkit.training.r_drop import paired_cross_entropy


class Objective(nn.Module):
    """The model together with its loss, as one module: what data-parallel training wraps.

    Args:
        model: The model to train.
        label_smoothing: e of `smoothed_cross_entropy`.
        r_drop: Alpha of `paired_cross_entropy`, for which a batch is run twice; 0 = once, and the plain loss.
    """

    def __init__(self, model: Transformer, *, label_smoothing: float, r_drop: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self._label_smoothing = label_smoothing
        self._r_drop = r_drop

    def forward(self, batch: Batch | PackedBatch) -> tuple[Tensor, Tensor]:
        """Loss and negative log-likelihood of a batch, each summed over its real target tokens."""
        weight_RD, vocab_size, epsilon = self.model.output_weight, self.model.tgt_vocab_size, self._label_smoothing
        hidden_ND, target_N = self._hidden_and_target(batch)
        if not self._r_drop:
            return smoothed_cross_entropy(hidden_ND, weight_RD, target_N, vocab_size=vocab_size, label_smoothing=epsilon)
        second_ND, _ = self._hidden_and_target(batch)
        return paired_cross_entropy(hidden_ND, second_ND, weight_RD, target_N, vocab_size=vocab_size, label_smoothing=epsilon, alpha=self._r_drop)

    def _hidden_and_target(self, batch: Batch | PackedBatch) -> tuple[Tensor, Tensor]:
        """The decoder's output at the real target tokens, and these: of padded batches, padding is not projected to the vocabulary."""
        model = self.model
        if isinstance(batch, PackedBatch):
            memory_MD = model.encode_packed(batch.src_M, batch.src)
            return model.decode_packed(batch.tgt_in_N, batch.tgt, memory_MD, batch.src), batch.tgt_out_N
        memory_BSD = model.encode(batch.src_BS, batch.src_mask_BS)
        hidden_BTD = model.decode(batch.tgt_in_BT, memory_BSD, batch.src_mask_BS, batch.tgt_mask_BT)
        return hidden_BTD[batch.tgt_mask_BT], batch.tgt_out_BT[batch.tgt_mask_BT]

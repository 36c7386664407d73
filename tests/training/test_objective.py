"""The objective against the whole logits, on padded and packed batches, with one pass and with two."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from mtkit.data.loader import Batch, PackedBatch, collate, pack
from mtkit.data.packing import PackedShape
from mtkit.model.config import ModelConfig
from mtkit.model.transformer import Transformer
from mtkit.training.objective import Objective

V = 23


def objective(*, r_drop: float = 0.0, dropout: float = 0.0, **values: Any) -> Objective:
    torch.manual_seed(2)
    config = ModelConfig(d_model=16, ffn_dim=24, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, dropout=dropout, **values)
    return Objective(Transformer(config, src_vocab_size=V, tgt_vocab_size=V), label_smoothing=0.1, r_drop=r_drop)


SRC = [[4, 5, 6], [7], [8, 9]]
TGT = [[10, 11], [12, 13, 14, 15], []]
SHAPE = PackedShape(src_tokens=16, tgt_tokens=14, max_sentences=5, max_length=8)


@pytest.mark.parametrize("tie", ["none", "three-way"])
def test_the_objective_is_the_sum_over_real_target_tokens(tie: str) -> None:
    both = objective(tie_embeddings=tie)
    batch = collate(SRC, TGT)
    logits_BTV = both.model(batch.src_BS, batch.src_mask_BS, batch.tgt_in_BT, batch.tgt_mask_BT)
    logits_NV, target_N = logits_BTV[batch.tgt_mask_BT], batch.tgt_out_BT[batch.tgt_mask_BT]
    assert len(target_N) == batch.num_tgt_tokens
    expected, nll = (functional.cross_entropy(logits_NV, target_N, label_smoothing=epsilon, reduction="sum") for epsilon in (0.1, 0.0))
    torch.autograd.backward(expected)
    gradients = {name: parameter.grad for name, parameter in both.named_parameters()}
    for which in (batch, pack(SRC, TGT, SHAPE)):
        both.zero_grad()
        loss, found_nll = both(which)
        torch.autograd.backward(loss)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found_nll, nll, rtol=1e-5, atol=1e-5)
        for name, parameter in both.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", [collate(SRC, TGT), pack(SRC, TGT, SHAPE)], ids=["padded", "packed"])
def test_two_passes_that_agree_are_one_pass(which: Batch | PackedBatch) -> None:
    found = []
    for r_drop in (0.0, 5.0):
        both = objective(r_drop=r_drop)
        loss, nll = both(which)
        torch.autograd.backward(loss)
        found.append((loss.detach(), nll, *(parameter.grad for parameter in both.parameters())))
    for once, twice in zip(*found, strict=True):
        torch.testing.assert_close(twice, once, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", [collate(SRC, TGT), pack(SRC, TGT, SHAPE)], ids=["padded", "packed"])
def test_the_two_passes_have_dropout_of_their_own_which_the_seed_decides(which: Batch | PackedBatch) -> None:
    """With alpha = 0 the loss would be the mean of two; the same model with alpha far above it differs only if the passes do."""
    both, indifferent = objective(r_drop=100.0, dropout=0.5).train(), objective(r_drop=1e-9, dropout=0.5).train()
    losses = []
    for module in (both, both, indifferent):
        torch.manual_seed(5)
        losses.append(float(module(which)[0].detach()))
    assert losses[0] == losses[1] > 1.5 * losses[2]

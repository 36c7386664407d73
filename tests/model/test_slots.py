"""The cache of slots against full recomputation, with sentences of different ages side by side."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from mtkit.model.config import ModelConfig
from mtkit.model.slots import SlotCache
from mtkit.model.transformer import Transformer

BOS, VOCAB, SLOTS, SRC_CAPACITY, TGT_CAPACITY = 2, 37, 3, 8, 10


def build(norm: Literal["post", "pre"]) -> Transformer:
    config = ModelConfig(d_model=16, ffn_dim=24, num_heads=4, num_encoder_layers=1, num_decoder_layers=2, dropout=0.4, norm=norm)
    model = Transformer(config, src_vocab_size=VOCAB, tgt_vocab_size=VOCAB).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


class Twin:
    """Decodes in slots and, from the start, without a cache; `step` asserts that they agree in all slots that hold a sentence."""

    def __init__(self, norm: Literal["post", "pre"], *, num_places: int) -> None:
        torch.manual_seed(1)
        self.model = build(norm)
        self.num_places = num_places
        self.cache = SlotCache(
            self.model.config,
            num_slots=SLOTS,
            num_places=num_places,
            src_capacity=SRC_CAPACITY,
            tgt_capacity=TGT_CAPACITY,
            dtype=torch.float64,
            device=torch.device("cpu"),
        )
        self.sources: dict[int, Tensor] = {}
        self.prefixes: dict[int, Tensor] = {}

    def fill(self, slots: list[int], lengths: list[int]) -> None:
        mask_FS = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        src_FS = torch.randint(4, VOCAB, mask_FS.shape).masked_fill(~mask_FS, 0)
        with torch.inference_mode():
            self.cache.fill(torch.tensor(slots), self.model.decoder.cross_kv(self.model.encode(src_FS, mask_FS)), mask_FS)
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            self.sources[slot] = src_FS[row, :length]
            self.prefixes[slot] = torch.empty(self.num_places, 0, dtype=torch.int64)

    def step(self) -> None:
        tokens_BG = torch.randint(4, VOCAB, (SLOTS, self.num_places))
        with torch.inference_mode():
            hidden_BGD = self.model.decode_step(tokens_BG.flatten(), self.cache).view(SLOTS, self.num_places, -1)
        assert hidden_BGD.isfinite().all()
        for slot, source_S in self.sources.items():
            self.prefixes[slot] = torch.cat((self.prefixes[slot], tokens_BG[slot][:, None]), dim=1)
            with torch.inference_mode():
                src_GS = source_S.expand(self.num_places, -1)
                mask_GS = torch.ones_like(src_GS, dtype=torch.bool)
                full_GTD = self.model.decode(self.prefixes[slot], self.model.encode(src_GS, mask_GS), mask_GS)
            torch.testing.assert_close(hidden_BGD[slot], full_GTD[:, -1], rtol=0, atol=1e-10)

    def reorder(self) -> None:
        parents_BG = torch.randint(self.num_places, (SLOTS, self.num_places))
        with torch.inference_mode():
            self.cache.reorder(parents_BG)
        for slot in self.prefixes:
            self.prefixes[slot] = self.prefixes[slot][parents_BG[slot]]


@pytest.mark.parametrize("num_places", [1, 4])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_slots_equal_full_recomputation_while_sentences_come_and_go(norm: Literal["post", "pre"], num_places: int) -> None:
    twin = Twin(norm, num_places=num_places)
    twin.fill([2], [5])
    for filled in ([], [], [0, 1], [], [], [2], [], [1], []):
        if filled:
            twin.fill(filled, [3 + slot for slot in filled])
        twin.step()
        twin.reorder()


def test_a_slot_can_be_as_long_as_its_capacity_and_then_stands_still() -> None:
    twin = Twin("pre", num_places=2)
    twin.fill([1], [SRC_CAPACITY])
    for _ in range(TGT_CAPACITY):
        twin.step()
        twin.reorder()
    twin.sources.clear()
    for _ in range(3):  # what has ended may go on, without harm to the others
        twin.step()
    twin.fill([1], [2])
    twin.step()


def test_no_shape_and_no_address_changes() -> None:
    """A recorded step reads and writes where it did when it was recorded."""
    twin = Twin("pre", num_places=2)

    def addresses() -> list[int]:
        cache = twin.cache
        return [x.data_ptr() for x in (*cache.cross_kv, *cache.append(0, torch.zeros(SLOTS, 2, 32).double()), cache.src_mask_BS, cache.length_B)]

    before = addresses()
    twin.fill([0, 1], [4, 6])
    twin.step()
    twin.reorder()
    twin.fill([0], [2])
    assert addresses() == before
    assert twin.cache.num_rows == SLOTS * 2
    assert twin.cache.row_positions().tolist() == [0, 0, 1, 1, 1, 1]

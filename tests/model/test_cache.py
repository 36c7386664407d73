"""Incremental decoding against full recomputation, under every kind of reordering that a search may do."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.model.cache import FIRST_CAPACITY, DecoderCache
from mtkit.model.config import ModelConfig
from mtkit.model.transformer import Transformer

BOS, EOS, VOCAB = 2, 3, 37
CONFIG = ModelConfig(d_model=16, ffn_dim=24, num_heads=4, num_encoder_layers=1, num_decoder_layers=2, dropout=0.4)


def build(**values: Any) -> Transformer:
    model = Transformer(dataclasses.replace(CONFIG, **values), src_vocab_size=VOCAB, tgt_vocab_size=VOCAB).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


class Twin:
    """Decodes with a cache and, from the start, without one; `step` asserts that they agree."""

    def __init__(self, model: Transformer, lengths: list[int]) -> None:
        self.model = model
        self.src_mask_BS = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        src_BS = torch.randint(4, VOCAB, self.src_mask_BS.shape).masked_fill(~self.src_mask_BS, 0)
        with torch.inference_mode():
            self.memory_BSD = model.encode(src_BS, self.src_mask_BS)
            self.cache: DecoderCache = model.start_cache(self.memory_BSD, self.src_mask_BS)
        self.sentence_R = torch.arange(len(lengths))  # numbered as at the start, also after sentences were dropped
        self.prefix_RT = torch.empty(len(lengths), 0, dtype=torch.int64)

    def step(self) -> None:
        rows = self.sentence_R.shape[0]
        tokens_R = torch.full((rows,), BOS) if self.prefix_RT.shape[1] == 0 else torch.randint(4, VOCAB, (rows,))
        self.prefix_RT = torch.cat((self.prefix_RT, tokens_R[:, None]), dim=1)
        with torch.inference_mode():
            hidden_RD = self.model.decode_step(tokens_R, self.cache)
            full_RTD = self.model.decode(self.prefix_RT, self.memory_BSD[self.sentence_R], self.src_mask_BS[self.sentence_R])
        torch.testing.assert_close(hidden_RD, full_RTD[:, -1], rtol=0, atol=1e-10)
        assert self.cache.length == self.prefix_RT.shape[1]

    def reorder(self, parents_R: Tensor) -> None:
        with torch.inference_mode():
            self.cache.reorder(parents_R)
        self.sentence_R = self.sentence_R[parents_R]
        self.prefix_RT = self.prefix_RT[parents_R]
        assert self.cache.num_rows == len(parents_R)

    def beam_parents(self, beam_size: int) -> Tensor:
        """For each sentence with rows, `beam_size` parents drawn among its rows."""
        draws = []
        for sentence in sorted(set(self.sentence_R.tolist())):
            rows = (self.sentence_R == sentence).nonzero().flatten()
            draws.append(rows[torch.randint(len(rows), (beam_size,))])
        return torch.cat(draws)


@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("tie", ["none", "three-way"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_cached_equals_full_at_every_step(norm: str, activation: str, tie: str, beam_size: int) -> None:
    twin = Twin(build(norm=norm, activation=activation, tie_embeddings=tie), lengths=[6, 3, 1])
    twin.step()
    for _ in range(8):
        twin.reorder(twin.beam_parents(beam_size))
        twin.step()


def test_cached_equals_full_while_sentences_end() -> None:
    twin = Twin(build(), lengths=[6, 3, 1, 5])
    twin.step()
    twin.reorder(twin.beam_parents(4))
    twin.step()
    for ended in (1, 3, 0):
        parents_R = twin.beam_parents(4)
        twin.reorder(parents_R[twin.sentence_R[parents_R] != ended])
        twin.step()
        twin.step()
    assert all(kv.shape[1] == 1 for kv in (*twin.cache.cross_kv, *twin.cache.self_kv))


@pytest.mark.parametrize("trial", range(8))
def test_cached_equals_full_with_any_rows_in_any_order(trial: int) -> None:
    torch.manual_seed(trial)
    twin = Twin(build(), lengths=[6, 3, 1, 5])
    for _ in range(7):
        twin.step()
        twin.reorder(torch.randint(twin.cache.num_rows, (int(torch.randint(1, 12, ())),)))
    twin.step()


def test_cached_equals_full_past_the_first_capacity() -> None:
    twin = Twin(build(), lengths=[4, 2])
    for step in range(2 * FIRST_CAPACITY + 3):
        twin.step()
        if step % 9 == 0:
            twin.reorder(torch.tensor([1, 0, 1]))


def test_keeping_the_rows_as_they_are_copies_nothing() -> None:
    twin = Twin(build(), lengths=[4, 2, 3])
    twin.step()
    before = [*twin.cache.self_kv, *twin.cache.cross_kv]
    twin.reorder(torch.arange(3))
    assert all(new is old for new, old in zip([*twin.cache.self_kv, *twin.cache.cross_kv], before, strict=True))


def test_source_keys_and_values_are_computed_once_and_never_copied_for_beams() -> None:
    model = build()
    twin = Twin(model, lengths=[6, 3, 1])
    calls: list[int] = []
    for name, module in model.named_modules():
        if name.endswith("kv_proj"):
            module.register_forward_hook(lambda *_: calls.append(1))
    before = list(twin.cache.cross_kv)
    tokens_R = torch.full((3,), BOS)
    with torch.inference_mode():
        model.decode_step(tokens_R, twin.cache)
        for parents in ([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [3, 1, 4, 4, 8, 11]):
            twin.cache.reorder(torch.tensor(parents))
            model.decode_step(torch.full((len(parents),), BOS), twin.cache)
    assert calls == []
    assert all(new is old for new, old in zip(twin.cache.cross_kv, before, strict=True))


def test_equal_beams_are_grouped_without_a_copy() -> None:
    twin = Twin(build(), lengths=[4, 2])
    x_RD = torch.randn(8, 16, dtype=torch.float64)
    twin.step()
    twin.reorder(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
    assert twin.cache.group(x_RD).data_ptr() == x_RD.data_ptr()
    assert twin.cache.group(x_RD).shape == (2, 4, 16)
    twin.reorder(torch.tensor([4, 0, 5, 1, 6, 2, 7, 3]))
    grouped = twin.cache.group(x_RD)
    torch.testing.assert_close(grouped[0], x_RD[[1, 3, 5, 7]])
    torch.testing.assert_close(twin.cache.ungroup(grouped), x_RD)


def test_caches_of_one_model_do_not_disturb_each_other() -> None:
    model = build()
    first, second = Twin(model, lengths=[4, 2]), Twin(model, lengths=[5])
    for _ in range(3):
        first.step()
        second.step()
        first.reorder(torch.tensor([1, 0]))


def test_decode_step_builds_no_graph() -> None:
    model = build()
    src_BS, mask_BS = torch.tensor([[5, EOS]]), torch.ones(1, 2, dtype=torch.bool)
    cache = model.start_cache(model.encode(src_BS, mask_BS), mask_BS)
    assert not model.decode_step(torch.tensor([BOS]), cache).requires_grad


def test_a_wrong_number_of_tokens_is_our_own_bug() -> None:
    twin = Twin(build(), lengths=[4, 2])
    with pytest.raises(AssertionError, match="3 tokens for 2 rows"):
        twin.model.decode_step(torch.full((3,), BOS), twin.cache)


def test_all_rows_may_end() -> None:
    twin = Twin(build(), lengths=[4, 2])
    twin.step()
    twin.reorder(torch.empty(0, dtype=torch.int64))
    assert twin.cache.num_rows == 0


def test_bf16_autocast_caches_in_bf16() -> None:
    model = build().float()
    src_BS, mask_BS = torch.randint(4, VOCAB, (2, 5)), torch.ones(2, 5, dtype=torch.bool)
    tokens_RT = torch.randint(4, VOCAB, (2, 6))
    with torch.inference_mode():
        exact = model.decode(tokens_RT, model.encode(src_BS, mask_BS), mask_BS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cache = model.start_cache(model.encode(src_BS, mask_BS), mask_BS)
            steps = [model.decode_step(tokens_R, cache) for tokens_R in tokens_RT.unbind(1)]
    assert {kv.dtype for kv in (*cache.self_kv, *cache.cross_kv)} == {torch.bfloat16}
    torch.testing.assert_close(torch.stack(steps, dim=1), exact, rtol=0.1, atol=0.1)

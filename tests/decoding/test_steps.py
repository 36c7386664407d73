import pytest
import torch
from torch import Tensor

from mtkit.data.tokenizer import BOS_ID, EOS_ID, PAD_ID
from mtkit.decoding.search import StepFn, beam_search
from mtkit.decoding.steps import inference, model_step, pad_sources
from mtkit.model.transformer import Transformer
from tests.decoding.builders import random_model

SOURCES = [[10, 11, 12, 13], [20], [30, 31, 32, 33, 34, 35, 36], [40, 41]]


def uncached_step(model: Transformer, src_BS: Tensor, src_mask_BS: Tensor) -> StepFn:
    """The same step function without a cache: the whole prefix is computed anew, one hypothesis at a time."""
    rows: list[tuple[int, list[int]]] = []

    def step(tokens_R: Tensor, parents_R: Tensor) -> Tensor:
        nonlocal rows
        parents = rows or [(sentence, []) for sentence in range(len(src_BS))]
        rows = [(parents[parent][0], [*parents[parent][1], token]) for token, parent in zip(tokens_R.tolist(), parents_R.tolist(), strict=True)]
        log_probs = []
        for sentence, prefix in rows:
            src, mask = src_BS[sentence : sentence + 1], src_mask_BS[sentence : sentence + 1]
            hidden = model.decode(torch.tensor([prefix]), model.encode(src, mask), mask)
            log_probs.append(model.logits(hidden[:, -1]).log_softmax(-1))
        return torch.cat(log_probs)

    return step


def test_sources_are_padded_and_end_with_eos() -> None:
    src_BS, src_mask_BS = pad_sources([[7, 8], [], [9]], device="cpu")
    assert src_BS.tolist() == [[7, 8, EOS_ID], [EOS_ID, PAD_ID, PAD_ID], [9, EOS_ID, PAD_ID]]
    assert src_mask_BS.tolist() == [[True, True, True], [True, False, False], [True, True, False]]


@pytest.mark.parametrize("beam_size", [1, 4])
def test_the_cache_equals_full_recomputation_for_every_hypothesis(beam_size: int) -> None:
    model = random_model(5)
    batch = pad_sources(SOURCES, device="cpu")
    options = {"max_lengths": [9, 4, 12, 7], "beam_size": beam_size, "n_best": beam_size, "length_penalty": 0.6}
    with inference([model]):
        cached = beam_search(model_step([model], *batch), **options)  # type: ignore[arg-type]
        full = beam_search(uncached_step(model, *batch), **options)  # type: ignore[arg-type]
    for ours, theirs in zip(cached, full, strict=True):
        assert [h.tokens for h in ours] == [h.tokens for h in theirs]
        assert [h.score for h in ours] == pytest.approx([h.score for h in theirs], abs=1e-4)


def test_every_step_is_a_distribution_in_fp32_even_for_a_half_precision_model() -> None:
    model = random_model(5).to(torch.bfloat16)
    with inference([model]):
        step = model_step([model], *pad_sources(SOURCES, device="cpu"))
        log_probs_RV = step(torch.full((4,), BOS_ID), torch.arange(4))
    assert log_probs_RV.dtype == torch.float32
    assert log_probs_RV.logsumexp(-1).tolist() == pytest.approx([0.0] * 4, abs=1e-5)


def test_an_ensemble_averages_probabilities() -> None:
    models = [random_model(5), random_model(6, num_layers=1), random_model(7)]
    batch = pad_sources(SOURCES, device="cpu")
    calls = [(torch.full((4,), BOS_ID), torch.arange(4)), (torch.tensor([50, 51, 52]), torch.tensor([2, 0, 0]))]
    with inference(models):
        together = model_step(models, *batch)
        alone = [model_step([model], *batch) for model in models]
        for tokens_R, parents_R in calls:
            expected = sum(step(tokens_R, parents_R).double().exp() for step in alone) / 3
            torch.testing.assert_close(together(tokens_R, parents_R).double().exp(), expected, atol=1e-6, rtol=1e-5)


def test_inference_restores_the_mode_also_after_an_error() -> None:
    models = [random_model(5).train(), random_model(6).eval()]

    def fail() -> None:
        with inference(models):
            assert not any(model.training for model in models)
            assert torch.is_inference_mode_enabled()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [model.training for model in models] == [True, False]
    assert not torch.is_inference_mode_enabled()

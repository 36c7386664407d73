"""The model by the kernels against the model by torch, on random models, as the kernels are compiled for this processor and for lesser ones."""

import copy
import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.decoding.engine import rows
from mtkit.decoding.engine.rows import RowModel, fits
from mtkit.decoding.quantize import RoundedEmbedding, quantize_linear_layers
from mtkit.decoding.sampling import greedy_search
from mtkit.decoding.search import Hypothesis, beam_search
from mtkit.decoding.steps import inference, model_step, pad_sources
from mtkit.errors import MTKitError
from mtkit.model.transformer import Transformer
from mtkit.native import kernels, library
from tests.decoding.builders import never_ends, random_model, tiny_tokenizer
from tests.native.builds import BUILDS, use

FORBIDDEN = tiny_tokenizer().forbidden_ids("tgt")


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture
def this_build(monkeypatch: pytest.MonkeyPatch) -> None:
    use("this processor", monkeypatch)


def model(seed: int = 4, **architecture: Any) -> Transformer:
    return random_model(seed, **{"num_heads": 2, **architecture})


def sources(count: int, *, longest: int = 40, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 300) for _ in range(rng.choice((0, 1, 14, 15, 16, rng.randint(0, longest))))] for _ in range(count)]


def by_torch(one: Transformer, batch: Sequence[Sequence[int]], **options: Any) -> list[list[Hypothesis]]:
    with inference([one]):
        return beam_search(model_step([one], *pad_sources(batch, device="cpu")), **options)


def by_kernels(one: Transformer, batch: Sequence[Sequence[int]], **options: Any) -> list[list[Hypothesis]]:
    with inference([one]):
        return RowModel(one).search(batch, **options)


def log_probs(one: Transformer, batch: Sequence[Sequence[int]], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Of every piece at every step, by torch and by the kernels, where all sentences take the tokens that are given, and change places."""
    num_sentences, vocab_size = len(batch), one.tgt_vocab_size
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    with inference([one]):
        step = model_step([one], *pad_sources(batch, device="cpu"))
        extend = rows._RowStep(RowModel(one), batch, beam_size=vocab_size, forbidden_ids=())
        parents = torch.arange(num_sentences)
        for tokens_R in tokens:
            found[0].append(step(tokens_R[: len(parents)], parents).clone())
            log_prob_RC, token_RC = extend(tokens_R[: len(parents)], parents)
            assert (log_prob_RC.diff(dim=1) <= 0).all()
            found[1].append(torch.full((len(parents), vocab_size), float("nan")).scatter_(1, token_RC, log_prob_RC))
            parents = (torch.arange(len(parents)) * 7 + 3) % len(parents)
            parents = parents[: max(3, len(parents) - 2)]
    return torch.cat(found[0]), torch.cat(found[1])


ARCHITECTURES: list[dict[str, Any]] = [
    {},
    {"norm": "pre"},
    {"tie_embeddings": "three-way", "norm": "pre", "num_heads": 1},
    {"activation": "gelu"},
    {"activation": "swiglu", "norm": "pre", "ffn_dim": 48},
    {"d_model": 96, "num_heads": 3, "ffn_dim": 50},
    {"d_model": 256, "num_heads": 4},
    {"num_encoder_layers": 3, "num_decoder_layers": 1, "tie_embeddings": "decoder"},
]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_every_step_is_that_of_the_model(architecture: dict[str, Any], build: str) -> None:
    one = model(**architecture)
    torch.manual_seed(1)
    expected, found = log_probs(one, sources(12), torch.randint(4, 300, (20, 12)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=lambda text: f"{build}: {text}")


@pytest.mark.parametrize("tie", ["three-way", "none"])
def test_an_embedding_in_8_bits_is_what_it_is_in_fp32(tie: str, build: str) -> None:
    one = model(tie_embeddings=tie, num_heads=1)
    rounded = copy.deepcopy(one)
    rounded.output_projection = torch.nn.Linear(one.config.d_model, len(one.output_weight), bias=False)
    rounded.output_projection.weight = torch.nn.Parameter(one.output_weight.detach())
    one.output_projection = rounded.output_projection
    for name, module in one.named_children():
        if isinstance(module, torch.nn.Embedding):
            scale_V = torch.linspace(0.001, 0.1, len(module.weight))
            weight_VD = torch.randint(-127, 128, module.weight.shape, dtype=torch.int8)
            module.weight = torch.nn.Parameter(weight_VD.float() * scale_V[:, None])
            setattr(rounded, name, RoundedEmbedding(weight_VD, scale_V))
    tokens = torch.randint(4, 300, (20, 12))
    for found, expected in zip(log_probs(rounded, sources(12), tokens), log_probs(one, sources(12), tokens), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{build}: {text}")


@pytest.mark.usefixtures("this_build")
def test_in_bf16_every_step_is_near_that_of_the_model() -> None:
    if not kernels.has_bf16():
        pytest.skip("no products of bf16 here")
    one = model(d_model=64, ffn_dim=128)
    torch.manual_seed(1)
    tokens = torch.randint(4, 300, (20, 12))
    exact, _ = log_probs(one, sources(12), tokens)
    _, found = log_probs(quantize_linear_layers(copy.deepcopy(one), "bf16"), sources(12), tokens)
    _, coarse = log_probs(quantize_linear_layers(copy.deepcopy(one), "int8"), sources(12), tokens)
    errors = [(exact - other)[exact > -6.0].abs().mean().item() for other in (found, coarse)]
    assert 0.0 < errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_in_int8_every_step_is_near_that_of_the_model(norm: str, build: str) -> None:
    if kernels.int8_level() == 0:
        pytest.skip("no products of 8-bit integers here")
    one = model(d_model=64, ffn_dim=128, norm=norm)
    quantized = quantize_linear_layers(copy.deepcopy(one))
    torch.manual_seed(1)
    tokens = torch.randint(4, 300, (20, 12))
    exact, _ = log_probs(one, sources(12), tokens)
    by_layers, by_steps = log_probs(quantized, sources(12), tokens)
    likely = exact > -6.0
    errors = [(exact - other)[likely].abs().mean().item() for other in (by_layers, by_steps)]
    assert 0.0 < errors[1] < 1.2 * errors[0], build
    assert errors[0] < 0.2


@pytest.mark.parametrize("beam_size", [1, 2, 4, 9])
@pytest.mark.usefixtures("this_build")
def test_the_search_is_that_of_torch(beam_size: int) -> None:
    one, batch = model(norm="pre"), sources(30)
    for forbidden, alpha in ((FORBIDDEN, 0.6), (never_ends(tiny_tokenizer()), 1.0)):
        options: dict[str, Any] = {"beam_size": beam_size, "n_best": min(beam_size, 3), "length_penalty": alpha, "forbidden_ids": forbidden}
        options["max_lengths"] = [len(source) // 2 + 5 for source in batch]
        expected, found = by_torch(one, batch, **options), by_kernels(one, batch, **options)
        assert [[hypothesis.tokens for hypothesis in sentence] for sentence in found] == [
            [hypothesis.tokens for hypothesis in sentence] for sentence in expected
        ]
        for left, right in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
            assert left.log_prob == pytest.approx(right.log_prob, abs=1e-4)
            assert left.score == pytest.approx(right.score, abs=1e-4)
            assert left.finished == right.finished


@pytest.mark.usefixtures("this_build")
def test_one_beam_is_greedy_search() -> None:
    one, batch = model(), sources(20)
    options: dict[str, Any] = {"max_lengths": [20] * len(batch), "length_penalty": 0.6, "forbidden_ids": FORBIDDEN}
    with inference([one]):
        greedy = greedy_search(model_step([one], *pad_sources(batch, device="cpu")), **options)
    found = by_kernels(one, batch, beam_size=1, **options)
    assert [sentence[0].tokens for sentence in found] == [sentence[0].tokens for sentence in greedy]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.usefixtures("this_build")
def test_a_sentence_is_the_same_in_any_company(precision: str) -> None:
    if precision == "int8" and kernels.int8_level() == 0:
        pytest.skip("no products of 8-bit integers here")
    one, batch = model(norm="pre", d_model=64), sources(25, longest=100)
    if precision == "int8":
        one = quantize_linear_layers(one)
    together = by_kernels(one, batch, max_lengths=[30] * 25, beam_size=4, length_penalty=0.6, n_best=4, forbidden_ids=FORBIDDEN)
    for source, expected in zip(batch, together, strict=True):
        assert by_kernels(one, [source], max_lengths=[30], beam_size=4, length_penalty=0.6, n_best=4, forbidden_ids=FORBIDDEN) == [expected]


@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.usefixtures("this_build")
def test_what_no_hypothesis_descends_from_is_dropped_and_changes_nothing(beam_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one, batch = model(norm="pre"), sources(9)
    options: dict[str, Any] = {"beam_size": beam_size, "n_best": beam_size, "length_penalty": 0.6, "forbidden_ids": never_ends(tiny_tokenizer())}
    options["max_lengths"] = [10 + 3 * number for number in range(9)]
    searches: list[kernels.Search] = []

    class Seen(kernels.Search):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            searches.append(self)

    monkeypatch.setattr(kernels, "Search", Seen)
    results = []
    for age in (10**6, 1, 3, rows.AGE_OF_THINNING):
        monkeypatch.setattr(rows, "AGE_OF_THINNING", age)
        results.append(by_kernels(one, batch, **options))
    assert all(result == results[0] for result in results)
    num_rows = [[search.num_rows(step) for step in range(34)] for search in searches]
    assert num_rows[0][1] == 9 * beam_size
    assert sum(num_rows[3]) < (0.7 if beam_size > 1 else 1.01) * sum(num_rows[0])


@pytest.mark.usefixtures("this_build")
def test_more_steps_than_there_is_room_for_at_first() -> None:
    one, batch = model(), [[5, 6, 7], [8] * 300]
    options: dict[str, Any] = {"max_lengths": [150, 200], "beam_size": 2, "length_penalty": 0.6, "forbidden_ids": never_ends(tiny_tokenizer())}
    expected, found = by_torch(one, batch, **options), by_kernels(one, batch, **options)
    assert [len(sentence[0].tokens) for sentence in found] == [150, 200]
    assert [sentence[0].tokens for sentence in found] == [sentence[0].tokens for sentence in expected]


@pytest.mark.usefixtures("this_build")
def test_many_short_sentences_are_encoded_in_groups() -> None:
    one, batch = model(), [[number % 290 + 4] for number in range(300)]
    options: dict[str, Any] = {"max_lengths": [4] * 300, "beam_size": 2, "length_penalty": 0.6, "forbidden_ids": FORBIDDEN}
    expected, found = by_torch(one, batch, **options), by_kernels(one, batch, **options)
    assert [sentence[0].tokens for sentence in found] == [sentence[0].tokens for sentence in expected]


@pytest.mark.usefixtures("this_build")
def test_more_extensions_than_pieces() -> None:
    one = model()
    size = one.tgt_vocab_size
    (found,) = by_kernels(one, [[5, 6]], max_lengths=[1], beam_size=size + 5, n_best=size + 5, length_penalty=0.0)
    assert len({hypothesis.tokens for hypothesis in found}) == size
    assert sum(2.718281828**hypothesis.log_prob for hypothesis in found) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.usefixtures("this_build")
def test_nothing_gives_nothing() -> None:
    assert by_kernels(model(), [], max_lengths=[], beam_size=4, length_penalty=0.6) == []


@pytest.mark.parametrize("bits", [0x7FC00001, 0x7FFFFFFF, -1])
@pytest.mark.parametrize("precision", ["fp32", "int8", "bf16"])
def test_nan_of_any_bits_is_an_error(bits: int, precision: str, build: str) -> None:
    if (precision == "int8" and kernels.int8_level() == 0) or (precision == "bf16" and not kernels.has_bf16()):
        pytest.skip(f"no products in {precision} here")
    for where in ("output", "decoder.layers.1.self_attention.in_proj.weight"):
        one = model()
        with torch.no_grad():
            damaged = one.output_weight if where == "output" else one.get_parameter(where)[32:]
            damaged.view(torch.int32).fill_(bits)
        if precision != "fp32":
            one = quantize_linear_layers(one, precision)  # type: ignore[arg-type]
        with pytest.raises(MTKitError, match="the model gave NaN"):
            by_kernels(one, sources(3), max_lengths=[5] * 3, beam_size=2, length_penalty=0.6)
    assert build


@pytest.mark.usefixtures("this_build")
def test_pieces_are_forbidden_wherever_they_are() -> None:
    torch.manual_seed(1)
    one = Transformer(model().config, src_vocab_size=300, tgt_vocab_size=1300).eval()
    allowed = {5, 513, 700, 1299}
    forbidden = sorted(set(range(1300)) - allowed)
    (found,) = by_kernels(one, [[5, 6]], max_lengths=[2], beam_size=20, n_best=20, length_penalty=0.0, forbidden_ids=forbidden)
    assert len(found) == 16
    assert {token for hypothesis in found for token in hypothesis.tokens} == allowed


@pytest.mark.usefixtures("this_build")
def test_nan_among_the_first_of_many_pieces_is_an_error() -> None:
    config = dataclasses.replace(model().config, tie_embeddings="none")
    torch.manual_seed(1)
    one = Transformer(config, src_vocab_size=300, tgt_vocab_size=1300).eval()
    with torch.no_grad():
        one.output_weight[:512] = float("nan")
    with pytest.raises(MTKitError, match="the model gave NaN"):
        by_kernels(one, sources(3), max_lengths=[5] * 3, beam_size=2, length_penalty=0.6)


@pytest.mark.usefixtures("this_build")
def test_the_weights_are_those_of_the_time_when_it_was_made() -> None:
    one, batch = model(), sources(5)
    options: dict[str, Any] = {"max_lengths": [9] * 5, "beam_size": 2, "length_penalty": 0.6, "forbidden_ids": FORBIDDEN}
    with inference([one]):
        made = RowModel(one)
        expected = made.search(batch, **options)
    for module in one.modules():
        if isinstance(module, torch.nn.LayerNorm):
            torch.nn.init.zeros_(module.weight)
    with inference([one]):
        assert made.search(batch, **options) == expected


@pytest.mark.parametrize("where", ["encoder.layers.1.feed_forward.in_proj.weight", "decoder.layers.0.cross_attention.q_proj.bias", "output"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_nan_is_an_error(where: str, precision: str, build: str) -> None:
    one = model()
    with torch.no_grad():
        damaged = one.output_weight if where == "output" else one.get_parameter(where)
        damaged.view(-1)[3] = float("nan")
    if precision == "int8":
        if kernels.int8_level() == 0:
            pytest.skip("no products of 8-bit integers here")
        one = quantize_linear_layers(one)
    with pytest.raises(MTKitError, match="the model gave NaN"):
        by_kernels(one, sources(3), max_lengths=[5] * 3, beam_size=2, length_penalty=0.6)
    assert build


def test_what_it_is_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    use("this processor", monkeypatch)
    assert fits(model())
    assert not fits(model(num_heads=4))  # heads of 8 channels
    assert not fits(model().bfloat16())
    assert fits(model(ffn_dim=50))
    assert not fits(model(ffn_dim=50, activation="gelu"))  # rows that end within a register
    assert not fits(model(ffn_dim=50, activation="swiglu"))
    monkeypatch.setattr(library, "load", lambda: None)
    assert not fits(model())


def test_int8_layers_of_torch_are_not_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    use("SSE", monkeypatch)
    one = quantize_linear_layers(model())
    assert kernels.int8_level() == 0
    assert not fits(one)

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtkit.checkpoint import ctranslate2 as writer
from mtkit.checkpoint.ctranslate2 import export_ctranslate2
from mtkit.checkpoint.format import load_model
from mtkit.data.tokenizer import Tokenizer
from mtkit.decoding.engine.ct2 import CTranslate2Translator, _resolve_place, load_ctranslate2
from mtkit.decoding.lines import SearchConfig, Translation
from mtkit.decoding.scoring import score_token_pairs
from mtkit.decoding.translator import Translator
from mtkit.errors import ArtefactError, ConfigError, MTKitError, ResourceError, UsageError
from mtkit.model.transformer import Transformer
from tests.decoding.builders import never_ends, random_model, save, sentences, tiny_tokenizer
from tests.helpers import refresh_manifest

Load = Callable[..., CTranslate2Translator]
SHORT = {"max_length_constant": 5}


def modest_model(seed: int = 4) -> Transformer:
    """Like `random_model`, with hardly any probability for what a decoder must not choose: as a trained model is."""
    model = random_model(seed)
    with torch.no_grad():
        direction = model.decoder.layers[-1].feed_forward_norm.bias  # type: ignore[union-attr]
        assert isinstance(direction, torch.Tensor)
        direction[0] = 10.0
        model.output_weight[:, 0] = 0.0
        model.output_weight[tiny_tokenizer().forbidden_ids("tgt"), 0] = -2.0
    return model


def write_export(directory: Path, model: Transformer) -> Path:
    export_ctranslate2(load_model(save(directory / "model", model, tiny_tokenizer())), directory / "exported")
    return directory / "exported"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_export(tmp_path_factory.mktemp("ct2"), modest_model())


@pytest.fixture
def load(exported: Path) -> Load:
    """Loads the export, or another one, with these settings of the search."""

    def loaded(search: dict[str, Any] | None = None, *, path: Path | None = None, **options: Any) -> CTranslate2Translator:
        config = SearchConfig(**{**SHORT, **(search or {})})
        return load_ctranslate2(path or exported, search=config, **{"device": "cpu", "threads": 1, **options})[0]

    return loaded


def own(search: dict[str, Any] | None = None) -> Translator:
    return Translator([modest_model()], tiny_tokenizer(), search=SearchConfig(**{**SHORT, **(search or {})}))


def tokens_of(translations: Sequence[Translation]) -> list[list[tuple[int, ...]]]:
    return [[hypothesis.tokens for hypothesis in translation.hypotheses] for translation in translations]


# --- the same translations and scores ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("search", "num_same"),
    [
        ({"beam_size": 1}, 60),
        ({"length_penalty": 0.0}, 60),
        ({}, 54),
        ({"beam_size": 6, "length_penalty": 1.0, "penalty": "power"}, 54),
    ],
)
def test_translations_are_ours_but_for_few_that_ours_finds_better(load: Load, search: dict[str, Any], num_same: int) -> None:
    lines = sentences(60, seed=3, max_words=8)
    ours, theirs = list(own(search).translate(lines)), list(load(search).translate(lines))
    assert len(set(map(str, tokens_of(ours)))) > 30
    pairs = [(mine.hypotheses[0], other.hypotheses[0]) for mine, other in zip(ours, theirs, strict=True)]
    same = [pair for pair in pairs if pair[0].tokens == pair[1].tokens]
    assert len(same) >= num_same
    for key in ("score", "log_prob", "finished", "text"):
        mine, other = ([getattr(entry, key) for entry in entries] for entries in zip(*same, strict=True))
        assert other == (mine if key == "text" else pytest.approx(mine, abs=1e-4))
    assert all((mine.finished, mine.score) >= (other.finished, other.score - 1e-4) for mine, other in pairs)


def test_n_best_is_ranked_by_our_penalty_and_scored_over_the_whole_vocabulary(load: Load) -> None:
    lines = sentences(20, seed=8)
    found = list(load({"beam_size": 5, "n_best": 4}).translate(lines))
    model, tokenizer = modest_model(), tiny_tokenizer()
    ended = [(line, h) for line, translation in zip(lines, found, strict=True) for h in translation.hypotheses if h.finished]
    assert len(ended) > 40
    scores = score_token_pairs(model, tokenizer.encode([line for line, _ in ended], "src"), [h.tokens for _, h in ended])
    assert [h.log_prob for _, h in ended] == pytest.approx([score.log_prob for score in scores], abs=1e-4)
    assert [h.score for _, h in ended] == pytest.approx([s.log_prob / ((5 + s.num_tokens) / 6) ** 0.6 for s in scores], abs=1e-4)
    for translation in found:
        assert len(translation.hypotheses) == 4
        assert list(translation.hypotheses) == sorted(translation.hypotheses, key=lambda h: (not h.finished, -h.score))
        assert len({(h.tokens, h.finished) for h in translation.hypotheses}) == 4


def test_forbidden_pieces_are_never_chosen_and_cost_nothing_in_exact_scores(load: Load, tmp_path: Path) -> None:
    path = write_export(tmp_path, random_model(4))  # which likes to choose them
    lines, tokenizer = sentences(20, seed=3), tiny_tokenizer()
    exact = list(load({"beam_size": 2}, path=path).translate(lines))
    assert not {token for row in tokens_of(exact) for tokens in row for token in tokens} & set(tokenizer.forbidden_ids("tgt"))
    quick = list(load({"beam_size": 2}, path=path, exact_scores=False).translate(lines))
    assert tokens_of(quick) == tokens_of(exact)
    assert all(fast.hypotheses[0].log_prob > sure.hypotheses[0].log_prob + 1e-3 for fast, sure in zip(quick, exact, strict=True))


# --- lines ------------------------------------------------------------------------------------------------------------------------------


def test_the_batch_the_workers_and_the_order_change_nothing(load: Load) -> None:
    lines = [*sentences(40, seed=3, max_words=20), "", "  ", "ba"]
    expected = list(load(batch_tokens=1).translate(lines))
    assert [translation.line for translation in expected] == list(range(1, 44))
    assert [translation.text for translation in expected[40:42]] == ["", ""]
    for options in ({"batch_tokens": 60}, {"batch_tokens": 10_000}, {"batch_tokens": 30, "threads": 2}):
        assert tokens_of(list(load(**options).translate(lines))) == tokens_of(expected)
    assert tokens_of(list(load().translate(lines[::-1]))) == tokens_of(expected)[::-1]


def test_over_long_sources_are_cut_with_a_warning(load: Load) -> None:
    lines = ["lo mu", " ".join(["baki"] * 20), "vo"]
    found = list(load({"max_source_length": 5}).translate(lines))
    assert [translation.is_source_cut for translation in found] == [False, True, False]
    assert found[1].warning is not None
    assert "only the first 5 were translated" in found[1].warning
    assert tokens_of(found) == tokens_of(list(own({"max_source_length": 5}).translate(lines)))


@pytest.mark.parametrize("beam_size", [1, 3])
def test_the_length_cap_is_that_of_the_sentence(load: Load, beam_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = never_ends(tiny_tokenizer())
    monkeypatch.setattr(Tokenizer, "forbidden_ids", lambda _self, _side: forbidden)
    translator = load({"beam_size": beam_size, "max_length_ratio": 2.0, "max_length_constant": 1}, batch_tokens=1000)
    lines = ["ba", "baki lo mu ner sta", "ki", "lo mu"]
    found = list(translator.translate(lines))
    assert [len(row[0]) for row in tokens_of(found)] == [2 * len(ids) + 1 for ids in tiny_tokenizer().encode(lines, "src")]
    assert not any(translation.hypotheses[0].finished for translation in found)
    assert all(translation.warning and "was cut at" in translation.warning for translation in found)


def test_no_translation_goes_beyond_the_positions_of_the_export(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_POSITIONS", 12)
    path = write_export(tmp_path, random_model(4))
    search = {"max_source_length": 11, "max_length_ratio": 9.0, "length_penalty": 5.0, "beam_size": 2}
    found = list(load(search, path=path).translate(sentences(30, seed=4)))
    assert max(len(translation.hypotheses[0].tokens) for translation in found) == 11
    with pytest.raises(ConfigError, match="max_source_length must be below 12 with --engine ct2, but is 12"):
        load({**search, "max_source_length": 12}, path=path)


# --- what is refused --------------------------------------------------------------------------------------------------------------------


def test_sampling_is_refused_by_name(load: Load) -> None:
    with pytest.raises(UsageError, match="--sample does not go with --engine ct2"):
        load({"method": "sample"})


def test_a_precision_that_the_device_lacks_is_refused_by_name(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(precision="fp32").description.endswith(" on cpu, float32, 1 at a time")

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("Requested bfloat16 compute type, but it is slow here")

    monkeypatch.setattr("ctranslate2.Translator", refuse)
    with pytest.raises(UsageError, match="--precision bf16 does not go with --engine ct2 on cpu: Requested bfloat16"):
        load(precision="bf16")


def test_what_is_no_export_is_told_with_a_way_out(load: Load, exported: Path, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    for path, what in (
        (exported.parent / "model", "model: is of kind model"),
        (tmp_path / "foreign", "foreign: has no MANIFEST.json"),
        (tmp_path / "nowhere", "nowhere: does not exist"),
    ):
        with pytest.raises(ArtefactError, match=f"{what}, and --engine ct2 needs an export") as raised:
            load(path=path)
        assert raised.value.hint is not None
        assert "mtkit export MODEL --format ctranslate2" in raised.value.hint
        assert "leave out --engine ct2" in raised.value.hint


def test_a_name_that_ctranslate2_cannot_open_is_told(load: Load, exported: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(exported, tmp_path / os.fsdecode(b"copy\xff"))
    with pytest.raises(UsageError, match="can open only what has a name in UTF-8"):
        load(path=copy)


def test_a_damaged_export_is_named(load: Load, exported: Path, tmp_path: Path) -> None:
    cut = shutil.copytree(exported, tmp_path / "cut")
    (cut / "model.bin").write_bytes((cut / "model.bin").read_bytes()[:-1])
    with pytest.raises(ArtefactError, match="model.bin: has .* bytes, its manifest says"):
        load(path=cut)

    broken = shutil.copytree(exported, tmp_path / "broken")
    weights = (broken / "model.bin").read_bytes()
    (broken / "model.bin").write_bytes(b"\xff" * 4 + weights[4:])  # a version from the future
    with pytest.raises(ArtefactError, match="model.bin: its sha256 differs"):
        load(path=broken)
    refresh_manifest(broken / "model.bin")
    with pytest.raises(ArtefactError, match="broken: CTranslate2 cannot load it"):
        load(path=broken)

    text = (exported / "MANIFEST.json").read_bytes()
    own = b'"tokenizer": "' + tiny_tokenizer().fingerprint.encode()
    for old, new, message in (
        (own, own[:-64] + b"0" * 64, "its tokenizer is not the one that it was exported with"),
        (b'"model.bin"', b'"model.ban"', "its manifest lacks model.bin"),
        (b'"max_positions"', b'"maximum"', "its manifest lacks max_positions"),
    ):
        assert old in text
        other = shutil.copytree(exported, tmp_path / "other", dirs_exist_ok=True)
        (other / "MANIFEST.json").write_bytes(text.replace(old, new))
        shutil.copy(other / "model.bin", other / "model.ban")
        with pytest.raises(ArtefactError, match=f"other: {message}"):
            load(path=other)


def test_nan_is_an_error(load: Load, tmp_path: Path) -> None:
    model = modest_model()
    with torch.no_grad():
        model.output_weight.fill_(float("nan"))
    path = write_export(tmp_path, model)
    with pytest.raises(MTKitError, match="the model gave NaN"):
        list(load(path=path).translate(["ba"]))


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [("CUDA failed with error out of memory", ResourceError, "lines 1 to 2: CTranslate2 has not enough memory"), ("odd", MTKitError, "failed: odd")],
)
def test_a_failure_of_the_runtime_names_the_lines(load: Load, text: str, kind: type[MTKitError], message: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(text)

    translator = load()
    translator._runtime = SimpleNamespace(translate_batch=fail)
    with pytest.raises(kind, match=message):
        list(translator.translate(["ba", "ki"]))


@pytest.mark.parametrize(
    ("name", "num_gpus", "expected"),
    [("auto", 0, ("cpu", 0)), ("auto", 2, ("cuda", 0)), ("cpu", 2, ("cpu", 0)), ("cuda", 1, ("cuda", 0)), ("cuda:1", 2, ("cuda", 1))],
)
def test_the_place(name: str, num_gpus: int, expected: tuple[str, int]) -> None:
    assert _resolve_place(name, num_gpus=num_gpus) == expected


@pytest.mark.parametrize(
    ("name", "message"), [("tpu", "device must be auto, cpu"), ("cuda:x", "device must be"), ("cuda:1", "CTranslate2 sees 1 GPU")]
)
def test_a_place_that_is_not_there(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _resolve_place(name, num_gpus=1)

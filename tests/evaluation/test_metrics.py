import csv
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import sacrebleu
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest

from mtkit.errors import DataError, MTKitError, UsageError
from mtkit.evaluation.metrics import MetricName, Score, corpus_scores, parse_metrics, sentence_scores, system_scores, target_language, tokenizer_for
from mtkit.files import read_lines
from tests.helpers import shared_data

HYPS = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
REFS_A = ["The dog bit the man.", "It was not unexpected.", "The man bit him first."]
REFS_B = ["The dog had bit the man.", "No one was surprised.", "The man had bitten the dog."]
ALL: tuple[MetricName, ...] = ("bleu", "chrf", "chrf++", "ter")


def values(scores: list[Score]) -> dict[str, float]:
    return {score.metric: score.value for score in scores}


def made_up_system(seed: int, num_lines: int = 60) -> tuple[list[str], list[str]]:
    """Lines and a version of them in which words are lost and swapped."""
    rng = random.Random(seed)
    words = ["the", "a", "dog", "cat", "house", "tree", ",", ".", "runs", "sees", "old", "green", "and", "of", "to", "in"]
    refs = [" ".join(rng.choices(words, k=rng.randint(3, 20))).capitalize() for _ in range(num_lines)]
    hyps = [" ".join(word if rng.random() < 0.8 else rng.choice(words) for word in ref.split() if rng.random() < 0.95) for ref in refs]
    return hyps, refs


@pytest.mark.parametrize("refs", [[REFS_A], [REFS_A, REFS_B]], ids=["one reference", "two references"])
def test_values_are_those_of_sacrebleu(refs: list[list[str]]) -> None:
    scores = corpus_scores(HYPS, refs, metrics=ALL)
    expected = [BLEU(), CHRF(), CHRF(word_order=2), TER()]
    for score, metric in zip(scores, expected, strict=True):
        assert score.value == pytest.approx(metric.corpus_score(HYPS, refs).score, abs=1e-9)
        assert score.signature == str(metric.get_signature())
        assert score.num_sentences == 3
        assert (score.low, score.high, score.p_value) == (None, None, None)
    assert [score.name for score in scores] == ["BLEU", "chrF", "chrF++", "TER"]


def test_golden_values() -> None:
    # The example of sacreBLEU's README.
    assert values(corpus_scores(HYPS, [REFS_A, REFS_B]))["bleu"] == pytest.approx(48.530827, abs=1e-6)
    # n-gram precisions 4/5, 3/4, 2/3, 1/2; then all 1 with a brevity penalty of exp(1 - 5/4).
    assert values(corpus_scores(["a b c d e"], [["a b c d f"]]))["bleu"] == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert values(corpus_scores(["a b c d"], [["a b c d e"]]))["bleu"] == pytest.approx(100 * math.exp(-0.25))
    # Of the character unigrams 1 of 2 matches, of the bigrams 0 of 1: F = P = R = (1/2 + 0) / 2.
    assert values(corpus_scores(["ab"], [["ac"]]))["chrf"] == pytest.approx(25)
    # One word of four is missing; then a block of two is moved, which is one edit.
    assert values(corpus_scores(["a b c"], [["a b c d"]], metrics=("ter",)))["ter"] == pytest.approx(25)
    assert values(corpus_scores(["c d a b"], [["a b c d"]], metrics=("ter",)))["ter"] == pytest.approx(25)


@pytest.mark.parametrize(
    ("hyps", "refs", "expected"),
    [
        pytest.param(REFS_A, REFS_A, {"bleu": 100.0, "chrf": 100.0, "chrf++": 100.0, "ter": 0.0}, id="identical"),
        pytest.param(["", "", ""], REFS_A, {"bleu": 0.0, "chrf": 0.0, "chrf++": 0.0, "ter": 100.0}, id="empty hypotheses"),
        pytest.param(["xyz"] * 3, ["abc"] * 3, {"bleu": 0.0, "chrf": 0.0, "chrf++": 0.0, "ter": 100.0}, id="no match at all"),
        pytest.param(["", "b"], ["", ""], {"bleu": 0.0, "chrf": 0.0, "chrf++": 0.0, "ter": 100.0}, id="empty references"),
    ],
)
def test_degenerate_texts(hyps: list[str], refs: list[str], expected: dict[str, float]) -> None:
    found = values(corpus_scores(hyps, [refs], metrics=ALL, num_bootstrap=40))
    assert found == pytest.approx(expected, abs=1e-9)


def test_an_empty_line_costs_only_its_own_sentence() -> None:
    score = corpus_scores([REFS_A[0], "", REFS_A[2]], [REFS_A])[0]
    assert score.details["precisions"] == [100.0] * 4
    assert score.details["hyp_length"] < score.details["ref_length"]
    assert 0 < score.value < 100


def test_a_shuffled_hypothesis_scores_lower() -> None:
    hyps, refs = made_up_system(1)
    shuffled = hyps[1:] + hyps[:1]
    right, wrong = values(corpus_scores(hyps, [refs], metrics=ALL)), values(corpus_scores(shuffled, [refs], metrics=ALL))
    assert wrong["bleu"] < right["bleu"]
    assert wrong["chrf"] < right["chrf"]
    assert wrong["ter"] > right["ter"]


def test_a_second_reference_counts() -> None:
    one, two = values(corpus_scores(REFS_B, [REFS_A])), values(corpus_scores(REFS_B, [REFS_A, REFS_B]))
    assert one["bleu"] < 50
    assert two["bleu"] == pytest.approx(100)


@pytest.mark.parametrize("refs", [REFS_A[0], REFS_A, [REFS_A[0]], None], ids=["string", "list of strings", "list of one string", "none"])
def test_references_that_are_no_sets_are_refused(refs: object) -> None:
    with pytest.raises(TypeError, match="refs must be a list of reference sets"):
        corpus_scores(HYPS, refs)  # type: ignore[arg-type]


def test_other_wrong_shapes_are_refused() -> None:
    with pytest.raises(TypeError, match="hyps must be a list of strings, but is str"):
        corpus_scores(HYPS[0], [REFS_A])
    with pytest.raises(TypeError, match="reference set 1 must hold strings only, but item 1 is NoneType"):
        corpus_scores(HYPS, [["a", None, "c"]])  # type: ignore[list-item]
    with pytest.raises(DataError, match="no references"):
        corpus_scores(HYPS, [])
    with pytest.raises(DataError, match="no sentences"):
        corpus_scores([], [[]])
    with pytest.raises(DataError, match="reference set 2 has 2 lines, the hypotheses have 3") as counts:
        corpus_scores(HYPS, [REFS_A, REFS_B[:2]])
    assert counts.value.hint is None
    with pytest.raises(DataError, match="reference set 1 has 1 lines, the hypotheses have 3") as transposed:
        corpus_scores(HYPS, [[line] for line in REFS_A])
    assert "transposed" in str(transposed.value.hint)
    with pytest.raises(DataError, match="reference set 1"):
        sentence_scores(HYPS, [REFS_A[:1]])


def test_intervals_are_those_of_sacrebleu_for_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    hyps, refs = made_up_system(2)
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    for score, metric in zip(
        corpus_scores(hyps, [refs], metrics=ALL, num_bootstrap=200, seed=7), [BLEU(), CHRF(), CHRF(word_order=2), TER()], strict=True
    ):
        expected = metric.corpus_score(hyps, [refs], n_bootstrap=200)
        assert score.low is not None
        assert score.high is not None
        assert (score.high - score.low) / 2 == pytest.approx(expected._ci, abs=1e-4)  # sacreBLEU adds up in 32 bits
        assert score.low < score.value < score.high
        assert score.signature == str(metric.get_signature())
        assert "bs:200|seed:7" in score.signature


def test_p_values_are_those_of_sacrebleu(monkeypatch: pytest.MonkeyPatch) -> None:
    better, refs = made_up_system(3)
    worse = [line.replace(" the", "").replace(" of", " to") for line in better]
    alike = [*better[:-4], *worse[-4:]]
    monkeypatch.setenv("SACREBLEU_SEED", "5")
    named: list[tuple[str, Sequence[str]]] = [("better", better), ("worse", worse), ("alike", alike)]
    _, expected = PairedTest(named, {"BLEU": BLEU(), "CHRF": CHRF(), "TER": TER()}, [refs], test_type="bs", n_samples=300)()
    table = system_scores([better, worse, alike], [refs], metrics=("bleu", "chrf", "ter"), num_bootstrap=300, seed=5)
    for column, name in enumerate(["BLEU", "chrF2", "TER"]):
        assert table[0][column].p_value is None
        for row in (1, 2):
            result = expected[name][row]
            assert not isinstance(result, str)
            assert table[row][column].value == pytest.approx(result.score)
            assert table[row][column].p_value == pytest.approx(result.p_value)
    p_worse, p_alike = table[1][0].p_value, table[2][0].p_value
    assert p_worse is not None
    assert p_alike is not None
    assert p_worse < 0.05 < p_alike


def test_a_system_does_not_differ_from_itself() -> None:
    hyps, refs = made_up_system(4)
    table = system_scores([hyps, list(hyps)], [refs], num_bootstrap=50)
    assert [score.p_value for score in table[1]] == [1.0, 1.0]
    assert [score.low for score in table[1]] == [score.low for score in table[0]]


def test_resampling_depends_on_its_seed_alone() -> None:
    hyps, refs = made_up_system(5)
    first = corpus_scores(hyps, [refs], num_bootstrap=50, seed=1)
    assert corpus_scores(hyps, [refs], num_bootstrap=50, seed=1) == first
    assert corpus_scores(hyps, [refs], num_bootstrap=50, seed=2) != first
    for number in (-1, 39):
        with pytest.raises(UsageError, match=f"must be 0 or at least 40, but is {number}"):
            corpus_scores(hyps, [refs], num_bootstrap=number)


def test_sentence_scores_are_those_of_sacrebleu() -> None:
    refs = [REFS_A, REFS_B]
    found = sentence_scores(HYPS, refs, metrics=ALL)
    for scores, metric in zip(found, [BLEU(effective_order=True), CHRF(), CHRF(word_order=2), TER()], strict=True):
        expected = [metric.sentence_score(hyp, [ref[index] for ref in refs]).score for index, hyp in enumerate(HYPS)]
        assert scores.values == pytest.approx(expected)
        assert scores.signature == str(metric.get_signature())
    assert "eff:yes" in found[0].signature


def test_case_and_tokenization_are_in_value_and_signature() -> None:
    lowered = [line.lower() for line in REFS_A]
    mixed, ignored = corpus_scores(lowered, [REFS_A])[0], corpus_scores(lowered, [REFS_A], lowercase=True)[0]
    assert mixed.value < 100
    assert ignored.value == pytest.approx(100)
    assert "case:mixed" in mixed.signature
    assert "case:lc" in ignored.signature
    assert values(corpus_scores(lowered, [REFS_A], metrics=("chrf",), lowercase=True)) == pytest.approx({"chrf": 100})
    spaced = [line.replace(".", " .") for line in REFS_A]
    assert corpus_scores(spaced, [REFS_A])[0].value == pytest.approx(100)
    untokenized = corpus_scores(spaced, [REFS_A], tokenize="none")[0]
    assert untokenized.value < 100
    assert "tok:none" in untokenized.signature


def test_the_target_language_chooses_the_tokenizer() -> None:
    codes = [None, "de", "zh", "zh-TW", "zho_Hans", "ja", "jpn_Jpan", "KO"]
    assert [tokenizer_for(code) for code in codes] == ["13a", "13a", "zh", "zh", "zh", "ja-mecab", "ja-mecab", "ko-mecab"]


@pytest.mark.parametrize(
    ("pair", "target"),
    [("en-de", "de"), ("en-zh-CN", "zh-CN"), ("zh-CN-en", "en"), ("zh-Hant-en", "en"), ("eng_Latn-zho_Hans", "zho_Hans"), ("en-zh_TW", "zh_TW")],
)
def test_the_target_of_a_language_pair(pair: str, target: str) -> None:
    assert target_language(pair) == target


@pytest.mark.parametrize("pair", ["ende", "", "-", "en-", "-de", "zh-CN"])
def test_a_language_pair_has_two_sides(pair: str) -> None:
    with pytest.raises(UsageError, match=f"^the language pair '{pair}' must be of the form SRC-TGT"):
        target_language(pair)
    hyps, refs = ["猫坐在垫子上面。"], [["猫坐在垫子上。"]]
    chinese = corpus_scores(hyps, refs, metrics=("bleu", "ter"), target_lang="zh")
    assert "tok:zh" in chinese[0].signature
    assert chinese[0].value > 50
    assert corpus_scores(hyps, refs)[0].value == 0.0
    assert "asian:yes" in chinese[1].signature
    assert chinese[1].value < 50
    assert "tok:char" in corpus_scores(hyps, refs, target_lang="zh", tokenize="char")[0].signature


def test_a_tokenizer_that_is_not_there_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    import sacrebleu.tokenizers.tokenizer_ja_mecab as mecab
    import sacrebleu.tokenizers.tokenizer_spm as spm

    def fail(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(mecab, "MeCab", None)
    monkeypatch.setattr(spm, "SACREBLEU_DIR", "/nonexistent")
    monkeypatch.setattr(spm, "download_file", fail)
    with pytest.raises(MTKitError, match="tokenizer ja-mecab cannot be used") as missing:
        corpus_scores(HYPS, [REFS_A], target_lang="ja")
    assert "sacrebleu[ja]" in str(missing.value.hint)
    with pytest.raises(MTKitError, match="flores200 cannot be used: no network"):
        corpus_scores(HYPS, [REFS_A], tokenize="flores200")
    with pytest.raises(UsageError, match="BLEU has no tokenizer '14a'"):
        corpus_scores(HYPS, [REFS_A], tokenize="14a")


def test_metric_names() -> None:
    assert parse_metrics("chrF++, bleu") == ("chrf++", "bleu")
    for text in ("", ",", "bleu,bleu", "meteor"):
        with pytest.raises(UsageError):
            parse_metrics(text)
    with pytest.raises(ValueError, match="no metric 'meteor'"):
        corpus_scores(HYPS, [REFS_A], metrics=["meteor"])  # type: ignore[list-item]


def test_signature_items_are_added() -> None:
    score = corpus_scores(HYPS, [REFS_A], signature_items={"test": "wmt14/full", "lang": "en-de"})[0]
    assert "test:wmt14/full" in score.signature.split("|")
    assert "lang:en-de" in score.signature.split("|")
    assert f"version:{sacrebleu.__version__}" in score.signature


def test_nothing_here_needs_torch() -> None:
    code = "import sys, mtkit.evaluation.metrics, mtkit.evaluation.checks, mtkit.evaluation.testsets; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_agrees_with_the_command_line_of_sacrebleu(tmp_path: Path) -> None:
    hyps, refs = made_up_system(6)
    (tmp_path / "hyp").write_text("\n".join(hyps) + "\n")
    (tmp_path / "ref").write_text("\n".join(refs) + "\n")
    command = [sys.executable, "-m", "sacrebleu", str(tmp_path / "ref"), "-i", str(tmp_path / "hyp"), "-m", "bleu", "chrf", "ter"]
    command += ["--confidence", "-w", "4", "--force", "-f", "json"]
    environment = {key: value for key, value in os.environ.items() if key != "SACREBLEU_SEED"}
    printed = subprocess.run(command, check=True, capture_output=True, env=environment).stdout
    for score, expected in zip(corpus_scores(hyps, [refs], metrics=("bleu", "chrf", "ter"), num_bootstrap=1000), json.loads(printed), strict=True):
        assert score.value == pytest.approx(expected["score"], abs=5e-5)
        assert score.signature == expected["signature"]
        assert score.low is not None
        assert score.high is not None
        assert (score.high - score.low) / 2 == pytest.approx(expected["confidence_var"], abs=2e-4)


def published_and_found(names: list[str], letters: str) -> tuple[list[float], list[float]]:
    """BLEU and chrF of systems of WMT22 English-German against the references of these letters: as published, and as computed here."""
    data = shared_data("wmt22-en-de")
    with open(data / "published-scores.tsv", newline="") as stream:
        published = {(row["system"], row["metric"]): float(row["score"]) for row in csv.DictReader(stream, delimiter="\t")}
    refs = [read_lines(data / f"ref.{letter}.de") for letter in letters]
    table = system_scores([read_lines(data / f"hyp.{name}.de") for name in names], refs)
    assert all(score.num_sentences == 2037 for row in table for score in row)
    suffix = "all" if len(letters) > 1 else letters
    return [published[name, f"{metric}-{suffix}"] for name in names for metric in ("bleu", "chrf")], [score.value for row in table for score in row]


@pytest.mark.parametrize("letters", ["A", "B", "AB"])
def test_published_scores_of_all_systems(letters: str) -> None:
    names = sorted(path.name.split(".")[1] for path in shared_data("wmt22-en-de").glob("hyp.*.de"))
    assert len(names) == 9
    published, found = published_and_found(names, letters)
    assert found == pytest.approx(published, abs=1e-9)

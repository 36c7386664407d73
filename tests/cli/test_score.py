import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import typer
from typer.testing import CliRunner

from mtkit.checkpoint.format import describe, load_model, parameters_by_name, save_model
from mtkit.cli import score
from mtkit.cli.app import app as mtkit_app
from mtkit.cli.app import global_options
from mtkit.data.loader import collate
from mtkit.data.tokenizer import TokenizerConfig, train_tokenizer
from mtkit.decoding.lines import SearchConfig
from mtkit.decoding.loading import load_translator
from mtkit.decoding.scoring import score_pairs
from mtkit.errors import MTKitError
from mtkit.evaluation import testsets
from mtkit.evaluation.checks import NamedLines
from mtkit.evaluation.metrics import corpus_scores, sentence_scores, system_scores
from mtkit.model.config import ModelConfig
from mtkit.model.transformer import Transformer
from mtkit.native import kernels

Run = Callable[..., Any]

NAMES = ["Anna", "Bernd", "Clara", "Doris", "Emil"]
REFS = [f"{name} sieht den alten Hund von {other}, aber nicht die Katze." for name in NAMES for other in NAMES]
HYPS = [line.replace("alten", "großen") if index % 3 else line for index, line in enumerate(REFS)]
WORSE = [line.replace("Katze", "Maus").replace("den", "dem") for line in HYPS]


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run() -> Run:
    """Runs `mtkit score` with these arguments."""
    application = typer.Typer(cls=mtkit_app.info.cls)
    application.callback()(global_options)
    score.register(application)

    def invoke(*arguments: str, input: str | None = None, exit_code: int = 0) -> Any:
        result = CliRunner().invoke(application, ["score", *arguments], input=input)
        assert result.exit_code == exit_code, result.output
        return result

    return invoke


def put(name: str, lines: list[str]) -> str:
    Path(name).write_bytes("".join(f"{line}\n" for line in lines).encode())
    return name


def test_one_system_gives_one_line_per_metric(run: Run) -> None:
    result = run("-r", put("ref", REFS), put("hyp", HYPS), "--bootstrap", "50")
    bleu, chrf = corpus_scores(HYPS, [REFS], num_bootstrap=50)
    lines = result.stdout.removesuffix("\n").split("\n")
    assert len(lines) == 2
    assert lines[0].startswith(f"BLEU {bleu.value:.2f} [{bleu.low:.2f}, {bleu.high:.2f}]  ")
    assert "BP=1.000 ratio=1.000" in lines[0]
    assert lines[0].endswith(f"  {bleu.signature}")
    assert lines[1] == f"chrF {chrf.value:.2f} [{chrf.low:.2f}, {chrf.high:.2f}]  {chrf.signature}"
    assert result.stderr == ""


def test_options_reach_the_metrics(run: Run) -> None:
    put("ref", REFS), put("ref2", WORSE), put("hyp", [line.lower() for line in HYPS])
    result = run("-r", "ref", "-r", "ref2", "hyp", "-m", "ter,bleu", "--lowercase", "--tokenize", "intl", "--bootstrap", "0")
    scores = corpus_scores([line.lower() for line in HYPS], [REFS, WORSE], metrics=("ter", "bleu"), lowercase=True, tokenize="intl")
    ter, bleu = result.stdout.removesuffix("\n").split("\n")
    assert ter == f"TER {scores[0].value:.2f}  {scores[0].signature}"
    assert bleu.startswith(f"BLEU {scores[1].value:.2f}  ")
    assert bleu.endswith(f"  {scores[1].signature}")
    assert "nrefs:2|case:lc|eff:no|tok:intl" in bleu


def test_json_holds_everything_in_full(run: Run) -> None:
    result = run("-r", put("ref", REFS), put("a", HYPS), put("b", WORSE), "--json", "--bootstrap", "50", "--seed", "3", "--sentence")
    document = json.loads(result.stdout)
    assert document["num_sentences"] == len(REFS)
    assert document["references"] == ["ref"]
    assert [system["name"] for system in document["systems"]] == ["a", "b"]
    table = system_scores([HYPS, WORSE], [REFS], num_bootstrap=50, seed=3)
    for system, scores, hyps in zip(document["systems"], table, [HYPS, WORSE], strict=True):
        for entry, expected in zip(system["scores"], scores, strict=True):
            assert entry["metric"] == expected.metric
            assert entry["score"] == expected.value
            assert (entry["low"], entry["high"], entry["p_value"]) == (expected.low, expected.high, expected.p_value)
            assert entry["signature"] == expected.signature
        assert [item["scores"] for item in system["sentences"]] == [item.values for item in sentence_scores(hyps, [REFS])]
    assert document["systems"][0]["scores"][0]["brevity_penalty"] == 1.0


def test_several_systems_are_compared_with_the_first(run: Run) -> None:
    lines = run("-r", put("ref", REFS), put("good", HYPS), put("bad.de", WORSE), "-m", "bleu").stdout.removesuffix("\n").split("\n")
    assert lines[0].startswith("good    BLEU ")
    assert "  baseline  " in lines[0]
    assert lines[1].startswith("bad.de  BLEU ")
    assert "  p=0.001  " in lines[1]


def test_sentence_scores_are_one_line_each(run: Run) -> None:
    result = run("-r", put("ref", REFS), put("hyp", HYPS), "--sentence", "--bootstrap", "0")
    bleu, chrf = sentence_scores(HYPS, [REFS])
    lines = result.stdout.removesuffix("\n").split("\n")
    assert lines == [f"{first:.4f}\t{second:.4f}" for first, second in zip(bleu.values, chrf.values, strict=True)]
    assert f"column 1: hyp  BLEU  {bleu.signature}" in result.stderr
    assert run("-r", "ref", "hyp", "--sentence", "--bootstrap", "0", "-q").stderr == ""


def test_stdin_and_line_rules(run: Run) -> None:
    refs = ["Eins\u2028zwei\u0085drei und vier.", "Noch eine Zeile hier."]
    text = "Eins\u2028zwei\u0085drei und vier.\r\nNoch eine\rZeile hier.\n"
    result = run("-r", put("ref", refs), "-", "-m", "bleu", "--bootstrap", "0", "--json", input=text)
    document = json.loads(result.stdout)
    assert document["num_sentences"] == 2
    assert document["systems"][0]["name"] == "stdin"
    assert document["systems"][0]["scores"][0]["score"] == pytest.approx(100)
    assert document["warnings"] == ["stdin: is identical to a reference. Was a reference given in place of the translation?"]


def test_bytes_that_are_not_utf8_are_reported(run: Run) -> None:
    put("ref", REFS)
    Path("hyp").write_bytes(b"".join(line.encode("latin-1") + b"\n" for line in HYPS))
    assert "hyp: 16 lines hold bytes that are not UTF-8" in run("-r", "ref", "hyp", "-m", "bleu").stderr


def test_different_line_counts_are_refused(run: Run) -> None:
    result = run("-r", put("ref", REFS), put("hyp", HYPS[:-1]), exit_code=3)
    assert "error: hyp has 24 lines, ref has 25" in result.stderr
    assert result.stdout == ""
    assert "empty: is empty" in run("-r", "ref", put("empty", []), exit_code=3).stderr
    assert "src has 1 lines, ref has 25" in run("-r", "ref", put("good", HYPS), "--src", put("src", ["x"]), exit_code=3).stderr
    assert "missing: cannot be read" in run("-r", "ref", "missing", exit_code=3).stderr


def test_wrong_texts_are_refused_unless_forced(run: Run) -> None:
    put("ref", REFS), put("hyp", [line.replace("sieht", "sie@@ ht") for line in HYPS])
    refused = run("-r", "ref", "hyp", exit_code=3)
    assert "error: hyp: 25 of 25 lines hold subword marks" in refused.stderr
    assert "--force" in refused.stderr
    forced = run("-r", "ref", "hyp", "--force", "--bootstrap", "0")
    assert "warning: hyp: 25 of 25 lines hold subword marks" in forced.stderr
    assert forced.stdout.startswith("BLEU ")
    untranslated = put("src", [line.replace("Hund", "dog") for line in HYPS])
    assert "of its words with the source src" in run("-r", "ref", untranslated, "--src", "src", exit_code=3).stderr


def test_tokenized_text_is_right_for_the_tokenizer_none(run: Run) -> None:
    for name, lines in (("ref", REFS), ("hyp", HYPS)):
        put(name, [line.replace(",", " ,").replace(".", " .") for line in lines])
    assert "look tokenized, and BLEU tokenizes again (13a)" in run("-r", "ref", "hyp").stderr
    assert run("-r", "ref", "hyp", "--tokenize", "none").stderr == ""


def test_the_target_language_comes_from_either_option(run: Run) -> None:
    put("ref", ["猫坐在垫子上。"]), put("hyp", ["猫坐在垫子上面。"])
    for option in (["--tgt-lang", "zh"], ["-l", "en-zh"]):
        assert "tok:zh" in run("-r", "ref", "hyp", "-m", "bleu", *option).stdout
    plain = run("-r", "ref", "hyp", "-m", "bleu")
    assert "tok:13a" in plain.stdout
    assert "BLEU's tokenizer 13a splits at spaces" in plain.stderr


def test_public_test_sets(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, lang_pair: str) -> testsets.TestSet:
        source = NamedLines(name="source", lines=[f"Line {number}." for number in range(len(REFS))])
        return testsets.TestSet(name=name, lang_pair=lang_pair, source=source, references=[NamedLines(name="reference 1", lines=REFS)])

    monkeypatch.setattr(testsets, "load_test_set", load)
    result = run("-t", "wmt14/full", "-l", "en-de", put("hyp", HYPS), "-m", "bleu", "--bootstrap", "0")
    expected = corpus_scores(HYPS, [REFS], metrics=("bleu",), signature_items={"test": "wmt14/full", "lang": "en-de"})[0]
    assert "|test:wmt14/full|lang:en-de|" in result.stdout
    assert result.stdout.endswith(expected.signature + "\n")
    put("src", [f"Line {number}." for number in range(len(REFS))])
    assert "of its words with the source" in run("-t", "wmt14/full", "-l", "en-de", "src", exit_code=3).stderr
    assert "reference 1 has 25" in run("-t", "wmt14/full", "-l", "en-de", put("short", HYPS[:3]), exit_code=3).stderr


def test_a_test_set_that_cannot_be_had(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, lang_pair: str) -> testsets.TestSet:
        raise MTKitError(f"the test set {name} {lang_pair} cannot be loaded: no network", hint="Check the network.")

    monkeypatch.setattr(testsets, "load_test_set", fail)
    result = run("-t", "wmt14", "-l", "en-de", put("hyp", HYPS), exit_code=1)
    assert result.stderr == "error: the test set wmt14 en-de cannot be loaded: no network\nCheck the network.\n"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt a little of copying words."""
    torch.manual_seed(1)
    lines = [f"{first} und {second}" for first in NAMES for second in NAMES] + NAMES
    tokenizer = train_tokenizer([(line, line) for line in lines], TokenizerConfig(vocab_size=27, byte_fallback=False))
    config = ModelConfig(d_model=32, ffn_dim=64, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, dropout=0.0)
    model = Transformer(config, src_vocab_size=tokenizer.src_vocab_size, tgt_vocab_size=tokenizer.tgt_vocab_size)
    ids = tokenizer.encode(lines, "src")
    batch = collate(ids, ids)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        logits_BTV = model(batch.src_BS, batch.src_mask_BS, batch.tgt_in_BT, batch.tgt_mask_BT)
        loss = torch.nn.functional.cross_entropy(logits_BTV.transpose(1, 2), batch.tgt_out_BT, ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("score") / "model"
    save_model(path, tensors=parameters_by_name(model), description=describe(model, tokenizer, provenance={}), tokenizer=tokenizer)
    return path


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_model_scores_its_own_translations_as_it_did_when_translating(run: Run, model_path: Path, precision: Literal["fp32", "int8"]) -> None:
    sources = [*NAMES, "Anna und Bernd", "Emil und Clara Anna", "und"]
    loaded = load_model(model_path)
    translator, _ = load_translator([model_path], search=SearchConfig(beam_size=3), device="cpu", precision=precision, threads=1)
    translations = list(translator.translate(sources))
    texts = ("--src", put("src", sources), "--tgt", put("tgt", [item.text for item in translations]))
    result = run("--model", str(model_path), *texts, "--precision", precision)
    rows = [line.split("\t") for line in result.stdout.removesuffix("\n").split("\n")]
    assert len(rows) == len(sources)
    num_compared = 0
    for translation, (log_prob, num_tokens) in zip(translations, rows, strict=True):
        best = translation.hypotheses[0]
        # Text that the decoder spelled in another way than the tokenizer would is another token sequence.
        if best.finished and loaded.tokenizer.encode([best.text], "tgt") == [list(best.tokens)]:
            # In int8 the kernels keep keys and values in bf16, which scoring does not; with the fewer levels of AVX2 that moves more numbers.
            coarse = 2e-2 if kernels.int8_level() == 1 else 5e-3
            assert float(log_prob) == pytest.approx(best.log_prob, abs=1e-4 if precision == "fp32" else coarse)
            assert int(num_tokens) == len(best.tokens) + 1
            num_compared += 1
    assert num_compared >= 4
    assert f"{len(sources)} pairs, " in result.stderr


def test_model_scores_as_json(run: Run, model_path: Path) -> None:
    sources, targets = ["Anna und Bernd", "Clara", ""], ["Anna und Bernd", "", "Clara"]
    result = run("--model", str(model_path), "-s", put("src", sources), "--tgt", "-", "--json", input="".join(f"{line}\n" for line in targets))
    document = json.loads(result.stdout)
    loaded = load_model(model_path)
    expected = score_pairs(loaded.model, loaded.tokenizer, sources, targets)
    assert [(pair["log_prob"], pair["num_tokens"]) for pair in document["pairs"]] == [
        (pytest.approx(item.log_prob, abs=1e-5), item.num_tokens) for item in expected
    ]
    assert document["pairs"][1]["num_tokens"] == 1  # the end of sentence alone
    assert document["log_prob"] == pytest.approx(sum(item.log_prob for item in expected), abs=1e-4)
    assert document["perplexity"] == pytest.approx(math.exp(-document["log_prob"] / document["num_tokens"]))
    assert Path(document["model"]) == model_path


def test_a_source_that_is_cut_is_told(run: Run, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = ("--model", str(model_path), "-s", put("src", ["a", "b " * 1500, "c", "d " * 1500]), "--tgt", put("tgt", ["A", "B", "C", "D"]))
    result = run(*pairs, "--json")
    assert "src: lines 2, 4 longer than 1024 tokens, and scored by the first 1024" in result.stderr
    assert [pair["source_cut"] for pair in json.loads(result.stdout)["pairs"]] == [False, True, False, True]
    put("src", ["a", "b", "c", "d"])
    assert "longer" not in run(*pairs).stderr
    put("tgt", ["A", "B", "c " * 5000, "D"])
    result = run(*pairs, "--json", "--threads", "1")
    assert "tgt: line 3 longer than 4096 tokens" in result.stderr
    assert [pair["target_cut"] for pair in json.loads(result.stdout)["pairs"]] == [False, False, True, False]
    monkeypatch.setattr("mtkit.cli.score._NAMED_LINES", 1)
    put("src", ["a", "b " * 1500, "c", "d " * 1500])
    assert "src: lines 2 and 1 more longer than" in run(*pairs).stderr


def test_model_scores_need_pairs_and_a_model(run: Run, model_path: Path) -> None:
    put("src", ["a", "b"]), put("tgt", ["a"])
    assert "tgt has 1 lines, src has 2" in run("--model", str(model_path), "--src", "src", "--tgt", "tgt", exit_code=3).stderr
    assert "none: does not exist" in run("--model", "none", "--src", "src", "--tgt", "src", exit_code=4).stderr
    assert "one text only" in run("--model", str(model_path), "--src", "-", "--tgt", "-", exit_code=2).stderr
    assert "device must be" in run("--model", str(model_path), "--src", "src", "--tgt", "src", "--device", "tpu", exit_code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["-r", "ref"], "nothing to score", id="no hypothesis"),
        pytest.param(["hyp"], "there are no references", id="no reference"),
        pytest.param(["-r", "-", "-"], "stdin (-) can stand for one text only", id="stdin twice"),
        pytest.param(["-r", "ref", "hyp", "-m", "blue"], "there is no metric 'blue'", id="unknown metric"),
        pytest.param(["-r", "ref", "hyp", "--tokenize", "14a"], "BLEU has no tokenizer '14a'", id="unknown tokenizer"),
        pytest.param(["-t", "wmt14", "hyp"], "--test-set needs the languages", id="test set without languages"),
        pytest.param(["-t", "wmt14", "-l", "en-de", "-r", "ref", "hyp"], "leave out --ref and --src", id="test set and reference"),
        pytest.param(["--model", "m", "--src", "s"], "--model needs --src and --tgt", id="model without target"),
        pytest.param(["--model", "m", "--src", "s", "--tgt", "t", "hyp"], "takes no other texts", id="model and hypothesis"),
        pytest.param(["-r", "ref", "--tgt", "hyp"], "--tgt belongs to --model", id="target without model"),
    ],
)
def test_wrong_usage(run: Run, arguments: list[str], message: str) -> None:
    put("ref", REFS), put("hyp", HYPS)
    assert message in run(*arguments, exit_code=2).stderr


def test_help_ends_with_examples(run: Run) -> None:
    assert "Examples: mtkit score -r test.de hyp.de" in run("--help").stdout


def test_lines_for_which_ter_takes_long_are_named(run: Run) -> None:
    for name in ("hyp", "ref"):
        put(name, ["a b", "a " * 301, "c", "b " * 302])
    arguments = ("-r", "ref", "hyp", "--bootstrap", "0", "--force")
    assert "hyp: TER takes long for lines of more than 300 words, as line 2 and 1 more" in run(*arguments, "-m", "ter").stderr
    assert "TER takes long" not in run(*arguments, "-m", "bleu").stderr

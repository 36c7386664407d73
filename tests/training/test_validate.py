import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.data.loader import collate
from mtkit.decoding.lines import SearchConfig, Translation
from mtkit.decoding.scoring import score_pairs
from mtkit.distributed import World
from mtkit.evaluation.metrics import corpus_scores
from mtkit.training import validate as module
from mtkit.training.signals import StopRequest
from mtkit.training.trainer import Trainer
from mtkit.training.validate import DevSet, ValidationFailedError, ValidationStoppedError, dev_loss, scoring_warnings, validate
from tests.decoding.builders import random_model, tokenizer_of_two

MakeTrainer = Callable[..., Trainer]
TRAINED = ("training.max_steps=150", "optim.lr=2e-2", "validation.translate=true", "checkpoint.every_steps=none", "model.dropout=0.0")


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("validated") / "run"


@pytest.fixture
def trained(make_trainer: MakeTrainer, run_directory: Path) -> Trainer:
    """A model that translates some of the dev set, with its last validation; trained by the first test that asks."""
    trainer = make_trainer(run_directory, *TRAINED)
    for _ in trainer.train():
        pass
    return trainer


def measure(trainer: Trainer, world: World | None = None, stop: StopRequest | None = None, **options: Any) -> dict[str, float]:
    settings: dict[str, Any] = {"search": SearchConfig(), "max_tokens": 200, "tgt_lang": None, "stop": stop or StopRequest(), **options}
    model = trainer.updater.model.eval()
    return validate(model, trainer.data.tokenizer, trainer.data.dev, device=torch.device("cpu"), world=world or World(), **settings)


class Threads:
    """Threads in the place of processes, with what they exchange."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._given: list[Any] = [None] * size
        monkeypatch.setattr(module, "all_reduce_sums", lambda values, world, _device: list(map(sum, zip(*self._gather(values, world), strict=True))))
        monkeypatch.setattr(module, "all_gather_lines", lambda lines, world, _device: self._gather(lines, world))

    def _gather(self, value: Any, world: World) -> list[Any]:
        self._given[world.rank] = value
        self._barrier.wait(20)
        result = list(self._given)
        self._barrier.wait(20)
        return result

    def run(self, work: Callable[[World], Any]) -> list[Any]:
        """What `work` gives or raises on each rank."""

        def run(rank: int) -> Any:
            try:
                return work(World(rank=rank, local_rank=rank, size=self.size))
            except (ValidationFailedError, ValidationStoppedError) as error:
                return error

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(run, range(self.size)))


def test_validation_equals_translate_and_score(trained: Trainer, toy_text: Path, tmp_path: Path) -> None:
    checkpoint = trained.store.manager.stored()[-1]
    assert set(checkpoint.scores) == {"loss", "ppl", "bleu", "chrf"}
    assert 1.0 < checkpoint.scores["bleu"] < 99.0, "else nothing is compared"
    translate = [
        "translate",
        str(checkpoint.path),
        "--input",
        str(toy_text / "dev.en"),
        "--output",
        str(tmp_path / "hyp.de"),
        "--quiet",
        "--precision",
        "fp32",
    ]
    assert CliRunner().invoke(app, translate).exit_code == 0
    score = ["score", "--ref", str(toy_text / "dev.de"), "--bootstrap", "0", "--json", "--force", "--quiet", str(tmp_path / "hyp.de")]
    result = CliRunner().invoke(app, score)
    assert result.exit_code == 0, result.output
    scores = {entry["name"].lower(): entry["score"] for entry in json.loads(result.stdout)["systems"][0]["scores"]}
    assert scores["bleu"] == checkpoint.scores["bleu"]
    assert scores["chrf"] == checkpoint.scores["chrf"]


def test_each_side_has_its_own_vocabulary() -> None:
    """B26."""
    tokenizer = tokenizer_of_two()
    model = random_model(4, tokenizer=tokenizer)
    dev = DevSet(src_lines=["baki lo mu", "xazen"], tgt_lines=["NER STA", "TRI LOKI MU"])
    nll, num_tokens = dev_loss(model, tokenizer, dev, device=torch.device("cpu"), max_tokens=100)
    scores = score_pairs(model, tokenizer, dev.src_lines, dev.tgt_lines)
    assert nll == pytest.approx(-sum(score.log_prob for score in scores), rel=1e-5)
    assert num_tokens == sum(score.num_tokens for score in scores)


def test_processes_that_share_the_dev_set_get_the_same_result(trained: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """B56: 15 pairs on two processes; one has a pair more."""
    alone = measure(trained)
    first, second = Threads(2, monkeypatch).run(lambda world: measure(trained, world))
    assert first == second
    assert (first["bleu"], first["chrf"]) == (alone["bleu"], alone["chrf"])
    assert first["loss"] == pytest.approx(alone["loss"], rel=1e-6)


@pytest.mark.parametrize("function", ["dev_loss", "Translator", "corpus_scores"])
def test_what_fails_in_one_process_fails_in_all(trained: Trainer, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """C8: nobody waits for one that has nothing to give, and all know what it was."""
    real = getattr(module, function)

    def fail_in_one(*args: Any, **options: Any) -> Any:
        if threading.current_thread() in failing:
            raise ZeroDivisionError("by accident\nof ours")
        return real(*args, **options)

    def work(world: World) -> Any:
        if world.rank == 1:
            failing.append(threading.current_thread())
        return measure(trained, world)

    failing: list[threading.Thread] = []
    monkeypatch.setattr(module, function, fail_in_one)
    found = Threads(2, monkeypatch).run(work)
    assert [type(error) for error in found] == [ValidationFailedError] * 2
    assert {error.reason for error in found} == {"ZeroDivisionError: by accident"}
    assert all("in fail_in_one" in error.trace for error in found)


def test_a_request_to_stop_reaches_all_processes_between_two_batches(trained: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """B62: without waiting for the rest of the dev set."""
    batches: list[int] = []
    stops = [StopRequest(), StopRequest()]

    def count(*args: Any) -> Any:
        batches.append(1)
        stops[1].request(interrupted=True)
        return collate(*args)

    monkeypatch.setattr(module, "collate", count)
    found = Threads(2, monkeypatch).run(lambda world: measure(trained, world, stops[world.rank], max_tokens=1))
    assert [type(error) for error in found] == [ValidationStoppedError] * 2
    assert len(batches) <= 8 + 1, "the one that was not asked does its share of 8, the other one batch at most"
    assert all(stop.requested and stop.interrupted for stop in stops)


def test_a_request_to_stop_ends_the_translation(trained: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopRequest()
    texts: list[str] = []

    class Slow:
        def __init__(self, *_args: Any, **_options: Any) -> None: ...

        def translate(self, lines: Sequence[str]) -> Iterator[Translation]:
            for number, line in enumerate(lines):
                texts.append(line)
                stop.request(interrupted=False)
                yield Translation(line=number, text=line)

    monkeypatch.setattr(module, "Translator", Slow)
    with pytest.raises(ValidationStoppedError):
        measure(trained, stop=stop)
    assert len(texts) == 1


def test_the_shares_are_the_whole_dev_set() -> None:
    dev = DevSet(src_lines=list("abcdefg"), tgt_lines=list("ABCDEFG"))
    shares = [dev.share(World(rank=rank, local_rank=rank, size=3)) for rank in range(3)]
    assert [list(share.src_lines) for share in shares] == [list("adg"), list("be"), list("cf")]
    assert [list(share.tgt_lines) for share in shares] == [list("ADG"), list("BE"), list("CF")]


def test_the_loss_does_not_depend_on_the_batches(trained: Trainer) -> None:
    model, tokenizer, dev = trained.updater.model.eval(), trained.data.tokenizer, trained.data.dev
    one_by_one = dev_loss(model, tokenizer, dev, device=torch.device("cpu"), max_tokens=1)
    all_at_once = dev_loss(model, tokenizer, dev, device=torch.device("cpu"), max_tokens=100_000)
    assert one_by_one[0] == pytest.approx(all_at_once[0], rel=1e-5)
    assert one_by_one[1] == all_at_once[1] == sum(len(ids) + 1 for ids in tokenizer.encode(dev.tgt_lines, "tgt"))


@pytest.mark.parametrize(
    ("line", "what"),
    [("ein gro@@ ßes Haus", "subword marks"), ("▁ein ▁gro ßes ▁Haus", "subword marks"), ("das geht &apos;s", "HTML entities")],
)
def test_text_that_was_segmented_or_escaped_before_is_told(line: str, what: str) -> None:
    def warnings(lines: list[str]) -> list[str]:
        return scoring_warnings(DevSet(src_lines=lines, tgt_lines=lines), tgt_lang="de")

    (warning,) = warnings([line, "kurz"])
    assert f"target side holds {what}" in warning
    assert warnings(["ein großes Haus", "kurz"]) == []
    assert warnings([line, *["kurz"] * 40]) == [], "one such line may be about such marks"


def test_without_a_search_nothing_is_translated(trained: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Translator", None)
    assert measure(trained, search=None).keys() == {"loss", "ppl"}


def test_the_search_of_the_config_is_used(trained: Trainer) -> None:
    capped = measure(trained, search=SearchConfig(max_length_ratio=0.0, max_length_constant=1))
    assert capped["bleu"] < measure(trained)["bleu"] / 2


def test_the_target_language_chooses_the_tokenizer_of_bleu(trained: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    real = corpus_scores

    def spy(*args: Any, target_lang: str | None, **options: Any) -> Any:
        seen.append(target_lang)
        return real(*args, target_lang=target_lang, **options)

    monkeypatch.setattr(module, "corpus_scores", spy)
    measure(trained, tgt_lang="zh")
    measure(trained)
    assert seen == ["zh", None]


def test_long_lines_are_cut_for_the_loss_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention takes memory by the square of the length; `mtkit translate` and `mtkit score` cut sources as well."""
    monkeypatch.setattr(module, "MAX_SOURCE_LENGTH", 6)
    tokenizer = tokenizer_of_two()
    model = random_model(4, tokenizer=tokenizer)
    long, short = "baki lo mu xazen baki lo mu", "baki"
    assert len(tokenizer.encode([long], "src")[0]) > 6
    dev = DevSet(src_lines=[long, short], tgt_lines=["NER", "STA"])
    nll, _ = dev_loss(model, tokenizer, dev, device=torch.device("cpu"), max_tokens=100)
    scores = score_pairs(model, tokenizer, dev.src_lines, dev.tgt_lines, max_source_length=6)
    assert nll == pytest.approx(-sum(score.log_prob for score in scores), rel=1e-5)
    (warning,) = module.dev_set_warnings(dev, tokenizer)
    assert "1 pairs of the dev set have more than 6 tokens" in warning
    _, num_tokens = dev_loss(model, tokenizer, DevSet(src_lines=["baki"], tgt_lines=["NER STA " * 50]), device=torch.device("cpu"), max_tokens=100)
    assert num_tokens == 7


def test_pairs_that_are_left_out_are_told() -> None:
    """B61: else the dev BLEU is not that of `mtkit score` on the same files, and nobody knows why."""
    dev = DevSet.of([("baki", "NER"), ("", "STA"), ("lo", " "), ("mu", "TRI")])
    assert (dev.src_lines, dev.tgt_lines) == (["baki", "mu"], ["NER", "TRI"])
    assert module.dev_set_warnings(dev, tokenizer_of_two()) == [
        "2 of the 4 pairs of the dev set have a blank side and are left out: scores are of the others"
    ]
    assert module.dev_set_warnings(DevSet.of([("baki", "NER")]), tokenizer_of_two()) == []

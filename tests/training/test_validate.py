import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.decoding.translator import SearchConfig
from mtkit.distributed import World
from mtkit.evaluation.metrics import corpus_scores
from mtkit.training import validate as module
from mtkit.training.trainer import Trainer
from mtkit.training.validate import DevSet, dev_loss, validate

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


def measure(trainer: Trainer, world: World | None = None, **options: Any) -> dict[str, float]:
    settings: dict[str, Any] = {"search": SearchConfig(), "max_tokens": 200, "tgt_lang": None, **options}
    model = trainer.updater.model.eval()
    return validate(model, trainer.data.tokenizer, trainer.data.dev, device=torch.device("cpu"), world=world or World(), **settings)


def test_validation_equals_translate_and_score(trained: Trainer, toy_text: Path, tmp_path: Path) -> None:
    checkpoint = trained.store.manager.stored()[-1]
    assert set(checkpoint.scores) == {"loss", "ppl", "bleu", "chrf"}
    assert 1.0 < checkpoint.scores["bleu"] < 99.0, "else nothing is compared"
    translate = ["translate", str(checkpoint.path), "--input", str(toy_text / "dev.en"), "--output", str(tmp_path / "hyp.de"), "--quiet"]
    assert CliRunner().invoke(app, translate).exit_code == 0
    score = ["score", "--ref", str(toy_text / "dev.de"), "--bootstrap", "0", "--json", "--force", "--quiet", str(tmp_path / "hyp.de")]
    result = CliRunner().invoke(app, score)
    assert result.exit_code == 0, result.output
    scores = {entry["name"].lower(): entry["score"] for entry in json.loads(result.stdout)["systems"][0]["scores"]}
    assert scores["bleu"] == checkpoint.scores["bleu"]
    assert scores["chrf"] == checkpoint.scores["chrf"]


def test_processes_that_share_the_dev_set_get_the_same_result(trained: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = measure(trained)
    size = 2
    sums: list[list[float]] = []
    lines: list[list[str]] = []

    def take_sums(values: Sequence[float], *_: object) -> list[float]:
        sums.append(list(values))
        return list(values)

    def take_lines(texts: Sequence[str], *_: object) -> list[list[str]]:
        lines.append(list(texts))
        return [[*texts, ""]] * size

    for rank in range(size):
        with monkeypatch.context() as patched:
            patched.setattr(module, "all_reduce_sums", take_sums)
            patched.setattr(module, "all_gather_lines", take_lines)
            patched.setattr(module, "corpus_scores", lambda *_args, **_options: [])
            measure(trained, World(rank=rank, local_rank=rank, size=size))
    assert [len(texts) for texts in lines] == [8, 7]
    monkeypatch.setattr(module, "all_reduce_sums", lambda *_: [sum(values) for values in zip(*sums, strict=True)])
    monkeypatch.setattr(module, "all_gather_lines", lambda *_: lines)
    for rank in range(size):
        together = measure(trained, World(rank=rank, local_rank=rank, size=size))
        assert (together["bleu"], together["chrf"]) == (alone["bleu"], alone["chrf"])
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-6)


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

"""One small run of the whole toolkit through its command line, shared by all tests here (and by all processes of pytest-xdist)."""

import fcntl
import os

import pytest

from tests.e2e.toy import SIZES, Pipeline, run_mtkit, write_pairs

CONFIG = """
[data]
src_lang = "en"
tgt_lang = "de"
[tokenizer]
vocab_size = 350
type = "bpe"
[model]
d_model = 64
ffn_dim = 128
num_heads = 4
num_encoder_layers = 2
num_decoder_layers = 2
norm = "pre"
dropout = 0.0
[optim]
lr = 5e-3
warmup_steps = 50
schedule = "linear"
[batch]
batch_tokens = 512
max_tokens = 512
[training]
max_steps = 450
precision = "fp32"
[validation]
every_steps = 150
[checkpoint]
every_steps = 50
keep_last = 3
keep_best = 2
"""


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """The run, finished."""
    base = tmp_path_factory.getbasetemp()
    # The processes of pytest-xdist have directories of their own inside a common one; the first to come makes the run, the others wait for it.
    common = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    pipeline = Pipeline(root=common / "pipeline")
    with open(common / "pipeline.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (pipeline.root / "scores.json").exists():
            _make(pipeline)
    return pipeline


def _make(pipeline: Pipeline) -> None:
    write_pairs(pipeline.text, SIZES, seed=7)
    config = pipeline.root / "config.toml"
    config.write_text(CONFIG, "utf-8")
    train, dev, (test_src, test_ref) = pipeline.parallel("train"), pipeline.parallel("dev"), pipeline.parallel("test")
    run_mtkit("tokenizer", "train", *train, "--config", config, "--output", pipeline.tokenizer)
    run_mtkit("preprocess", "--train", *train, "--dev", *dev, "--tokenizer", pipeline.tokenizer, "--output", pipeline.shards, "--workers", "1")
    for words in (
        ("train", "--shards", pipeline.shards, "--config", config, "--output", pipeline.run, "--threads", "1"),
        ("average", pipeline.run, "--last", "3", "--output", pipeline.average),
        ("translate", pipeline.average, "--input", test_src, "--output", pipeline.hypothesis, "--threads", "1"),
    ):
        imports = run_mtkit(*words, environment={"PYTHONPROFILEIMPORTTIME": "1"}).stderr
        (pipeline.root / f"{words[0]}.imports").write_bytes(imports)
    scores = run_mtkit("score", "--ref", test_ref, pipeline.hypothesis, "--src", test_src, "--json", "--bootstrap", "0")
    (pipeline.root / "scores.json").write_bytes(scores.stdout)

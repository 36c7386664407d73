import time
from pathlib import Path

import pytest

from mtkit.benchmark.preprocess import bench_preprocess
from mtkit.data.filters import FilterConfig
from mtkit.data.preprocess import PreprocessConfig, preprocess
from tests.decoding.builders import sentences, tiny_tokenizer


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    for name, seed in (("src", 1), ("tgt", 2)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in sentences(300, seed=seed)))
    return tmp_path / "src", tmp_path / "tgt"


def test_lines_of_both_sides_over_the_time_of_it_all(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 2.0, 10.0, 14.0, 20.0, 23.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    num_bytes = sum(file.stat().st_size for file in files)
    (speed,) = bench_preprocess(files, tiny_tokenizer(), workers=[1], repeats=3)
    assert (speed.workers, speed.pairs) == (1, 300)
    assert (speed.lines_per_s.lowest, speed.lines_per_s.median, speed.lines_per_s.highest) == (150.0, 200.0, 300.0)
    assert speed.mb_per_s == pytest.approx(num_bytes / 1e6 / 3.0)
    assert next(now, None) is None, "six looks at the clock"


def test_numbers_of_workers_take_turns(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []
    real = preprocess

    def spy(*args: object, num_workers: int, output: Path, **options: object) -> object:
        turns.append(num_workers)
        assert not output.exists()
        return real(*args, num_workers=1, output=output, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("mtkit.benchmark.preprocess.preprocess", spy)
    speeds = bench_preprocess(files, tiny_tokenizer(), workers=[1, 2], repeats=2)
    assert turns == [1, 2, 1, 2]
    assert [(speed.workers, speed.lines_per_s.repeats) for speed in speeds] == [(1, 2), (2, 2)]


def test_filtered_pairs_were_read_all_the_same(files: tuple[Path, Path]) -> None:
    config = PreprocessConfig(filters=FilterConfig(max_length=20))
    (speed,) = bench_preprocess(files, tiny_tokenizer(), workers=[1], repeats=1, config=config)
    assert speed.pairs == 300

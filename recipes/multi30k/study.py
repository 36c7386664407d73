"""Print the scores of several variants of the recipe, each the mean over its seeds, as a table for the README.

    python -m recipes.multi30k.study OUT NAME...

Reads OUT/NAME/seed-N/TEST.lctok.json and, where there is one, TEST.cased.json, and the time in OUT/NAME/seed-N/metrics.jsonl.
"""

import json
import statistics
import sys
from pathlib import Path

from recipes.multi30k.results import KINDS, bleu

TESTS = ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")


def main(out: str, *names: str) -> None:
    """Print the table."""
    print("| variant | seeds | minutes | test2016, test2017, MSCOCO: lower-cased tokenized | cased |\n| --- | --- | --- | --- | --- |")
    for name in names:
        runs = [run for run in sorted((Path(out) / name).glob("seed-*")) if all((run / f"{test}.lctok.json").exists() for test in TESTS)]
        if not runs:
            print(f"| {name} | 0 | - | - | - |")
            continue
        scores = [", ".join(means(runs, kind)) for kind in reversed(KINDS)]
        print(f"| {name} | {len(runs)} | {statistics.mean(map(minutes, runs)):.1f} | {scores[0]} | {scores[1]} |")


def means(runs: list[Path], kind: str) -> list[str]:
    """The mean score of each test set, and how far the seeds lie apart; - = there is no such score."""
    if not all((run / f"{test}.{kind}.json").exists() for test in TESTS for run in runs):
        return ["-"]
    found = [[bleu(run / f"{test}.{kind}.json")["score"] for run in runs] for test in TESTS]
    return [f"{statistics.mean(scores):.2f} (±{(max(scores) - min(scores)) / 2:.2f})" for scores in found]


def minutes(run: Path) -> float:
    """How long a run trained and validated."""
    last = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return float(json.loads(last)["elapsed_s"]) / 60


if __name__ == "__main__":
    main(*sys.argv[1:])

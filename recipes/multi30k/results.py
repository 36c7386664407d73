"""Print the table of a run: for each test set the two BLEU scores and what was published, then the signatures.

    python results.py RUN TEST...

Reads RUN/TEST.lctok.json and, where there is one, RUN/TEST.cased.json, which `mtkit score --json` wrote.
"""

import json
import sys
from pathlib import Path
from typing import Any

PUBLISHED = {"test_2016_flickr": "41.02", "test_2017_flickr": "33.36", "test_2017_mscoco": "29.88"}
"""Wu et al. 2021, "Good for Misconceived Reasons", Transformer-Tiny, text only: lower-cased tokenized BLEU."""

KINDS = {"cased": "cased sacreBLEU             detokenized text, raw references", "lctok": "lower-cased tokenized BLEU  as the published scores"}
"""Of the scores. A model of lower-cased text has no cased one."""

ROW = "{:<18} {:>23} {:>31} {:>10}"


def main(run: str, *tests: str) -> None:
    """Print the table."""
    paths = {(test, kind): Path(run) / f"{test}.{kind}.json" for test in tests for kind in KINDS}
    scores = {key: bleu(path) for key, path in paths.items() if path.exists()}
    print(ROW.format("test set", "cased sacreBLEU", "lower-cased tokenized BLEU", "published"))
    for test in tests:
        print(ROW.format(test, *(cell(scores.get((test, kind))) for kind in KINDS), PUBLISHED.get(test, "-")))
    print()
    for kind, label in KINDS.items():
        if score := scores.get((tests[0], kind)):
            print(f"{label}: {score['signature']}")
    print("published                   Wu et al. 2021, Transformer-Tiny, text only, lower-cased tokenized BLEU")


def bleu(path: Path) -> dict[str, Any]:
    """The BLEU entry of a document of `mtkit score --json`."""
    scores: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["systems"][0]["scores"]
    return next(score for score in scores if score["metric"] == "bleu")


def cell(score: dict[str, Any] | None) -> str:
    """A score and its 95 % interval."""
    return "-" if score is None else f"{score['score']:.2f} [{score['low']:.2f}, {score['high']:.2f}]"


if __name__ == "__main__":
    main(*sys.argv[1:])

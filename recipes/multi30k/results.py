"""Print the table of a run: for each test set the two BLEU scores and what was published, then the signatures.

    python results.py RUN TEST...

Reads RUN/TEST.cased.json and RUN/TEST.lctok.json, which `mtkit score --json` wrote.
"""

import json
import sys
from pathlib import Path
from typing import Any

PUBLISHED = {"test_2016_flickr": "41.02", "test_2017_flickr": "33.36", "test_2017_mscoco": "29.88"}
"""Wu et al. 2021, "Good for Misconceived Reasons", Transformer-Tiny, text only: lower-cased tokenized BLEU."""

ROW = "{:<18} {:>23} {:>31} {:>10}"


def main(run: str, *tests: str) -> None:
    """Print the table."""
    scores = {test: (bleu(Path(run) / f"{test}.cased.json"), bleu(Path(run) / f"{test}.lctok.json")) for test in tests}
    print(ROW.format("test set", "cased sacreBLEU", "lower-cased tokenized BLEU", "published"))
    for test, (cased, lctok) in scores.items():
        print(ROW.format(test, cell(cased), cell(lctok), PUBLISHED.get(test, "-")))
    cased, lctok = next(iter(scores.values()))
    print(f"\ncased sacreBLEU             detokenized text, raw references: {cased['signature']}")
    print(f"lower-cased tokenized BLEU  as the published scores: {lctok['signature']}")
    print("published                   Wu et al. 2021, Transformer-Tiny, text only, lower-cased tokenized BLEU")


def bleu(path: Path) -> dict[str, Any]:
    """The BLEU entry of a document of `mtkit score --json`."""
    scores: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["systems"][0]["scores"]
    return next(score for score in scores if score["metric"] == "bleu")


def cell(score: dict[str, Any]) -> str:
    """A score and its 95 % interval."""
    return f"{score['score']:.2f} [{score['low']:.2f}, {score['high']:.2f}]"


if __name__ == "__main__":
    main(*sys.argv[1:])

import urllib.error
import urllib.request
from pathlib import Path
from typing import NoReturn

import pytest
import sacrebleu.utils
from sacrebleu.dataset import DATASETS

from mtkit.errors import MTKitError, UsageError
from mtkit.evaluation.testsets import load_test_set


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for sacreBLEU's downloads of wmt14/full, and no network."""

    def refuse(url: object, *_: object, **__: object) -> NoReturn:
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setattr(sacrebleu.utils, "SACREBLEU_DIR", str(tmp_path))
    directory = tmp_path / "wmt14" / "full"
    monkeypatch.setattr(DATASETS["wmt14/full"], "_outdir", str(directory))
    monkeypatch.setattr(DATASETS["wmt14/full"], "_rawdir", str(directory / "raw"))
    return directory


def put(cache: Path, *, source: list[str], reference: list[str]) -> None:
    """Lay down what a finished download leaves."""
    source_name, reference_name = DATASETS["wmt14/full"].langpairs["en-de"]
    (cache / "raw" / source_name).parent.mkdir(parents=True)
    (cache / "raw" / "wmt14_full.test-full.tgz").write_bytes(b"was unpacked")
    for name, root, lines in ((source_name, "srcset", source), (reference_name, "refset", reference)):
        segments = "".join(f'<seg id="{number}">{line}</seg>\n' for number, line in enumerate(lines, start=1))
        text = f'<{root} setid="newstest2014">\n<doc docid="a" genre="news" origlang="en">\n<p>\n{segments}</p>\n</doc>\n</{root}>\n'
        (cache / "raw" / name).write_text(text, encoding="utf-8")


def test_a_test_set_that_was_downloaded_before(cache: Path) -> None:
    put(cache, source=["One.", "Two more."], reference=["Eins.", "Zwei &quot;mehr&quot;."])
    found = load_test_set("wmt14/full", "en-de")
    assert (found.name, found.lang_pair) == ("wmt14/full", "en-de")
    assert list(found.source.lines) == ["One.", "Two more."]
    assert [list(text.lines) for text in found.references] == [["Eins.", "Zwei &quot;mehr&quot;."]]
    assert found.references[0].name == "reference 1 of wmt14/full en-de"


def test_without_a_network_the_message_says_what_to_do(cache: Path) -> None:
    with pytest.raises(MTKitError, match="the test set wmt14/full en-de cannot be loaded: .*no network in tests") as error:
        load_test_set("wmt14/full", "en-de")
    assert str(cache) in str(error.value.hint)
    assert error.value.exit_code == 1


def test_a_download_with_a_wrong_checksum(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(b"not a tarball"))
    with pytest.raises(MTKitError, match="cannot be loaded") as error:
        load_test_set("wmt14/full", "en-de")
    assert f"{cache}: remove it" in str(error.value.hint)


def test_damaged_files(cache: Path) -> None:
    put(cache, source=["One.", "Two."], reference=["Eins."])
    with pytest.raises(MTKitError, match="have 1, 2 lines"):
        load_test_set("wmt14/full", "en-de")


def test_an_unknown_name_or_language_pair() -> None:
    with pytest.raises(UsageError, match="no test set 'wmt14/ful'") as name:
        load_test_set("wmt14/ful", "en-de")
    assert "wmt14" in str(name.value.hint)
    with pytest.raises(UsageError, match="sacreBLEU knows no test set 'nothing-like-it'") as nothing:
        load_test_set("nothing-like-it", "en-de")
    assert "sacrebleu --list" in str(nothing.value.hint)
    with pytest.raises(UsageError, match="wmt14/full has no language pair 'en-xx'") as pair:
        load_test_set("wmt14/full", "en-xx")
    assert "en-de" in str(pair.value.hint)

import json
from collections.abc import Callable, Sequence

import pytest

from mtkit.errors import DataError
from mtkit.evaluation.checks import Finding, NamedLines, check_line_counts, find_mistakes, refuse
from mtkit.files import read_lines
from tests.helpers import shared_data

NOUNS = ["Hund", "Baum", "Mann", "Weg", "Tisch", "Wald", "Fluss", "Berg"]
SOURCE_NOUNS = ["dog", "tree", "man", "way", "table", "forest", "river", "mountain"]
REFS = [f"Der {first} sieht den {second}, aber nicht Nummer {index}." for index, first in enumerate(NOUNS) for second in NOUNS]
HYPS = [line.replace("aber", "doch") for line in REFS]
SOURCE = [f"The {first} sees the {second}, but not number {index}." for index, first in enumerate(SOURCE_NOUNS) for second in SOURCE_NOUNS]


def look(
    hyps: Sequence[str], refs: Sequence[str] = REFS, *, source: Sequence[str] | None = None, tokenize: str = "13a", lowercase: bool = False
) -> list[Finding]:
    named_source = NamedLines(name="src", lines=source) if source is not None else None
    return find_mistakes(
        [NamedLines(name="hyp", lines=hyps)], [NamedLines(name="ref", lines=refs)], source=named_source, tokenize=tokenize, lowercase=lowercase
    )


def tokenized(lines: Sequence[str]) -> list[str]:
    return [line.replace(",", " ,").replace(".", " .") for line in lines]


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def test_good_texts_have_no_findings() -> None:
    assert look(HYPS, source=SOURCE) == []
    assert look(["Mot !", "Mot : mot ?", "1.5, 2", ". . ."], ["Mot !", "Mots : mot ?", "1.5, 2", ". . ."]) == []


def test_the_real_systems_of_wmt22_have_none_but_one() -> None:
    data = shared_data("wmt22-en-de")
    hyps = [NamedLines(name=path.name, lines=read_lines(path)) for path in sorted(data.glob("hyp.*.de"))]
    refs = [NamedLines(name=path.name, lines=read_lines(path)) for path in sorted(data.glob("ref.*.de"))]
    source = NamedLines(name="src", lines=read_lines(data / "src.en"))
    finding = only(find_mistakes(hyps, refs, source=source))
    assert finding.message.startswith("hyp.Lan-Bridge.de: 229 of 2037 lines hold <unk>")
    assert not finding.is_certain
    assert only(find_mistakes([source], refs[:1])).message.startswith("src: shares 6% of its words with the same lines of ref.A.de, 0% with others")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(lambda line: line.replace("sieht", "sie@@ ht"), "subword marks", id="bpe"),
        pytest.param(lambda line: "▁" + line.replace(" ", " ▁"), "subword marks", id="sentencepiece"),
        pytest.param(lambda line: line + " <0xE2><0x82><0xAC>", "subword marks", id="byte fallback"),
        pytest.param(lambda line: line.replace("Nummer", "Nummer￭"), "subword marks", id="joiner"),
        pytest.param(lambda line: f'<seg id="1">{line}</seg>', "SGML", id="sgml"),
        pytest.param(lambda line: line.replace(",", " ,").replace(".", " ."), "looks tokenized", id="tokenized"),
        pytest.param(lambda line: line.replace("aber", "&quot;"), "HTML entities", id="entities"),
        pytest.param(str.lower, "is lower-cased", id="lower-cased"),
        pytest.param(lambda line: f"12\t1\t-0.337214\t{line}", "are entries of an n-best list or JSON", id="n-best of mtkit"),
        pytest.param(lambda line: f"12\t4\t\t{line}", "are entries of an n-best list or JSON", id="n-best without a score"),
        pytest.param(lambda line: f"12 ||| {line} ||| F0= -1.2 ||| -0.1", "are entries of an n-best list or JSON", id="n-best of Marian"),
        pytest.param(lambda line: f"H-12\t-0.3\t{line}", "are entries of an n-best list or JSON", id="output of fairseq"),
        pytest.param(lambda line: json.dumps({"line": 1, "text": line}), "are entries of an n-best list or JSON", id="JSON"),
        pytest.param(lambda line: f"{line}\t{line}", "lines hold a tab, as if it had columns", id="columns"),
        pytest.param(lambda line: " ", "all lines are blank", id="blank"),
    ],
)
@pytest.mark.parametrize("side", ["hyp", "ref"])
def test_a_damaged_side_is_refused(damage: Callable[[str], str], words: str, side: str) -> None:
    damaged = [damage(line) for line in REFS]
    findings = look(damaged, REFS) if side == "hyp" else look(REFS, damaged)
    certain = only([finding for finding in findings if finding.is_certain])
    assert certain.message.startswith(f"{side}: ")
    assert words in certain.message
    with pytest.raises(DataError, match=words) as error:
        refuse(findings)
    assert "--force" in str(error.value.hint)


def test_one_sgml_file_is_told_by_its_root() -> None:
    lines = ['<refset setid="newstest2014" srclang="any" trglang="de">', *REFS[1:]]
    assert only([finding for finding in look(HYPS, lines) if finding.is_certain]).message == "ref: is SGML or XML, not plain text"


def test_a_text_whose_umlauts_stayed_upper_case_is_lower_cased() -> None:
    lowered = [line.lower() if number % 12 else line for number, line in enumerate(HYPS)]
    assert only(look(lowered)).message == "hyp: is lower-cased, ref is not"
    assert look([line.lower() if number % 4 else line for number, line in enumerate(HYPS)]) == []


def test_a_tab_here_and_there_is_text() -> None:
    assert look([f"\t{line}" if number % 3 == 0 else line for number, line in enumerate(HYPS)]) == []
    few = look([f"{line}\t{line}" for line in HYPS[:5]], REFS[:5])
    assert [(finding.message, finding.is_certain) for finding in few] == [("hyp: 5 of 5 lines hold a tab, as if it had columns", False)]


def test_a_text_of_another_length_is_told() -> None:
    for lines, ratio in (([line[: len(line) // 2] for line in HYPS], "0.49"), ([f"{line} {line}" for line in HYPS], "2.02")):
        found = [finding for finding in look(lines) if "times the characters of ref" in finding.message]
        assert only(found).message == f"hyp: has {ratio} times the characters of ref"
        assert not only(found).is_certain
        assert not [finding for finding in look(lines[:9], REFS[:9]) if "times the characters" in finding.message], "of few lines it says nothing"


def test_a_list_of_records_is_named_before_the_line_counts() -> None:
    nbest = NamedLines(name="nbest", lines=[f"{number // 2 + 1}\t1\t-0.5\tEin Hund." for number in range(8)])
    with pytest.raises(DataError, match="^nbest: 8 of 8 lines are entries of an n-best list"):
        check_line_counts([NamedLines(name="ref", lines=["Ein Hund."] * 4), nbest])


def test_little_evidence_is_a_warning() -> None:
    assert not only(look([*HYPS[:-1], "Der ▁Hund."])).is_certain
    assert not only(look([*HYPS[:-1], "Der &quot;Hund&quot;."])).is_certain
    assert not any(finding.is_certain for finding in look(tokenized(HYPS[:3]), REFS[:3]))
    assert look(tokenized(HYPS[:3]), REFS[:3]) != []
    assert not any(finding.is_certain for finding in look([line.lower() for line in HYPS[:3]], REFS[:3]))
    refuse(look([*HYPS[:-1], "Der ▁Hund."]))


def test_some_blank_lines_and_control_tokens_are_warned_of() -> None:
    blank = only(look([*HYPS[:-2], "", "\u3000"]))
    assert blank.message == f"hyp: 2 of {len(HYPS)} lines are blank"
    assert not blank.is_certain
    assert "1 of 64 lines hold <unk>" in only(look([*HYPS[:-1], "Der <unk> sieht."])).message


def test_options_that_make_a_text_right() -> None:
    assert look([line.lower() for line in HYPS], lowercase=True) == []
    assert look(tokenized(HYPS), tokenized(REFS), tokenize="none") == []
    both = only(look(tokenized(HYPS), tokenized(REFS)))
    assert "BLEU tokenizes again (13a)" in both.message
    assert not both.is_certain


def test_a_text_that_is_the_source() -> None:
    untranslated = [finding for finding in look(SOURCE, REFS, source=SOURCE) if finding.is_certain]
    assert only(untranslated).message == "hyp: shares 100% of its words with the source src"
    wrong_reference = [finding for finding in look(HYPS, SOURCE, source=SOURCE) if finding.is_certain]
    assert only(wrong_reference).message == "ref: shares 100% of its words with the source src"
    half = [*SOURCE[:40], *HYPS[40:]]
    assert not only(look(half, source=SOURCE)).is_certain


def test_another_language_or_order() -> None:
    assert only(look([line.rsplit(" ", 1)[0] for line in SOURCE])).message == "hyp: shares 0% of its words with the same lines of ref, 0% with others"
    finding = only(look(HYPS[32:] + HYPS[:32]))
    assert "of its words with the same lines of ref" in finding.message
    assert not finding.is_certain
    russian = ["Собака видит дерево, но не номер."] * len(REFS)
    assert any(finding.message == "hyp: is in Cyrillic script, ref in Latin" for finding in look(russian))


def test_identical_texts_are_pointed_at() -> None:
    finding = only(look(REFS))
    assert finding.message == "hyp: is identical to a reference"
    assert not finding.is_certain


@pytest.mark.parametrize("line", ["猫坐在垫子上。", "ねこがすわっている。", "แมวนั่งบนเสื่อ"])
def test_a_script_without_spaces_needs_its_own_tokenizer(line: str) -> None:
    finding = only(look([line + "a"], [line]))
    assert "BLEU's tokenizer 13a splits at spaces" in finding.message
    assert look([line + "a"], [line], tokenize="char") == []


def test_each_system_and_reference_is_looked_at() -> None:
    good, bad = NamedLines(name="good", lines=HYPS), NamedLines(name="bad", lines=[line.lower() for line in HYPS])
    ref, bad_ref = NamedLines(name="ref", lines=REFS), NamedLines(name="bad ref", lines=tokenized(REFS))
    assert [finding.message.split(":")[0] for finding in find_mistakes([good, bad], [ref])] == ["bad"]
    assert [finding.message.split(":")[0] for finding in find_mistakes([good], [ref, bad_ref]) if finding.is_certain] == ["bad ref"]


def test_line_counts() -> None:
    three, two = NamedLines(name="three.de", lines=["a", "b", "c"]), NamedLines(name="two.de", lines=["a", "b"])
    check_line_counts([three, three])
    with pytest.raises(DataError, match="two.de has 2 lines, three.de has 3"):
        check_line_counts([three, two])
    with pytest.raises(DataError, match="none.de: is empty"):
        check_line_counts([three, NamedLines(name="none.de", lines=[])])
    with pytest.raises(DataError, match="none.de: is empty"):
        check_line_counts([NamedLines(name="none.de", lines=[])])


def test_a_tag_in_a_sentence_is_no_sgml() -> None:
    for place, line in ((0, "Nimm das <dataset>-Tag."), (25, "<dataset> ist ein Tag.")):
        hyps, refs = HYPS * 10, REFS * 10
        refs[place] = line
        assert not [finding for finding in look(hyps, refs) if "SGML" in finding.message]

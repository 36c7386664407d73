"""The corpus of the quickstart recipe as a whole; single sentences are in test_quickstart_grammar.py."""

import os
import random
import re
import subprocess
import sys
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtkit.errors import DataError
from mtkit.files import read_lines
from recipes.quickstart.generate import MIN_TRAINING_COUNT, Splits, generate, write
from recipes.quickstart.modifiers import ADJECTIVES
from recipes.quickstart.sentences import Composer, has_passive
from recipes.quickstart.verbs import TRANSITIVE
from tests.helpers import REPOSITORY

SIZES = {"train": 20_000, "dev": 500, "test": 500}


@pytest.fixture(scope="module")
def timed_splits() -> tuple[Splits, float]:
    """The corpus and the seconds of computing that it took."""
    start = time.process_time()
    return generate(train=SIZES["train"], dev=SIZES["dev"], test=SIZES["test"], seed=1), time.process_time() - start


@pytest.fixture(scope="module")
def splits(timed_splits: tuple[Splits, float]) -> Splits:
    return timed_splits[0]


@pytest.fixture(scope="module")
def german(splits: Splits) -> list[str]:
    return [de for pairs in splits.values() for _, de in pairs]


def word_forms(text: str) -> list[str]:
    return re.findall(r"[\w'-]+", text.lower())


def test_sizes_and_no_sentence_twice(splits: Splits) -> None:
    assert {name: len(pairs) for name, pairs in splits.items()} == SIZES
    english = [en for pairs in splits.values() for en, _ in pairs]
    assert len(set(english)) == len(english)


def test_the_whole_corpus_takes_less_than_five_seconds(timed_splits: tuple[Splits, float]) -> None:
    assert timed_splits[1] < 5


def test_no_dev_or_test_pair_was_seen_in_training(splits: Splits) -> None:
    train, dev, test = (set(pairs) for pairs in splits.values())
    assert not train & (dev | test)
    assert not dev & test


def test_no_english_sentence_has_two_translations(splits: Splits) -> None:
    """Over the corpus and over pairs of other seeds, where the same sentences come up again."""
    translations = dict(pair for pairs in splits.values() for pair in pairs)
    num_repeats = 0
    for seed in range(2, 4):
        composer = Composer(random.Random(seed))
        for english, german in (composer.pair() for _ in range(4_000)):
            num_repeats += english in translations
            assert translations.setdefault(english, german) == german, english
    assert num_repeats > 100


def test_no_passive_reads_like_an_adjective() -> None:
    """The bowl was broken: war kaputt, or wurde zerbrochen."""
    adjectives = {adjective.en for adjective in ADJECTIVES}
    assert not [verb.en for verb in TRANSITIVE if has_passive(verb) and verb.en_participle in adjectives]


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", ["dev", "test"])
def test_every_word_occurs_in_training(splits: Splits, side: int, name: str) -> None:
    counts = Counter(word for pair in splits["train"] for word in set(word_forms(pair[side])))
    rare = {word for pair in splits[name] for word in word_forms(pair[side]) if counts[word] < MIN_TRAINING_COUNT}
    assert not rare


def test_text_is_clean(splits: Splits) -> None:
    for pair in (pair for pairs in splits.values() for pair in pairs):
        for text in pair:
            assert unicodedata.is_normalized("NFC", text)
            assert re.fullmatch(r"[A-ZÄÖÜ][A-Za-zÄÖÜäöüß' ,-]*[a-zäöüß][.?!]", text), text
            assert not re.search(r"  | ,|,[^ ]|,$", text), text
        english, german = pair
        assert english[-1] == german[-1]
        assert "'" not in german
        assert "-" not in german


def test_lengths(splits: Splits) -> None:
    for side in (0, 1):
        lengths = [len(pair[side].split(" ")) for pairs in splits.values() for pair in pairs]
        assert min(lengths) >= 3
        assert max(lengths) <= 20
        assert 7 <= sum(lengths) / len(lengths) <= 9


def test_every_phenomenon_occurs_often(splits: Splits) -> None:
    patterns = {
        "subordinate clause": r", (weil|dass|obwohl|wenn|als|bevor|während|ob) ",
        "relative clause": r", (der|die|das|den|dem|denen) ",
        "zu-infinitive": r"\bzu \w+en[.,]",
        "zu inside a separable verb": r"\b(auf|aus|zu|an|ein|ab|mit|weg|vor|zurück)zu\w+en[.,]",
        "kein": r"\bkeine?[nmrs]? ",
        "nicht": r"\bnicht\b",
        "question": r"\?",
        "request": r"!",
        "number": r"und(zwanzig|dreißig|vierzig|fünfzig|sechzig|siebzig|achtzig|neunzig)\b",
        "passive": r"\b(wird|werden|wurde|wurden|worden)\b",
        "comparison": r"\b\w+er als ",
        "genitive": r"\bdes \w+(s|n)\b",
        "reflexive": r"\bsich\b",
    }
    for name, pattern in patterns.items():
        assert sum(bool(re.search(pattern, de)) for _, de in splits["train"]) >= 200, name


# --- an independent look at the German -------------------------------------------------------------------------------------------------

OPENERS = (
    r"(?:Gestern|Morgen|Heute|Bald|Am (?:Montag|Mittwoch|Freitag|Samstag|Sonntag|Morgen|Abend)|Im (?:Sommer|Winter)|In der Nacht|(?:Letzte|Nächste) "
    r"Woche|Letztes Jahr|Jeden (?:Tag|Morgen|Abend)|(?:Vor|In) \w+ (?:Tagen|Wochen|Jahren)|Um \w+ Uhr|(?:Wegen|Trotz) des Regens|Weil es \w+,|Warum"
    r"|Wann|Wohin)"
)
AUXILIARY = re.compile(
    r"(bin|bist|ist|sind|war|warst|waren|habe|hast|hat|haben|hatte|hattest|hatten|werde|wirst|wird|werden|wurde|wurden|kann|kannst|können|konnte"
    r"|konnten|muss|musst|müssen|musste|mussten|will|willst|wollen|wollte|wollten|darf|darfst|dürfen|durfte|durften|sollte|solltest|sollten"
    r"|möchte|möchtest|möchten)$"
)
NO_VERB = re.compile(
    r"(der|die|das|den|dem|des|ein|eine|einen|einem|einer|ich|du|er|sie|es|ihr|ihm|ihn|wir|nicht|nie|oft|(mein|dein|sein|unser|kein|dies|jed)\w*)$"
)


def test_the_verb_is_second(german: list[str]) -> None:
    """After what comes first there is a verb: an auxiliary, or a word in small letters that cannot be anything else."""
    num_checked = 0
    for text in german:
        if match := re.match(OPENERS + r" (\w+) (\w+)", text):
            num_checked += 1
            verb, after = match.groups()
            assert AUXILIARY.match(verb) or (verb.islower() and not NO_VERB.match(verb)), text
            if after in ("ich", "du", "wir"):
                assert agrees(verb, after), text
    assert num_checked > 1000


def agrees(verb: str, pronoun: str) -> bool:
    """Whether the ending of a verb suits ich, du or wir."""
    match pronoun:
        case "du":
            return bool(re.search(r"(st|zt|ßt)$", verb))
        case "wir":
            return verb.endswith("n") or verb == "sind"
        case _:
            return not re.search(r"(st|[aeiouäöü]n|ln|rn)$", verb) or verb == "bin"


def test_pronoun_subjects_agree_with_their_verb(german: list[str]) -> None:
    checked: Counter[str] = Counter()
    for text in german:
        if match := re.match(r"(Ich|Du|Wir) (\w+) ", text):
            pronoun, verb = match.group(1).lower(), match.group(2)
            checked[pronoun] += 1
            assert agrees(verb, pronoun), text
    assert min(checked[pronoun] for pronoun in ("ich", "du", "wir")) > 300


def subordinate_clauses(text: str) -> Iterator[str]:
    """What follows weil, dass and so on, up to the next comma or the end."""
    for match in re.finditer(r"(?:^|, )(?:weil|dass|obwohl|wenn|bevor|ob|Weil|Obwohl|Wenn|Bevor) ([^,.?!]+)[,.?!]", text):
        yield match.group(1)


def test_the_verb_is_last_in_subordinate_clauses(german: list[str]) -> None:
    num_checked = 0
    for text in german:
        for clause in subordinate_clauses(text):
            num_checked += 1
            *before, verb = clause.split(" ")
            assert verb.islower(), text
            # An auxiliary is finite wherever it stands, but for infinitives.
            assert not [word for word in before if AUXILIARY.match(word) and word not in ("haben", "werden")], text
            if before[0] in ("du", "wir"):
                assert agrees(verb, before[0]), text
    assert num_checked > 2000


def test_the_perfect_ends_in_its_participle(german: list[str]) -> None:
    num_checked = 0
    for text in german:
        # Without a participle, haben has an object, whose noun stands last.
        if match := re.match(r"(?:Ich habe|Du hast|Wir haben) (?!.*(?:,| und )).* ([a-zäöüß]+)\.$", text):
            num_checked += 1
            assert re.search(r"(ge\w*(t|en)|be\w+t|ver\w+(t|en)|er\w+t|zer\w+en|\w+iert|vorbereitet)$", match.group(1)), text
    assert num_checked > 100


# A gender for each of these nouns, from a dictionary. They have a plural of another form, so that in the singular a determiner goes before them.
GENDERS = {
    "m": "Mann Arzt König Gast Vater Bruder Sohn Freund Hund Fuchs Apfel Brief Roman Mantel Hut Zug Tisch Stuhl Baum Witz Bahnhof Garten Park Wald",
    "f": "Frau Mutter Tochter Katze Kuh Maus Banane Zwiebel Suppe Zeitung Jacke Lampe Tasche Uhr Rose Brücke Tür Reise Frage Küche Stadt Schule",
    "n": "Kind Pferd Ei Buch Hemd Kleid Auto Boot Radio Bild Bett Sofa Haus Konzert Lied Wort Problem Büro Kino Museum Dorf",
}
# For each gender what may stand before an adjective, and the ending that the adjective has then.
ENDINGS = {
    "m": {"der": "e", "den": "en", "dem": "en", "ein": "er", "einen": "en", "einem": "en"},
    "f": {"die": "e", "der": "en", "eine": "e", "einer": "en"},
    "n": {"das": "e", "dem": "en", "ein": "es", "einem": "en"},
}
EIN_WORD = re.compile(r"(?:ein|kein|mein|dein|sein|ihr|unser)(|e|en|em|er)$")
DIESER_WORD = re.compile(r"(?:dies|jed|welch|d)(er|e|ie|es|as|en|em)$")
ARTICLES = {"er": "der", "e": "die", "ie": "die", "es": "das", "as": "das", "en": "den", "em": "dem"}


def article_like(word: str) -> str | None:
    """The form of der or ein that stands for a determiner: meinem -> einem, dieser -> der; None for other words."""
    if match := EIN_WORD.match(word.lower()):
        return "ein" + match.group(1)
    if match := DIESER_WORD.match(word.lower()):
        return ARTICLES[match.group(1)]
    return None


def test_articles_and_endings_agree_with_the_gender_of_the_noun(german: list[str]) -> None:
    num_checked: Counter[str] = Counter()
    for gender, nouns in GENDERS.items():
        pattern = re.compile(rf"\b(\w+) (?:([a-zäöüß]+) )?({nouns.replace(' ', '|')})\b")
        for text in german:
            for match in pattern.finditer(text):
                first, adjective, _ = match.groups()
                if adjective is not None and article_like(adjective):
                    first, adjective = adjective, None
                article = article_like(first)
                if article is None or adjective in ("im", "ins", "am", "ans", "zum", "zur", "vom"):
                    continue
                num_checked[gender] += 1
                assert article in ENDINGS[gender], (match.group(), text)
                assert adjective is None or adjective.endswith(ENDINGS[gender][article]), (match.group(), text)
    assert min(num_checked.values()) > 2000


# --- the program -------------------------------------------------------------------------------------------------------------------------


def run(*options: str | Path, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "recipes.quickstart.generate", *(str(option) for option in options)]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False, capture_output=True, text=True, encoding="utf-8", timeout=120)


def test_equal_seeds_write_equal_bytes(tmp_path: Path) -> None:
    """Whatever the hash seed of Python, which changes the order of sets, and another seed gives another corpus."""
    files = {}
    for name, seed, hash_seed in (("a", "7", "1"), ("b", "7", "2"), ("c", "8", "1")):
        done = run("--output", tmp_path / name, "--train", "1500", "--dev", "20", "--test", "20", "--seed", seed, hash_seed=hash_seed)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        files[name] = {path.name: path.read_bytes() for path in sorted((tmp_path / name).iterdir())}
    assert list(files["a"]) == ["dev.de", "dev.en", "test.de", "test.en", "train.de", "train.en"]
    assert files["a"] == files["b"]
    assert all(files["a"][name] != files["c"][name] for name in files["a"])


def test_files_hold_one_sentence_a_line(tmp_path: Path, splits: Splits) -> None:
    write({"dev": splits["dev"]}, tmp_path)
    assert list(zip(read_lines(tmp_path / "dev.en"), read_lines(tmp_path / "dev.de"), strict=True)) == splits["dev"]


def test_too_small_a_training_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="5 training pairs hold too few words for a dev set of known words"):
        generate(train=5, dev=5, test=5, seed=1)
    done = run("--output", tmp_path / "data", "--train", "5", "--dev", "5", "--test", "5")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("value", ["0", "-3", "many"])
def test_sizes_are_positive_numbers(tmp_path: Path, value: str) -> None:
    done = run("--output", tmp_path / "data", "--train", value)
    assert done.returncode == 2
    assert value in done.stderr
    assert not (tmp_path / "data").exists()

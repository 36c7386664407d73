"""What the quickstart corpus knows of a word, and how its tables of words are read.

The tables (`nouns.py`, `verbs.py`, `modifiers.py`) are text, one lemma a line, so that they can be read and corrected like a dictionary:

    der Mann/Männer = man/men : tag tag        noun: gender by its article, plural; English singular and plural; tags
    auf|machen = open : tag tag                weak verb; `|` ends a separable prefix
    essen/isst/aß/gegessen = eat/ate/eaten     strong verb: infinitive, third person, simple past, participle; `ist` marks the auxiliary
    sich beeilen = hurry                       reflexive verb
    teuer/teurer = expensive/more expensive    adjective and comparative

A noun with `*` takes its plural form in every case but the nominative (der Junge, den Jungen); a plural of `-` means that there is none. In an
English verb, `~` marks where a pronoun goes (turn ~ off: turn it off, but turn off the lamp). What a table does not give follows the rules.
Tags are coarse meanings: a verb names the tags of the objects it takes, an adjective those of the nouns it suits.
"""

from dataclasses import dataclass
from typing import Literal

Gender = Literal["m", "f", "n"]
Case = Literal["nom", "acc", "dat", "gen"]
Tense = Literal["present", "past", "perfect", "future"]
Slot = Literal["time", "often", "already", "manner", "with", "place", "for", "to"]
"""What kind of adverbial it is, which decides where it stands in each language."""

_VOWELS = "aeiouäöü"
_INSEPARABLE = ("be", "er", "ver", "ge", "ent", "zer")


# Every word is made once, so that words are compared by identity, which makes them fast keys of dictionaries.
@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Noun:
    """A noun in both languages; `plural` and `en_plural` are empty for one without plural, `is_weak` is the n-declension."""

    singular: str
    plural: str
    gender: Gender
    is_weak: bool
    en: str
    en_plural: str
    tags: frozenset[str]


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Verb:
    """A verb in both languages.

    Attributes:
        infinitive: German, without the separable prefix, as are the next two.
        present3: Third person singular.
        preterite: First person singular.
        participle: With the prefix.
        prefix: The separable prefix, or empty.
        auxiliary: Of the perfect: `haben` or `sein`.
        is_reflexive: Whether it goes with `sich`.
        case: Of the object, or of what follows the preposition.
        preposition: German, of a prepositional object, or empty.
        en: English infinitive.
        en_past: English simple past.
        en_participle: English past participle.
        particle: The rest of the English verb (look for, turn off), or empty.
        is_split: Whether a pronoun goes before the particle.
        tags: Of the objects that make sense (of the subjects where there is no object), and marks such as `once` and `state`.
    """

    infinitive: str
    present3: str
    preterite: str
    participle: str
    prefix: str
    auxiliary: Literal["haben", "sein"]
    is_reflexive: bool
    case: Case
    preposition: str
    en: str
    en_past: str
    en_participle: str
    particle: str
    is_split: bool
    tags: frozenset[str]

    @property
    def lemma(self) -> str:
        """The German infinitive with its separable prefix marked: auf|machen."""
        return f"{self.prefix}|{self.infinitive}" if self.prefix else self.infinitive


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Adjective:
    """An adjective in both languages; the comparatives are empty where none is used."""

    de: str
    comparative: str
    en: str
    en_comparative: str
    tags: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Adverb:
    """A fixed adverbial (yesterday, every day, by train) and the tenses that it goes with."""

    de: str
    en: str
    slot: Slot
    tenses: tuple[Tense, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A noun that one can be at or go to, with the prepositions that it asks for (in the park, at the station; ins Kino, zum Bahnhof)."""

    noun: Noun
    en_at: str
    de_at: str
    de_to: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Modal:
    """A modal verb. In English it is an auxiliary (can, could), a form of be (is allowed to) or an ordinary verb (wants to).

    Attributes:
        infinitive: German, the key to its forms.
        kind: Which of the three it is in English.
        en: English present: the auxiliary, the participle after be, or the infinitive.
        en_past: The same for the past, or empty where none is used.
        link: What stands before the English infinitive: empty, `to` or `like to`.
    """

    infinitive: str
    kind: Literal["auxiliary", "be", "verb"]
    en: str
    en_past: str
    link: str


def rows(table: str) -> list[tuple[list[str], list[str], list[str]]]:
    """Split a table into its lines: German forms, English forms, tags."""
    result = []
    for line in table.strip().split("\n"):
        words, _, tags = line.partition(" : ")
        german, _, english = words.partition(" = ")
        result.append((german.split("/"), english.split("/"), tags.split()))
    return result


def make_noun(german: list[str], english: list[str], tags: list[str]) -> Noun:
    """Make a noun from the columns of a table."""
    genders: dict[str, Gender] = {"der": "m", "die": "f", "das": "n"}
    article, singular = german[0].split(" ")
    has_plural = german[1] != "-"
    return Noun(
        singular=singular.removesuffix("*"),
        plural=german[1] if has_plural else "",
        gender=genders[article],
        is_weak=singular.endswith("*"),
        en=english[0],
        en_plural=(english[1] if len(english) > 1 else add_s(english[0])) if has_plural else "",
        tags=frozenset(tags),
    )


def make_verb(german: list[str], english: list[str], tags: list[str], *, case: Case = "acc", preposition: str = "") -> Verb:
    """Make a verb from the columns of a table; forms that are not given are those of a weak verb."""
    is_reflexive = german[0].startswith("sich ")
    prefix, _, infinitive = german[0].removeprefix("sich ").rpartition("|")
    stem = verb_stem(infinitive)
    linking_e = "e" if needs_linking_e(stem) else ""
    auxiliary: Literal["haben", "sein"] = "haben"
    if len(german) == 4:
        _, present3, preterite, participle = german
        if participle.startswith("ist "):
            auxiliary, participle = "sein", participle.removeprefix("ist ")
    else:
        present3, preterite = f"{stem}{linking_e}t", f"{stem}{linking_e}te"
        participle = present3 if infinitive.startswith(_INSEPARABLE) or infinitive.endswith("ieren") else "ge" + present3
        auxiliary = "sein" if german[1:] == ["ist"] else "haben"
    first, _, particle = english[0].partition(" ")
    en_past = english[1] if len(english) > 1 else add_ed(first)
    en_participle = english[2] if len(english) > 2 else en_past
    return Verb(
        infinitive=infinitive,
        present3=present3,
        preterite=preterite,
        participle=prefix + participle,
        prefix=prefix,
        auxiliary=auxiliary,
        is_reflexive=is_reflexive,
        case=case,
        preposition=preposition,
        en=first,
        en_past=en_past,
        en_participle=en_participle,
        particle=particle.removeprefix("~ "),
        is_split=particle.startswith("~ "),
        tags=frozenset(tags),
    )


def make_adjective(german: list[str], english: list[str], tags: list[str]) -> Adjective:
    """Make an adjective from the columns of a table."""
    comparative, en_comparative = (german[1], english[1]) if len(german) > 1 else ("", "")
    return Adjective(de=german[0], comparative=comparative, en=english[0], en_comparative=en_comparative, tags=frozenset(tags))


def verb_stem(infinitive: str) -> str:
    """The German stem: kaufen -> kauf, lächeln -> lächel."""
    return infinitive.removesuffix("n") if infinitive.endswith(("eln", "ern")) else infinitive.removesuffix("en")


def needs_linking_e(stem: str) -> bool:
    """Whether an ending of consonants needs an e before it: arbeit-e-t, zeichn-e-t, but lern-t, wohn-t."""
    if stem.endswith(("t", "d")):
        return True
    if not stem.endswith(("m", "n")):
        return False
    is_silent_h = stem[-2] == "h" and stem[-3] in _VOWELS
    return stem[-2] not in _VOWELS + "lrmn" and not is_silent_h


def add_s(word: str) -> str:
    """Add the -s of the English plural and of the third person."""
    if word.endswith(("s", "x", "z", "ch", "sh")):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "s"


def add_ed(word: str) -> str:
    """Add the -ed of the regular English past; a doubled consonant has to be given in the table."""
    if word.endswith("e"):
        return word + "d"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ied"
    return word + "ed"

"""What a sentence says, before it is worded in either language: phrases, adverbials and clauses.

`english.py` and `german.py` word the same tree. Whatever decides the German wording can be read off the English one, so that every English
sentence has exactly one German translation; `you` is always `du`.
"""

import re
from dataclasses import dataclass
from typing import Literal

from recipes.quickstart.lexicon import Adjective, Adverb, Case, Gender, Modal, Noun, Slot, Tense, Verb

SentencePair = tuple[str, str]
"""The English sentence and its German translation."""

Agreement = Literal["I", "you", "he", "we", "they"]
"""Person and number of a finite verb; `he` is the third person singular, `they` the third person plural."""

PersonalPronoun = Literal["I", "you", "he", "she", "it", "we", "they"]
"""A personal pronoun by its English subject form."""

GenderKey = Literal["m", "f", "n", "p"]
"""Gender in the singular; `p` is the plural, which has none in German."""

Determiner = Literal["the", "a", "none", "this", "every", "all", "many", "some", "which", "how many", "my", "your", "his", "her", "our", "their"]
"""`a` is for the singular; `none` is a bare plural, a bare noun without plural, or a number alone."""

POSSESSIVES: tuple[Determiner, ...] = ("my", "your", "his", "her", "our", "their")
_DOUBLE_COMMA = re.compile(r",(?=[,.?!])")
_INDEFINITE: tuple[Determiner, ...] = ("a", "none", "many", "some", "how many")


@dataclass(frozen=True, kw_only=True, slots=True)
class NounPhrase:
    """A noun with what goes with it.

    Attributes:
        noun: The noun.
        determiner: Article, possessive or quantifier. It is `the` for a phrase with an owner.
        count: A number of two or more, for a plural.
        adjectives: Before the noun.
        is_plural: Singular or plural.
        owner: A genitive: the teacher's car, das Auto des Lehrers.
        relative: A relative clause, whose subject or object is a `Relative`.
    """

    noun: Noun
    determiner: Determiner = "the"
    count: int = 0
    adjectives: tuple[Adjective, ...] = ()
    is_plural: bool = False
    owner: "NounPhrase | Name | None" = None
    relative: "Clause | None" = None

    @property
    def key(self) -> GenderKey:
        """Gender, or the plural."""
        return "p" if self.is_plural else self.noun.gender

    @property
    def is_definite(self) -> bool:
        """Whether it says which ones."""
        return self.determiner not in _INDEFINITE


@dataclass(frozen=True, kw_only=True, slots=True)
class Name:
    """A first name."""

    text: str
    gender: Gender


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two phrases with `and`."""

    first: NounPhrase | Name
    second: NounPhrase | Name


@dataclass(frozen=True, kw_only=True, slots=True)
class Pronoun:
    """A personal pronoun by its English subject form; `it` takes its German gender from the noun that it stands for."""

    en: PersonalPronoun
    gender: Gender = "n"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionWord:
    """The phrase that a question asks for."""

    en: Literal["who", "what"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Relative:
    """The relative pronoun: gender and number of its noun, and whether that is a person (who) or not (that)."""

    key: GenderKey
    is_person: bool


Phrase = NounPhrase | Name | Pair | Pronoun | QuestionWord | Relative


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepositional:
    """A preposition in both languages with its phrase, as an adverbial or as what is said of the subject."""

    en: str
    de: str
    case: Case
    phrase: Phrase
    slot: Slot = "place"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """An adjective said of the subject, perhaps compared: tired, bigger than the cat, as big as the cat."""

    adjective: Adjective
    degree: Literal["positive", "comparative", "equal"] = "positive"
    standard: Phrase | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A number with its unit, said of the subject: thirty years old, twenty euros."""

    count: int
    unit: Literal["years old", "euros"]


Adverbial = Adverb | Prepositional
Front = Literal["subject", "time", "place", "object"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Clause:
    """A verb with its subject and everything that depends on it.

    Attributes:
        subject: Of an infinitive too, where it is not worded.
        verb: In German, with its government.
        tense: Present, past (Präteritum), perfect or future.
        modal: A modal verb; tense is then present or past.
        is_passive: The subject is what the action is done to; `agent` is who does it.
        is_negated: `not`, which is `kein` in German before an indefinite object.
        recipient: The indirect object, dative in German.
        object: The direct or prepositional object.
        agent: Who does it in the passive.
        predicate: What is said of the subject, with `be` or `cost`.
        adverbials: Of any kind, at most one of each slot.
        front: What comes first in a main clause.
    """

    subject: Phrase
    verb: Verb
    tense: Tense = "present"
    modal: Modal | None = None
    is_passive: bool = False
    is_negated: bool = False
    recipient: Phrase | None = None
    object: Phrase | None = None
    agent: Phrase | None = None
    predicate: Comparison | Measure | Prepositional | None = None
    adverbials: tuple[Adverbial, ...] = ()
    front: Front = "subject"

    def adverbial(self, slot: Slot) -> Adverbial | None:
        """The adverbial of one kind."""
        for adverbial in self.adverbials:
            if adverbial.slot == slot:
                return adverbial
        return None


def agreement(phrase: Phrase) -> Agreement:
    """Person and number of the verb that has this subject."""
    match phrase:
        case Pronoun(en="I" | "you" | "we" | "they" as person):
            return person
        case Pair() | NounPhrase(is_plural=True) | Relative(key="p"):
            return "they"
        case _:
            return "he"


def finish(en: str, de: str, mark: str) -> SentencePair:
    """Make a sentence of each side: a capital first letter, a mark at the end, one comma where two meet."""
    return _sentence(en, mark), _sentence(de, mark)


def _sentence(text: str, mark: str) -> str:
    text = _DOUBLE_COMMA.sub("", text + mark)
    return text[0].upper() + text[1:]

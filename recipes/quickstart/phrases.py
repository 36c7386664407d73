"""Chooses phrases at random: who does something and what it is done to."""

import dataclasses
import random
from collections.abc import Sequence
from typing import TypeVar

from recipes.quickstart.grammar import POSSESSIVES, Determiner, Name, NounPhrase, Pair, PersonalPronoun, Phrase, Pronoun
from recipes.quickstart.lexicon import Adjective, Gender, Noun, Verb
from recipes.quickstart.modifiers import ADJECTIVES
from recipes.quickstart.nouns import NAMES, NOUNS

Item = TypeVar("Item")
Word = TypeVar("Word", bound=Noun | Verb | Adjective)

_NUM_CANDIDATES = 3
_PERSONS: dict[PersonalPronoun, float] = {"I": 3, "you": 3, "he": 2, "she": 2, "we": 1.5, "they": 1.5}
_FIRST_PERSONS = ("I", "we")
_GENDERS: dict[str, Gender] = {"m": "m", "f": "f"}


class Phrases:
    """A source of random phrases.

    Args:
        rng: All randomness comes from it.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._counts: dict[Noun | Verb | Adjective, int] = {}
        self._nouns: dict[frozenset[str], list[Noun]] = {}
        self._suiting = {noun: [adjective for adjective in ADJECTIVES if adjective.tags & noun.tags] for noun in NOUNS}

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def nouns(self, tags: frozenset[str]) -> list[Noun]:
        """All nouns that have one of these tags, in the order of the tables."""
        if tags not in self._nouns:
            self._nouns[tags] = [noun for noun in NOUNS if noun.tags & tags]
        return self._nouns[tags]

    def noun(self, *tags: str) -> Noun:
        """A noun that has one of these tags."""
        return self.pick(self.nouns(frozenset(tags)))

    def pick(self, words: Sequence[Word]) -> Word:
        """One of the words, preferring those that were chosen seldom so far, so that few words stay rare."""
        candidates = [self.rng.choice(words) for _ in range(_NUM_CANDIDATES)]
        rarest = min(candidates, key=lambda word: self._counts.get(word, 0))
        self._counts[rarest] = self._counts.get(rarest, 0) + 1
        return rarest

    def choose(self, weighted: dict[Item, float]) -> Item:
        """One of the keys, as often as its weight says."""
        left = self.rng.random() * sum(weighted.values())
        for item, weight in weighted.items():
            left -= weight
            if left < 0:
                return item
        return next(reversed(weighted))

    def adjectives(self, noun: Noun, probability: float) -> tuple[Adjective, ...]:
        """No adjective or one that suits the noun."""
        suiting = self._suiting[noun]
        if not suiting or not self.chance(probability):
            return ()
        adjective = self.pick(suiting)
        return () if "state" in adjective.tags and self.chance(0.6) else (adjective,)

    def suiting(self, noun: Noun, tag: str | None = None) -> Sequence[Adjective]:
        """The adjectives that suit a noun, or those among them that have a tag too."""
        return [adjective for adjective in self._suiting[noun] if tag is None or tag in adjective.tags]

    # --- people ---------------------------------------------------------------------------------------------------------------------------

    def pronoun(self) -> Pronoun:
        """A personal pronoun for people."""
        return Pronoun(en=self.choose(_PERSONS))

    def name(self) -> Name:
        """A first name."""
        text = self.rng.choice(list(NAMES))
        return Name(text=text, gender=_GENDERS[NAMES[text]])

    def subject(self, *, is_definite: bool = False) -> Phrase:
        """Somebody who does something."""
        match self.choose({"noun": 50, "pronoun": 36, "name": 10, "pair": 4}):
            case "pronoun":
                return self.pronoun()
            case "name":
                return self.name()
            case "pair":
                return self._pair()
            case _:
                return self.being("person", is_definite=is_definite)

    def _pair(self) -> Pair:
        first, relation = self.name(), self.noun("relation")
        second: Name | NounPhrase = self.name()
        if second == first or self.chance(0.4):
            second = NounPhrase(noun=relation, determiner=self.rng.choice(POSSESSIVES))
        return Pair(first=first, second=second)

    def being(self, *tags: str, is_definite: bool = False, adjective: float = 0.2) -> NounPhrase:
        """A person or an animal as a noun phrase."""
        noun = self.noun(*tags)
        weights: dict[Determiner, float] = {"the": 60, "this": 8}
        owner: Name | None = None
        if "relation" in noun.tags:
            weights = {"the": 5, **dict.fromkeys(POSSESSIVES, 12)}
            owner = self.name() if self.chance(0.1) else None
        elif not is_definite:
            weights |= {"a": 18, "every": 4}
        if owner is not None:
            return NounPhrase(noun=noun, owner=owner)
        if "only" in noun.tags or not self.chance(0.22):
            return NounPhrase(noun=noun, determiner=self.choose(weights), adjectives=self.adjectives(noun, adjective))
        weights = {det: weight for det, weight in weights.items() if det not in ("a", "every")}
        if not is_definite and "relation" not in noun.tags:
            weights |= {"many": 12, "some": 12, "all": 10, "none": 20}
        determiner = self.choose(weights)
        count = self.small_number() if determiner == "none" else 0
        return NounPhrase(noun=noun, determiner=determiner, count=count, is_plural=True, adjectives=self.adjectives(noun, adjective))

    def person_as_object(self, tags: frozenset[str], subject: Phrase, *, is_definite: bool = False) -> Phrase:
        """Somebody to whom something is done by the subject: never the subject itself."""
        people = frozenset(tags) & {"person", "relation"}
        kind = self.choose({"noun": 66, "pronoun": 24, "name": 10})
        if kind == "pronoun":
            pronoun = self.pronoun()
            while pronoun == subject or (isinstance(subject, Pronoun) and subject.en in _FIRST_PERSONS and pronoun.en in _FIRST_PERSONS):
                pronoun = self.pronoun()
            return pronoun
        if kind == "name" and "person" in people:
            name = self.name()
            if name not in (subject, *((subject.first, subject.second) if isinstance(subject, Pair) else ())):
                return name
        return self.being(*sorted(people), is_definite=is_definite)

    # --- things ---------------------------------------------------------------------------------------------------------------------------

    def small_number(self) -> int:
        """Two to twelve mostly, else up to ninety-nine."""
        return self.rng.randint(2, 12) if self.chance(0.75) else self.rng.randint(13, 99)

    def thing(self, *tags: str, is_definite: bool = False, adjective: float = 0.35, is_plain: bool = False) -> NounPhrase:
        """A thing, or an animal that something is done to.

        Args:
            tags: The noun has one of these.
            is_definite: Only definite phrases.
            adjective: Probability of an adjective.
            is_plain: Neither number nor quantifier, so that it can be negated.
        """
        return self.with_noun(self.noun(*tags), is_definite=is_definite, adjective=adjective, is_plain=is_plain)

    def with_noun(self, noun: Noun, *, is_definite: bool = False, adjective: float = 0.35, is_plain: bool = False) -> NounPhrase:
        """The same with a given noun."""
        weights: dict[Determiner, float] = dict.fromkeys(POSSESSIVES, 2.5) | {"the": 40, "this": 8}
        is_mass = not noun.plural
        is_plural = not is_mass and self.chance(0.85 if "pair" in noun.tags else 0.25)
        if not is_definite:
            if is_mass:
                weights["none"] = 40
            elif is_plural:
                weights |= {"none": 24} if is_plain else {"none": 50, "many": 8, "some": 8, "all": 4}
            else:
                weights["a"] = 34
        determiner = self.choose(weights)
        count = 0
        if determiner == "none" and is_plural and not is_plain and self.chance(0.6):
            count = self.small_number()
        phrase = NounPhrase(noun=noun, determiner=determiner, count=count, is_plural=is_plural, adjectives=self.adjectives(noun, adjective))
        if determiner == "the" and not phrase.adjectives and self.chance(0.18):
            return dataclasses.replace(phrase, owner=self.owner())
        return phrase

    def owner(self) -> NounPhrase | Name:
        """Whose it is."""
        if self.chance(0.4):
            return self.name()
        noun = self.noun("person")
        return NounPhrase(noun=noun, determiner=self.rng.choice(POSSESSIVES) if "relation" in noun.tags else "the")


def pronoun_for(value: Phrase) -> Pronoun | None:
    """The pronoun that takes up a subject, or None where it would not be clear."""
    match value:
        case Pronoun():
            return value
        case Name():
            return Pronoun(en="he" if value.gender == "m" else "she")
        case Pair() | NounPhrase(is_plural=True):
            return Pronoun(en="they")
        case NounPhrase(determiner="every"):
            return None
        case NounPhrase(noun=noun) if "person" in noun.tags and (noun.gender != "n" or "female" in noun.tags):
            return Pronoun(en="he" if noun.gender == "m" else "she")
        case _:
            return None

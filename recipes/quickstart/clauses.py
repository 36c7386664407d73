"""Chooses clauses at random: what happens, and how things are."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from recipes.quickstart import english, german
from recipes.quickstart.grammar import (
    POSSESSIVES,
    Adverbial,
    Clause,
    Comparison,
    Determiner,
    Front,
    Measure,
    NounPhrase,
    Pair,
    Phrase,
    Prepositional,
    Pronoun,
    agreement,
)
from recipes.quickstart.lexicon import Adverb, Modal, Tense, Verb
from recipes.quickstart.modifiers import AT_HOME, CAUSES, DOUBTS, HABITS, HOME, MANNERS, PERFECTS, RIDES, TIMES, WHERE_THINGS_LIE
from recipes.quickstart.nouns import CITIES, PLACES
from recipes.quickstart.phrases import Phrases
from recipes.quickstart.verbs import (
    BE,
    COST,
    DATIVE,
    GIVING,
    HAVE,
    INTRANSITIVE,
    MODALS,
    MOVING,
    PREPOSITIONAL,
    PUT,
    STAYING,
    TRANSITIVE,
)

ALL_TENSES: tuple[Tense, ...] = ("present", "past", "perfect", "future")
SIMPLE_TENSES: tuple[Tense, ...] = ("present", "past")
_TENSE_WEIGHTS: dict[Tense, float] = {"present": 38, "past": 28, "perfect": 20, "future": 14}

_DONE_ANYWHERE = ("lesen", "essen", "trinken", "treffen", "verlieren", "finden", "sehen", "suchen", "kochen", "fragen", "zeichnen")
_GOES_WITH_FRIENDS = ("tanzen", "singen", "arbeiten", "essen", "trinken", "kochen", "besuchen", "fern|sehen", "ein|kaufen", "frühstücken", "wohnen")
_DONE_FOR_OTHERS = ("kaufen", "bestellen", "kochen", "backen", "aus|suchen", "bauen")
_TAKES_A_MOMENT = (
    "auf|stehen",
    "auf|wachen",
    "ein|schlafen",
    "an|kommen",
    "ab|fahren",
    "zurück|kommen",
    "frühstücken",
    "an|rufen",
    "setzen",
    "beeilen",
)


def may_use(verb: Verb, tense: Tense, subject: Phrase) -> bool:
    """Whether a verb is used in a tense with this subject.

    Not where the English past looks like the present (they read), not where German avoids the form (du kauftest), and not where the meaning
    asks for another tense.
    """
    who = agreement(subject)
    if tense == "past":
        if who == "you" and verb not in (BE, HAVE):
            return False
        return verb.en_past != verb.en or who == "he"
    if tense == "present":
        return "once" not in verb.tags
    return "state" not in verb.tags


class Clauses:
    """A source of random clauses.

    Args:
        phrases: Where their phrases come from; all randomness is its.
    """

    def __init__(self, phrases: Phrases) -> None:
        self.phrases = phrases
        self.rng = phrases.rng
        self._people_verbs = [verb for verb in INTRANSITIVE if "person" in verb.tags]

    # --- events ---------------------------------------------------------------------------------------------------------------------------

    def event(self, *, subject: Phrase | None = None, tenses: tuple[Tense, ...] = ALL_TENSES, is_negatable: bool = False) -> Clause:
        """Somebody does something, without adverbials, in one of the tenses.

        Args:
            subject: Who does it; anybody if None.
            tenses: The tenses to choose from.
            is_negatable: Only phrases that can stand in a negated clause.
        """
        kinds: dict[Callable[[Phrase, bool], Clause], float] = {
            self.transitive: 46,
            self._intransitive: 17,
            self._dative: 9,
            self._prepositional: 11,
            self._giving: 9,
            self._moving: 9,
            self._staying: 5,
            self._having: 5,
            self._putting: 6,
        }
        while True:
            who = subject if subject is not None else self.phrases.subject(is_definite=is_negatable)
            clause = self.phrases.choose(kinds)(who, is_negatable)
            if (tensed := self.tensed(clause, tenses)) is not None:
                return tensed

    def tensed(self, clause: Clause, tenses: tuple[Tense, ...]) -> Clause | None:
        """The clause in one of the tenses that its verb and subject allow, or None."""
        allowed = {tense: _TENSE_WEIGHTS[tense] for tense in tenses if may_use(clause.verb, tense, clause.subject)}
        return dataclasses.replace(clause, tense=self.phrases.choose(allowed)) if allowed else None

    def transitive(self, subject: Phrase, is_negatable: bool) -> Clause:
        """Somebody does something to something or somebody."""
        verb = self.phrases.pick(TRANSITIVE)
        noun = self.phrases.pick(self.phrases.nouns(verb.tags))
        if "person" in noun.tags:
            return Clause(subject=subject, verb=verb, object=self.phrases.person_as_object(verb.tags, subject, is_definite=is_negatable))
        return Clause(subject=subject, verb=verb, object=self.phrases.with_noun(noun, is_plain=is_negatable))

    def _intransitive(self, subject: Phrase, is_negatable: bool) -> Clause:
        return Clause(subject=subject, verb=self.phrases.pick(self._people_verbs))

    def _dative(self, subject: Phrase, is_negatable: bool) -> Clause:
        verb = self.phrases.pick(DATIVE)
        return Clause(subject=subject, verb=verb, object=self.phrases.person_as_object(verb.tags, subject, is_definite=True))

    def _prepositional(self, subject: Phrase, is_negatable: bool) -> Clause:
        verb = self.phrases.pick(PREPOSITIONAL)
        noun = self.phrases.pick(self.phrases.nouns(verb.tags))
        if "person" in noun.tags:
            return Clause(subject=subject, verb=verb, object=self.phrases.person_as_object(verb.tags, subject, is_definite=is_negatable))
        return Clause(subject=subject, verb=verb, object=self.phrases.with_noun(noun, is_definite=True))

    def _giving(self, subject: Phrase, is_negatable: bool) -> Clause:
        verb = self.phrases.pick(GIVING)
        recipient = self.phrases.person_as_object(frozenset({"person"}), subject, is_definite=True)
        return Clause(subject=subject, verb=verb, recipient=recipient, object=self.phrases.thing(*sorted(verb.tags), is_plain=is_negatable))

    def _moving(self, subject: Phrase, is_negatable: bool) -> Clause:
        verb = self.phrases.pick(MOVING)
        adverbials: list[Adverbial] = [self.destination(verb)]
        if verb.en == "travel" and self.phrases.chance(0.6):
            adverbials.append(self.rng.choice(RIDES))
        elif self.phrases.chance(0.2):
            adverbials.append(self.companion(subject))
        return Clause(subject=subject, verb=verb, adverbials=tuple(adverbials))

    def _staying(self, subject: Phrase, is_negatable: bool) -> Clause:
        verb = self.phrases.pick([verb for verb in STAYING if "person" in verb.tags])
        if "seat" in verb.tags:
            place = self.place_on("seat")
        elif verb.en == "stay" and self.phrases.chance(0.5):
            return Clause(subject=subject, verb=verb, adverbials=(AT_HOME,))
        else:
            place = self.place()
        return Clause(subject=subject, verb=verb, adverbials=(place,))

    def _having(self, subject: Phrase, is_negatable: bool) -> Clause:
        noun = self.phrases.noun(*sorted(HAVE.tags - {"state"}))
        phrase = self.phrases.with_noun(noun, is_plain=is_negatable, adjective=0.4)
        if phrase.owner is not None or phrase.determiner in POSSESSIVES or phrase.determiner in ("the", "this", "all"):
            determiner: Determiner = "none" if phrase.is_plural or not noun.plural else "a"
            count = self.phrases.small_number() if phrase.is_plural and not is_negatable else 0
            phrase = dataclasses.replace(phrase, determiner=determiner, count=count, owner=None)
        return Clause(subject=subject, verb=HAVE, object=phrase)

    def _putting(self, subject: Phrase, is_negatable: bool) -> Clause:
        target = self.phrases.thing("thing", "reading", "clothes", is_plain=is_negatable, adjective=0.2)
        if self.phrases.chance(0.3):
            where = Prepositional(en="in", de="in", case="acc", phrase=self._surface("container"), slot="to")
        else:
            en = self.rng.choice(list(WHERE_THINGS_LIE))
            where = Prepositional(en=en, de=WHERE_THINGS_LIE[en], case="acc", phrase=self._surface("surface"), slot="to")
        return Clause(subject=subject, verb=PUT, object=target, adverbials=(where,))

    # --- places ---------------------------------------------------------------------------------------------------------------------------

    def _surface(self, tag: str) -> NounPhrase:
        noun = self.phrases.noun(tag)
        determiners: dict[Determiner, float] = {"the": 8, "my": 1, "this": 1}
        return NounPhrase(noun=noun, determiner=self.phrases.choose(determiners), adjectives=self.phrases.adjectives(noun, 0.2))

    def place_on(self, tag: str) -> Prepositional:
        """On, under or behind a piece of furniture."""
        en = "on" if tag == "seat" else self.rng.choice(list(WHERE_THINGS_LIE))
        return Prepositional(en=en, de=WHERE_THINGS_LIE[en], case="dat", phrase=self._surface(tag))

    def place(self) -> Prepositional:
        """Somewhere that one can be."""
        place = self.rng.choice(PLACES)
        determiners: dict[Determiner, float] = {"the": 8, "a": 1, "this": 1}
        phrase = NounPhrase(noun=place.noun, determiner=self.phrases.choose(determiners), adjectives=self.phrases.adjectives(place.noun, 0.2))
        return Prepositional(en=place.en_at, de=place.de_at, case="dat", phrase=phrase)

    def destination(self, verb: Verb) -> Adverbial:
        """Somewhere that one can go."""
        if "city" in verb.tags and ("place" not in verb.tags or self.phrases.chance(0.4)):
            en = self.rng.choice(list(CITIES))
            return Adverb(en=f"to {en}", de=f"nach {CITIES[en]}", slot="to")
        match self.phrases.choose({"place": 12, "home": 2, "event": 3, "person": 2}):
            case "home":
                return HOME
            case "event":
                return Prepositional(en="to", de="zu", case="dat", phrase=NounPhrase(noun=self.phrases.noun("attended")), slot="to")
            case "person":
                return Prepositional(en="to", de="zu", case="dat", phrase=self.phrases.being("person", is_definite=True), slot="to")
        place = self.rng.choice(PLACES)
        phrase = NounPhrase(noun=place.noun, adjectives=self.phrases.adjectives(place.noun, 0.2))
        return Prepositional(en="to", de=place.de_to, case="dat" if place.de_to == "zu" else "acc", phrase=phrase, slot="to")

    def companion(self, subject: Phrase) -> Prepositional:
        """With somebody who is not the subject."""
        while True:
            other: Phrase = self.phrases.name() if self.phrases.chance(0.3) else self.phrases.being("relation", adjective=0.1)
            taken = (subject, *((subject.first, subject.second) if isinstance(subject, Pair) else ()))
            nouns = [phrase.noun for phrase in taken if isinstance(phrase, NounPhrase)]
            if other not in taken and not (isinstance(other, NounPhrase) and other.noun in nouns):
                return Prepositional(en="with", de="mit", case="dat", phrase=other, slot="with")

    # --- adverbials -----------------------------------------------------------------------------------------------------------------------

    def with_adverbials(self, clause: Clause, *, is_question: bool = False) -> Clause:
        """Add when, where, how and with whom, where it makes sense, and perhaps put one of them first."""
        verb, chance = clause.verb, self.phrases.chance
        more: list[Adverbial] = []
        if "state" not in verb.tags and chance(0.55) and not (is_question and clause.recipient is not None):
            time = self._time(clause)
            if not (is_question and time in DOUBTS) and (clause.recipient is None or time.slot == "time"):
                more.append(time)
        is_busy = len(clause.adverbials) > 0
        if not is_busy and verb.lemma in _DONE_ANYWHERE and chance(0.5):
            more.append(self.place())
        elif not is_busy and verb.lemma in _GOES_WITH_FRIENDS and chance(0.4):
            more.append(self.companion(clause.subject))
        elif not is_busy and verb.lemma in MANNERS and not verb.preposition and not german.is_indefinite(clause.object) and chance(0.4):
            more.append(self.rng.choice(MANNERS[verb.lemma]))
        elif not is_busy and verb.lemma in _DONE_FOR_OTHERS and not clause.is_negated and german.is_indefinite(clause.object) and chance(0.4):
            other = self.phrases.person_as_object(frozenset({"relation"}), clause.subject, is_definite=True)
            more.append(Prepositional(en="for", de="für", case="acc", phrase=other, slot="for"))
        clause = dataclasses.replace(clause, adverbials=(*clause.adverbials, *more))
        return clause if is_question else dataclasses.replace(clause, front=self._front(clause))

    def _front(self, clause: Clause) -> Front:
        # With a recipient, time inside the German clause would crowd it.
        if clause.adverbial("time") is not None and (clause.recipient is not None or self.phrases.chance(0.5)):
            return "time"
        place = clause.adverbial("place")
        return "place" if isinstance(place, Prepositional) and "seat" not in clause.verb.tags and self.phrases.chance(0.35) else "subject"

    def _time(self, clause: Clause) -> Adverbial:
        """When it happens, or how often."""
        tense = clause.tense
        if clause.modal is not None:
            tense = "past" if clause.tense == "past" else "future"
        chance, rng = self.phrases.chance, self.rng
        if tense in ("past", "future") and chance(0.35):
            number = self.phrases.small_number() if chance(0.3) else rng.randint(2, 6)
            if clause.verb.lemma in _TAKES_A_MOMENT and chance(0.7):
                hour = rng.randint(5, 11)
                return Adverb(en=f"at {english.number(hour)} o'clock", de=f"um {german.number(hour)} Uhr", slot="time")
            if chance(0.45) or clause.is_negated or clause.verb.lemma in _TAKES_A_MOMENT:
                en, de = rng.choice((("before", "vor"), ("after", "nach"), ("during", "während")))
                return Prepositional(
                    en=en, de=de, case="gen" if en == "during" else "dat", phrase=NounPhrase(noun=self.phrases.noun("event")), slot="time"
                )
            en_unit, de_unit = rng.choice((("days", "Tagen"), ("weeks", "Wochen"), ("years", "Jahren")))
            if tense == "past":
                return Adverb(en=f"{english.number(number)} {en_unit} ago", de=f"vor {german.number(number)} {de_unit}", slot="time")
            return Adverb(en=f"in {english.number(number)} {en_unit}", de=f"in {german.number(number)} {de_unit}", slot="time")
        choices: list[Adverb] = [time for time in (TIMES if "sense" in clause.verb.tags else (*TIMES, *CAUSES)) if tense in time.tenses]
        if clause.is_negated:
            return rng.choice(choices or list(CAUSES))
        if not {"once", "sense"} & clause.verb.tags and clause.modal is None:
            choices += [time for time in HABITS if tense in time.tenses]
        choices += [time for time in (*PERFECTS, *DOUBTS) if tense in time.tenses and clause.modal is None]
        return rng.choice(choices or list(CAUSES))

    def modalized(self, clause: Clause) -> Clause | None:
        """The clause with a modal verb, or None where its verb is not an action."""
        if {"state", "sense"} & clause.verb.tags:
            return None
        modal: Modal = self.rng.choice(MODALS)
        tense: Tense = "past" if modal.en_past and self.phrases.chance(0.35) else "present"
        return dataclasses.replace(clause, modal=modal, tense=tense)

    # --- how things are ---------------------------------------------------------------------------------------------------------------------

    def being_some_way(self, *, tenses: tuple[Tense, ...] = SIMPLE_TENSES) -> Clause:
        """Somebody or something has a quality, an age, a price or a place."""
        tense = self.rng.choice(tenses)
        match self.phrases.choose({"quality": 40, "comparison": 24, "age": 9, "price": 13, "place": 14}):
            case "quality":
                subject = self.phrases.subject() if self.phrases.chance(0.4) else self._thing_or_animal()
                return Clause(subject=subject, verb=BE, tense=tense, predicate=self.quality(subject))
            case "comparison":
                return dataclasses.replace(self._comparison(), tense=tense)
            case "age":
                subject = self.phrases.subject(is_definite=True)
                is_young = isinstance(subject, NounPhrase) and "young" in subject.noun.tags
                years = self.rng.randint(2, 17) if is_young else self.rng.randint(18, 99)
                return Clause(subject=subject, verb=BE, tense=tense, predicate=Measure(count=years, unit="years old"))
            case "price":
                thing = self.phrases.thing("thing", "clothes", "furniture", "device", "reading", is_definite=True, adjective=0.3)
                tense = tense if may_use(COST, tense, thing) else "present"
                return Clause(subject=thing, verb=COST, tense=tense, predicate=Measure(count=self.rng.randint(2, 99), unit="euros"))
            case _:
                return self._location(tense)

    def quality(self, subject: Phrase) -> Comparison:
        """A quality that the subject can have."""
        if isinstance(subject, NounPhrase):
            adjectives = [adjective for adjective in self.phrases.suiting(subject.noun) if adjective not in subject.adjectives]
        else:
            adjectives = [*self.phrases.suiting(self.phrases.noun("person"))]
        return Comparison(adjective=self.phrases.pick(adjectives))

    def _comparison(self) -> Clause:
        """One is bigger than the other, or as big as it."""
        kinds = (("person",), ("animal",), ("thing", "clothes"), ("vehicle",), ("place", "building"), ("reading",), ("event",))
        tags = self.rng.choice(kinds)
        make = self.phrases.being if tags[0] in ("person", "animal") else self.phrases.thing
        while True:
            first, second = (make(*tags, is_definite=True, adjective=0.1) for _ in range(2))
            adjectives = [one for one in self.phrases.suiting(first.noun) if one.comparative and one in self.phrases.suiting(second.noun)]
            if first.noun != second.noun and adjectives and not {first.adjectives, second.adjectives} - {()}:
                degree: Literal["comparative", "equal"] = "comparative" if self.phrases.chance(0.75) else "equal"
                return Clause(subject=first, verb=BE, predicate=Comparison(adjective=self.phrases.pick(adjectives), degree=degree, standard=second))

    def _location(self, tense: Tense) -> Clause:
        subject: Phrase
        if self.phrases.chance(0.5):
            subject, where = self.phrases.thing("thing", "reading", "clothes", "pet", is_definite=True, adjective=0.2), self.place_on("surface")
        else:
            subject, where = self.phrases.subject(is_definite=True), self.place()
        return Clause(subject=subject, verb=BE, tense=tense, predicate=where)

    def _thing_or_animal(self) -> NounPhrase:
        tags = ("animal", "food", "drink", "reading", "clothes", "vehicle", "device", "thing", "furniture", "building", "event", "place", "plant")
        return self.phrases.thing(*tags, is_definite=True, adjective=0.15)

    def animal_event(self, *, tenses: tuple[Tense, ...] = ALL_TENSES) -> Clause:
        """An animal or a means of transport does something."""
        verbs = [verb for verb in (*INTRANSITIVE, *STAYING) if {"animal", "transport"} & verb.tags]
        while True:
            verb = self.phrases.pick(verbs)
            tags = sorted(verb.tags & {"animal", "transport"})
            subject = self.phrases.being(*tags) if tags == ["animal"] else self.phrases.thing("transport", is_definite=True, adjective=0.2)
            if "seat" in verb.tags:
                where = (self.place_on(self.rng.choice(("seat", "surface"))),)
                clause = Clause(subject=self.phrases.being("playmate"), verb=verb, adverbials=where)
            else:
                clause = Clause(subject=subject, verb=verb)
            if (tensed := self.tensed(clause, tenses)) is not None:
                return tensed

    def state(self, who: Pronoun, *, tense: Tense) -> Clause:
        """Somebody is tired, hungry, …: a reason to do something."""
        adjectives = self.phrases.suiting(self.phrases.nouns(frozenset({"person"}))[0], "state")
        return Clause(subject=who, verb=BE, tense=tense, predicate=Comparison(adjective=self.phrases.pick(adjectives)))

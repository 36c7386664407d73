"""Composes whole sentences at random, in both languages at once."""

import dataclasses
import random
from collections.abc import Callable

from recipes.quickstart import english, german
from recipes.quickstart.clauses import ALL_TENSES, SIMPLE_TENSES, Clauses
from recipes.quickstart.grammar import Clause, Comparison, NounPhrase, Phrase, Pronoun, Relative, SentencePair, agreement, finish
from recipes.quickstart.lexicon import Noun, Tense, Verb
from recipes.quickstart.modifiers import WEATHER, WEATHER_PAST
from recipes.quickstart.phrases import Phrases, pronoun_for
from recipes.quickstart.questions import Questions
from recipes.quickstart.verbs import ASK, BE, DATIVE, KNOW, MOVING, SAYING, TRANSITIVE, TRYING

MIN_WORDS = 3
MAX_WORDS = 20

_NOT_PASSIVE = ("ziehen", "zerbrechen")  # the bowl was broken: kaputt, or zerbrochen
_LIKING = ("kaufen", "mögen", "bestellen", "brauchen", "aus|suchen")
_MEETING = ("sehen", "kennen", "mögen", "treffen")
_DISLIKING = ("verkaufen", "weg|werfen", "zurück|geben")


class Composer:
    """A source of random sentence pairs.

    Args:
        rng: All randomness comes from it.
    """

    def __init__(self, rng: random.Random) -> None:
        self.phrases = Phrases(rng)
        self.clauses = Clauses(self.phrases)
        self.questions = Questions(self.clauses)
        self.rng = rng
        self._kinds: dict[Callable[[], SentencePair], float] = {
            self._statement: 21,
            self._negation: 8,
            self._modal: 8,
            self._quality: 12,
            self._animals: 4,
            self._passive: 5,
            self._existence: 3,
            self.questions.yes_no: 6,
            self.questions.wh: 10,
            self._imperative: 5,
            self._reason: 9,
            self._thing_reason: 5,
            self._condition: 3,
            self._when: 4,
            self._that: 5,
            self._indirect_question: 4,
            self._infinitive: 6,
            self._purpose: 3,
            self._coordination: 5,
            self._relative_subject: 4,
            self._relative_object: 5,
        }

    def pair(self) -> SentencePair:
        """A sentence pair of three to twenty words on either side."""
        while True:
            pair = self.phrases.choose(self._kinds)()
            if all(MIN_WORDS <= len(text.split(" ")) <= MAX_WORDS for text in pair):
                return pair

    # --- one clause -----------------------------------------------------------------------------------------------------------------------

    def _statement(self) -> SentencePair:
        return _stated(self.clauses.with_adverbials(self.clauses.event()))

    def _negation(self) -> SentencePair:
        clause = dataclasses.replace(self.clauses.event(is_negatable=True), is_negated=True)
        if self.phrases.chance(0.25):
            clause = self.clauses.modalized(clause) or clause
        return _stated(self.clauses.with_adverbials(clause) if self.phrases.chance(0.4) else clause)

    def _modal(self) -> SentencePair:
        clause = None
        while clause is None:
            clause = self.clauses.modalized(self.clauses.event())
        return _stated(self.clauses.with_adverbials(clause))

    def _quality(self) -> SentencePair:
        clause = self.clauses.being_some_way()
        if self.phrases.chance(0.15) and clause.verb == BE:
            clause = dataclasses.replace(clause, is_negated=_is_definite(clause.subject))
        return _stated(clause)

    def _animals(self) -> SentencePair:
        clause = self.clauses.animal_event()
        return _stated(self.clauses.with_adverbials(clause))

    def _passive(self) -> SentencePair:
        while True:
            verb = self.phrases.pick([verb for verb in TRANSITIVE if has_passive(verb)])
            things = [noun for noun in self.phrases.nouns(verb.tags) if "person" not in noun.tags]
            if not things:
                continue
            subject = self.phrases.with_noun(self.phrases.pick(things), is_definite=True)
            clause = self.clauses.tensed(Clause(subject=subject, verb=verb, is_passive=True), ALL_TENSES)
            if clause is None:
                continue
            if self.phrases.chance(0.3):
                clause = self.clauses.modalized(dataclasses.replace(clause, tense="present")) or clause
                if clause.modal is not None and clause.modal.infinitive in ("wollen", "möchten", "dürfen"):
                    continue
            elif self.phrases.chance(0.4):
                clause = dataclasses.replace(clause, agent=self.phrases.being("person"))
            return _stated(self.clauses.with_adverbials(clause) if self.phrases.chance(0.5) else clause)

    def _existence(self) -> SentencePair:
        """There is a dog in the garden; es gibt stands with the accusative."""
        thing = self.phrases.thing("animal", "thing", "furniture", "plant", "vehicle", "device")
        while not german.is_indefinite(thing) or not thing.noun.plural:
            thing = self.phrases.thing("animal", "thing", "furniture", "plant", "vehicle", "device")
        where = self.clauses.place()
        is_past = self.phrases.chance(0.35)
        be = english.be("they" if thing.is_plural else "he", is_past=is_past)
        what, there = english.phrase(thing), english.adverbial(where)
        de = f"{german.adverbial(where)} {'gab' if is_past else 'gibt'} es {german.phrase(thing, 'acc')}"
        return finish(f"there {be} {what} {there}", de, ".")

    # --- requests -------------------------------------------------------------------------------------------------------------

    def _imperative(self) -> SentencePair:
        you = Pronoun(en="you")
        clause = self._action(you)
        clause = dataclasses.replace(clause, is_negated=_is_definite(clause.object) and self.phrases.chance(0.3))
        en, de = english.imperative(clause), german.imperative(clause)
        return finish(f"please {en}", f"bitte {de}", ".") if self.phrases.chance(0.4) else finish(en, de, "!")

    def _action(self, subject: Phrase) -> Clause:
        """An action that one can be asked to do, or that one can try."""
        while True:
            clause = self.clauses.event(subject=subject)
            if not {"state", "sense", "once"} & clause.verb.tags:
                return clause

    # --- two clauses ------------------------------------------------------------------------------------------------------------------------

    def _reason(self) -> SentencePair:
        main = self.clauses.event(tenses=("present", "past"))
        en, de = self._reason_clause(main.subject, tense=main.tense)
        conjunctions = ("because", "weil") if self.phrases.chance(0.65) else ("although", "obwohl")
        return self._joined(main, f"{conjunctions[0]} {en}", f"{conjunctions[1]} {de}", may_come_first=True)

    def _reason_clause(self, subject: Phrase, *, tense: Tense) -> SentencePair:
        """Why somebody does something, in words that follow a conjunction."""
        who = pronoun_for(subject)
        if who is None or self.phrases.chance(0.2):
            return self.rng.choice(list((WEATHER if tense == "present" else WEATHER_PAST).items()))
        clause = self.clauses.state(who, tense=tense)
        if self.phrases.chance(0.3) and not (agreement(who) == "you" and tense == "past"):
            clause = self.clauses.event(subject=who, tenses=(tense,))
            if self.phrases.chance(0.5) and tense == "present":
                clause = self.clauses.modalized(dataclasses.replace(clause, tense="present")) or clause
        return english.subordinate(clause), german.verb_last(clause)

    def _thing_reason(self) -> SentencePair:
        """The pronoun for a thing takes the gender of its noun: I buy the coat because it is warm."""
        while True:
            is_liked = self.phrases.chance(0.5)
            verb = self.phrases.pick([verb for verb in TRANSITIVE if verb.lemma in (_LIKING if is_liked else _DISLIKING)])
            nouns = [noun for noun in self.phrases.nouns(verb.tags) if not {"person", "animal"} & noun.tags]
            noun = self.phrases.pick(nouns)
            is_because = self.phrases.chance(0.7)
            fitting = self.phrases.suiting(noun, "good" if is_liked == is_because else "bad")
            target = self.phrases.with_noun(noun, is_definite=True, is_plain=True, adjective=0)
            subject = self.phrases.subject()
            main = self.clauses.tensed(Clause(subject=subject, verb=verb, object=target), SIMPLE_TENSES)
            if main is None or not fitting or target.owner is not None:
                continue
            it = Pronoun(en="they") if target.is_plural else Pronoun(en="it", gender=noun.gender)
            quality = Clause(subject=it, verb=BE, tense=main.tense, predicate=Comparison(adjective=self.phrases.pick(fitting)))
            en, de = english.subordinate(quality), german.verb_last(quality)
            words = ("because", "weil") if is_because else ("although", "obwohl")
            return self._joined(main, f"{words[0]} {en}", f"{words[1]} {de}", may_come_first=False)

    def _condition(self) -> SentencePair:
        main = self.clauses.event(tenses=("present", "future"))
        who = pronoun_for(main.subject)
        if who is None or self.phrases.chance(0.3):
            en, de = self.rng.choice(list(WEATHER.items()))
        else:
            clause = self.clauses.state(who, tense="present")
            if self.phrases.chance(0.4):
                clause = self.clauses.event(subject=who, tenses=("present",))
            en, de = english.subordinate(clause), german.verb_last(clause)
        return self._joined(main, f"if {en}", f"wenn {de}", may_come_first=True)

    def _when(self) -> SentencePair:
        """One thing happened when, or before, another did."""
        en_word, de_word = self.rng.choice((("when", "als"), ("before", "bevor"), ("while", "während")))
        main = self._happening(self._third_person())
        who = pronoun_for(main.subject) if self.phrases.chance(0.6) else None
        other = self._happening(who if who is not None else self._third_person())
        return self._joined(main, f"{en_word} {english.subordinate(other)}", f"{de_word} {german.verb_last(other)}", may_come_first=True)

    def _happening(self, subject: Phrase) -> Clause:
        clause = self.clauses.event(subject=subject, tenses=("past",))
        while "state" in clause.verb.tags:
            clause = self.clauses.event(subject=subject, tenses=("past",))
        return clause

    def _third_person(self) -> Phrase:
        subject = self.phrases.subject()
        while agreement(subject) == "you":
            subject = self.phrases.subject()
        return subject

    def _that(self) -> SentencePair:
        while True:
            verb = self.phrases.pick(SAYING)
            main = self.clauses.tensed(Clause(subject=self.phrases.subject(), verb=verb), SIMPLE_TENSES)
            if main is not None:
                break
        tenses = (main.tense,) if main.tense == "past" else ALL_TENSES
        subject = pronoun_for(main.subject) if self.phrases.chance(0.4) else None
        clause = self._reported(subject, tenses)
        en = f"{english.statement(main)} that {english.subordinate(clause)}"
        return finish(en, f"{german.verb_second(main)}, dass {german.verb_last(clause)}", ".")

    def _reported(self, subject: Phrase | None, tenses: tuple[Tense, ...]) -> Clause:
        if self.phrases.chance(0.3):
            return self.clauses.being_some_way(tenses=("past",) if tenses == ("past",) else SIMPLE_TENSES)
        if tenses == ("past",):
            subject = subject if subject is not None and agreement(subject) != "you" else self._third_person()
        return self.clauses.event(subject=subject, tenses=tenses)

    def _indirect_question(self) -> SentencePair:
        asker = self.phrases.subject(is_definite=True)
        is_asking = self.phrases.chance(0.4)
        main = Clause(subject=asker, verb=ASK if is_asking else KNOW, is_negated=not is_asking)
        opener, clause = ("whether", "ob"), self.questions.asking()
        if self.phrases.chance(0.6):
            opener, clause = self.questions.wh_clause()
        en = english.subordinate(clause, opener=opener[0])
        return finish(f"{english.statement(main)} {en}", f"{german.verb_second(main)}, {german.verb_last(clause, opener=opener[1])}", ".")

    def _infinitive(self) -> SentencePair:
        subject = self.phrases.subject()
        verb = self.phrases.pick(TRYING)
        main = self.clauses.tensed(Clause(subject=subject, verb=verb), ("present", "past", "perfect"))
        if main is None:
            return self._infinitive()
        action = self._action(subject)
        while action.object is None:
            action = self._action(subject)
        return finish(f"{english.statement(main)} {english.infinitive(action)}", f"{german.verb_second(main)}, {german.infinitive(action)}", ".")

    def _purpose(self) -> SentencePair:
        subject = self.phrases.subject()
        verb = self.phrases.pick(MOVING)
        main = self.clauses.tensed(Clause(subject=subject, verb=verb, adverbials=(self.clauses.destination(verb),)), ALL_TENSES)
        if main is None:
            return self._purpose()
        action = self._action(subject)
        while action.object is None:
            action = self._action(subject)
        en = f"{english.statement(main)} in order {english.infinitive(action)}"
        return finish(en, f"{german.verb_second(main)}, um {german.infinitive(action)}", ".")

    def _coordination(self) -> SentencePair:
        """One person does two things, or two people one each."""
        tense: Tense = "present" if self.phrases.chance(0.55) else "past"
        first = self.clauses.event(subject=self._third_person(), tenses=(tense,))
        if self.phrases.chance(0.6):
            second = self.clauses.event(subject=first.subject, tenses=(tense,))
            en, de = f"and {english.predicate(second)}", f" und {german.predicate(second)}"
        else:
            second = self.clauses.event(subject=self._third_person(), tenses=(tense,))
            words = (", and", " und") if self.phrases.chance(0.5) else (", but", ", aber")
            return finish(
                f"{english.statement(first)}{words[0]} {english.statement(second)}",
                f"{german.verb_second(first)}{words[1]} {german.verb_second(second)}",
                ".",
            )
        return finish(f"{english.statement(first)} {en}", german.verb_second(first) + de, ".")

    def _joined(self, main: Clause, en: str, de: str, *, may_come_first: bool) -> SentencePair:
        """A main clause with a subordinate clause after it, or before it."""
        if may_come_first and self.phrases.chance(0.35):
            return finish(f"{en}, {english.statement(main)}", german.verb_second(main, opener=f"{de},"), ".")
        return finish(f"{english.statement(main)} {en}", f"{german.verb_second(main)}, {de}", ".")

    # --- relative clauses -------------------------------------------------------------------------------------------------------------------

    def _relative_subject(self) -> SentencePair:
        """The man who sells cars is rich; I know the man who sells cars."""
        person = self._described(self.phrases.noun("stranger"))
        relative = self.clauses.event(subject=Relative(key=person.key, is_person=True), tenses=SIMPLE_TENSES)
        return self._about(dataclasses.replace(person, relative=relative))

    def _relative_object(self) -> SentencePair:
        """The book that I read was long; the man whom I help is old."""
        while True:
            verb = self.phrases.pick(DATIVE if self.phrases.chance(0.2) else TRANSITIVE)
            if verb.particle and not verb.is_split:
                continue
            noun = self.phrases.pick(self.phrases.nouns(verb.tags))
            is_person = "person" in noun.tags
            head = self._described(noun)
            gap = Relative(key=head.key, is_person=is_person)
            subject = self.phrases.subject(is_definite=True)
            clause = self.clauses.tensed(Clause(subject=subject, verb=verb, object=gap, front="object"), SIMPLE_TENSES)
            if clause is not None:
                return self._about(dataclasses.replace(head, relative=clause))

    def _described(self, noun: Noun) -> NounPhrase:
        """The head of a relative clause."""
        is_plural = bool(noun.plural) and self.phrases.chance(0.3)
        return NounPhrase(noun=noun, is_plural=is_plural, adjectives=self.phrases.adjectives(noun, 0.15))

    def _about(self, described: NounPhrase) -> SentencePair:
        """Say something about what a relative clause describes; as an object it stands last, so that its clause need not be moved."""
        suiting = [adjective for adjective in self.phrases.suiting(described.noun) if adjective not in described.adjectives]
        if suiting and self.phrases.chance(0.5):
            tense = self.rng.choice(SIMPLE_TENSES)
            return _stated(Clause(subject=described, verb=BE, tense=tense, predicate=Comparison(adjective=self.phrases.pick(suiting))))
        if "person" in described.noun.tags:
            verb = self.phrases.pick([verb for verb in TRANSITIVE if verb.lemma in _MEETING])
            clause = self.clauses.tensed(Clause(subject=self.phrases.subject(is_definite=True), verb=verb, object=described), SIMPLE_TENSES)
            return self._about(described) if clause is None else _stated(clause)
        start = ("these are", "das sind") if described.is_plural else ("this is", "das ist")
        return finish(f"{start[0]} {english.phrase(described)}", f"{start[1]} {german.phrase(described, 'nom')}", ".")


def _stated(clause: Clause) -> SentencePair:
    return finish(english.statement(clause), german.verb_second(clause), ".")


def _is_definite(value: Phrase | None) -> bool:
    return not isinstance(value, NounPhrase) or (value.is_definite and value.determiner not in ("every", "all"))


def has_passive(verb: Verb) -> bool:
    """Whether the passive of a verb is used."""
    is_action = not {"state", "sense"} & verb.tags
    return is_action and (not verb.particle or verb.is_split) and verb.infinitive not in _NOT_PASSIVE

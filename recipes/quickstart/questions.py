"""Composes questions at random, in both languages at once."""

import dataclasses

from recipes.quickstart import english, german
from recipes.quickstart.clauses import ALL_TENSES, SIMPLE_TENSES, Clauses
from recipes.quickstart.grammar import Clause, Determiner, Measure, Phrase, QuestionWord, SentencePair, agreement, finish
from recipes.quickstart.verbs import BE, DATIVE, MOVING, STAYING, TRANSITIVE

_WHEN_AND_WHY = {"when": "wann", "why": "warum"}


class Questions:
    """A source of random questions.

    Args:
        clauses: Where their clauses come from; all randomness is its.
    """

    def __init__(self, clauses: Clauses) -> None:
        self.clauses = clauses
        self.phrases = clauses.phrases
        self.rng = clauses.rng

    def asking(self) -> Clause:
        """A clause that makes sense as a question."""
        while True:
            subject = self.phrases.subject(is_definite=True)
            clause = self.clauses.event(subject=subject) if self.phrases.chance(0.8) else self.clauses.being_some_way()
            if self.phrases.chance(0.15):
                clause = self.clauses.modalized(clause) or clause
            if agreement(clause.subject) not in ("I", "we"):
                return clause

    def yes_no(self) -> SentencePair:
        """A question to be answered by yes or no."""
        clause = self.asking()
        if self.phrases.chance(0.6) and clause.verb != BE:
            clause = self.clauses.with_adverbials(clause, is_question=True)
        return finish(english.question(clause), german.verb_first(clause), "?")

    def wh(self) -> SentencePair:
        """A question with a question word."""
        opener, clause = self.wh_clause()
        return finish(english.question(clause, opener=opener[0]), german.verb_second(clause, opener=opener[1]), "?")

    def wh_clause(self) -> tuple[tuple[str, str], Clause]:
        """A question word for each language, both empty where a phrase of the clause asks, and the clause."""
        match self.phrases.choose({"subject": 24, "object": 30, "where": 20, "when or why": 22, "measure": 14}):
            case "subject":
                subject: Phrase = QuestionWord(en="who")
                if self.phrases.chance(0.3):
                    person = self.phrases.being("person", is_definite=True, adjective=0.1)
                    subject = dataclasses.replace(person, determiner="which", owner=None)
                return ("", ""), self.clauses.event(subject=subject)
            case "object":
                return ("", ""), self._asking_for_object()
            case "where":
                return self._where()
            case "when or why":
                en = self.rng.choice(list(_WHEN_AND_WHY))
                clause = self.asking()
                while clause.verb == BE or (en == "when" and "state" in clause.verb.tags):
                    clause = self.asking()
                return (en, _WHEN_AND_WHY[en]), clause
            case _:
                return self._how_much()

    def _asking_for_object(self) -> Clause:
        while True:
            verb = self.phrases.pick(DATIVE if self.phrases.chance(0.2) else TRANSITIVE)
            subject = self.phrases.subject(is_definite=True)
            noun = self.phrases.pick(self.phrases.nouns(verb.tags))
            target: Phrase = QuestionWord(en="who" if "person" in noun.tags else "what")
            if self.phrases.chance(0.45) and verb.case == "acc":
                target = self.phrases.with_noun(noun, is_plain=True, is_definite=True)
                determiner: Determiner = "how many" if target.is_plural and self.phrases.chance(0.5) else "which"
                target = dataclasses.replace(target, determiner=determiner, owner=None)
            elif isinstance(target, QuestionWord) and verb.particle and not verb.is_split:
                continue  # whom does he listen to, what does she look for: left out
            clause = self.clauses.tensed(Clause(subject=subject, verb=verb, object=target, front="object"), ALL_TENSES)
            if clause is not None and agreement(subject) != "I":
                return clause

    def _where(self) -> tuple[tuple[str, str], Clause]:
        while True:
            if self.phrases.chance(0.4):
                clause = Clause(subject=self.phrases.subject(is_definite=True), verb=self.phrases.pick(MOVING))
                words = ("where", "wohin")
            elif self.phrases.chance(0.5):
                noun = self.phrases.thing("thing", "reading", "clothes", "pet", "building", "vehicle", is_definite=True)
                return ("where", "wo"), Clause(subject=noun, verb=BE, tense=self.rng.choice(SIMPLE_TENSES))
            elif self.phrases.chance(0.5):
                clause, words = Clause(subject=self.phrases.subject(is_definite=True), verb=self.phrases.pick(STAYING[:3])), ("where", "wo")
            else:
                clause, words = self.clauses.event(), ("where", "wo")
                if clause.adverbials or "state" in clause.verb.tags:
                    continue
            tensed = self.clauses.tensed(clause, ALL_TENSES)
            if tensed is not None and agreement(clause.subject) != "I":
                return words, tensed

    def _how_much(self) -> tuple[tuple[str, str], Clause]:
        clause = self.clauses.being_some_way()
        while not isinstance(clause.predicate, Measure) or agreement(clause.subject) == "I":
            clause = self.clauses.being_some_way()
        words = ("how old", "wie alt") if clause.verb == BE else ("how much", "wie viel")
        return words, dataclasses.replace(clause, predicate=None)

"""English wording of the clauses of `grammar.py`."""

from recipes.quickstart.grammar import (
    Adverbial,
    Agreement,
    Clause,
    Comparison,
    Measure,
    Name,
    NounPhrase,
    Pair,
    Phrase,
    Prepositional,
    Pronoun,
    QuestionWord,
    Relative,
    agreement,
)
from recipes.quickstart.lexicon import Adverb, Slot, Verb, add_s

_COMMA_FROM = 3
"""An opening phrase of as many words is set off by a comma: yesterday he …, but in the evening, he …"""

_OBJECT_PRONOUNS = {"I": "me", "you": "you", "he": "him", "she": "her", "it": "it", "we": "us", "they": "them"}
_BE_PRESENT: dict[Agreement, str] = {"I": "am", "you": "are", "he": "is", "we": "are", "they": "are"}
_MIDDLE: tuple[Slot, ...] = ("often", "already")
_END: tuple[Slot, ...] = ("manner", "for", "to", "with", "place", "time")
_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def number(value: int) -> str:
    """The word for a number below a hundred."""
    if value < 20:
        return _SMALL[value]
    tens, ones = divmod(value, 10)
    return _TENS[tens - 2] + (f"-{_SMALL[ones]}" if ones else "")


# --- phrases ----------------------------------------------------------------------------------------------------------------------------


def phrase(value: Phrase, *, is_object: bool = False) -> str:
    """Word a phrase as a subject or as an object."""
    match value:
        case NounPhrase():
            return _noun_phrase(value)
        case Name():
            return value.text
        case Pair():
            return f"{phrase(value.first)} and {phrase(value.second)}"
        case Pronoun():
            return _OBJECT_PRONOUNS[value.en] if is_object else value.en
        case QuestionWord():
            return "whom" if is_object and value.en == "who" else value.en
        case Relative():
            if not value.is_person:
                return "that"
            return "whom" if is_object else "who"


def _noun_phrase(value: NounPhrase) -> str:
    words = [number(value.count)] if value.count else []
    words += [adjective.en for adjective in value.adjectives]
    words.append(value.noun.en_plural if value.is_plural else value.noun.en)
    text = " ".join(words)
    if value.owner is not None:
        text = f"{phrase(value.owner)}'s {text}"
    elif value.determiner == "a":
        text = f"{'an' if text.startswith(('a', 'e', 'i', 'o', 'un', 'ug', 'um')) else 'a'} {text}"
    elif value.determiner == "this":
        text = f"{'these' if value.is_plural else 'this'} {text}"
    elif value.determiner != "none":
        text = f"{value.determiner} {text}"
    if value.relative is not None:
        text += f" {subordinate(value.relative)}"
    return text


def adverbial(value: Adverbial) -> str:
    """Word an adverbial."""
    return value.en if isinstance(value, Adverb) else f"{value.en} {phrase(value.phrase, is_object=True)}"


def _predicate(value: Comparison | Measure | Prepositional) -> str:
    match value:
        case Prepositional():
            return adverbial(value)
        case Measure():
            return f"{number(value.count)} {value.unit}"
        case Comparison(degree="positive"):
            return value.adjective.en
        case Comparison(degree="comparative", standard=standard) if standard is not None:
            return f"{value.adjective.en_comparative} than {phrase(standard)}"
        case Comparison(standard=standard) if standard is not None:
            return f"as {value.adjective.en} as {phrase(standard)}"
    raise AssertionError(f"a comparison without a standard: {value}")


# --- verbs ------------------------------------------------------------------------------------------------------------------------------


def _third(verb: str) -> str:
    return {"have": "has", "go": "goes", "do": "does"}.get(verb, add_s(verb))


def be(who: Agreement, *, is_past: bool) -> str:
    """A form of be."""
    if is_past:
        return "was" if who in ("I", "he") else "were"
    return _BE_PRESENT[who]


def _simple(base: str, past: str, who: Agreement, *, is_past: bool) -> str:
    if base == "be":
        return be(who, is_past=is_past)
    if is_past:
        return past
    return _third(base) if who == "he" else base


def _auxiliary(clause: Clause, *, needs_one: bool) -> tuple[str, str]:
    """The auxiliary, or nothing, and the rest of the verb; `needs_one` asks for do-support."""
    who = agreement(clause.subject)
    is_past = clause.tense == "past"
    base, past = clause.verb.en, clause.verb.en_past
    rest = ""
    if clause.is_passive:
        base, past, rest = "be", "", clause.verb.en_participle
    if (modal := clause.modal) is not None:
        text = f"{modal.link} {base} {rest}".strip()
        match modal.kind:
            case "auxiliary":
                return modal.en_past if is_past else modal.en, text
            case "be":
                return be(who, is_past=is_past), f"{modal.en} {text}"
            case "verb":
                base, past, rest = modal.en, modal.en_past, text
    elif clause.tense == "perfect":
        participle = "been" if base == "be" else clause.verb.en_participle
        return "has" if who == "he" else "have", f"{participle} {rest}".strip()
    elif clause.tense == "future":
        return "will", f"{base} {rest}".strip()
    if base == "be":
        return be(who, is_past=is_past), rest
    if needs_one:
        return "did" if is_past else _simple("do", "did", who, is_past=False), f"{base} {rest}".strip()
    return "", f"{_simple(base, past, who, is_past=is_past)} {rest}".strip()


# --- clauses ----------------------------------------------------------------------------------------------------------------------------


def statement(clause: Clause) -> str:
    """A main clause: yesterday the man bought a car."""
    front = clause.adverbial("time" if clause.front == "time" else "place") if clause.front in ("time", "place") else None
    text = _join(phrase(clause.subject), _affirmed(clause), _rest(clause, without=front))
    if front is None:
        return text
    opening = adverbial(front)
    return f"{opening}{',' if len(opening.split(' ')) >= _COMMA_FROM else ''} {text}"


def subordinate(clause: Clause, *, opener: str = "") -> str:
    """A clause that begins with a conjunction, a question word or a relative pronoun: because he is tired, whom he helps."""
    if clause.front == "object" and clause.object is not None:
        opener = _join(opener, phrase(clause.object, is_object=True))
    return _join(opener, phrase(clause.subject), _affirmed(clause), _rest(clause))


def predicate(clause: Clause) -> str:
    """A clause without its subject: opens the door."""
    return _join(_affirmed(clause), _rest(clause))


def question(clause: Clause, *, opener: str = "") -> str:
    """A question, with a question word as its opener, its subject or its fronted object, or none of them."""
    if isinstance(clause.subject, QuestionWord) or _asks_which(clause.subject):
        return subordinate(clause, opener=opener)
    if clause.front == "object" and clause.object is not None:
        opener = phrase(clause.object, is_object=True)
    auxiliary, verb = _auxiliary(clause, needs_one=True)
    return _join(opener, auxiliary, phrase(clause.subject), "not" if clause.is_negated else "", _middle(clause), verb, _rest(clause))


def imperative(clause: Clause) -> str:
    """A request: open the door, do not open the door."""
    return _join("do not" if clause.is_negated else "", clause.verb.en, _rest(clause))


def infinitive(clause: Clause) -> str:
    """An infinitive with `to`: to open the door."""
    return _join("to", clause.verb.en, _rest(clause))


def _asks_which(value: Phrase) -> bool:
    return isinstance(value, NounPhrase) and value.determiner in ("which", "how many")


def _affirmed(clause: Clause) -> str:
    """The whole verb after its subject, with negation and the adverbs that stand before the main verb."""
    auxiliary, verb = _auxiliary(clause, needs_one=clause.is_negated)
    if clause.is_negated:
        auxiliary = "cannot" if auxiliary == "can" else f"{auxiliary} not"
    return _join(auxiliary, _middle(clause), verb)


def _middle(clause: Clause) -> str:
    return _join(*(adverbial(value) for slot in _MIDDLE if (value := clause.adverbial(slot)) is not None))


def _rest(clause: Clause, *, without: Adverbial | None = None) -> str:
    """Everything after the verb."""
    words = [phrase(clause.recipient, is_object=True)] if clause.recipient is not None else []
    is_fronted = clause.front == "object"
    target = "" if clause.object is None or is_fronted else phrase(clause.object, is_object=True)
    words += _with_particle(clause.verb, target, is_pronoun=isinstance(clause.object, Pronoun))
    if clause.agent is not None:
        words.append(f"by {phrase(clause.agent, is_object=True)}")
    if clause.predicate is not None:
        words.append(_predicate(clause.predicate))
    words += [adverbial(value) for slot in _END if (value := clause.adverbial(slot)) is not None and value is not without]
    return _join(*words)


def _with_particle(verb: Verb, target: str, *, is_pronoun: bool) -> list[str]:
    return [target, verb.particle] if verb.is_split and is_pronoun else [verb.particle, target]


def _join(*words: str) -> str:
    return " ".join(word for word in words if word)

"""German wording of the clauses of `grammar.py`."""

from recipes.quickstart.grammar import (
    Adverbial,
    Agreement,
    Clause,
    Comparison,
    GenderKey,
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
from recipes.quickstart.lexicon import Adjective, Adverb, Case, Noun, Slot, Verb, verb_stem

_CASES: tuple[Case, ...] = ("nom", "acc", "dat", "gen")
_PERSONS: tuple[Agreement, ...] = ("I", "you", "he", "we", "they")

# Columns: nominative, accusative, dative, genitive.
_ARTICLES: dict[GenderKey, str] = {"m": "der den dem des", "f": "die die der der", "n": "das das dem des", "p": "die die den der"}
_RELATIVES: dict[GenderKey, str] = {"m": "der den dem", "f": "die die der", "n": "das das dem", "p": "die die denen"}
# "-" is no ending.
_DIESER: dict[GenderKey, str] = {"m": "er en em es", "f": "e e er er", "n": "es es em es", "p": "e e en er"}
_EIN: dict[GenderKey, str] = {"m": "- en em es", "f": "e e er er", "n": "- - em es", "p": "e e en er"}
_WEAK: dict[GenderKey, str] = {"m": "e en en en", "f": "e e en en", "n": "e e en en", "p": "en en en en"}
_MIXED: dict[GenderKey, str] = {"m": "er en en en", "f": "e e en en", "n": "es es en en", "p": "en en en en"}
_STRONG: dict[GenderKey, str] = {"m": "er en em en", "f": "e e er er", "n": "es es em en", "p": "e e en er"}

_DIESER_WORDS = {"this": "dies", "every": "jed", "which": "welch", "all": "all"}
_EIN_WORDS = {"a": "ein", "no": "kein", "my": "mein", "your": "dein", "his": "sein", "her": "ihr", "our": "unser", "their": "ihr"}
_QUANTIFIERS = {"many": "viel", "some": "einig", "how many": "wie viel"}

_PRONOUNS = {"I": "ich mich mir", "you": "du dich dir", "he": "er ihn ihm", "she": "sie sie ihr", "we": "wir uns uns", "they": "sie sie ihnen"}
_AMBIGUOUS = ("sie", "es")
_IT = {"m": "er ihn ihm", "f": "sie sie ihr", "n": "es es ihm"}
_REFLEXIVES: dict[Agreement, str] = {"I": "mich", "you": "dich", "he": "sich", "we": "uns", "they": "sich"}

# Columns: the persons; the last column of a verb is its simple past.
_IRREGULAR = {
    "sein": "bin bist ist sind sind war",
    "haben": "habe hast hat haben haben hatte",
    "werden": "werde wirst wird werden werden wurde",
    "können": "kann kannst kann können können konnte",
    "müssen": "muss musst muss müssen müssen musste",
    "wollen": "will willst will wollen wollen wollte",
    "dürfen": "darf darfst darf dürfen dürfen durfte",
    "mögen": "mag magst mag mögen mögen mochte",
    "wissen": "weiß weißt weiß wissen wissen wusste",
    "sollten": "sollte solltest sollte sollten sollten -",
    "möchten": "möchte möchtest möchte möchten möchten -",
}

_CONTRACTIONS = {"in dem": "im", "in das": "ins", "an dem": "am", "zu dem": "zum", "zu der": "zur", "von dem": "vom"}
_GENITIVES = {"Chef": "Chefs", "Film": "Films"}
_SMALL = (
    *("null", "ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"),
    *("dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn"),
)
_TENS = ("zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig")
_UNITS = {"years old": "Jahre alt", "euros": "Euro"}


def number(value: int) -> str:
    """The word for a number below a hundred: dreiundzwanzig."""
    if value < 20:
        return _SMALL[value]
    tens, ones = divmod(value, 10)
    return (f"{_SMALL[ones]}und" if ones else "") + _TENS[tens - 2]


# --- phrases ----------------------------------------------------------------------------------------------------------------------------


def phrase(value: Phrase, case: Case, *, is_negated: bool = False) -> str:
    """Word a phrase in a case; `is_negated` turns an indefinite one into one with kein."""
    match value:
        case NounPhrase():
            return _noun_phrase(value, case, determiner="no" if is_negated else value.determiner)
        case Name():
            return value.text
        case Pair():
            return f"{phrase(value.first, case)} und {phrase(value.second, case)}"
        case Pronoun():
            return _cell(_IT[value.gender] if value.en == "it" else _PRONOUNS[value.en], case)
        case QuestionWord():
            return _cell("wer wen wem" if value.en == "who" else "was was", case)
        case Relative():
            return _cell(_RELATIVES[value.key], case)


def _noun_phrase(value: NounPhrase, case: Case, *, determiner: str) -> str:
    key = value.key
    article, endings = _determiner(determiner, key, case)
    if isinstance(value.owner, Name):
        article, endings = f"{value.owner.text}s", _STRONG
    words = [article] if article else []
    words += [number(value.count)] if value.count else []
    words += [_attributive(adjective) + _ending(endings[key], case) for adjective in value.adjectives]
    words.append(noun_form(value.noun, case, is_plural=value.is_plural))
    if isinstance(value.owner, NounPhrase):
        words.append(phrase(value.owner, "gen"))
    text = " ".join(words)
    return text if value.relative is None else f"{text}, {verb_last(value.relative)},"


def _determiner(determiner: str, key: GenderKey, case: Case) -> tuple[str, dict[GenderKey, str]]:
    """The word before the noun, or nothing, and the endings that adjectives take after it."""
    if determiner == "the":
        return _cell(_ARTICLES[key], case), _WEAK
    if determiner in _DIESER_WORDS:
        return _DIESER_WORDS[determiner] + _ending(_DIESER[key], case), _WEAK
    if determiner in _EIN_WORDS:
        return _EIN_WORDS[determiner] + _ending(_EIN[key], case), _MIXED
    if determiner in _QUANTIFIERS:
        return _QUANTIFIERS[determiner] + _ending(_STRONG[key], case), _STRONG
    return "", _STRONG


def noun_form(noun: Noun, case: Case, *, is_plural: bool) -> str:
    """Decline a noun."""
    if is_plural:
        return noun.plural + ("n" if case == "dat" and not noun.plural.endswith(("n", "s")) else "")
    if noun.is_weak and case != "nom":
        return noun.plural
    if case == "gen" and noun.gender != "f":
        return _genitive(noun.singular)
    return noun.singular


def _genitive(singular: str) -> str:
    """-es after an s sound and for one syllable, else -s; no noun of one syllable here ends in a vowel and stands in the genitive."""
    if singular in _GENITIVES:
        return _GENITIVES[singular]
    is_vowel = [letter in "aeiouäöüy" for letter in singular.lower()]
    num_syllables = sum(here and not before for here, before in zip(is_vowel, [False, *is_vowel[:-1]], strict=True))
    return singular + ("es" if num_syllables == 1 or singular.endswith(("s", "ß", "x", "z")) else "s")


def _attributive(adjective: Adjective) -> str:
    """The stem before an ending: müde -> müd-, dunkel -> dunkl-, teuer -> teur-."""
    word = adjective.de
    if word.endswith("e"):
        return word[:-1]
    if word.endswith("el"):
        return word[:-2] + "l"
    return word[:-2] + "r" if word.endswith("uer") else word


def adverbial(value: Adverbial) -> str:
    """Word an adverbial; a preposition and the article merge where German does so."""
    return value.de if isinstance(value, Adverb) else _prepositional(value.de, value.case, value.phrase)


def _prepositional(preposition: str, case: Case, value: Phrase) -> str:
    text = phrase(value, case)
    if isinstance(value, NounPhrase) and value.determiner == "the" and not isinstance(value.owner, Name):
        article, _, rest = text.partition(" ")
        start = f"{preposition} {article}"
        return f"{_CONTRACTIONS.get(start, start)} {rest}"
    return f"{preposition} {text}"


def _predicate(value: Comparison | Measure | Prepositional) -> str:
    match value:
        case Prepositional():
            return adverbial(value)
        case Measure():
            return f"{number(value.count)} {_UNITS[value.unit]}"
        case Comparison(degree="positive"):
            return value.adjective.de
        case Comparison(degree="comparative", standard=standard) if standard is not None:
            return f"{value.adjective.comparative} als {phrase(standard, 'nom')}"
        case Comparison(standard=standard) if standard is not None:
            return f"so {value.adjective.de} wie {phrase(standard, 'nom')}"
    raise AssertionError(f"a comparison without a standard: {value}")


# --- verbs ------------------------------------------------------------------------------------------------------------------------------


def present(verb: Verb, who: Agreement) -> str:
    """Conjugate a verb in the present, without its separable prefix."""
    if verb.infinitive in _IRREGULAR:
        return _irregular(verb.infinitive, who, is_past=False)
    stem = verb_stem(verb.infinitive)
    match who:
        case "I":
            return (stem[:-2] + "le") if verb.infinitive.endswith("eln") else stem + "e"
        case "you":
            body = verb.present3.removesuffix("t")
            return body + ("t" if body.endswith(("s", "ß", "z", "x")) else "st")
        case "he":
            return verb.present3
        case _:
            return verb.infinitive


def past(preterite: str, who: Agreement) -> str:
    """Conjugate the simple past: a form in -e is weak."""
    is_weak = preterite.endswith("e")
    match who:
        case "I" | "he":
            return preterite
        case "you":
            return preterite + ("est" if preterite.endswith(("t", "d", "s", "ß", "z")) else "st")
        case _:
            return preterite + ("n" if is_weak else "en")


def _irregular(infinitive: str, who: Agreement, *, is_past: bool) -> str:
    forms = _IRREGULAR[infinitive].split(" ")
    return past(forms[-1], who) if is_past else forms[_PERSONS.index(who)]


def _bracket(clause: Clause) -> tuple[str, str, str]:
    """The finite verb, its separable prefix, and what stands at the end of the clause: infinitives and participles."""
    verb, who, is_past = clause.verb, agreement(clause.subject), clause.tense == "past"
    infinitive = f"{verb.participle} werden" if clause.is_passive else verb.prefix + verb.infinitive
    if clause.modal is not None:
        return _irregular(clause.modal.infinitive, who, is_past=is_past), "", infinitive
    match clause.tense:
        case "future":
            return _irregular("werden", who, is_past=False), "", infinitive
        case "perfect":
            auxiliary = "sein" if clause.is_passive else verb.auxiliary
            return _irregular(auxiliary, who, is_past=False), "", verb.participle + (" worden" if clause.is_passive else "")
    if clause.is_passive:
        return _irregular("werden", who, is_past=is_past), "", verb.participle
    return past(verb.preterite, who) if is_past else present(verb, who), verb.prefix, ""


# --- clauses ----------------------------------------------------------------------------------------------------------------------------


def verb_second(clause: Clause, *, opener: str = "") -> str:
    """A main clause, or a question with a question word: opener or fronted phrase, finite verb, the rest.

    Args:
        clause: The clause; without an opener its `front` says what comes first.
        opener: A question word or a whole subordinate clause that takes the first place.
    """
    finite, prefix, end = _bracket(clause)
    front = opener or _front(clause)
    is_inverted = bool(opener) or clause.front != "subject"
    return _join(front, finite, *_middle_field(clause, is_inverted=is_inverted, has_subject=is_inverted, has_opener=bool(opener)), prefix, end)


def predicate(clause: Clause) -> str:
    """A main clause without its subject: macht die Tür auf."""
    finite, prefix, end = _bracket(clause)
    return _join(finite, *_middle_field(clause, is_inverted=False, has_subject=False, has_opener=True), prefix, end)


def verb_first(clause: Clause) -> str:
    """A question to be answered by yes or no."""
    finite, prefix, end = _bracket(clause)
    return _join(finite, *_middle_field(clause, is_inverted=True, has_subject=True, has_opener=True), prefix, end)


def verb_last(clause: Clause, *, opener: str = "") -> str:
    """A subordinate clause after a conjunction, a question word or a relative pronoun."""
    finite, prefix, end = _bracket(clause)
    front = _front(clause) if clause.front == "object" else ""
    return _join(opener, front, *_middle_field(clause, is_inverted=False, has_subject=True, has_opener=not front), end, prefix + finite)


def infinitive(clause: Clause) -> str:
    """An infinitive with zu: die Tür aufzumachen."""
    verb = clause.verb
    end = f"{verb.prefix}zu{verb.infinitive}" if verb.prefix else f"zu {verb.infinitive}"
    return _join(*_middle_field(clause, is_inverted=False, has_subject=False, has_opener=True), end)


def imperative(clause: Clause) -> str:
    """A request to du: mach die Tür auf."""
    verb = clause.verb
    stem = verb_stem(verb.infinitive)
    finite = stem
    if "i" in verb.present3 and "i" not in stem:  # lies, nimm; but fahr, lauf
        finite = verb.present3.removesuffix("t")
    elif verb.infinitive.endswith(("eln", "ern", "ieren")) or verb.present3.endswith("et"):
        finite = present(verb, "I")
    return _join(finite, *_middle_field(clause, is_inverted=False, has_subject=False, has_opener=True), verb.prefix)


def _front(clause: Clause) -> str:
    match clause.front:
        case "object" if clause.object is not None:
            return phrase(clause.object, clause.verb.case)
        case "time" | "place" as slot if (value := clause.adverbial(slot)) is not None:
            return adverbial(value)
        case "subject":
            return phrase(clause.subject, "nom")
    raise AssertionError(f"nothing to put first: {clause}")


def _middle_field(clause: Clause, *, is_inverted: bool, has_subject: bool, has_opener: bool) -> list[str]:
    """What stands between the two parts of the verb.

    The order: subject, pronouns, time, definite objects (dative first), already and never, nicht, manner, companion and place, indefinite
    objects, prepositional object, direction, predicate.

    Args:
        clause: The clause.
        is_inverted: The finite verb stands before the subject; then pronouns stand before a subject that is none (gestern half ihm der Mann),
            except for those that could be taken for the subject.
        has_subject: The subject stands here.
        has_opener: The first place is taken by something outside of the clause, so that everything is here.
    """
    verb, target, recipient = clause.verb, clause.object, clause.recipient
    fronted = "subject" if has_opener else clause.front
    is_kein = clause.is_negated and is_indefinite(target) and not verb.preposition
    subject = [phrase(clause.subject, "nom")] if has_subject else []
    reflexive = [_REFLEXIVES[agreement(clause.subject)]] if verb.is_reflexive else []
    pronouns: list[str] = []
    definite: list[str] = []
    indefinite: list[str] = []
    prepositional: list[str] = []
    if recipient is not None:
        (pronouns if isinstance(recipient, Pronoun) else definite).append(phrase(recipient, "dat"))
    if target is not None and fronted != "object":
        if verb.preposition:
            prepositional = [_prepositional(verb.preposition, verb.case, target)]
        elif isinstance(target, Pronoun):
            pronouns.insert(0, phrase(target, verb.case))
        else:
            (indefinite if is_indefinite(target) else definite).append(phrase(target, verb.case, is_negated=is_kein))

    def slots(*names: Slot) -> list[str]:
        return [adverbial(value) for name in names if (value := clause.adverbial(name)) is not None and name != fronted]

    weak, others = [word for word in (*reflexive, *pronouns) if word not in _AMBIGUOUS], [word for word in pronouns if word in _AMBIGUOUS]
    if not is_inverted or isinstance(clause.subject, Pronoun):
        weak, others = [], [*reflexive, *pronouns]
    return [
        *weak,
        *subject,
        *others,
        *slots("time", "often"),
        *definite,
        *slots("already"),
        *(["nicht"] if clause.is_negated and not is_kein else []),
        *([_prepositional("von", "dat", clause.agent)] if clause.agent is not None else []),
        *slots("manner", "with", "place"),
        *indefinite,
        *slots("for"),
        *prepositional,
        *slots("to"),
        *([_predicate(clause.predicate)] if clause.predicate is not None else []),
    ]


def is_indefinite(value: Phrase | None) -> bool:
    """Whether a phrase is a noun without definite determiner, which comes late in the clause and is negated by kein."""
    return isinstance(value, NounPhrase) and not value.is_definite


def _cell(forms: str, case: Case) -> str:
    return forms.split(" ")[_CASES.index(case)]


def _ending(endings: str, case: Case) -> str:
    return _cell(endings, case).replace("-", "")


def _join(*words: str) -> str:
    return " ".join(word for word in words if word)

"""Sentences written by hand, against what the grammar of the quickstart recipe says for them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from recipes.quickstart import english, german
from recipes.quickstart.grammar import (
    Clause,
    Comparison,
    Determiner,
    Measure,
    Name,
    NounPhrase,
    Pair,
    PersonalPronoun,
    Phrase,
    Prepositional,
    Pronoun,
    QuestionWord,
    Relative,
    SentencePair,
    finish,
)
from recipes.quickstart.lexicon import Adjective, Adverb, Case, Gender, Modal, Noun, Verb
from recipes.quickstart.modifiers import ADJECTIVES, HABITS, HOME, PERFECTS, RIDES, TIMES
from recipes.quickstart.nouns import NOUNS
from recipes.quickstart.verbs import BE, COST, HAVE, MODALS, PUT, VERBS

Wording = Callable[[Clause], SentencePair]


def noun(en: str) -> Noun:
    return next(noun for noun in NOUNS if noun.en == en)


def adjective(en: str) -> Adjective:
    return next(adjective for adjective in ADJECTIVES if adjective.en == en)


def verb(en: str) -> Verb:
    return next(verb for verb in (*VERBS, HAVE) if f"{verb.en} {verb.particle}".strip() == en)


def modal(infinitive: str) -> Modal:
    return next(modal for modal in MODALS if modal.infinitive == infinitive)


def adverb(en: str) -> Adverb:
    return next(adverb for adverb in (*TIMES, *HABITS, *PERFECTS, *RIDES) if adverb.en == en)


def np(words: str, **more: Any) -> NounPhrase:
    """`the old man`, `my two+ sister`: determiner, adjectives, noun; a plus after the noun makes it plural."""
    determiner, *adjectives, head = words.split(" ")
    determiners: dict[str, Determiner] = {"-": "none", "an": "a", "how": "how many"}
    chosen: Any = determiners.get(determiner, determiner)
    return NounPhrase(
        noun=noun(head.rstrip("+").replace("_", " ")),
        determiner=chosen,
        adjectives=tuple(adjective(word) for word in adjectives),
        is_plural=head.endswith("+"),
        **more,
    )


def pro(en: PersonalPronoun, gender: Gender = "n") -> Pronoun:
    return Pronoun(en=en, gender=gender)


def at(en: str, de: str, case: Case, phrase: Phrase, slot: Any = "place") -> Prepositional:
    return Prepositional(en=en, de=de, case=case, phrase=phrase, slot=slot)


def is_(what: str, **more: Any) -> Comparison:
    return Comparison(adjective=adjective(what), **more)


def say(clause: Clause) -> SentencePair:
    return finish(english.statement(clause), german.verb_second(clause), ".")


def ask(clause: Clause) -> SentencePair:
    return finish(english.question(clause), german.verb_first(clause), "?")


def ask_wh(clause: Clause) -> SentencePair:
    return finish(english.question(clause), german.verb_second(clause), "?")


def order(clause: Clause) -> SentencePair:
    return finish(english.imperative(clause), german.imperative(clause), "!")


def wh(en: str, de: str) -> Wording:
    return lambda clause: finish(english.question(clause, opener=en), german.verb_second(clause, opener=de), "?")


def sub(en: str, de: str) -> Wording:
    """A subordinate clause after `he stays`."""
    start = Clause(subject=pro("he"), verb=verb("stay"))
    return lambda clause: finish(
        f"{english.statement(start)} {english.subordinate(clause, opener=en)}",
        f"{german.verb_second(start)}, {german.verb_last(clause, opener=de)}",
        ".",
    )


def trying(clause: Clause) -> SentencePair:
    start = dataclasses.replace(clause, object=None, recipient=None, verb=verb("try"), adverbials=())
    return finish(f"{english.statement(start)} {english.infinitive(clause)}", f"{german.verb_second(start)}, {german.infinitive(clause)}", ".")


def c(subject: Phrase, en: str | Verb, target: Phrase | None = None, **more: Any) -> Clause:
    return Clause(subject=subject, verb=verb(en) if isinstance(en, str) else en, object=target, **more)


YOU, HE, SHE, WE, THEY, I_ = pro("you"), pro("he"), pro("she"), pro("we"), pro("they"), pro("I")
ANNA, PAUL = Name(text="Anna", gender="f"), Name(text="Paul", gender="m")
KITCHEN = at("in", "in", "dat", np("the kitchen"))
GARDEN = at("in", "in", "dat", np("the garden"))

CASES: list[tuple[Wording, Clause, str, str]] = [
    # gender, case and the article
    (say, c(np("the man"), "buy", np("the coat")), "The man buys the coat.", "Der Mann kauft den Mantel."),
    (say, c(np("the woman"), "buy", np("the dress")), "The woman buys the dress.", "Die Frau kauft das Kleid."),
    (say, c(np("the girl"), "read", np("the newspaper")), "The girl reads the newspaper.", "Das Mädchen liest die Zeitung."),
    (say, c(np("a boy"), "eat", np("an apple")), "A boy eats an apple.", "Ein Junge isst einen Apfel."),
    (say, c(np("the child"), "help", np("the boy")), "The child helps the boy.", "Das Kind hilft dem Jungen."),
    (say, c(np("every teacher"), "thank", np("this prince")), "Every teacher thanks this prince.", "Jeder Lehrer dankt diesem Prinzen."),
    (say, c(np("the teacher+"), "thank", np("the child+")), "The teachers thank the children.", "Die Lehrer danken den Kindern."),
    # adjectives: weak, mixed, strong, singular and plural
    (say, c(np("the old man"), "sell", np("the red car")), "The old man sells the red car.", "Der alte Mann verkauft das rote Auto."),
    (say, c(np("a young woman"), "sell", np("a red car")), "A young woman sells a red car.", "Eine junge Frau verkauft ein rotes Auto."),
    (say, c(np("my good friend"), "help", np("a poor man")), "My good friend helps a poor man.", "Mein guter Freund hilft einem armen Mann."),
    (say, c(WE, "drink", np("- cold milk")), "We drink cold milk.", "Wir trinken kalte Milch."),
    (say, c(WE, "drink", np("- hot coffee")), "We drink hot coffee.", "Wir trinken heißen Kaffee."),
    (say, c(I_, "buy", np("our expensive table")), "I buy our expensive table.", "Ich kaufe unseren teuren Tisch."),
    (say, c(np("the tired child+"), "sleep"), "The tired children sleep.", "Die müden Kinder schlafen."),
    (say, c(THEY, "sell", np("- old book+")), "They sell old books.", "Sie verkaufen alte Bücher."),
    (say, c(THEY, "help", np("many sick woman+")), "They help many sick women.", "Sie helfen vielen kranken Frauen."),
    (say, c(THEY, "see", np("all dark church+")), "They see all dark churches.", "Sie sehen alle dunklen Kirchen."),
    # genitive and owners
    (say, c(SHE, "find", np("the key", owner=np("the doctor"))), "She finds the doctor's key.", "Sie findet den Schlüssel des Arztes."),
    (say, c(SHE, "find", np("the key", owner=np("my boss"))), "She finds my boss's key.", "Sie findet den Schlüssel meines Chefs."),
    (say, c(SHE, "see", np("the dog", owner=np("the boy"))), "She sees the boy's dog.", "Sie sieht den Hund des Jungen."),
    (say, c(SHE, "see", np("the car", owner=np("the queen"))), "She sees the queen's car.", "Sie sieht das Auto der Königin."),
    (say, c(HE, "clean", np("the old bicycle", owner=ANNA)), "He cleans Anna's old bicycle.", "Er putzt Annas altes Fahrrad."),
    # numbers
    (
        say,
        c(np("- brother+", count=2), "have", np("- red car+", count=23)),
        "Two brothers have twenty-three red cars.",
        "Zwei Brüder haben dreiundzwanzig rote Autos.",
    ),
    (say, c(I_, BE, predicate=Measure(count=31, unit="years old")), "I am thirty-one years old.", "Ich bin einunddreißig Jahre alt."),
    (
        say,
        c(np("the lamp"), COST, predicate=Measure(count=77, unit="euros")),
        "The lamp costs seventy-seven euros.",
        "Die Lampe kostet siebenundsiebzig Euro.",
    ),
    # tenses
    (say, c(np("the child"), "eat", np("the cake"), tense="past"), "The child ate the cake.", "Das Kind aß den Kuchen."),
    (say, c(np("the child+"), "eat", np("the cake"), tense="perfect"), "The children have eaten the cake.", "Die Kinder haben den Kuchen gegessen."),
    (say, c(np("the train"), "arrive", tense="perfect"), "The train has arrived.", "Der Zug ist angekommen."),
    (say, c(YOU, "repair", np("a lamp"), tense="perfect"), "You have repaired a lamp.", "Du hast eine Lampe repariert."),
    (say, c(HE, "visit", np("his uncle"), tense="future"), "He will visit his uncle.", "Er wird seinen Onkel besuchen."),
    (say, c(YOU, "read", np("the letter"), tense="future"), "You will read the letter.", "Du wirst den Brief lesen."),
    # conjugation
    (say, c(YOU, "read", np("a book")), "You read a book.", "Du liest ein Buch."),
    (say, c(YOU, "invite", np("my aunt")), "You invite my aunt.", "Du lädst meine Tante ein."),
    (say, c(YOU, "work"), "You work.", "Du arbeitest."),
    (say, c(YOU, "dance"), "You dance.", "Du tanzt."),
    (say, c(I_, "smile"), "I smile.", "Ich lächle."),
    (say, c(I_, "feed", np("the cow+")), "I feed the cows.", "Ich füttere die Kühe."),
    (say, c(np("the artist+"), "draw", np("an elephant"), tense="past"), "The artists drew an elephant.", "Die Künstler zeichneten einen Elefanten."),
    (say, c(WE, "run", tense="past", adverbials=(HOME,)), "We ran home.", "Wir liefen nach Hause."),
    # verb second
    (
        say,
        c(np("the man"), "buy", np("a car"), tense="past", adverbials=(adverb("yesterday"),), front="time"),
        "Yesterday the man bought a car.",
        "Gestern kaufte der Mann ein Auto.",
    ),
    (
        say,
        c(np("the woman"), "read", np("the novel"), tense="perfect", adverbials=(GARDEN,), front="place"),
        "In the garden, the woman has read the novel.",
        "Im Garten hat die Frau den Roman gelesen.",
    ),
    (
        say,
        c(HE, "drink", np("- tea"), adverbials=(adverb("often"), KITCHEN)),
        "He often drinks tea in the kitchen.",
        "Er trinkt oft in der Küche Tee.",
    ),
    (say, c(HE, "drink", np("the tea"), adverbials=(adverb("never"),)), "He never drinks the tea.", "Er trinkt den Tee nie."),
    (
        say,
        c(np("the man"), "help", HE, tense="past", adverbials=(adverb("yesterday"),), front="time"),
        "Yesterday the man helped him.",
        "Gestern half ihm der Mann.",
    ),
    # separable prefixes
    (say, c(SHE, "open", np("the window")), "She opens the window.", "Sie macht das Fenster auf."),
    (say, c(SHE, "open", np("the window"), tense="perfect"), "She has opened the window.", "Sie hat das Fenster aufgemacht."),
    (sub("because", "weil"), c(SHE, "open", np("the window")), "He stays because she opens the window.", "Er bleibt, weil sie das Fenster aufmacht."),
    (trying, c(SHE, "open", np("the window")), "She tries to open the window.", "Sie versucht, das Fenster aufzumachen."),
    (order, c(YOU, "turn off", np("the radio")), "Turn off the radio!", "Schalte das Radio aus!"),
    (say, c(I_, "turn off", pro("it", "f")), "I turn it off.", "Ich schalte sie aus."),
    # modals
    (say, c(HE, "sleep", modal=modal("müssen")), "He has to sleep.", "Er muss schlafen."),
    (say, c(HE, "sleep", modal=modal("müssen"), is_negated=True), "He does not have to sleep.", "Er muss nicht schlafen."),
    (say, c(YOU, "go", modal=modal("dürfen"), adverbials=(HOME,)), "You are allowed to go home.", "Du darfst nach Hause gehen."),
    (say, c(SHE, "call", np("her son"), modal=modal("wollen"), tense="past"), "She wanted to call her son.", "Sie wollte ihren Sohn anrufen."),
    (say, c(I_, "cook", np("a soup"), modal=modal("können"), is_negated=True), "I cannot cook a soup.", "Ich kann keine Suppe kochen."),
    (ask, c(YOU, "eat", np("the pizza"), modal=modal("möchten")), "Would you like to eat the pizza?", "Möchtest du die Pizza essen?"),
    (sub("although", "obwohl"), c(HE, "work", modal=modal("sollten")), "He stays although he should work.", "Er bleibt, obwohl er arbeiten sollte."),
    # negation
    (say, c(np("the man"), "see", np("the bird"), is_negated=True), "The man does not see the bird.", "Der Mann sieht den Vogel nicht."),
    (say, c(np("the man"), "see", np("a bird"), is_negated=True), "The man does not see a bird.", "Der Mann sieht keinen Vogel."),
    (say, c(WE, "buy", np("- egg+"), is_negated=True, tense="past"), "We did not buy eggs.", "Wir kauften keine Eier."),
    (say, c(HE, "wait for", np("the bus"), is_negated=True), "He does not wait for the bus.", "Er wartet nicht auf den Bus."),
    (say, c(SHE, BE, predicate=is_("tired"), is_negated=True), "She is not tired.", "Sie ist nicht müde."),
    (order, c(YOU, "open", np("the door"), is_negated=True), "Do not open the door!", "Mach die Tür nicht auf!"),
    # two objects
    (say, c(HE, "give", np("a letter"), recipient=np("the woman")), "He gives the woman a letter.", "Er gibt der Frau einen Brief."),
    (say, c(HE, "show", np("the letter"), recipient=I_, tense="past"), "He showed me the letter.", "Er zeigte mir den Brief."),
    (
        say,
        c(HE, "tell", np("a story"), recipient=np("the child+"), tense="perfect"),
        "He has told the children a story.",
        "Er hat den Kindern eine Geschichte erzählt.",
    ),
    # prepositions and their cases
    (say, c(ANNA, "talk to", np("the neighbor")), "Anna talks to the neighbor.", "Anna spricht mit dem Nachbarn."),
    (say, c(ANNA, "think of", np("the exam")), "Anna thinks of the exam.", "Anna denkt an die Prüfung."),
    (
        say,
        c(np("the key"), BE, predicate=at("under", "unter", "dat", np("the table"))),
        "The key is under the table.",
        "Der Schlüssel ist unter dem Tisch.",
    ),
    (
        say,
        c(HE, PUT, np("the key"), adverbials=(at("under", "unter", "acc", np("the table"), "to"),)),
        "He puts the key under the table.",
        "Er legt den Schlüssel unter den Tisch.",
    ),
    (say, c(HE, "go", adverbials=(at("to", "in", "acc", np("the cinema"), "to"),)), "He goes to the cinema.", "Er geht ins Kino."),
    (
        say,
        c(PAUL, "travel", tense="perfect", adverbials=(Adverb(en="to Rome", de="nach Rom", slot="to"), adverb("by train"))),
        "Paul has traveled to Rome by train.",
        "Paul ist mit dem Zug nach Rom gereist.",
    ),
    (
        say,
        c(PAUL, "sleep", tense="past", adverbials=(at("during", "während", "gen", np("the concert"), "time"),)),
        "Paul slept during the concert.",
        "Paul schlief während des Konzerts.",
    ),
    # reflexive verbs
    (say, c(I_, "look forward to", np("the trip")), "I look forward to the trip.", "Ich freue mich auf die Reise."),
    (say, c(WE, "remember", np("the wedding"), tense="past"), "We remembered the wedding.", "Wir erinnerten uns an die Hochzeit."),
    (
        say,
        c(np("the guest"), "sit down", tense="past", adverbials=(adverb("yesterday"),), front="time"),
        "Yesterday the guest sat down.",
        "Gestern setzte sich der Gast.",
    ),
    (sub("because", "weil"), c(YOU, "rest"), "He stays because you rest.", "Er bleibt, weil du dich ausruhst."),
    # questions
    (ask, c(np("the teacher"), "buy", np("the house")), "Does the teacher buy the house?", "Kauft der Lehrer das Haus?"),
    (ask, c(YOU, "close", np("the door"), tense="perfect"), "Have you closed the door?", "Hast du die Tür zugemacht?"),
    (ask_wh, c(QuestionWord(en="who"), "read", np("the book"), tense="past"), "Who read the book?", "Wer las das Buch?"),
    (ask_wh, c(np("the man"), "help", QuestionWord(en="who"), front="object"), "Whom does the man help?", "Wem hilft der Mann?"),
    (ask_wh, c(YOU, "invite", QuestionWord(en="who"), front="object"), "Whom do you invite?", "Wen lädst du ein?"),
    (ask_wh, c(YOU, "eat", QuestionWord(en="what"), front="object", tense="future"), "What will you eat?", "Was wirst du essen?"),
    (ask_wh, c(SHE, "wash", np("which shirt"), front="object"), "Which shirt does she wash?", "Welches Hemd wäscht sie?"),
    (ask_wh, c(SHE, "buy", np("how pear+"), front="object"), "How many pears does she buy?", "Wie viele Birnen kauft sie?"),
    (wh("why", "warum"), c(np("the girl"), "cry"), "Why does the girl cry?", "Warum weint das Mädchen?"),
    (wh("when", "wann"), c(np("the bus"), "depart"), "When does the bus depart?", "Wann fährt der Bus ab?"),
    # subordinate clauses
    (sub("if", "wenn"), c(HE, BE, predicate=is_("sick")), "He stays if he is sick.", "Er bleibt, wenn er krank ist."),
    (sub("when", "als"), c(SHE, "come back", tense="past"), "He stays when she came back.", "Er bleibt, als sie zurückkam."),
    (sub("because", "weil"), c(SHE, "arrive", tense="perfect"), "He stays because she has arrived.", "Er bleibt, weil sie angekommen ist."),
    # comparison
    (
        say,
        c(np("the dog"), BE, predicate=is_("big", degree="comparative", standard=np("the cat"))),
        "The dog is bigger than the cat.",
        "Der Hund ist größer als die Katze.",
    ),
    (
        say,
        c(np("the novel"), BE, predicate=is_("exciting", degree="equal", standard=np("the poem"))),
        "The novel is as exciting as the poem.",
        "Der Roman ist so spannend wie das Gedicht.",
    ),
    # passive
    (say, c(np("the car"), "repair", is_passive=True), "The car is repaired.", "Das Auto wird repariert."),
    (
        say,
        c(np("the cake"), "eat", is_passive=True, tense="past", agent=np("the guest+")),
        "The cake was eaten by the guests.",
        "Der Kuchen wurde von den Gästen gegessen.",
    ),
    (say, c(np("the letter+"), "write", is_passive=True, tense="perfect"), "The letters have been written.", "Die Briefe sind geschrieben worden."),
    (
        say,
        c(np("the lamp"), "turn off", is_passive=True, modal=modal("müssen")),
        "The lamp has to be turned off.",
        "Die Lampe muss ausgeschaltet werden.",
    ),
    # relative clauses
    (
        say,
        c(np("the man", relative=c(Relative(key="m", is_person=True), "sell", np("- bread"))), BE, predicate=is_("rich")),
        "The man who sells bread is rich.",
        "Der Mann, der Brot verkauft, ist reich.",
    ),
    (
        say,
        c(HE, "know", np("the woman", relative=c(I_, "help", Relative(key="f", is_person=True), front="object"))),
        "He knows the woman whom I help.",
        "Er kennt die Frau, der ich helfe.",
    ),
    (
        say,
        c(np("the tree+", relative=c(YOU, "see", Relative(key="p", is_person=False), front="object")), BE, predicate=is_("beautiful")),
        "The trees that you see are beautiful.",
        "Die Bäume, die du siehst, sind schön.",
    ),
    # coordination
    (say, c(Pair(first=ANNA, second=np("my brother")), "sleep"), "Anna and my brother sleep.", "Anna und mein Bruder schlafen."),
]


@pytest.mark.parametrize(("wording", "clause", "en", "de"), CASES, ids=[case[2] for case in CASES])
def test_sentence(wording: Wording, clause: Clause, en: str, de: str) -> None:
    assert wording(clause) == (en, de)


@pytest.mark.parametrize(("gender", "de"), [("m", "er"), ("f", "sie"), ("n", "es")])
def test_it_takes_the_gender_of_its_noun(gender: Gender, de: str) -> None:
    clause = c(pro("it", gender), BE, predicate=is_("new"))
    assert sub("because", "weil")(clause) == ("He stays because it is new.", f"Er bleibt, weil {de} neu ist.")


@pytest.mark.parametrize(
    ("value", "en", "de"),
    [
        *((2, "two", "zwei"), (12, "twelve", "zwölf"), (16, "sixteen", "sechzehn"), (17, "seventeen", "siebzehn")),
        *((21, "twenty-one", "einundzwanzig"), (30, "thirty", "dreißig"), (66, "sixty-six", "sechsundsechzig")),
        *((70, "seventy", "siebzig"), (99, "ninety-nine", "neunundneunzig")),
    ],
)
def test_numbers(value: int, en: str, de: str) -> None:
    assert (english.number(value), german.number(value)) == (en, de)


# Written from a grammar of German, not from the program: nominative, accusative, dative, genitive.
DECLENSIONS = {
    "the old man": ("der alte Mann", "den alten Mann", "dem alten Mann", "des alten Mannes"),
    "the old woman": ("die alte Frau", "die alte Frau", "der alten Frau", "der alten Frau"),
    "the old house": ("das alte Haus", "das alte Haus", "dem alten Haus", "des alten Hauses"),
    "the old house+": ("die alten Häuser", "die alten Häuser", "den alten Häusern", "der alten Häuser"),
    "a small boy": ("ein kleiner Junge", "einen kleinen Jungen", "einem kleinen Jungen", "eines kleinen Jungen"),
    "my new car": ("mein neues Auto", "mein neues Auto", "meinem neuen Auto", "meines neuen Autos"),
    "their new car+": ("ihre neuen Autos", "ihre neuen Autos", "ihren neuen Autos", "ihrer neuen Autos"),
    "this dark church": ("diese dunkle Kirche", "diese dunkle Kirche", "dieser dunklen Kirche", "dieser dunklen Kirche"),
    "- fresh bread": ("frisches Brot", "frisches Brot", "frischem Brot", "frischen Brotes"),
    "- hot soup+": ("heiße Suppen", "heiße Suppen", "heißen Suppen", "heißer Suppen"),
    "some cheap pear+": ("einige billige Birnen", "einige billige Birnen", "einigen billigen Birnen", "einiger billiger Birnen"),
}


@pytest.mark.parametrize("words", DECLENSIONS)
def test_declension(words: str) -> None:
    cases: tuple[Case, ...] = ("nom", "acc", "dat", "gen")
    assert tuple(german.phrase(np(words), case) for case in cases) == DECLENSIONS[words]

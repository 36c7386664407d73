"""Adjectives, adverbials, conjunctions and the other small words. How to read a table: `lexicon.py`."""

from recipes.quickstart.lexicon import Adverb, Slot, Tense, make_adjective, rows

# Tags: the nouns it suits; `good` and `bad` for a reason to like or to dislike a thing; `state` for a reason to act in some way.
_ADJECTIVES = """
alt/älter = old/older : person animal clothes vehicle furniture building place
jung/jünger = young/younger : person animal
groß/größer = big/bigger : animal vehicle furniture building place thing plant
klein/kleiner = small/smaller : animal vehicle furniture building place thing plant
schnell/schneller = fast/faster : vehicle transport animal good
langsam/langsamer = slow/slower : vehicle transport bad
neu/neuer = new/newer : clothes vehicle furniture building place thing device good
modern/moderner = modern/more modern : furniture building place device vehicle good
teuer/teurer = expensive/more expensive : clothes vehicle furniture device thing reading food drink bad
billig/billiger = cheap/cheaper : clothes vehicle furniture device thing reading food drink good
schön/schöner = beautiful/more beautiful : clothes vehicle furniture building place thing plant event topic good
hässlich/hässlicher = ugly/uglier : clothes vehicle furniture building thing bad
schwer/schwerer = heavy/heavier : furniture thing device bad
lang/länger = long/longer : reading event topic lengthy bad
kurz/kürzer = short/shorter : reading event topic lengthy
warm/wärmer = warm/warmer : clothes good
sauber = clean : clothes thing place furniture good
schmutzig = dirty : clothes thing vehicle furniture bad
kaputt = broken : vehicle device thing bad
leer = empty : container place
nützlich/nützlicher = useful/more useful : device tool reading good
rot = red : clothes vehicle furniture thing plant
grün = green : clothes vehicle furniture thing
blau = blue : clothes vehicle furniture thing
gelb = yellow : clothes vehicle thing plant
schwarz = black : clothes vehicle animal thing
weiß = white : clothes vehicle animal furniture plant
braun = brown : clothes animal furniture
frisch/frischer = fresh/fresher : food good
lecker = delicious : food drink good
süß/süßer = sweet/sweeter : fruit sweets good
reif = ripe : fruit
kalt/kälter = cold/colder : food drink bad
heiß/heißer = hot/hotter : food drink
gesund/gesünder = healthy/healthier : fruit person
interessant/interessanter = interesting/more interesting : reading event topic place good
langweilig/langweiliger = boring/more boring : reading event topic bad
spannend/spannender = exciting/more exciting : reading event good
wichtig/wichtiger = important/more important : reading event topic good
schwierig/schwieriger = difficult/more difficult : understood hard bad
lustig/lustiger = funny/funnier : person topic reading good
gut/besser = good/better : reading food drink event topic good
schlecht/schlechter = bad/worse : reading event topic food bad
gefährlich/gefährlicher = dangerous/more dangerous : wild
dunkel/dunkler = dark/darker : place clothes
ruhig/ruhiger = quiet/quieter : place person good
berühmt/berühmter = famous/more famous : person place building
nett/netter = nice/nicer : person
freundlich/freundlicher = friendly/friendlier : person
höflich/höflicher = polite/more polite : person
klug/klüger = clever/cleverer : person
faul/fauler = lazy/lazier : person
reich/reicher = rich/richer : person
arm/ärmer = poor/poorer : person
stark/stärker = strong/stronger : person animal
mutig/mutiger = brave/braver : person
müde = tired : person state
hungrig = hungry : person animal state
durstig = thirsty : person animal state
krank = sick : person animal state
glücklich/glücklicher = happy/happier : person state
traurig = sad : person state
wütend = angry : person state
"""

ADJECTIVES = tuple(make_adjective(german, english, tags) for german, english, tags in rows(_ADJECTIVES))

_PRESENT_PAST: tuple[Tense, ...] = ("present", "past")
_PAST_FUTURE: tuple[Tense, ...] = ("past", "future")


def _adverbs(slot: Slot, tenses: tuple[Tense, ...], words: dict[str, str]) -> tuple[Adverb, ...]:
    return tuple(Adverb(de=de, en=en, slot=slot, tenses=tenses) for en, de in words.items())


TIMES = (
    *_adverbs("time", ("past",), {"yesterday": "gestern", "last week": "letzte Woche", "last year": "letztes Jahr"}),
    *_adverbs("time", ("future",), {"tomorrow": "morgen", "next week": "nächste Woche", "soon": "bald"}),
    *_adverbs("time", ("perfect", "future"), {"today": "heute"}),
    *_adverbs("time", _PAST_FUTURE, {"on Monday": "am Montag", "on Wednesday": "am Mittwoch", "on Friday": "am Freitag"}),
    *_adverbs("time", _PAST_FUTURE, {"on Saturday": "am Samstag", "on Sunday": "am Sonntag"}),
)
HABITS = (
    *_adverbs("time", _PRESENT_PAST, {"every day": "jeden Tag", "every morning": "jeden Morgen", "every evening": "jeden Abend"}),
    *_adverbs("time", _PRESENT_PAST, {"in the morning": "am Morgen", "in the evening": "am Abend", "at night": "in der Nacht"}),
    *_adverbs("time", _PRESENT_PAST, {"in summer": "im Sommer", "in winter": "im Winter"}),
    *_adverbs("often", _PRESENT_PAST, {"always": "immer", "often": "oft", "sometimes": "manchmal", "rarely": "selten"}),
    *_adverbs("already", _PRESENT_PAST, {"never": "nie"}),
)
CAUSES = (
    *_adverbs("time", ("present", "past", "perfect", "future"), {"because of the rain": "wegen des Regens", "despite the rain": "trotz des Regens"}),
    *_adverbs("time", ("present", "past", "perfect", "future"), {"because of the cold weather": "wegen des kalten Wetters"}),
)
PERFECTS = _adverbs("already", ("perfect",), {"already": "schon", "never": "nie"})
DOUBTS = _adverbs("often", ("future", "perfect"), {"probably": "wahrscheinlich", "unfortunately": "leider"})
RIDES = _adverbs("with", (), {"by train": "mit dem Zug", "by car": "mit dem Auto", "by bus": "mit dem Bus", "by bicycle": "mit dem Fahrrad"})
_HOW = {"well": "gut", "badly": "schlecht", "slowly": "langsam", "quickly": "schnell"}
_HOW |= {"loudly": "laut", "quietly": "leise", "carefully": "vorsichtig"}
MANNERS = {
    lemma: _adverbs("manner", (), {word: _HOW[word] for word in words})
    for lemma, words in {
        "schlafen": ("well", "badly"),
        "arbeiten": ("slowly", "quickly", "well"),
        "lachen": ("loudly", "quietly"),
        "singen": ("loudly", "quietly", "badly"),
        "tanzen": ("well", "badly"),
        "schwimmen": ("slowly", "quickly"),
        "auf|machen": ("carefully", "slowly", "quietly"),
        "zu|machen": ("carefully", "slowly", "quietly"),
        "ab|schließen": ("carefully", "quickly"),
        "waschen": ("carefully", "quickly"),
        "putzen": ("carefully", "quickly"),
        "reparieren": ("carefully", "slowly", "quickly", "well"),
        "lesen": ("slowly", "quickly", "carefully"),
    }.items()
}
"""Adverbs of manner, by the German verb that they go with."""

AT_HOME = Adverb(de="zu Hause", en="at home", slot="place")
HOME = Adverb(de="nach Hause", en="home", slot="to")

WHERE_THINGS_LIE = {"on": "auf", "under": "unter", "behind": "hinter", "next to": "neben", "in front of": "vor"}
"""Prepositions with the dative for where something is and the accusative for where it goes."""

WEATHER = {"it is raining": "es regnet", "it is snowing": "es schneit", "it is late": "es spät ist"}
WEATHER_PAST = {"it was raining": "es regnete", "it was snowing": "es schneite", "it was late": "es spät war"}
"""Impersonal clauses, worded as they stand after a conjunction."""

"""The verbs, in tables by what they take. How to read a table: `lexicon.py`.

Marks among the tags: `once` (not done again and again: no present), `sense` (happens to one: no imperative, passive or modal), `state` (lasts:
none of these, and no perfect or future).
"""

from recipes.quickstart.lexicon import Case, Modal, Verb, make_verb, rows

# Tags: the subjects.
_INTRANSITIVE = """
schlafen/schläft/schlief/geschlafen = sleep/slept/slept : person animal
arbeiten = work : person
lachen = laugh : person
weinen = cry : person
tanzen = dance : person
singen/singt/sang/gesungen = sing/sang/sung : person
schwimmen/schwimmt/schwamm/ist geschwommen = swim/swam/swum : person animal
lächeln = smile : person
warten = wait : person animal
spielen = play : person animal
springen/springt/sprang/ist gesprungen = jump : animal
auf|stehen/steht/stand/ist gestanden = get up/got/gotten : person
auf|wachen/ist = wake up/woke/woken : person animal
ein|schlafen/schläft/schlief/ist geschlafen = fall asleep/fell/fallen : person animal
an|kommen/kommt/kam/ist gekommen = arrive : person transport
ab|fahren/fährt/fuhr/ist gefahren = depart : transport
zurück|kommen/kommt/kam/ist gekommen = come back/came/come : person animal
fern|sehen/sieht/sah/gesehen = watch television : person
ein|kaufen = go shopping/went/gone : person
frühstücken = have breakfast/had/had : person
sich beeilen = hurry : person
sich aus|ruhen = rest : person
sich setzen = sit down/sat/sat : person
"""

# Tags: the subjects. All take a place where something is.
_STAYING = """
bleiben/bleibt/blieb/ist geblieben = stay : person
wohnen = live : person state
sitzen/sitzt/saß/gesessen = sit/sat/sat : person animal seat state
liegen/liegt/lag/gelegen = lie/lay/lain : animal seat state
"""

# Tags: where to: a place, a city or both.
_MOVING = """
gehen/geht/ging/ist gegangen = go/went/gone : place
laufen/läuft/lief/ist gelaufen = run/ran/run : place
fahren/fährt/fuhr/ist gefahren = drive/drove/driven : place city
fliegen/fliegt/flog/ist geflogen = fly/flew/flown : city
reisen/ist = travel : city
"""

# Tags: the objects.
_TRANSITIVE = """
kaufen = buy/bought : bought
verkaufen = sell/sold : bought
bestellen = order : ordered drink device furniture
brauchen = need : bought state
finden/findet/fand/gefunden = find/found : thing pet reading
suchen = look for : thing pet reading relation clothes
verlieren/verliert/verlor/verloren = lose/lost : thing once sense
stehlen/stiehlt/stahl/gestohlen = steal/stole/stolen : vehicle thing once
benutzen = use : device tool
reparieren = repair : repaired
waschen/wäscht/wusch/gewaschen = wash : washed
putzen = clean : cleaned room
auf|machen = open : opened
zu|machen = close : opened
ab|schließen/schließt/schloss/geschlossen = lock : locked
ein|schalten = turn ~ on : device
aus|schalten = turn ~ off : device
auf|räumen = tidy ~ up : room
weg|werfen/wirft/warf/geworfen = throw ~ away/threw/thrown : thing reading clothes
an|ziehen/zieht/zog/gezogen = put ~ on/put/put : clothes
aus|ziehen/zieht/zog/gezogen = take ~ off/took/taken : clothes
schreiben/schreibt/schrieb/geschrieben = write/wrote/written : written
lesen/liest/las/gelesen = read/read/read : reading
zeichnen = draw/drew/drawn : drawn building
fotografieren = photograph : wild building plant transport
essen/isst/aß/gegessen = eat/ate/eaten : food
kochen = cook : cooked
backen/backt/backte/gebacken = bake : baked
schneiden/schneidet/schnitt/geschnitten = cut/cut/cut : cut
schälen = peel : peelable
trinken/trinkt/trank/getrunken = drink/drank/drunk : drink
bezahlen = pay for/paid : ordered drink clothes
füttern = feed/fed : pet
vergessen/vergisst/vergaß/vergessen = forget/forgot/forgotten : thing topic sense
verstehen/versteht/verstand/verstanden = understand/understood : understood sense
zurück|geben/gibt/gab/gegeben = give ~ back/gave/given : borrowed
lernen = learn : learned
hören = hear/heard : pet heard sense
bauen = build/built : built once
zerbrechen/zerbricht/zerbrach/zerbrochen = break/broke/broken : broken once
gewinnen/gewinnt/gewann/gewonnen = win/won : won
aus|suchen = choose/chose/chosen : clothes thing reading furniture
vor|bereiten = prepare : prepared
an|schauen = watch : watched
besuchen = visit : visited relation
treffen/trifft/traf/getroffen = meet/met : person
an|rufen/ruft/rief/gerufen = call : person
ein|laden/lädt/lud/geladen = invite : person
ab|holen = pick ~ up : relation parcel
fragen = ask : person
küssen = kiss : relation
sehen/sieht/sah/gesehen = see/saw/seen : seen person sense
kennen/kennt/kannte/gekannt = know/knew/known : person place state
mögen/mag/mochte/gemocht = like : food drink animal person state
lieben = love : relation pet place state
mit|bringen/bringt/brachte/gebracht = bring ~ along/brought : food thing pet
"""

# Tags: the objects.
_DATIVE = """
helfen/hilft/half/geholfen = help : person
danken = thank : person
antworten = answer : person
folgen/ist = follow : person
vertrauen = trust : person state
zu|hören = listen to : person
glauben = believe : person state
"""

# German preposition, case, verb; tags: the objects.
_PREPOSITIONAL = """
auf acc: warten = wait for : person transport
an acc: denken/denkt/dachte/gedacht = think of/thought : person event
über acc: sprechen/spricht/sprach/gesprochen = talk about : event topic reading
mit dat: sprechen/spricht/sprach/gesprochen = talk to : person
von dat: träumen = dream of : event place
mit dat: spielen = play with : playmate toy
über acc: lachen = laugh at : told
auf acc: sich freuen = look forward to : event state
an acc: sich erinnern = remember : event person place topic sense
an dat: teil|nehmen/nimmt/nahm/genommen = take part in/took/taken : joined
"""

# Tags: what is given, always to a person in the dative.
_GIVING = """
geben/gibt/gab/gegeben = give/gave/given : thing reading food
zeigen = show/showed/shown : thing reading animal clothes
schicken = send/sent : sent
bringen/bringt/brachte/gebracht = bring/brought : food drink clothes
leihen/leiht/lieh/geliehen = lend/lent : borrowed
erzählen = tell/told : told
"""

# Followed by a clause with dass.
_SAYING = """
sagen = say/said
denken/denkt/dachte/gedacht = think/thought
wissen/weiß/wusste/gewusst = know/knew/known
hoffen = hope
glauben = believe
"""

# Followed by an infinitive with zu.
_TRYING = """
versuchen = try
vergessen/vergisst/vergaß/vergessen = forget/forgot/forgotten
beschließen/beschließt/beschloss/beschlossen = decide
an|fangen/fängt/fing/gefangen = begin/began/begun
"""


def _verbs(table: str, *, case: Case = "acc") -> tuple[Verb, ...]:
    return tuple(make_verb(german, english, tags, case=case) for german, english, tags in rows(table))


def _prepositional() -> tuple[Verb, ...]:
    verbs = []
    cases: dict[str, Case] = {"acc": "acc", "dat": "dat"}
    for line in _PREPOSITIONAL.strip().split("\n"):
        government, _, verb = line.partition(": ")
        preposition, case = government.split(" ")
        [(german, english, tags)] = rows(verb)
        verbs.append(make_verb(german, english, tags, case=cases[case], preposition=preposition))
    return tuple(verbs)


INTRANSITIVE = _verbs(_INTRANSITIVE)
STAYING = _verbs(_STAYING)
MOVING = _verbs(_MOVING)
TRANSITIVE = _verbs(_TRANSITIVE)
DATIVE = _verbs(_DATIVE, case="dat")
PREPOSITIONAL = _prepositional()
GIVING = _verbs(_GIVING)
SAYING = _verbs(_SAYING)
TRYING = _verbs(_TRYING)
VERBS = (*INTRANSITIVE, *STAYING, *MOVING, *TRANSITIVE, *DATIVE, *PREPOSITIONAL, *GIVING, *SAYING, *TRYING)

[BE, HAVE, COST, ASK, KNOW, PUT] = _verbs("""
sein/ist/war/ist gewesen = be/was/been
haben/hat/hatte/gehabt = have/had/had : bought relation state
kosten = cost/cost/cost : state
fragen = ask
wissen/weiß/wusste/gewusst = know/knew/known
legen = put/put/put
""")

MODALS = (
    Modal(infinitive="können", kind="auxiliary", en="can", en_past="could", link=""),
    Modal(infinitive="müssen", kind="verb", en="have", en_past="had", link="to"),
    Modal(infinitive="wollen", kind="verb", en="want", en_past="wanted", link="to"),
    Modal(infinitive="sollten", kind="auxiliary", en="should", en_past="", link=""),
    Modal(infinitive="dürfen", kind="be", en="allowed", en_past="allowed", link="to"),
    Modal(infinitive="möchten", kind="auxiliary", en="would", en_past="", link="like to"),
)

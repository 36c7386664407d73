"""The nouns, in tables by what they mean. How to read a table: `lexicon.py`."""

from recipes.quickstart.lexicon import Noun, Place, make_noun, rows

_PEOPLE = """
der Mann/Männer = man/men
die Frau/Frauen = woman/women
das Kind/Kinder = child/children : young
der Junge*/Jungen = boy : young
das Mädchen/Mädchen = girl : female young
der Lehrer/Lehrer = teacher
der Student*/Studenten = student
der Arzt/Ärzte = doctor
die Krankenschwester/Krankenschwestern = nurse
der Bäcker/Bäcker = baker
der Bauer*/Bauern = farmer
der Polizist*/Polizisten = policeman/policemen
die Schauspielerin/Schauspielerinnen = actress
der König/Könige = king
die Königin/Königinnen = queen
der Prinz*/Prinzen = prince
die Prinzessin/Prinzessinnen = princess
der Kunde*/Kunden = customer
der Tourist*/Touristen = tourist
der Künstler/Künstler = artist
"""

_RELATIONS = """
der Vater/Väter = father : only
die Mutter/Mütter = mother : only
der Bruder/Brüder = brother
die Schwester/Schwestern = sister
der Sohn/Söhne = son
die Tochter/Töchter = daughter
der Onkel/Onkel = uncle
die Tante/Tanten = aunt
der Großvater/Großväter = grandfather : only
die Großmutter/Großmütter = grandmother : only
der Freund/Freunde = friend
der Nachbar*/Nachbarn = neighbor
der Gast/Gäste = guest
der Chef/Chefs = boss : only
der Kollege*/Kollegen = colleague
"""

_PETS = """
der Hund/Hunde = dog : playmate
die Katze/Katzen = cat : playmate
das Pferd/Pferde = horse
die Kuh/Kühe = cow
das Kaninchen/Kaninchen = rabbit : playmate
"""

_WILD_ANIMALS = """
der Vogel/Vögel = bird
die Maus/Mäuse = mouse/mice
der Bär*/Bären = bear
der Elefant*/Elefanten = elephant
der Löwe*/Löwen = lion
der Wolf/Wölfe = wolf/wolves
der Fuchs/Füchse = fox
die Schlange/Schlangen = snake
"""

_FOOD = """
der Apfel/Äpfel = apple : peelable fruit
die Birne/Birnen = pear : peelable fruit
die Banane/Bananen = banana : peelable fruit
die Erdbeere/Erdbeeren = strawberry : fruit
die Kartoffel/Kartoffeln = potato/potatoes : peelable cooked
die Zwiebel/Zwiebeln = onion : peelable cut
das Ei/Eier = egg : cooked
der Kuchen/Kuchen = cake : baked cut sweets
der Keks/Kekse = cookie : baked sweets
die Pizza/Pizzas = pizza : baked ordered cut
die Suppe/Suppen = soup : cooked ordered
"""

_FOOD_STUFFS = """
das Brot/- = bread : baked cut
der Käse/- = cheese : cut
das Fleisch/- = meat : cooked cut
der Reis/- = rice : cooked
die Schokolade/- = chocolate : sweets
das Eis/- = ice cream : ordered sweets
"""

_DRINKS = """
das Wasser/- = water
die Milch/- = milk
der Kaffee/- = coffee
der Tee/- = tea
der Saft/- = juice : sweets
der Wein/- = wine
das Bier/- = beer
"""

_READING = """
das Buch/Bücher = book : borrowed written
die Zeitung/Zeitungen = newspaper
der Brief/Briefe = letter : written sent
der Roman/Romane = novel : written borrowed
das Gedicht/Gedichte = poem : written learned understood
die Nachricht/Nachrichten = message : written sent understood
der Bericht/Berichte = report : written understood
"""

_CLOTHES = """
das Hemd/Hemden = shirt : washed
der Mantel/Mäntel = coat : lengthy
der Hut/Hüte = hat
das Kleid/Kleider = dress : lengthy washed
die Jacke/Jacken = jacket : washed
der Schuh/Schuhe = shoe : cleaned pair
der Stiefel/Stiefel = boot : cleaned pair
der Handschuh/Handschuhe = glove : pair
der Schal/Schals = scarf/scarves : lengthy washed
"""

_VEHICLES = """
das Auto/Autos = car : washed
das Fahrrad/Fahrräder = bicycle : cleaned borrowed
das Motorrad/Motorräder = motorcycle : washed
das Boot/Boote = boat : built borrowed
"""

_TRANSPORT = """
der Bus/Busse = bus
der Zug/Züge = train
das Flugzeug/Flugzeuge = airplane
das Schiff/Schiffe = ship
"""

_DEVICES = """
die Lampe/Lampen = lamp
der Computer/Computer = computer
das Radio/Radios = radio
der Fernseher/Fernseher = television
"""

_SMALL_THINGS = """
der Schlüssel/Schlüssel = key
der Ball/Bälle = ball : toy
die Puppe/Puppen = doll : toy
die Tasche/Taschen = bag : opened container
der Koffer/Koffer = suitcase : opened container
der Korb/Körbe = basket : container
die Flasche/Flaschen = bottle : opened broken
die Tasse/Tassen = cup : broken
der Teller/Teller = plate : broken
die Schüssel/Schüsseln = bowl : broken container
das Messer/Messer = knife/knives : tool
die Gabel/Gabeln = fork : tool
der Löffel/Löffel = spoon : tool
der Regenschirm/Regenschirme = umbrella : borrowed
der Ring/Ringe = ring
das Geschenk/Geschenke = gift : sent
das Paket/Pakete = package : opened sent parcel
das Bild/Bilder = picture : drawn
die Kamera/Kameras = camera : borrowed tool repaired
das Telefon/Telefone = phone : tool repaired
die Uhr/Uhren = clock : repaired
"""

_FURNITURE = """
der Tisch/Tische = table : cleaned surface
der Stuhl/Stühle = chair : seat
das Bett/Betten = bed : surface seat
das Sofa/Sofas = sofa : surface seat
der Schrank/Schränke = cupboard : opened surface
das Regal/Regale = shelf/shelves : cleaned built surface
"""

_PLANTS = """
die Blume/Blumen = flower
die Rose/Rosen = rose
der Baum/Bäume = tree : drawn
"""

_BUILDINGS = """
das Haus/Häuser = house : built locked bought
die Brücke/Brücken = bridge : built
die Tür/Türen = door : opened locked cleaned
das Fenster/Fenster = window : opened cleaned
"""

_EVENTS = """
das Konzert/Konzerte = concert : attended
der Film/Filme = movie : watched
die Party/Partys = party : prepared joined attended
die Reise/Reisen = trip : hard prepared joined
die Prüfung/Prüfungen = exam : hard prepared joined attended
das Spiel/Spiele = game : hard watched won joined attended
die Hochzeit/Hochzeiten = wedding : prepared attended
"""

_TOPICS = """
die Geschichte/Geschichten = story : told written heard understood
der Witz/Witze = joke : told heard understood
das Lied/Lieder = song : learned heard
die Frage/Fragen = question : heard understood
die Antwort/Antworten = answer : heard understood
das Wort/Wörter = word : learned heard understood
das Problem/Probleme = problem : understood
"""

# Tags begin with the English preposition for where something is and the German ones for where and where to.
_PLACES = """
die Küche/Küchen = kitchen : in in/in room
das Schlafzimmer/Schlafzimmer = bedroom : in in/in room
das Büro/Büros = office : in in/in room
der Garten/Gärten = garden : in in/in
der Park/Parks = park : in in/in
der Wald/Wälder = forest : in in/in
die Schule/Schulen = school : at in/in visited
das Kino/Kinos = cinema : at in/in
das Restaurant/Restaurants = restaurant : in in/in visited
das Hotel/Hotels = hotel : in in/in
das Krankenhaus/Krankenhäuser = hospital : in in/in
die Kirche/Kirchen = church : in in/in visited
das Museum/Museen = museum : in in/in visited
die Bibliothek/Bibliotheken = library : in in/in visited
die Stadt/Städte = city : in in/in visited
der Bahnhof/Bahnhöfe = station : at an/zu
der Flughafen/Flughäfen = airport : at an/zu
der Strand/Strände = beach : on an/an
der See/Seen = lake : at an/an
der Markt/Märkte = market : at auf/auf
"""

NAMES = {"Anna": "f", "Maria": "f", "Julia": "f", "Laura": "f", "Emma": "f", "Paul": "m", "Peter": "m", "Martin": "m", "Daniel": "m", "Simon": "m"}
"""First names and the sex of those who bear them; none ends in s, x or z, whose genitive is written otherwise."""

CITIES = {"Berlin": "Berlin", "Hamburg": "Hamburg", "Paris": "Paris", "Munich": "München", "Vienna": "Wien", "Cologne": "Köln", "Rome": "Rom"}


def _nouns(table: str, *tags: str) -> list[Noun]:
    return [make_noun(german, english, [*more, *tags]) for german, english, more in rows(table)]


def _places() -> tuple[Place, ...]:
    places = []
    for german, english, (en_at, de, *tags) in rows(_PLACES):
        de_at, de_to = de.split("/")
        places.append(Place(noun=make_noun(german, english, ["place", "seen", *tags]), en_at=en_at, de_at=de_at, de_to=de_to))
    return tuple(places)


PLACES = _places()
NOUNS: tuple[Noun, ...] = (
    *_nouns(_PEOPLE, "person", "stranger"),
    *_nouns(_RELATIONS, "person", "relation"),
    *_nouns(_PETS, "animal", "pet", "bought", "seen", "drawn"),
    *_nouns(_WILD_ANIMALS, "animal", "wild", "seen", "drawn"),
    *_nouns(_FOOD, "food", "bought"),
    *_nouns(_FOOD_STUFFS, "food", "bought"),
    *_nouns(_DRINKS, "drink", "bought"),
    *_nouns(_READING, "reading", "bought"),
    *_nouns(_CLOTHES, "clothes", "bought"),
    *_nouns(_VEHICLES, "vehicle", "bought", "seen", "repaired"),
    *_nouns(_TRANSPORT, "transport", "seen", "repaired"),
    *_nouns(_DEVICES, "device", "bought", "repaired"),
    *_nouns(_SMALL_THINGS, "thing", "bought"),
    *_nouns(_FURNITURE, "furniture", "bought"),
    *_nouns(_PLANTS, "plant", "bought", "seen"),
    *_nouns(_BUILDINGS, "building", "seen"),
    *_nouns(_EVENTS, "event"),
    *_nouns(_TOPICS, "topic"),
    *(place.noun for place in PLACES),
)

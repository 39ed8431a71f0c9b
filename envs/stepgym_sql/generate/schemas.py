"""Twelve schemas of everyday domains. Names within a table must not be mistaken for one another."""

from __future__ import annotations

from stepgym_sql.generate.schema import (
    Schema,
    category,
    date,
    integer,
    label,
    real,
    reference,
    table,
    text,
)

_FIRST = "Ada Ben Cleo Dana Emil Fay Gus Hana Igor Jade Kira Leon Mona Nils Olga Petr Rosa Sven Tara Uwe Vera Yuri Zoe"
_LAST = "Abel Boyd Cruz Dahl Egan Fink Gray Hale Imai Jung Koch Lund Mehta Novak Okoro Park Quinn Rossi Sato Tran Weiss"
_TITLE_A = (
    "Silent Golden Distant Broken Hidden Early Velvet Northern Paper Crystal Wild Amber Hollow Bright Frozen Last"
)
_TITLE_B = (
    "River Harbor Garden Mirror Season Letter Mountain Engine Voyage Island Winter Lantern Bridge Forest Signal Road"
)
_CITIES = "Oslo Lima Porto Cairo Delhi Quito Turin Lagos Kyoto Leeds"
_COUNTRIES = "Norway Peru Egypt India Italy Japan Kenya Chile"
_PRODUCTS = (
    "Velor Brisk Nimbo Tarka Oxana Pluma Quista Rovex Sorel Tindra Umbra Vanto Wexel Xandu Yaro Zephy Corda Delmo"
)
_MAKERS = "Arvo Belka Cenex Dorin Evora Falko Gerro Havel Intra Jovis Kelda Lumex Marno Norvo Orsel Parva"

SCHEMAS: tuple[Schema, ...] = (
    Schema(
        "library",
        (
            table(
                "author/authors",
                "authors writers novelists creators",
                label("name", "name full_name author_name called", _FIRST, _LAST),
                text("country", "country nation homeland", _COUNTRIES, 0.15),
                integer("birth year", "birth_year born year_of_birth", 1900, 1990),
                integer("prizes", "prizes awards prizes_won", 0, 9),
            ),
            table(
                "book/books",
                "books volumes publications works",
                label("title", "title heading book_title", _TITLE_A, _TITLE_B),
                reference("author", "author_id author writer_id"),
                category("genre", "genre style field", "crime/mystery/CR", "poetry/verse/PO", "travel/journeys/TR"),
                integer("pages", "pages page_count leaves", 80, 900),
                real("price", "price cost amount", 5, 60),
                date("publication date", "published published_on issued", 1990, 2024, 0.1),
            ),
            table(
                "loan/loans",
                "loans lendings checkouts borrowings",
                reference("book", "book_id book volume_id"),
                text("borrower", "borrower reader member", _FIRST),
                category("status", "status state condition", "returned/back/RE", "open/out/OP", "overdue/late/OV"),
                integer("days", "days duration length", 1, 60),
                real("fine", "fine penalty charge", 0, 20, 0.3),
                date("loan date", "loaned_on loaned start_date"),
            ),
        ),
    ),
    Schema(
        "shop",
        (
            table(
                "supplier/suppliers",
                "suppliers vendors sellers providers",
                label("name", "name company supplier_name", _MAKERS),
                text("city", "city town location", _CITIES),
                real("rating", "rating score grade", 1, 5),
                integer("employees", "employees staff headcount", 2, 400, 0.15),
            ),
            table(
                "product/products",
                "products goods items articles",
                label("name", "name title product_name", _PRODUCTS),
                reference("supplier", "supplier_id supplier vendor_id"),
                category("category", "category type kind", "toy/game/TY", "tool/gear/TL", "food/grocery/FD"),
                real("price", "price cost amount", 1, 200),
                integer("stock", "stock quantity available", 0, 500),
                real("weight", "weight mass kilos", 1, 40, 0.25),
            ),
            table(
                "sale/sales",
                "sales purchases orders_placed deals",
                reference("product", "product_id product item_id"),
                text("customer", "customer buyer client", _LAST),
                category(
                    "status", "status state progress", "shipped/sent/SH", "waiting/pending/WA", "cancelled/void/CA"
                ),
                integer("units", "units pieces number_sold", 1, 30),
                real("total", "total revenue sum_paid", 5, 900),
                date("sale date", "sold_on sold sale_date"),
            ),
        ),
    ),
    Schema(
        "clinic",
        (
            table(
                "doctor/doctors",
                "doctors physicians medics practitioners",
                label("name", "name full_name doctor_name", _FIRST, _LAST),
                category(
                    "specialty", "specialty department area", "heart/cardiac/HE", "skin/dermal/SK", "eye/optic/EY"
                ),
                real("fee", "fee charge rate", 20, 300),
                integer("experience", "experience years_active service_years", 1, 40),
            ),
            table(
                "patient/patients",
                "patients clients persons cases",
                label("name", "name full_name patient_name", _LAST, _FIRST),
                integer("age", "age years patient_age", 1, 95),
                real("height", "height tallness stature", 90, 205, 0.1),
                text("city", "city town residence", _CITIES),
                text("phone", "phone telephone mobile", "555-0101 555-0102 555-0117 555-0123 555-0148 555-0177", 0.4),
            ),
            table(
                "visit/visits",
                "visits appointments consultations sessions",
                reference("doctor", "doctor_id doctor physician_id"),
                reference("patient", "patient_id patient client_id"),
                category(
                    "reason", "reason purpose cause", "checkup/routine/CH", "pain/ache/PA", "surgery/operation/SU"
                ),
                integer("minutes", "minutes duration length", 5, 120),
                real("bill", "bill invoice amount_due", 20, 1500),
                date("visit date", "visited_on visit_date seen_on"),
            ),
        ),
    ),
    Schema(
        "airline",
        (
            table(
                "aircraft/aircraft",
                "aircraft planes airplanes fleet",
                label("name", "name title aircraft_name", _PRODUCTS),
                category(
                    "engine", "engine propulsion drive", "jet/turbine/JT", "propeller/rotor/PR", "electric/battery/EL"
                ),
                integer("seats", "seats capacity places", 4, 400),
                integer("reach", "reach max_range distance_limit", 400, 15000),
                date("service date", "serviced serviced_on last_service", 2019, 2024, 0.2),
            ),
            table(
                "pilot/pilots",
                "pilots captains aviators flyers",
                label("name", "name full_name pilot_name", _FIRST, _LAST),
                category("rank", "rank grade position", "captain/commander/CP", "officer/mate/OF", "trainee/junior/TR"),
                integer("flight hours", "flight_hours hours hours_flown", 50, 20000),
                integer("age", "age years pilot_age", 21, 65),
            ),
            table(
                "flight/flights",
                "flights trips connections services",
                reference("aircraft", "aircraft_id aircraft plane_id"),
                reference("pilot", "pilot_id pilot captain_id"),
                text("destination", "destination target arrival_city", _CITIES),
                category(
                    "status", "status state situation", "landed/arrived/LA", "delayed/late/DE", "cancelled/dropped/CA"
                ),
                integer("delay", "delay wait minutes_late", 0, 300, 0.3),
                real("fare", "fare ticket_price price", 30, 900),
                date("departure date", "departed departed_on departure_date"),
            ),
        ),
    ),
    Schema(
        "school",
        (
            table(
                "teacher/teachers",
                "teachers instructors tutors lecturers",
                label("name", "name full_name teacher_name", _FIRST, _LAST),
                category(
                    "subject", "subject discipline field", "maths/algebra/MA", "history/past/HI", "music/choir/MU"
                ),
                real("salary", "salary wage pay", 1500, 6000),
                date("hiring date", "hired hired_on employed_since", 1995, 2024),
                integer("absences", "absences sick_days days_missed", 0, 20, 0.15),
            ),
            table(
                "course/courses",
                "courses classes lessons seminars",
                label("title", "title label course_title", _TITLE_B, "One Two Three Four"),
                reference("teacher", "teacher_id teacher tutor_id"),
                category("level", "level stage tier", "basic/starter/BA", "middle/medium/MI", "expert/advanced/EX"),
                integer("credits", "credits points worth", 1, 12),
                integer("places", "places seats capacity", 8, 120),
            ),
            table(
                "enrolment/enrolments",
                "enrolments registrations signups bookings",
                reference("course", "course_id course class_id"),
                text("student", "student pupil learner", _FIRST),
                category("mode", "mode form attendance", "campus/onsite/CA", "online/remote/ON", "evening/night/EV"),
                real("mark", "mark result score", 1, 10, 0.2),
                integer("hours", "hours workload time_spent", 1, 90),
                date("enrolment date", "enrolled enrolled_on signup_date"),
            ),
        ),
    ),
    Schema(
        "music",
        (
            table(
                "band/bands",
                "bands groups ensembles acts",
                label("name", "name title band_name", _TITLE_A, "Wolves Kings Echoes Sparks Owls Tides"),
                category("genre", "genre style sound", "rock/guitar/RO", "jazz/swing/JA", "folk/roots/FO"),
                integer("founding year", "founded founding_year since", 1960, 2022),
                integer("members", "members musicians size", 1, 11),
            ),
            table(
                "album/albums",
                "albums records releases discs",
                label("title", "title label album_title", _TITLE_A, _TITLE_B),
                reference("band", "band_id band group_id"),
                category("format", "format medium carrier", "vinyl/lp/VI", "disc/cd/DI", "stream/digital/ST"),
                integer("tracks", "tracks songs track_count", 5, 22),
                real("price", "price cost amount", 4, 50),
                integer("copies", "copies copies_sold units", 100, 90000, 0.15),
                date("release date", "released released_on release_date", 1990, 2024),
            ),
            table(
                "concert/concerts",
                "concerts shows gigs performances",
                reference("band", "band_id band group_id"),
                text("city", "city town place", _CITIES),
                category("hall", "hall venue stage", "arena/stadium/AR", "club/cellar/CL", "theatre/opera/TH"),
                integer("audience", "audience visitors attendance", 40, 20000),
                real("ticket price", "ticket_price ticket admission", 5, 150, 0.15),
                date("concert date", "played_on concert_date held_on"),
            ),
        ),
    ),
    Schema(
        "hotel",
        (
            table(
                "hotel/hotels",
                "hotels inns lodges houses",
                label("name", "name title hotel_name", _TITLE_A, "Palace Lodge Court Plaza Haven Manor"),
                text("city", "city town location", _CITIES),
                integer("stars", "stars class rating", 1, 5),
                date("opening date", "opened opened_on opening_date", 1950, 2023, 0.15),
            ),
            table(
                "room/rooms",
                "rooms chambers units suites",
                reference("hotel", "hotel_id hotel house_id"),
                category("type", "type kind category", "single/solo/SI", "double/twin/DO", "family/group/FA"),
                real("rate", "rate price nightly", 40, 500),
                integer("size", "size area square_meters", 12, 90),
                integer("floor", "floor storey floor_number", 0, 20, 0.1),
            ),
            table(
                "booking/bookings",
                "bookings reservations stays visits",
                reference("room", "room_id room chamber_id"),
                text("guest", "guest visitor traveller", _LAST),
                category(
                    "state", "state status progress", "confirmed/firm/CO", "waiting/pending/WA", "cancelled/void/CA"
                ),
                integer("nights", "nights duration length", 1, 21),
                real("deposit", "deposit prepaid advance", 10, 400, 0.35),
                date("arrival date", "arrives arrival_date check_in"),
            ),
        ),
    ),
    Schema(
        "league",
        (
            table(
                "team/teams",
                "teams clubs squads sides",
                label("name", "name title team_name", _CITIES, "Lions Comets Hawks Bears"),
                integer("founding year", "founded founding_year since", 1880, 2010),
                real("budget", "budget funds money", 1, 90),
                category(
                    "division", "division tier group_name", "first/premier/D1", "second/middle/D2", "third/lower/D3"
                ),
            ),
            table(
                "player/players",
                "players athletes sportsmen members",
                label("name", "name full_name player_name", _FIRST, _LAST),
                reference("team", "team_id team club_id", 0.1),
                category(
                    "position", "position role post", "keeper/goalie/KE", "defender/back/DE", "striker/forward/ST"
                ),
                integer("goals", "goals scored goal_count", 0, 40),
                real("salary", "salary wage pay", 1, 50),
                date("birth date", "born birth_date born_on", 1985, 2006),
            ),
            table(
                "match/matches",
                "matches fixtures games_played contests",
                reference("team", "team_id host_id home_team"),
                text("referee", "referee umpire official", _LAST),
                category("outcome", "outcome result ending", "won/victory/WO", "lost/defeat/LO", "drawn/tie/DR"),
                integer("spectators", "spectators audience attendance", 200, 60000, 0.15),
                real("income", "income takings revenue", 1, 800),
                date("match date", "played played_on match_date"),
            ),
        ),
    ),
    Schema(
        "museum",
        (
            table(
                "artist/artists",
                "artists painters creators makers",
                label("name", "name full_name artist_name", _FIRST, _LAST),
                category("movement", "movement style school", "modern/new/MO", "classic/old/CL", "abstract/shapes/AB"),
                integer("birth year", "birth_year born year_of_birth", 1700, 1990, 0.15),
                text("country", "country nation homeland", _COUNTRIES),
            ),
            table(
                "artwork/artworks",
                "artworks works pieces objects",
                label("title", "title label heading", _TITLE_A, _TITLE_B),
                reference("artist", "artist_id artist maker_id"),
                category("material", "material medium substance", "oil/paint/OI", "bronze/metal/BR", "wood/timber/WO"),
                real("value", "value worth appraisal", 1, 900),
                integer("width", "width breadth span", 10, 400, 0.2),
                integer("height", "height tallness rise", 10, 400),
                date("purchase date", "bought bought_on acquired", 1950, 2024),
            ),
            table(
                "tour/tours",
                "tours visits excursions walks",
                reference("artwork", "artwork_id artwork piece_id"),
                text("guide", "guide leader host", _FIRST),
                category(
                    "language",
                    "language tongue speech",
                    "English/british/EN",
                    "Spanish/castilian/ES",
                    "French/gallic/FR",
                ),
                integer("visitors", "visitors guests participants", 1, 40),
                real("fee", "fee price charge", 2, 40, 0.2),
                date("tour date", "held_on tour_date given_on"),
            ),
        ),
    ),
    Schema(
        "bank",
        (
            table(
                "branch/branches",
                "branches offices agencies locations",
                label("name", "name title branch_name", _TITLE_A, "Street Square Gate Park"),
                text("city", "city town place", _CITIES),
                integer("clerks", "clerks staff employees", 2, 80),
                real("rent", "rent lease housing_cost", 2, 90, 0.2),
            ),
            table(
                "account/accounts",
                "accounts deposits ledgers portfolios",
                label("owner", "owner holder customer", _LAST, _FIRST),
                reference("branch", "branch_id branch office_id"),
                category("kind", "kind type category", "savings/reserve/SA", "current/daily/CU", "joint/shared/JO"),
                real("balance", "balance amount funds", 1, 9000),
                integer("cards", "cards card_count cards_issued", 0, 6),
                date("opening date", "opened opened_on start_date", 2005, 2024),
            ),
            table(
                "payment/payments",
                "payments transfers transactions movements",
                reference("account", "account_id account ledger_id"),
                category("channel", "channel route method", "web/browser/WE", "phone/call/PH", "desk/counter/DK"),
                real("sum", "sum_paid amount volume", 1, 3000),
                integer("attempts", "attempts tries retries", 1, 5),
                text("note", "note memo remark", "rent food gift fuel books taxes", 0.35),
                date("payment date", "paid paid_on payment_date"),
            ),
        ),
    ),
    Schema(
        "farm",
        (
            table(
                "field/fields",
                "fields plots meadows parcels",
                label("name", "name title field_name", _TITLE_B),
                category("soil", "soil ground earth", "clay/loam/CY", "sand/grit/SA", "peat/bog/PE"),
                real("area", "area size hectares", 1, 60),
                text("tenant", "tenant lessee renter", _LAST, 0.15),
                integer("wells", "wells pumps springs", 0, 8, 0.15),
            ),
            table(
                "harvest/harvests",
                "harvests yields crops reapings",
                reference("field", "field_id field plot_id"),
                category("crop", "crop plant produce", "wheat/grain/WH", "potato/tuber/PT", "apple/fruit/AP"),
                real("tonnes", "tonnes weight yield_tonnes", 1, 90),
                integer("workers", "workers helpers hands", 1, 25),
                real("earnings", "earnings revenue income", 10, 900, 0.2),
                date("harvest date", "harvested harvested_on harvest_date"),
            ),
            table(
                "machine/machines",
                "machines vehicles devices equipment",
                label("name", "name title machine_name", _PRODUCTS),
                reference("field", "field_id field plot_id", 0.15),
                category(
                    "fuel", "fuel energy propellant", "diesel/oil/DI", "petrol/gasoline/PE", "electric/battery/EL"
                ),
                integer("horsepower", "horsepower strength hp", 10, 500),
                real("price", "price cost amount", 1, 200),
                date("repair date", "repaired repaired_on last_repair", 2015, 2024, 0.2),
            ),
        ),
    ),
    Schema(
        "freight",
        (
            table(
                "depot/depots",
                "depots warehouses yards terminals",
                label("name", "name title depot_name", _CITIES, "East West North South"),
                integer("docks", "docks gates bays", 1, 40),
                real("area", "area size surface", 1, 90),
                text("manager", "manager head chief", _LAST, 0.15),
            ),
            table(
                "truck/trucks",
                "trucks lorries vehicles haulers",
                label("name", "name title truck_name", _MAKERS, "One Two Three"),
                reference("depot", "depot_id depot yard_id"),
                category("body", "body build shape", "tank/cistern/TA", "box/container/BO", "flat/platform/FL"),
                integer("axles", "axles axle_count wheelsets", 2, 9),
                real("load", "load payload tonnage", 2, 40),
                date("inspection date", "inspected inspected_on last_check", 2018, 2024, 0.2),
            ),
            table(
                "delivery/deliveries",
                "deliveries shipments transports hauls",
                reference("truck", "truck_id truck lorry_id"),
                text("city", "city town destination", _CITIES),
                category(
                    "status", "status state progress", "delivered/arrived/DL", "moving/rolling/MV", "lost/missing/LT"
                ),
                integer("distance", "distance kilometers route_length", 5, 2500),
                real("weight", "weight mass tonnes", 1, 39),
                date("delivery date", "delivered_on due delivery_date", 2018, 2024),
            ),
        ),
    ),
)

SCHEMA_NAMES: tuple[str, ...] = tuple(schema.name for schema in SCHEMAS)
SCHEMA_BY_NAME: dict[str, Schema] = {schema.name: schema for schema in SCHEMAS}

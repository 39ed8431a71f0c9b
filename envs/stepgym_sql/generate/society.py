"""Schemas of learning, health and leisure. Names within a table must not be mistaken for one another."""

from __future__ import annotations

from stepgym_sql.generate.schema import Schema, category, date, integer, label, real, reference, table, text
from stepgym_sql.generate.words import CITIES, COUNTRIES, FIRST, LAST, TITLE_A, TITLE_B

LIBRARY = Schema(
    "library",
    (
        table(
            "author/authors",
            "authors writers novelists creators",
            label("name", "name full_name author_name called", FIRST, LAST),
            text("country", "country nation homeland", COUNTRIES, 0.15),
            integer("birth year", "birth_year born year_of_birth", 1900, 1990),
            integer("prizes", "prizes awards prizes_won", 0, 9),
        ),
        table(
            "book/books",
            "books volumes publications works",
            label("title", "title heading book_title", TITLE_A, TITLE_B),
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
            text("borrower", "borrower reader member", FIRST),
            category("status", "status state condition", "returned/back/RE", "open/out/OP", "overdue/late/OV"),
            integer("days", "days duration length", 1, 60),
            real("fine", "fine penalty charge", 0, 20, 0.3),
            date("loan date", "loaned_on loaned start_date"),
        ),
    ),
)


CLINIC = Schema(
    "clinic",
    (
        table(
            "doctor/doctors",
            "doctors physicians medics practitioners",
            label("name", "name full_name doctor_name", FIRST, LAST),
            category("specialty", "specialty department area", "heart/cardiac/HE", "skin/dermal/SK", "eye/optic/EY"),
            real("fee", "fee charge rate", 20, 300),
            integer("experience", "experience years_active service_years", 1, 40),
        ),
        table(
            "patient/patients",
            "patients clients persons cases",
            label("name", "name full_name patient_name", LAST, FIRST),
            integer("age", "age years patient_age", 1, 95),
            real("height", "height tallness stature", 90, 205, 0.1),
            text("city", "city town residence", CITIES),
            text("phone", "phone telephone mobile", "555-0101 555-0102 555-0117 555-0123 555-0148 555-0177", 0.4),
        ),
        table(
            "visit/visits",
            "visits appointments consultations sessions",
            reference("doctor", "doctor_id doctor physician_id"),
            reference("patient", "patient_id patient client_id"),
            category("reason", "reason purpose cause", "checkup/routine/CH", "pain/ache/PA", "surgery/operation/SU"),
            integer("minutes", "minutes duration length", 5, 120),
            real("bill", "bill invoice amount_due", 20, 1500),
            date("visit date", "visited_on visit_date seen_on"),
        ),
    ),
)


SCHOOL = Schema(
    "school",
    (
        table(
            "teacher/teachers",
            "teachers instructors tutors lecturers",
            label("name", "name full_name teacher_name", FIRST, LAST),
            category("subject", "subject discipline field", "maths/algebra/MA", "history/past/HI", "music/choir/MU"),
            real("salary", "salary wage pay", 1500, 6000),
            date("hiring date", "hired hired_on employed_since", 1995, 2024),
            integer("absences", "absences sick_days days_missed", 0, 20, 0.15),
        ),
        table(
            "course/courses",
            "courses classes lessons seminars",
            label("title", "title label course_title", TITLE_B, "One Two Three Four"),
            reference("teacher", "teacher_id teacher tutor_id"),
            category("level", "level stage tier", "basic/starter/BA", "middle/medium/MI", "expert/advanced/EX"),
            integer("credits", "credits points worth", 1, 12),
            integer("places", "places seats capacity", 8, 120),
        ),
        table(
            "enrolment/enrolments",
            "enrolments registrations signups bookings",
            reference("course", "course_id course class_id"),
            text("student", "student pupil learner", FIRST),
            category("mode", "mode form attendance", "campus/onsite/CA", "online/remote/ON", "evening/night/EV"),
            real("mark", "mark result score", 1, 10, 0.2),
            integer("hours", "hours workload time_spent", 1, 90),
            date("enrolment date", "enrolled enrolled_on signup_date"),
        ),
    ),
)


MUSIC = Schema(
    "music",
    (
        table(
            "band/bands",
            "bands groups ensembles acts",
            label("name", "name title band_name", TITLE_A, "Wolves Kings Echoes Sparks Owls Tides"),
            category("genre", "genre style sound", "rock/guitar/RO", "jazz/swing/JA", "folk/roots/FO"),
            integer("founding year", "founded founding_year since", 1960, 2022),
            integer("members", "members musicians size", 1, 11),
        ),
        table(
            "album/albums",
            "albums records releases discs",
            label("title", "title label album_title", TITLE_A, TITLE_B),
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
            text("city", "city town place", CITIES),
            category("hall", "hall venue stage", "arena/stadium/AR", "club/cellar/CL", "theatre/opera/TH"),
            integer("audience", "audience visitors attendance", 40, 20000),
            real("ticket price", "ticket_price ticket admission", 5, 150, 0.15),
            date("concert date", "played_on concert_date held_on"),
        ),
    ),
)


LEAGUE = Schema(
    "league",
    (
        table(
            "team/teams",
            "teams clubs squads sides",
            label("name", "name title team_name", CITIES, "Lions Comets Hawks Bears"),
            integer("founding year", "founded founding_year since", 1880, 2010),
            real("budget", "budget funds money", 1, 90),
            category("division", "division tier group_name", "first/premier/D1", "second/middle/D2", "third/lower/D3"),
        ),
        table(
            "player/players",
            "players athletes sportsmen members",
            label("name", "name full_name player_name", FIRST, LAST),
            reference("team", "team_id team club_id", 0.1),
            category("position", "position role post", "keeper/goalie/KE", "defender/back/DE", "striker/forward/ST"),
            integer("goals", "goals scored goal_count", 0, 40),
            real("salary", "salary wage pay", 1, 50),
            date("birth date", "born birth_date born_on", 1985, 2006),
        ),
        table(
            "match/matches",
            "matches fixtures games_played contests",
            reference("team", "team_id host_id home_team"),
            text("referee", "referee umpire official", LAST),
            category("outcome", "outcome result ending", "won/victory/WO", "lost/defeat/LO", "drawn/tie/DR"),
            integer("spectators", "spectators audience attendance", 200, 60000, 0.15),
            real("income", "income takings revenue", 1, 800),
            date("match date", "played played_on match_date"),
        ),
    ),
)


MUSEUM = Schema(
    "museum",
    (
        table(
            "artist/artists",
            "artists painters creators makers",
            label("name", "name full_name artist_name", FIRST, LAST),
            category("movement", "movement style school", "modern/new/MO", "classic/old/CL", "abstract/shapes/AB"),
            integer("birth year", "birth_year born year_of_birth", 1700, 1990, 0.15),
            text("country", "country nation homeland", COUNTRIES),
        ),
        table(
            "artwork/artworks",
            "artworks works pieces objects",
            label("title", "title label heading", TITLE_A, TITLE_B),
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
            text("guide", "guide leader host", FIRST),
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
)

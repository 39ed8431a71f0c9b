"""Schemas of trade and transport. Names within a table must not be mistaken for one another."""

from __future__ import annotations

from stepgym_sql.generate.schema import Schema, category, date, integer, label, real, reference, table, text
from stepgym_sql.generate.words import CITIES, FIRST, LAST, MAKERS, PRODUCTS, TITLE_A, TITLE_B

SHOP = Schema(
    "shop",
    (
        table(
            "supplier/suppliers",
            "suppliers vendors sellers providers",
            label("name", "name company supplier_name", MAKERS),
            text("city", "city town location", CITIES),
            real("rating", "rating score grade", 1, 5),
            integer("employees", "employees staff headcount", 2, 400, 0.15),
        ),
        table(
            "product/products",
            "products goods items articles",
            label("name", "name title product_name", PRODUCTS),
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
            text("customer", "customer buyer client", LAST),
            category("status", "status state progress", "shipped/sent/SH", "waiting/pending/WA", "cancelled/void/CA"),
            integer("units", "units pieces number_sold", 1, 30),
            real("total", "total revenue sum_paid", 5, 900),
            date("sale date", "sold_on sold sale_date"),
        ),
    ),
)


AIRLINE = Schema(
    "airline",
    (
        table(
            "aircraft/aircraft",
            "aircraft planes airplanes fleet",
            label("name", "name title aircraft_name", PRODUCTS),
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
            label("name", "name full_name pilot_name", FIRST, LAST),
            category("rank", "rank grade position", "captain/commander/CP", "officer/mate/OF", "trainee/junior/TR"),
            integer("flight hours", "flight_hours hours hours_flown", 50, 20000),
            integer("age", "age years pilot_age", 21, 65),
        ),
        table(
            "flight/flights",
            "flights trips connections services",
            reference("aircraft", "aircraft_id aircraft plane_id"),
            reference("pilot", "pilot_id pilot captain_id"),
            text("destination", "destination target arrival_city", CITIES),
            category(
                "status", "status state situation", "landed/arrived/LA", "delayed/late/DE", "cancelled/dropped/CA"
            ),
            integer("delay", "delay wait minutes_late", 0, 300, 0.3),
            real("fare", "fare ticket_price price", 30, 900),
            date("departure date", "departed departed_on departure_date"),
        ),
    ),
)


HOTEL = Schema(
    "hotel",
    (
        table(
            "hotel/hotels",
            "hotels inns lodges houses",
            label("name", "name title hotel_name", TITLE_A, "Palace Lodge Court Plaza Haven Manor"),
            text("city", "city town location", CITIES),
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
            text("guest", "guest visitor traveller", LAST),
            category("state", "state status progress", "confirmed/firm/CO", "waiting/pending/WA", "cancelled/void/CA"),
            integer("nights", "nights duration length", 1, 21),
            real("deposit", "deposit prepaid advance", 10, 400, 0.35),
            date("arrival date", "arrives arrival_date check_in"),
        ),
    ),
)


BANK = Schema(
    "bank",
    (
        table(
            "branch/branches",
            "branches offices agencies locations",
            label("name", "name title branch_name", TITLE_A, "Street Square Gate Park"),
            text("city", "city town place", CITIES),
            integer("clerks", "clerks staff employees", 2, 80),
            real("rent", "rent lease housing_cost", 2, 90, 0.2),
        ),
        table(
            "account/accounts",
            "accounts deposits ledgers portfolios",
            label("owner", "owner holder customer", LAST, FIRST),
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
)


FARM = Schema(
    "farm",
    (
        table(
            "field/fields",
            "fields plots meadows parcels",
            label("name", "name title field_name", TITLE_B),
            category("soil", "soil ground earth", "clay/loam/CY", "sand/grit/SA", "peat/bog/PE"),
            real("area", "area size hectares", 1, 60),
            text("tenant", "tenant lessee renter", LAST, 0.15),
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
            label("name", "name title machine_name", PRODUCTS),
            reference("field", "field_id field plot_id", 0.15),
            category("fuel", "fuel energy propellant", "diesel/oil/DI", "petrol/gasoline/PE", "electric/battery/EL"),
            integer("horsepower", "horsepower strength hp", 10, 500),
            real("price", "price cost amount", 1, 200),
            date("repair date", "repaired repaired_on last_repair", 2015, 2024, 0.2),
        ),
    ),
)


FREIGHT = Schema(
    "freight",
    (
        table(
            "depot/depots",
            "depots warehouses yards terminals",
            label("name", "name title depot_name", CITIES, "East West North South"),
            integer("docks", "docks gates bays", 1, 40),
            real("area", "area size surface", 1, 90),
            text("manager", "manager head chief", LAST, 0.15),
        ),
        table(
            "truck/trucks",
            "trucks lorries vehicles haulers",
            label("name", "name title truck_name", MAKERS, "One Two Three"),
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
            text("city", "city town destination", CITIES),
            category("status", "status state progress", "delivered/arrived/DL", "moving/rolling/MV", "lost/missing/LT"),
            integer("distance", "distance kilometers route_length", 5, 2500),
            real("weight", "weight mass tonnes", 1, 39),
            date("delivery date", "delivered_on due delivery_date", 2018, 2024),
        ),
    ),
)

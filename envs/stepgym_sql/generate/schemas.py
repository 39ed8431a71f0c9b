"""The schemas that there are: twelve everyday domains."""

from __future__ import annotations

from stepgym_sql.generate.schema import Schema
from stepgym_sql.generate.society import CLINIC, LEAGUE, LIBRARY, MUSEUM, MUSIC, SCHOOL
from stepgym_sql.generate.trade import AIRLINE, BANK, FARM, FREIGHT, HOTEL, SHOP

SCHEMAS: tuple[Schema, ...] = (
    LIBRARY,
    SHOP,
    CLINIC,
    AIRLINE,
    SCHOOL,
    MUSIC,
    HOTEL,
    LEAGUE,
    MUSEUM,
    BANK,
    FARM,
    FREIGHT,
)

SCHEMA_NAMES: tuple[str, ...] = tuple(schema.name for schema in SCHEMAS)
SCHEMA_BY_NAME: dict[str, Schema] = {schema.name: schema for schema in SCHEMAS}

"""The SQL environment: questions over SQLite databases, answered with several queries (`stepgym/sql-v0`)."""

"""A seeded generator of databases and questions: unlimited tasks, offline."""

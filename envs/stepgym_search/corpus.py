"""A corpus of passages: a file of JSON lines, `{"id", "contents"}`, read where it lies."""

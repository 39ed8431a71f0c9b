"""Attention over prefix forests, each way a kernel that `transformers` calls by name."""

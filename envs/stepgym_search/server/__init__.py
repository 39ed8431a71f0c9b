"""A retrieval server: any retriever behind Search-R1's `/retrieve`."""

"""The search environment: questions answered by searching a corpus, as in Search-R1 (`stepgym/search-v0`)."""

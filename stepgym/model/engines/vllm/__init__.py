"""vLLM servers that stepgym starts, supervises and gives new weights to."""

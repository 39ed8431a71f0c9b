"""stepgym: an agent-environment gym for language models."""

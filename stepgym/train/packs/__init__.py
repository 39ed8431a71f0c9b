"""From steps to what one forward pass computes: trained tokens, prefix forests, and their cutting to a token budget."""

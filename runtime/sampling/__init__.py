"""How the next token is chosen: what a request may ask (params), what the sampling kernel is told (sampler),
grammars, log probabilities, and beam search."""

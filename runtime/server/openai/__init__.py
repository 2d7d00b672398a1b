"""OpenAI's HTTP API: what bodies hold, what becomes of them, and the form of answers and errors."""

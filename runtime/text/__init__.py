"""Between text and token ids: tokenizer and chat template, detokenizer, stop strings, tokens for display."""

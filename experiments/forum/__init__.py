"""One script for each claim of a discussion about quantized arithmetic: what was said, and what the bits say."""

"""A pretrained language model, from the GGUF file that people publish: `python -m experiments.pretrained`."""

"""A conversion on a model that is always there, and the proof that stock transformers loads it."""

"""Classes of converted models: a stock transformers class where one fits, the project's own otherwise."""

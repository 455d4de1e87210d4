"""What a converted model is written as: a stock transformers class where one fits, the project's own otherwise."""

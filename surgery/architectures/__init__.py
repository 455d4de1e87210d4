"""Target architectures of conversions: a stock transformers class where possible, else the custom model class."""

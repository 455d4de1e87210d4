"""Conversion reports and the model cards that are made from them."""

"""The record of a conversion and the model card made from it."""

"""Conversion targets: a folder for each, and the order of events that all conversions share."""

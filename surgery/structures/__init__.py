"""Conversion targets, a folder for each, and the steps that all conversions share."""

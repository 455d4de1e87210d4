"""Output of the commands: tables for people, one JSON object for machines."""

"""Tables that render to terminals and Markdown."""

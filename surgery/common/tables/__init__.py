"""Tables that render to terminals, HTML pages, Markdown and CSV files."""

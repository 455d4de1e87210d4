"""Tables, described once and rendered for terminals, pages, Markdown and CSV files."""

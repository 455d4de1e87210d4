"""What an evaluation will run, read and hold, before it runs."""

"""What a run tells: while it runs, and after it."""

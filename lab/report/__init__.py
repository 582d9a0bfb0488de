"""What a run leaves: `result.json`, figures, the table of claims."""

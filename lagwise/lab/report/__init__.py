"""What is shown of runs: tables, verdicts and pages."""

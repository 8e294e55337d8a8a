"""The laboratory: tasks, training, comparison, reports and measurements of speed, on the library."""

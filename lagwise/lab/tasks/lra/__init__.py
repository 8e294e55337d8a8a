"""Long-Range Arena."""

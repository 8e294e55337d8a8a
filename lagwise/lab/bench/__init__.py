"""Speed and memory of attention with encodings, beside what people run without us, measured in the same run."""

"""Language: sentences, questions, translation and language models."""

"""What a tiny draft learns from: texts that the target writes itself, with what it computed on the way."""

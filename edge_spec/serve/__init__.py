"""The OpenAI-compatible HTTP server (extra ``[serve]``)."""

"""Asking a member one question: limits, retries, quirks, what it costs."""

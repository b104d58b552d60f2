"""Requests to other programs, whose answers are not believed and not waited for without end.

sockets     connections, TLS over them, and reading, each before a deadline
http        one request of HTTP with one deadline and bounded sizes
documents   JSON, and values of it with checked types

All requests to other programs go through these: a peer that sends one byte a second, answers
without end, or means something else than was asked costs the one request, and ends in one of
OSError, BadAnswer or ShmqError.
"""

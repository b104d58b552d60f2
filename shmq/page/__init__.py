"""The page: what waits, who holds it, what failed, for people with a browser.

It reads the segments and nothing else, so it needs no supervisor and costs the broker nothing.
"""

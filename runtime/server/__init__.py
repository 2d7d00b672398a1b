"""`pagec serve`: a front process for people's requests, and an engine process that only knows tokens.

    front    site -> app (HTTP), grpc -> service -> generation -> client
    engine   worker -> Engine, grammars; report

Between them go the messages of messages.py.
"""

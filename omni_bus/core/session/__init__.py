"""One live conversation: what a client and the models say goes in with the time, effects come out.

`core.SessionCore` is the door; `client_events`, `server_events` and `effects` are its words. Nothing here knows a
socket, a clock or a pipeline, and the same inputs give the same outputs.
"""

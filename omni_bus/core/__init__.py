"""The thinking of every actor, without sockets, loops or clocks: frames and time in, effects out."""

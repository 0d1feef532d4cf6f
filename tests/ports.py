"""A port for a server that is told its port."""

import random
import socket


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses at the moment, and that the kernel gives to nobody by itself.

    One out of those that it does give (from 32768 on) could be somebody's in the next moment.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port

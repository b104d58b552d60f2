"""nsqd's front door: its TCP and HTTP protocols, for clients that are not on shared memory.

A gateway process is a client of the broker like any other: it publishes and takes for its
connections. If it dies its connections end, what it had in flight goes back to its channels at
once, and the supervisor starts another.

    protocol    bytes of the TCP protocol: frames, numbers, texts; knows no state
    session     one client's state machine: bytes in, bytes out, no socket, no clock
    layers      TLS, snappy and deflate under a session
    hub         what the connections of a process share: producers, who waits for which channel
    tcp         sockets and timers around sessions
    http        nsqd's HTTP interface
    lookupd, statsd, auth    those whom nsqd talks to
    control     how the processes of one instance ask each other
    worker      a gateway process
"""
